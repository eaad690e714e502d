"""What a machine has free for a tuning step."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from shared.errors import ConfigurationError, StorageError
from tenant_sdk.sequences.measuring import FRACTION, free_disk, free_memory, memory_left

GIB = 2**30
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_of_what_is_allowed_what_is_taken_is_gone() -> None:
    left = memory_left(1000, CPU)
    assert 990 * GIB < left < 1000 * GIB  # this process has something
    assert memory_left(2000, CPU) - left == pytest.approx(1000 * GIB, abs=GIB / 4)
    assert memory_left(1e-6, CPU) < 0
    with pytest.raises(ConfigurationError, match="memory_gib=-1"):
        memory_left(-1, CPU)


@pytest.mark.parametrize("limit", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_limits_of_the_process_count(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_memory()
    assert free > 0
    size, _, _, _, _, data, _ = map(int, Path("/proc/self/statm").read_text().split())
    page = resource.getpagesize()
    soft = {resource.RLIMIT_AS: size, resource.RLIMIT_DATA: data}[limit] * page + GIB // 4
    usual = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, soft) if which == limit else usual(which))
    assert 0 < free_memory() <= GIB // 4 + GIB // 64
    assert memory_left(None, CPU) <= FRACTION * (GIB // 4 + GIB // 64)


def test_of_a_model_on_a_gpu_its_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that the allocator holds and nobody uses is free."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8 * GIB, 16 * GIB))
    assert memory_left(None, CUDA) == int(FRACTION * 10 * GIB)
    assert memory_left(12, CUDA) == 9 * GIB


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert free_disk(tmp_path) > 0
    with pytest.raises(StorageError, match="absent"):
        free_disk(tmp_path / "absent")
