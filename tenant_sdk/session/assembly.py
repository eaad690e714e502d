"""Products of a session from their parts: how a session's products are masked, asked for and checked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from shared.errors import ConfigurationError, Metavar, ModelMismatch, OptionReference
from shared.wire.messages import Manifest
from shared.wire.protocol import GroupShape
from tenant_sdk.connection.channel import Entropy
from tenant_sdk.connection.remote import RemoteExecutor
from tenant_sdk.connection.urls import LOCAL, is_local, party_name
from tenant_sdk.products.bank_masks import BankMasks
from tenant_sdk.products.bank_options import NoiseBankOptions
from tenant_sdk.products.fingerprints import StoredFingerprints
from tenant_sdk.products.mask_sources import ExecutorSource, LocalRing, LocalSource, MaskSource
from tenant_sdk.products.masks import MaskGenerator, NoMasks
from tenant_sdk.products.noise_bank import NoiseBank
from tenant_sdk.products.one_time_masks import OneTimeMasks
from tenant_sdk.products.products import PlainProducts, Products
from tenant_sdk.products.ring_products import RingProducts
from tenant_sdk.products.verification import Fingerprints, IntegerProduct, LiveFingerprints
from tenant_sdk.products.verifier import Verifier
from tenant_sdk.session.options import SessionConfig

Source = ExecutorSource | LocalRing | LocalSource


def opened_sources(config: SessionConfig, remotes: list[RemoteExecutor]) -> list[Source]:
    """Who computes masks' effects, in the order in which they were named."""
    executors = iter(remotes[1:])
    local = LocalRing if remotes[0].ring else LocalSource
    return [
        local(str(source).removeprefix(LOCAL), remotes[0].manifest)
        if is_local(source)
        else ExecutorSource(next(executors), owned=True)
        for source in config.mask_sources
    ]


def assemble(
    config: SessionConfig,
    remotes: list[RemoteExecutor],
    sources: list[Source],
    stored: StoredFingerprints | None,
    *,
    entropy: Entropy = os.urandom,
    clock: Callable[[], float] = time.monotonic,
) -> Products:
    """Returns the products of a session whose executors are connected, in its privacy mode.

    Args:
        remotes: the provider, and the mask sources that are executors.
        sources: see ``opened_sources``.
        stored: fingerprints that the tenant trusts.
        entropy: secret random bytes; the operating system's.
        clock: seconds, for masks that are fetched ahead.

    Raises:
        ConfigurationError: options do not fit together.
    """
    provider = remotes[0]
    inner: Products
    if provider.ring:
        local = next((source for source in sources if isinstance(source, LocalRing)), None)
        scales = _agreed_scales(remotes, stored.scales if stored else local.scales if local else None)
        verifier = _verifier(config, provider, sources, stored, entropy)
        # Which experts come next depends on the text, unless all are asked each time.
        unpredictable = expert_groups(provider.manifest) if config.where_experts == "routed" else frozenset()
        masks = _masks(config, provider, sources, entropy, clock)
        inner = RingProducts(provider, masks, verifier, scales, unpredictable, config.answers)
    elif config.privacy == "plain":
        inner = PlainProducts(provider)
    else:
        bank = config.noise_bank or NoiseBankOptions()
        inner = NoiseBank(provider, _bank_source(provider, sources), bank, entropy=entropy)
    return inner


def _masks(
    config: SessionConfig,
    provider: RemoteExecutor,
    sources: list[Source],
    entropy: Entropy,
    clock: Callable[[], float],
) -> MaskGenerator:
    if config.privacy == "one-time":
        return OneTimeMasks(
            provider.shapes,
            [source for source in sources if not isinstance(source, LocalSource)],
            budget_bytes=int(config.mask_budget_mib * 2**20),
            entropy=entropy,
            fill_when_idle=config.fill_masks,
            clock=clock,
        )
    if config.privacy == "noise-bank":
        bank = config.noise_bank or NoiseBankOptions()
        return BankMasks(provider.shapes, _bank_source(provider, sources), bank, entropy)
    return NoMasks(provider.shapes)


def _verifier(
    config: SessionConfig,
    provider: RemoteExecutor,
    sources: list[Source],
    stored: StoredFingerprints | None,
    entropy: Entropy,
) -> Verifier | None:
    if config.when_verified == "off":
        return None
    local = _local_products(sources)
    if local is None and config.answers != "exact" and config.privacy != "one-time":
        remedies = [OptionReference("answers", "exact"), OptionReference("verify", "off")]
        if config.privacy != "plain":  # which takes no mask source
            remedies.insert(0, OptionReference("mask_sources", ["local:FOLDER"]))
        raise ConfigurationError(
            "checks of {answers} need products of secret numbers, which {privacy} would show to the "
            f"provider: use one-time masks, {'{}, ' * (len(remedies) - 1)}or {{}}",
            *remedies,
            answers=config.answers,
            privacy=config.privacy,
        )
    return Verifier(
        stored or _live_fingerprints(config.privacy, provider.shapes, local, entropy),
        provider.manifest.groups,
        rate=1.0 if config.when_verified == "always" else config.verify_rate,
        repeat_rate=config.repeat_rate,
        trusted=local,
        entropy=entropy,
        parties=" or ".join(map(party_name, [config.provider, *config.mask_sources])),
    )


def expert_groups(manifest: Manifest) -> frozenset[int]:
    """The groups that experts belong to, by id."""
    return frozenset(at for at, group in enumerate(manifest.groups) if group.of_expert)


def _bank_source(remote: RemoteExecutor, sources: list[Source]) -> MaskSource:
    return sources[0] if sources else ExecutorSource(remote, owned=False)


def _local_products(sources: list[Source]) -> IntegerProduct | None:
    """Of the tenant's own checkpoint, if it is a mask source."""
    local = next((source for source in sources if isinstance(source, LocalRing)), None)
    if local is None:
        return None
    return lambda kind, rows: local.effect(kind, [rows])[0]


def _live_fingerprints(
    privacy: str, shapes: list[GroupShape], local: IntegerProduct | None, entropy: Entropy
) -> Fingerprints:
    if local is not None:
        return LiveFingerprints(shapes, entropy, local)
    if privacy != "one-time":
        raise ConfigurationError(
            "verification with {privacy} needs fingerprints of the weights: make a file with "
            "`symbiosis-tenant fingerprint CHECKPOINT` and give {fingerprints}. Only one-time masks can "
            "make them through the executors: others would show them to the provider",
            privacy=privacy,
            fingerprints=Metavar("FILE"),
        )
    return LiveFingerprints(shapes, entropy)


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
