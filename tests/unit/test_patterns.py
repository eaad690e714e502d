"""Patterns of an adapter's folder become names, as PEFT matches them, and within a time."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from peft.utils.other import get_pattern_key

from shared.errors import ConfigurationError
from tenant_sdk.tuning import patterns
from tenant_sdk.tuning.patterns import PATTERN_CHARACTERS, VALUES, without_patterns

KEYS = ("q_proj", "self_attn.q_proj", r"layers\.\d\..*", "model.layers.1.mlp.up_proj", "^mod.*v_.*")
NAMES = [
    f"model.layers.{layer}.{part}"
    for layer in (0, 1, 11)
    for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")
]
FOLDER = Path("here")
SLOW = "(.|..|...|....|.....)+[!#]"  # of which regex, too, tries all ways


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.q_proj",
        "q_proj",
        r"model\.layers\.[01]\..*(q|v)_proj",
        r"(?:.*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.mlp\.down_proj)",
        "",
    ],
)
@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "feedforward_modules"])
def test_a_pattern_becomes_the_names_that_it_matches(field: str, pattern: str) -> None:
    found = without_patterns({field: pattern}, NAMES, FOLDER)
    assert found == {field: [name for name in NAMES if re.fullmatch(pattern, name)]}


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("keys", [KEYS, *itertools.permutations(KEYS, 2)])
def test_a_table_has_the_values_that_it_had(field: str, keys: tuple[str, ...]) -> None:
    given = {key: at + 1 for at, key in enumerate(keys)}
    found = without_patterns({field: given, "r": 8}, NAMES, FOLDER)
    assert found["r"] == 8
    for name in NAMES:
        before = given.get(get_pattern_key(given, name))
        assert found[field].get(get_pattern_key(found[field], name)) == before


def test_what_is_no_pattern_stays() -> None:
    config = {"target_modules": "all-linear", "exclude_modules": ["lm_head"], "rank_pattern": {}, "r": 8}
    config |= {"trainable_token_indices": [1, 2], "modules_to_save": ["lm_head"]}
    assert without_patterns(config, NAMES, FOLDER) == config


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"target_modules": "("}, "no regular expression"),
        ({"target_modules": "(" * 4000 + ")" * 4000}, str(PATTERN_CHARACTERS)),
        ({"target_modules": "(" * 2000 + ")" * 2000}, "no regular expression"),
        ({"target_modules": SLOW}, "takes too long"),
        ({"target_modules": "a{4294967295}"}, "no regular expression"),
        ({"target_modules": "(?i)" + "[!-\uffff]" * 700}, "takes too long"),
        ({"rank_pattern": {f"a{{{54000 - at}}}" * 8: at for at in range(4096)}}, "takes too long"),
        ({"target_modules": "(a|(?R))*b"}, "no regular expression"),
        ({"exclude_modules": SLOW}, "takes too long"),
        ({"rank_pattern": {SLOW: 4}}, "takes too long"),
        ({"alpha_pattern": {SLOW: 4}}, "takes too long"),
        ({"modules_to_save": ["(a+)+"]}, "no patterns"),
        ({"layers_pattern": "(a+)+"}, "no patterns"),
        ({"trainable_token_indices": {"(a+)+": [1]}}, "no patterns"),
    ],
)
def test_what_is_refused(config: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 0.2)
    with pytest.raises(ConfigurationError, match=why):
        without_patterns(config, ["model." + "a" * 60, *NAMES], FOLDER)


def test_few_repetitions_are_a_pattern() -> None:
    config = {"target_modules": r"(model\.)?layers\.\d{1,3}\..{0,40}_proj"}
    name = "model.layers.12.self_attn.q_proj"
    assert without_patterns(config, [name, "head"], FOLDER) == {"target_modules": [name]}


def test_repetitions_take_no_memory() -> None:
    """Python's expressions, which PEFT uses, do not repeat what is repeated."""
    given = {"target_modules": "(?x)a{4 2 9} | m.*", "exclude_modules": "a{4294967294}", "r": 8}
    found = without_patterns(given, NAMES, FOLDER)
    assert found == {"target_modules": NAMES, "exclude_modules": [], "r": 8}


def test_a_process_that_ends_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As when the limit of memory is reached."""
    (tmp_path / "ends.py").write_text("raise MemoryError")
    monkeypatch.setattr(patterns.pattern_matching, "__file__", str(tmp_path / "ends.py"))
    with pytest.raises(ConfigurationError, match=r"target_modules of .*of memory"):
        without_patterns({"target_modules": "m.*"}, NAMES, FOLDER)


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "modules_to_save", "layers_pattern"])
def test_of_many_names_those_of_modules_are_kept(field: str) -> None:
    """PEFT compares each with every module."""
    real = ["q_proj", "mlp.up_proj", NAMES[0], "layers"]
    found = without_patterns({field: [f"x{at}" for at in range(1000)] + real}, NAMES, FOLDER)
    assert found == {field: real}
    assert len(without_patterns({field: [f"x{at}" for at in range(1000)]}, NAMES, FOLDER)[field]) == 1


def test_no_model_has_many_lists_of_layers() -> None:
    """PEFT makes an expression of each name for each module."""
    given = {"layers_pattern": list({part for name in NAMES for part in name.split(".")})[:1] * 17}
    with pytest.raises(ConfigurationError, match="17 names as layers_pattern"):
        without_patterns(given, NAMES, FOLDER)


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_a_large_table_has_one_key_for_each_value(field: str) -> None:
    """PEFT and vLLM compile every key for every module."""
    given = {f"x{at}": at for at in range(1000)} | {name: at % 2 + 1 for at, name in enumerate(NAMES)}
    found = without_patterns({field: given}, NAMES, FOLDER)[field]
    assert sorted(found.values()) == [1, 2]
    for name in NAMES:
        assert found[get_pattern_key(found, name)] == given[name]
    many = {f"layers.{at}": at for at in range(VALUES + 1)}
    with pytest.raises(ConfigurationError, match=f"{VALUES} are the most"):
        without_patterns({field: many}, list(many), FOLDER)
