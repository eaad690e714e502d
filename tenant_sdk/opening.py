"""``tenant_sdk.connect``: opens the connections of a session and puts its privacy mode together."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from shared.errors import ConfigurationError, ConnectError, ModelMismatch
from shared.transport.endpoint import Endpoint
from shared.wire.messages import Manifest
from shared.wire.protocol import GroupShape
from tenant_sdk.connection.channel import Channel
from tenant_sdk.connection.handshake import client_context
from tenant_sdk.connection.remote import RemoteExecutor, Stats
from tenant_sdk.connection.transports import open_channel, over_tls, url_of
from tenant_sdk.products.fingerprints import StoredFingerprints
from tenant_sdk.products.mask_sources import ExecutorSource, LocalRing, LocalSource, MaskSource
from tenant_sdk.products.masks import BankMasks, Masks, NoMasks, OneTimeMasks
from tenant_sdk.products.noise_bank import NoiseBank, NoiseBankOptions
from tenant_sdk.products.products import PlainProducts, Products, padded
from tenant_sdk.products.ring_products import RingProducts
from tenant_sdk.products.verification import Fingerprints, LiveFingerprints, Verifier
from tenant_sdk.session import Session
from tenant_sdk.trust.attestation import check_agreement
from tenant_sdk.trust.operators import SIGNS, Operators, allowed_signs, own_authorities, own_tokens

log = logging.getLogger(__name__)

PRIVACY_MODES = ("one-time", "noise-bank", "plain")
VERIFY_MODES = ("always", "sampled", "off")
_WIRE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LOCAL = "local:"
_CHOICES = (
    "Name one that another operator runs (mask_sources=['wss://...'], `--mask-source`), or the checkpoint "
    "itself (mask_sources=['local:FOLDER']), which computes the masks' effects here. Weaker modes must be "
    "asked for: privacy='noise-bank' or 'plain'; SECURITY.md says what they are worth"
)


def connect(
    provider: str | Endpoint,
    *,
    token: str = "",
    ca: str | Path | None = None,
    client_certificate: tuple[str | Path, str | Path] | None = None,
    privacy: str = "one-time",
    mask_sources: Sequence[str | Endpoint] = (),
    mask_source_token: str | Sequence[str] | None = None,
    mask_source_ca: str | Path | Sequence[str | Path] | None = None,
    allow_same: Collection[str] = (),
    allow_same_operator: bool = False,
    allow_transcript: bool = False,
    mask_budget_mib: float = 256.0,
    pad_rows: int = 0,
    verify: str | None = None,
    verify_rate: float = 0.05,
    fingerprints: str | Path | None = None,
    fingerprint_key: str | None = None,
    wire_dtype: str = "float32",
    noise_bank: NoiseBankOptions | None = None,
    digest: str | None = None,
    timeout: float = 60.0,
) -> Session:
    """Open a session with an executor.

    Args:
        provider: its URL, ``wss://host:port``, or ``ipc://`` and the absolute path of the directory in which
            an executor on this machine listens (``serve --local-dir``); or what ``provider.inprocess.serve``
            returns.
        token: as the provider printed it; an executor in this process needs none.
        ca: PEM file of the provider's certificate authority; default: the operating system's. Only for
            ``wss://``, as all about certificates.
        client_certificate: PEM files of certificate and key, if an executor asks for one.
        privacy: ``one-time``: what the provider sees is uniform, unless it colludes with every mask
            source; needs a provider with ring numerics. ``noise-bank`` and ``plain`` are worth little or
            nothing (SECURITY.md).
        mask_sources: who computes the effects of masks: ``wss://`` or ``ipc://`` URLs of executors of the
            same weights, or ``local:FOLDER`` with the checkpoint. ``one-time`` needs at least one and its
            masks are hidden while any of them does not collude with the provider; ``noise-bank`` takes
            one, by default the provider itself, as in the paper, which therefore sees every mask.
        mask_source_token: of the mask sources, for each its own.
        mask_source_ca: PEM files of their authorities, for each its own; ``"system"`` for the operating
            system's, which is the default if ``ca`` is not given.
        allow_same: what provider and mask sources may have in common after all: a set of ``host``,
            ``address``, ``key`` (of the certificate), ``machine``, ``authority`` (which signed both
            certificates) and ``token``.
        allow_same_operator: all of these, although ``one-time`` is then worth nothing: for trying it out.
        allow_transcript: use executors that announce that they record what tenants send.
        mask_budget_mib: memory for effects that are fetched ahead, in MiB; 0 fetches none ahead.
        pad_rows: hide how many rows a request has: round it up to a power of two that is at least this;
            0 rounds nothing. The rows added are zeros under masks of their own, and cost what others cost.
        verify: ``always``, ``sampled`` or ``off``: check that answers are the right products (ring
            numerics). Default: ``always`` with ``one-time`` or ``fingerprints``, else ``off``.
        verify_rate: with ``sampled``, the fraction of requests that is checked, drawn secretly.
        fingerprints: file made by ``symbiosis-tenant fingerprint`` from a checkpoint that you trust.
            Default: made from a ``local:`` mask source, or else through the executors, under masks,
            which shows any deviation but not that the weights were the right ones from the start.
        fingerprint_key: as that command printed it.
        wire_dtype: ``float32`` or ``bfloat16`` (half the bytes, three digits); ring numerics have their
            own.
        noise_bank: size and life of a bank.
        digest: refuse executors with another ``manifest.digest``. It covers every file and parameter that
            is downloaded; that products are those of the right weights, only ``verify`` shows.
        timeout: seconds without progress after which connecting or a request fails.

    Raises:
        ConfigurationError: an option is wrong, or does not fit what the provider serves.
        ConnectError: no session, with the reason; see ``shared.errors``.
        ModelMismatch: other weights, parameters or files than ``digest``, the fingerprints or a mask
            source's.
    """
    if isinstance(mask_sources, str):
        raise ConfigurationError(f"mask_sources is a list: write [{mask_sources!r}]")
    if privacy not in PRIVACY_MODES:
        raise ConfigurationError(f"unknown privacy mode {privacy!r}; choose from {', '.join(PRIVACY_MODES)}")
    if wire_dtype not in _WIRE_DTYPES:
        raise ConfigurationError(f"wire_dtype is float32 or bfloat16, not {wire_dtype!r}")
    if mask_sources and privacy == "plain":
        raise ConfigurationError("privacy='plain' uses no masks, so mask_sources must be empty")
    if len(mask_sources) > 1 and privacy == "noise-bank":
        raise ConfigurationError("noise-bank takes one mask source")
    if not mask_sources and privacy == "one-time":
        raise ConfigurationError(f"privacy='one-time' needs a mask source. {_CHOICES}")
    if len(set(mask_sources)) < len(mask_sources):
        raise ConfigurationError("a mask source is named twice, which hides nothing more than once")
    if not 0 < timeout < math.inf:
        raise ConfigurationError("timeout is in seconds and more than 0")
    if not 0 <= mask_budget_mib < math.inf:
        raise ConfigurationError("mask_budget_mib is in MiB and not negative")
    if not 0 <= pad_rows <= 1 << 16:
        raise ConfigurationError("pad_rows is a number of rows from 0 to 65536")
    if pad_rows and privacy != "one-time":
        raise ConfigurationError(
            f"pad_rows adds rows of zeros, which privacy={privacy!r} would show: they would give away its "
            "masks, or that they are zeros. Use it with one-time masks"
        )
    if fingerprint_key and fingerprints is None:
        raise ConfigurationError("fingerprint_key is of no use without fingerprints=FILE (`--fingerprints`)")
    verify = verify or ("always" if privacy == "one-time" or fingerprints is not None else "off")
    if verify not in VERIFY_MODES:
        raise ConfigurationError(f"verify is one of {', '.join(VERIFY_MODES)}, not {verify!r}")
    if not 0 < verify_rate <= 1:
        raise ConfigurationError("verify_rate is more than 0 and at most 1")
    provider_url, source_urls = url_of(provider), [url_of(source) for source in mask_sources]
    _check_certificates(provider, mask_sources, ca, mask_source_ca, client_certificate)
    allowed = allowed_signs(allow_same, allow_same_operator)
    tokens, authorities = _credentials(token, ca, mask_sources, mask_source_token, mask_source_ca, allowed)
    stored = None
    if fingerprints is not None:
        stored = StoredFingerprints(fingerprints, fingerprint_key)
    stats, operators = Stats(), Operators(allowed if privacy == "one-time" else SIGNS)

    def open_remote(where: str | Endpoint, token: str, ca: str | Path | None) -> RemoteExecutor:
        url = url_of(where)
        context = client_context(ca, client_certificate)
        party = object()  # so that a mask source with the provider's own URL is noticed

        def open_session() -> Channel:
            try:
                return open_channel(
                    where, token, context, timeout, lambda sock: operators.meet(url, sock, party)
                )
            except ConnectError as error:
                if url != provider_url:
                    error.message = f"mask source {url}: {error.message}"
                    error.args = (error.message,)
                raise

        return RemoteExecutor(open_session, _WIRE_DTYPES[wire_dtype], stats)

    remotes = [open_remote(provider, token, ca)]
    try:
        manifest = remotes[0].manifest
        _check_fit(provider_url, manifest, privacy, verify, digest)
        for source, url, source_token, source_ca in zip(
            mask_sources, source_urls, tokens, authorities, strict=True
        ):
            if not url.startswith(LOCAL):
                remotes.append(open_remote(source, source_token, source_ca))
                check_agreement(url, remotes[-1].manifest, manifest)
        if not allow_transcript:
            _check_not_recorded(remotes)
        executors = iter(remotes[1:])
        folders = [url.removeprefix(LOCAL) if url.startswith(LOCAL) else None for url in source_urls]
        sources: list[ExecutorSource | LocalRing | LocalSource] = [
            ExecutorSource(next(executors), owned=True)
            if folder is None
            else LocalRing(folder, manifest)
            if remotes[0].ring
            else LocalSource(folder, manifest)
            for folder in folders
        ]
        bank = noise_bank or NoiseBankOptions()
        _warn(provider_url, privacy, operators, remotes)
        if stored is not None and not remotes[0].ring:
            stored.attest(manifest)  # its products are not checked, but all that is downloaded is
        if not remotes[0].ring:
            return Session(remotes[0], padded(_float_products(remotes[0], privacy, sources, bank), pad_rows))
        if stored is not None:
            stored.fit(manifest)
        shapes = remotes[0].shapes
        masks: Masks
        if privacy == "one-time":
            masks = OneTimeMasks(
                shapes,
                [source for source in sources if not isinstance(source, LocalSource)],
                budget_bytes=int(mask_budget_mib * 2**20),
                entropy=os.urandom,
            )
        elif privacy == "noise-bank":
            masks = BankMasks(shapes, _bank_source(remotes[0], sources), bank, os.urandom)
        else:
            masks = NoMasks(shapes)
        verifier = None
        if verify != "off":
            verifier = Verifier(
                stored or _live_fingerprints(privacy, shapes, sources),
                manifest.groups,
                rate=1.0 if verify == "always" else verify_rate,
                entropy=os.urandom,
                parties=" or ".join([provider_url, *source_urls]),
            )
        local = next((source for source in sources if isinstance(source, LocalRing)), None)
        scales = _agreed_scales(remotes, stored.scales if stored else local.scales if local else None)
        return Session(remotes[0], padded(RingProducts(remotes[0], masks, verifier, scales), pad_rows))
    except BaseException:
        for remote in remotes:
            remote.close()
        raise


def _check_certificates(
    provider: str | Endpoint, sources: Sequence[str | Endpoint], ca: Any, source_ca: Any, client: Any
) -> None:
    """Refuse options of TLS that nothing would use: whoever gives them expects a connection that has it."""
    executors = [each for each in sources if not url_of(each).startswith(LOCAL)]
    for option, given, users in (
        ("ca", ca, [provider]),
        ("mask_source_ca", source_ca, executors),
        ("client_certificate", client, [provider, *executors]),
    ):
        if given is not None and users and not any(map(over_tls, users)):
            raise ConfigurationError(
                f"{option} is for TLS, and {url_of(users[0])} is reached without it, on this machine; leave "
                "it out. (The authority of mask sources is mask_source_ca, `--mask-source-ca`.)"
            )


def _credentials(
    token: str,
    ca: str | Path | None,
    sources: Sequence[str | Endpoint],
    source_token: str | Sequence[str] | None,
    source_ca: str | Path | Sequence[str | Path] | None,
    allowed: Collection[str],
) -> tuple[list[str], list[str | Path | None]]:
    """Token and authority of each mask source; of those that need none, empty.

    Raises:
        ConfigurationError: two parties would share what is not ``allowed``.
    """
    tokens: list[Any] = for_each(source_token, sources, "mask_source_token")
    authorities = for_each(source_ca, sources, "mask_source_ca")
    known = [at for at, each in enumerate(sources) if isinstance(each, str) and not each.startswith(LOCAL)]
    for at, own in zip(known, own_tokens(token, [tokens[at] for at in known], allowed), strict=True):
        tokens[at] = own
    if "token" in allowed:
        tokens = [each or token for each in tokens]  # also of executors in this process, which need none
    tls = [at for at in known if over_tls(sources[at])]
    for at, own_ca in zip(tls, own_authorities(ca, [authorities[at] for at in tls], allowed), strict=True):
        authorities[at] = own_ca
    return [each or "" for each in tokens], authorities


def for_each(given: Any, sources: Sequence[str | Endpoint], option: str) -> list[Any]:
    """One value for each mask source, from one for all or one for each.

    Raises:
        ConfigurationError: neither.
    """
    if given is None or isinstance(given, (str, Path)):
        return [given] * len(sources)
    if len(given) != len(sources):
        raise ConfigurationError(f"{option}: give one for all mask sources, or one for each")
    return list(given)


def _check_fit(provider: str, manifest: Manifest, privacy: str, verify: str, digest: str | None) -> None:
    if digest is not None and digest != manifest.digest:
        raise ModelMismatch(f"{provider} serves weights with digest {manifest.digest}, not {digest}")
    if manifest.numerics == "ring":
        return
    if privacy == "one-time":
        raise ConfigurationError(
            f"{provider} computes in {manifest.numerics}, and one-time masks need exact integers: ask for "
            "an executor with `serve --numerics ring`. Weaker modes must be asked for: privacy='noise-bank' "
            "or 'plain'; SECURITY.md says what they are worth"
        )
    if verify != "off":
        raise ConfigurationError(
            f"{provider} computes in {manifest.numerics}, whose rounding leaves nothing to verify; "
            "verification, and fingerprints, need an executor with `serve --numerics ring`"
        )


def _check_not_recorded(remotes: list[RemoteExecutor]) -> None:
    for remote in remotes:
        if remote.manifest.recorded:
            raise ConfigurationError(
                f"{remote.url} records what tenants send into a transcript. If that is intended, as for an "
                "audit: allow_transcript=True (`--allow-transcript`)"
            )


def _warn(provider: str, privacy: str, operators: Operators, remotes: list[RemoteExecutor]) -> None:
    if privacy == "plain":
        log.warning("privacy 'plain': %s sees every activation (SECURITY.md)", provider)
    if privacy == "noise-bank" and (len(remotes) == 1 or operators.same):
        log.warning(
            "privacy 'noise-bank': %s multiplies the masks itself, so it can subtract them (SECURITY.md)",
            provider,
        )
    if privacy == "one-time" and operators.same:
        log.warning(
            "%s, which was allowed: if that is one operator, these masks hide nothing from it", operators.same
        )


def _float_products(
    remote: RemoteExecutor,
    privacy: str,
    sources: list[ExecutorSource | LocalRing | LocalSource],
    bank: NoiseBankOptions,
) -> Products:
    if privacy == "plain":
        return PlainProducts(remote)
    return NoiseBank(remote, _bank_source(remote, sources), bank, entropy=os.urandom)


def _bank_source(
    remote: RemoteExecutor, sources: list[ExecutorSource | LocalRing | LocalSource]
) -> MaskSource:
    return sources[0] if sources else ExecutorSource(remote, owned=False)


def _live_fingerprints(
    privacy: str, shapes: list[GroupShape], sources: list[ExecutorSource | LocalRing | LocalSource]
) -> Fingerprints:
    local = next((source for source in sources if isinstance(source, LocalRing)), None)
    if local is not None:
        return LiveFingerprints(shapes, os.urandom, lambda kind, rows: local.effect(*kind, [rows])[0])
    if privacy != "one-time":
        raise ConfigurationError(
            f"verification with privacy={privacy!r} needs fingerprints of the weights: make a file with "
            "`symbiosis-tenant fingerprint CHECKPOINT` and give fingerprints=FILE (`--fingerprints`). Only "
            "one-time masks can make them through the executors: others would show them to the provider"
        )
    return LiveFingerprints(shapes, os.urandom)


def _agreed_scales(
    remotes: list[RemoteExecutor], trusted: Callable[[int], torch.Tensor] | None
) -> Callable[[int], torch.Tensor]:
    """A group's scales, which no product shows: all executors must say the same, and what is trusted too."""

    def scales(group: int) -> torch.Tensor:
        first = remotes[0].scales(group)
        others = [(remote.url, remote.scales(group)) for remote in remotes[1:]]
        if trusted is not None:
            others.append(("the weights that you trust", trusted(group)))
        for who, theirs in others:
            if not torch.equal(first, theirs):
                name = remotes[0].manifest.groups[group].members[0].name
                raise ModelMismatch(
                    f"{remotes[0].url} and {who} disagree about the scales of group {group} ({name}): "
                    "one of them does not have the weights that it claims"
                )
        return first

    return scales
