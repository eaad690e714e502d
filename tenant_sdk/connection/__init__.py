"""One executor as the rest of the SDK sees it, and the code that connects to it."""
