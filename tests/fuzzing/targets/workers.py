"""What an executor and its workers send each other, and transcripts."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import cache

import msgspec

from fuzzing.oracle import Target
from fuzzing.targets.files import written
from fuzzing.targets.wire import manifest
from provider.observe.transcript import ANSWER, LENGTH, MAGIC, RECORD, RecordKind
from provider.workers.batch import BatchLayout, RequestRows, WorkerBatch
from provider.workers.link import (
    _FRAME,
    ALIVE,
    ASSIGNMENT,
    BATCH,
    DONE,
    LOADED,
    MEMORY,
    REFUSED,
    Assignment,
    Done,
    FailureMessage,
    Loaded,
    LocalLink,
)
from security.recordings.transcript import read_transcript
from shared.encoded import UNREADABLE
from shared.errors import SymbiosisError, WireError
from shared.transport.colocated import SharedMemory
from shared.wire.header import DTYPES, Header, Operation
from shared.wire.messages import encode
from shared.wire.protocol import GroupShape

_TYPES = {ASSIGNMENT: Assignment, LOADED: Loaded, REFUSED: FailureMessage, BATCH: WorkerBatch, DONE: Done}
_LARGEST = 1 << 12  # bytes that fit into a socket without somebody who reads


def link(data: bytes) -> None:
    """Messages of the other end of a link, until it closes; and what is in them."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(data[:_LARGEST])
    end = LocalLink(ours)
    try:
        while True:
            kind, content = end.receive()
            if kind in _TYPES:
                msgspec.msgpack.decode(content, type=_TYPES[kind])
    finally:
        end.close()


def batch(data: bytes) -> None:
    """Where rows and answers of a batch are: within its memory, or refused."""
    found = msgspec.msgpack.decode(data, type=WorkerBatch)
    shapes = {number: GroupShape.of(info, "ring") for number, info in enumerate(manifest().groups)}
    if found.group not in shapes or found.dtype not in DTYPES or found.direction not in (1, 2):
        return  # the worker's table has no such entry
    shape = shapes[found.group]
    if not 0 < found.members < 1 << len(shape.outputs):
        return
    layout = BatchLayout(found.requests, found.dtype, shape.widths(found.direction, found.members))
    memory = SharedMemory.private(1 << 14)
    layout.requests(memory)
    layout.answers(memory)
    for place, rows in layout.seeded(memory):
        assert place.stop - place.start == len(rows)


def transcript(data: bytes) -> None:
    """A recording; what it says was sent is read."""
    path = written("x.transcript", data[1:])
    found = read_transcript(path, cut=bool(data[:1] > b"\x7f"))
    for request in found.requests:
        assert request.rows.shape == request.header.payload_shape
        assert request.kind == request.stream[:3]


@cache
def _batches() -> list[bytes]:
    rows = [
        WorkerBatch(1, 0, 1, 3, 6, [RequestRows(2), RequestRows(1, 1, 4)]),
        WorkerBatch(2, 1, 2, 1, 6, []),
    ]
    return [msgspec.msgpack.encode(each) for each in rows]


def _links() -> list[bytes]:
    done = msgspec.msgpack.encode(Done(1, 0.5, {0: FailureMessage("no", "busy", 1.0)}))
    loaded = msgspec.msgpack.encode(Loaded(dict(enumerate(manifest().groups)), [(0, 1, None)]))  # type: ignore[list-item]
    assigned = msgspec.msgpack.encode(Assignment("x", "ring", "cpu", 1, dict(enumerate(manifest().groups))))
    messages = [(BATCH, _batches()[0]), (DONE, done), (LOADED, loaded), (ASSIGNMENT, assigned)]
    messages += [(ALIVE, b""), (MEMORY, bytes(8)), (REFUSED, msgspec.msgpack.encode(FailureMessage("no")))]
    framed = [_FRAME.pack(len(content), kind) + content for kind, content in messages]
    return [*framed, b"".join(framed[:2])]


def _transcripts() -> list[bytes]:
    text, asked = encode(manifest()), Header(Operation.PRODUCT, 1, 6, 0, 7, 2, 4, 3, 1, 16)
    seed = Header(Operation.SEED_EFFECT, 1, 6, 0, 8, 2, 4, 3, 3, 32)
    begin = (
        MAGIC + LENGTH.pack(len(text)) + text + RECORD.pack(RecordKind.OPENED, 1, 1e9) + LENGTH.pack(1) + b"a"
    )
    requests = b"".join(
        RECORD.pack(RecordKind.REQUEST, 1, 1e9) + each.pack() + bytes(each.payload_bytes)
        for each in (asked, seed)
    )
    end = RECORD.pack(RecordKind.ANSWERED, 1, 1e9) + ANSWER.pack(7, 0.25)
    end += RECORD.pack(RecordKind.CLOSED, 1, 1e9) + RECORD.pack(RecordKind.END, 0, 1e9)
    return [b"\0" + begin + requests + end, b"\xff" + begin + requests]


TARGETS: Sequence[Target] = (
    Target("link", link, _links, ("provider/workers/link.py",), (EOFError, OSError, *UNREADABLE)),
    # The worker makes a failure of each.
    Target(
        *("batch", batch, _batches, ("provider/workers/batch.py",)),
        (WireError, *UNREADABLE, RuntimeError, OverflowError),
    ),
    Target("transcript", transcript, _transcripts, ("security/recordings/transcript.py",), (SymbiosisError,)),
)
