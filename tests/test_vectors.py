"""The committed vectors are what the code makes now, and an independent reader agrees with them."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "vectors"
FILE = FOLDER / "messages.json"
CHECKER = FOLDER / "check_vectors.py"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """``make_vectors`` and ``check_vectors``."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import check_vectors
    import make_vectors

    return make_vectors, check_vectors


def run_checker(*arguments: Path) -> subprocess.CompletedProcess[str]:
    """The checker as a program of its own; -I keeps the project off its path."""
    command = [sys.executable, "-I", str(CHECKER), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_file_is_what_the_code_makes_now(scripts: tuple[ModuleType, ModuleType]) -> None:
    """If a change of the protocol is meant, run make_vectors.py and read the difference."""
    assert FILE.read_text() == scripts[0].make()


def test_the_checker_agrees() -> None:
    result = run_checker()
    assert (result.returncode, result.stderr) == (0, ""), result.stdout
    assert "120 of 120 vectors are right" in result.stdout


def test_the_checker_shares_no_code_with_the_project() -> None:
    names = set()
    for node in ast.walk(ast.parse(CHECKER.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    assert names <= {"__future__", "json", "pathlib", "struct", "sys"}


def flip(hex_bytes: str, at: int) -> str:
    """The same bytes but for one bit."""
    data = bytearray.fromhex(hex_bytes)
    data[at % len(data)] ^= 1
    return data.hex()


def test_the_checker_fails_as_a_program(tmp_path: Path) -> None:
    vectors = json.loads(FILE.read_text())
    vectors["messages"][2]["message"] = flip(vectors["messages"][2]["message"], -1)
    (tmp_path / "corrupt.json").write_text(json.dumps(vectors))
    result = run_checker(tmp_path / "corrupt.json")
    assert result.returncode == 1
    assert "messages[2] forward of two members" in result.stdout


def test_the_checker_notices_a_wrong_bit_anywhere(scripts: tuple[ModuleType, ModuleType]) -> None:
    """Every byte of every message, and of its frames but for a mask that is changed with its data."""
    check = scripts[1].check
    vectors = json.loads(FILE.read_text())
    for number, vector in enumerate(vectors["messages"]):
        alone = {
            **vectors,
            "messages": [vector],
            **{kind: vectors[kind][:1] for kind in vectors if kind in KINDS},
        }
        assert check(alone)[1] == []
        for name in ("message", "frame", "frames"):
            length = len(vector[name]) // 2
            for at in {*range(min(length, 60)), length - 1, length // 2}:
                alone["messages"] = [{**vector, name: flip(vector[name], at)}]
                assert len(check(alone)[1]) == 1, f"messages[{number}] {name} byte {at}"


KINDS = ("frames", "refused_requests", "refused_answers")


@pytest.mark.parametrize("kind", KINDS)
def test_the_checker_notices_a_wrong_outcome(scripts: tuple[ModuleType, ModuleType], kind: str) -> None:
    vectors = json.loads(FILE.read_text())
    for vector in vectors[kind]:
        for field, value in vector.items():
            if field in ("name", "hex", "asked", "greeted"):
                continue
            before: Any = value
            vector[field] = {str: "ff", bool: not value, int: 1 if value != 1 else 2, type(None): "group"}[
                type(value)
            ]
            assert len(scripts[1].check(vectors)[1]) == 1, f"{vector.get('name')}: {field}"
            vector[field] = before
    assert scripts[1].check(vectors)[1] == []


def test_every_code_of_the_protocol_has_a_vector() -> None:
    """But for those that are about content: fetch, non_finite, internal, manifest, file."""
    vectors = json.loads(FILE.read_text())
    codes = {vector["code"] for kind in KINDS[1:] for vector in vectors[kind]} - {None}
    assert codes == {
        "control_message", "direction", "dtype", "frame", "group", "header", "members", "operation",
        "payload_length", "protocol_version", "reserved", "text", "too_large", "unexpected", "width",
        "zero_rows",
    }  # fmt: skip
