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

FOLDER = Path(__file__).parents[1] / "vectors"
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
    return subprocess.run(command, capture_output=True, text=True, timeout=800)


def test_the_file_is_what_the_code_makes_now(scripts: tuple[ModuleType, ModuleType]) -> None:
    """If a change of the protocol is meant, run make_vectors.py and read the difference."""
    assert FILE.read_text() == scripts[0].make()


def test_the_checker_agrees() -> None:
    result = run_checker()
    assert (result.returncode, result.stderr) == (0, ""), result.stdout
    assert "286 of 286 vectors are right" in result.stdout


def test_the_checker_shares_no_code_with_the_project() -> None:
    names = set()
    for node in ast.walk(ast.parse(CHECKER.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    assert names <= {"__future__", "hashlib", "json", "math", "pathlib", "struct", "sys"}


def test_the_checkers_cipher_is_aes(scripts: tuple[ModuleType, ModuleType]) -> None:
    """FIPS 197, C.3; and 0 under the key 0, as it is printed everywhere."""
    checker = scripts[1]
    keys = checker.expand_key(bytes(range(32)))
    block = bytes.fromhex("00112233445566778899aabbccddeeff")
    assert checker.encrypt(block, keys).hex() == "8ea2b7ca516745bfeafc49904b496089"
    zero = checker.encrypt(bytes(16), checker.expand_key(bytes(32)))
    assert zero.hex() == "dc95c078a2408989ad48a21492842087"
    values = json.loads(FILE.read_text())["masks"][0]["values"]
    assert values == [int.from_bytes(zero[at : at + 4], "little", signed=True) for at in (0, 4, 8)]


KINDS = ("frames", "refused_requests", "refused_answers")
NUMBERS = ("masks", "planes", "products")


def only(vectors: dict[str, Any], kind: str, vector: dict[str, Any]) -> dict[str, Any]:
    """One vector of a kind and the first of each other, to be quick."""
    first = {each: vectors[each][:1] for each in ("messages", *KINDS, *NUMBERS)}
    return {**vectors, **first, kind: [vector]}


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
        alone = only(vectors, "messages", vector)
        assert check(alone)[1] == []
        for name in ("message", "frame", "frames"):
            length = len(vector[name]) // 2
            for at in {*range(min(length, 60)), length - 1, length // 2}:
                alone["messages"] = [{**vector, name: flip(vector[name], at)}]
                assert len(check(alone)[1]) == 1, f"messages[{number}] {name} byte {at}"


@pytest.mark.parametrize("kind", KINDS)
def test_the_checker_notices_a_wrong_outcome(scripts: tuple[ModuleType, ModuleType], kind: str) -> None:
    vectors = json.loads(FILE.read_text())
    for vector in vectors[kind]:
        alone = only(vectors, kind, vector)
        for field, value in vector.items():
            if field in ("name", "numerics", "hex", "asked", "greeted"):
                continue
            before: Any = value
            vector[field] = {str: "ff", bool: not value, int: 1 if value != 1 else 2, type(None): "group"}[
                type(value)
            ]
            assert len(scripts[1].check(alone)[1]) == 1, f"{vector.get('name')}: {field}"
            vector[field] = before
        assert scripts[1].check(alone)[1] == []


def numbers_in(value: Any) -> list[tuple[list[Any], int]]:
    """Every number in nested lists: the list that holds it, and where."""
    if not isinstance(value, list):
        return []
    here = [(value, i) for i, each in enumerate(value) if not isinstance(each, list)]
    return here + [place for each in value for place in numbers_in(each)]


@pytest.mark.parametrize("kind", NUMBERS)
def test_the_checker_notices_a_wrong_number(scripts: tuple[ModuleType, ModuleType], kind: str) -> None:
    vectors = json.loads(FILE.read_text())
    check_one, wrong = scripts[1].CHECKS[kind], scripts[1].Wrong
    for vector in vectors[kind]:
        check_one(vector, vectors)
        for field in ("values", "planes", "scales", "bounds", "answer"):
            for where, at in numbers_in(vector.get(field)):
                before = where[at]
                where[at] = -before - 1  # the largest floats do not notice 1
                with pytest.raises(wrong):
                    check_one(vector, vectors)
                where[at] = before
    masked = {**vectors["masks"][-1], "sha256": flip(vectors["masks"][-1]["sha256"], 0)}
    with pytest.raises(wrong):
        scripts[1].check_mask(masked, vectors)


def test_the_vectors_hold_what_is_hard(scripts: tuple[ModuleType, ModuleType]) -> None:
    """Both clips of the second plane, ties, empty rows, integers at both ends, sums that wrap around."""
    vectors = json.loads(FILE.read_text())
    rings: dict[str, list[Any]] = {"ring": [], "ring-fine": []}
    for vector in vectors["planes"]:
        rings[vector["numerics"]].append(vector)
    fine = rings["ring-fine"]
    first, second = fine[0]["planes"]
    assert {-128, 127} <= {n for row in second for n in row}
    assert first[0] == [127, 0, -2, 0]
    assert second[0] == [0, 127, 127, 2]
    assert fine[0]["scales"][3:] == [0.0, 2.0**100]
    assert all(not any(row) for plane in fine[-2]["planes"] for row in plane[2:])
    norms = {max(sum(n * n for n in row) for row in vector["planes"][0]) for vector in rings["ring"]}
    assert any(norm < 32_000**2 for norm in norms)  # wide enough for a smaller norm than the largest
    rows = [n for vector in vectors["products"] for row in vector["rows"] for n in row]
    assert {2**31 - 1, -(2**31)} <= set(rows)


def test_every_code_of_the_protocol_has_a_vector() -> None:
    """But for those that are about content: fetch, non_finite, internal, manifest, file."""
    vectors = json.loads(FILE.read_text())
    codes = {vector["code"] for kind in KINDS[1:] for vector in vectors[kind]} - {None}
    assert codes == {
        "answer_bits", "control_message", "direction", "dtype", "frame", "group", "header", "members",
        "operation",
        "payload_length", "protocol_version", "request_class", "text", "too_large", "unexpected", "width",
        "zero_rows",
    }  # fmt: skip
