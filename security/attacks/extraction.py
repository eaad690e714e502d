"""Steal a tenant's adapter from the inputs and outputs of the adapted layer."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch.nn.functional import silu

from security.views.adversaries import View

FEW_OUTPUTS = 4  # with which the steps of a ring's rows are found
# Of steps the logarithms, but for whole numbers: eighths of an octave.
EIGHTHS = torch.log2(torch.arange(8.0, 17.0, dtype=torch.float64) / 8)


@dataclass(frozen=True)
class StolenAdapter:
    """``delta`` [O, D]: the estimate of B A times its scale; ``rank`` of it; ``tokens`` it rests on."""

    delta: torch.Tensor
    rank: int
    tokens: int


class AdapterExtraction:
    """Solve for the adapter of an up projection.

    The layer's input x is sent, and so is the next layer's input ``silu(G x) * ((U + B A) x)``. With the
    public G and U that is linear in B A: least squares for each output, then the singular values
    that stand out.

    Args:
        layer: index of the transformer layer.
        tokens: how many rows to use; None: all.
    """

    name: ClassVar[str] = "adapter extraction"
    goal: ClassVar[str] = "the adapter's weights"
    sees: ClassVar[str] = "rows around the adapted layer, after fine-tuning"
    metric: ClassVar[str] = "cosine of the stolen and the real adapter"
    source: ClassVar[str] = "Symbiosis, threat model and figure 8; truncated SVD: Eckart and Young, 1936"

    def __init__(self, layer: int, tokens: int | None = None) -> None:
        self.layer, self.tokens = layer, tokens

    def attack(self, view: View, rng: np.random.Generator) -> StolenAdapter:
        """See Attack."""
        public = view.public
        into = public.group_of(f"layers.{self.layer}.mlp.up_proj")
        out = public.group_of(f"layers.{self.layer}.mlp.down_proj")
        trained = max((i for i, seen in enumerate(view.requests) if not seen.forward), default=-1)
        later = [seen for seen in view.requests[trained + 1 :] if seen.forward]
        inputs = [seen.rows for seen in later if seen.group == into]
        outputs = [seen.rows for seen in later if seen.group == out]
        pairs = [(x, z) for x, z in zip(inputs, outputs, strict=False) if len(x) == len(z)]
        weight = public.weight(into)
        if not pairs:
            return StolenAdapter(torch.zeros(weight.shape[0] // 2, weight.shape[1]), 0, 0)
        x, z = (torch.cat(side)[: self.tokens] for side in zip(*pairs, strict=True))
        gate, up = weight.chunk(2)
        on_ring = later[0].raw.dtype == torch.int32
        if on_ring:
            x = _rescaled(x, public.parameter(f"layers.{self.layer}.post_attention_layernorm.weight"))
        factor, known = silu(x @ gate.T), x @ up.T
        if on_ring:
            z = z * _steps(x, factor, known, z)[:, None]
        delta = _weighted_least_squares(x, factor, z - factor * known)
        if on_ring:
            delta = _least_rank(up, delta)
        left, sizes, right = torch.linalg.svd(delta, full_matrices=False)
        rank = _gap(sizes)
        return StolenAdapter((left[:, :rank] * sizes[:rank]) @ right[:rank], rank, len(x))


def _rescaled(rows: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Rows of a ring come without their step; behind a norm their size is known."""
    size = (rows / gain).square().mean(1).sqrt()
    return rows * torch.exp2(_nearest(_logarithm(1 / size)))[:, None].float()


def _steps(x: torch.Tensor, factor: torch.Tensor, known: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """The step that each row of z came with, but for a power of two that all may share: [T].

    A row's scale drops out of ``z_k f_j (w_j x) = z_j f_k (w_k x)``: linear equations for some rows w of the
    adapted weight, up to a common factor, solved by the eigenvector of the smallest eigenvalue. With too few
    rows to solve them, the scale is guessed as if there were no adapter, which is right while it is small.
    """
    sizes, width = z.norm(dim=1).clamp_min(1e-30), x.shape[1]
    guess = _nearest(_logarithm((factor * known).norm(dim=1) / sizes))
    if len(x) < 2 * width:
        return torch.exp2(guess).float()
    columns = factor.square().mean(0).topk(FEW_OUTPUTS).indices
    f, target, inputs = factor[:, columns].double(), (z[:, columns] / sizes[:, None]).double(), x.double()
    normal = torch.zeros(FEW_OUTPUTS * width, FEW_OUTPUTS * width, dtype=torch.float64)
    for j, k in itertools.combinations(range(FEW_OUTPUTS), 2):
        sides = (inputs * (target[:, b] * f[:, a])[:, None] for a, b in ((j, k), (k, j)))
        equations = torch.cat([next(sides), -next(sides)], 1)
        at = torch.cat([torch.arange(width) + j * width, torch.arange(width) + k * width])
        normal[at[:, None], at] += equations.T @ equations
    weights = torch.linalg.eigh(normal)[1][:, 0].view(FEW_OUTPUTS, width)
    scale = (f * (inputs @ weights.T) * target).sum(1) / target.square().sum(1).clamp_min(1e-30) / sizes
    logarithm = _logarithm(scale.abs())
    # All logarithms are those of steps but for one common part, with which they are nearest to such.
    parts = torch.arange(0, 1, 2**-10, dtype=torch.float64)
    away = torch.stack([(logarithm - part - _nearest(logarithm - part)).abs().median() for part in parts])
    step = _nearest(logarithm - parts[away.argmin()])
    beyond = step - guess
    return torch.exp2(guess + (beyond - beyond.median().round()).clamp(-8, 8)).float()


def _least_rank(weight: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Of what the adapter would be with all rows larger by one power of two: that of the lowest rank."""
    choices = [torch.exp2(torch.tensor(float(e))) * (weight + delta) - weight for e in range(-4, 5)]
    return min(choices, key=lambda choice: float(torch.linalg.svdvals(choice).median()))


def _logarithm(ratio: torch.Tensor) -> torch.Tensor:
    return ratio.double().clamp(1e-30, 1e30).log2()


def _nearest(logarithm: torch.Tensor) -> torch.Tensor:
    """The logarithm of a step that is nearest to each."""
    whole = logarithm.floor()
    return whole + EIGHTHS[(logarithm - whole - EIGHTHS[:, None]).abs().argmin(0)]


def _weighted_least_squares(x: torch.Tensor, factor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """D with ``factor_tj (D x_t)_j = target_tj`` as nearly as can be: [O, D].

    In an orthonormal basis of the rows, where single precision is enough for the normal equations.
    """
    basis, mixed = torch.linalg.qr(x.double())
    basis = basis.float()
    solved = []
    for weight, wanted in zip(factor.T, target.T, strict=True):
        square = weight.square()
        normal = (basis * square[:, None]).T @ basis
        normal.diagonal().add_(1e-6 * normal.diagonal().mean() + 1e-30)
        solved.append(torch.linalg.solve(normal, (weight * wanted) @ basis))
    delta: torch.Tensor = torch.stack(solved).double() @ torch.linalg.pinv(mixed, rtol=1e-7).T
    return delta.float()


def _gap(sizes: torch.Tensor) -> int:
    """How many singular values stand out: where the next one is smallest in proportion."""
    half = sizes[: max(2, len(sizes) // 4)]
    return int((half[1:] / half[:-1].clamp_min(1e-30)).argmin()) + 1
