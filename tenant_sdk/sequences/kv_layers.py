"""A layer's keys and values where memory is: in the host's, or in blocks on the disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from shared.devices import pin
from shared.errors import ConfigurationError
from tenant_sdk.sequences.encrypted_file import Spilled

if TYPE_CHECKING:
    from tenant_sdk.sequences.kv_budget import KvBudget

BLOCK = 256  # tokens that are written to the disk at once
_GRANULARITY = 64  # tokens: buffers have room for a multiple of these


class Buffer:
    """Keys or values ``[B, H, T, D]`` in the host's memory, with room for an eighth more of them.

    What was returned stays as it is until tokens are cropped.

    Args:
        like: of the same dtype and axes, of any T; memory is pinned if it is on a GPU.
    """

    def __init__(self, like: Tensor) -> None:
        self._device = like.device
        self._memory = like.new_empty((*like.shape[:2], 0, like.shape[3]), device="cpu")
        self.length = 0

    @property
    def tokens(self) -> Tensor:
        """What is in it, ``[B, H, length, D]``: a view."""
        return self._memory[:, :, : self.length]

    def nbytes(self, more: int = 0) -> int:
        """Bytes of memory, once so many more tokens are in it."""
        batch, heads, _, width = self._memory.shape
        return batch * heads * width * self._memory.dtype.itemsize * self._capacity(more)

    def _capacity(self, more: int) -> int:
        now, needed = self._memory.shape[2], self.length + more
        return now if needed <= now else -(-max(needed, now + now // 8) // _GRANULARITY) * _GRANULARITY

    def append(self, new: Tensor) -> None:
        """Copy tokens ``[B, H, T, D]`` behind those that are there; all take their dtype."""
        if new.dtype != self._memory.dtype:  # the model was moved
            with torch.inference_mode(False):
                self._memory = self._memory.to(new.dtype)
        more, old = new.shape[2], self.tokens
        if self.length + more > self._memory.shape[2]:
            shape = (*old.shape[:2], self._capacity(more), old.shape[3])
            self._memory = host_memory(shape, new.dtype, self._device)
            self.tokens.copy_(old)
        self._memory[:, :, self.length : self.length + more] = new
        self.length += more

    def select_rows(self, rows: Tensor) -> None:
        """Have these rows of the batch, in this order."""
        with torch.inference_mode(False):
            self._memory = self.tokens.index_select(0, rows)


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host, whatever is in it, from which a GPU copies directly.

    In inference mode too it is a usual tensor, so that it can be written to later.
    """
    memory = np.empty(int(np.prod(shape)) * dtype.itemsize, np.uint8)
    pin(memory, device)
    with torch.inference_mode(False):
        return torch.from_numpy(memory).view(dtype).view(*shape)


def on_device(stored: Tensor, device: torch.device) -> Tensor:
    """Keys or values ``[B, H, T, D]`` of the host where attention is computed: on the CPU the same tensor."""
    if device.type == "cpu":
        return stored
    copy = torch.empty(stored.shape, dtype=stored.dtype, device=device)
    for to, of in zip(copy.flatten(0, 1), stored.flatten(0, 1), strict=True):  # of which each is contiguous
        to.copy_(of, non_blocking=True)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # the next layer's may take their place
    return copy


class HostLayer(DynamicLayer):
    """Keys and values in the host's memory, in buffers that tokens are appended to.

    Takes the place of transformers' ``DynamicLayer``, which copies all of them for every token.
    """

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        super().__init__()  # type: ignore[no-untyped-call]

    @property
    def keys(self) -> Tensor | None:
        """All keys ``[B, H, T, D]``, on the CPU; None before there are any."""
        return self._stored(0)

    @keys.setter
    def keys(self, tensor: Tensor | None) -> None:
        if tensor is not None:  # with which transformers begins
            raise AttributeError("keys and values are appended with update, and removed with crop")

    @property
    def values(self) -> Tensor | None:
        """All values, as keys."""
        return self._stored(1)

    @values.setter
    def values(self, tensor: Tensor | None) -> None:
        if tensor is not None:
            raise AttributeError("keys and values are appended with update, and removed with crop")

    def _stored(self, which: int) -> Tensor | None:
        return self._buffers[which].tokens if self._buffers else None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See DynamicLayer."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._buffers = [Buffer(key_states), Buffer(value_states)]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append tokens, and return all of them on the device of the new.

        Raises:
            ConfigurationError: gradients are to flow into them, which a buffer cannot give.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ConfigurationError(
                "keys and values in buffers are for generation; call the model under torch.no_grad(), or "
                "leave them to it"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        return self._append(key_states, value_states)

    def _append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        for buffer, new in zip(self._buffers, (keys, values), strict=True):
            buffer.append(new)
        key_buffer, value_buffer = self._buffers
        return on_device(key_buffer.tokens, keys.device), on_device(value_buffer.tokens, keys.device)

    def get_seq_length(self) -> int:
        """Tokens."""
        return self._buffers[0].length if self._buffers else 0

    def reset(self) -> None:
        """Forget all tokens."""
        self._buffers, self.is_initialized = [], False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: so many, with a minus, as in DynamicLayer."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes how many tokens to remove as a negative number: {tokens_to_remove}")
        if self._buffers:
            self._remove(min(-tokens_to_remove, self.get_seq_length()))

    def _remove(self, count: int) -> None:
        for buffer in self._buffers:
            buffer.length -= count

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Have these rows of the batch, as beam search wants."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row of the batch so many times, side by side."""
        if self._buffers:
            self._select_rows(torch.arange(self._batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows of the batch: numbers, or which are true."""
        if self._buffers:
            rows, all_rows = torch.arange(self._batch)[indices.to("cpu")], torch.arange(self._batch)
            if not torch.equal(rows, all_rows):  # beams often stay as they are
                self._select_rows(rows)

    @property
    def _batch(self) -> int:
        return self._buffers[0].tokens.shape[0]

    def _select_rows(self, rows: Tensor) -> None:
        for buffer in self._buffers:
            buffer.select_rows(rows)


@dataclass(frozen=True)
class Block:
    """Keys and values of 256 tokens on the disk; which of their rows each row of the batch now has."""

    keys: Spilled
    values: Spilled
    rows: tuple[int, ...] | None = None  # None: its own

    def select_rows(self, rows: Sequence[int]) -> Block:
        """The same block for other rows of the batch."""
        chosen = tuple(rows) if self.rows is None else tuple(self.rows[row] for row in rows)
        return Block(self.keys, self.values, chosen)


class DiskLayer(HostLayer):
    """Keys and values in memory while the budget has room for them, else in blocks on the disk.

    Then buffers hold the tokens that do not fill a block yet, and what ``update`` returns is in a scratch: it
    is overwritten when the layer after the next one is updated.

    Args:
        kv_budget: that all layers of a cache share.
    """

    def __init__(self, kv_budget: KvBudget) -> None:
        self._kv_budget, self.blocks, self.resident = kv_budget, list[Block](), True
        super().__init__()
        self.index = kv_budget.enter(self)

    def _stored(self, which: int) -> Tensor | None:
        if not self.blocks:
            return super()._stored(which)
        out = [torch.empty(shape, dtype=self.dtype) for shape in self.shapes(self.get_seq_length())]
        self._kv_budget.read(self.blocks, out)
        self._copy_buffers_to_end(out)
        return out[which]

    def shapes(self, tokens: int) -> list[tuple[int, int, int, int]]:
        """Of keys and values, with so many tokens."""
        of_buffers = [buffer.tokens.shape for buffer in self._buffers]
        return [(batch, heads, tokens, width) for batch, heads, _, width in of_buffers]

    def nbytes(self, more: int = 0) -> int:
        """Bytes of its buffers, once so many more tokens are in them."""
        return sum(buffer.nbytes(more) for buffer in self._buffers)

    def get_seq_length(self) -> int:
        """Tokens, wherever they are."""
        return len(self.blocks) * BLOCK + super().get_seq_length()

    def _append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        more = keys.shape[2]
        if self.resident and self._kv_budget.admits(self, more):
            return super()._append(keys, values)
        before, total = len(self.blocks) * BLOCK, self.get_seq_length() + more
        out = self._kv_budget.assemble(self, total)
        self._copy_buffers_to_end([each[:, :, : total - more] for each in out])
        for each, new in zip(out, (keys, values), strict=True):
            each[:, :, total - more :] = new
        if total - before < BLOCK:
            for buffer, new in zip(self._buffers, (keys, values), strict=True):
                buffer.append(new)
        else:
            self._write([each[:, :, before:] for each in out])
        self._kv_budget.read_ahead(self.index, more)
        return on_device(out[0], keys.device), on_device(out[1], keys.device)

    def _copy_buffers_to_end(self, out: Sequence[Tensor]) -> None:
        """Copy the tokens of the buffers to the end."""
        for each, buffer in zip(out, self._buffers, strict=True):
            each[:, :, each.shape[2] - buffer.length :] = buffer.tokens

    def _write(self, tokens: Sequence[Tensor]) -> None:
        """Write these, which follow the blocks, as far as they fill blocks; buffers get the others."""
        keys, values = tokens
        last = keys.shape[2] // BLOCK * BLOCK
        for at in range(0, last, BLOCK):
            pair = [self._kv_budget.spill.write(each[:, :, at : at + BLOCK]) for each in tokens]
            self.blocks.append(Block(pair[0], pair[1]))
        self._buffers = [Buffer(keys), Buffer(values)]
        for buffer, each in zip(self._buffers, tokens, strict=True):
            buffer.append(each[:, :, last:])

    def spill_buffers(self) -> None:
        """Write what is in the buffers to the disk."""
        self.resident = False
        self._write([buffer.tokens for buffer in self._buffers])

    def reset(self) -> None:
        """Forget all tokens."""
        self._kv_budget.forget()
        while self.blocks:
            self._free(self.blocks.pop())
        self.resident = True
        super().reset()

    def _free(self, block: Block) -> None:
        for spilled in (block.keys, block.values):
            self._kv_budget.spill.free(spilled)

    def _remove(self, count: int) -> None:
        while self.blocks and count > self._buffers[0].length:
            count -= self._buffers[0].length
            self._kv_budget.forget()
            out = [torch.empty(shape, dtype=self.dtype) for shape in self.shapes(BLOCK)]
            last = self.blocks.pop()
            self._kv_budget.read([last], out)
            self._free(last)
            self._buffers = [Buffer(each) for each in out]
            for buffer, each in zip(self._buffers, out, strict=True):
                buffer.append(each)
        super()._remove(count)

    def _select_rows(self, rows: Tensor) -> None:
        self._kv_budget.forget()
        super()._select_rows(rows)
        chosen = rows.tolist()
        self.blocks = [block.select_rows(chosen) for block in self.blocks]
