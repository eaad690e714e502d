"""The session of a gateway's worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenant_sdk.session import Session

_session: Session | None = None


def session_of(options: Mapping[str, Any]) -> Session:
    """This process's one session, opened with options as ``tenant_sdk.cli_options.SessionOptions`` has them.

    Secrets are read now, from the variables, files or commands that the options name.

    Raises:
        ConfigurationError, ConnectError: see ``tenant_sdk.connect``.
    """
    global _session
    if _session is None:
        from tenant_sdk.cli_options import SessionOptions
        from tenant_sdk.composition import open_session

        _session = open_session(SessionOptions(**options).session())
    return _session


def open_sessions() -> Session | None:
    """The session, if there is one."""
    return _session
