"""Readers of foreign bytes: the corpus of earlier fuzzing, and changes of valid inputs (`tests/fuzzing`)."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from fuzzing import oracle
from fuzzing.mutation import LARGEST, mutated
from fuzzing.oracle import CORPUS, SEPARATOR, Finding, Target, bounded_memory, check, parts_of
from fuzzing.replay import corpus, possible, reached
from fuzzing.targets import TARGETS

MUTATIONS = 200
SLOW = {"adapter", "parquet", "tokenizer", "configuration"}  # milliseconds each: they get fewer
NAMES = pytest.mark.parametrize("name", TARGETS)
FINDINGS = Path(__file__).parents[1] / "fuzzing" / "FINDINGS.md"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Libraries warn of much in these inputs."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@NAMES
@pytest.mark.filterwarnings("ignore")
def test_the_corpus_has_documented_outcomes(name: str) -> None:
    """A seed, what reached other lines, and what once was a finding."""
    target = TARGETS[name]
    with bounded_memory():
        for data in (*target.seeds(), *corpus(name).values()):
            check(target, data, timed=True)


@NAMES
@pytest.mark.filterwarnings("ignore")
def test_changes_have_documented_outcomes(name: str) -> None:
    target, random = TARGETS[name], Random(name)
    inputs = [*target.seeds(), *corpus(name).values()]
    with bounded_memory():
        for _ in range(MUTATIONS // (10 if name in SLOW else 1)):
            check(target, mutated(target, random.choice(inputs), inputs, random))


def test_every_finding_has_its_input() -> None:
    """And every input of a finding its entry."""
    listed = re.findall(r"`corpus/(\S+/finding-\S+)`", FINDINGS.read_text())
    there = {str(path.relative_to(CORPUS)) for path in CORPUS.glob("*/finding-*")}
    assert listed
    assert {*listed} == there
    assert {path.parent.name for path in CORPUS.glob("*/*")} <= TARGETS.keys()


def test_the_corpus_is_small() -> None:
    assert sum(path.stat().st_size for path in CORPUS.glob("*/*")) < 300 << 10


# -- the library itself ----------------------------------------------------------------------------


def fails(data: bytes) -> None:
    if data == b"documented":
        raise KeyError
    if data == b"endless":
        while True:
            len(data)
    if data == b"huge":
        bytearray(4 << 30)
    if data == b"not":
        raise ValueError("it does")


FAILING = Target("failing", fails, lambda: [b"x"], ("shared/encoded.py",), (KeyError,), (b"word",))


@pytest.mark.parametrize(
    ("data", "said"), [(b"endless", "takes more than"), (b"huge", "MemoryError"), (b"not", "it does")]
)
def test_what_is_a_finding(data: bytes, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "SECONDS", 0.5)
    with bounded_memory(), pytest.raises(Finding, match=said):
        check(FAILING, data, timed=True)


@pytest.mark.parametrize("data", [b"documented", b"x"])
def test_what_is_none(data: bytes) -> None:
    check(FAILING, data, timed=True)


def test_the_same_seed_gives_the_same_inputs() -> None:
    for target in TARGETS.values():
        seeds = list(target.seeds())
        made = [[mutated(target, seeds[0], seeds, Random(at)) for at in range(50)] for _ in range(2)]
        assert made[0] == made[1]
        assert len({*made[0]}) > 30
        assert max(map(len, made[0])) <= LARGEST


def test_parts_of_an_input() -> None:
    assert parts_of(b"a" + SEPARATOR + b"b" + SEPARATOR, 2) == [b"a", b"b" + SEPARATOR]
    assert parts_of(b"a", 3) == [b"a", b"", b""]


def test_lines_that_are_reached() -> None:
    target = TARGETS["header"]
    good, bad = (reached(target, data) for data in (target.seeds()[0], b"\1"))
    assert bad < good | bad
    assert good
    assert good | bad <= possible(target) | good
