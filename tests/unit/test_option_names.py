"""Errors name an option as Python does, and command lines show it as theirs."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shared.errors import ConfigurationError, Metavar, OptionReference, OptionText
from shared.options import Flag, flags_of
from tenant_sdk.command_line.main import NAMES, app
from tenant_sdk.gateway.options import GatewayOptions

ROOT = Path(__file__).parents[2]


FILE = Metavar("FILE")


@pytest.mark.parametrize(
    ("message", "python", "shown"),
    [
        (OptionText("give {ca}.", ca=FILE), "give ca=FILE.", "give --ca FILE."),
        (
            OptionText("{privacy} has none", privacy="plain"),
            "privacy='plain' has none",
            "--privacy plain has none",
        ),
        (
            OptionText("{mask_sources}", mask_sources=["a", "b"]),
            "mask_sources=['a', 'b']",
            "--mask-source a --mask-source b",
        ),
        (
            OptionText("({allow_transcript})", allow_transcript=True),
            "(allow_transcript=True)",
            "(--allow-transcript)",
        ),
        (
            OptionText("{client_certificate}", client_certificate=(FILE, FILE)),
            "client_certificate=(FILE, FILE)",
            "--client-certificate FILE --client-key FILE",
        ),
        (OptionText("{token}, as", token=Metavar("TOKEN")), "token=TOKEN, as", "--token-env VAR, as"),
        (OptionText("{mask_source_ca}: give"), "mask_source_ca: give", "--mask-source-ca: give"),
        (OptionText("{ca}", ca=Path("a b")), "ca='a b'", "--ca a b"),
        # Values are not looked into, whatever they hold.
        (OptionText("{}", "ca=FILE {ca} {}"), "ca=FILE {ca} {}", "ca=FILE {ca} {}"),
        (
            OptionText("{ca}", ca="{ca}, or privacy='x'"),
            "ca=\"{ca}, or privacy='x'\"",
            "--ca {ca}, or privacy='x'",
        ),
        (OptionText("{}", OptionText("{ca}", ca=FILE)) + "; {ca}", "ca=FILE; {ca}", "--ca FILE; {ca}"),
        (
            OptionText("{model_class}", model_class=Metavar("CLASS")),
            "model_class=CLASS",
            "model_class=CLASS",
        ),
    ],
)
def test_how_an_option_is_shown(message: OptionText, python: str, shown: str) -> None:
    error = copy.copy(ConfigurationError(message))
    assert str(error) == error.message == str(message) == python
    assert message.shown(NAMES) == shown
    error.show_options(NAMES)
    assert str(error) == shown
    assert error.message == python
    assert copy.deepcopy(message).parts == message.parts


def test_the_first_name_of_an_option_stays() -> None:
    """That of the file, in which the command line found it."""
    error = ConfigurationError(OptionText("{ca} and {token}", ca="a.pem"))
    error.show_options({"ca": Flag("`ca` in p.toml", alone=True)})
    error.show_options(NAMES)
    assert str(error) == "`ca` in p.toml and --token-env VAR"


def test_messages_are_put_together() -> None:
    message = OptionText("{} in {ca}; see {privacy}", "a", ca=FILE)
    before, behind = message.split_once("; ")
    assert (str(before), str(behind)) == ("a in ca=FILE", "see privacy")
    assert message.split_once("|") == (message, "")
    assert OptionText.joined(", ", [before, "b"]).shown(NAMES) == "a in --ca FILE, b"
    assert before.replaced("in", "of").shown(NAMES) == "a of --ca FILE"
    assert message.without_prefix("a in ").parts[0] == OptionReference("ca", FILE)
    assert message.without_prefix("in ") == message
    assert str(OptionText("{:.2f} {!r}\n", 1.234, "x")) == "1.23 'x' "
    assert len(OptionText("{}", "x" * 3000)) == 2000


def test_no_error_spells_an_option_for_one_kind_of_user_alone() -> None:
    """Neither as a command line does nor as Python does: a message names it, and each front end shows it."""
    shown = {**NAMES, **flags_of(GatewayOptions)}
    flags = "|".join(option.name.split()[0] for option in shown.values() if isinstance(option, Flag))
    spelled = re.compile(rf"(?<![\w-])({flags})(?![a-z-])|(?<![\w.=({{])({'|'.join(shown)})=['\"{{\[A-Z]")
    folder = ROOT / "tenant_sdk"
    files = [path for path in folder.rglob("*.py") if path.parent.name != "command_line"]
    assert len(files) > 20
    other = re.compile("`[^`]*`")  # commands of the other side
    found = {
        path.name: [text for text in strings(path) if spelled.search(other.sub("", text))] for path in files
    }
    assert not {name: texts for name, texts in found.items() if texts}


def strings(path: Path) -> Iterator[str]:
    """The texts in a file, but for documentation."""
    tree = ast.parse(path.read_text())
    docs = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docs:
            yield node.value


def test_no_text_suggests_to_install_the_package_of_somebody_else() -> None:
    """The name at the package index is not this project's: it is installed from a checkout."""
    suggested = re.compile(r"\bpip3? install[^\n`]*(?<![/.\w-])symbiosis\b|['\"`]symbiosis\[")
    folders = ("shared", "provider", "tenant_sdk", "security", "tests", "examples", "benchmarks", "docs")
    files = [path for folder in (*folders, "deploy", ".ci") for path in (ROOT / folder).rglob("*")]
    kinds = {".py", ".md", ".html", ".jinja", ".yaml", ".yml", ".txt", ".service", ""}
    texts = [path for path in (*files, *ROOT.iterdir()) if path.is_file() and path.suffix in kinds]
    assert len(texts) > 400
    for path in texts:
        if path != Path(__file__):
            assert not suggested.findall(path.read_text(errors="replace")), path


WHERE = ("--provider", "wss://localhost:1", "--token-env", "T")
MASKED = (*WHERE, "--mask-source", "wss://m")
PYTHON = re.compile(
    r"\b(ca|token|mask_source\w*|allow_\w+|privacy|verify\w*|pad_rows|experts|timeout|digest|fingerprint\w*)="
)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "which executor? Give --provider URL, or --profile FILE"),
        (WHERE[:2], "--token-env VAR is missing"),
        (
            ("--provider", "https://x", *WHERE[2:]),
            "'https://x' is not an executor's URL; it looks like wss://",
        ),
        ((*WHERE, "--mask-source", "m.example"), "'m.example' is not an executor's URL"),
        (WHERE, "--mask-source wss://..., or the checkpoint itself, --mask-source local:FOLDER"),
        (WHERE, "--privacy noise-bank or --privacy plain; SECURITY.md"),
        ((*MASKED, "--privacy", "plain"), "--privacy plain uses no masks: leave out --mask-source wss://m"),
        ((*WHERE, "--privacy", "rot13"), "--privacy rot13 must be one of one-time, noise-bank, plain"),
        ((*MASKED, "--wire-dtype", "float8"), "--wire-dtype float8 must be one of float32, bfloat16"),
        ((*MASKED, "--verify", "often"), "--verify often must be one of always, sampled, off"),
        ((*MASKED, "--verify-rate", "2"), "--verify-rate 2.0 must be more than 0 and at most 1"),
        ((*MASKED, "--timeout", "0"), "--timeout 0.0 must be more than 0"),
        ((*WHERE, "--privacy", "plain", "--memory-gib", "0"), "--memory-gib 0.0 must be more than 0"),
        ((*MASKED, "--pad-rows", "-1"), "--pad-rows -1 must be at least 0 and at most 65536"),
        (
            (*WHERE, "--privacy", "plain", "--pad-rows", "8"),
            "--pad-rows 8 adds rows of zeros, which --privacy plain",
        ),
        ((*MASKED, "--experts", "mine"), "--experts mine must be one of local, padded, routed"),
        (
            (*WHERE, "--privacy", "plain", "--experts", "padded"),
            "--experts padded adds rows of zeros, which --privacy plain would show: use it with one-time "
            "masks, or give --experts routed",
        ),
        ((*MASKED, "--mask-budget-mib", "-1"), "--mask-budget-mib -1.0 must be at least 0"),
        (MASKED, "own token: --mask-source-token-env VAR. The"),
        (MASKED, "if that is meant, --allow-same token; to try it out on one machine, --allow-same all"),
        ((*MASKED, "--mask-source-token-env", "T"), "provider and mask sources have the same token"),
        (
            (*MASKED, "--allow-same", "token", "--ca", "a.pem"),
            "--mask-source-ca FILE, or the word system there",
        ),
        ((*MASKED, "--allow-same", "token", "--ca", "a.pem"), "The provider's, --ca a.pem, could"),
        ((*MASKED, "--allow-same", "every"), "--allow-same every must be some of host"),
        ((*MASKED, *("--mask-source-ca", "x") * 2), "--mask-source-ca: give one for all mask"),
        ((*MASKED, "--client-key", "x"), "--client-certificate and --client-key go together"),
        (
            (*MASKED, "--fingerprint-key-env", "T"),
            "--fingerprint-key-env T is of no use without --fingerprints FILE",
        ),
        (
            ("--provider", "ipc:///d", "--token-env", "T", "--privacy", "plain", "--ca", "x"),
            "--ca FILE is for TLS",
        ),
    ],
)
def test_what_is_said_to_who_types(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("T", "t0k3n")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["generate", "--prompt", "x", *words])
    shown = str(result.exception)
    assert said in shown
    assert not PYTHON.search(shown), shown
    assert "_" not in shown.replace("--mask_", ""), shown
