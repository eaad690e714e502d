"""Weights out of a checkpoint: one group at a time, in the numerics in which it is served."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec
import torch

from provider.executor.stripes import OutputStripe
from provider.executor.weights import FloatWeight, GroupWeight, RingWeight
from shared.checkpoint import Checkpoint
from shared.errors import ConfigurationError
from shared.ring.fixed_point import bounds
from shared.ring.product import group_planes
from shared.wire.header import RINGS
from shared.wire.messages import GroupInfo


class LoadedGroup(NamedTuple):
    """A group's weight, and what the manifest and tenants get of it.

    Attributes:
        weight: what multiplies.
        info: for the manifest, on the ring with bounds.
        scales: on the ring float32 [O] of all members, which tenants need and executors do not.
    """

    weight: GroupWeight
    info: GroupInfo
    scales: torch.Tensor | None = None

    def cut(self, stripe: OutputStripe | None) -> LoadedGroup:
        """With a stripe of the weight's outputs alone; None: all of them."""
        return self if stripe is None else self._replace(weight=self.weight.striped(stripe))


class Numerics(NamedTuple):
    """How a group is loaded, and the bytes of one weight in memory."""

    load: Callable[[Checkpoint, GroupInfo, torch.device], LoadedGroup]
    weight_bytes: int

    @classmethod
    def named(cls, name: str) -> Numerics:
        """The one of this name.

        Raises:
            ConfigurationError: there is none.
        """
        if name not in NUMERICS:
            raise ConfigurationError(f"unknown numerics {name!r}; choose from {', '.join(NUMERICS)}")
        return NUMERICS[name]


def _load_floats(
    checkpoint: Checkpoint, info: GroupInfo, device: torch.device, dtype: torch.dtype
) -> LoadedGroup:
    widths = [m.outputs for m in info.members]
    weight = torch.empty((sum(widths), info.inputs), dtype=dtype, device=device)
    for part, member in zip(weight.split(widths), info.members, strict=True):
        part.copy_(checkpoint.member_weight(member))
    return LoadedGroup(FloatWeight(weight, widths), info)


def _load_ring(checkpoint: Checkpoint, info: GroupInfo, device: torch.device, count: int) -> LoadedGroup:
    planes, scales = group_planes(checkpoint, info, count)
    weight = RingWeight(planes.to(device), [m.outputs for m in info.members])
    return LoadedGroup(weight, msgspec.structs.replace(info, bounds=bounds(planes)), scales)


NUMERICS: dict[str, Numerics] = {
    "float32": Numerics(partial(_load_floats, dtype=torch.float32), 4),
    "bfloat16": Numerics(partial(_load_floats, dtype=torch.bfloat16), 2),
    **{name: Numerics(partial(_load_ring, count=count), 2) for name, count in RINGS.items()},
}


def device_of(name: str) -> torch.device:
    """A device by name, such as ``cpu`` or ``cuda:0``.

    Raises:
        ConfigurationError: it is not here.
    """
    try:
        torch.empty(1, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(f"no device {name!r} here; there are {', '.join(devices_here())}") from error


def devices_here() -> list[str]:
    """Names of what can multiply on this machine."""
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
