"""Real executors and gateways, a tenant's work in every mode, and what each party recorded of it."""
