"""What carries sessions: TLS, this machine, this process; who is let in."""
