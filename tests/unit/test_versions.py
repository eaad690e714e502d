"""Versions of other libraries: one list of those that were tested, and what is said of others."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tenant_sdk.command_line.doctor import diagnose
from tenant_sdk.command_line.options import SessionRules
from tenant_sdk.command_line.versions import TESTED, untested

ROOT = Path(__file__).parents[2]


def declared() -> dict[str, Requirement]:
    """What pyproject.toml asks for, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    asked = map(Requirement, [*project["dependencies"], *(each for extra in extras for each in extra)])
    return {each.name: each for each in asked}


@pytest.mark.parametrize("name", TESTED)
def test_the_range_that_is_allowed_is_the_one_that_was_tested(name: str) -> None:
    lowest, newest = map(Version, TESTED[name])
    bounds = {each.operator: Version(each.version) for each in declared()[name].specifier}
    assert bounds[">="] == lowest
    if "<" in bounds:  # the next minor version, so that none is allowed that nobody tried
        major, minor = newest.release[:2]
        assert bounds["<"] in (Version(f"{major}.{minor + 1}"), Version(f"{major + 1}"))


@pytest.mark.parametrize("file", ["constraints.txt", "requirements-gateway.txt"])
def test_what_is_pinned_is_in_it(file: str) -> None:
    lines = (ROOT / file).read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    for name, (lowest, newest) in TESTED.items():
        if name in pinned:
            assert Version(lowest) <= Version(pinned[name])
            assert Version(pinned[name]).release[:2] <= (*Version(newest).release, 0)[:2]


def test_what_is_installed_here_was_tested() -> None:
    assert list(untested()) == []


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ("5.99", "transformers 5.99 is newer than the newest that was tested (5.24)"),
        ("6.0.0", "transformers 6.0.0 is newer than the newest that was tested (5.24)"),
        ("5.16.0", "transformers 5.16.0 is older than the lowest that was tested (5.16.1)"),
        ("5.16.1", None),
        ("5.24.7", None),
    ],
)
def test_others_are_named(found: str, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, transformers=found)
    assert [what for what, _ in untested()] == ([] if said is None else [said])


def test_doctor_says_so_first(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, transformers="5.99", torch="2.13.0+cpu")
    title, results = next(diagnose([], SessionRules()))
    (result,) = results
    assert (title, result.step, result.ok) == ("", "versions", None)
    assert result.detail == "transformers 5.99 is newer than the newest that was tested (5.24)"
    assert "pip install 'transformers==5.24.*'" in result.remedy
