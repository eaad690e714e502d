"""Names and addresses of hosts."""

from __future__ import annotations

LOOPBACK = ("localhost", "127.0.0.1", "::1")  # this machine


def in_url(host: str) -> str:
    """Returns a host as URLs have it: addresses of IPv6 stand in brackets."""
    return f"[{host}]" if ":" in host else host
