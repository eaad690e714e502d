"""The auditor: attacks on what a provider or a mask source sees, and the claims that they try to refute."""
