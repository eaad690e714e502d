"""What native code is given: only memory of the processor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shared.ring import native


class Untouched:
    """In place of the library: whatever is called is a pointer that should not have been given."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        def called(*_: object) -> int:
            raise AssertionError(f"{name} was called")

        return called


def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


HIDDEN = [torch.ones(2, 6), torch.ones(6), integers(2, 6), integers(2), integers(6), integers(2)]
HIDDEN += [torch.ones(2, 6)]
REVEALED = [integers(2, 12), integers(2, 12), integers(2), torch.ones(6), torch.ones(2, 6)]
REVEALED += [integers(12), integers(2)]
MULTIPLIED = [integers(2, 6), integers(6, 3, dtype=torch.int8), integers(2, 3)]


def hide(tensors: list[torch.Tensor]) -> None:
    tensor, scales, *others = tensors
    native.quantize_and_mask([tensor], scales, 1.0, *others)


def reveal(tensors: list[torch.Tensor]) -> None:
    answers, effect, exponents, scales, tensor, *others = tensors
    native.unmask_and_dequantize(answers, [effect], exponents, scales, [tensor], *others)


def multiply(tensors: list[torch.Tensor]) -> None:
    native.multiply(0, *tensors)


@pytest.mark.parametrize(
    ("function", "tensors"), [(hide, HIDDEN), (reveal, REVEALED), (multiply, MULTIPLIED)]
)
def test_a_tensor_of_another_device_is_refused_and_not_read(
    function: Callable[[list[torch.Tensor]], None],
    tensors: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each in turn is on ``meta``, whose address is 0."""
    monkeypatch.setattr(native, "LIBRARY", Untouched())
    for at in range(len(tensors)):
        with pytest.raises(ValueError, match="not of meta"):
            function([each.to("meta") if i == at else each for i, each in enumerate(tensors)])
    with pytest.raises(AssertionError, match="was called"):
        function(tensors)


@pytest.mark.parametrize(
    ("at", "instead", "reason"),
    [
        (0, torch.zeros((3, 5), dtype=torch.int64), "int32 times"),
        (1, torch.zeros((5, 7), dtype=torch.int32), "int32 times"),
        (0, torch.zeros((3, 6), dtype=torch.int32), "do not make"),
        (1, torch.zeros((5, 8), dtype=torch.int8), "do not make"),
        (2, torch.zeros((2, 7), dtype=torch.int32), "do not make"),
        (2, torch.zeros((3, 7), dtype=torch.int16), "int32 times"),
    ],
)
def test_a_product_of_other_shapes_or_types_is_refused_and_not_read(
    at: int, instead: torch.Tensor, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "LIBRARY", Untouched())
    fitting = [
        torch.zeros((3, 5), dtype=torch.int32),
        torch.zeros((5, 7), dtype=torch.int16),
        torch.zeros((3, 7), dtype=torch.int32),
    ]
    with pytest.raises(ValueError, match=reason):
        multiply([instead if i == at else each for i, each in enumerate(fitting)])
    with pytest.raises(AssertionError, match="was called"):
        multiply(fitting)
