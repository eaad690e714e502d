"""JSON and TOML that anybody may have written, and paths in them."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any, TypeVar, overload

import msgspec

from shared.errors import ConfigurationError

T = TypeVar("T")
# What decoding raises of text that is none, of another encoding, or nested without an end.
UNREADABLE = (msgspec.DecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError)

# In a checkpoint's folder; all other files are texts, of the model or its tokenizer.
OF_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"})
_ALWAYS_READ = ("config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json")
_LARGEST_TEXT = 64 << 20
# Making an integer takes the square of its digits. Some files have `model_max_length`, of 31 digits.
DIGITS, _DIGITS_OF_FILES = 20, 40
UNFIT = f"a number has more than {DIGITS} digits in a row, or an exponent beyond 199"
# Floats near the largest or the smallest one take a thousand times as long to decode as others.
_EXPONENT = rb"[eE][-+]?+[01]?[0-9]{1,2}(?![0-9])"
_SUSPICIOUS = re.compile(rb"[0-9][eE][-+]?[0-9]{3}|[0-9]{%d}" % (DIGITS + 1))


def _fitting(digits: int) -> re.Pattern[bytes]:
    # Nothing that was matched is tried again, so this takes as long as the text is.
    number = rb"[0-9]{1,%d}+(?:%s|(?![0-9eE]))" % (digits, _EXPONENT)
    return re.compile(rb'(?s)(?:[^"0-9]++|"(?:[^"\\]++|\\.)*+"|%s)*+' % number)


_OF_REQUESTS, _OF_FILES = _fitting(DIGITS), _fitting(_DIGITS_OF_FILES)


def numbers_fit(text: bytes) -> bool:
    """Whether all numbers of a text that is JSON are quick to decode: if not, ``UNFIT`` says why."""
    return _SUSPICIOUS.search(text) is None or _OF_REQUESTS.fullmatch(text) is not None


@overload
def decode_json(text: bytes | str) -> Any: ...
@overload
def decode_json(text: bytes | str, kind: type[T]) -> T: ...
def decode_json(text: bytes | str, kind: Any = Any) -> Any:
    """A JSON text that anybody may have written, as ``msgspec.json.decode`` does.

    Without the check, some megabytes of numbers would take minutes, in which no other thread runs.

    Raises:
        msgspec.DecodeError: it is not JSON, or a number takes long to decode.
        msgspec.ValidationError: it is of another kind.
        UnicodeEncodeError: a str has half a surrogate pair.
    """
    encoded = text.encode() if isinstance(text, str) else text
    if _SUSPICIOUS.search(encoded) is not None and _OF_FILES.fullmatch(encoded) is None:
        raise msgspec.DecodeError(
            f"a number has over {_DIGITS_OF_FILES} digits in a row, or an exponent beyond 199"
        )
    return msgspec.json.decode(encoded, type=kind)


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
        if large and (file.name in _ALWAYS_READ or is_sparse(file)):
            raise ConfigurationError(
                f"{file} is larger than {_LARGEST_TEXT:,} bytes, which no file of this kind is"
            )


def is_sparse(file: Path) -> bool:
    """Whether a large file takes less than half of its size on the disk; a copy takes all of it."""
    try:
        state = file.stat()
    except OSError:  # its reader says why
        return False
    return state.st_size > _LARGEST_TEXT and state.st_blocks * 512 < state.st_size // 2


def path_text(path: str | Path) -> str:
    """A path, or a text with paths, that can be encoded: bytes of it that are no UTF-8 become escapes."""
    return os.fsencode(path).decode(errors="backslashreplace")
