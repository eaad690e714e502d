"""Masks: a seed of 32 bytes and the uniform integers that both sides expand it to."""

from __future__ import annotations

import sys

import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from shared.forks import ForkGuard
from shared.wire.header import SEED_BYTES

_ZEROS = bytes(1 << 18)  # stays in the processor's cache

if sys.byteorder != "little":
    raise ImportError("masks are little-endian integers, and so is everything on the wire")


class MaskStream:
    """The mask of one seed, row after row: the AES-256-CTR key stream from counter 0, as int32.

    The stream only goes forward: what has been drawn cannot be drawn again. It stays in its process: a forked
    child would draw what its parent draws.

    Args:
        seed: 32 bytes, the key. Fresh from the operating system for every stream, so the counter
            may start at 0: no block is ever encrypted twice under one key.
        skip: bytes of the stream that others draw.

    Raises:
        ValueError: another length.
    """

    def __init__(self, seed: bytes | bytearray | memoryview, skip: int = 0) -> None:
        if len(seed) != SEED_BYTES:
            raise ValueError(f"a seed has {SEED_BYTES} bytes")
        self._fork_guard = ForkGuard()
        blocks, rest = divmod(skip, 16)
        self._stream = Cipher(AES(bytes(seed)), CTR(blocks.to_bytes(16, "big"))).encryptor()
        self._stream.update(bytes(rest))

    def draw(self, rows: int, columns: int) -> torch.Tensor:
        """The next ``rows * columns`` integers: int32 [rows, columns], uniform modulo 2^32.

        Raises:
            ConnectionLost: this is a forked child of the process that made the stream.
        """
        self._fork_guard.check()
        size = 4 * rows * columns
        if 0 < size <= len(_ZEROS):  # those of decoding, for which calls count
            stream = bytearray(self._stream.update(_ZEROS[:size]))
            return torch.frombuffer(stream, dtype=torch.int32).view(rows, columns)
        mask = torch.empty((rows, columns), dtype=torch.int32)
        view = mask.view(-1).view(torch.uint8).numpy().data
        for at in range(0, len(view), len(_ZEROS)):
            piece = view[at : at + len(_ZEROS)]
            self._stream.update_into(_ZEROS[: len(piece)], piece)
        return mask
