"""JSON and TOML that anybody may have written, and paths in them."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import msgspec

# What decoding raises of text that is none, of another encoding, or nested without an end.
UNREADABLE = (msgspec.DecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError)

DIGITS = 20  # in a row; making a number of them takes the square of their count
# Nothing that was matched is tried again, so this takes as long as the text is.
_SHORT = re.compile(rb'(?s)(?:[^"0-9]++|"(?:[^"\\]++|\\.)*+"|[0-9]{1,%d}+(?![0-9]))*+' % DIGITS)


def numbers_fit(text: bytes) -> bool:
    """Whether no number of a text that is JSON has more than ``DIGITS`` digits in a row."""
    return _SHORT.fullmatch(text) is not None


def path_text(path: Path) -> str:
    """A path as text that can be encoded: bytes of it that are no UTF-8 become escapes."""
    return os.fsencode(path).decode(errors="backslashreplace")
