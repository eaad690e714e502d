"""Threads of OpenMP sleep while they wait, in whatever order torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tenant_sdk.spinning import libraries_in

# Processor time of short parallel regions, with pauses in which threads spin or sleep.
PROGRAM = """
import time
{imports}
x = torch.randn(1 << 20)
began = time.process_time()
for _ in range(100):
    x.mul(2)
    time.sleep(0.005)
print(time.process_time() - began)
"""
FIXED = "\nimport torch\nimport tenant_sdk\nfrom tenant_sdk.spinning import stop_spinning\nstop_spinning()"


def seconds(imports: str) -> float:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP", "OMP"))}
    environment |= {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(Path(__file__).parents[2]), "TEST": "x"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(imports=imports)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=800,
    )
    return float(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="libgomp is Linux's")
@pytest.mark.skipif(
    sys.platform.startswith("linux") and len(os.sched_getaffinity(0)) < 2,
    reason="with more threads than processors libgomp does not spin",
)
@pytest.mark.parametrize("first", ["import torch", "import sentencepiece", "import peft"])
def test_threads_sleep_if_torch_was_imported_first(first: str) -> None:
    """A tenth of the time on an idle machine; with half of it the threads do not spin.

    sentencepiece has a libgomp of its own, beside torch's, and transformers imports it.
    """
    assert seconds(first + FIXED) < seconds("import torch") / 2


def test_a_path_with_spaces_is_one_path() -> None:
    """Its end alone would be a path in the working directory, where others may have put a library."""
    maps = (
        "7f00-7f01 r-xp 00000000 08:01 5   /usr/lib/libc.so.6\n"
        "7f01-7f02 rw-p 00000000 00:00 0 \n"
        "7f02-7f03 r-xp 00000000 08:01 6   /home/a/my tools/libgomp.so.1\n"
        "7f03-7f04 r-xp 00000000 08:01 7   /home/a/libgomp-6a29.so.1.0.0\n"
    )
    assert libraries_in(maps) == {"/home/a/my tools/libgomp.so.1", "/home/a/libgomp-6a29.so.1.0.0"}
