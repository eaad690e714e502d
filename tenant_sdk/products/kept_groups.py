"""Groups whose weights the tenant keeps: their products, and how the weights are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn.functional import linear

from shared.errors import ModelMismatch
from shared.wire.header import Direction, RequestClass, member_indices
from shared.wire.messages import GroupInfo
from tenant_sdk.connection.remote import LazyResult
from tenant_sdk.products.products import Products, WrappedProducts

ROWS_BYTES = 1 << 22  # of unit rows, or of their products, when a weight is asked for


def group_weights(
    product: Callable[[int, list[torch.Tensor]], list[torch.Tensor]],
    info: GroupInfo,
    member: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Computes a member's weight as the executor multiplies with it, from its products with unit rows.

    Args:
        product: computes forward products, given a bit mask of the group's members and rows float32 [T, D].

    Returns:
        W transposed, [D, O], in ``dtype``.

    Raises:
        ModelMismatch: the executor's numbers are not finite.
    """
    inputs, outputs = info.inputs, info.members[member].outputs
    weight = torch.empty((inputs, outputs), dtype=dtype)
    rows = max(1, ROWS_BYTES // (4 * max(inputs, outputs)))
    for at in range(0, inputs, rows):
        unit = torch.zeros((min(rows, inputs - at), inputs))
        unit.diagonal(at).fill_(1.0)
        (weight[at : at + len(unit)],) = product(1 << member, [unit])
    if not weight.isfinite().all():
        raise ModelMismatch(f"the executor's weight of {info.members[member].name} has no finite numbers")
    return weight


class KeptProducts(WrappedProducts):
    """Computes products of groups whose weights are here, and asks others for all other groups.

    Args:
        inner: what asks for the products of all other groups.
        weights: by group, of each member [O, D], all of one dtype, in which products are computed.
    """

    def __init__(self, inner: Products, weights: Mapping[int, Sequence[torch.Tensor]]) -> None:
        super().__init__(inner)
        self._weights = weights

    def submit(
        self,
        group: int,
        direction: Direction,
        member_bits: int,
        rows: list[torch.Tensor],
        request_class: RequestClass = RequestClass.UNDECLARED,
    ) -> LazyResult:
        """See Products."""
        weights = self._weights.get(group)
        if weights is None:
            return self._inner.submit(group, direction, member_bits, rows, request_class)
        used = [weights[member] for member in member_indices(member_bits)]
        with torch.no_grad():
            tensors = [tensor.to(used[0].dtype) for tensor in rows]
            if direction == Direction.FORWARD:
                results = [linear(tensors[0], weight).float() for weight in used]
            else:
                parts = [(tensor @ weight).float() for tensor, weight in zip(tensors, used, strict=True)]
                results = [sum(parts[1:], parts[0])]
        return LazyResult(lambda: results)
