"""Faults between this machine and an executor, step by step: `symbiosis-tenant doctor`."""

from __future__ import annotations

import datetime
import os
import socket
import ssl
import statistics
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

import torch
from cryptography import x509

from shared.errors import (
    AuthenticationError,
    ConfigurationError,
    ConnectionRefused,
    Metavar,
    OptionText,
    ProtocolVersionError,
    SymbiosisError,
    TlsError,
)
from shared.transport.colocated import directory_of
from shared.wire.header import DTYPE_NAMES, RINGS, SUBPROTOCOL, Direction, Operation, half_bits
from shared.wire.messages import Manifest
from shared.wire.traffic import SPEEDS, TokenBytes, token_bytes
from tenant_sdk.command_line.checks import CheckResult, Comparison, ReplicaChecks
from tenant_sdk.command_line.options import SessionRules, Target
from tenant_sdk.command_line.remedies import remedy_of
from tenant_sdk.command_line.versions import untested
from tenant_sdk.connection.channel import Channel
from tenant_sdk.connection.colocated import open_colocated
from tenant_sdk.connection.handshake import (
    check_environment,
    client_context,
    open_tcp,
    start_tls,
    upgrade,
    why_untrusted,
)
from tenant_sdk.connection.key_exchange import agreed, hybrid
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.connection.remote import LazyResult, RemoteExecutor
from tenant_sdk.connection.replicas.reconnecting import single_replica
from tenant_sdk.connection.urls import LOCAL, over_tls, split_url
from tenant_sdk.connection.websocket_channel import WebsocketChannel
from tenant_sdk.trust.attestation import check_agreement, trusted_checkpoint
from tenant_sdk.trust.operators import own_authorities, own_tokens

T = TypeVar("T")

CONNECT_RETRY_SECONDS = 0.2  # while nobody listens
SMALL_REPEATS, LARGE_REPEATS = 30, 5
LARGE_BYTES = 4 << 20
_AT_ONCE = 16  # rows of noise in flight: an executor says how many groups it has, and how wide they are
# Renewing a certificate takes people, so say early that it will be due.
SOON_DAYS = 14
# What ``cryptography`` raises of certificates that OpenSSL takes.
_UNREADABLE = (
    ValueError, TypeError, x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType,
)  # fmt: skip


def diagnose(targets: list[Target], rules: SessionRules) -> Iterator[tuple[str, Iterator[CheckResult]]]:
    """Libraries, every executor's results, and whether executors fit each other, each under a title.

    Args:
        targets: the provider, and its mask sources.
        rules: of a session with them.
    """
    yield "", _untested()
    provider, *others = targets
    sources = [target.party for target in others]
    comparison = Comparison(rules)
    executors = [target for target in targets if not target.url.startswith(LOCAL)]
    for target in executors:
        yield target.party if sources or target.replicas else "", _examine_party(target, comparison)
    if provider.party in comparison.manifests:
        shared = _shared_credentials(executors, rules)
        yield (
            "one-time masks" if sources else "",
            _check_together(comparison, comparison.manifests[provider.party], sources, shared),
        )


def _untested() -> Iterator[CheckResult]:
    yield from (CheckResult("versions", None, what, remedy) for what, remedy in untested())


def _examine_party(target: Target, comparison: Comparison) -> Iterator[CheckResult]:
    """Of every replica whether it can be used, and all about one that can."""
    party = object()
    replicas = ReplicaChecks(target, comparison, party)
    yield from replicas
    yield from examine(replicas.usable, comparison, party)


def _shared_credentials(targets: list[Target], rules: SessionRules) -> Iterator[CheckResult]:
    """Tokens and authorities that provider and mask sources have in common."""

    def check_tokens() -> None:
        tokens = [target.secret for target in targets]
        if all(tokens):  # else their owner has not given them, and they are not compared
            own_tokens(tokens[0], tokens[1:], rules.allowed)

    def check_authorities() -> None:
        tls = [target.ca and str(target.ca) for target in targets[1:] if over_tls(target.url)]
        own_authorities(targets[0].ca, tls, rules.allowed)

    for what, check in (("tokens", check_tokens), ("authorities", check_authorities)):
        try:
            check()
        except ConfigurationError as error:
            yield CheckResult(what, False, error.structured_message, "give each operator's own")


def _check_together(
    comparison: Comparison, manifest: Manifest, sources: list[str], shared: Iterator[CheckResult]
) -> Iterator[CheckResult]:
    """Whether one-time masks would work with these executors, and be worth something."""
    ring = manifest.numerics in RINGS
    yield CheckResult(
        "numerics",
        ring or None,
        f"{manifest.numerics}: " + ("exact integers" if ring else "no one-time masks, nothing to verify"),
        ""
        if ring
        else OptionText("ask for an executor with `serve --numerics ring`, or choose a weaker {privacy}"),
    )
    if not sources:
        remedy = OptionText(
            "give {mask_sources} of another operator, or local:FOLDER with the checkpoint",
            mask_sources=[Metavar("wss://...")],
        )
        yield CheckResult("mask source", None, "none given; one-time masks, the default, need one", remedy)
    for url in sources:
        try:
            if url.startswith(LOCAL):
                trusted_checkpoint(url.removeprefix(LOCAL), manifest)
                yield CheckResult("weights", True, f"{url} has the weights that the provider claims to serve")
            elif url in comparison.manifests:  # else its own results say why
                check_agreement(url, comparison.manifests[url], manifest)
                yield CheckResult(
                    "weights", True, f"{url} lists the same files and parameters as the provider"
                )
        except ConfigurationError as error:
            yield CheckResult(
                "weights",
                False,
                error.structured_message,
                "use mask sources of the provider's very checkpoint",
            )
    yield from shared
    if comparison.refused:
        yield CheckResult("operators", False, comparison.refused)
    elif comparison.operators.same:
        by = comparison.rules.allowed_by
        yield CheckResult(
            "operators",
            True,
            OptionText(
                "{}: {}; if that is one operator, masks hide nothing from it", comparison.operators.same, by
            ),
        )


def examine(
    target: Target, comparison: Comparison | None = None, party: Hashable = None
) -> Iterator[CheckResult]:
    """Results in order; the first with ``ok`` False is the last.

    Args:
        target: one executor.
        comparison: with others.
        party: who it is to the comparison; default: somebody who was not there yet.
    """
    examination = _Examination(target, comparison or Comparison(SessionRules()), party or object())
    try:
        yield from examination.results()
    except SymbiosisError as error:
        yield examination.failed(error)
    finally:
        examination.close()


class _Examination:
    """One executor that is examined: the step it is at, and what is open."""

    def __init__(self, target: Target, comparison: Comparison, party: Hashable) -> None:
        self.target, self.comparison, self.party = target, comparison, party
        self.step = "url"
        self._sock: socket.socket | None = None
        self._channel: Channel | None = None

    def results(self) -> Iterator[CheckResult]:
        """See ``examine``; an error is that of ``step``."""
        yield from self._over_tls() if over_tls(self.target.url) else self._on_this_machine()
        if self._channel is not None:
            yield CheckResult("token", True, f"accepted (from {self.target.token})")
            yield CheckResult("protocol", True, f"both sides speak {SUBPROTOCOL}")
            yield from self._executor_results(self._channel)

    def _over_tls(self) -> Iterator[CheckResult]:
        target = self.target
        host, port = split_url(target.url)
        yield CheckResult("url", True, f"host {host}, port {port}")

        self.step = "environment"
        check_environment()

        self.step = "authority"
        context = client_context(target.authority, target.client_certificate, self._authority_option)
        system = OptionText("those of the operating system (no file given with {})", target.option("ca"))
        yield CheckResult("authority", True, str(target.authority) if target.authority else system)

        self.step = "dns"
        yield _resolve(host, port)

        self.step = "tcp"
        opening = _WaitUntilOpen(lambda: open_tcp(host, port, target.timeout, target.address), target)
        yield from opening
        self._sock = opening.done
        milliseconds = opening.seconds * 1e3
        yield CheckResult("tcp", True, f"port {port} is open, connected in {milliseconds:.1f} ms")

        self.step = "tls"
        tls = self._sock = start_tls(opening.done, host, context)
        yield from _check_tls(tls)
        yield _key_exchange(agreed(tls))
        self.comparison.meet(target.url, tls, self.party)

        self.step = "token"
        token = target.secret
        if not token:
            yield from _without_token(lambda token: upgrade(tls, target.url, token), target)
            return
        upgrade(tls, target.url, token)
        self._channel = WebsocketChannel(tls, target.url, timeout=target.timeout, entropy=os.urandom)

    def _on_this_machine(self) -> Iterator[CheckResult]:
        target = self.target
        yield CheckResult("url", True, f"directory {directory_of(target.url)}, on this machine")

        self.step = "token"
        token = target.secret

        self.step = "directory"
        self.comparison.meet(target.url, None, self.party)
        if not token:
            yield from _without_token(lambda token: open_colocated(target.url, token, target.timeout), target)
            return
        reaching = _WaitUntilOpen(lambda: open_colocated(target.url, token, target.timeout), target)
        yield from reaching
        self._channel = reaching.done
        yield CheckResult("directory", True, "an executor listens there")

    def _executor_results(self, channel: Channel) -> Iterator[CheckResult]:
        target = self.target
        self.step = "manifest"
        remote = RemoteExecutor(single_replica(lambda: channel, target.url), DTYPE_NAMES[target.wire_dtype])
        self.comparison.manifests[target.party] = remote.manifest
        yield from _check_manifest(remote.manifest)

        self.step = "transcript"
        yield from _transcript(remote.manifest, self.comparison.rules)

        self.step = "digest"
        yield _digest(remote.manifest, target.digest)

        self.step = "layers"
        yield _layers(remote)

        self.step = "speed"
        yield from _speed(remote)

    @property
    def _authority_option(self) -> str:
        return "mask_source_ca" if self.target.source else "ca"

    def failed(self, error: SymbiosisError) -> CheckResult:
        """The last result: what failed, and what to do."""
        step, target = self.step, self.target
        if isinstance(error, ProtocolVersionError):
            step = "protocol"
        if isinstance(error, AuthenticationError) and step == "directory":
            step = "token"
        if isinstance(error, AuthenticationError) and isinstance(error.__cause__, ssl.SSLError):
            step = "client cert"
        what, advice = error.structured_message, OptionText()
        if isinstance(error, TlsError) and error.untrusted:
            what += why_untrusted(target.authority, self._authority_option)
        if isinstance(error, AuthenticationError | TlsError):
            what, advice = what.split_once("; ")
        if step == "tls":
            what += _shown_certificate(target)
        return CheckResult(step, False, what, remedy_of(error, step, target, advice))

    def close(self) -> None:
        """Close what is open."""
        if self._channel is not None:
            self._channel.close()
        if self._sock is not None:
            self._sock.close()


class _WaitUntilOpen(Generic[T]):
    """Opens something, for which somebody may have to begin to listen; iterated, tells that it waits.

    Attributes:
        done: what was opened, at the end of the iteration.
        seconds: what the attempt took that succeeded.
    """

    done: T
    seconds: float

    def __init__(self, attempt: Callable[[], T], target: Target) -> None:
        self._attempt, self._target = attempt, target

    def __iter__(self) -> Iterator[CheckResult]:
        """At most one result.

        Raises:
            SymbiosisError: the last attempt's.
        """
        reported = False
        while True:
            started = time.perf_counter()
            try:
                self.done = self._attempt()
            except ConnectionRefused:
                if started >= self._target.until:
                    raise
                if not reported:
                    reported = True
                    url, wait = self._target.url, self._target.until - started
                    what = f"nobody listens at {url} yet; trying for {wait:.2g} s (--wait)"
                    yield CheckResult("waiting", None, what)
                time.sleep(CONNECT_RETRY_SECONDS)
            else:
                self.seconds = time.perf_counter() - started
                return


def _resolve(host: str, port: int) -> CheckResult:
    started = time.perf_counter()
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigurationError(f"cannot resolve the host name {host!r}: {error}") from error
    addresses = sorted({str(entry[4][0]) for entry in found})
    milliseconds = (time.perf_counter() - started) * 1e3
    if addresses == [host]:
        return CheckResult("dns", True, f"{host} is an address")
    return CheckResult("dns", True, f"{host} is {', '.join(addresses)} ({milliseconds:.1f} ms)")


def _check_tls(sock: ssl.SSLSocket) -> Iterator[CheckResult]:
    cipher = sock.cipher()
    yield CheckResult("tls", True, f"{sock.version()}, {cipher[0] if cipher else 'no cipher'}")
    try:
        certificate = x509.load_der_x509_certificate(sock.getpeercert(binary_form=True) or b"")
        days = (certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days
        described = _describe(certificate)
    except _UNREADABLE as error:
        remedy = "ask its operator for a certificate without unusual extensions"
        yield CheckResult("certificate", None, f"valid, but a field cannot be read: {error}", remedy)
        return
    soon = days < SOON_DAYS
    yield CheckResult(
        "certificate",
        None if soon else True,
        described + (f"; only {days} days left" if soon else ""),
        "ask its operator when it will be renewed" if soon else "",
    )


def _key_exchange(group: str) -> CheckResult:
    if hybrid(group):
        return CheckResult("key exchange", True, f"{group}, hybrid post-quantum")
    return CheckResult(
        "key exchange",
        None,
        f"{group}, not known to be post-quantum: who records this traffic, or a mask source's with "
        "its seeds, could read it with a later quantum computer",
        "have both ends run Python with OpenSSL 3.5 or newer, which agree on X25519MLKEM768: "
        "`python -c 'import ssl; print(ssl.OPENSSL_VERSION)'`",
    )


def _describe(certificate: x509.Certificate) -> str:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = ", ".join(str(name.value) for name in extension)
    except x509.ExtensionNotFound:
        names = "no host at all"
    subject, issuer = certificate.subject.rfc4514_string(), certificate.issuer.rfc4514_string()
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return f"{subject}, for {names}, by {issuer}, valid from {first:%Y-%m-%d} to {last:%Y-%m-%d}"


def _shown_certificate(target: Target) -> str:
    """What the server shows, for the message only: nothing is sent over this unverified connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, port = split_url(target.url)
    try:
        with open_tcp(host, port, target.timeout, target.address) as raw, context.wrap_socket(raw) as sock:
            shown = sock.getpeercert(binary_form=True)
        return f". The server shows: {_describe(x509.load_der_x509_certificate(shown or b''))}"
    except (OSError, *_UNREADABLE, SymbiosisError):
        return ""


def _without_token(show: Callable[[str], object], target: Target) -> Iterator[CheckResult]:
    """Whether it is an executor shows in how it refuses."""
    try:
        show("none")
    except AuthenticationError:
        yield CheckResult("protocol", True, f"it is an executor, and both sides speak {SUBPROTOCOL}")
    remedy = OptionText("give {} to check the rest", target.option("token"))
    yield CheckResult("token", None, "not checked, nor anything after it", remedy)


def _check_manifest(manifest: Manifest) -> Iterator[CheckResult]:
    layers = sum(len(group.members) for group in manifest.groups)
    yield CheckResult(
        "manifest",
        True,
        f"{manifest.model} ({manifest.architecture}): {layers} layers in {len(manifest.groups)} groups, "
        f"{manifest.numerics}, takes {' or '.join(manifest.wire_dtypes)} on the wire",
    )
    if manifest.unavailable:
        yield CheckResult(
            "parameters",
            None,
            f"it cannot supply {len(manifest.unavailable)} parameters that tenants hold",
            "load the checkpoint yourself and use session.attach",
        )


def _transcript(manifest: Manifest, rules: SessionRules) -> Iterator[CheckResult]:
    if manifest.recorded and not rules.transcript:
        raise ConfigurationError(
            "the executor records tenants' messages: sessions accept this only with {allow_transcript}",
            allow_transcript=True,
        )
    if manifest.recorded:
        yield CheckResult(
            "transcript",
            True,
            OptionText("it records what tenants send: allowed by {allow_transcript}", allow_transcript=True),
        )


def _digest(manifest: Manifest, pinned: str | None) -> CheckResult:
    if pinned is not None and pinned != manifest.digest:
        raise ConfigurationError(f"it serves weights with digest {manifest.digest}, not {pinned}")
    return CheckResult("digest", True, manifest.digest + (", as pinned" if pinned else ""))


def _layers(remote: RemoteExecutor) -> CheckResult:
    """One row of noise through every group: each part of an executor has to be there."""
    groups = [i for i in range(len(remote.shapes)) if remote.manifest.serves(i)]
    if not groups:
        raise ConfigurationError("the executor serves no layers")
    for first in range(0, len(groups), _AT_ONCE):
        for pending in [_product(remote, group, 1) for group in groups[first : first + _AT_ONCE]]:
            pending.result()
    return CheckResult("layers", True, f"products of {len(groups)} groups answered")


def _product(remote: RemoteExecutor, group: int, rows: int, member_bits: int = 0) -> LazyResult:
    """Of noise, by all members if none are said."""
    shape = remote.shapes[group]
    member_bits = member_bits or (1 << len(shape.outputs)) - 1
    x = torch.randn(rows, shape.inputs)
    return remote.submit(Operation.EFFECT, ProductKey(group, Direction.FORWARD, member_bits), [x])


def _speed(remote: RemoteExecutor) -> Iterator[CheckResult]:
    """Round trips of products of noise, through the same code that sends activations."""
    manifest = remote.manifest
    groups = [
        (i, shape)
        for i, shape in enumerate(remote.shapes)
        if manifest.serves(i) and not manifest.groups[i].head
    ]
    if not groups:
        return

    def product(group: int, member_bits: int, rows: int) -> Callable[[], object]:
        return lambda: _product(remote, group, rows, member_bits).result()

    group, shape = groups[0]
    all_members = (1 << len(shape.outputs)) - 1
    small = _seconds(product(group, all_members, 1), SMALL_REPEATS)
    yield CheckResult(
        "round trip",
        True,
        f"one row: {small * 1e3:.2f} ms; a token takes {len(groups)} of them, one after the other: "
        f"{small * len(groups):.2g} s",
    )
    shapes, ring = [shape for _, shape in groups], remote.ring
    for what, directions in (
        ("bytes a token", (Direction.FORWARD,)),
        ("bytes a token, training", (Direction.FORWARD, Direction.BACKWARD)),
    ):
        kind = {"itemsize": remote.wire_dtype.itemsize, "sources": int(ring)}
        whole = token_bytes(shapes, directions, **kind)
        halves = token_bytes(shapes, directions, answer_bits=half_bits(manifest.numerics), **kind)
        yield CheckResult(
            what,
            True,
            f"{whole.said()}{f', with half answers {halves.down / 1e6:,.3g} MB down' if ring else ''}"
            f"{' (with the effects of one mask source)' if ring else ''}; "
            f"at {_speeds(whole)} tokens/s at most",
        )
    # The group that sends most for what it gets back shows the way up, the other extreme the way down.
    itemsize = remote.wire_dtype.itemsize
    limits = remote.manifest.limits
    for name, (group, shape), up in (
        ("upload", max(groups, key=lambda entry: entry[1].inputs / min(entry[1].outputs)), True),
        ("download", max(groups, key=lambda entry: sum(entry[1].outputs) / entry[1].inputs), False),
    ):
        narrowest = 1 << shape.outputs.index(min(shape.outputs))
        member_bits = narrowest if up else (1 << len(shape.outputs)) - 1
        up_bytes, down_bytes = (
            shape.inputs * itemsize,
            shape.widths(Direction.FORWARD, member_bits).answer_columns * itemsize,
        )
        size = min(LARGE_BYTES, limits.max_message_bytes)
        rows = max(1, min(limits.max_rows, size // max(up_bytes, down_bytes)))
        seconds = _seconds(product(group, member_bits, rows), LARGE_REPEATS)
        moved = rows * (up_bytes if up else down_bytes)
        yield CheckResult(
            name,
            True,
            f"{rows} rows, {rows * up_bytes / 1e6:.2f} MB there and {rows * down_bytes / 1e6:.2f} MB back: "
            f"{seconds * 1e3:.1f} ms, so {moved / 1e6 / seconds:.0f} MB/s or more "
            "(the executor's product is in it)",
        )


def _speeds(traffic: TokenBytes) -> str:
    """The most tokens a second of links of some speeds."""
    rates = [f"{speed} Gbit/s {_three_digits(traffic.tokens_per_second(speed))}" for speed in SPEEDS]
    return f"{', '.join(rates[:-1])} and {rates[-1]}"


def _seconds(action: Callable[[], object], repeats: int) -> float:
    """Median of ``repeats`` runs, after two to warm up."""
    seconds = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])


def _three_digits(value: float) -> str:
    """With three digits that count, and never with an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
