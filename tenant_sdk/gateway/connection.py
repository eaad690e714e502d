"""The one session of a gateway's worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shared.errors import ConfigurationError

if TYPE_CHECKING:
    from tenant_sdk.session import Session

_session: Session | None = None


def open_here(options: Mapping[str, Any]) -> Session:
    """This process's session, opened with the fields of ``tenant_sdk.cli_options.SessionOptions``.

    Secrets are read now, from the variables, files or commands that the options name.

    Raises:
        ConfigurationError, ConnectError: see ``tenant_sdk.connect``.
    """
    global _session
    if _session is None:
        import dataclasses

        from tenant_sdk.cli_options import SessionOptions
        from tenant_sdk.composition import open_session

        config = SessionOptions(**options).session()
        _session = open_session(dataclasses.replace(config, fill_masks=True))
    return _session


def session_here() -> Session:
    """This process's session.

    Raises:
        ConfigurationError: none was opened.
    """
    if _session is None:
        raise ConfigurationError("there is no session with an executor: the model is not loaded")
    return _session
