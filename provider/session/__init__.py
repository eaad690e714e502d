"""A tenant's session, whatever carries it: requests in, answers out."""
