"""Bytes of a token, by shapes alone."""

from __future__ import annotations

import math

import pytest

from shared.wire.header import Direction
from shared.wire.protocol import GroupShape
from shared.wire.traffic import TokenBytes, token_bytes

BOTH = (Direction.FORWARD, Direction.BACKWARD)


def test_a_token_takes_its_rows_its_answers_and_their_effects() -> None:
    """q, k, v of 64 inputs and 64 + 32 + 32 outputs, and a layer back."""
    ring = [GroupShape(64, (64, 32, 32), planes=1), GroupShape(128, (64,), planes=1)]
    assert token_bytes(ring, [Direction.FORWARD]) == (4 * (64 + 128), 4 * (128 + 64))
    assert token_bytes(ring, BOTH) == (4 * 2 * 192, 4 * 2 * 192)
    assert token_bytes(ring, BOTH, sources=2) == (4 * 2 * 192, 3 * 4 * 2 * 192)
    assert token_bytes(ring, BOTH, sources=1, answer_bits=16) == (4 * 2 * 192, 4 * 2 * 192)


def test_two_planes_answer_twice_and_floats_have_neither_bits_nor_effects() -> None:
    fine, floats = GroupShape(64, (32,), planes=2), GroupShape(64, (32,))
    assert token_bytes([fine], [Direction.FORWARD], answer_bits=24, sources=1) == (256, 2 * 2 * 32 * 3)
    assert token_bytes([floats], [Direction.FORWARD], itemsize=2, answer_bits=16, sources=1) == (128, 64)


@pytest.mark.parametrize(("gigabits", "tokens"), [(1, 125), (10, 1_250)])
def test_the_busier_way_decides(gigabits: float, tokens: float) -> None:
    assert TokenBytes(1e5, 1e6).tokens_per_second(gigabits) == tokens
    assert TokenBytes(1e6, 1e5).tokens_per_second(gigabits) == tokens


def test_no_link_limits_a_token_that_takes_nothing() -> None:
    """As if all groups are kept."""
    assert TokenBytes(0, 0).tokens_per_second(1) == math.inf
