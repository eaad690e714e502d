"""Transcripts for tests, of sessions that never happened: rows of the public model, masked as a test says."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch
from audits import MODEL
from transformers import AutoTokenizer

from provider.executor.base import BaseExecutor
from provider.observe.transcript import TranscriptWriter
from security.views.public_model import PublicModel
from shared.ring.fixed_point import exponents, max_row_norm, quantize_rows
from shared.ring.mask_stream import MaskStream
from shared.wire.header import DTYPE_CODES, Direction, Header, Operation
from shared.wire.messages import Manifest

TEXT = "Tue 7 January. Rory Maclean. Wound healed, stitches buried, hair short. Owner advised to ring again."


@cache
def manifest_of(numerics: str) -> Manifest:
    """Of an executor of the examples' model."""
    return BaseExecutor(MODEL, numerics=numerics).manifest


@cache
def public(numerics: str) -> PublicModel:
    """The examples' model."""
    return PublicModel(MODEL, manifest_of(numerics))


def activations(numerics: str = "ring", text: str = TEXT) -> torch.Tensor:
    """What the first layer gets for a text: rows [T, D], int32 on the ring."""
    tokens = AutoTokenizer.from_pretrained(MODEL)(text)["input_ids"]
    rows = public(numerics).first_inputs[tokens]
    group = manifest_of(numerics).groups[0]
    if group.bounds is None:
        return rows
    max_norm = max_row_norm(group.bounds[0], group.inputs)
    return quantize_rows(rows, exponents(rows.double().norm(dim=1), max_norm))


class Recording:
    """What one executor recorded.

    Args:
        folder: an empty one.
        numerics: of the executor.
    """

    def __init__(self, folder: Path, numerics: str = "ring") -> None:
        manifest = manifest_of(numerics)
        self.writer = TranscriptWriter(folder, manifest)
        self.path = self.writer.path
        self._members = (1 << len(manifest.groups[0].members)) - 1
        self._requests = 0

    def send(self, session: int, rows: torch.Tensor, operation: Operation = Operation.PRODUCT) -> None:
        """A request of the first group, of rows [T, D]."""
        self._send(session, operation, DTYPE_CODES[rows.dtype], rows.shape[0], rows.shape[1], rows)

    def seed(self, session: int, rows: int, columns: int, seed: bytes | None = None) -> bytes:
        """A seed for so many masks, which a mask source gets; None: a fresh one."""
        seed = seed or os.urandom(32)
        payload = torch.frombuffer(bytearray(seed), dtype=torch.uint8)
        self._send(session, Operation.SEED_EFFECT, DTYPE_CODES[torch.int32], rows, columns, payload)
        return seed

    def _send(
        self, session: int, operation: Operation, code: int, rows: int, columns: int, payload: torch.Tensor
    ) -> None:
        self._requests += 1
        header = Header(operation, Direction.FORWARD, code, 0, self._requests, rows, columns, self._members)
        bits = 32 if code == DTYPE_CODES[torch.int32] else 0
        self.writer.request(session, header._replace(answer_bits=bits), payload)


def masked(rows: torch.Tensor, seed: bytes | None = None) -> torch.Tensor:
    """Rows under one-time masks."""
    return rows + MaskStream(seed or os.urandom(32)).draw(*rows.shape)
