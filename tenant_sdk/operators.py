"""Who is on the other end: provider and mask sources must not be the same operator."""

from __future__ import annotations

import ipaddress
import ssl
import threading
from collections.abc import Hashable
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from shared.errors import ConfigurationError
from tenant_sdk.connect import split_url


class Identity(NamedTuple):
    """What tells operators apart, as far as a tenant can see."""

    host: str
    address: str
    key: bytes  # of the certificate
    here: bool  # it is on this machine


class Operators:
    """Remembers who answered under which URL, and refuses two that are one.

    It notices mistakes, not operators that hide behind two names: that two are independent is for the
    tenant to know.

    Args:
        allow_same: only note it.
    """

    def __init__(self, *, allow_same: bool) -> None:
        self._allow_same = allow_same
        self._known: dict[Hashable, tuple[str, Identity]] = {}
        self._lock = threading.Lock()
        self.same = ""  # what was found, in words

    def meet(self, url: str, sock: ssl.SSLSocket | None, party: Hashable = None) -> None:
        """Compare a new connection with those of other parties; at every connection, also a later one.

        Args:
            url: under which it was reached.
            sock: the connection, after TLS; None: the executor is on this machine, without TLS.
            party: which provider or mask source it is; default: what the URL says, so that two under
                one URL are one.

        Raises:
            ConfigurationError: the same host, address, key or machine as another, unless that is allowed.
        """
        mine = _THIS_MACHINE if sock is None else _identity(url, sock)
        with self._lock:
            for known, (other, theirs) in self._known.items():
                equal = _equal(mine, theirs)
                if known == (party or url) or not equal:
                    continue
                self.same = f"{url} and {other} have the same {', '.join(equal)}"
                if not self._allow_same:
                    raise ConfigurationError(
                        f"{self.same}: provider and mask sources must be run by operators that do not "
                        "collude, or whoever runs both subtracts every mask. Name executors of different "
                        "operators; to try it out on one machine, allow_same_operator=True "
                        "(`--allow-same-operator`)"
                    )
            self._known[party or url] = url, mine


_THIS_MACHINE = Identity("", "", b"", here=True)


def _identity(url: str, sock: ssl.SSLSocket) -> Identity:
    certificate = x509.load_der_x509_certificate(sock.getpeercert(binary_form=True) or b"")
    key = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    try:
        address, own = (_plain_address(end()[0]) for end in (sock.getpeername, sock.getsockname))
    except OSError:  # it has ended already, and will say so to whoever reads from it
        address = own = ""
    here = address != "" and (address == own or ipaddress.ip_address(address).is_loopback)
    return Identity(split_url(url)[0].rstrip("."), address, key, here)


def _equal(one: Identity, other: Identity) -> list[str]:
    """What two have in common, in words."""
    if _THIS_MACHINE in (one, other):  # which has nothing else to compare
        return ["machine"] if one.here and other.here else []
    what = ("host", "address", "certificate key")
    return [word for word, a, b in zip(what, one, other, strict=False) if a and a == b]


def _plain_address(address: str) -> str:
    """An IPv4 address in IPv6 clothes is the same machine's."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or parsed)
