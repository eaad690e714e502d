"""What the executor's memory does under tenants that ask for too much, or for nonsense, again and again."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import RING, Executor
from raw_peers import ERROR, REPLY, header, open_raw, product

QUOTA_MIB = 16
MARGIN_MIB = QUOTA_MIB  # less than a quarter of what a round moves; a process's memory comes in lumps
PEERS, REQUESTS, ROWS = 8, 3, 7_000


def resident_mib(executor: Executor) -> int:
    """Of the executor's process, in MiB."""
    assert executor.process is not None
    status = Path(f"/proc/{executor.process.pid}/status").read_text()
    return next(int(line.split()[1]) >> 10 for line in status.splitlines() if line.startswith("VmRSS:"))


def flood(executor: Executor, number: int) -> int:
    """Far more at once than the quota allows, until all of it is answered; MiB moved."""
    with open_raw(executor) as peer:
        peer.hello()
        answered = 0
        while answered < REQUESTS:
            peer.message(product(ROWS, 64, dtype=6), bytes(ROWS * 256))
            fields, body = peer.receive()
            if fields.operation == ERROR:
                info = json.loads(body)
                assert info["code"] == "overloaded"
                time.sleep(info["retry_after"])
            else:
                assert fields.operation == REPLY
                answered += 1
    return REQUESTS * ROWS * 3 * 256 >> 20  # both planes come back


def nonsense(executor: Executor, number: int) -> int:
    """Headers that are nearly right, with payloads of about their length; MiB moved."""
    draw, moved = random.Random(number), 0
    for _ in range(6):
        with contextlib.suppress(OSError, EOFError), open_raw(executor) as peer:
            peer.hello()
            for _ in range(4):
                rows = draw.choice([0, 1, 2**31, draw.randrange(4000)])
                fields = {
                    "operation": draw.choice([3, 3, 4, 5, 8, draw.randrange(256)]),
                    "direction": draw.choice([1, 2, draw.randrange(256)]),
                    "dtype": draw.choice([6, 6, draw.randrange(256)]),
                    "group": draw.choice([0, 2, draw.randrange(1 << 32)]),
                    "members": draw.choice([1, draw.getrandbits(64)]),
                }
                size = max(0, min(rows, 4000) * 256 + draw.choice([0, 0, 0, 1, -1]))
                peer.message(header(rows=rows, columns=draw.choice([64, 32]), **fields), bytes(size))
                moved += size
                peer.receive()
    return moved >> 20


WAVES = """
import sys, torch
from shared.memory import FreedMemory, keep_freed_memory, resident_bytes
keep_freed_memory()
freed, start, held, most = FreedMemory(64 << 20), resident_bytes(), [], 0
for wave in range(8):  # each of larger blocks, which do not fit where those of the last one were
    size = int((1 << 18) * 1.3**wave)
    blocks = [(torch.ones(size), torch.ones(1 << 13)) for _ in range((128 << 20) // (4 * size))]
    most = max(most, resident_bytes() - start)
    held += [small for _, small in blocks]
    del blocks
    if sys.argv[1] == "give back":
        freed.trim()
print(most >> 20)
"""


@pytest.mark.parametrize(("how", "least", "most"), [("keep", 260, 2000), ("give back", 128, 230)])
def test_memory_between_blocks_in_use(how: str, least: int, most: int) -> None:
    """128 MiB at once, a few in small blocks between them that stay, and 64 that may be kept: in MiB."""
    command = [sys.executable, "-c", WAVES, how]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert least <= int(done.stdout) <= most


@pytest.mark.parametrize("misuse", [flood, nonsense])
def test_memory_after_the_same_again_is_the_same(
    misuse: Callable[[Executor, int], int],
    serve_process: Callable[..., Executor],
    checkpoint: Callable[[str], Path],
) -> None:
    """It keeps what it frees, up to a bound (``shared.memory``); a leak would grow with every round."""
    mib = str(QUOTA_MIB)
    executor = serve_process(checkpoint("llama"), "--numerics", RING, "--total-mib", mib, "--tenant-mib", mib)
    after = [resident_mib(executor)]
    with ThreadPoolExecutor(PEERS) as threads:
        for _ in range(6):
            moved = sum(threads.map(lambda number: misuse(executor, number), range(PEERS)))
            after.append(resident_mib(executor))
    print(f"{misuse.__name__}: {moved} MiB a round; resident, MiB: {after}")
    assert moved > 4 * MARGIN_MIB
    assert after[-1] <= after[3] + 2 * MARGIN_MIB  # three rounds, of which each moves four margins
