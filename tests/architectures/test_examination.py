"""What counts as equal; the whole of one architecture is in ``test_sample.py``."""

from __future__ import annotations

import math
from typing import Any

import examination
import pytest
import torch
from examination import Result, examine
from transformers import LlamaConfig, LlamaForCausalLM

NAN, INF = torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.inf])
GOOD = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("at", [0, 1])
def test_a_value_that_is_not_finite_is_no_equal_one(bad: torch.Tensor, at: int) -> None:
    broken = [GOOD, GOOD]
    broken[at] = bad
    for got, expected in ((broken, [GOOD, GOOD]), ([GOOD, GOOD], broken), (broken, broken)):
        with pytest.raises(AssertionError, match="not finite"):
            examination._worst(got, expected)


def test_large_values_are_measured() -> None:
    """Their norm is beyond float32."""
    assert examination._worst([GOOD * 1e38], [GOOD * 1.5e38]) == pytest.approx(1 / 3)


class _Broken(torch.autograd.Function):
    """One gradient of it is NaN."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad.index_fill(-1, torch.tensor([0]), math.nan)


def _llama(*, broken: bool) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 32}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, use_cache=False)
    model: Any = LlamaForCausalLM(config).eval()
    if broken:
        model.model.norm.register_forward_hook(lambda module, args, out: _Broken.apply(out))
    return model


def test_a_gradient_that_is_not_finite_fails() -> None:
    inputs = {"input_ids": torch.arange(8)[None]}
    result = Result("causal", "llama", "LlamaForCausalLM", stage="backward")
    with pytest.raises(ValueError, match="not finite"):
        examination._compare_gradients(result, _llama(broken=False), _llama(broken=True), inputs)
    assert not result.equal
    examination._compare_gradients(result, _llama(broken=True), _llama(broken=False), inputs)
    assert result.gradient is None
    assert result.said == "without gradients locally: ValueError: a gradient is not finite"


def test_stages_are_told() -> None:
    told = list[str]()
    assert examine("causal", "llama", "LlamaForCausalLM", told.append).good
    assert told == ["local", "serve", "load", "forward", "backward", "done"]


def test_nothing_to_serve() -> None:
    result = examine("base", "resnet", "ResNetModel")
    assert (result.stage, result.said) == ("linear", "it has no linear layers")
    assert not result.ran


def test_an_adapter_beside_layers_that_take_none() -> None:
    """A router of Llama 4 gives two tensors, which LoRA on it does not know."""
    result = examine("causal", "llama4_text", "Llama4ForCausalLM")
    assert result.good
    assert result.gradient is not None
