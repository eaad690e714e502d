"""Options that the commands of ``symbiosis-tenant`` share, and the session that they describe."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Optional, TypeVar

import typer

from shared.errors import ConfigurationError
from tenant_sdk.config import PRIVACY_MODES, VERIFY_MODES, SessionConfig
from tenant_sdk.trust.operators import SIGNS, allowed_signs

T = TypeVar("T")


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


_EXECUTORS, _PRIVACY, _CHECKS = "Executors", "Privacy", "Verification"


# Typer reads the annotations at run time, where it wants Optional.
@dataclass(frozen=True, kw_only=True)
class ExecutorOptions:
    """Which executors, and how to reach them."""

    provider: Annotated[
        str, _option(_EXECUTORS, "URL of the executor: wss://host:port; on this machine ipc://DIRECTORY.")
    ]
    token_env: Annotated[
        Optional[str],  # noqa: UP045
        _option(_EXECUTORS, "Environment variable that holds the token.", metavar="VAR"),
    ] = None
    ca: Annotated[
        Optional[Path],  # noqa: UP045
        _option(_EXECUTORS, "The provider's ca.pem. Default: the authorities of the operating system."),
    ] = None
    mask_source: Annotated[
        Optional[list[str]],  # noqa: UP045
        _option(
            _EXECUTORS,
            "Who computes masks' effects: an executor of another operator (its URL), or local:FOLDER "
            "with the checkpoint. Repeat for several: one that does not collude is enough.",
        ),
    ] = None
    mask_source_ca: Annotated[
        Optional[list[Path]],  # noqa: UP045
        _option(
            _EXECUTORS,
            "A mask source's own ca.pem, or `system`; for each source one. Default without --ca: system.",
        ),
    ] = None
    mask_source_token_env: Annotated[
        Optional[list[str]],  # noqa: UP045
        _option(
            _EXECUTORS,
            "Variable that holds a mask source's own token; for each source one.",
            metavar="VAR",
        ),
    ] = None
    client_certificate: Annotated[
        Optional[Path],  # noqa: UP045
        _option(_EXECUTORS, "PEM file, for executors that ask for a certificate."),
    ] = None
    client_key: Annotated[Optional[Path], _option(_EXECUTORS, "Its key.")] = None  # noqa: UP045
    wire_dtype: Annotated[
        str,
        _option(
            _EXECUTORS, "float32, or bfloat16 for half the bytes and fewer digits; not with ring numerics."
        ),
    ] = SessionConfig.wire_dtype
    digest: Annotated[
        Optional[str],  # noqa: UP045
        _option(_EXECUTORS, "Refuse executors with another digest of weights, parameters and files."),
    ] = None
    timeout: Annotated[float, _option(_EXECUTORS, "Seconds that each step may take.")] = 10.0
    allow_same: Annotated[
        Optional[list[str]],  # noqa: UP045
        _option(
            _EXECUTORS,
            f"What provider and mask sources may have in common after all: {', '.join(SIGNS)}. Repeat for "
            "several.",
            metavar="SIGN",
        ),
    ] = None
    allow_same_operator: Annotated[
        bool,
        _option(
            _EXECUTORS,
            "All of that, although masks then hide nothing from whoever runs both: to try it out.",
            "--allow-same-operator",
        ),
    ] = False

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        self.client()
        allowed_signs(self.allow_same or (), self.allow_same_operator)

    def client(self) -> tuple[Path, Path] | None:
        """Certificate and key: both files or neither."""
        if (self.client_certificate is None) != (self.client_key is None):
            raise ConfigurationError("--client-certificate and --client-key go together")
        return (
            (self.client_certificate, self.client_key)
            if self.client_certificate and self.client_key
            else None
        )


@dataclass(frozen=True, kw_only=True)
class SessionOptions(ExecutorOptions):
    """A session: which executors, what they may see, and what is checked."""

    # field(): no default, not the one above.
    token_env: Annotated[
        str, _option(_EXECUTORS, "Environment variable that holds the token.", metavar="VAR")
    ] = field()
    timeout: Annotated[float, _option(_EXECUTORS, "Seconds without progress after which to give up.")] = (
        SessionConfig.timeout
    )
    privacy: Annotated[str, _option(_PRIVACY, " or ".join(PRIVACY_MODES) + ".", metavar="MODE")] = (
        SessionConfig.privacy
    )
    allow_transcript: Annotated[
        bool,
        _option(
            _PRIVACY,
            "Use executors that announce that they record what tenants send, as for an audit.",
            "--allow-transcript",
        ),
    ] = False
    mask_budget_mib: Annotated[
        float, _option(_PRIVACY, "Memory for masks' effects that are fetched ahead, in MiB.")
    ] = SessionConfig.mask_budget_mib
    pad_rows: Annotated[
        int,
        _option(
            _PRIVACY,
            "Hide how many rows a request has: round up to a power of two, at least this. 0: do not.",
        ),
    ] = SessionConfig.pad_rows
    verify: Annotated[
        Optional[str],  # noqa: UP045
        _option(
            _CHECKS,
            f"Check answers: {' or '.join(VERIFY_MODES)}. Default: always with one-time masks or "
            "--fingerprints, else off.",
            metavar="WHEN",
        ),
    ] = None
    verify_rate: Annotated[
        float, _option(_CHECKS, "With --verify sampled: the fraction of requests that is checked.")
    ] = SessionConfig.verify_rate
    fingerprints: Annotated[
        Optional[Path],  # noqa: UP045
        _option(_CHECKS, "File of the command fingerprint: check against weights that you trust."),
    ] = None
    fingerprint_key_env: Annotated[
        Optional[str],  # noqa: UP045
        _option(_CHECKS, "Environment variable that holds the file's key.", metavar="VAR"),
    ] = None

    def session(self) -> SessionConfig:
        """What the options say, checked as far as it can be before anybody is connected to.

        Raises:
            ConfigurationError: a variable is not set; else see ``connect``.
        """
        if self.fingerprints is not None and self.fingerprint_key_env is None:
            raise ConfigurationError(
                "--fingerprints needs --fingerprint-key-env VAR: the variable with the key that "
                "`symbiosis-tenant fingerprint` printed"
            )
        config = SessionConfig(
            provider=self.provider,
            token=secret(self.token_env, "the token that the provider gave you"),
            ca=self.ca,
            client_certificate=self.client(),
            privacy=self.privacy,
            mask_sources=self.mask_source or (),
            mask_source_token=one_or_each(
                [secret(name, "the mask source's token") for name in self.mask_source_token_env or ()]
            ),
            mask_source_ca=one_or_each(self.mask_source_ca or ()),
            allow_same=self.allow_same or (),
            allow_same_operator=self.allow_same_operator,
            allow_transcript=self.allow_transcript,
            mask_budget_mib=self.mask_budget_mib,
            pad_rows=self.pad_rows,
            verify=self.verify,
            verify_rate=self.verify_rate,
            fingerprints=self.fingerprints,
            fingerprint_key=self.fingerprint_key_env
            and secret(self.fingerprint_key_env, "the fingerprints' key"),
            wire_dtype=self.wire_dtype,
            digest=self.digest,
            timeout=self.timeout,
        )
        config.credentials  # noqa: B018 - refuses tokens and authorities that parties would share
        return config


Tokenizer = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(help="Folder of a tokenizer, for executors that serve none."),
]
Model = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="FOLDER|NAME[@REVISION]",
        help="Your own copy of the model, also at a hub: all but its frozen layers is taken from it.",
    ),
]
Base = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="FOLDER|NAME[@REVISION]",
        help="Where the adapter will say that its base is, for use without an executor.",
    ),
]
Seed = Annotated[int, typer.Option(help="Of everything random except masks.")]


def secret(variable: str, what: str) -> str:
    """The value of an environment variable: command lines are visible to others, environments are not.

    Raises:
        ConfigurationError: it is not set.
    """
    value = os.environ.get(variable, "")
    if not value and (len(variable) > 40 or not variable.isidentifier()):
        raise ConfigurationError(  # which must not show what may be a secret
            f"name the environment variable that holds {what}, not {what} itself"
        )
    if not value:
        raise ConfigurationError(
            f"the environment variable {variable} is not set: put {what} there (`export {variable}=...`)"
        )
    return value


def one_or_each(given: Sequence[T]) -> T | Sequence[T] | None:
    """As ``connect`` takes it: None, one for all, or one for each."""
    return given[0] if len(given) == 1 else given or None
