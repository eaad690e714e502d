"""Parquet files of training data: their records, refusals before memory is taken, and damaged files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_tables import MESSAGES, pairs, records

from shared.errors import ConfigurationError
from tenant_sdk.tuning import parquet
from tenant_sdk.tuning import records as record_files
from tenant_sdk.tuning.records import check_data, read_text


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read in this process, whose limits a test sets."""
    monkeypatch.setattr(record_files, "parquet_records", lambda *words: "\n".join(parquet.lines_of(*words)))


def written(path: Path, table: Any, **options: Any) -> None:
    pytest.importorskip("pyarrow.parquet").write_table(table, path, **options)


def write_parquet(path: Path, columns: dict[str, list[Any]]) -> None:
    written(path, pytest.importorskip("pyarrow").table(columns))


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    call = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ruth.", "name": None}]
    write_parquet(path, {"messages": [call, MESSAGES], "score": [None, 1]})
    assert [each.messages for _, each in records(path)] == [MESSAGES] * 2
    write_parquet(path, {"prompt": ["a"], "completion": ["b"]})
    assert pairs(path) == [(1, "a", "b")]
    write_parquet(path, {"question": ["a"]})
    with pytest.raises(ConfigurationError, match="This one has question"):
        check_data([path])
    path.write_text("no such thing")
    with pytest.raises(ConfigurationError, match=r"cannot read .*x\.parquet"):
        check_data([path])


def test_bytes_of_parquet_are_text_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_parquet(path, {"prompt": ["Größe".encode()], "completion": ["b"]})
    assert pairs(path) == [(1, "Größe", "b")]
    write_parquet(path, {"prompt": [b"ok", b"\xff"], "completion": ["b", "c"]})
    with pytest.raises(ConfigurationError, match=r"x\.parquet, row 2: a value is no text or number"):
        check_data([path])


def test_parquet_that_is_a_hole(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with (path := tmp_path / "x.parquet").open("wb") as file:
        file.truncate(1 << 36)
    with pytest.raises(ConfigurationError, match="is a hole"):
        read_text(path)


@pytest.mark.usefixtures("here")
def test_parquet_whose_rows_take_all_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of one value takes next to nothing in a file."""
    path = tmp_path / "x.parquet"
    write_parquet(path, {"text": ["a"] * 1000})
    monkeypatch.setattr(parquet, "_MAX_VALUES", 999)
    with pytest.raises(ConfigurationError, match="has 1,000 values or more, and 999 are the most"):
        check_data([path])
    monkeypatch.setattr(parquet, "_MAX_VALUES", 1000)
    with monkeypatch.context() as patch:
        patch.setattr(parquet, "_MAX_BYTES", 5000)
        with pytest.raises(ConfigurationError, match="GiB of text"):
            check_data([path])
    monkeypatch.setattr(parquet, "_FEW_ROWS", 10)
    with pytest.raises(ConfigurationError, match=r"1,000 rows in \d+ bytes, so most are the same"):
        check_data([path])


@pytest.mark.usefixtures("here")
def test_parquet_whose_text_takes_all_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row names a text that the file has once; it is not read before its size is known."""
    path = tmp_path / "x.parquet"
    table = pytest.importorskip("pyarrow").table({"text": ["a" * (1 << 20)] * 40})
    written(path, table, compression="zstd", write_statistics=False)
    monkeypatch.setattr(parquet, "_FEW_BYTES", 1 << 20)
    with pytest.raises(ConfigurationError, match="100 bytes of text for each of its own"):
        check_data([path])
    with monkeypatch.context() as patch:
        patch.setattr(parquet, "_MAX_BYTES", 1 << 20)
        with pytest.raises(ConfigurationError, match="GiB of text"):
            check_data([path])
    with monkeypatch.context() as patch:
        patch.setattr(parquet, "_ROWS_BYTES", 7 << 20)
        with pytest.raises(ConfigurationError, match="row 1: it and the next 7 have more than 7 MiB"):
            check_data([path])

    def none_left(_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(parquet, "_plain", none_left)
    with pytest.raises(ConfigurationError, match=r"cannot read .*: it takes more memory than there is"):
        check_data([path])


def write_nulls(path: Path, count: int, said: int | None = None) -> None:
    """A row with a list of so many objects of nothing; ``said``: how many the footer says, if not these."""
    pyarrow = pytest.importorskip("pyarrow")
    objects = pyarrow.StructArray.from_arrays([pyarrow.nulls(count)], ["role"])
    offsets = pyarrow.array([0, count], pyarrow.int32())
    table = pyarrow.table({"messages": pyarrow.ListArray.from_arrays(offsets, objects)})
    written(path, table, compression="zstd", use_dictionary=False, write_statistics=False)
    if said is None:
        return
    content = bytearray(path.read_bytes())
    begins = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    number = varint(2 * count)
    padded = bytes([2 * said | 128]) + b"\x80" * (len(number) - 2) + b"\0"
    content[begins:] = content[begins:].replace(number, padded)
    path.write_bytes(content)
    file = pytest.importorskip("pyarrow.parquet").ParquetFile(path)
    assert file.metadata.row_group(0).column(0).num_values == said


def varint(number: int) -> bytes:
    """As Thrift writes it."""
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


@pytest.mark.parametrize("said", [None, 10])
@pytest.mark.usefixtures("here")
def test_parquet_whose_objects_take_all_memory(
    said: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing takes no bytes in a file or in Arrow; the objects that are made of it do."""
    path = tmp_path / "x.parquet"
    write_nulls(path, 20_000, said)
    converted = []
    monkeypatch.setattr(parquet, "_plain", converted.append)
    with monkeypatch.context() as patch:
        patch.setattr(parquet, "_MAX_ROWS_VALUES", 40_000)
        with pytest.raises(ConfigurationError, match="row 1: it and the next 7 have more than 40,000 values"):
            check_data([path])
    monkeypatch.setattr(parquet, "_MAX_VALUES", 40_000)
    with pytest.raises(ConfigurationError, match="has 40,001 values or more, and 40,000 are the most"):
        check_data([path])
    assert not converted


@pytest.mark.usefixtures("here")
def test_parquet_that_names_a_text_many_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow's dictionaries keep it once; each row gets a text of its own."""
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "x.parquet"
    write_parquet(path, {"text": pyarrow.array(["a" * 10_000] * 8).dictionary_encode()})
    assert len(records(path)) == 8
    monkeypatch.setattr(parquet, "_ROWS_BYTES", 79_999)
    with pytest.raises(ConfigurationError, match="row 1: it and the next 7 have more than"):
        check_data([path])


@pytest.mark.usefixtures("here")
def test_columns_of_parquet_that_no_record_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are named, and not decoded."""
    path = tmp_path / "x.parquet"
    write_parquet(path, {"text": ["a", "b"], "weight": [1, None], "note": ["x" * (2 << 20)] * 2})
    monkeypatch.setattr(parquet, "_ROWS_BYTES", 1 << 20)
    monkeypatch.setattr(parquet, "_MAX_BYTES", 1 << 20)
    assert [(line, each.text, each.unread) for line, each in records(path)] == [
        (1, "a", ("note", "weight")),
        (2, "b", ()),
    ]
    write_parquet(path, {"text": ["a", "b"], "weight": [1, 0]})
    with pytest.raises(ConfigurationError, match="line 2: `weight` of a record is not obeyed"):
        check_data([path])


def test_quotes_join_no_rows_of_tabs(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text('prompt\tcompletion\nhow long?\t"a foot\nhow wide?\t5"\n')
    with pytest.raises(ConfigurationError, match="line 2: a cell has a tab or a line's end"):
        check_data([path])


def test_a_file_that_ends_the_process_that_reads_it(tmp_path: Path) -> None:
    """Fuzzing found it: a column that may have no nulls counts them, and pyarrow 26.0.1 calls ``abort``."""
    path = tmp_path / "x.parquet"
    write_parquet(path, {"text": ["a", None]})
    content = path.read_bytes()
    optional = b"\x25\x02\x18\x04text"
    assert content.count(optional) == 1
    path.write_bytes(content.replace(optional, b"\x25\x00\x18\x04text"))
    with pytest.raises(ConfigurationError, match=r"cannot read .*x\.parquet"):
        check_data([path])


def test_a_process_that_ends_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, program = tmp_path / "x.parquet", tmp_path / "python"
    write_parquet(path, {"text": ["a"]})
    program.write_text("#!/bin/sh\necho its last words >&2; kill -ABRT $$\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(ConfigurationError, match=r"x\.parquet: pyarrow's .* status -6; .* its last words"):
        check_data([path])


def test_a_file_takes_no_more_memory_than_the_limit(tmp_path: Path) -> None:
    """Its author writes the sizes of columns and pages."""
    code = (
        f"import sys; from {parquet.__name__} import limit_memory; limit_memory(1 << 30); bytearray(2 << 30)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "MemoryError" in done.stderr


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read .*x\.parquet: No such file"):
        read_text(tmp_path / "x.parquet")


def test_a_file_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without values cost time, if they are objects of many keys, of which there are none."""
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "x.parquet"
    part = pyarrow.struct([(f"k{at}", pyarrow.int8()) for at in range(500)])
    table = pyarrow.table({"messages": pyarrow.array([[]] * 50_000, pyarrow.list_(part))})
    written(path, table, compression="zstd")
    with pytest.raises(ConfigurationError, match="has 25,000,000 values or more"):
        check_data([path])
    monkeypatch.setattr(parquet, "_MAX_VALUES", 10**9)
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nkill -XCPU $$\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(ConfigurationError, match=r"takes more than 6\d s of a processor"):
        check_data([path])


@pytest.mark.usefixtures("here")
def test_numbers_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_parquet(path, {"text": ["a", "b"], "score": [1.0, float("nan")]})
    assert [each.text for _, each in records(path)] == ["a", "b"]
    write_parquet(path, {"text": ["a", "b"], "score": [1.0, float("-inf")]})
    with pytest.raises(ConfigurationError, match="row 2: a value is no text or number: -inf"):
        check_data([path])


def test_a_limit_of_a_processor_is_set(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_parquet(path, {"text": ["a"]})
    code = (
        f"import resource; from pathlib import Path; from {parquet.__name__} import main;"
        f"main(Path({str(path)!r}), ['text'], ['text']); print(resource.getrlimit(resource.RLIMIT_CPU))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("(60, 61)\n")
