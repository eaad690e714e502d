"""Weights that processes hold a shard of each, and gather whole for each product (Symbiosis, sharding).

The paper's placement, by PyTorch's ``fully_shard``: each group is an FSDP module of its own, so that any can
be gathered, multiplied with and freed again, whatever was before it. Frozen weights have no gradients to
exchange. It is the slow baseline of the others, which move rows instead of weights.

A gather is a collective: all processes must ask for the same ones in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from provider.executor.loading import LoadedGroup
from provider.executor.stripes import Gathering, OutputStripe
from provider.executor.weights import FloatWeight
from shared.checkpoint import Checkpoint
from shared.listeners import groups_without_listeners
from shared.memory import FreedMemory
from shared.wire.header import DTYPE_NAMES
from shared.wire.messages import GroupInfo

START_SECONDS = 120.0  # for the slowest process to come
LOAD_SECONDS = 600.0  # for it to read its shards
GATHER_SECONDS = 30.0  # for the others to join in a gather; an end of one of them is noticed at once


class _Layers(nn.Module):
    """A group's layers, one above the other; on the meta device, where there is nothing to allocate yet."""

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.empty((outputs, inputs), dtype=dtype, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)


class GatheredWeight:
    """A ``GroupWeight`` of floats, of which a shard is here; its products gather it.

    Args:
        layers: with their shard filled.
        sharded: the same module, as ``fully_shard`` has made it.
        widths: O of each member.
    """

    def __init__(self, layers: _Layers, sharded: FSDPModule, widths: list[int]) -> None:
        self._layers, self._sharded, self._widths = layers, sharded, widths

    def apply(
        self,
        direction: int,
        member_bits: int,
        tensors: list[torch.Tensor],
        into: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """See GroupWeight. Also for tensors of no rows: the others may have some."""
        self._sharded.unshard()
        try:
            return FloatWeight(self._layers.weight, self._widths).apply(direction, member_bits, tensors, into)
        finally:
            self._sharded.reshard()

    def striped(self, stripe: OutputStripe) -> GatheredWeight:
        """See GroupWeight.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("a weight that is gathered is sharded already")

    def read_ahead(self, stop: Callable[[], bool]) -> None:
        """See GroupWeight: there is nothing to read before it is gathered."""


class Shards:
    """Reads this process's shards of groups, and meets the others.

    Args:
        gathering: which of how many, and where they meet.
        numerics: float32 or bfloat16.
        device: of this process alone.
    """

    def __init__(self, gathering: Gathering, numerics: str, device: torch.device) -> None:
        self._gathering, self._dtype = gathering, DTYPE_NAMES[numerics]
        self._freed = FreedMemory(max_bytes=0)
        self._store = dist.FileStore(gathering.store, gathering.count)  # type: ignore[attr-defined]
        # All are on this machine, and what they say to each other is neither encrypted nor signed.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._barrier("started", START_SECONDS)
        with groups_without_listeners():
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=self._store,
                rank=gathering.index,
                world_size=gathering.count,
                timeout=timedelta(seconds=GATHER_SECONDS),
            )
            self._mesh = init_device_mesh(device.type, (gathering.count,))
            self._barrier("connected", START_SECONDS)

    def all_loaded(self) -> None:
        """Wait until all have their shards: from then on they must gather together.

        Raises:
            RuntimeError: some have not in time.
        """
        self._barrier("loaded", LOAD_SECONDS)

    def _barrier(self, why: str, seconds: float) -> None:
        keys = [f"{why}-{index}" for index in range(self._gathering.count)]
        self._store.set(keys[self._gathering.index], "")
        self._store.wait(keys, timedelta(seconds=seconds))

    def trim(self) -> None:
        """Give the system back what the first products have gathered, and freed."""
        self._freed.trim()

    def load(self, checkpoint: Checkpoint, info: GroupInfo, device: torch.device) -> LoadedGroup:
        """Read this process's rows of a group's weight, and nothing else of it."""
        widths = [member.outputs for member in info.members]
        layers = _Layers(sum(widths), info.inputs, self._dtype)
        sharded = fully_shard(layers, mesh=self._mesh)
        layers.to_empty(device=device)
        shard, own_rows = cast(DTensor, layers.weight).to_local(), self._gathering.shard(sum(widths))
        at = 0  # in the group's weight
        for member in info.members:
            start, stop = (min(max(edge - at, 0), member.outputs) for edge in (own_rows.start, own_rows.stop))
            if start < stop:
                place = shard[at + start - own_rows.start : at + stop - own_rows.start]
                place.copy_(checkpoint.member_weight(member, slice(start, stop)))
            at += member.outputs
        return LoadedGroup(GatheredWeight(layers, sharded, widths), info)
