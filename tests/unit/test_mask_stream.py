"""Masks: what a seed expands to, however it is drawn."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.ring.mask_stream import MaskStream

SEED = bytes(range(32))
SEEDS = st.binary(min_size=32, max_size=32)
PIECE = 1 << 16  # integers that the key stream is made in at once


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """All integers in the order of drawing."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def test_the_first_block_of_the_key_0_is_what_aes_makes_of_0() -> None:
    block = MaskStream(bytes(32)).draw(2, 2).numpy().tobytes()
    assert block.hex() == "dc95c078a2408989ad48a21492842087"


def test_what_openssl_makes_of_zeros() -> None:
    """``head -c 400400 /dev/zero | openssl enc -aes-256-ctr -K 00..1f -iv 00..00 | sha256sum``."""
    data = MaskStream(SEED).draw(100, 1001).numpy().tobytes()
    expected = "7caeeeeba6d5277a8fd7bdcc6bff6064818fb599589c0a4b0753bd8a3cc47ab0"
    assert hashlib.sha256(data).hexdigest() == expected


def test_the_vectors() -> None:
    file = Path(__file__).parents[1] / "vectors" / "messages.json"
    for vector in json.loads(file.read_text())["masks"]:
        if "values" in vector:
            start, count = vector["start"], len(vector["values"])
            drawn = MaskStream(bytes.fromhex(vector["seed"])).draw(1, start + count)[0, start:]
            assert drawn.tolist() == vector["values"]


@given(seed=SEEDS, pieces=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8))
def test_pieces_are_the_whole(seed: bytes, pieces: list[tuple[int, int]]) -> None:
    stream = MaskStream(seed)
    drawn = [stream.draw(rows, columns) for rows, columns in pieces]
    assert [tuple(each.shape) for each in drawn] == pieces
    assert all(each.dtype == torch.int32 and each.is_contiguous() for each in drawn)
    total = sum(rows * columns for rows, columns in pieces)
    whole = MaskStream(seed).draw(1, total + 1)[0]
    assert torch.equal(flat([*drawn, stream.draw(1, 1)]), whole)


@pytest.mark.parametrize("size", [PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 5])
def test_long_masks_are_made_in_pieces(size: int) -> None:
    stream = MaskStream(SEED)
    at_once = MaskStream(SEED).draw(1, size + 3)[0]
    assert torch.equal(flat([stream.draw(1, size), stream.draw(3, 1)]), at_once)
    assert torch.equal(MaskStream(SEED).draw(size + 3, 1)[:, 0], at_once)


def test_rows_come_one_after_the_other() -> None:
    assert torch.equal(MaskStream(SEED).draw(5, 7), MaskStream(SEED).draw(1, 35).view(5, 7))


def test_nothing_repeats() -> None:
    """Blocks of a stream are a permutation's values, so all differ; seeds that differ share none."""
    blocks: list[bytes] = []
    for seed in (SEED, SEED[::-1], SEED[:31] + b"\x1e", bytes(32)):
        stream = MaskStream(seed)
        for _ in range(5):
            data = stream.draw(40, 100).numpy().tobytes()
            blocks += [data[at : at + 16] for at in range(0, len(data), 16)]
    assert len(set(blocks)) == len(blocks) == 20_000


def test_every_bit_is_a_fair_coin() -> None:
    """Of 200,000 integers: each of the 32 bits within 5 standard deviations of one half, signs too."""
    mask = MaskStream(SEED).draw(400, 500).long().view(-1)
    for bit in range(32):
        assert abs(float((mask >> bit & 1).double().mean()) - 0.5) < 5 * 0.5 / 200_000**0.5


def test_a_mask_is_the_callers_own() -> None:
    stream = MaskStream(SEED)
    first = stream.draw(4, 4)
    before = first.clone()
    first.zero_()
    assert torch.equal(MaskStream(SEED).draw(4, 4), before)
    assert not torch.equal(stream.draw(4, 4), before)


@pytest.mark.parametrize("length", [0, 1, 16, 24, 31, 33, 64])
def test_a_seed_has_32_bytes(length: int) -> None:
    """16 and 24 are lengths of AES keys too."""
    with pytest.raises(ValueError, match="32 bytes"):
        MaskStream(bytes(length))


def test_seeds_of_any_type_of_bytes() -> None:
    expected = MaskStream(SEED).draw(3, 3)
    changing = bytearray(SEED)
    stream = MaskStream(changing)
    changing[:] = bytes(32)
    assert torch.equal(stream.draw(3, 3), expected)
    assert torch.equal(MaskStream(memoryview(SEED)).draw(3, 3), expected)


@pytest.mark.parametrize("skip", [0, 4, 16, 20, 4 * 1000])
def test_a_stream_may_begin_in_the_middle(skip: int) -> None:
    """As for a piece of a request that stands as a seed."""
    whole = MaskStream(bytes(range(32))).draw(1, 2000)
    assert torch.equal(MaskStream(bytes(range(32)), skip).draw(1, 500)[0], whole[0, skip // 4 :][:500])
