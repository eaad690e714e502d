"""Products of groups whose weights are here: all that a lane needs of an executor."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

import torch

from provider.executor.loading import LoadedGroup, Numerics
from provider.executor.stripes import OutputStripe
from shared.devices import Pipeline, to_device, to_host
from shared.errors import WireError
from shared.ring.mask_stream import MaskStream
from shared.ring.rows import all_finite_below
from shared.wire.header import DTYPE_NAMES, Direction, Header, Operation, member_indices, wire_dtypes
from shared.wire.protocol import GroupShape, split_tensors


def check_finite(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse rows of floats that are no numbers.

    Raises:
        WireError: ``non_finite``.
    """
    if not all(all_finite_below(tensor) for tensor in tensors if tensor.is_floating_point()):
        raise WireError("non_finite", "the rows hold NaN or infinity; nothing was computed")


class GroupExecutor:
    """Computes products of some groups or all, and keeps no state of any tenant (Symbiosis §3.2).

    Args:
        groups: by their numbers in the manifest; with a stripe, cut to it.
        numerics: in which they were loaded, a name in ``NUMERICS``.
        device: on which they were.
        stripe: of each group's outputs, if not all of them are here. Requests are whole; answers are
            this stripe's columns forward, and what it adds to the sum backward.

    Raises:
        ConfigurationError: unknown numerics.
    """

    def __init__(
        self,
        groups: Mapping[int, LoadedGroup],
        numerics: str,
        device: torch.device,
        stripe: OutputStripe | None = None,
    ) -> None:
        Numerics.named(numerics)  # refuses others
        self._wire_dtype = DTYPE_NAMES[wire_dtypes(numerics)[0]]
        self._device = device
        self._stripe = stripe
        self._pipeline = Pipeline(device) if device.type == "cuda" else None
        self._weights = {group: loaded.weight for group, loaded in groups.items()}
        self._shapes = {group: GroupShape.of(loaded.info, numerics) for group, loaded in groups.items()}
        self._order = sorted(groups)

    def tensors(self, header: Header, payload: torch.Tensor) -> list[torch.Tensor]:
        """The rows of an accepted request: [T, D] forward; backward one [T, O_m] for each member.

        On the ring there is one tensor in both directions. Seeds are expanded into their masks.

        Args:
            header: of one of PRODUCTS.
            payload: [T, columns], or a seed; not copied.

        Raises:
            WireError: ``non_finite``, for rows with NaN or infinity.
        """
        if header.operation == Operation.SEED_EFFECT:
            tensors = [MaskStream(payload.numpy().tobytes()).draw(header.rows, header.columns)]
        else:
            check_finite([payload])
            widths = self._shapes[header.group].widths(header.direction, header.members)
            tensors = split_tensors(payload, widths.request_widths)
        return self._own(header.group, header.direction, header.members, tensors)

    def _own(
        self, group: int, direction: int, member_bits: int, tensors: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Of a request's tensors the columns that belong to this stripe's outputs."""
        if self._stripe is None or direction == Direction.FORWARD:
            return tensors
        if len(tensors) == 1:
            widths = [self._shapes[group].outputs[i] for i in member_indices(member_bits)]
            columns_of_tensors = [tensors[0][:, columns] for columns in self._stripe.columns(widths)]
            return [
                columns_of_tensors[0] if len(columns_of_tensors) == 1 else torch.cat(columns_of_tensors, 1)
            ]
        return [tensor[:, self._stripe.of(tensor.shape[1])].contiguous() for tensor in tensors]

    def _places(
        self, group: int, direction: int, member_bits: int, answers: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Of tensors of whole answers the columns that are this stripe's outputs; backward it adds to all."""
        if self._stripe is None or direction == Direction.BACKWARD:
            return answers
        shape = self._shapes[group]
        if not shape.planes:
            return [tensor[:, self._stripe.of(tensor.shape[1])] for tensor in answers]
        widths = [shape.outputs[i] for i in member_indices(member_bits)]
        return [answers[0][:, columns] for columns in self._stripe.columns(widths, shape.planes)]

    def compute(
        self,
        group: int,
        direction: int,
        member_bits: int,
        tensors: list[torch.Tensor],
        divided: Callable[[list[torch.Tensor]], list[torch.Tensor]] = list,
    ) -> list[torch.Tensor]:
        """Products of tensors of any number of rows: see ``GroupWeight``.

        Args:
            group: one whose weight is here.
            direction: a ``Direction``.
            member_bits: which members take part, a bit mask.
            tensors: on the CPU.
            divided: makes the answers of the product's tensors, on the device.

        Returns:
            Fresh tensors on the CPU.
        """
        weight = self._weights[group]
        if self._device.type == "cpu":  # no further call into torch: each queues for Python's lock
            return divided(weight.apply(direction, member_bits, tensors))
        return to_host(divided(weight.apply(direction, member_bits, to_device(tensors, self._device))))

    def begin(
        self,
        group: int,
        direction: int,
        member_bits: int,
        tensors: list[torch.Tensor],
        answers: list[torch.Tensor],
    ) -> Callable[[], None] | None:
        """The same to where it shall be; a GPU is only told to.

        Args:
            tensors: whole ones; unchanged until the answers are there.
            answers: whole tensors as ``compute`` returns without a stripe; of these a stripe's columns are
                written forward, and all of them backward, with what it adds to the sum.

        Returns:
            Waits until the answers are there; None: they are.
        """
        places = self._places(group, direction, member_bits, answers)

        def product(tensors: list[torch.Tensor], into: torch.Tensor | None = None) -> list[torch.Tensor]:
            own_tensors = self._own(group, direction, member_bits, tensors)
            out = self._weights[group].apply(direction, member_bits, own_tensors, into)
            if len(out) < len(places):  # of the ring
                return list(out[0].split([place.shape[1] for place in places], 1))
            return out

        if self._pipeline is not None:
            return self._pipeline.begin(tensors, product, places)
        for tensor, place in zip(
            product(tensors, places[0] if len(places) == 1 else None), places, strict=True
        ):
            if tensor is not place:
                place.copy_(tensor)
        return None

    def zeros(self, group: int, direction: int, member_bits: int, rows: int) -> list[torch.Tensor]:
        """Tensors of a request, to measure with."""
        widths = self._shapes[group].widths(direction, member_bits).request_widths
        tensors = [torch.zeros((rows, width), dtype=self._wire_dtype) for width in widths]
        return self._own(group, direction, member_bits, tensors)

    def read_ahead(self, group: int, stop: Callable[[], bool]) -> None:
        """Bring a group's weight nearer to the processor, until ``stop()``.

        In place of one that is not here comes the next that is; past the last the first.
        """
        if self._device.type == "cpu":
            at = bisect_left(self._order, group) % len(self._order)
            self._weights[self._order[at]].read_ahead(stop)
