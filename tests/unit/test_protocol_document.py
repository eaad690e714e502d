"""PROTOCOL.md says what the code does: its tables are compared with the code's own."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import shared.wire.header
from provider.observe.metrics import CODES
from shared.wire.header import (
    DTYPES,
    MAX_MEMBERS,
    PROTOCOL_VERSION,
    SUBPROTOCOL,
    Direction,
    Header,
    Operation,
)
from shared.wire.messages import (
    TENANT_FILES,
    ErrorInfo,
    Fetch,
    FileInfo,
    GroupInfo,
    Hello,
    Limits,
    Manifest,
    Member,
    ParameterInfo,
)
from shared.wire.protocol import MAX_ANSWER_CONTROL_BYTES, MAX_REQUEST_CONTROL_BYTES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "shared" / "PROTOCOL.md").read_text()


def section(title: str) -> str:
    """The text under a heading, up to the next of the same or a higher level."""
    match = re.search(rf"(?ms)^(#+) {re.escape(title)}\n(.*?)(?=^#{{1,3}} |\Z)", TEXT)
    assert match is not None, title
    return match[2]


def table(text: str) -> list[list[str]]:
    """The cells of all table rows in a text, without heads."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"(?m)^\|.*\|$", text)
    ]
    heads = {i for i, row in enumerate(rows) if set("".join(row)) <= set("-:")}
    return [row for i, row in enumerate(rows) if i not in heads and i + 1 not in heads]


def test_the_header_is_laid_out_as_the_table_says() -> None:
    at = 0
    names = []
    for offset, size, name, _ in table(section("Header")):
        assert int(offset) == at
        at += int(size)
        field = name.strip("`")
        names.append(field)
        if field != "version":
            data = Header(0)._replace(**{field: 0x5A}).pack()
            assert data[int(offset)] == 0x5A, field
            assert sum(data) == 0x5A + PROTOCOL_VERSION
    assert at == shared.wire.header.HEADER_BYTES
    assert set(names) == {*Header._fields, "version"}


def test_element_types() -> None:
    rows = table(section("Element types"))
    assert {int(code): (name.strip("`"), int(size)) for code, name, size, _ in rows} == {
        code: (str(dtype).removeprefix("torch."), dtype.itemsize) for code, dtype in DTYPES.items()
    }


def test_operations_and_directions() -> None:
    assert {int(row[0]): row[1] for row in table(section("Operations"))} == {
        o.value: o.name for o in Operation
    }
    assert "0 none, 1 forward, 2 backward" in section("Header")
    assert [(d.value, d.name.lower()) for d in Direction] == [(0, "none"), (1, "forward"), (2, "backward")]


def codes_in_code() -> set[str]:
    """The first argument of every WireError and ErrorInfo, and of ``refuse`` in the handshake."""
    found = set()
    for package in ("shared", "provider", "tenant_sdk"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                    continue
                first = {"WireError": 0, "ErrorInfo": 0, "refuse": 1}.get(node.func.id)
                if first is not None and isinstance(node.args[first], ast.Constant):
                    found.add(node.args[first].value)
    return found


def test_every_code_is_in_the_table_and_no_other() -> None:
    assert {row[0].strip("`") for row in table(section("Errors"))} == codes_in_code()


def test_executors_count_every_code_that_they_answer_with() -> None:
    seen = {row[0].strip("`") for row in table(section("Errors")) if row[1] in ("both", "executor")}
    assert set(CODES) == seen


@pytest.mark.parametrize(("name", "kind"), [("Hello", Hello), ("Fetch", Fetch), ("ErrorInfo", ErrorInfo)])
def test_fields_of_small_messages(name: str, kind: type) -> None:
    match = re.search(rf"(?ms)^\*\*{name}\*\* — (.*?)\n\n", TEXT)
    assert match is not None
    names = {
        name for names in re.findall(r"((?:`\w+`(?:, )?)+):", match[1]) for name in re.findall(r"\w+", names)
    }
    assert names == set(kind.__struct_fields__)


def test_fields_of_the_manifest() -> None:
    rows = table(section("Control messages"))
    fields = [row[0].strip("`") for row in rows if len(row) == 3]
    assert tuple(fields) == Manifest.__struct_fields__
    objects = {row[0]: row[1] for row in rows if len(row) == 2}
    kinds = {
        "Limits": Limits,
        "Group": GroupInfo,
        "Member": Member,
        "Parameter": ParameterInfo,
        "File": FileInfo,
    }
    assert objects.keys() == kinds.keys()
    for name, kind in kinds.items():
        assert set(re.findall(r"`(\w+)`", objects[name])) == set(kind.__struct_fields__)


def test_names_and_numbers() -> None:
    assert f"Subprotocol `{SUBPROTOCOL}`" in TEXT
    assert f"# The wire protocol, version {PROTOCOL_VERSION}\n" in TEXT
    files = re.search(r"(?s)MUST refuse other names than these: (.*?)\. A tenant", TEXT)
    assert files is not None
    assert tuple(re.findall(r"`([\w.]+)`", files[1])) == tuple(TENANT_FILES)
    limits = {row[0]: row[1] for row in table(section("Limits"))}
    assert limits["payload of HELLO, FETCH and ERROR"] == f"{MAX_REQUEST_CONTROL_BYTES:,} bytes"
    assert limits["payload of WELCOME"] == f"{MAX_ANSWER_CONTROL_BYTES >> 20} MiB"
    assert limits["members of a group"] == str(MAX_MEMBERS)
