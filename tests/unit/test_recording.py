"""Answers kept for the second run of a layer: which product gets which, and what is asked for anyway."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from test_virtual import ALL, BACKWARD, FORWARD, QkvLayers, rows
from torch.utils.checkpoint import checkpoint as checkpointed

from tenant_sdk.model.recording import CopyStore, Recording, RecordingContext, Store
from tenant_sdk.sequences.encrypted_file import EncryptedFile


@pytest.fixture
def qkv() -> QkvLayers:
    return QkvLayers()


class Places(CopyStore):
    """In memory, and counts what is there."""

    def __init__(self) -> None:
        self.taken = 0

    def write(self, tensor: torch.Tensor) -> torch.Tensor:
        self.taken += 1
        return super().write(tensor)

    def free(self, kept: torch.Tensor) -> None:
        self.taken -= 1


def contexts(store: Store) -> Callable[[], tuple[RecordingContext, RecordingContext]]:
    def make() -> tuple[RecordingContext, RecordingContext]:
        recording = Recording(store)
        return recording.record(), recording.replay()

    return make


def once(block: Callable[..., torch.Tensor], *inputs: torch.Tensor, store: Store) -> torch.Tensor:
    out: torch.Tensor = checkpointed(block, *inputs, use_reentrant=False, context_fn=contexts(store))
    return out


@pytest.mark.parametrize("store", [Places, EncryptedFile])
def test_nothing_is_asked_for_twice(qkv: QkvLayers, store: type[Places] | type[EncryptedFile]) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return sum((layer(x).tanh().sum(-1, keepdim=True) for layer in qkv.layers), torch.zeros(()))

    x, kept = rows(grad=True), store()
    once(block, x, store=kept).sum().backward()
    assert qkv.asked() == [(FORWARD, ALL), (BACKWARD, ALL)]
    got, x.grad = x.grad, None
    block(x).sum().backward()
    assert torch.equal(got, x.grad)
    if isinstance(kept, Places):
        assert kept.taken == 0


def test_an_output_that_is_written_in_place_is_kept_as_it_was(qkv: QkvLayers) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return qkv.layers[0](x).mul_(3).tanh_() * qkv.layers[1](x).add_(1)[..., :1]

    x = rows(grad=True)
    once(block, x, store=CopyStore()).sum().backward()
    got, x.grad = x.grad, None
    block(x).sum().backward()
    assert torch.equal(got, x.grad)


def test_a_second_backward_asks_again(qkv: QkvLayers) -> None:
    x = rows(grad=True)
    loss = once(lambda x: qkv.layers[0](x).tanh(), x, store=CopyStore()).sum()
    loss.backward(retain_graph=True)
    first, x.grad = x.grad, None
    qkv.asked()
    loss.backward()
    assert torch.equal(first, x.grad)
    assert qkv.asked()[0][0] == FORWARD


def all_of(qkv: QkvLayers, x: torch.Tensor) -> None:
    for member in range(3):
        qkv.check(member, x)


def test_a_second_run_with_other_rows_asks(qkv: QkvLayers) -> None:
    recording, x, other = Recording(CopyStore()), rows(), rows()
    with recording.record():
        all_of(qkv, x)
    with recording.replay():
        all_of(qkv, other)
        all_of(qkv, torch.cat([x, x]))
        all_of(qkv, x.clone())
    assert len(qkv.asked()) == 3


def test_of_two_alike_each_gets_its_own(qkv: QkvLayers) -> None:
    recording, first, second = Recording(CopyStore()), rows(), rows()
    with recording.record():
        for x in (first, second):
            all_of(qkv, x)
    qkv.asked()
    with recording.replay():
        for x in (second.clone(), first.clone()):
            all_of(qkv, x)
    assert qkv.asked() == []


def test_a_run_that_ends_early_parts_nobody(qkv: QkvLayers) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return qkv.layers[0](x).tanh().sum() + qkv.layers[1](x).sum() + qkv.layers[2](x).sum()

    for _ in range(3):
        once(block, rows(grad=True), store=CopyStore()).backward()
        assert qkv.asked() == [(FORWARD, ALL), (BACKWARD, ALL)]


def test_one_checkpoint_in_another(qkv: QkvLayers) -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return sum((layer(x).tanh().sum() for layer in qkv.layers), torch.zeros(()))

    def block(x: torch.Tensor) -> torch.Tensor:
        return once(inner, x, store=CopyStore()) * inner(2 * x)

    x = rows(grad=True)
    once(block, x, store=CopyStore()).backward()
    got, x.grad = x.grad, None
    assert [direction for direction, _ in qkv.asked()].count(FORWARD) == 2
    block(x).backward()
    torch.testing.assert_close(got, x.grad)


@pytest.mark.parametrize("wanted", [True, False])
def test_places_are_given_back(qkv: QkvLayers, wanted: bool) -> None:
    places = Places()
    loss = once(lambda x: qkv.layers[0](x).tanh(), rows(grad=True), store=places).sum()
    assert places.taken == 3  # all that were asked for together
    if wanted:
        loss.backward()
    del loss
    gc.collect()
    assert places.taken == 0
