"""Both command lines as their users run them: processes, real sockets, exit status and what is said."""

from __future__ import annotations

import dataclasses
import json
import re
import resource
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import BASE_MODEL, HELD_OUT, TRAIN, finish, here, ok, ok_here, start, tenant
from conftest import RING, Executor
from typer.testing import CliRunner

from shared.errors import ConfigurationError, RequestRefused
from shared.secrets import text_of
from tenant_sdk.command_line import main as cli
from tenant_sdk.command_line.main import app
from tenant_sdk.session.options import SessionConfig

OTHERS = "made fingerprints, or were lost or refused"


def test_from_certificates_to_a_generated_text(
    tmp_path: Path, serve_process: Callable[..., Executor], serve: Callable[..., Executor]
) -> None:
    """Two executors with authorities and tokens of their own, one-time masks, a fingerprint file."""
    tls, tokens = tmp_path / "tls", tmp_path / "tokens.json"
    out, _ = ok(start("provider.cli", "certs", tls, "--host", "localhost"))
    assert "ca.pem" in out
    names = {"ca.pem", "server.pem", "server.key", "client.pem", "client.key"}
    assert {path.name for path in tls.iterdir()} == names
    assert stat.S_IMODE((tls / "server.key").stat().st_mode) == 0o600
    out, _ = ok(start("provider.cli", "token", "add", "clinic", "--token-file", tokens))
    token = out.strip()
    assert len(token) == 43
    assert token not in tokens.read_text()

    own = ("--tls-dir", str(tls), "--token-file", str(tokens))
    served = serve_process(BASE_MODEL, *own, "--numerics", RING)
    executor = Executor(served.url.replace("127.0.0.1", "localhost"), token, tls / "ca.pem")
    other = serve(BASE_MODEL, numerics=RING)

    prints = tmp_path / "prints"
    made = CliRunner().invoke(app, ["fingerprint", str(BASE_MODEL), "--output", str(prints)])
    assert f"--fingerprints {prints} --fingerprint-key-env FINGERPRINT_KEY" in made.stderr
    secrets = {"SOURCE_TOKEN": other.token, "FINGERPRINT_KEY": made.stdout.strip()}
    source = (
        "--mask-source",
        other.url,
        "--mask-source-ca",
        other.ca,
        "--mask-source-token-env",
        "SOURCE_TOKEN",
    )
    checked = ("--fingerprints", prints, "--fingerprint-key-env", "FINGERPRINT_KEY")

    adapter, held_out = tmp_path / "new" / "adapter", tmp_path / "held_out.txt"
    held_out.write_text(HELD_OUT.read_text()[:1500])  # each of its tokens takes as long as a learned one
    learn = ("finetune", executor, "--data", TRAIN, "--held-out", held_out, "--output", adapter)
    learn += ("--steps", 8, "--batch-size", 4, "--sequence-length", 32, "--learning-rate", 5e-3)
    refused = here(*learn, *source[:2], *source[4:], secrets=secrets)
    assert "give the mask source's own authority" in str(refused.exception)
    refused = here(*learn, *source, secrets=secrets)
    why = str(refused.exception)
    assert "have the same address, machine: provider and mask sources must be run by operators" in why
    assert "--allow-same all" in why
    out, err = ok(tenant(*learn, *source, "--allow-same", "all", secrets=secrets))
    assert "these masks hide nothing from it" not in err  # which `doctor` says of parties on one machine
    before, after = map(float, re.search(r"perplexity: ([\d.]+) before, ([\d.]+) after", out).groups())  # type: ignore[union-attr]
    assert 1 < after < before
    assert "8 steps" in out
    assert "MB sent" in out
    assert re.search(
        r"masked: every row, each under a mask of its own \(1 mask source; [\d,]+ rows multiplied there", out
    )
    both = re.search(rf"checked: all ([\d,]+) rows that were used; the other ([\d,]+) {OTHERS}", out).groups()  # type: ignore[union-attr]
    assert all(int(each.replace(",", "")) > 0 for each in both)
    assert "step 1 of 8: loss" in err
    assert json.loads((adapter / "adapter_config.json").read_text())["peft_type"] == "LORA"
    assert (adapter / "adapter_model.safetensors").stat().st_size > 0
    assert [path.name for path in adapter.parent.iterdir()] == ["adapter"]

    prompt = ("generate", executor, "--prompt", "Mon 6 January.", "--max-new-tokens", 12)
    local = ("--mask-source", f"local:{BASE_MODEL}")
    sampling = ("--temperature", 0.9, "--top-p", 0.9, "--seed", 3)
    runs = [
        ok_here(*prompt, *local, *checked, secrets=secrets),
        ok(tenant(*prompt, *source, "--allow-same", "all", "--adapter", adapter, secrets=secrets)),
        ok_here(*prompt, *local, *sampling, "--verify", "off", secrets=secrets),
    ]
    said = (r"checked: (\d+) of \1 rows\n", OTHERS, "checked: nothing")
    for (_, err), expected in zip(runs, said, strict=True):
        assert "12 tokens" in err
        assert re.search(expected, err)
    texts = [out for out, _ in runs]
    assert all(text.strip() for text in texts)
    assert len(set(texts)) == 3
    (tmp_path / "prompt.txt").write_text("Mon 6 January.")
    elsewhere = ("--prompt-file", tmp_path / "prompt.txt", "--kv", "disk", "--kv-folder", tmp_path)
    assert ok_here(*prompt[:2], *elsewhere, *prompt[4:], *local, secrets=secrets)[0] == texts[0]
    refused = here(*prompt, *local, "--kv-memory-gib", 1, secrets=secrets)
    assert "--kv-memory-gib and --kv-folder need --kv disk" in str(refused.exception)

    assert served.process is not None
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(800) == 0


def test_a_disk_that_takes_no_large_file(tmp_path: Path, serve: Callable[..., Executor]) -> None:
    """A real refusal by the system, through safetensors; a full disk differs only in the errno."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    output = tmp_path / "adapter"
    status, _, err = finish(
        tenant(
            "finetune",
            serve(BASE_MODEL),
            *("--data", TRAIN, "--output", output, "--steps", 1, "--sequence-length", 16),
            *("--privacy", "plain"),
            preexec_fn=limit,
        )
    )
    assert status == 1
    assert "error: cannot write a checkpoint" in err
    assert "File too large" in err
    assert "--resume" in err
    assert "Traceback" not in err
    assert not output.exists()


def test_notes_of_an_error_come_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    def stop() -> None:
        error = RequestRefused("unauthorized", "so it was")
        error.add_note("step 3 is kept in [folder]")
        raise error

    with pytest.raises(SystemExit):
        cli.run(stop)
    assert capsys.readouterr().err == "error: [unauthorized] so it was\nstep 3 is kept in [folder]\n"


def test_one_line_and_status_1_for_an_error(tmp_path: Path) -> None:
    status, out, err = finish(
        start(
            "tenant_sdk.command_line.main",
            "generate",
            "--provider",
            "wss://h",
            "--token-env",
            "NOT_SET",
            "--prompt",
            "x",
        )
    )
    assert (status, out) == (1, "")
    assert err.startswith("error: the environment variable NOT_SET is not set")
    assert "export NOT_SET=" in err
    assert len(err.splitlines()) == 1
    # Brackets are not markup, and a long line is not folded.
    path = tmp_path / ("[bold]" + "x" * 90)
    path.write_text("not JSON")
    status, out, err = finish(start("provider.cli", "token", "add", "me", "--token-file", path))
    assert (status, out) == (78, "")
    assert err.startswith(f"error: {path} is not a token file")
    assert len(err.splitlines()) == 1


COMMON = ("--provider", "wss://localhost:1", "--token-env", "TENANT_TOKEN")
FINETUNE = ("finetune", *COMMON, "--data", str(TRAIN), "--output")


SOURCE = ("--mask-source", "wss://m")
WAIVED = ("--allow-same", "token", "--allow-same", "authority")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--privacy", "rot13"), "--privacy rot13 must be one of one-time"),
        ((), "--mask-source wss://..., or the checkpoint itself"),
        (SOURCE * 2, "named twice"),
        (("--wire-dtype", "float8"), "float8"),
        (("--method", "dora"), "which reads the base weights"),
        (("--method", "magic"), "choose from lora"),
        (SOURCE, "give the mask source's own token"),
        ((*SOURCE, "--allow-same", "every"), "must be some of host, address"),
        (("--client-key", "k.pem"), "go together"),
        (("--privacy", "plain", *SOURCE), "uses no masks"),
        (("--privacy", "noise-bank", *SOURCE, "--mask-source", "local:x"), "takes one mask source"),
        (("--ca", "missing.pem", *SOURCE, "--allow-same", "all"), "missing.pem"),
        ((*SOURCE, "--mask-source-ca", "a", "--mask-source-ca", "b"), "one for all mask sources, or one for"),
        ((*SOURCE, "--mask-source-token-env", "NOT_SET"), "put the mask source's token there"),
        ((*SOURCE, "--verify", "often"), "--verify often must be one of always, sampled, off"),
        ((*SOURCE, "--verify", "sampled", "--verify-rate", "2"), "--verify-rate 2.0 must be more than 0"),
        ((*SOURCE, "--mask-budget-mib", "-1"), "must be at least 0"),
        ((*SOURCE, "--fingerprints", "f"), "needs --fingerprint-key-env VAR"),
        ((*SOURCE, "--fingerprints", "f", "--fingerprint-key-env", "NOT_SET"), "put the fingerprints' key"),
        (
            (*SOURCE, "--fingerprints", "f", "--fingerprint-key-env", "TENANT_TOKEN", *WAIVED),
            "the fingerprint key is",
        ),
    ],
)
def test_wrong_options(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENANT_TOKEN", "t")
    result = CliRunner().invoke(app, [*FINETUNE, str(tmp_path / "adapter"), *arguments])
    assert result.exit_code == 1
    assert isinstance(result.exception, ConfigurationError)
    assert message in str(result.exception)


def test_every_option_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared options, from the command line to ``connect``."""
    for name in ("TENANT_TOKEN", "A_TOKEN", "B_TOKEN", "KEY"):
        monkeypatch.setenv(name, name.lower())
    given: list[SessionConfig] = []

    def open_session(config: SessionConfig) -> None:
        given.append(config)
        raise ConfigurationError("enough")

    monkeypatch.setattr("tenant_sdk.session.opening.open_session", open_session)
    where = ["generate", *COMMON, "--prompt", "x", "--ca", "ca", "--digest", "d", "--timeout", "3"]
    sources = ["--mask-source", "wss://a", "--mask-source", "wss://b", "--mask-source-ca", "a.pem"]
    sources += ["--mask-source-token-env", "A_TOKEN", "--mask-source-token-env", "B_TOKEN"]
    privacy = ["--privacy", "one-time", "--allow-same", "all", "--mask-budget-mib", "7"]
    privacy += ["--allow-same", "key", "--allow-same", "host", "--allow-transcript", "--pad-rows", "16"]
    checks = ["--verify", "sampled", "--verify-rate", "0.5", "--fingerprints", "f"]
    client = ["--client-certificate", "c", "--client-key", "k", "--wire-dtype", "bfloat16"]
    CliRunner().invoke(app, where + sources + privacy + checks + client + ["--fingerprint-key-env", "KEY"])
    (config,) = given
    assert "tenant_token" not in repr(config)  # secrets are read when they are used
    read = dataclasses.replace(
        config,
        token=text_of(config.token),
        mask_source_token=[text_of(each) for each in config.mask_source_token],  # type: ignore[union-attr]
        fingerprint_key=text_of(config.fingerprint_key),
    )
    assert [read] == [
        SessionConfig(
            provider="wss://localhost:1",
            token="tenant_token",
            ca=Path("ca"),
            client_certificate=(Path("c"), Path("k")),
            privacy="one-time",
            mask_sources=["wss://a", "wss://b"],
            mask_source_token=["a_token", "b_token"],
            mask_source_ca=Path("a.pem"),
            allow_same=["all", "key", "host"],
            allow_transcript=True,
            mask_budget_mib=7.0,
            pad_rows=16,
            verify="sampled",
            verify_rate=0.5,
            fingerprints=Path("f"),
            fingerprint_key="key",
            wire_dtype="bfloat16",
            digest="d",
            timeout=3.0,
        )
    ]


def test_fingerprints_are_made_under_a_key(
    tmp_path: Path, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "new" / "prints"
    make = ["fingerprint", str(checkpoint("llama")), "--output", str(output)]
    made = CliRunner().invoke(app, make)
    assert made.exit_code == 0, made.output
    key = made.stdout.strip()
    assert len(key) == 44
    assert "the key is shown only now" in made.stderr
    assert key not in made.stderr
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    assert list(output.parent.iterdir()) == [output]

    monkeypatch.setenv("KEY", key)
    again = CliRunner().invoke(app, [*make, "--key-env", "KEY"])
    assert (again.exit_code, again.stdout) == (0, "")
    assert "--fingerprint-key-env KEY" in again.stderr
    monkeypatch.delenv("KEY")
    unset = CliRunner().invoke(app, [*make, "--key-env", "KEY"])
    assert len(unset.stdout.strip()) == 44
    assert "export KEY=" in unset.stderr


@pytest.mark.parametrize(
    ("folder", "output", "key", "message"),
    [
        ("llama", "prints", "not a key", "the fingerprint key is not one: it has 44 characters"),
        ("nowhere", "prints", "", "nowhere is not a checkpoint folder"),
        ("llama", ".", "", "cannot be a file"),
        ("llama", "file/prints", "", "cannot be a file"),
    ],
)
def test_fingerprints_that_cannot_be_made(
    folder: str,
    output: str,
    key: str,
    message: str,
    tmp_path: Path,
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KEY", key)
    (tmp_path / "file").touch()
    where = checkpoint(folder) if folder == "llama" else tmp_path / folder
    make = ["fingerprint", str(where), "--output", str(tmp_path / output), "--key-env", "KEY"]
    result = CliRunner().invoke(app, make)
    assert isinstance(result.exception, ConfigurationError)
    assert message in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_output_that_exists_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENANT_TOKEN", "t")
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, [*FINETUNE, str(tmp_path)])
    assert isinstance(result.exception, ConfigurationError)
    assert "exists already" in str(result.exception)


def test_the_token_cannot_be_given_on_the_command_line() -> None:
    result = CliRunner().invoke(app, ["generate", *COMMON, "--prompt", "x", "--token", "secret"])
    assert result.exit_code == 2
    assert "No such option" in result.output
