"""Processes beside the gateway's server."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from tenant_sdk.gateway.helper_process import HelperProcess

ECHO = """
import time
from tenant_sdk.gateway.helper_process import answer

def work(message):
    while message == b"slow" and not __import__("os").path.exists({released!r}):
        time.sleep(0.01)
    return message

answer(work)
"""


@pytest.mark.parametrize("times", [1, 2])
def test_the_answer_of_a_caller_that_is_cancelled_is_nobody_elses(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often: scopes of some libraries cancel a task until it ends."""
    released = tmp_path / "released"
    (tmp_path / "echo.py").write_text(ECHO.format(released=str(released)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")

    async def run() -> None:
        helper = HelperProcess("echo")
        await helper.start()
        asked = asyncio.ensure_future(helper.ask("", b"slow"))
        for _ in range(times):
            await asyncio.sleep(0.05)  # it has begun; a longer time changes nothing
            asked.cancel()
        if times == 1:
            await asyncio.sleep(0.05)
            assert not asked.done()
        released.touch()
        with contextlib.suppress(asyncio.CancelledError):
            await asked
        assert await helper.ask("", b"quick") == b"quick"
        await helper.close()

    asyncio.run(run())
