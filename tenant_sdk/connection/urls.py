"""The parts of an executor's URL."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from shared.errors import ConfigurationError
from shared.transport import SCHEME
from shared.transport.endpoint import Endpoint

Party = str | Endpoint | Sequence[str | Endpoint]  # one executor, or replicas that one operator runs
DEFAULT_PORT = 8765
LOCAL = "local:"  # in front of a checkpoint folder, in place of a mask source's URL


_NEXT_URL = re.compile(r"\s*,\s*(?=[a-z]+://)")  # a folder's name may have commas, too


def replicas_of(party: Party) -> tuple[str | Endpoint, ...]:
    """Returns the executors of one party: one, a list of them, or URLs with commas in between."""
    if isinstance(party, str):
        return tuple(_NEXT_URL.split(party))
    return tuple(party) if isinstance(party, Sequence) else (party,)


def is_local(party: Party) -> bool:
    """Returns whether a mask source is a checkpoint's folder on this machine."""
    return isinstance(party, str) and party.startswith(LOCAL)


def party_name(party: Party) -> str:
    """Returns a name for all executors of one party together."""
    return " or ".join(map(url_of, replicas_of(party)))


def url_of(where: str | Endpoint) -> str:
    """Returns the URL of an executor, as messages name it."""
    return where if isinstance(where, str) else where.url


def over_tls(where: str | Endpoint) -> bool:
    """Returns whether an executor is reached by TLS; else it is on this machine."""
    return isinstance(where, str) and not where.startswith(SCHEME)


def split_url(url: str) -> tuple[str, int]:
    """Returns host and port of a ``wss://`` URL.

    Raises:
        ConfigurationError: another scheme (``ws://`` would send everything in the clear) or no host.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError as error:
        raise ConfigurationError(f"{url}: {error}") from error
    if parts.scheme == "ws":
        raise ConfigurationError(
            f"{url}: plain ws:// is refused, everything would travel in the clear; use wss://"
        )
    if parts.scheme != "wss" or not host:
        raise ConfigurationError(
            f"{url!r} is not an executor's URL; it looks like wss://host:{DEFAULT_PORT}, or "
            "ipc:///directory for one on this machine"
        )
    return host, port
