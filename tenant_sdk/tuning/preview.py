"""Examples as people look at them: their text, with learned tokens marked, and their length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from tenant_sdk.terminal import visible
from tenant_sdk.tuning.conversations import IGNORE_INDEX, Example

_LEARNED, _OTHER = "bold green", "dim"
_SHOWN = 400  # characters of what is learned in one piece, or is not
_BAR = 40


def show_first(console: Console, tokenizer: Any, example: Example) -> None:
    """Print the first example of a training."""
    colour = console.color_system is not None
    console.print(f"the first example; what is learned of it is {'green' if colour else 'between ⟦ and ⟧'}:")
    console.print(shown(tokenizer, example, colour=colour))


def shown(tokenizer: Any, example: Example, *, colour: bool = True) -> Text:
    """The text of an example; what is learned is green, or else between ⟦ and ⟧."""
    learned = [label != IGNORE_INDEX for label in example["labels"]]
    ends = [at for at in range(1, len(learned) + 1) if at == len(learned) or learned[at] != learned[at - 1]]
    text, before = Text(), ""
    for end in ends:
        # As part of what is before it: alone it could lose a space, or half a character.
        until = tokenizer.decode(example["input_ids"][:end], clean_up_tokenization_spaces=False)
        piece = _shortened(visible(until[len(before) :]))
        before = until
        marked = f"⟦{piece}⟧" if learned[end - 1] and not colour else piece
        text.append(marked, style=_LEARNED if learned[end - 1] else _OTHER)
    return text


def _shortened(piece: str) -> str:
    half = _SHOWN // 2
    return piece if len(piece) <= _SHOWN else f"{piece[:half]} […] {piece[-half:]}"


def lengths(sizes: Sequence[int]) -> list[str]:
    """Lines of a histogram of tokens an example; each range is twice as long as the one before."""
    counts = Counter(size.bit_length() for size in sizes)
    largest = max(counts.values(), default=1)
    lines = []
    for bits in range(min(counts, default=0), max(counts, default=-1) + 1):
        bar = "█" * -(-counts[bits] * _BAR // largest)
        lines.append(f"{1 << bits - 1:>7,} to {(1 << bits) - 1:>7,} tokens  {bar} {counts[bits]:,}")
    return lines
