"""The options of a session, and how it is opened."""
