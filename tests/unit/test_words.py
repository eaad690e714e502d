"""Errors name an option as Python does, and command lines show it as theirs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shared.options import in_options
from tenant_sdk.cli import app
from tenant_sdk.cli_options import NAMES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("give ca=FILE.", "give --ca FILE."),
        ("privacy='plain' uses no masks", "--privacy plain uses no masks"),
        ("name one, mask_sources=['wss://...'], or", "name one, --mask-source wss://..., or"),
        ("mask_sources=['a', 'b']", "--mask-source a --mask-source b"),
        ("allow_same={'address', 'machine'};", "--allow-same address --allow-same machine;"),
        ("(allow_same_operator=True)", "(--allow-same-operator)"),
        ("give client_certificate=(FILE, KEY)", "give --client-certificate FILE --client-key FILE"),
        ("give fingerprint_key=KEY, as", "give --fingerprint-key-env VAR, as"),
        ("mask_source_ca=: give", "--mask-source-ca: give"),
        ("verify_rate=2.0 cannot be: it", "--verify-rate 2.0 cannot be: it"),
        ("timeout=nan cannot", "--timeout nan cannot"),
        ("give memory_gib=2.3 or more", "give --memory-gib 2.3 or more"),
        # What is nobody's option, and what is part of something else, stays.
        ("give model_class=CLASS", "give model_class=CLASS"),
        ("/data/digest=ab/x and a?ca=1", "/data/digest=ab/x and a?ca=1"),
        ("token of a tenant; ca.pem", "token of a tenant; ca.pem"),
    ],
)
def test_how_an_option_is_shown(message: str, shown: str) -> None:
    assert in_options(message, NAMES) == shown


def test_no_error_spells_an_option_for_one_kind_of_user_alone() -> None:
    """In what both kinds call; options, doctor, remedies and tuning are of the command line."""
    spelled = re.compile("|".join(f"{option.split()[0]}(?![a-z-])" for option in NAMES.values()))
    of_commands = {
        "cli.py",
        "cli_options.py",
        "context_options.py",
        "doctor.py",
        "remedies.py",
        "storage.py",
        "tuning",
        "gateway",
    }
    folder = ROOT / "tenant_sdk"
    files = [path for path in folder.rglob("*.py") if path.relative_to(folder).parts[0] not in of_commands]
    assert len(files) > 20
    for path in files:
        assert not spelled.findall(path.read_text()), path


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
        ((*WHERE, "--privacy", "plain", "--memory-gib", "0"), "--memory-gib 0.0 must be above 0"),
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
        (MASKED, "if that is meant, --allow-same token; to try it out on one machine, --allow-same-operator"),
        ((*MASKED, "--mask-source-token-env", "T"), "provider and mask sources have the same token"),
        (
            (*MASKED, "--allow-same", "token", "--ca", "a.pem"),
            "--mask-source-ca FILE, or the word system there",
        ),
        ((*MASKED, "--allow-same", "token", "--ca", "a.pem"), "The provider's, --ca a.pem, could"),
        ((*MASKED, "--allow-same", "all"), "--allow-same all cannot be: it is some of host"),
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
    shown = in_options(str(result.exception), NAMES)
    assert said in shown
    assert not PYTHON.search(shown), shown
    assert "_" not in shown.replace("--mask_", ""), shown
