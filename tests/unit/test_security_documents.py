"""That the documents about security say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
CLAIMS = (ROOT / "security" / "CLAIMS.md").read_text()
LIMITATIONS = " ".join((ROOT / "security" / "LIMITATIONS.md").read_text().split())


def claim(identity: str) -> str:
    (line,) = [line for line in CLAIMS.splitlines() if line.startswith(f"| `{identity}` |")]
    return line


@pytest.mark.parametrize(
    ("identity", "claimed", "limited"),
    [
        (
            "control-resolution",
            r"\| ([0-9.]+) points of 100 or fewer in 12 attacks",
            r"An observed score ([0-9.]+) points above chance",
        ),
        (
            "control-resolution",
            r"is found with probability ([0-9.]+) % or more \(least in gradient span check\)",
            r"one of 1 point is found with probability ([0-9.]+) % in the weakest \(gradient span check\)",
        ),
        (
            "control-resolution",
            r"one of ([0-9.]+) with 99 % or more in every attack",
            r"one of ([0-9.]+) points with 99 % in every one",
        ),
        ("control-speculation", r"([0-9]+ of [0-9]+), 100", r"repeats itself: ([0-9]+ of [0-9]+) prompts"),
        ("control-ring", r"adapter extraction: ([0-9.]+) \|", r"copy the adapter \(cosine ([0-9.]+)\)"),
        ("no-cross-talk", r"0 of ([0-9,]+) replies wrong", r"executor's scheduler \(([0-9,]+) replies\)"),
    ],
)
def test_limitations_have_the_figures_of_the_claims(identity: str, claimed: str, limited: str) -> None:
    one, other = re.search(claimed, claim(identity)), re.search(limited, LIMITATIONS)
    assert one is not None
    assert other is not None
    assert one[1] == other[1]


def test_reuse_lies_in_the_range_that_is_given() -> None:
    measured = re.findall(r"on (the ring|floats), K = ([0-9]+): ([0-9]+)", claim("control-reuse"))
    assert len(measured) == 5
    ring, floats = re.search(r"on the ring with (.*?); on floats with (.*?)\. ", LIMITATIONS).groups()  # type: ignore[union-attr]
    for where, masks, messages in measured:
        text = ring if where == "the ring" else floats
        found = re.search(rf"\b{masks} masks ([0-9]+)(?: to ([0-9]+))?", text)
        assert found is not None
        assert int(found[1]) <= int(messages) <= int(found[2] or found[1])


@pytest.mark.parametrize(
    "name",
    [
        "SECURITY.md",
        "security/THREAT_MODEL.md",
        "docs/explanation/privacy.md",
        "security/report/page.html.jinja",
    ],
)
def test_what_verification_promises_has_its_condition_everywhere(name: str) -> None:
    text = " ".join((ROOT / name).read_text().split())
    promise = re.search(r"probability at (?:most|least) (?:1 . )?2\^-32|passes by 2<sup>.32</sup>", text)
    assert promise is not None
    after = text[promise.end() : promise.end() + 500]
    assert "honest" in after
    assert ("checkpoint" in after) or ("`local:`" in after)
    assert "√d/2" not in text
    for factor in re.findall(r"2\^7 √\w", text):
        assert factor == "2^7 √m"


def test_attested_parameters_are_no_non_goal() -> None:
    text = (ROOT / "security" / "THREAT_MODEL.md").read_text()
    claims, non_goals = text.split("**Non-goals**")
    assert "attested, byte for byte" in claims
    assert "verifying the parameters" not in non_goals
