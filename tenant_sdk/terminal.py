"""Text of command lines on a terminal, without control characters from any source."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def visible(text: str) -> str:
    """Without control characters, which files, their names and tokenizers of others may hold."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


class Terminal(Console):
    """Rich's console for lines of text, with nothing highlighted and no line broken."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, soft_wrap=True, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """See rich."""
        super().print(*(visible(each) if isinstance(each, str) else each for each in objects), **options)
