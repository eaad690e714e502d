"""What an executor's URL says."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from shared.errors import ConfigurationError
from shared.transport import SCHEME

if TYPE_CHECKING:
    from shared.transport.endpoint import Endpoint

DEFAULT_PORT = 8765
LOCAL = "local:"  # in front of a checkpoint folder, in place of a mask source's URL


def url_of(where: str | Endpoint) -> str:
    """What to call an executor."""
    return where if isinstance(where, str) else where.url


def over_tls(where: str | Endpoint) -> bool:
    """Whether an executor is reached by TLS; else it is on this machine."""
    return isinstance(where, str) and not where.startswith(SCHEME)


def split_url(url: str) -> tuple[str, int]:
    """Host and port of a ``wss://`` URL.

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
