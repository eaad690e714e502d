"""What a hostile provider puts into files, and how it shows that something read one of the tenant's."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conftest import Executor

TOKENIZER = Path(__file__).resolve().parent.parent / "examples" / "base_model"
RULES = (TOKENIZER / "tokenizer.json").read_bytes()
TEXT = "Patient with diabetes seen, insulin 4 units."
SECRET = "SYMBIOSIS_TOKEN=the-tenants-own-secret"

_opened: list[str] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open":
        _opened.append(str(arguments[0]))


sys.addaudithook(_note)


@contextmanager
def nothing_opens(path: Path) -> Iterator[None]:
    """While this lasts, no Python code opens a file."""
    global _opened
    _opened = []
    try:
        yield
    finally:
        opened, _opened = _opened, None
    assert str(path) not in opened


def changed(**parts: Any) -> bytes:
    """The honest tokenizer.json with other parts."""
    return json.dumps({**json.loads(RULES), **parts}).encode()


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(rules)}


def charsmap(*strings: bytes, trie: bytes = bytes(4 * 256)) -> dict[str, Any]:
    """SentencePiece's table; the trie of zeros finds nothing."""
    blob = len(trie).to_bytes(4, "little") + trie + b"\0".join(strings) + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(blob).decode()}


def template(*pieces: tuple[str, str], tokens: int = 1) -> dict[str, Any]:
    return {
        "type": "TemplateProcessing",
        "single": [{kind: {"id": name, "type_id": 0}} for kind, name in pieces],
        "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0] * tokens, "tokens": ["<s>"] * tokens}},
    }


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def config_of(executor: Executor) -> tuple[dict[str, Any], Any]:
    """The config.json that an executor serves, and its manifest."""
    with executor.connect() as session:
        (info,) = (info for info in session.manifest.files if info.name == "config.json")
        return json.loads(session.executor.file(info)), session.manifest
