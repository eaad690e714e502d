"""The identity of the other end, and a check of its manifest against a tenant's own checkpoint."""
