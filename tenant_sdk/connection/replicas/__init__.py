"""The executors of one party: where they are, which one is next, and what becomes of what was lost."""
