"""The one session of a gateway's worker."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import ConfigurationError
from shared.hub import HUB
from shared.secrets import Secret
from tenant_sdk.connection.urls import LOCAL
from tenant_sdk.session.options import SessionConfig
from tenant_sdk.session.profiles import FIELDS
from tenant_sdk.trust.operators import SYSTEM

if TYPE_CHECKING:
    from tenant_sdk.session.session import Session

log = logging.getLogger(__name__)
_session: Session | None = None
_SECRET = "secret"  # noqa: S105 - the key of a reference to one


def written(config: SessionConfig) -> dict[str, Any]:
    """The options of a session as JSON has them: paths from the root on, and where secrets are.

    Raises:
        ConfigurationError: a secret itself is given, or an executor in this process.
    """
    plain = {}
    for name, each in FIELDS.items():
        value = getattr(config, name)
        if value == each.default or name == "profile":
            continue
        plain[name] = _encode_value(value, each.option.unit, secret=bool(each.option.confidential))
    return plain


def _encode_value(value: Any, unit: str = "", *, secret: bool = False) -> Any:
    if isinstance(value, Secret):
        names = [each.name for each in dataclasses.fields(value)]  # never what was read already
        return {_SECRET: {name: _encode_value(getattr(value, name)) for name in names}}
    if isinstance(value, list | tuple | set | frozenset):
        return [_encode_value(each, unit, secret=secret) for each in value]
    if (isinstance(value, Path) or (unit == "FILE" and isinstance(value, str))) and str(value) != SYSTEM:
        return str(Path(value).absolute())
    if isinstance(value, str) and value.startswith(LOCAL) and not value.startswith(LOCAL + HUB):
        return f"{LOCAL}{Path(value.removeprefix(LOCAL)).absolute()}"
    if isinstance(value, Path):
        return str(value)
    if (secret and value) or not isinstance(value, str | int | float | None):
        raise ConfigurationError("a gateway's session is given URLs, and where its secrets are")
    return value


def read(options: Mapping[str, Any]) -> SessionConfig:
    """The options of a session as they were written.

    Raises:
        ConfigurationError: see ``SessionConfig``.
    """
    return SessionConfig(**{name: _decode_value(value) for name, value in options.items()})


def _decode_value(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode_value(each) for each in value]
    if not isinstance(value, dict):
        return value
    secret = value[_SECRET]
    paths = {name: Path(secret[name]) for name in ("file", "folder") if secret[name]}
    return Secret(**{**secret, **paths, "command": tuple(secret["command"])})


def open_here(options: Mapping[str, Any]) -> Session:
    """This process's session, opened with the options that ``written`` returned.

    Secrets are read now, from the variables, files or commands that the options name.

    Raises:
        ConfigurationError, ConnectError: see ``tenant_sdk.connect``.
    """
    global _session
    if _session is None:
        from tenant_sdk.session.opening import open_session

        _session = open_session(read(options))
        if _session.kept is not None:
            log.warning("%s", _session.kept)
    return _session


def session_here() -> Session:
    """This process's session.

    Raises:
        ConfigurationError: none was opened.
    """
    if _session is None:
        raise ConfigurationError("there is no session with an executor: the model is not loaded")
    return _session
