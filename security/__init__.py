"""The auditor's side: what a provider can learn, measured. So far its threat model (THREAT_MODEL.md)."""
