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


def keep_compiled_code() -> None:
    """Have torch.compile keep code in the user's cache; for before torch is imported.

    torch's default is a name in /tmp, which another user may take first. Users without a home, like some
    services, keep the default.
    """
    folder = cache_home() / "symbiosis" / "compiled"
    nearest = next(each for each in (folder, *folder.parents) if each.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def _named(variable: str, default: str) -> Path:
    named = os.environ.get(variable, "")
    # The specification has a relative path ignored: it would depend on the working directory.
    return Path(named) if os.path.isabs(named) else Path(os.path.expanduser("~"), default)
