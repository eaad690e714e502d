"""Folders of the user, by the XDG Base Directory Specification."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """Where programs keep what they can make again."""
    return _named("XDG_CACHE_HOME", ".cache")


def configuration_home() -> Path:
    """Where programs keep their settings."""
    return _named("XDG_CONFIG_HOME", ".config")


def _named(variable: str, default: str) -> Path:
    named = os.environ.get(variable, "")
    # The specification has a relative path ignored: it would depend on the working directory.
    return Path(named) if os.path.isabs(named) else Path(os.path.expanduser("~"), default)
