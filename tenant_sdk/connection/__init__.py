"""One executor as the rest of the SDK sees it, and what leads there."""
