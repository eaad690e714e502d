"""Keys and values in buffers and on the disk are those that transformers' own layers would keep."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from forking import in_child, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicLayer

from shared.errors import ConfigurationError
from tenant_sdk.sequences.encrypted_file import EncryptedFile
from tenant_sdk.sequences.kv_budget import KvBudget
from tenant_sdk.sequences.kv_layers import BLOCK, Buffer, DiskLayer, HostLayer, on_device

HEADS, WIDTH = 2, 4
LAYER = 2 * HEADS * WIDTH * 4  # bytes a token of one layer, one row of a batch


def states(tokens: int, batch: int = 1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys, and values of another width; not contiguous, as models give them."""
    generator = torch.Generator().manual_seed(seed)
    pair = (torch.randn(batch, tokens, HEADS, WIDTH + extra, generator=generator) for extra in (0, 1))
    keys, values = (each.transpose(1, 2) for each in pair)
    return keys, values


def disk(layers: int = 1, budget: int = 0) -> list[DiskLayer]:
    kv_budget = KvBudget(EncryptedFile(), budget)
    return [DiskLayer(kv_budget) for _ in range(layers)]


STEPS = st.one_of(
    st.tuples(st.just("update"), st.sampled_from([1, 1, 1, 2, 100, 255, 256, 257, 700])),
    st.tuples(st.just("crop"), st.sampled_from([0, 1, 3, 200, 256, 600, 5000])),
    st.tuples(st.just("select"), st.lists(st.integers(0, 7), min_size=1, max_size=4)),
    st.tuples(st.just("reorder"), st.lists(st.integers(0, 7), min_size=4, max_size=4)),
    st.tuples(st.just("repeat"), st.sampled_from([1, 2])),
    st.tuples(st.just("mask"), st.integers(1, 15)),
    st.tuples(st.just("reset"), st.none()),
)


def do(layer: Any, step: tuple[str, Any], batch: int, seed: int) -> None:
    """One step that is not an update."""
    kind, given_ = step
    if kind == "crop":
        layer.crop(-given_)
    elif kind == "select":
        layer.batch_select_indices(torch.tensor([row % batch for row in given_]))
    elif kind == "mask":
        chosen = [bool(given_ >> row & 1) for row in range(batch)]
        layer.batch_select_indices(torch.tensor(chosen if any(chosen) else [True] * batch))
    elif kind == "reorder":
        layer.reorder_cache(torch.tensor([given_[row % 4] % batch for row in range(batch)]))
    elif kind == "repeat":
        layer.batch_repeat_interleave(given_)
    else:
        layer.reset()


@settings(max_examples=60)
@given(st.lists(STEPS, max_size=12), st.sampled_from([None, 0, 300 * LAYER, 10**9]))
def test_the_same_as_dynamic_layers(steps: list[tuple[str, Any]], budget: int | None) -> None:
    ours = [HostLayer() for _ in range(3)] if budget is None else disk(3, budget)
    theirs = [DynamicLayer() for _ in range(3)]
    batch = 2
    for number, step in enumerate([("update", 300), *steps, ("update", 1)]):
        for at, (layer, plain) in enumerate(zip(ours, theirs, strict=True)):
            if step[0] == "update":
                given_ = states(step[1], batch, 10 * number + at)
                for got, expected in zip(layer.update(*given_), plain.update(*given_), strict=True):
                    assert torch.equal(got, expected)
            else:
                do(layer, step, batch, number)
                if step[0] == "reset":  # what earlier versions of transformers leave is zeros
                    theirs[at] = plain = DynamicLayer()
                elif plain.is_initialized:  # else they crop what is not there
                    do(plain, step, batch, number)
            assert layer.get_seq_length() == plain.get_seq_length()
            assert layer.get_mask_sizes(3) == plain.get_mask_sizes(3)
            if plain.get_seq_length():
                assert torch.equal(layer.keys, plain.keys)
                assert torch.equal(layer.values, plain.values)
        if theirs[0].keys is None:
            batch = 2
        elif theirs[0].keys.numel():
            batch = theirs[0].keys.shape[0]
        else:  # cropped to nothing: a new text, of as many rows
            theirs = [DynamicLayer() for _ in range(3)]
            for layer in ours:
                layer.reset()


def test_buffers_do_not_grow_for_every_token() -> None:
    layer = HostLayer()
    layer.update(*states(1000))
    places = {layer.update(*states(1))[0].data_ptr() for _ in range(1000)}
    assert len(places) < 10


def test_what_was_returned_stays() -> None:
    layer = HostLayer()
    first, _ = layer.update(*states(5))
    kept = first.clone()
    layer.update(*states(500, seed=1))
    assert torch.equal(first, kept)


def test_two_layers_returned_last_are_not_overwritten() -> None:
    layers = disk(3)
    for layer in layers:
        layer.update(*states(600))
    first, second = layers[0].update(*states(1))[0], layers[1].update(*states(1))[0]
    assert torch.equal(first, second)


def test_a_budget_keeps_whole_layers_in_memory() -> None:
    tokens = 3 * BLOCK
    layers = disk(4, 5 * tokens * LAYER // 2)  # values are wider: two layers fit, with what they grow by
    for number in range(tokens):
        for layer in layers:
            layer.update(*states(1, seed=number))
    assert [layer.resident for layer in layers] == [False, True, False, True]
    assert sum(layer.nbytes() for layer in layers if layer.resident) <= 5 * tokens * LAYER // 2
    assert not layers[1].blocks
    assert len(layers[0].blocks) == 3


def test_memory_is_two_layers_whatever_there_is_on_the_disk() -> None:
    layers = disk(8)
    for number in range(20):
        for layer in layers:
            layer.update(*states(BLOCK, seed=number))
    one = sum(each.numel() * 4 for each in layers[0].update(*states(1)))
    assert layers[0]._kv_budget.nbytes < 2.7 * one
    assert layers[0]._kv_budget.spill.nbytes > 7.5 * one


def test_cropped_blocks_give_their_slots_back() -> None:
    (layer,) = disk()
    layer.update(*states(4 * BLOCK))
    taken = layer._kv_budget.spill.nbytes
    for number in range(5):
        layer.crop(-3 * BLOCK - 1)
        layer.update(*states(3 * BLOCK + 1, seed=number))
    assert layer._kv_budget.spill.nbytes == taken


def test_the_file_is_closed_with_the_last_layer() -> None:
    layers = disk(2)
    for layer in layers:
        layer.update(*states(BLOCK))
        layer.update(*states(1))
    close = layers[0]._kv_budget.spill.close
    kv_budget = weakref.ref(layers[0]._kv_budget)
    layers[0]._kv_budget._readers.shutdown()
    gc.disable()
    try:
        del layers, layer
        assert kv_budget() is None  # at once, not when garbage is looked for
    finally:
        gc.enable()
    assert not close.alive


def test_another_dtype_from_now_on() -> None:
    for layer in (HostLayer(), *disk(1), *disk(1, 10**9)):
        keys, values = (each.bfloat16() for each in states(600))
        layer.update(keys, values)
        more = states(3, seed=1)
        got = layer.update(*more)
        expected = [torch.cat([a.float(), b], 2) for a, b in zip((keys, values), more, strict=True)]
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])
        assert torch.equal(layer.keys, expected[0])


@pytest.mark.parametrize("rows", [[0, 1], [1, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_turn_in_inference_mode_and_the_next_without(dtype: torch.dtype, rows: list[int]) -> None:
    """Tokens of one dtype are read ahead, or copied; buffers have room for those that follow."""
    for layer in (HostLayer(), *disk(1), *disk(1, 10**9)):
        first, second = states(600, 2), states(5, 2, seed=1)
        with torch.inference_mode():
            layer.update(*(each.to(dtype) for each in first))
            layer.update(*(each.to(dtype) for each in second))
            layer.batch_select_indices(torch.tensor(rows))
        with torch.no_grad():
            layer.update(*second)
            got = layer.update(*second)[0]
        expected = torch.cat([first[0], second[0]], 2).to(dtype).float()[rows]
        assert torch.equal(got, torch.cat([expected, second[0], second[0]], 2))
        layer.crop(-300)
        assert torch.equal(layer.keys, got[:, :, :-300])


def test_a_child_is_refused_and_does_not_wait() -> None:
    """The threads that read are not in it."""
    layers = disk(2)
    for layer in layers:
        layer.update(*states(600))
    one = layers[0].update(*states(1))  # so the other is being read

    def child() -> None:
        refused(
            lambda: layers[1].update(*states(1)),
            lambda: layers[0].keys,
            layers[1].reset,
            lambda: layers[1].crop(-400),
        )

    in_child(child)
    assert torch.equal(layers[0].keys, one[0])


def test_a_copy_is_refused() -> None:
    layers = [*disk(1), *disk(1, 10**9)]
    for layer in layers:
        layer.update(*states(600))
        for make in (copy.deepcopy, pickle.dumps):
            with pytest.raises(ConfigurationError, match=r"cannot be copied.*kv='host'"):
                make(layer)
    host = HostLayer()
    host.update(*states(600))
    assert torch.equal(copy.deepcopy(host).keys, host.keys)


def test_gradients_are_refused() -> None:
    keys, values = states(3)
    with pytest.raises(ConfigurationError, match="under torch"):
        HostLayer().update(keys.clone().requires_grad_(), values)
    with torch.no_grad():
        HostLayer().update(keys.clone().requires_grad_(), values)


def test_wrong_uses() -> None:
    layer = HostLayer()
    layer.crop(-1)
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0]))
    assert layer.keys is None
    assert layer.values is None
    with pytest.raises(ValueError, match="negative"):
        layer.crop(3)
    with pytest.raises(AttributeError, match="update"):
        layer.keys = torch.zeros(1)
    with pytest.raises(AttributeError, match="update"):
        layer.values = torch.zeros(1)


def test_copies_go_to_the_device_of_the_query() -> None:
    buffer = Buffer(states(5)[0])
    buffer.append(states(5)[0])
    assert on_device(buffer.tokens, torch.device("cpu")).data_ptr() == buffer.tokens.data_ptr()
    assert on_device(buffer.tokens, torch.device("meta")).shape == (1, HEADS, 5, WIDTH)


def test_a_read_that_fails_is_told(tmp_path: Path) -> None:
    layers = disk(2)
    for layer in layers:
        layer.update(*states(BLOCK))
    os.ftruncate(layers[0]._kv_budget.spill._file, 0)
    with pytest.raises(EOFError):
        layers[1].update(*states(1))
