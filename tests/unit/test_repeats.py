"""The token behind the newest ones of a text where these stood before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tenant_sdk.drafts.repeats import LONGEST, WINDOW, repeated
from tenant_sdk.drafts.training import Features, repeated_shares


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1], (0, 0)),
        ([1, 2, 3], (0, 0)),
        ([3, 3], (1, 3)),
        ([3, 5, 3, 6, 3], (1, 6)),  # the newest place
        ([2, 3, 5, 3, 6, 2, 3], (2, 5)),  # the longer one before the newer one
        ([9, 1, 2, 3, 4, 7, 8, 1, 2, 3, 4], (LONGEST, 7)),
        ([0, 1, 2, 3, 4, 7, 0, 1, 2, 3, 4], (LONGEST, 7)),
        ([5, 9, *[1] * (WINDOW - 1), 5], (0, 0)),  # too far away
    ],
)
def test_what_follows(text: list[int], expected: tuple[int, int]) -> None:
    assert repeated(np.array(text)) == expected


def test_shares_are_of_tokens_that_are_learned() -> None:
    ids = torch.tensor([1, 2, 1, 2, 1, 3, 1])
    # Behind 1, 2 comes 1 again; behind 2, 1 stands 3, and not 2; 3 is new.
    learned = torch.tensor([False] * 4 + [True] * 3)
    shares = repeated_shares([Features(ids, torch.zeros(7, 4), learned)])
    assert shares == (0.0, 1.0, 0.0, 0.0)
