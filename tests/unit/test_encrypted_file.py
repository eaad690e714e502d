"""Tensors in an encrypted file."""

import copy
import errno
import os
from pathlib import Path

import pytest
import torch
from cryptography.exceptions import InvalidTag
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ConfigurationError, ConnectionLost, StorageError
from tenant_sdk.sequences.encrypted_file import FEW, PIECE, EncryptedFile

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]


def random_tensor(seed: int, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Of any bits that the dtype has."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.lists(st.integers(0, 40), max_size=3), st.sampled_from(DTYPES)),
        max_size=8,
    ),
    st.data(),
)
def test_what_was_written_is_read(
    tensors: list[tuple[int, list[int], torch.dtype]], data: st.DataObject
) -> None:
    spill = EncryptedFile()
    kept = []
    for each in tensors:
        tensor = random_tensor(*each)
        kept.append((tensor, spill.write(tensor)))
        if data.draw(st.booleans()):
            spill.free(kept.pop(data.draw(st.integers(0, len(kept) - 1)))[1])
    for tensor, spilled in kept:
        assert torch.equal(spill.read(spilled), tensor)
        assert spilled.nbytes == tensor.nbytes
    spill.close()


@pytest.mark.parametrize(
    "size", [PIECE // 4 - 1, PIECE // 4, PIECE // 4 + 1, PIECE, FEW * PIECE // 4, FEW * PIECE // 4 + 1]
)
def test_around_the_size_of_a_piece(size: int) -> None:
    spill = EncryptedFile()
    tensor = random_tensor(0, [size], torch.float32)
    out = torch.zeros(size)
    assert spill.read(spill.write(tensor), out) is out
    assert torch.equal(out, tensor)


def test_a_freed_place_is_used_again() -> None:
    spill = EncryptedFile()
    first = spill.write(torch.zeros(1000))
    taken = spill.nbytes
    spill.free(first)
    second = spill.write(torch.ones(1000))
    assert (spill.nbytes, second.at) == (taken, first.at)
    assert second.number != first.number
    assert torch.equal(spill.read(second), torch.ones(1000))


def test_other_sizes_take_no_more_room_once_nothing_is_kept() -> None:
    spill = EncryptedFile()
    for size in range(1000, 1100, 10):
        kept = [spill.write(torch.full((size + i,), float(i))) for i in range(3)]
        assert [float(spill.read(each)[-1]) for each in kept] == [0, 1, 2]
        for each in kept:
            spill.free(each)
    assert spill.nbytes == 4 * (1090 + 1091 + 1092) + 3 * 16


@pytest.mark.parametrize("size", [1000, FEW * PIECE // 4])
def test_what_could_not_be_written_takes_no_room(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spill = EncryptedFile()
    kept = spill.write(torch.ones(1))
    with monkeypatch.context() as full:

        def pwrite(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr(os, "pwrite", pwrite)
        for _ in range(3):
            with pytest.raises(StorageError, match="space"):
                spill.write(torch.zeros(size))
    taken = spill.nbytes
    spill.write(torch.zeros(size))
    assert spill.nbytes == taken
    assert float(spill.read(kept)[0]) == 1


def descriptor(spill: EncryptedFile) -> Path:
    return Path(f"/proc/self/fd/{spill._file}")


def test_the_file_has_no_name_and_shows_nothing(tmp_path: Path) -> None:
    spill = EncryptedFile(tmp_path)
    text = b"a patient's name, many times over. " * 20_000
    zeros = torch.zeros(100_000)
    spill.write(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    once, twice = spill.write(zeros), spill.write(zeros)
    assert not list(tmp_path.iterdir())
    stored = descriptor(spill).read_bytes()
    assert len(stored) == spill.nbytes > len(text)
    assert b"patient" not in stored
    assert bytes(64) not in stored
    assert stored[once.at : twice.at] != stored[twice.at :]  # the same values never look the same


@pytest.mark.parametrize("size", [1000, FEW * PIECE // 4])
def test_a_changed_file_is_noticed(size: int) -> None:
    spill = EncryptedFile()
    spilled = spill.write(torch.zeros(size))
    (stored,) = os.pread(spill._file, 1, spill.nbytes - 17)
    os.pwrite(spill._file, bytes([stored ^ 1]), spill.nbytes - 17)
    with pytest.raises(InvalidTag):
        spill.read(spilled)
    os.ftruncate(spill._file, 10)
    with pytest.raises(EOFError):
        spill.read(spilled)


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="absent"):
        EncryptedFile(tmp_path / "absent")


def test_it_is_not_copied() -> None:
    for way in (copy.copy, copy.deepcopy, lambda each: each.__reduce_ex__(2)):
        with pytest.raises(ConfigurationError, match="cannot be copied"):
            way(EncryptedFile())


def test_a_forked_child_has_neither_key_nor_file() -> None:
    spill = EncryptedFile()
    spilled = spill.write(torch.ones(3))
    child = os.fork()
    if not child:
        spill.free(spilled)  # a finalizer of the child's does that
        gone = not spill.close.alive and not hasattr(spill, "_cipher")
        try:
            spill.read(spilled)
        except ConnectionLost:
            os._exit(0 if gone else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert float(spill.read(spilled)[0]) == 1


def test_wrong_room() -> None:
    spill = EncryptedFile()
    spilled = spill.write(torch.zeros(4, 2))
    for wrong in (torch.zeros(2, 4), torch.zeros(4, 2, dtype=torch.int32), torch.zeros(2, 4).T):
        with pytest.raises(ValueError, match="no room"):
            spill.read(spilled, wrong)
