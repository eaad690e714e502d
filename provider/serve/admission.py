"""Who gets a session over any transport, and in which words others are refused one."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

from provider.observe.metrics import Reason
from provider.serve.descriptors import explained, none_left
from provider.serve.tokens import ExpiredToken, TokenFile, sha256_of
from shared.errors import ConfigurationError
from shared.wire.header import SUBPROTOCOL
from shared.wire.messages import ErrorInfo

log = logging.getLogger(__name__)

FULL_RETRY_SECONDS = 5.0  # after which a connection may be free
_CODES = {"expired": "unauthorized", "full": "overloaded", "tenant_full": "overloaded"}


class Identity(NamedTuple):
    """The tenant that a token let in; ``token`` is the token's SHA-256."""

    tenant: str
    token: str


class Refused(Exception):
    """A peer gets no session.

    Args:
        reason: for metrics and the log.
        message: for the peer; empty: it gets none.
        why: more for the log; default: the tenant.
        tenant: whose session it would be, if that is known.
    """

    def __init__(self, reason: Reason, message: str = "", why: str = "", tenant: str = "") -> None:
        super().__init__(reason)
        self.reason, self.message, self.why, self.tenant = reason, message, why or tenant, tenant

    @property
    def info(self) -> ErrorInfo:
        """The message for the peer."""
        code = _CODES.get(self.reason, self.reason)
        return ErrorInfo(code, self.message, FULL_RETRY_SECONDS if code == "overloaded" else None)


def check_version(offered: Iterable[str]) -> None:
    """Refuse a peer that does not offer this version of the protocol; this check is the first."""
    if SUBPROTOCOL not in offered:
        message = f"this executor speaks {SUBPROTOCOL}; install a matching version"
        raise Refused("protocol_version", message)


def identify(token: str | None, tokens: TokenFile) -> Identity:
    """Returns the tenant whose token it is; None: the peer has no token.

    Raises:
        Refused: it is nobody's, or the executor cannot check it.
    """
    try:
        tenant = None if token is None else tokens.tenant_of(token)
    except ConfigurationError as error:
        if none_left(error):
            raise refusal(error) from error
        message = "the executor cannot check tokens; report it to the provider"
        raise Refused("internal", message, f"cannot check tokens: {error}") from error
    except ExpiredToken as error:
        raise Refused("expired", error.message, tenant=error.tenant) from error
    if token is None or tenant is None:
        message = "missing or unknown bearer token; ask the provider for a token of yours"
        raise Refused("unauthorized", message)
    return Identity(tenant, sha256_of(token))


def refusal(error: Exception) -> Refused:
    """Returns the refusal of a peer for which this error occurred; logs a fault of the executor."""
    if isinstance(error, Refused):
        return error
    if none_left(error):
        message = "the executor has no room for another session; try again later"
        return Refused("overloaded", message, explained(error))
    log.error("a session could not be opened", exc_info=error)
    return Refused("internal", "the executor failed to open a session; report it")
