"""What a tenant makes of an executor's refusal to open a session, over any transport."""

from __future__ import annotations

from shared.errors import (
    AuthenticationError,
    ConnectError,
    ProtocolVersionError,
    SymbiosisError,
    peer_seconds,
    peer_text,
)
from shared.wire.header import SUBPROTOCOL
from shared.wire.messages import ErrorInfo


def session_refused(url: str, info: ErrorInfo) -> SymbiosisError:
    """The error for who wanted a session at ``url``."""
    message = peer_text(info.message)
    if info.code == "unauthorized":
        why = message.partition(";")[0] or info.code  # its advice takes it for the provider
        return AuthenticationError(f"{url} refused the token: {why}; ask its operator for a new one")
    if info.code == "protocol_version":
        return ProtocolVersionError(f"{url}: {message}; this tenant speaks {SUBPROTOCOL}")
    return ConnectError(f"{url} opened no session: {message}", retry_after=peer_seconds(info.retry_after))
