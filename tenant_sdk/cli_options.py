"""Options that the commands of ``symbiosis-tenant`` share, and the session that they describe."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from shared.errors import ConfigurationError
from tenant_sdk.opening import PRIVACY_MODES, connect
from tenant_sdk.session import Session


def _default(name: str) -> Any:
    """What ``tenant_sdk.connect`` takes if the user says nothing."""
    return inspect.signature(connect).parameters[name].default


PRIVACY: str = _default("privacy")
WIRE_DTYPE: str = _default("wire_dtype")
TIMEOUT: float = _default("timeout")

# Typer reads these at run time, where it wants Optional.
Provider = Annotated[str, typer.Option(help="URL of the executor, wss://host:port.")]
Ca = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(help="The provider's ca.pem. Default: the authorities of the operating system."),
]
TokenEnv = Annotated[str, typer.Option(metavar="VAR", help="Environment variable that holds the token.")]
MaskSource = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(help="Who computes masks' effects: wss:// URL or local:FOLDER. Default: the provider."),
]
MaskSourceCa = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(help="The mask source's ca.pem. Default: as --ca."),
]
MaskSourceTokenEnv = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(metavar="VAR", help="Variable that holds the mask source's token. Default: as --token-env."),
]
PrivacyMode = Annotated[str, typer.Option(metavar="MODE", help=" or ".join(PRIVACY_MODES) + ".")]
WireDtype = Annotated[str, typer.Option(help="float32, or bfloat16 for half the bytes and fewer digits.")]
Digest = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Refuse an executor that serves other weights than these."),
]
ClientCertificate = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(help="PEM file, for executors that ask for a certificate."),
]
ClientKey = Annotated[Optional[Path], typer.Option(help="Its key.")]  # noqa: UP045
Timeout = Annotated[float, typer.Option(help="Seconds without progress after which to give up.")]
Tokenizer = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(help="Folder of a tokenizer, for executors that serve none."),
]
Seed = Annotated[int, typer.Option(help="Of everything random except masks.")]


def client_certificate(certificate: Path | None, key: Path | None) -> tuple[Path, Path] | None:
    """Both files or neither."""
    if (certificate is None) != (key is None):
        raise ConfigurationError("--client-certificate and --client-key go together")
    return (certificate, key) if certificate and key else None


def _token(variable: str) -> str:
    token = os.environ.get(variable, "")
    if not token:
        raise ConfigurationError(
            f"the environment variable {variable} is not set: put the token that the provider gave you "
            f"there (`export {variable}=...`)"
        )
    return token


def open_session(
    provider: str,
    *,
    ca: Path | None,
    token_env: str,
    mask_source: list[str] | None,
    mask_source_ca: Path | None,
    mask_source_token_env: str | None,
    privacy: str,
    wire_dtype: str,
    digest: str | None,
    client: tuple[Path, Path] | None,
    timeout: float,
) -> Session:
    """``tenant_sdk.connect`` with what the options say.

    Raises:
        ConfigurationError: a token's variable is not set; else see ``connect``.
    """
    return connect(
        provider,
        token=_token(token_env),
        ca=ca,
        client_certificate=client,
        privacy=privacy,
        mask_sources=mask_source or (),
        mask_source_token=_token(mask_source_token_env) if mask_source_token_env else None,
        mask_source_ca=mask_source_ca,
        wire_dtype=wire_dtype,
        digest=digest,
        timeout=timeout,
    )
