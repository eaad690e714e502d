"""Programs beside the server, for work that would make other requests wait for a processor."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable

from tenant_sdk.gateway.client_locks import FairLock

SECONDS = 30.0  # until a process that does not answer is replaced, however busy the machine is
NICENESS = 10  # sequences that are computed come first
_LENGTH = 4  # bytes in front of each message


class HelperProcess:
    """A module of this package as a process, which answers one message at a time, of each client in turn.

    The module calls ``answer``.

    Args:
        module: its name.
        arguments: of its command line.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = (sys.executable, "-P", "-m", module, *arguments)
        self._process: asyncio.subprocess.Process | None = None
        self._lock = FairLock()

    async def start(self) -> None:
        """Have the process ready."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # libraries' words may hold a client's
            env={name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ},
        )
        await self._read()

    async def ask(self, client: str, message: bytes) -> bytes | None:
        """Its answer to a client's message; None: there is none, and the next goes to another process.

        One message at a time. If the caller is cancelled, the answer is waited for: it is nobody else's. If
        it is cancelled once more, the process ends.
        """
        async with self._lock.hold(client):
            exchange = asyncio.ensure_future(self._exchange(message))
            try:
                return await asyncio.shield(exchange)
            except asyncio.CancelledError:
                await exchange
                raise

    async def _exchange(self, message: bytes) -> bytes | None:
        try:
            async with asyncio.timeout(SECONDS):
                if self._process is None or self._process.returncode is not None:
                    await self.start()
                assert self._process is not None  # noqa: S101 - as ``start`` leaves it
                assert self._process.stdin is not None  # noqa: S101 - likewise
                self._process.stdin.write(len(message).to_bytes(_LENGTH) + message)
                await self._process.stdin.drain()
                return await self._read()
        # RuntimeError: so uvloop says that the pipe is closed.
        except (TimeoutError, OSError, RuntimeError, asyncio.IncompleteReadError):
            self.stop()
            return None
        except asyncio.CancelledError:  # a second one: the answer would be read in place of the next one
            self.stop()
            raise

    async def _read(self) -> bytes:
        assert self._process is not None  # noqa: S101 - as ``start`` leaves it
        assert self._process.stdout is not None  # noqa: S101 - likewise
        length = int.from_bytes(await self._process.stdout.readexactly(_LENGTH))
        return await self._process.stdout.readexactly(length)

    def stop(self) -> None:
        """End the process; the next message starts another."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        self._process = None

    async def close(self) -> None:
        """``stop``, and wait until it has ended."""
        process = self._process
        self.stop()
        if process is not None:
            await process.wait()


def answer(work: Callable[[bytes], bytes]) -> None:
    """What such a module does: answer messages until there are no more."""
    os.nice(NICENESS)
    _write(b"")  # it is ready
    while length := sys.stdin.buffer.read(_LENGTH):
        _write(work(sys.stdin.buffer.read(int.from_bytes(length))))


def _write(message: bytes) -> None:
    sys.stdout.buffer.write(len(message).to_bytes(_LENGTH) + message)
    sys.stdout.buffer.flush()
