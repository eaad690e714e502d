"""Records of an executor for its operator, and for an auditor."""
