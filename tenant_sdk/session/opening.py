"""``tenant_sdk.connect``: opens the connections of a session and has its products assembled."""

from __future__ import annotations

import functools
import logging
from contextlib import ExitStack
from pathlib import Path

from shared.errors import ConfigurationError
from shared.secrets import text_of
from shared.wire.header import EXACT, RINGS, half_bits
from shared.wire.messages import Manifest
from shared.wire.traffic import token_bytes
from tenant_sdk.connection.remote import RemoteExecutor
from tenant_sdk.connection.stats import Stats
from tenant_sdk.connection.urls import is_local, party_name
from tenant_sdk.products.fingerprints import StoredFingerprints
from tenant_sdk.products.mask_sources import OwnCheckpoint
from tenant_sdk.products.products import padded
from tenant_sdk.session.assembly import assemble, expert_groups, opened_sources
from tenant_sdk.session.keeping import keep_groups
from tenant_sdk.session.options import WEAKER, SessionConfig
from tenant_sdk.session.parties import PartyConnector
from tenant_sdk.session.profiles import takes_options
from tenant_sdk.session.session import Session
from tenant_sdk.spinning import stop_spinning
from tenant_sdk.trust.attestation import check_agreement
from tenant_sdk.trust.operators import SIGNS, Operators

log = logging.getLogger(__name__)


@takes_options(SessionConfig)
def connect(config: SessionConfig) -> Session:
    """Open a session with an executor.

    Args:
        OPTIONS

    Raises:
        ConfigurationError: An option is wrong, or does not fit the provider's model.
        ConnectError: The session could not be opened. The message says why; see ``shared.errors``.
        ModelMismatch: Weights, parameters or files differ from those of ``digest``, the fingerprints or a
            mask source.
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
        sources = opened_sources(config, remotes)
        _warn(provider.url, config, operators)
        if config.privacy == "one-time" and config.where_experts == "routed" and expert_groups(manifest):
            log.warning(
                "%s sees how many tokens each expert gets, which depends on the text "
                "(docs/explanation/privacy.md)",
                provider.url,
            )
        if stored is not None and provider.ring:
            stored.fit(manifest)
        elif stored is not None:
            stored.attest(manifest)  # its products are not checked, but all that is downloaded is
        inner, kept = assemble(config, remotes, sources, stored), None
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
            own_weights = next(
                (source.weights for source in sources if isinstance(source, OwnCheckpoint)), None
            )
            products, kept = keep_groups(
                config, products, own_weights or inner.verifying_everything(), provider, count
            )
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
    parties = [PartyConnector(config, config.provider, text_of(config.token), config.ca, operators)]
    provider = parties[0].open(stats)
    opened.callback(provider.close)
    _check_fit(party_name(config.provider), provider.manifest, config)
    remotes = [provider]
    for source, (token, ca) in zip(config.mask_sources, credentials, strict=True):
        if not is_local(source):
            parties.append(PartyConnector(config, source, token, ca, operators, "mask_source_"))
            remotes.append(parties[-1].open(stats))
            opened.callback(remotes[-1].close)
            check_agreement(remotes[-1].url, remotes[-1].manifest, provider.manifest)
    if config.privacy == "one-time" and len(parties) > 1:
        for party in parties:
            party.probe_replicas()
    if not config.allow_transcript:
        _check_not_recorded(remotes)
    return remotes


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


def _check_not_recorded(remotes: list[RemoteExecutor]) -> None:
    for remote in remotes:
        if remote.manifest.recorded:
            raise ConfigurationError(
                "{} records tenants' messages in a transcript. To accept this, for example for an audit, "
                "give {allow_transcript}",
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
