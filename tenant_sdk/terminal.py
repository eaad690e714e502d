"""Text of command lines on a terminal, without control characters from any source."""

from __future__ import annotations

import json
import sys
import unicodedata
from typing import Any

from rich.console import Console

# Soft hyphen, and what joins letters or emoji or keeps them apart: parts of ordinary text.
_PARTS_OF_WORDS = "\u00ad\u200c\u200d"


def visible(text: str) -> str:
    """Without control characters, which files, their names and tokenizers of others may hold."""
    return "".join(c if _is_text(c) or c in "\n\t" else "\ufffd" for c in text)


def json_line(value: Any) -> str:
    """JSON, in which control characters are escaped; what is read from it is the value.

    Standard output may have another encoding than UTF-8: then all but ASCII is escaped.
    """
    encoded = json.dumps(value, ensure_ascii=(sys.stdout.encoding or "utf-8").lower() != "utf-8")
    return "".join(c if _is_text(c) else json.dumps(c)[1:-1] for c in encoded)


def _is_text(character: str) -> bool:
    return (
        character.isprintable()
        or character in _PARTS_OF_WORDS
        or unicodedata.category(character) == "Zs"  # spaces of all widths, some without a break
    )


class Terminal(Console):
    """Rich's console for lines of text, with nothing highlighted and no line broken."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, soft_wrap=True, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """See rich."""
        super().print(*(visible(each) if isinstance(each, str) else each for each in objects), **options)
