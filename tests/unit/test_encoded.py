"""Small files that are read whole."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import pytest

from shared.encoded import decode_json, numbers_fit, read_within
from shared.errors import ConfigurationError


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    opened = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(ConfigurationError, match="is no file"):
            read_within(pipe, 10)
        with pytest.raises(IsADirectoryError):
            read_within(tmp_path, 10)
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_pipe_that_a_user_names_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"content",))
    writer.start()
    assert read_within(pipe, 10, pipes=True) == b"content"
    writer.join()
    (tmp_path / "large").write_bytes(bytes(11))
    with pytest.raises(ConfigurationError, match="larger than 10 bytes"):
        read_within(tmp_path / "large", 10)


@pytest.mark.parametrize("number", ["9e306", "-1.5E+308", "1e-320", "1e0000000199", "0.5e200", "9" * 41])
def test_numbers_that_take_long_are_refused(number: str) -> None:
    """msgspec takes a thousand times as long for them, and no other thread runs meanwhile."""
    text = f'{{"name": [true, "9e306", {number}]}}'
    assert not numbers_fit(text.encode())
    with pytest.raises(msgspec.DecodeError, match="exponent beyond 199"):
        decode_json(text)


@pytest.mark.parametrize(
    "number", ["1e199", "-3.4028234663852886e+38", "1E-05", "1e+005", "0.1", "12345678901234567890"]
)
def test_other_numbers_are_read(number: str) -> None:
    text = f'{{"name \\" 9e306": [{number}, null, "\\\\", 1]}}'
    assert numbers_fit(text.encode())
    assert decode_json(text, dict[str, list[float | int | str | None]]) == msgspec.json.decode(text)


def test_files_have_integers_that_bodies_do_not() -> None:
    largest = '{"model_max_length": 1000000000000000019884624838656}'
    assert decode_json(largest)
    assert not numbers_fit(largest.encode())
