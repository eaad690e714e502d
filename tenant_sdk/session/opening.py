"""``tenant_sdk.connect``: opens the connections of a session and puts its privacy mode together."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from shared.errors import Argument, ConfigurationError, ModelMismatch, Placeholder
from shared.secrets import text_of
from shared.spinning import stop_spinning
from shared.wire.header import EXACT, RINGS, half_bits
from shared.wire.messages import Manifest
from shared.wire.protocol import GroupShape
from shared.wire.traffic import token_bytes
from tenant_sdk.connection.remote import RemoteExecutor
from tenant_sdk.connection.stats import Stats
from tenant_sdk.connection.urls import LOCAL, is_local, party_name
from tenant_sdk.products.bank_masks import BankMasks
from tenant_sdk.products.bank_options import NoiseBankOptions
from tenant_sdk.products.fingerprints import StoredFingerprints
from tenant_sdk.products.mask_sources import ExecutorSource, LocalRing, LocalSource, MaskSource, OwnCheckpoint
from tenant_sdk.products.masks import MaskGenerator, NoMasks, OneTimeMasks
from tenant_sdk.products.noise_bank import NoiseBank
from tenant_sdk.products.products import PlainProducts, PrivacyMode, padded
from tenant_sdk.products.ring_products import RingProducts
from tenant_sdk.products.verification import Fingerprints, IntegerProduct, LiveFingerprints
from tenant_sdk.products.verifier import Verifier
from tenant_sdk.session.keeping import keep_groups
from tenant_sdk.session.options import WEAKER, SessionConfig
from tenant_sdk.session.parties import ReplicatedExecutor
from tenant_sdk.session.profiles import takes_options
from tenant_sdk.session.session import Session
from tenant_sdk.trust.attestation import check_agreement
from tenant_sdk.trust.operators import SIGNS, Operators

log = logging.getLogger(__name__)


@takes_options(SessionConfig)
def connect(config: SessionConfig) -> Session:
    """Open a session with an executor.

    Args:
        OPTIONS

    Raises:
        ConfigurationError: an option is wrong, or does not fit what the provider serves.
        ConnectError: no session, with the reason; see ``shared.errors``.
        ModelMismatch: other weights, parameters or files than ``digest``, the fingerprints or a mask
            source's.
    """
    return open_session(config)


def open_session(config: SessionConfig) -> Session:
    """What ``connect`` does.

    Raises:
        ConfigurationError, ConnectError, ModelMismatch: see there.
    """
    stop_spinning()
    operators = Operators(config.allowed if config.privacy == "one-time" else SIGNS)
    credentials = config.credentials
    stored = None
    if config.fingerprints is not None:
        stored = StoredFingerprints(config.fingerprints, text_of(config.fingerprint_key) or None)
    with ExitStack() as opened:
        remotes = _open_executors(config, credentials, operators, opened)
        provider, manifest = remotes[0], remotes[0].manifest
        sources = _sources(config, remotes)
        _warn(provider.url, config, operators)
        if config.privacy == "one-time" and config.where_experts == "routed" and _experts(manifest):
            log.warning(
                "%s sees how many tokens each expert gets, which depends on the text "
                "(docs/explanation/privacy.md)",
                provider.url,
            )
        if stored is not None and provider.ring:
            stored.fit(manifest)
        elif stored is not None:
            stored.attest(manifest)  # its products are not checked, but all that is downloaded is
        inner, kept = _products(config, remotes, sources, stored), None
        opened.callback(inner.close)
        products = padded(inner, config.pad_rows)
        answer_bits = half_bits(manifest.numerics) if config.answers == "half" else EXACT
        remote_sources = len(remotes) - 1 if config.privacy == "one-time" else 0
        if config.keep_gib:
            count = functools.partial(
                token_bytes,
                itemsize=provider.wire_dtype.itemsize,
                answer_bits=answer_bits,
                sources=remote_sources,
            )
            strict = inner.verifying_everything() if isinstance(inner, RingProducts) else inner
            own_weights = next(
                (source.weights for source in sources if isinstance(source, OwnCheckpoint)), None
            )
            products, kept = keep_groups(config, products, own_weights or strict, provider, count)
        session = Session(
            provider,
            products,
            config.privacy,
            config.where_experts,
            answer_bits=answer_bits,
            remote_sources=remote_sources,
            kept=kept,
        )
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
    parties = [ReplicatedExecutor(config, config.provider, text_of(config.token), config.ca, operators)]
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
            party.probe_replicas()
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
) -> PrivacyMode:
    """How products are masked, asked for and checked."""
    provider = remotes[0]
    inner: PrivacyMode
    if provider.ring:
        local = next((source for source in sources if isinstance(source, LocalRing)), None)
        scales = _agreed_scales(remotes, stored.scales if stored else local.scales if local else None)
        verifier = _verifier(config, provider, sources, stored)
        # Which experts come next depends on the text, unless all are asked each time.
        unpredictable = _experts(provider.manifest) if config.where_experts == "routed" else frozenset()
        masks = _masks(config, provider, sources)
        inner = RingProducts(provider, masks, verifier, scales, unpredictable, config.answers)
    elif config.privacy == "plain":
        inner = PlainProducts(provider)
    else:
        bank = config.noise_bank or NoiseBankOptions()
        inner = NoiseBank(provider, _bank_source(provider, sources), bank, entropy=os.urandom)
    return inner


def _masks(config: SessionConfig, provider: RemoteExecutor, sources: list[Source]) -> MaskGenerator:
    if config.privacy == "one-time":
        return OneTimeMasks(
            provider.shapes,
            [source for source in sources if not isinstance(source, LocalSource)],
            budget_bytes=int(config.mask_budget_mib * 2**20),
            entropy=os.urandom,
            fill_when_idle=config.fill_masks,
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
    local = _local_products(sources)
    if local is None and config.answers != "exact" and config.privacy != "one-time":
        remedies = [Argument("answers", "exact"), Argument("verify", "off")]
        if config.privacy != "plain":  # which takes no mask source
            remedies.insert(0, Argument("mask_sources", ["local:FOLDER"]))
        raise ConfigurationError(
            "checks of {answers} need products of secret numbers, which {privacy} would show to the "
            f"provider: use one-time masks, {'{}, ' * (len(remedies) - 1)}or {{}}",
            *remedies,
            answers=config.answers,
            privacy=config.privacy,
        )
    return Verifier(
        stored or _live_fingerprints(config.privacy, provider.shapes, local),
        provider.manifest.groups,
        rate=1.0 if config.when_verified == "always" else config.verify_rate,
        repeat_rate=config.repeat_rate,
        trusted=local,
        entropy=os.urandom,
        parties=" or ".join(map(party_name, [config.provider, *config.mask_sources])),
    )


def _check_fit(provider: str, manifest: Manifest, config: SessionConfig) -> None:
    if manifest.numerics in RINGS:
        return
    if config.privacy == "one-time":
        raise ConfigurationError(
            "{} computes in {}, and one-time masks need exact integers: ask for an executor with "
            "`serve --numerics ring`. {}",
            provider,
            manifest.numerics,
            WEAKER,
        )
    if config.when_verified != "off":
        raise ConfigurationError(
            f"{provider} computes in {manifest.numerics}, whose rounding leaves nothing to verify; "
            "verification, and fingerprints, need an executor with `serve --numerics ring`"
        )
    if config.answers != "exact":
        raise ConfigurationError(
            "{} computes in {}, and {answers} needs `serve --numerics ring`; {wire_dtype} halves the bytes "
            "of floats",
            *(provider, manifest.numerics),
            answers=config.answers,
            wire_dtype="bfloat16",
        )


def _experts(manifest: Manifest) -> frozenset[int]:
    """The groups of experts."""
    return frozenset(at for at, group in enumerate(manifest.groups) if group.of_expert)


def _check_not_recorded(remotes: list[RemoteExecutor]) -> None:
    for remote in remotes:
        if remote.manifest.recorded:
            raise ConfigurationError(
                "{} records what tenants send into a transcript. If that is intended, as for an audit: "
                "{allow_transcript}",
                remote.url,
                allow_transcript=True,
            )


def _warn(provider: str, config: SessionConfig, operators: Operators) -> None:
    privacy = config.privacy
    if privacy == "plain":
        log.warning("privacy 'plain': %s sees every activation (SECURITY.md)", provider)
    if privacy == "noise-bank":
        itself = not config.mask_sources or operators.same
        log.warning(
            "privacy 'noise-bank': %s %s (SECURITY.md)",
            provider,
            "multiplies the masks itself, so it can subtract them"
            if itself
            else "sees the difference of rows under the same mask, and each mask serves many rows",
        )
    if privacy == "one-time" and operators.same:
        # On one machine it is a trial, of which `serve --dev` and `doctor` say the same.
        log.log(
            logging.INFO if operators.all_here else logging.WARNING,
            "%s, which was allowed: if that is one operator, these masks hide nothing from it",
            operators.same,
        )


def _bank_source(remote: RemoteExecutor, sources: list[Source]) -> MaskSource:
    return sources[0] if sources else ExecutorSource(remote, owned=False)


def _local_products(sources: list[Source]) -> IntegerProduct | None:
    """Of the tenant's own checkpoint, if it is a mask source."""
    local = next((source for source in sources if isinstance(source, LocalRing)), None)
    if local is None:
        return None
    return lambda kind, rows: local.effect(kind, [rows])[0]


def _live_fingerprints(privacy: str, shapes: list[GroupShape], local: IntegerProduct | None) -> Fingerprints:
    if local is not None:
        return LiveFingerprints(shapes, os.urandom, local)
    if privacy != "one-time":
        raise ConfigurationError(
            "verification with {privacy} needs fingerprints of the weights: make a file with "
            "`symbiosis-tenant fingerprint CHECKPOINT` and give {fingerprints}. Only one-time masks can "
            "make them through the executors: others would show them to the provider",
            privacy=privacy,
            fingerprints=Placeholder("FILE"),
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
