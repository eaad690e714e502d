"""JSON and TOML that anybody may have written, and paths in them."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from pathlib import Path

import msgspec

from shared.errors import ConfigurationError

# What decoding raises of text that is none, of another encoding, or nested without an end.
UNREADABLE = (msgspec.DecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError)

# In a checkpoint's folder; all other files are texts, of the model or its tokenizer.
OF_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"})
_ALWAYS_READ = ("config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json")
_LARGEST_TEXT = 64 << 20
DIGITS = 20  # in a row; making a number of them takes the square of their count
# Nothing that was matched is tried again, so this takes as long as the text is.
_SHORT = re.compile(rb'(?s)(?:[^"0-9]++|"(?:[^"\\]++|\\.)*+"|[0-9]{1,%d}+(?![0-9]))*+' % DIGITS)


def numbers_fit(text: bytes) -> bool:
    """Whether no number of a text that is JSON has more than ``DIGITS`` digits in a row."""
    return _SHORT.fullmatch(text) is not None


def read_within(path: Path, max_bytes: int, *, pipes: bool = False) -> bytes:
    """A file of so many bytes at most; no more of it is read, since it may be a hole of any size.

    Args:
        pipes: take these too; to open one waits for its other end.

    Raises:
        ConfigurationError: it is larger, or no file.
        OSError: it cannot be read.
    """

    def open_at_once(name: str, flags: int) -> int:
        return os.open(name, flags if pipes else flags | os.O_NONBLOCK)

    with open(path, "rb", opener=open_at_once) as file:
        if not (pipes or stat.S_ISREG(os.fstat(file.fileno()).st_mode)):
            raise ConfigurationError(f"{path} is no file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ConfigurationError(f"{path} is larger than {max_bytes:,} bytes, which is no file of this kind")
    return content


def check_texts(folder: Path) -> None:
    """Refuse a checkpoint's or a tokenizer's folder of which libraries would read a hole into memory.

    Raises:
        ConfigurationError: a large file is no file of weights, and a hole for the most part; or a JSON file
            that every library reads is larger than any such file.
    """
    for file in (*folder.glob("*"), *folder.glob("additional_chat_templates/*")):
        if file.suffix in OF_WEIGHTS or not file.is_file():
            continue
        large = file.stat().st_size > _LARGEST_TEXT
        if large and (file.name in _ALWAYS_READ or mostly_hole(file)):
            raise ConfigurationError(
                f"{file} is larger than {_LARGEST_TEXT:,} bytes, which no file of this kind is"
            )


def mostly_hole(file: Path) -> bool:
    """Whether a large file takes less than half of its size on the disk; a copy takes all of it."""
    try:
        state = file.stat()
    except OSError:  # its reader says why
        return False
    return state.st_size > _LARGEST_TEXT and state.st_blocks * 512 < state.st_size // 2


def path_text(path: str | Path) -> str:
    """A path, or a text with paths, that can be encoded: bytes of it that are no UTF-8 become escapes."""
    return os.fsencode(path).decode(errors="backslashreplace")
