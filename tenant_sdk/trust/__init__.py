"""Who is on the other end, and what a tenant's own checkpoint says of what they list."""
