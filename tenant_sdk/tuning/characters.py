"""Characters that a tokenizer does not keep: it leaves them out, changes them, or has the unknown token.

A model learns what the tokenizer makes of a text, and writes the same.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import peer_text
from tenant_sdk.tuning.conversations import encode

_LETTER = "a"
_SHOWN = 8  # characters that a line names, of those of which the same becomes


def note_first_lines(first: dict[str, int], characters: set[str], line: int) -> None:
    """Add the line of those characters that are new."""
    first.update(dict.fromkeys(sorted(characters.difference(first)), line))


def lost_characters_text(tokenizer: Any, first: Mapping[str, int]) -> str:
    """What to tell about characters that do not come back from their tokens; empty: there are none.

    Args:
        first: the line in which each character is first, in the order of lines.
    """
    unknown = getattr(tokenizer, "unk_token", None)
    groups: dict[str, list[str]] = {}
    lines: dict[str, int] = {}
    judged = [each for each in first if not each.isspace()]
    lost = _changed_characters(tokenizer, judged)
    for each, became in lost.items():
        shown = repr(each)
        if unknown and unknown in became:
            what = f"become {peer_text(unknown, 40)}"
        elif became:
            what, shown = "are changed", f"{each!r} to {became[:_SHOWN]!r}"
        else:
            what = "are left out"
        groups.setdefault(what, []).append(shown)
        lines.setdefault(what, first[each])
    if not lost:
        return ""
    sentences = (
        f"these {what}: {', '.join(shown[:_SHOWN])}"
        + (f" and {len(shown) - _SHOWN:,} more" if len(shown) > _SHOWN else "")
        + f" (first in line {lines[what]})"
        for what, shown in groups.items()
    )
    return (
        f"of {len(judged):,} different characters the tokenizer does not keep {len(lost):,}, which the model "
        f"can neither learn nor write; {'; '.join(sentences)}"
    )


def _changed_characters(tokenizer: Any, characters: Sequence[str]) -> dict[str, str]:
    """What becomes of the characters that do not come back, alone or behind a letter."""
    text = " ".join(f"{each} {_LETTER}{each}" for each in characters)
    if _equivalent(_decoded(tokenizer, text), text):  # most tokenizers keep all, and one text shows it
        return {}
    if len(characters) > 1:
        half = len(characters) // 2
        return _changed_characters(tokenizer, characters[:half]) | _changed_characters(
            tokenizer, characters[half:]
        )
    for each in characters:
        for before in (_LETTER, ""):
            kept, became = _decoded(tokenizer, before), _decoded(tokenizer, before + each)
            if not _equivalent(became, kept + each):
                return {each: became.removeprefix(kept)}
    return {}


def _decoded(tokenizer: Any, text: str) -> str:
    return str(tokenizer.decode(encode(tokenizer, text), clean_up_tokenization_spaces=False))


def _equivalent(text: str, other: str) -> bool:
    """Whether two texts are the same to Unicode, but for white space."""
    one, two = (unicodedata.normalize("NFC", "".join(each.split())) for each in (text, other))
    return one == two
