"""Where a party's executors are: a replica is each URL, or each of several addresses of its host name."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING, NamedTuple

from tenant_sdk.connection.urls import over_tls, split_url, url_of

if TYPE_CHECKING:
    from shared.transport.endpoint import Endpoint

MOST_ADDRESSES = 32  # of one name: whose operator answers with thousands shall not keep a tenant busy
LOOK_UP_SECONDS = 5.0  # between two times that a name is looked up


class Place(NamedTuple):
    """One replica. ``address``: of several that the host name has; empty: whatever the URL leads to."""

    where: str | Endpoint
    address: str = ""

    def __str__(self) -> str:
        return f"{url_of(self.where)} ({self.address})" if self.address else url_of(self.where)


class Places:
    """The replicas of one party.

    Args:
        wheres: its URLs, or executors in this process.
    """

    def __init__(self, wheres: Sequence[str | Endpoint]) -> None:
        self._wheres = wheres
        self._found: dict[str, list[str]] = {}  # addresses of a URL's name
        self._looked_up = float("-inf")

    def find(self) -> list[Place]:
        """All that there are now; a name is looked up again, but not all the time."""
        now = time.monotonic()
        if now - self._looked_up > LOOK_UP_SECONDS:
            for where in self._wheres:
                if isinstance(where, str) and over_tls(where):
                    # Without an answer the last one holds; if there was none, connecting says what is wrong.
                    with suppress(OSError, UnicodeError):
                        self._found[where] = addresses(where)
            self._looked_up = now
        return [
            Place(where, address)
            for where in self._wheres
            for address in (self._found.get(where, []) if isinstance(where, str) else []) or [""]
        ]


def addresses(url: str) -> list[str]:
    """The addresses of a URL's host name that are replicas; none: it has one address, or is one.

    One address of each family is usually one machine, which is connected to by whichever way works.

    Raises:
        OSError, UnicodeError: the name cannot be resolved.
    """
    host, port = split_url(url)
    with suppress(ValueError):
        ip_address(host.partition("%")[0])
        return []
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    found = {str(address[0]): family for family, _, _, _, address in entries}  # in order, each once
    found = dict(list(found.items())[:MOST_ADDRESSES])
    return list(found) if max(Counter(found.values()).values(), default=0) > 1 else []
