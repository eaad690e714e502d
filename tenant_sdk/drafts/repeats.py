"""What a text repeats: the token behind the newest ones where these stood before.

A draft knows the model's last hidden state and no text. So it cannot guess a name or a number that the prompt
has, and this is what prompt lookup guesses well (Saxena 2023, "Prompt Lookup Decoding").
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
        How many of the newest tokens stood together before, at most ``LONGEST``, and the token that followed
        the newest of these places. Zeros: the newest token is new.
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
