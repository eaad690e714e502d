"""The help of every command: flags take no value, and arguments look as they do on other command lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from provider.cli import app as provider
from security.cli import app as audit
from tenant_sdk.command_line.main import app as tenant


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A command and all below it, each with the words that name it."""
    yield words, command
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, (*words, name))


COMMANDS = [
    pytest.param(app, words, command, id=" ".join((name, *words)))
    for name, app in (("provider", provider), ("tenant", tenant), ("audit", audit))
    for words, command in commands(typer.main.get_command(app))
]


def shown(app: typer.Typer, words: tuple[str, ...]) -> str:
    """Its help, without the frames."""
    text = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "150"}).output
    return re.sub(r"[│╭╮╰╯─]", " ", text)


@pytest.mark.parametrize(("app", "words", "command"), COMMANDS)
def test_values_are_written_as_usual(app: typer.Typer, words: tuple[str, ...], command: Any) -> None:
    text = shown(app, words)
    assert not re.search(r"<[a-z[|]+>|[{}]", text)  # no type of Python, and no braces, which mean a choice
    names = [each.name for each in command.params if each.param_type_name == "argument"]
    usage = text.partition("Usage: ")[2].partition("\n")[0]
    end = usage.split("[OPTIONS]")[1].split()
    if not hasattr(command, "commands"):
        assert len(end) == len(names)
        assert all(re.fullmatch(r"[A-Z_]+(\.\.\.)?", each) for each in end)


@pytest.mark.parametrize(("app", "words", "command"), COMMANDS)
def test_flags_show_no_value(app: typer.Typer, words: tuple[str, ...], command: Any) -> None:
    text = shown(app, words)
    flags = [each.opts[0] for each in command.params if getattr(each, "is_flag", False)]
    for flag in ("--help", *flags):
        after = re.search(rf" {flag}( +--no-\S+)? {{2,}}(\S+)", text)
        assert after, flag
        assert not after[2].isupper(), flag
        assert after[2][0].isupper(), flag  # the first word of the text
