"""What a session is given, and how it is opened."""
