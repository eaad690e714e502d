"""The auditor's side: what a provider can learn, measured. So far the threat model, THREAT_MODEL.md."""
