"""Tenants take turns at what they download."""

import threading

import pytest
import torch

from provider.session.downloads import Downloads


def test_a_tenant_that_asks_for_much_delays_nobody_else() -> None:
    downloads, begun, go, order = Downloads(), threading.Event(), threading.Event(), []

    def first() -> torch.Tensor:
        begun.set()
        go.wait()
        return torch.zeros(1)

    def read(name: str) -> torch.Tensor:
        order.append(name)
        return torch.zeros(1)

    futures = [downloads.submit("greedy", first)]
    begun.wait()
    futures += [downloads.submit("greedy", lambda at=at: read(f"greedy {at}")) for at in range(3)]
    futures += [downloads.submit("modest", lambda at=at: read(f"modest {at}")) for at in range(2)]
    go.set()
    for future in futures:
        future.result(800)
    assert order == ["greedy 0", "modest 0", "greedy 1", "modest 1", "greedy 2"]
    downloads.close()


def test_what_fails_fails_alone() -> None:
    downloads = Downloads()

    def fail() -> torch.Tensor:
        raise OSError("no disk")

    broken, whole = downloads.submit("a", fail), downloads.submit("a", lambda: torch.ones(1))
    with pytest.raises(OSError, match="no disk"):
        broken.result(800)
    assert whole.result(800) == 1
    downloads.close()
