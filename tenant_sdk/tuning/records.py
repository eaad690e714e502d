"""Files of training data as people have them, read without a tokenizer: text, or JSONL.

A line of a JSONL file is a record, one of::

    {"text": "..."}
    {"prompt": "...", "completion": "..."}
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ConfigurationError, peer_text

_NAMES = (".jsonl", ".ndjson", ".json")
_KEYS = ("text", "prompt", "completion", "messages")  # one of which a record cannot do without
_MOST_KEYS, _LONGEST_KEY = 8, 40  # in a message
# What holds text, but is none.
_BINARY = (".parquet", ".arrow", ".pdf", ".docx", ".odt", ".xlsx", ".zip", ".gz")


class Record(msgspec.Struct, frozen=True):
    """A line of a JSONL file; other keys are not read."""

    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None  # that the template may describe


def check_data(paths: Sequence[Path]) -> None:
    """Read files and decode their records: what is wrong with them is told before anything takes time.

    A pipe is left alone, since it can be read only once.

    Raises:
        ConfigurationError: a file or a record is wrong; the message names file and line.
    """
    for path in paths:
        if path.is_file() or path.is_dir() or not path.exists():
            text = read_text(path)
            if holds_records(path, text):
                for _ in records_of(path, text):
                    pass
            elif not text.strip():
                raise ConfigurationError(f"{path} holds no text to learn from")


def read_text(path: Path) -> str:
    """A file's text, in UTF-8, with or without a byte order mark.

    Raises:
        ConfigurationError: it cannot be read.
    """
    if path.suffix.lower() in _BINARY:
        raise ConfigurationError(
            f"{path} is not plain text: {path.suffix} files are not read. Make plain text of it, or JSONL "
            "with a record in each line"
        )
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path} is not plain text in UTF-8: {error.reason} in byte {error.start}"
        ) from None  # the error itself holds the whole text
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error


def holds_records(path: Path, text: str) -> bool:
    """Whether a file's name says so, or its first line is a JSON object."""
    if path.suffix.lower() in _NAMES:
        return True
    first = text.lstrip().split("\n", 1)[0]
    try:
        return isinstance(msgspec.json.decode(first), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def records_of(path: Path, text: str) -> Iterator[tuple[str, Record]]:
    """The records of a file, each with where it is.

    Raises:
        ConfigurationError: one is wrong, or there is none.
    """
    empty = True
    # Not splitlines(): JSON may hold other ends of lines as they are.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where, empty = f"{path}, line {number}", False
            yield where, _decode(line, where)
    if empty:
        raise ConfigurationError(f"{path} holds no record to learn from: it is empty")


def _has(line: str) -> str:
    """The keys that a record has instead, and those that may be meant."""
    items = msgspec.json.decode(line.encode(), type=dict[str, Any]).items()
    keys = [key for key, value in items if value is not None]
    shown = [peer_text(key, _LONGEST_KEY) for key in sorted(keys)[:_MOST_KEYS]]
    close = [get_close_matches(key.lower(), _KEYS, n=1) for key in shown if key not in _KEYS]
    meant = {f"`{name}`" for found in close for name in found if name not in keys}
    return (
        f"this one has {' and '.join(shown) or 'none of them'}"
        + (f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else "")
        + (f"; did you mean {' and '.join(sorted(meant))}?" if meant else "")
    )


def _decode(line: str, where: str) -> Record:
    try:
        record = msgspec.json.decode(line.encode(), type=Record)
    except (msgspec.DecodeError, RecursionError) as error:  # which quotes no value
        raise ConfigurationError(f"{where}: {error}; a line holds one record, a JSON object") from None
    given = {name for name in _KEYS if getattr(record, name) is not None}
    if given not in ({"text"}, {"prompt", "completion"}, {"messages"}):
        raise ConfigurationError(
            f"{where}: a record has `text`, or `prompt` and `completion`, or `messages`; {_has(line)}"
        )
    if record.messages is None and not (record.text or record.completion):
        raise ConfigurationError(f"{where}: the {'completion' if record.text is None else 'text'} is empty")
    if record.messages is not None and not all(
        isinstance(each.get("role"), str) for each in record.messages or [{}]
    ):
        raise ConfigurationError(f"{where}: `messages` is a list of objects that have a `role`, not empty")
    return record
