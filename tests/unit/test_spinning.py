"""Threads of OpenMP sleep while they wait, in whatever order torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
FIXED = "import torch\nimport tenant_sdk\nfrom shared.spinning import stop_spinning\nstop_spinning()"


def seconds(imports: str) -> float:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP", "OMP"))}
    environment |= {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(Path(__file__).parents[2]), "TEST": "x"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(imports=imports)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="libgomp is Linux's")
def test_threads_sleep_if_torch_was_imported_first() -> None:
    """A tenth of the time on an idle machine; with half of it the threads do not spin."""
    assert seconds(FIXED) < seconds("import torch") / 2
