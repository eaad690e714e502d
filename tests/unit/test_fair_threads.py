"""Clients take turns at threads."""

import threading

import pytest
import torch

from shared.fair_threads import FairThreads


def test_a_tenant_that_asks_for_much_delays_nobody_else() -> None:
    threads, begun, go, order = FairThreads(1), threading.Event(), threading.Event(), []

    def first() -> torch.Tensor:
        begun.set()
        go.wait()
        return torch.zeros(1)

    def read(name: str) -> torch.Tensor:
        order.append(name)
        return torch.zeros(1)

    futures = [threads.submit_for("greedy", first)]
    begun.wait()
    futures += [threads.submit_for("greedy", lambda at=at: read(f"greedy {at}")) for at in range(3)]
    futures += [threads.submit_for("modest", lambda at=at: read(f"modest {at}")) for at in range(2)]
    go.set()
    for future in futures:
        future.result(800)
    assert order == ["greedy 0", "modest 0", "greedy 1", "modest 1", "greedy 2"]
    threads.shutdown(wait=False)


def test_what_fails_fails_alone() -> None:
    threads = FairThreads(1)

    def fail() -> torch.Tensor:
        raise OSError("no disk")

    broken, whole = threads.submit_for("a", fail), threads.submit_for("a", lambda: torch.ones(1))
    with pytest.raises(OSError, match="no disk"):
        broken.result(800)
    assert whole.result(800) == 1
    threads.shutdown(wait=False)
