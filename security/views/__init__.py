"""The data of each adversary: recordings turned into views, and the base model."""
