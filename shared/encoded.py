"""JSON and TOML that anybody may have written, and names of files in them."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import msgspec

# What decoding raises of text that is none, of another encoding, or nested without an end.
UNREADABLE = (msgspec.DecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError)


def path_text(path: Path) -> str:
    """A path as text that can be encoded: bytes of it that are no UTF-8 become escapes."""
    return os.fsencode(path).decode(errors="backslashreplace")
