"""A checkpoint that does not fit into memory is refused before it is read, in a sentence."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import BASE_MODEL, ENVIRONMENT

from provider.executor import memory_check
from provider.executor.base import BaseExecutor
from provider.executor.loading import NUMERICS
from provider.executor.memory_check import BASE_BYTES, available_memory, check_memory, memory_errors
from shared.errors import ConfigurationError
from shared.wire.messages import GroupInfo

LOAD = f"""
import resource, sys
from provider.executor.base import BaseExecutor
from shared.errors import ConfigurationError
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (int(sys.argv[1]) << 20),) * 2)
try:
    BaseExecutor({str(BASE_MODEL)!r}, numerics="ring")
except ConfigurationError as error:
    print(error)
"""


@pytest.mark.parametrize("numerics", list(NUMERICS))
def test_weights_take_what_was_estimated(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, numerics: str
) -> None:
    said: list[tuple[list[GroupInfo], int]] = []
    monkeypatch.setattr(
        "provider.executor.base.check_memory", lambda _, groups, size, **more: said.append((groups, size))
    )
    executor = BaseExecutor(checkpoint("llama"), numerics=numerics)
    _, (groups, size) = said  # the first is about conversions alone
    count = sum(member.outputs * group.inputs for group in groups for member in group.members)
    held = 0
    for weight in executor._weights.values():
        tensor = getattr(weight, "_planes", None)
        held += (weight._weight if tensor is None else tensor).nbytes  # type: ignore[attr-defined]
    assert held == size * count


def test_what_does_not_fit_is_refused(checkpoint: Callable[[str], Path]) -> None:
    groups = BaseExecutor(checkpoint("llama"), numerics="ring").manifest.groups
    sizes = [member.outputs * group.inputs for group in groups for member in group.members]
    needed = 2 * sum(sizes) + 4 * max(sizes) + BASE_BYTES
    check_memory("a-model", groups, 2, lambda: (needed, "enough"))
    with pytest.raises(ConfigurationError) as caught:
        check_memory("a-model", groups, 2, lambda: (needed - 1, "this test"))
    said = str(caught.value)
    assert "not enough memory to load a-model: needs about 0.25 GiB (weights 0.00 GiB + 0.25 GiB" in said
    assert "0.25 GiB available (this test)" in said


@pytest.mark.parametrize("mib", ["10", "100"])
def test_a_limit_of_the_address_space_is_told_in_a_sentence(mib: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOAD, mib], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.match("not enough memory to load base_model: |.* cannot be mapped", done.stdout)
    assert "ulimit -v" in done.stdout
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("unable to mmap 8 bytes from file <x>: Cannot allocate memory (12)"),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
        OSError(12, os.strerror(12)),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ],
)
def test_a_want_of_memory_while_it_loads(error: Exception) -> None:
    with pytest.raises(ConfigurationError, match="not enough memory to load m: "), memory_errors("m"):
        raise error


def test_other_errors_stay() -> None:
    with pytest.raises(RuntimeError, match=r"^another$"), memory_errors("m"):
        raise RuntimeError("another")


def test_the_least_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert 0 < available_memory()[0] < 1 << 50
    for name, text in (
        ("max", "1000000\n"),
        ("current", "600000\n"),
        ("stat", "anon 1\ninactive_file 100000\n"),
    ):
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory_check._of_group(tmp_path) == (500_000.0, "limit of its cgroup")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_check._of_group(tmp_path)[0] == float("inf")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1, 1))
    assert available_memory()[1].startswith("limit of its address space")
