"""Fixtures of the tests of the wire: a tenant who was there before, a raw one, threads.

A test module takes them with ``pytest_plugins = ("wire_fixtures",)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import Executor
from raw_peers import Peer, eventually, metric, open_raw

import tenant_sdk
from shared.checkpoint import Checkpoint
from shared.wire.header import Direction, Operation
from tenant_sdk.connection.keys import ProductKey


@pytest.fixture(scope="module")
def weight(checkpoint: Callable[[str], Path]) -> torch.Tensor:
    """Of the first member of group 0: [64, 64]."""
    return Checkpoint(checkpoint("llama")).read("model.layers.0.self_attn.q_proj.weight")


@pytest.fixture(scope="module")
def witness(llama: Executor) -> Iterator[tenant_sdk.Session]:
    """Another tenant's session, opened before anything here happens."""
    with llama.connect() as session:
        yield session


@pytest.fixture
def goes_on(llama: Executor, witness: tenant_sdk.Session, weight: torch.Tensor) -> Iterator[None]:
    """After every test here the other tenant's session gets the right answer, and nothing is left open."""
    sessions = metric(llama, "symbiosis_connections")
    yield
    x = torch.randn((3, 64), generator=torch.Generator().manual_seed(1))
    (y,) = witness.executor.submit(Operation.PRODUCT, ProductKey(0, Direction.FORWARD, 1), [x]).result()
    torch.testing.assert_close(y, x @ weight.T)
    # Fewer, if a session of an earlier test was still ending when this one began.
    eventually(lambda: metric(llama, "symbiosis_connections") <= sessions)


@pytest.fixture
def raw(llama: Executor) -> Iterator[Peer]:
    """A raw tenant of the same executor that has said HELLO."""
    with open_raw(llama) as peer:
        peer.hello()
        yield peer


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """More threads than any test here uses."""
    with ThreadPoolExecutor(32) as pool:
        yield pool
