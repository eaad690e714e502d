"""Mask sources in memory: honest products of what seeds expand to, with gates, faults and a memory."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass

import torch

from shared.errors import ConnectionLost
from shared.ring.mask_stream import MaskStream
from shared.ring.product import PlaneProducts
from shared.ring.upper_bits import take_upper_bits
from shared.wire.header import Direction, RequestClass
from shared.wire.protocol import GroupShape
from tenant_sdk.connection.keys import ProductKey

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
SHAPES = [GroupShape(8, (4,), planes=1), GroupShape(6, (8, 5), planes=1)]
KEYS = [
    ProductKey(0, FORWARD, 1),
    ProductKey(0, BACKWARD, 1),
    ProductKey(1, FORWARD, 0b11),
    ProductKey(1, BACKWARD, 0b11),
    ProductKey(1, FORWARD, 0b10),
    ProductKey(1, BACKWARD, 0b01),
]
_GENERATOR = torch.Generator().manual_seed(0)
PRODUCTS = [
    PlaneProducts(
        torch.randint(
            -128, 128, (1, sum(shape.outputs), shape.inputs), generator=_GENERATOR, dtype=torch.int16
        ),
        list(shape.outputs),
    )
    for shape in SHAPES
]


def columns(key: ProductKey) -> int:
    """Of a request."""
    return SHAPES[key.group].widths(key.direction, key.member_bits).request_columns


def product(key: ProductKey, rows: torch.Tensor) -> torch.Tensor:
    """What an honest executor answers: int32 [T, C] to [T, N]."""
    widths = SHAPES[key.group].widths(key.direction, key.member_bits)
    out = torch.empty((len(rows), widths.answer_columns), dtype=torch.int32)
    PRODUCTS[key.group].matmul(key.direction, key.member_bits, rows, out)
    return out


class Entropy:
    """Bytes that look random; safe to share between threads."""

    def __init__(self, seed: int = 0) -> None:
        self._random, self._lock = random.Random(seed), threading.Lock()

    def __call__(self, count: int) -> bytes:
        with self._lock:
            return self._random.randbytes(count)


@dataclass(frozen=True)
class SeedRequest:
    """What a source was asked for."""

    key: ProductKey
    rows: int
    seed: bytes


class MemorySource:
    """A SeedSource.

    Args:
        limit: ``max_rows`` of every kind.

    Attributes:
        requests: in the order in which they came.
        gate: effects wait while it is closed.
        error: raised instead of an effect, if set.
        closed: whether ``close`` was called; what waits at the gate then fails.
    """

    def __init__(self, limit: int = 1 << 16) -> None:
        self.requests: list[SeedRequest] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.closed = False
        self._limit = limit

    def seed_effect(
        self, key: ProductKey, rows: int, seed: bytes, request_class: RequestClass
    ) -> torch.Tensor:
        """See SeedSource."""
        self.requests.append(SeedRequest(key, rows, seed))
        assert self.gate.wait(800)
        if self.closed:
            raise ConnectionLost("the source is closed")
        if self.error is not None:
            raise self.error
        assert 0 < rows <= self._limit
        return take_upper_bits(product(key, MaskStream(seed).draw(rows, columns(key))), key.answer_bits)

    def max_rows(self, key: ProductKey) -> int:
        """See SeedSource."""
        return self._limit

    def close(self) -> None:
        """See SeedSource."""
        self.closed = True
        self.gate.set()
