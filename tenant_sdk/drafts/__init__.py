"""Drafts: a small network on the tenant's machine guesses tokens, several of which a pass checks."""
