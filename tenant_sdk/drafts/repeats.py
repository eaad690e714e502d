"""An earlier occurrence of a text's newest tokens, and the token that followed it.

A draft knows the model's last hidden state and no text. So it cannot guess a name or a number that the prompt
has. Prompt lookup can (Saxena 2023, "Prompt Lookup Decoding").
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LONGEST = 4  # tokens that are compared
WINDOW = 4096  # newest tokens that are searched: in a gateway, all sequences wait for the search

Ids = NDArray[np.int64]


def repeated(text: Ids) -> tuple[int, int]:
    """How a text goes on if it repeats itself.

    Args:
        text: ids ``[T]``; of them the newest ``WINDOW`` count.

    Returns:
        The number of newest tokens that occurred together before, at most ``LONGEST``, and the token that
        followed the last of these occurrences. Zeros: the newest token did not occur before.
    """
    text = text[-WINDOW:]
    places, length = np.flatnonzero(text[:-1] == text[-1]), 1
    if not len(places):
        return 0, 0
    while length < LONGEST:
        longer = places[places >= length]
        longer = longer[text[longer - length] == text[-1 - length]]
        if not len(longer):
            break
        places, length = longer, length + 1
    return length, int(text[places[-1] + 1])
