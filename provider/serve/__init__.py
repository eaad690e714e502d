"""Transports of sessions (TLS, this machine, this process), and admission."""
