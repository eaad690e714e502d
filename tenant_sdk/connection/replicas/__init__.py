"""The executors of one party: their addresses, the choice of the next one, and lost requests."""
