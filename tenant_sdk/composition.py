"""``tenant_sdk.connect``: opens the connections of a session and puts its privacy mode together."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shared.errors import ConfigurationError, ModelMismatch
from shared.wire.header import RINGS
from shared.wire.messages import Manifest
from shared.wire.protocol import GroupShape
from tenant_sdk.config import SessionConfig
from tenant_sdk.connection.remote import RemoteExecutor
from tenant_sdk.connection.stats import Stats
from tenant_sdk.connection.urls import LOCAL, is_local, party_name
from tenant_sdk.parties import ReplicatedExecutor
from tenant_sdk.products.bank_masks import BankMasks
from tenant_sdk.products.fingerprints import StoredFingerprints
from tenant_sdk.products.mask_sources import ExecutorSource, LocalRing, LocalSource, MaskSource
from tenant_sdk.products.masks import Masks, NoMasks, OneTimeMasks
from tenant_sdk.products.noise_bank import NoiseBank, NoiseBankOptions
from tenant_sdk.products.products import PlainProducts, Products, padded
from tenant_sdk.products.ring_products import RingProducts
from tenant_sdk.products.verification import Fingerprints, LiveFingerprints, Verifier
from tenant_sdk.profiles import completed
from tenant_sdk.session import Session
from tenant_sdk.trust.attestation import check_agreement
from tenant_sdk.trust.operators import SIGNS, Operators

if TYPE_CHECKING:
    from tenant_sdk.connection.urls import Party

log = logging.getLogger(__name__)


@completed
def connect(
    provider: Party = "",
    *,
    profile: str | Path | None = None,
    token: str = "",
    ca: str | Path | None = None,
    client_certificate: tuple[str | Path, str | Path] | None = None,
    privacy: str = "one-time",
    mask_sources: Sequence[Party] = (),
    mask_source_token: str | Sequence[str] | None = None,
    mask_source_ca: str | Path | Sequence[str | Path] | None = None,
    allow_same: Collection[str] = (),
    allow_same_operator: bool = False,
    allow_transcript: bool = False,
    mask_budget_mib: float = 256.0,
    fill_masks: bool = False,
    pad_rows: int = 0,
    experts: str | None = None,
    verify: str | None = None,
    verify_rate: float = 0.05,
    fingerprints: str | Path | None = None,
    fingerprint_key: str | None = None,
    wire_dtype: str = "float32",
    noise_bank: NoiseBankOptions | None = None,
    digest: str | None = None,
    timeout: float = 60.0,
    patience: float = 600.0,
) -> Session:
    """Open a session with an executor.

    Args:
        provider: its URL, ``wss://host:port``, or ``ipc://`` and the absolute path of the directory in which
            an executor on this machine listens (``serve --local-dir``); or what ``provider.inprocess.serve``
            returns. A list, or URLs with commas in between, are replicas: executors of one operator that
            serve the same, of which one at a time is used; so are several addresses of a host name.
            Or they are parts (``serve --part k/n``), all of which are used. Not needed with a profile.
        profile: a TOML file with these arguments (docs/profiles.md): its path, or the NAME of
            ``~/.config/symbiosis/NAME.toml``. Arguments that are given here win.
        token: as the provider printed it; an executor in this process needs none.
        ca: PEM file of the provider's certificate authority; default: the operating system's. Only for
            ``wss://``, as all about certificates.
        client_certificate: PEM files of certificate and key, if an executor asks for one.
        privacy: ``one-time``: what the provider sees is uniform, unless it colludes with every mask
            source; needs a provider with ring numerics. ``noise-bank`` and ``plain`` are worth little or
            nothing (SECURITY.md).
        mask_sources: who computes the effects of masks: ``wss://`` or ``ipc://`` URLs of executors of the
            same weights, each one or replicas as above, or ``local:FOLDER`` with the checkpoint, or
            ``local:hub:NAME[@REVISION]``.
            ``one-time`` needs at least one and its masks are hidden while any of them does not collude with
            the provider; ``noise-bank`` takes one, by default the provider itself, as in the paper, which
            therefore sees every mask.
        mask_source_token: of the mask sources, for each its own.
        mask_source_ca: PEM files of their authorities, for each its own; ``"system"`` for the operating
            system's, which is the default if ``ca`` is not given.
        allow_same: what provider and mask sources may have in common after all: a set of ``host``,
            ``address``, ``key`` (of the certificate), ``machine``, ``authority`` (which signed both
            certificates) and ``token``.
        allow_same_operator: all of these, although ``one-time`` is then worth nothing: for trying it out.
        allow_transcript: use executors that announce that they record what tenants send.
        mask_budget_mib: memory for effects that are fetched ahead, in MiB; 0 fetches none ahead.
        fill_masks: fetch as many effects as the budget takes whenever half a second passes without a
            request, so that a burst finds them there. Default: those of the next requests, 64 rows of each.
        pad_rows: hide how many rows a request has: round it up to a power of two that is at least this;
            0 rounds nothing. The rows added are zeros under masks of their own, and cost what others cost.
        experts: where experts of a mixture are multiplied. ``local``: here, so their weights are
            downloaded, or stay in an attached model. ``routed``: by the provider, who sees how many tokens
            each expert gets, and so learns of the text. ``padded``: by the provider, who is sent as many
            rows for each expert, some of them zeros under masks; what it costs is told once. Default:
            ``local`` with ``one-time``, else ``routed``.
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
        patience: seconds to wait for an executor that went away once the session is open, as one that
            restarts, before ConnectionLost ends what is under way. It is told with warnings; requests that
            were lost are sent again, the same bytes, and results are the same. 0: do not wait. An executor
            in this process is not waited for.

    Raises:
        ConfigurationError: an option is wrong, or does not fit what the provider serves.
        ConnectError: no session, with the reason; see ``shared.errors``.
        ModelMismatch: other weights, parameters or files than ``digest``, the fingerprints or a mask
            source's.
    """
    arguments = locals()  # whose names are those of the fields, but for the profile, which is in them already
    del arguments["profile"]
    return open_session(SessionConfig(**arguments))


def open_session(config: SessionConfig) -> Session:
    """What ``connect`` does.

    Raises:
        ConfigurationError, ConnectError, ModelMismatch: see there.
    """
    operators = Operators(config.allowed if config.privacy == "one-time" else SIGNS)
    credentials = config.credentials
    stored = None
    if config.fingerprints is not None:
        stored = StoredFingerprints(config.fingerprints, config.fingerprint_key)
    with ExitStack() as opened:
        remotes = _open_executors(config, credentials, operators, opened)
        provider, manifest = remotes[0], remotes[0].manifest
        sources = _sources(config, remotes)
        _warn(provider.url, config.privacy, operators, remotes)
        if config.privacy == "one-time" and config.where_experts == "routed" and _experts(manifest):
            log.warning(
                "experts='routed': %s sees how many tokens each expert gets, which depends on the text "
                "(docs/privacy.md)",
                provider.url,
            )
        if stored is not None and provider.ring:
            stored.fit(manifest)
        elif stored is not None:
            stored.attest(manifest)  # its products are not checked, but all that is downloaded is
        products = _products(config, remotes, sources, stored)
        session = Session(provider, products, config.privacy, config.where_experts)
        opened.pop_all()
        return session


def _open_executors(
    config: SessionConfig,
    credentials: list[tuple[str, str | Path | None]],
    operators: Operators,
    opened: ExitStack,
) -> list[RemoteExecutor]:
    """The provider, and the mask sources that are executors, which serve the same."""
    stats = Stats()
    parties = [ReplicatedExecutor(config, config.provider, config.token, config.ca, operators)]
    provider = parties[0].open(stats)
    opened.callback(provider.close)
    _check_fit(party_name(config.provider), provider.manifest, config)
    remotes = [provider]
    for source, (token, ca) in zip(config.mask_sources, credentials, strict=True):
        if not is_local(source):
            parties.append(ReplicatedExecutor(config, source, token, ca, operators, "mask_source_"))
            remotes.append(parties[-1].open(stats))
            opened.callback(remotes[-1].close)
            check_agreement(remotes[-1].url, remotes[-1].manifest, provider.manifest)
    if config.privacy == "one-time" and len(parties) > 1:
        for party in parties:
            party.meet_replicas()
    if not config.allow_transcript:
        _check_not_recorded(remotes)
    return remotes


Source = ExecutorSource | LocalRing | LocalSource


def _sources(config: SessionConfig, remotes: list[RemoteExecutor]) -> list[Source]:
    """Who computes masks' effects, in the order in which they were named."""
    executors = iter(remotes[1:])
    local = LocalRing if remotes[0].ring else LocalSource
    return [
        local(str(source).removeprefix(LOCAL), remotes[0].manifest)
        if is_local(source)
        else ExecutorSource(next(executors), owned=True)
        for source in config.mask_sources
    ]


def _products(
    config: SessionConfig,
    remotes: list[RemoteExecutor],
    sources: list[Source],
    stored: StoredFingerprints | None,
) -> Products:
    """How products are asked for, masked and checked."""
    provider = remotes[0]
    inner: Products
    if provider.ring:
        local = next((source for source in sources if isinstance(source, LocalRing)), None)
        scales = _agreed_scales(remotes, stored.scales if stored else local.scales if local else None)
        verifier = _verifier(config, provider, sources, stored)
        # Which experts come next depends on the text, unless all are asked each time.
        unforeseen = _experts(provider.manifest) if config.where_experts == "routed" else frozenset()
        inner = RingProducts(provider, _masks(config, provider, sources), verifier, scales, unforeseen)
    elif config.privacy == "plain":
        inner = PlainProducts(provider)
    else:
        bank = config.noise_bank or NoiseBankOptions()
        inner = NoiseBank(provider, _bank_source(provider, sources), bank, entropy=os.urandom)
    return padded(inner, config.pad_rows)


def _masks(config: SessionConfig, provider: RemoteExecutor, sources: list[Source]) -> Masks:
    if config.privacy == "one-time":
        return OneTimeMasks(
            provider.shapes,
            [source for source in sources if not isinstance(source, LocalSource)],
            budget_bytes=int(config.mask_budget_mib * 2**20),
            entropy=os.urandom,
            fill_at_rest=config.fill_masks,
        )
    if config.privacy == "noise-bank":
        bank = config.noise_bank or NoiseBankOptions()
        return BankMasks(provider.shapes, _bank_source(provider, sources), bank, os.urandom)
    return NoMasks(provider.shapes)


def _verifier(
    config: SessionConfig,
    provider: RemoteExecutor,
    sources: list[Source],
    stored: StoredFingerprints | None,
) -> Verifier | None:
    if config.when_verified == "off":
        return None
    return Verifier(
        stored or _live_fingerprints(config.privacy, provider.shapes, sources),
        provider.manifest.groups,
        rate=1.0 if config.when_verified == "always" else config.verify_rate,
        entropy=os.urandom,
        parties=" or ".join(map(party_name, [config.provider, *config.mask_sources])),
    )


def _check_fit(provider: str, manifest: Manifest, config: SessionConfig) -> None:
    if manifest.numerics in RINGS:
        return
    if config.privacy == "one-time":
        raise ConfigurationError(
            f"{provider} computes in {manifest.numerics}, and one-time masks need exact integers: ask for "
            "an executor with `serve --numerics ring`. Weaker modes must be asked for: privacy='noise-bank' "
            "or privacy='plain'; SECURITY.md says what they are worth"
        )
    if config.when_verified != "off":
        raise ConfigurationError(
            f"{provider} computes in {manifest.numerics}, whose rounding leaves nothing to verify; "
            "verification, and fingerprints, need an executor with `serve --numerics ring`"
        )


def _experts(manifest: Manifest) -> frozenset[int]:
    """The groups of experts."""
    return frozenset(at for at, group in enumerate(manifest.groups) if group.members[0].expert is not None)


def _check_not_recorded(remotes: list[RemoteExecutor]) -> None:
    for remote in remotes:
        if remote.manifest.recorded:
            raise ConfigurationError(
                f"{remote.url} records what tenants send into a transcript. If that is intended, as for an "
                "audit: allow_transcript=True"
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


def _bank_source(remote: RemoteExecutor, sources: list[Source]) -> MaskSource:
    return sources[0] if sources else ExecutorSource(remote, owned=False)


def _live_fingerprints(privacy: str, shapes: list[GroupShape], sources: list[Source]) -> Fingerprints:
    local = next((source for source in sources if isinstance(source, LocalRing)), None)
    if local is not None:
        return LiveFingerprints(shapes, os.urandom, lambda kind, rows: local.effect(*kind, [rows])[0])
    if privacy != "one-time":
        raise ConfigurationError(
            f"verification with privacy={privacy!r} needs fingerprints of the weights: make a file with "
            "`symbiosis-tenant fingerprint CHECKPOINT` and give fingerprints=FILE. Only "
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
