"""The operators of the other ends: provider and mask sources must not be the same operator."""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import threading
import warnings
from collections.abc import Collection, Hashable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from shared.errors import ConfigurationError, Metavar, OptionReference, OptionText
from tenant_sdk.connection.urls import over_tls, split_url

# What can show that two parties are one operator, or lets one of them act as the other. The words are those
# of ``allow_same``.
SIGNS = {
    "host": "host",
    "address": "address",
    "key": "certificate key",
    "machine": "machine",
    "authority": "certificate authority",
    "token": "token",
}
ALL = "all"  # of these signs
_SYSTEMS = "the operating system"
SYSTEM = "system"  # as a mask source's authority: those of the operating system


class Identity(NamedTuple):
    """What tells operators apart, as far as a tenant can see."""

    host: str
    address: str
    key: bytes  # of the certificate
    here: bool  # it is on this machine


class Operators:
    """Remembers everybody who answered under which URL, and refuses two parties that are one.

    The replicas of one party are one operator: they may have everything in common, or nothing.

    It notices mistakes, not operators that hide behind two names: that two are independent is for the
    tenant to know.

    Args:
        allowed: signs that are only noted.
    """

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = allowed
        self._known: dict[Hashable, dict[Identity, str]] = {}  # of each party all identities, and their URLs
        self._lock = threading.Lock()
        self.same = ""  # what was found, in words

    @property
    def all_here(self) -> bool:
        """Whether everybody is on this machine."""
        with self._lock:
            return all(each.here for identities in self._known.values() for each in identities)

    def check_distinct(self, url: str, sock: ssl.SSLSocket | None, party: Hashable = None) -> None:
        """Compare a new connection with those of other parties; at every connection, also a later one.

        Args:
            url: under which it was reached.
            sock: the connection, after TLS; None: the executor is on this machine, without TLS.
            party: which provider or mask source it is; default: what the URL says, so that two under
                one URL are one.

        Raises:
            ConfigurationError: a sign that is not allowed, in common with any earlier connection of another.
        """
        self._check(url, _THIS_MACHINE if sock is None else _identity(url, sock), party)

    def check_named(self, url: str, party: Hashable) -> None:
        """Compare what the URL of an executor says that cannot be reached; see ``check_distinct``."""
        if over_tls(url):
            self._check(url, Identity(_host(url), "", b"", here=False), party)

    def _check(self, url: str, mine: Identity, party: Hashable) -> None:
        with self._lock:
            for known, identities in self._known.items():
                if known == (party or url):
                    continue
                for theirs, other in identities.items():
                    if signs := _equal(mine, theirs):
                        self.same = f"{url} and {other} have the same {_words(signs)}"
                    if forbidden := [sign for sign in signs if sign not in self._allowed]:
                        raise ConfigurationError("{}: {}", self.same, _advice(forbidden, self._allowed))
            self._known.setdefault(party or url, {})[mine] = url


def allowed_signs(allow_same: Collection[str]) -> frozenset[str]:
    """Which signs are waived.

    Raises:
        ConfigurationError: a name that is none of ``SIGNS``, nor ``ALL``.
    """
    if isinstance(allow_same, str) or not set(allow_same) <= {*SIGNS, ALL}:
        raise ConfigurationError(
            "{allow_same} must be some of {}", ", ".join([*SIGNS, ALL]), allow_same=_listed(allow_same)
        )
    return frozenset(SIGNS if ALL in allow_same else allow_same)


def own_tokens(token: str, source_tokens: Sequence[str | None], allowed: Collection[str]) -> list[str]:
    """The mask sources' tokens, each its own: a token is never shown to another operator.

    Args:
        token: of the provider.
        source_tokens: for each mask source that is an executor behind a token.

    Raises:
        ConfigurationError: one is missing, or is the provider's or another source's.
    """
    if "token" in allowed:
        return [each or token for each in source_tokens]
    if None in source_tokens or "" in source_tokens:
        raise ConfigurationError(
            "give the mask source's own token: {mask_source_token}. The provider's is not sent to "
            "another operator, who could then act as this tenant there; {}",
            _waiver(["token"], allowed),
            mask_source_token=Metavar("TOKEN"),
        )
    if len({token, *source_tokens}) <= len(source_tokens):
        raise ConfigurationError(
            "provider and mask sources have the same token: each operator could act as this tenant at "
            "the other. Ask each for a token of its own; {}",
            _waiver(["token"], allowed),
        )
    return [str(each) for each in source_tokens]


def own_authorities(
    ca: str | Path | None, source_authorities: Sequence[str | Path | None], allowed: Collection[str]
) -> list[str | Path | None]:
    """The mask sources' certificate authorities; private ones are each party's own.

    Who holds an authority's key and sits on the path can answer in the place of everybody whom that authority
    vouches for. A provider whose authority also vouches for the mask source could take its place.

    Args:
        ca: PEM file of the provider's authority; None: the operating system's.
        source_authorities: for each mask source that is reached by TLS.

    Returns:
        For each PEM file, or None for the operating system's.

    Raises:
        ConfigurationError: a private authority is missing, or vouches for two parties; an unreadable file.
    """
    if "authority" in allowed:
        return [ca if each is None else None if str(each) == SYSTEM else each for each in source_authorities]
    if ca is not None and None in source_authorities:
        raise ConfigurationError(
            "give the mask source's own authority: {mask_source_ca}, or the word system there for those "
            "of the operating system. The provider's, {ca}, could sign a certificate for the mask "
            "source's address, and read what is sent there; {}",
            _waiver(["authority"], allowed),
            mask_source_ca=Metavar("FILE"),
            ca=ca,
        )
    chosen = [None if str(each) == SYSTEM else each for each in source_authorities]
    seen: dict[bytes, str | Path] = {}
    files = [ca, *chosen]
    for at, file in enumerate(files):
        if file is None and (not any(files) or None in files[:at]):
            continue  # the operating system's may vouch for several
        keys = _keys_of(file, "mask_source_ca" if at else "ca")
        for key in keys & seen.keys():
            raise ConfigurationError(
                "{} and {} hold the same certificate authority, which could take the place of either "
                "party and read both. Ask each operator for its own; {}",
                str(file or _SYSTEMS),
                str(seen[key]),
                _waiver(["authority"], allowed),
            )
        seen |= dict.fromkeys(keys, file or _SYSTEMS)
    return chosen


def _keys_of(file: str | Path | None, option: str) -> set[bytes]:
    """What tells the authorities of an option's file apart, as OpenSSL finds them; None: the system's.

    Certificates, and of a file their public keys too: one key may have several certificates.
    """
    if file is None:
        return _keys_of_the_system()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(file)
        certificates = set(context.get_ca_certs(binary_form=True))
        keys = {_public_key(x509.load_der_x509_certificate(each)) for each in certificates}
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigurationError(
            "cannot use the authority's certificate file {} ({}): {}",
            str(file),
            OptionReference(option, Metavar("FILE")),
            str(error),
        ) from error
    return certificates | keys


def _keys_of_the_system() -> set[bytes]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_default_certs()
    # OpenSSL reads its directories' files only when it looks for one of them.
    paths = ssl.get_default_verify_paths()
    folders = os.environ.get(paths.openssl_capath_env, paths.openssl_capath)
    for folder in folders.split(os.pathsep):
        for path in sorted(Path(folder).glob("*.[0-9]*")):  # named by a hash, as OpenSSL finds them
            with suppress(OSError):  # ssl.SSLError, too: others than certificates
                context.load_verify_locations(path)
    certificates = set(context.get_ca_certs(binary_form=True))
    keys = set()
    for each in certificates:
        # Some certificates are older than the rules, of which this would warn, or fail.
        with suppress(ValueError), warnings.catch_warnings(action="ignore"):
            keys.add(_public_key(x509.load_der_x509_certificate(each)))
    return certificates | keys


def _public_key(certificate: x509.Certificate) -> bytes:
    return certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _words(signs: Iterable[str]) -> str:
    return ", ".join(SIGNS[sign] for sign in signs)


def _advice(signs: list[str], allowed: Collection[str]) -> OptionText:
    return OptionText(
        "provider and mask sources must be run by operators that do not collude, or the operator of both "
        "subtracts every mask. Name executors of different operators; {}",
        _waiver(signs, allowed),
    )


def _waiver(signs: list[str], allowed: Collection[str]) -> OptionText:
    """``allow_same`` with these signs too; whoever follows this replaces what was given before."""
    every = [*signs, *(sign for sign in SIGNS if sign in allowed and sign not in signs)]
    return OptionText(
        "if that is meant, {}; to try it out on one machine, {}",
        OptionReference("allow_same", every),
        OptionReference("allow_same", [ALL]),
    )


def _listed(allow_same: Collection[str]) -> Any:
    """As a message shows it, which is the same in each run."""
    return allow_same if isinstance(allow_same, str) else sorted(allow_same)


_THIS_MACHINE = Identity("", "", b"", here=True)


def _identity(url: str, sock: ssl.SSLSocket) -> Identity:
    key = _public_key(x509.load_der_x509_certificate(sock.getpeercert(binary_form=True) or b""))
    try:
        address, own_address = (_plain_address(end()[0]) for end in (sock.getpeername, sock.getsockname))
    except OSError:  # it has ended already, and will say so to whoever reads from it
        address = own_address = ""
    here = address != "" and (address == own_address or _is_ours(address))
    return Identity(_host(url), address, key, here)


def _is_ours(address: str) -> bool:
    """Whether it is this machine's: nobody can listen at an address of another.

    The own end of a connection does not tell: to a second address of an interface it is the first.
    """
    if ipaddress.ip_address(address).is_loopback:
        return True
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as listening:
            listening.bind((address, 0))
    except OSError:
        return False
    return True


def _host(url: str) -> str:
    """The name as it is looked up: one name has many spellings."""
    host = split_url(url)[0]
    try:
        host = host.encode("idna").decode()
    except UnicodeError:
        pass  # it is looked up in vain
    return host.rstrip(".").lower()


def _equal(one: Identity, other: Identity) -> list[str]:
    """The signs that two have in common."""
    signs = [name for name in ("host", "address", "key") if getattr(one, name) == getattr(other, name)]
    signs = [name for name in signs if getattr(one, name)]  # who is here without TLS has none of them
    return [*signs, "machine"] if one.here and other.here else signs


def _plain_address(address: str) -> str:
    """An IPv4 address in IPv6 clothes is the same machine's."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or parsed)
