"""Tenants take turns at what they download."""

import threading

import pytest
import torch

from provider.session.reader import Reader


def test_a_tenant_that_asks_for_much_delays_nobody_else() -> None:
    reader, begun, go, order = Reader(), threading.Event(), threading.Event(), []

    def first() -> torch.Tensor:
        begun.set()
        go.wait()
        return torch.zeros(1)

    def read(name: str) -> torch.Tensor:
        order.append(name)
        return torch.zeros(1)

    futures = [reader.submit("greedy", first)]
    begun.wait()
    futures += [reader.submit("greedy", lambda at=at: read(f"greedy {at}")) for at in range(3)]
    futures += [reader.submit("modest", lambda at=at: read(f"modest {at}")) for at in range(2)]
    go.set()
    for future in futures:
        future.result(10)
    assert order == ["greedy 0", "modest 0", "greedy 1", "modest 1", "greedy 2"]
    reader.close()


def test_what_fails_fails_alone() -> None:
    reader = Reader()

    def fail() -> torch.Tensor:
        raise OSError("no disk")

    broken, whole = reader.submit("a", fail), reader.submit("a", lambda: torch.ones(1))
    with pytest.raises(OSError, match="no disk"):
        broken.result(10)
    assert whole.result(10) == 1
    reader.close()
