"""Tables of training data: the records that they hold, and what is no table of records."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.errors import ConfigurationError
from tenant_sdk.tuning import tables
from tenant_sdk.tuning.records import Record, check_data, holds_records, read_text, records_of, spoken_to

MESSAGES = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ruth."}]


def records(path: Path) -> list[tuple[int, Record]]:
    text = read_text(path)
    assert holds_records(path, text)
    return list(records_of(path, text))


def pairs(path: Path) -> list[tuple[int, str | None, str | None]]:
    return [(line, each.prompt, each.completion) for line, each in records(path)]


def test_a_row_is_a_record(tmp_path: Path) -> None:
    """Its line is that on which it begins, for errors."""
    path = tmp_path / "x.CSV"
    path.write_text('\ufeffprompt, completion ,note\n"a, b",c,\n\n"two\nlines","say ""so""",x\nlast,d,\n')
    assert pairs(path) == [(2, "a, b", "c"), (4, "two\nlines", 'say "so"'), (6, "last", "d")]
    assert records(path)[1][1].unread == ("note",)


def test_tabs_separate_columns(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text("prompt\tcompletion\na, b\tc\n")
    assert pairs(path) == [(2, "a, b", "c")]


def test_cells_hold_json_where_records_hold_lists(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(
        'messages\n"[{""role"":""user"",""content"":""Who?""},{""role"":""assistant"",""content"":""Ruth.""}]"\n'
    )
    assert records(path)[0][1].messages == MESSAGES
    path.write_text("messages\nWho?\n")
    with pytest.raises(ConfigurationError, match=r"x.csv, line 2: .*`array . null`, got `str`"):
        check_data([path])


def test_alpaca_in_a_table(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("instruction,input,output\nWho?,,Ruth.\n")
    assert records(path)[0][1].messages == MESSAGES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "question,answer\na,b\n",
            r"names its columns as the keys .* This one has question, answer",
        ),
        ("", "This one has nothing"),
        ("prompt,prompt\na,b\n", "two columns have the same name"),
        ("prompt,completion\na,b\nc\n", "line 3: the row has 1 cells, and the header 2"),
        ("prompt,completion\na,b,c\n", "line 2: the row has 3 cells, and the header 2"),
        ("prompt,completion\na,\n", "line 2: a record has .* this one has prompt"),
        ("prompt,completion\n", "holds no record"),
        ('text\n"a' + "b" * 200_000, "line 2: unexpected end of data"),
        ('prompt, completion\n"Free?", "Yes"\n', "line 2: a cell begins with a space and a quote"),
    ],
)
def test_what_is_no_table_of_records(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        check_data([path])


def write_parquet(path: Path, columns: dict[str, list[Any]]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pytest.importorskip("pyarrow").table(columns), path)


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
    with pytest.raises(ConfigurationError, match=r"x\.parquet, row 2: a value is no text"):
        check_data([path])


def test_parquet_whose_rows_take_all_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of one value takes next to nothing in a file."""
    path = tmp_path / "x.parquet"
    write_parquet(path, {"text": ["a"] * 1000})
    monkeypatch.setattr(tables, "_MAX_VALUES", 999)
    with pytest.raises(ConfigurationError, match="has 1,000 values or more, and 999 are the most"):
        check_data([path])
    monkeypatch.setattr(tables, "_MAX_VALUES", 1000)
    with monkeypatch.context() as patch:
        patch.setattr(tables, "_MAX_BYTES", 5000)
        with pytest.raises(ConfigurationError, match="GiB of text"):
            check_data([path])
    monkeypatch.setattr(tables, "_FEW_ROWS", 10)
    with pytest.raises(ConfigurationError, match=r"1,000 rows in \d+ bytes, so most are the same"):
        check_data([path])


def test_parquet_whose_text_takes_all_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row names a text that the file has once; it is not read before its size is known."""
    path = tmp_path / "x.parquet"
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"text": ["a" * (1 << 20)] * 40})
    parquet.write_table(table, path, compression="zstd", write_statistics=False)
    monkeypatch.setattr(tables, "_FEW_BYTES", 1 << 20)
    with pytest.raises(ConfigurationError, match="1,000 bytes of text for each of its own"):
        check_data([path])
    with monkeypatch.context() as patch:
        patch.setattr(tables, "_MAX_BYTES", 1 << 20)
        with pytest.raises(ConfigurationError, match="GiB of text"):
            check_data([path])
    with monkeypatch.context() as patch:
        patch.setattr(tables, "_ROWS_BYTES", 7 << 20)
        with pytest.raises(ConfigurationError, match="row 1: it and the next 7 have more than 7 MiB"):
            check_data([path])

    def none_left(_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(tables, "_plain", none_left)
    with pytest.raises(ConfigurationError, match=r"cannot read .*: it takes more memory than there is"):
        check_data([path])


def write_nulls(path: Path, count: int, said: int | None = None) -> None:
    """A row with a list of so many objects of nothing; ``said``: how many the footer says, if not these."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    objects = pyarrow.StructArray.from_arrays([pyarrow.nulls(count)], ["role"])
    offsets = pyarrow.array([0, count], pyarrow.int32())
    table = pyarrow.table({"messages": pyarrow.ListArray.from_arrays(offsets, objects)})
    parquet.write_table(table, path, compression="zstd", use_dictionary=False, write_statistics=False)
    if said is None:
        return
    content = bytearray(path.read_bytes())
    begins = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    number = varint(2 * count)
    padded = bytes([2 * said | 128]) + b"\x80" * (len(number) - 2) + b"\0"
    content[begins:] = content[begins:].replace(number, padded)
    path.write_bytes(content)
    assert parquet.ParquetFile(path).metadata.row_group(0).column(0).num_values == said


def varint(number: int) -> bytes:
    """As Thrift writes it."""
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


@pytest.mark.parametrize("said", [None, 10])
def test_parquet_whose_objects_take_all_memory(
    said: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing takes no bytes in a file or in Arrow; the objects that are made of it do."""
    path = tmp_path / "x.parquet"
    write_nulls(path, 20_000, said)
    converted = []
    monkeypatch.setattr(tables, "_plain", converted.append)
    with monkeypatch.context() as patch:
        patch.setattr(tables, "_MAX_ROWS_VALUES", 40_000)
        with pytest.raises(ConfigurationError, match="row 1: it and the next 7 have more than 40,000 values"):
            check_data([path])
    monkeypatch.setattr(tables, "_MAX_VALUES", 40_000)
    with pytest.raises(ConfigurationError, match="has 40,001 values or more, and 40,000 are the most"):
        check_data([path])
    assert not converted


def test_parquet_that_names_a_text_many_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow's dictionaries keep it once; each row gets a text of its own."""
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "x.parquet"
    write_parquet(path, {"text": pyarrow.array(["a" * 10_000] * 8).dictionary_encode()})
    assert len(records(path)) == 8
    monkeypatch.setattr(tables, "_ROWS_BYTES", 79_999)
    with pytest.raises(ConfigurationError, match="row 1: it and the next 7 have more than"):
        check_data([path])


def test_parquet_that_takes_more_memory_as_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.parquet"
    write_parquet(path, {"text": ["a"]})
    limits = []

    def plain(_: Any) -> str:
        limits.append(resource.getrlimit(resource.RLIMIT_AS)[0])
        return "a"

    before = resource.getrlimit(resource.RLIMIT_AS)
    monkeypatch.setattr(tables, "_plain", plain)
    read_text(path)
    assert limits != [before[0]]
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_parquet_where_the_system_does_not_say_what_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.parquet"
    write_parquet(path, {"text": ["a"]})
    monkeypatch.setattr(tables, "_TAKEN", tmp_path / "none", raising=False)
    assert [each.text for _, each in records(path)] == ["a"]


def test_columns_of_parquet_that_no_record_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are named, and not decoded."""
    path = tmp_path / "x.parquet"
    write_parquet(path, {"text": ["a", "b"], "weight": [1, None], "note": ["x" * (2 << 20)] * 2})
    monkeypatch.setattr(tables, "_ROWS_BYTES", 1 << 20)
    monkeypatch.setattr(tables, "_MAX_BYTES", 1 << 20)
    assert [(line, each.text, each.unread) for line, each in records(path)] == [
        (1, "a", ("note", "weight")),
        (2, "b", ()),
    ]
    write_parquet(path, {"text": ["a", "b"], "weight": [1, 0]})
    with pytest.raises(ConfigurationError, match="line 2: `weight` of a record is not obeyed"):
        check_data([path])


def test_parquet_that_takes_more_memory_than_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its author writes the sizes of columns and pages."""
    path = tmp_path / "x.parquet"
    write_parquet(path, {"text": ["a"]})
    before = resource.getrlimit(resource.RLIMIT_AS)

    def hungry(*_: Any, **__: Any) -> Any:
        yield from np.empty(4 << 30, np.uint8)[:0]  # whose pages nobody touches

    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", hungry)
    with pytest.raises(ConfigurationError, match=r"cannot read .*: it takes more memory than there is"):
        check_data([path])
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_quotes_join_no_rows_of_tabs(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text('prompt\tcompletion\nhow long?\t"a foot\nhow wide?\t5"\n')
    with pytest.raises(ConfigurationError, match="line 2: a cell has a tab or a line's end"):
        check_data([path])


def test_whether_and_how_records_speak(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    chats, others = tmp_path / "chats.jsonl", tmp_path / "others.jsonl"
    chats.write_text("\n".join([json.dumps({"messages": [system, *MESSAGES]})] * 2))
    others.write_text(json.dumps({"messages": MESSAGES}))
    plain = tmp_path / "plain.jsonl"
    plain.write_text(json.dumps({"text": "Ruth."}))
    assert spoken_to([chats]) == (True, "Be brief.")
    assert spoken_to([chats, others]) == (True, "")
    assert spoken_to([others, plain]) == (True, "")
    assert spoken_to([plain]) == (False, "")
