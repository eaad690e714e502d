"""Shared state of the layers of a cache on disk: the file, a budget of memory, and memory for reads."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shared.forks import ForkGuard
from tenant_sdk.sequences.encrypted_file import EncryptedFile, Spilled
from tenant_sdk.sequences.kv_layers import BLOCK, Block, host_memory

if TYPE_CHECKING:
    from tenant_sdk.sequences.kv_layers import DiskLayer

# Decrypting, reading and copying leave the interpreter alone; half of the processors are left for attention.
_READERS = max(1, min(4, (os.cpu_count() or 1) // 2))


class _Scratch:
    """Memory for keys and values of one layer at a time."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = [torch.empty(0, dtype=torch.uint8)] * 2

    def views(
        self, shapes: Sequence[tuple[int, int, int, int]], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """Tensors of these shapes; earlier ones are overwritten."""
        out = []
        for which, shape in enumerate(shapes):
            size = torch.Size(shape).numel() * dtype.itemsize
            if self._memory[which].numel() < size:
                self._memory[which] = torch.empty(0)  # given back first
                self._memory[which] = host_memory([size + size // 8 // 64 * 64], torch.uint8, device)
            with torch.inference_mode(False):  # what is read ahead may be used in another mode
                out.append(self._memory[which][:size].view(dtype).view(*shape))
        return out

    @property
    def nbytes(self) -> int:
        return sum(each.numel() for each in self._memory)


@dataclass
class _ReadAhead:
    """A layer's blocks that are being read before they are asked for."""

    index: int
    out: list[Tensor]
    reading: list[Future[None]]


class KvBudget:
    """Where keys and values of a cache's layers lie.

    Each layer is in memory as a whole while the budget lasts, so that attention reads it where it is. Then
    every other one leaves first: while attention is computed on those that are in memory, the next of those
    on the disk is read. There are two scratches, one that attention reads and one to read into; so besides
    the budget it takes the keys and values of two layers, an eighth more, and unfinished blocks.

    Args:
        spill: the file.
        budget: bytes of layers that stay in memory.
    """

    def __init__(self, spill: EncryptedFile, budget: int) -> None:
        self.spill, self._budget = spill, budget
        self._layers: list[weakref.ref[DiskLayer]] = []  # weak: the file is closed with the last of them
        self._scratches, self._next = [_Scratch(), _Scratch()], 0
        self._ahead: _ReadAhead | None = None
        self._readers, self._fork_guard = ThreadPoolExecutor(_READERS, "keys and values"), ForkGuard()

    def enter(self, layer: DiskLayer) -> int:
        """The number of a new layer."""
        self._layers.append(weakref.ref(layer))
        return len(self._layers) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes with all layers."""
        return sum(each.nbytes for each in self._scratches) + sum(each.nbytes() for each in self._present())

    def _present(self) -> list[DiskLayer]:
        return [layer for each in self._layers if (layer := each()) is not None]

    def admits(self, layer: DiskLayer, more: int) -> bool:
        """Whether so many more tokens of a layer may stay in memory; for them, others leave it."""
        layers = [each for each in self._present() if each.resident and (each is layer or each.nbytes())]
        for leaving in sorted(layers, key=lambda each: (each.index % 2, each.index)):
            needed = sum(each.nbytes(more if each is layer else 0) for each in layers if each.resident)
            if needed <= self._budget:
                break
            leaving.spill_buffers()
        return layer.resident

    # -- reading ---------------------------------------------------------------------------------

    def read(self, blocks: Sequence[Block], out: Sequence[Tensor]) -> None:
        """Read blocks to the beginning of keys and values ``[B, H, T, D]``.

        Raises:
            ConnectionLost: this is a forked child, which has no threads that read.
        """
        for reading in self._begin(blocks, out):
            reading.result()

    def _begin(self, blocks: Sequence[Block], out: Sequence[Tensor]) -> list[Future[None]]:
        self._fork_guard.check()
        numbered = list(enumerate(blocks))
        shares = [numbered[first::_READERS] for first in range(_READERS)]
        return [self._readers.submit(fill, self.spill, share, out) for share in shares if share]

    def assemble(self, layer: DiskLayer, tokens: int) -> list[Tensor]:
        """Keys and values of a layer with its blocks in them, and room for all these tokens.

        They are overwritten by the second call after this one.
        """
        self._fork_guard.check()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            wait(ahead.reading)
        if (
            ahead is not None
            and (ahead.index, ahead.out[0].dtype) == (layer.index, layer.dtype)
            and ahead.out[0].shape[2] >= tokens
        ):
            out = ahead.out
            for reading in ahead.reading:
                reading.result()
        else:
            out = self._scratches[self._next].views(layer.shapes(tokens), layer.dtype, layer.device)
            self.read(layer.blocks, out)
        self._next = 1 - self._next
        return [each[:, :, :tokens] for each in out]

    def read_ahead(self, after: int, more: int) -> None:
        """Begin to read the layer on the disk that is next, which will have about so many more tokens."""
        turned = self._layers[after + 1 :] + self._layers[: after + 1]
        layers = (layer for each in turned if (layer := each()) is not None and layer.blocks)
        if (layer := next(layers, None)) is not None:
            tokens = layer.get_seq_length() + more + BLOCK
            out = self._scratches[self._next].views(layer.shapes(tokens), layer.dtype, layer.device)
            self._ahead = _ReadAhead(layer.index, out, self._begin(layer.blocks, out))

    def forget(self) -> None:
        """Blocks change: what was read ahead is of no use."""
        self._fork_guard.check()
        if self._ahead is not None:
            wait(self._ahead.reading)
            self._ahead = None


def fill(spill: EncryptedFile, blocks: Sequence[tuple[int, Block]], out: Sequence[Tensor]) -> None:
    """Read blocks to where their numbers say, each through a tensor that stays in the processor's cache."""
    through: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def read(spilled: Spilled) -> Tensor:
        kind = (spilled.shape, spilled.dtype)
        if kind not in through:
            through[kind] = torch.empty(spilled.shape, dtype=spilled.dtype)
        return spill.read(spilled, through[kind])

    for number, block in blocks:
        for whole, spilled in zip(out, (block.keys, block.values), strict=True):
            place, tokens = whole[:, :, number * BLOCK : (number + 1) * BLOCK], read(spilled)
            if block.rows is None:
                _copy(place, tokens)
            else:
                for to, row in zip(place, block.rows, strict=True):
                    _copy(to, tokens[row])


def _copy(to: Tensor, of: Tensor) -> None:
    if to.dtype == of.dtype:  # by numpy, which takes this thread alone
        to.view(torch.uint8).numpy()[...] = of.view(torch.uint8).numpy()
    else:
        to.copy_(of)
