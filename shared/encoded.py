"""JSON and TOML that anybody may have written."""

from __future__ import annotations

import tomllib

import msgspec

# What decoding raises of text that is none, of another encoding, or nested without an end.
UNREADABLE = (msgspec.DecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError)
