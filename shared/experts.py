"""Mixtures of experts: which parameters of a model hold one weight for each expert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn


class _Batched(NamedTuple):
    """Of modules that multiply equally many rows by each expert's weight, with ``torch.bmm``.

    Attributes:
        zeros: the rows of tokens that do not go to an expert are zeros there, and so are their gradients.
    """

    parameters: tuple[str, ...]
    transposed: bool
    zeros: bool


_BATCHED = {
    "Llama4TextExperts": _Batched(("gate_up_proj", "down_proj"), transposed=True, zeros=True),
    "InklingSharedExperts": _Batched(("gate_proj", "up_proj", "down_proj"), transposed=False, zeros=False),
}


class Projection(NamedTuple):
    """A parameter of three axes, the first of which counts experts.

    Attributes:
        path: of the module in the model.
        module: it multiplies through transformers' own interface for experts, or with ``torch.bmm``.
        parameter: its name in the module. [E, O, I], or [E, I, O] if ``transposed``.
        transposed: whether the inputs come before the outputs.
        batched: whether each expert gets equally many rows.
        zeros: whether those that do not belong to it are zeros.
    """

    path: str
    module: nn.Module
    parameter: str
    transposed: bool
    batched: bool = False
    zeros: bool = False

    @property
    def name(self) -> str:
        """In the model's state dict."""
        return f"{self.path}.{self.parameter}"

    @property
    def weight(self) -> nn.Parameter:
        """The parameter."""
        return self.module.get_parameter(self.parameter)

    @property
    def axes(self) -> tuple[int, int, int]:
        """How many experts, outputs and inputs."""
        experts, outputs, inputs = self.weight.shape
        return (experts, inputs, outputs) if self.transposed else (experts, outputs, inputs)


def projections(model: nn.Module) -> Iterator[Projection]:
    """Those of a model, in its order."""
    for path, module in model.named_modules():
        batched = _BATCHED.get(type(module).__name__)
        if batched is not None:
            for parameter in batched.parameters:
                yield Projection(
                    path, module, parameter, batched.transposed, batched=True, zeros=batched.zeros
                )
            continue
        if not all(hasattr(module, each) for each in ("num_experts", "has_gate", "is_transposed")):
            continue
        for parameter in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
            weight = module._parameters.get(parameter)
            if weight is not None and weight.dim() == 3 and len(weight) == module.num_experts:
                yield Projection(path, module, parameter, bool(module.is_transposed))
