"""Tables and JSON lists of training data: the records that they hold, and what is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.errors import ConfigurationError
from tenant_sdk.tuning.records import (
    Record,
    check_data,
    find_conversations,
    holds_records,
    read_text,
    records_of,
)

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


@pytest.mark.parametrize("name", ["alpaca.json", "alpaca.jsonl", "alpaca"])
@pytest.mark.parametrize(("indent", "lines"), [(4, (2, 7)), (None, (1, 2))])
def test_a_list_of_records(tmp_path: Path, name: str, indent: int | None, lines: tuple[int, int]) -> None:
    """So Alpaca's and ShareGPT's data are published; in one line, records are counted."""
    path = tmp_path / name
    who = {"instruction": "Who?", "input": "", "output": "Ruth."}
    path.write_text(json.dumps([who, who | {"output": "Ruth\n{}."}], indent=indent))
    found = records(path)
    assert tuple(line for line, _ in found) == lines
    assert found[0][1].messages == MESSAGES
    assert found[1][1].messages == [MESSAGES[0], MESSAGES[1] | {"content": "Ruth\n{}."}]
    path.write_text(json.dumps([who, {"question": "Who?"}], indent=indent))
    with pytest.raises(ConfigurationError, match=rf"line {lines[1]}: a record has .* this one has question"):
        check_data([path])


def test_a_list_that_is_none(tmp_path: Path) -> None:
    for text in ('[{"text": "a"},', '[{"text": "a"}] {"text": "b"}'):
        (path := tmp_path / "x.json").write_text(text)
        with pytest.raises(ConfigurationError, match=r"x.json begins as a list of records, but "):
            check_data([path])
        (plain := tmp_path / "x.txt").write_text(text)
        assert read_text(plain) == text
        assert not holds_records(plain, text)
    path.write_text("[]")
    with pytest.raises(ConfigurationError, match="holds no record"):
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


def test_whether_and_how_records_speak(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    chats, others = tmp_path / "chats.jsonl", tmp_path / "others.jsonl"
    chats.write_text("\n".join([json.dumps({"messages": [system, *MESSAGES]})] * 2))
    others.write_text(json.dumps({"messages": MESSAGES}))
    plain = tmp_path / "plain.jsonl"
    plain.write_text(json.dumps({"text": "Ruth."}))
    assert find_conversations([chats]) == (True, "Be brief.")
    assert find_conversations([chats, others]) == (True, "")
    assert find_conversations([others, plain]) == (True, "")
    assert find_conversations([plain]) == (False, "")


def test_a_table_by_another_name_is_not_learned_as_text(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    for header in ("prompt,completion", '"instruction";"input";"output"', "Text\tlabel"):
        path.write_text(f"{header}\nsecret,row\n")
        with pytest.raises(
            ConfigurationError, match=r"names the columns of a table .*Name the file \.csv"
        ) as no:
            check_data([path])
        assert "secret" not in str(no.value)
    for text in ("text\nand more", "Output, as it was.\nprompt,completion", "\nprompt,completion\n"):
        path.write_text(text)
        assert read_text(path) == text
