"""`serve --workers`: a tenant gets the answers of one process, also when a worker is killed meanwhile."""

from __future__ import annotations

import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch
from commands import BASE_MODEL
from conftest import RING, Executor
from transformers import AutoModelForCausalLM

import tenant_sdk

SECONDS = 60.0


def workers(executor: Executor) -> list[int]:
    assert executor.process is not None
    pid = executor.process.pid
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for each in found for child in each.read_text().split())


def ready(executor: Executor) -> str:
    """What the probe says with 503; empty: it is ready."""
    try:
        with urllib.request.urlopen(f"{executor.admin_url}/readyz", timeout=SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        return error.read().decode() if error.code == 503 else ""


def logits(session: tenant_sdk.Session, passes: int) -> list[torch.Tensor]:
    model = session.load_model(progress=False)
    with torch.no_grad():
        return [model(torch.arange(40).view(1, -1) + at).logits for at in range(passes)]


def test_a_tenant_notices_nothing_but_a_moment(serve_process: Callable[..., Executor]) -> None:
    alone = serve_process(BASE_MODEL, "--numerics", RING)
    shared = serve_process(BASE_MODEL, "--numerics", RING, "--devices", "cpu,cpu")
    masks = {"privacy": "one-time", "mask_sources": [f"local:{BASE_MODEL}"]}
    with alone.connect(**masks) as session:
        expected = logits(session, 4)
    first, second = workers(shared)
    with shared.connect(**masks) as session:
        got = logits(session, 2)
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + SECONDS
        while not (said := ready(shared)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "is being started again" in said
        with torch.no_grad():
            model = session.load_model(progress=False)
            got += [model(torch.arange(40).view(1, -1) + at).logits for at in (2, 3)]
        assert session.stats.verified_rows
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert not ready(shared)
    assert second in workers(shared)
    assert first not in workers(shared)
    assert len(workers(shared)) == 2


def test_shards_that_are_gathered(serve_process: Callable[..., Executor]) -> None:
    """`--fsdp`: logits of up to ten or so; each layer's sums are float32's, in another order than torch's."""
    executor = serve_process(BASE_MODEL, "--workers", "2", "--fsdp")
    assert len(workers(executor)) == 2
    with executor.connect() as session:
        (got,) = logits(session, 1)
    local = AutoModelForCausalLM.from_pretrained(BASE_MODEL, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(got, local(torch.arange(40).view(1, -1)).logits, atol=1e-3, rtol=1e-3)
