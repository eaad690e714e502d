"""What is not public in torch, transformers and websockets: missing or wrong, and right all the same."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import make_dataclass
from inspect import Parameter, Signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_ring_product import SHAPES, expected, seeded, some_rows, some_weight
from transformers import GenerationMixin, core_model_loading
from transformers.generation import utils as generation
from websockets import frames

from provider.executor.weights import FloatWeight
from shared import compat
from shared.ring.product import int8_kernel, is_exact
from shared.wire.frames import Opcode, encode_control
from shared.wire.header import Direction

CPU = torch.device("cpu")
MISSING = object()  # in place of a function


def raises(*_: Any) -> Any:
    raise TypeError("other arguments")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each is tried once; other tests shall not get what was found here."""
    found = compat.websocket_mask, compat.int8_product, compat.onednn_products, compat.conversions
    found += (compat.cache_name,)
    for each in found:
        each.cache_clear()
    yield
    for each in found:
        each.cache_clear()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Any:
    """``told(name, reason)``: one line of the log says that this cannot be used, and why."""
    caplog.set_level(logging.INFO, "shared")

    def check(name: str, reason: str) -> None:
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert record.getMessage().startswith(f"{name} cannot be used")
        assert reason in record.getMessage()

    return check


def replace(patch: pytest.MonkeyPatch, owner: Any, name: str, instead: Any) -> None:
    if instead is MISSING:
        patch.delattr(owner, name)
    else:
        patch.setattr(owner, name, instead)


def test_nothing_is_said_of_what_can_be_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shared")
    assert compat.websocket_mask() is frames.apply_mask  # type: ignore[attr-defined]
    assert compat.int8_product(CPU) is torch._int_mm
    assert compat.conversions() is not None
    assert (compat.onednn_products() is not None) == (
        torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    )
    assert not caplog.records


# -- websockets ------------------------------------------------------------------------------------

MASKS = [
    pytest.param(MISSING, "apply_mask", id="missing"),
    pytest.param(raises, "other arguments", id="raises"),
    pytest.param(lambda data, mask: bytes(data), "wrong", id="does nothing"),
    pytest.param(lambda data, mask: compat.plain_mask(data[:128], mask), "wrong", id="cuts off"),
    pytest.param(lambda data, mask: compat.plain_mask(data, mask[::-1]), "wrong", id="reversed"),
]


@pytest.mark.parametrize(("instead", "reason"), MASKS)
def test_frames_are_masked_without_the_library(
    instead: Any, reason: str, monkeypatch: pytest.MonkeyPatch, told: Any
) -> None:
    replace(monkeypatch, frames, "apply_mask", instead)
    key = bytes([1, 2, 0xFE, 0x80])
    for count in (0, 1, 3, 4, 5, 125):
        data = bytes(range(100, 100 + count))
        frame = encode_control(Opcode.PING, data, key)
        assert frame[-count - 4 :] == key + bytes(byte ^ key[i % 4] for i, byte in enumerate(data))
    told("websockets.frames.apply_mask", reason)


# -- conversions -----------------------------------------------------------------------------------

RULES = [
    pytest.param("dot_natural_key", MISSING, "dot_natural_key", id="missing"),
    pytest.param("rename_source_key", raises, "other arguments", id="raises"),
    pytest.param("rename_source_key", lambda key, *_: (key, None), "wrong", id="renames nothing"),
    pytest.param("dot_natural_key", str, "wrong", id="another order"),
    pytest.param("Concatenate", core_model_loading.Interleave, "wrong", id="another result"),
]


@pytest.mark.parametrize(("name", "instead", "reason"), RULES)
def test_checkpoints_are_converted_by_rules_that_were_tried(
    name: str, instead: Any, reason: str, monkeypatch: pytest.MonkeyPatch, told: Any
) -> None:
    replace(monkeypatch, core_model_loading, name, instead)
    assert compat.conversions() is None
    told("transformers.core_model_loading", reason)


# -- int8 products ---------------------------------------------------------------------------------


def saturating(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Pairs are added in 16 bits, as some processors do."""
    pairs = rows.int().view(len(rows), -1, 2, 1) * weight.int().view(1, -1, 2, weight.shape[1])
    return pairs.sum(2).clamp(-(2**15), 2**15 - 1).sum(1).to(torch.int32)


INT8 = [
    pytest.param(MISSING, "_int_mm", id="missing"),
    pytest.param(raises, "other arguments", id="raises"),
    pytest.param(saturating, "wrong", id="saturates"),
    pytest.param(lambda rows, weight: rows.int() @ weight.int() + 1, "wrong", id="one too much"),
    pytest.param(lambda rows, weight: (rows.int() @ weight.int())[:8], "wrong", id="too few rows"),
]


@pytest.mark.parametrize(("instead", "reason"), INT8)
def test_integers_are_multiplied_without_the_int8_product(
    instead: Any, reason: str, monkeypatch: pytest.MonkeyPatch, told: Any
) -> None:
    replace(monkeypatch, torch, "_int_mm", instead)
    assert is_exact(int8_kernel)
    generator = seeded()
    for count, inner, columns in SHAPES[:12]:
        rows, weight = some_rows(generator, count, inner), some_weight(generator, inner, columns)
        out = torch.empty((count, columns), dtype=torch.int32)
        int8_kernel(rows, weight, out)
        assert torch.equal(out, expected(rows, weight))
    told("torch._int_mm", reason)


def test_sums_over_2_to_the_31_wrap_around() -> None:
    rows, weight = (
        torch.full((1, 140_001), -128).to(torch.int8),
        torch.full((140_001, 1), -128).to(torch.int8),
    )
    assert compat.plain_int8_product(rows, weight).tolist() == [[140_001 * 2**14 - 2**32]]


# -- float products --------------------------------------------------------------------------------


class Linear:
    """In place of oneDNN's: a function with a variant; ``add`` is what the sum is multiplied with."""

    def __init__(self, bias: float = 0.0, add: float = 1.0) -> None:
        self.bias, self.add = bias, add

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
        return rows @ weight.T + self.bias

    def binary(self, rows: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
        return rows @ weight.T + self.add * total


LINEAR = [
    pytest.param(SimpleNamespace(), "_linear_pointwise", id="missing"),
    pytest.param(SimpleNamespace(_linear_pointwise=raises), "other arguments", id="raises"),
    pytest.param(SimpleNamespace(_linear_pointwise=lambda x, w, *_: x @ w.T), "binary", id="half of it"),
    pytest.param(SimpleNamespace(_linear_pointwise=Linear(bias=1.0)), "wrong", id="wrong product"),
    pytest.param(SimpleNamespace(_linear_pointwise=Linear(add=0.0)), "wrong", id="wrong sum"),
]


@pytest.mark.skipif(
    not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()), reason="no oneDNN"
)
@pytest.mark.parametrize(("instead", "reason"), LINEAR)
def test_floats_are_multiplied_without_onednn(
    instead: Any, reason: str, monkeypatch: pytest.MonkeyPatch, told: Any
) -> None:
    """Small integers, which are exact in any order."""
    monkeypatch.setattr(torch, "ops", SimpleNamespace(mkldnn=instead))
    weight = torch.arange(24.0).view(6, 4) - 9
    served = FloatWeight(weight, [2, 4])
    for rows in (1, 5, 17):
        x = torch.arange(rows * 4.0).view(rows, 4)
        assert torch.equal(torch.cat(served.apply(Direction.FORWARD, 0b11, [x]), 1), x @ weight.T)
        gradients = [x[:, :2].contiguous(), x]
        (gx,) = served.apply(Direction.BACKWARD, 0b11, gradients)
        assert torch.equal(gx, torch.cat(gradients, 1) @ weight)
    told("torch.ops.mkldnn._linear_pointwise", reason)


def test_without_the_libraries_it_is_for_onednn_is_not_missed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    caplog.set_level(logging.INFO, "shared")
    assert compat.onednn_products() is None
    assert not caplog.records


# -- what transformers calls a cache ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["past_key_values", "cache", "kept"])
def test_the_cache_is_found_by_its_type(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the present version calls it, and the next one."""
    output = make_dataclass("Output", [("sequences", "Tensor"), (name, "Cache | None", None)])
    monkeypatch.setattr(generation, "GenerateDecoderOnlyOutput", output)
    taken = Signature([Parameter(name, Parameter.KEYWORD_ONLY)])
    monkeypatch.setattr(GenerationMixin.prepare_inputs_for_generation, "__signature__", taken, raising=False)
    assert compat.cache_name() == name


def test_a_cache_that_generate_does_not_take_has_the_earlier_name(
    monkeypatch: pytest.MonkeyPatch, told: Any
) -> None:
    output = make_dataclass("Output", [("other", "Cache | None", None)])
    monkeypatch.setattr(generation, "GenerateDecoderOnlyOutput", output)
    assert compat.cache_name() == "past_key_values"
    told("the cache of transformers' generate", "its results are wrong")


# -- parameters without memory ---------------------------------------------------------------------


def test_other_threads_make_real_parameters_meanwhile() -> None:
    inside, ends, here = threading.Event(), threading.Event(), list[torch.nn.Module]()

    def build() -> None:
        with compat.parameters_without_memory():
            inside.set()
            ends.wait(800)
            here.append(torch.nn.BatchNorm1d(3))

    register = torch.nn.Module.register_parameter
    thread = threading.Thread(target=build)
    thread.start()
    assert inside.wait(800)
    other = torch.nn.Linear(2, 3)
    ends.set()
    thread.join()
    assert not other.weight.is_meta
    (made,) = here
    assert made.weight.is_meta
    assert made.weight.requires_grad
    assert not made.running_mean.is_meta  # type: ignore[union-attr]
    assert torch.nn.Module.register_parameter is register
