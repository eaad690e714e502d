"""Which rows are multiplied next, and with whom."""
