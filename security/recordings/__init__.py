"""Real executors and gateways, a tenant's work in every mode, and each party's recording of it."""
