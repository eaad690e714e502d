"""Fixtures of the tests of ring executors.

A test module takes them with ``pytest_plugins = ("ring_fixtures",)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import RING, Executor
from intercepting_proxy import InterceptingProxy, intercepted
from ring_sessions import ExecutorFactory, Executors


@pytest.fixture(scope="session")
def executors(serve: Callable[..., Executor], checkpoint: Callable[[str], Path]) -> ExecutorFactory:
    """A provider and two mask sources of a tiny model: ``executors("llama")``; made once."""
    made: dict[str, Executors] = {}

    def get(architecture: str) -> Executors:
        if architecture not in made:
            folder = checkpoint(architecture)
            made[architecture] = tuple(serve(folder, numerics=RING) for _ in range(3))  # type: ignore[assignment]
        return made[architecture]

    return get


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """More threads than any test here uses."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def proxy(tls_dir: Path) -> Iterator[Callable[[Executor], InterceptingProxy]]:
    """A proxy before an executor: ``proxy(executor)``."""
    with ExitStack() as stack:
        yield lambda upstream: stack.enter_context(intercepted(upstream, tls_dir))
