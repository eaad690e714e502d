"""Where a party's executors are: a replica is each URL, or each of several addresses of its host name."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING, NamedTuple

from tenant_sdk.connection.clock import CLOCK, Clock
from tenant_sdk.connection.urls import over_tls, split_url, url_of

if TYPE_CHECKING:
    from shared.transport.endpoint import Endpoint

MAX_ADDRESSES = 32  # of one name: whose operator answers with thousands shall not keep a tenant busy
RESOLVE_SECONDS = 5.0  # between two times that a name is looked up


class Address(NamedTuple):
    """The address of a replica. ``ip``: one of several of the host name; empty: any that the URL leads to."""

    target: str | Endpoint
    ip: str = ""

    def __str__(self) -> str:
        return f"{url_of(self.target)} ({self.ip})" if self.ip else url_of(self.target)


class Resolver:
    """Finds the addresses of one party's replicas.

    Args:
        targets: its URLs, or executors in this process.
        clock: tells when names were looked up.
    """

    def __init__(self, targets: Sequence[str | Endpoint], clock: Clock = CLOCK) -> None:
        self._targets, self._clock = targets, clock
        self._found: dict[str, list[str]] = {}  # addresses of a URL's name
        self._looked_up = float("-inf")

    def resolve(self) -> list[Address]:
        """Returns the addresses that there are now. A name is looked up again, but not all the time."""
        now = self._clock.now()
        if now - self._looked_up > RESOLVE_SECONDS:
            for target in self._targets:
                if isinstance(target, str) and over_tls(target):
                    # Without an answer the last one holds; if there was none, connecting says what is wrong.
                    with suppress(OSError, UnicodeError):
                        self._found[target] = addresses_of(target)
            self._looked_up = now
        return [
            Address(target, ip)
            for target in self._targets
            for ip in (self._found.get(target, []) if isinstance(target, str) else []) or [""]
        ]


def addresses_of(url: str) -> list[str]:
    """Returns the addresses of a URL's host name that are replicas; none: it has one address, or is one.

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
    found = dict(list(found.items())[:MAX_ADDRESSES])
    return list(found) if max(Counter(found.values()).values(), default=0) > 1 else []
