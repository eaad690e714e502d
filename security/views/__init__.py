"""What each adversary has: recordings turned into views, and the base model."""
