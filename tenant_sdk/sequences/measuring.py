"""The figures of a plan: a model's memory for a token, and this machine's free memory."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from typing import Any

import torch

from shared.compat import cache_name
from shared.errors import ConfigurationError
from tenant_sdk.model.recording import Recording
from tenant_sdk.sequences.chunked_loss import chunk_tokens
from tenant_sdk.sequences.encrypted_file import default_folder
from tenant_sdk.sequences.planning import GIB, Shapes
from tenant_sdk.sequences.stack import Stack
from tenant_sdk.sequences.windows import WindowCache
from tenant_sdk.storage import disk_errors

FRACTION = 0.8  # of what is free, if nobody says how much memory there is
CHUNK_COPIES = 4  # of a chunk's logits: they, their logarithms, gradients of both


class _CountingStore:
    """A store that keeps nothing but the size of all."""

    def __init__(self) -> None:
        self.nbytes = 0

    def write(self, tensor: torch.Tensor) -> None:
        """See Store."""
        self.nbytes += tensor.nbytes

    def read(self, stored: Any) -> torch.Tensor:
        """Nothing is read."""
        raise NotImplementedError

    def free(self, stored: Any) -> None:
        """See Store."""


class _CountingCache(WindowCache):
    """A cache that gives what it is given, and adds its size up."""

    nbytes = 0

    def append(self, *new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See WindowCache."""
        self.nbytes += sum(each.nbytes for each in new)
        keys, values = new
        return keys, values


def shapes_of(stack: Stack, ids: torch.Tensor) -> Shapes:
    """A model's figures for one token, measured with the few of ids [1, T]."""
    count, layers = ids.numel(), len(stack.layers)
    config = stack.model.config.get_text_config()
    answers, cache = _CountingStore(), _CountingCache(layers)
    # Parameters are there anyway.
    known = {each.untyped_storage().data_ptr() for each in stack.model.parameters() if _has_memory(each)}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        at = tensor.untyped_storage().data_ptr()
        if at not in known:
            saved[at] = tensor
        return tensor

    recording = Recording(answers)
    with (
        recording.record(),
        stack.uncheckpointed(),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        hidden = stack.last_layer_output(input_ids=ids, **{cache_name(): cache}, use_cache=True)
    heads = getattr(config, "num_attention_heads", 1)
    repeats = heads // (getattr(config, "num_key_value_heads", None) or heads)
    eager = getattr(config, "_attn_implementation", "eager") == "eager"
    vocabulary = config.vocab_size
    return Shapes(
        layers=layers,
        saved=sum(each.untyped_storage().nbytes() for each in saved.values()) // (count * layers),
        answers=answers.nbytes // (count * layers),
        hidden=hidden.nbytes // count,
        attended=cache.nbytes // (count * layers),
        logits=4 * vocabulary,
        repeats=repeats,
        pair=3 * heads * hidden.element_size() if eager else 0,
        chunk=CHUNK_COPIES * 4 * vocabulary * chunk_tokens(vocabulary),
    )


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:  # it is at the executor
        return False


def memory_left(memory_gib: float | None, device: torch.device) -> int:
    """Bytes that this process may still take where a model is: of the host's memory, or of a GPU's.

    Args:
        memory_gib: what it may have there in all; None: ``FRACTION`` of what is free.
    """
    if memory_gib is not None and memory_gib <= 0:
        raise ConfigurationError(
            "{memory_gib}: give what this process may have, in GiB", memory_gib=memory_gib
        )
    if device.type == "cuda":
        used = torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - used
    else:
        used = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        free = free_memory()
    return int(FRACTION * free) if memory_gib is None else int(memory_gib * GIB) - used


def free_memory() -> int:
    """Bytes that this process can still have: of the machine, its container and its own limits."""
    free = [_kernel_figure(Path("/proc/meminfo"), "MemAvailable:")]
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            # What of files is in memory can go.
            files = _kernel_figure(group / "memory.stat", "inactive_file", 1)
            free.append(int(limit) - int((group / "memory.current").read_text()) + files)
    except (OSError, ValueError):
        pass  # no container, or an older kind
    size, _, _, _, _, data, _ = map(int, Path("/proc/self/statm").read_text().split())
    page = os.sysconf("SC_PAGE_SIZE")
    for limit_of, used in ((resource.RLIMIT_AS, size), (resource.RLIMIT_DATA, data)):
        soft, _ = resource.getrlimit(limit_of)
        if soft != resource.RLIM_INFINITY:
            free.append(soft - used * page)
    return max(0, min(free))


def _kernel_figure(path: Path, name: str, unit: int = 1024) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * unit
    return 0


def free_disk(folder: Path | None) -> int:
    """Bytes that are free where a EncryptedFile of this folder would be.

    Raises:
        StorageError: there is no such folder.
    """
    place = Path(folder or default_folder())
    with disk_errors(place, "what does not fit into memory", "Give another folder."):
        return shutil.disk_usage(place).free
