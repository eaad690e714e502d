"""A tenant's session over any transport: requests in, answers out."""
