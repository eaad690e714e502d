"""Tensors that do not fit into memory, in a file that nobody can read and that nothing is left of."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import SupportsIndex

import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from shared.errors import ConfigurationError, OptionReference
from shared.forks import ForkGuard, register_for_fork
from tenant_sdk.storage import disk_errors

PIECE = 256 * 1024  # bytes encrypted at once: with their copy they stay in the processor's cache
FEW = 16  # pieces that are not worth other threads
THREADS = max(1, min(4, os.cpu_count() or 1))  # encrypting, reading and writing leave the interpreter alone
_TAG = 16  # bytes of AES-GCM

_THEN = "Give another folder, or less to keep."


@dataclass(frozen=True)
class Spilled:
    """A tensor in the file: where it is, the number of its first piece, and what it was."""

    at: int
    number: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.shape.numel() * self.dtype.itemsize


class EncryptedFile:
    """An encrypted file of tensors, without a name from the first moment.

    The key is drawn here and is only in this process, not in its children; so what a crash leaves on the disk
    is noise. The file has no name (or had one for a moment, where the file system knows no other way), so the
    system gives its space back when the process ends, however it ends. Each piece is encrypted under a
    number of its own (AES-128-GCM), also when it overwrites another, and a piece that changed on the disk is
    noticed. Any thread may write and read. Swap and core files are the system's: they may hold what is in
    memory.

    Args:
        folder: on the disk that is to be used; default ``TMPDIR``, else ``/var/tmp``.

    Raises:
        StorageError: it cannot be written to.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = Path(folder or default_folder())
        with (
            disk_errors(self.folder, "what does not fit into memory", _THEN),
            tempfile.TemporaryFile(dir=self.folder, buffering=0) as file,
        ):
            self._file = os.dup(file.fileno())
        self.close = weakref.finalize(self, os.close, self._file)  # gives the space back
        self._cipher = AESGCM(AESGCM.generate_key(128))
        self._fork_guard = ForkGuard()
        self._numbers = itertools.count()
        self._lock = threading.RLock()  # finalizers free slots, at any moment
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # offsets of slots, by their size
        self._count = self._end = self._peak = 0
        self._threads = ThreadPoolExecutor(THREADS, "symbiosis-spill")
        register_for_fork(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the disk that are taken: as much as was needed at any one time."""
        return self._peak

    def forked(self) -> None:
        """In a child: neither the key nor the file stays there."""
        self.close()
        del self._cipher

    def __reduce_ex__(self, protocol: SupportsIndex) -> str:
        """Neither copied nor pickled: two with the same key would encrypt under the same numbers."""
        raise ConfigurationError(
            "what lies on the disk ({}, a long training) cannot be copied; keep it in memory ({}) or "
            "close() it before",
            OptionReference("kv", "disk"),
            OptionReference("kv", "host"),
        )

    def write(self, tensor: torch.Tensor) -> Spilled:
        """Keep a copy of a tensor on the CPU, of any shape and dtype.

        Raises:
            StorageError: the disk is full.
            ConnectionLost: this is a forked child, whose numbers would be its parent's.
        """
        self._fork_guard.check()
        values = tensor.detach().contiguous()
        plain = values.view(-1).view(torch.uint8).numpy().data if values.numel() else memoryview(b"")
        count = -(-len(plain) // PIECE)
        size = len(plain) + count * _TAG
        with self._lock:
            self._count += 1  # first: a finalizer may come at any line
            if self._free[size]:
                at = self._free[size].pop()
            else:
                at, self._end = self._end, self._end + size
                self._peak = max(self._peak, self._end)
            number = next(self._numbers)
            self._numbers = itertools.count(number + max(1, count))

        def write(index: int, piece: memoryview, encrypted: memoryview) -> None:
            self._cipher.encrypt_into(_nonce(number + index), piece, None, encrypted)
            _write_all(self._file, encrypted, at + index * (PIECE + _TAG))

        spilled = Spilled(at, number, values.shape, values.dtype)
        try:
            with disk_errors(self.folder, "what does not fit into memory", _THEN):
                self._each(plain, write)
        except BaseException:
            self.free(spilled)
            raise
        return spilled

    def read(self, spilled: Spilled, out: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor that was written, as it was.

        Args:
            out: contiguous, of its shape and dtype, on the CPU; default a new one.

        Raises:
            InvalidTag: somebody changed the file.
        """
        self._fork_guard.check()
        if out is None:
            out = torch.empty(spilled.shape, dtype=spilled.dtype)
        elif (out.shape, out.dtype) != (spilled.shape, spilled.dtype) or not out.is_contiguous():
            raise ValueError(f"{out.dtype} {list(out.shape)} has no room for {spilled.dtype} {spilled.shape}")
        if not out.numel():
            return out
        plain = out.view(-1).view(torch.uint8).numpy().data

        def read(index: int, piece: memoryview, encrypted: memoryview) -> None:
            _read_all(self._file, encrypted, spilled.at + index * (PIECE + _TAG))
            self._cipher.decrypt_into(_nonce(spilled.number + index), encrypted, None, piece)

        self._each(plain, read)
        return out

    def _each(self, plain: memoryview, what: Callable[[int, memoryview, memoryview], None]) -> None:
        """Do something with each piece and room for it encrypted; by several threads, if there are many."""
        count = -(-len(plain) // PIECE)

        def share(first: int, step: int) -> None:
            sealed = memoryview(bytearray(min(len(plain), PIECE) + _TAG))
            for index in range(first, count, step):
                piece = plain[index * PIECE : (index + 1) * PIECE]
                what(index, piece, sealed[: len(piece) + _TAG])

        if count < FEW:
            share(0, 1)
        else:
            shares = [self._threads.submit(share, first, THREADS) for first in range(THREADS)]
            wait(shares)  # also if one fails: the others have the caller's memory
            for each in shares:
                each.result()

    def free(self, spilled: Spilled) -> None:
        """Give its slot to another of its size; it must not be read any more, nor freed twice."""
        if self._fork_guard.in_child:  # a child has nothing of it, and its lock may be held for ever
            return
        count = -(-spilled.nbytes // PIECE)
        with self._lock:
            self._count -= 1
            if self._count:
                self._free[spilled.nbytes + count * _TAG].append(spilled.at)
            else:  # the next may have other sizes
                self._free.clear()
                self._end = 0


def default_folder() -> str:
    """A folder for what is large and not for long; /tmp may be memory."""
    large = "/var/tmp"  # noqa: S108 -- the file is made without a name
    for folder in (os.environ.get("TMPDIR"), large):
        if folder and os.path.isdir(folder):
            return folder
    return tempfile.gettempdir()


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")


def _write_all(file: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(file, data, at)
        data, at = data[done:], at + done


def _read_all(file: int, data: memoryview, at: int) -> None:
    while data:
        done = os.preadv(file, [data], at)
        if not done:
            raise EOFError("the file of spilled tensors ends too early: somebody cut it")
        data, at = data[done:], at + done
