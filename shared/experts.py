"""Mixtures of experts: which parameters of a model hold one weight for each expert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn


class Projection(NamedTuple):
    """A parameter of three axes, the first of which counts experts.

    Attributes:
        path: of the module in the model.
        module: it has ``num_experts``, ``has_gate`` and ``is_transposed``, as all have that multiply through
            transformers' own interface for experts.
        parameter: its name in the module. [E, O, I], or [E, I, O] if the module ``is_transposed``.
    """

    path: str
    module: nn.Module
    parameter: str

    @property
    def name(self) -> str:
        """In the model's state dict."""
        return f"{self.path}.{self.parameter}"

    @property
    def weight(self) -> nn.Parameter:
        """The parameter."""
        return self.module.get_parameter(self.parameter)

    @property
    def transposed(self) -> bool:
        """Whether the inputs come before the outputs."""
        return bool(self.module.is_transposed)

    @property
    def axes(self) -> tuple[int, int, int]:
        """How many experts, outputs and inputs."""
        experts, outputs, inputs = self.weight.shape
        return (experts, inputs, outputs) if self.transposed else (experts, outputs, inputs)


def projections(model: nn.Module) -> Iterator[Projection]:
    """Those of a model, in its order."""
    for path, module in model.named_modules():
        if not all(hasattr(module, each) for each in ("num_experts", "has_gate", "is_transposed")):
            continue
        for parameter in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
            weight = module._parameters.get(parameter)
            if weight is not None and weight.dim() == 3 and len(weight) == module.num_experts:
                yield Projection(path, module, parameter)
