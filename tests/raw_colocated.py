"""A tenant of the same machine that sends whatever bytes a test wants.

Written from ``shared/PROTOCOL.md``, "Co-located transport", with nothing of the project's.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import struct
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import zmq
from raw_peers import ERROR, HELLO, SECONDS, WELCOME, Fields, header

import tenant_sdk
from shared.wire.header import Direction, Operation
from tenant_sdk.connection.keys import ProductKey

MILLISECONDS = int(SECONDS * 1000)


def request_session(directory: Path, *frames: bytes) -> tuple[bytes, Any]:
    """What the executor's listening socket answers: its kind, and the JSON behind it."""
    with zmq.Context.instance().socket(zmq.DEALER) as sock:
        sock.linger = 0
        sock.connect(f"ipc://{directory}/door")
        sock.send_multipart(frames)
        assert sock.poll(MILLISECONDS)
        kind, body = sock.recv_multipart()
        return kind, json.loads(body)


class RawTenant:
    """An open session."""

    def __init__(self, directory: Path, token: str) -> None:
        kind, self.opened = request_session(directory, b"symbiosis.v4", token.encode())
        assert kind == b"opened", self.opened
        path = f"{directory}/{self.opened['session']}"
        self.memory = os.open(f"/proc/{self.opened['pid']}/fd/{self.opened['descriptor']}", os.O_RDWR)
        self.map = mmap.mmap(self.memory, self.opened["size"])
        self.requests = os.open(f"{path}.requests", os.O_WRONLY)
        self.answers = os.open(f"{path}.answers", os.O_RDONLY)
        self.socket = zmq.Context.instance().socket(zmq.PAIR)
        self.socket.linger = 0
        self.socket.connect(f"ipc://{path}")

    def say(self, head: bytes, body: bytes = b"", places: tuple[int, int] = (0, 0)) -> None:
        """A message over ZeroMQ."""
        self.socket.send(head + struct.pack("<QQ", *places) + body)

    def ask(self, head: bytes, at: int, answer_at: int) -> None:
        """A message through the pipe."""
        os.write(self.requests, head + struct.pack("<QQ", at, answer_at))

    def hear(self) -> bytes:
        """The next message over ZeroMQ."""
        assert self.socket.poll(MILLISECONDS)
        data: bytes = self.socket.recv()
        return data

    def hello(self) -> dict[str, Any]:
        """Say HELLO; the manifest."""
        body = json.dumps({"client": "raw"}).encode()
        self.say(header(HELLO, rows=1, columns=len(body)), body)
        data = self.hear()
        assert data[1] == WELCOME
        manifest: dict[str, Any] = json.loads(data[32:])
        return manifest

    def hear_error(self) -> tuple[int, str]:
        """Request id and code of an ERROR."""
        data = self.hear()
        fields = Fields(*struct.unpack_from("<BBBBIIIIHHQ", data))
        assert fields.operation == ERROR, fields
        return fields.request_id, json.loads(data[32:])["code"]

    def read_answer(self) -> Fields:
        """A header out of the pipe."""
        return Fields(*struct.unpack("<BBBBIIIIHHQ", os.read(self.answers, 32)))

    def __enter__(self) -> RawTenant:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.map.close()
        self.socket.close()
        for descriptor in (self.memory, self.requests, self.answers):
            os.close(descriptor)


def ones_product(session: tenant_sdk.Session, rows: int = 1) -> torch.Tensor:
    """The first member of group 0, times rows of ones."""
    key = ProductKey(0, Direction.FORWARD, 1)
    return session.executor.submit(Operation.PRODUCT, key, [torch.ones(rows, 64)]).result()[0]


def memories(pid: int | str = "self") -> int:
    """Pieces of sessions' shared memory that an executor holds open; workers' end with the garbage."""
    found = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(os.readlink(each))
    return sum(bool(re.match("/memfd:symbiosis-(?!worker)", each)) for each in found)
