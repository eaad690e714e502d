"""Tries constraints in a process beside the server, one at a time, and clients take turns."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from tenant_sdk.gateway.constraints import Constraint

SECONDS = 30.0  # until a process that does not answer is replaced, however busy the machine is


class Turns:
    """One at a time; of each client one waits here, so that the others come in between."""

    def __init__(self) -> None:
        self._own: dict[str, asyncio.Lock] = {}
        self._all = asyncio.Lock()

    @asynccontextmanager
    async def taken(self, client: str) -> AsyncIterator[None]:
        """Wait for the client's turn, and hold it in this block."""
        async with self._own.setdefault(client, asyncio.Lock()), self._all:
            yield


class Trials:
    """See ``tenant_sdk.gateway.grammars``.

    Args:
        tokenizer: file of the tokenizer, as Hugging Face's tokenizers write it.
        tokens: of the model.
        end: the token that ends a text.
    """

    def __init__(self, tokenizer: Path, tokens: int, end: int) -> None:
        self._arguments = (str(tokenizer), str(tokens), str(end))
        self._turns = Turns()
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Have the process ready."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tenant_sdk.gateway.grammars",
            *self._arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # libraries' words may hold a client's
            env={name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ},
        )
        await self._line()

    async def refusal(self, client: str, given: Constraint) -> str:
        """Why a constraint is refused, or an empty text. A client that leaves has this cancelled."""
        async with self._turns.taken(client):
            exchange = asyncio.ensure_future(self._exchange(given))
            try:
                return await asyncio.shield(exchange)
            except asyncio.CancelledError:
                await exchange  # its answer is nobody else's, and comes soon
                raise

    async def _exchange(self, given: Constraint) -> str:
        try:
            async with asyncio.timeout(SECONDS):
                if self._process is None:
                    await self.start()
                assert self._process is not None  # noqa: S101 - as ``start`` leaves it
                assert self._process.stdin is not None  # noqa: S101 - likewise
                self._process.stdin.write(msgspec.json.encode(given) + b"\n")
                return await self._line()
        except (TimeoutError, OSError, msgspec.DecodeError):
            self.stop()
            return "it could not be tried; try again"

    async def _line(self) -> str:
        assert self._process is not None  # noqa: S101 - as ``start`` leaves it
        assert self._process.stdout is not None  # noqa: S101 - likewise
        return msgspec.json.decode(await self._process.stdout.readline(), type=str)

    def stop(self) -> None:
        """End the process; the next trial starts another."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        self._process = None
