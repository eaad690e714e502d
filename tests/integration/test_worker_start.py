"""A worker that starts: for whoever starts it, until that ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from commands import ROOT

SECONDS = 800.0


def test_a_worker_ends_with_the_executor_while_it_imports(tmp_path: Path) -> None:
    """Of many that start at the same time each takes minutes for that; here it takes for ever."""
    (tmp_path / "torch.py").write_text("print('importing', flush=True)\nwhile True:\n    input()\n")
    (ours, theirs), (ends, never) = socket.socketpair(), os.pipe()
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "provider.workers.local", str(theirs.fileno())],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        pass_fds=[theirs.fileno()],
        stdin=ends,
        stdout=subprocess.PIPE,
    ) as worker:
        theirs.close()
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"importing\n"
        ours.close()
        try:
            assert worker.wait(SECONDS) == 0
        finally:
            worker.kill()
            for each in (ends, never):
                os.close(each)
