"""Clients share threads fairly."""

import threading
import weakref

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


def test_cancelled_work_is_forgotten_at_once() -> None:
    """A tenant that asks and hangs up, again and again, would fill the memory with what nobody waits for."""
    threads, begun, go = FairThreads(1), threading.Event(), threading.Event()

    class Connection:
        """What the work keeps."""

    def first() -> None:
        begun.set()
        go.wait()

    threads.submit_for("alice", first)
    begun.wait()
    connection = Connection()
    kept = weakref.ref(connection)
    futures = [threads.submit_for("alice", lambda each=connection: each) for _ in range(5)]
    del connection
    assert kept() is not None
    for future in futures:
        assert future.cancel()
    futures.clear()
    del future
    assert kept() is None
    assert not threads._waiting
    other = threads.submit_for("bob", lambda: "bob")
    go.set()
    assert other.result(800) == "bob"
    threads.shutdown()


def test_no_work_is_taken_after_the_end() -> None:
    """It would wait for ever: nobody begins it."""
    threads, begun, go = FairThreads(1), threading.Event(), threading.Event()

    def first() -> bool:
        begun.set()
        return go.wait(800)

    running = threads.submit_for("alice", first)
    begun.wait()
    waiting = threads.submit_for("bob", lambda: None)
    threads.shutdown(wait=False)
    assert waiting.cancelled()
    with pytest.raises(RuntimeError, match="shut down"):
        threads.submit_for("carol", lambda: None)
    go.set()
    assert running.result(800)
