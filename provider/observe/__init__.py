"""What an executor tells its operator, and an auditor."""
