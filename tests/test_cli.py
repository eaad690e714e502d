"""Both command lines as their users run them: processes, real sockets, exit status and what is said."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Executor
from typer.testing import CliRunner

from shared.errors import ConfigurationError
from tenant_sdk.cli import app

ROOT = Path(__file__).parents[1]
BASE_MODEL = ROOT / "examples" / "base_model"
TRAIN, HELD_OUT = (ROOT / "examples" / "data" / f"clinic_notes_{name}.txt" for name in ("train", "heldout"))
# Short processes on a machine with few cores: a second thread costs more than it brings.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
SECONDS = 300


def start(
    module: str, *arguments: object, token: str | None = None, **options: object
) -> subprocess.Popen[str]:
    environment = ENVIRONMENT if token is None else {**ENVIRONMENT, "TENANT_TOKEN": token}
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,  # type: ignore[call-overload]
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    return process.returncode, out, err


def ok(process: subprocess.Popen[str]) -> tuple[str, str]:
    status, out, err = finish(process)
    assert status == 0, f"{process.args}\n{out}\n{err}"
    return out, err


def tenant(command: str, executor: Executor, *more: object, **options: object) -> subprocess.Popen[str]:
    where = ("--provider", executor.url, "--ca", executor.ca, "--token-env", "TENANT_TOKEN")
    return start(
        "tenant_sdk.cli",
        command,
        *where,
        *more,
        **({"token": executor.token} | options),  # type: ignore[arg-type]
    )


def test_from_certificates_to_a_generated_text(
    tmp_path: Path, serve_process: Callable[..., Executor]
) -> None:
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

    served = serve_process(BASE_MODEL, "--tls-dir", str(tls), "--token-file", str(tokens))
    executor = Executor(served.url.replace("127.0.0.1", "localhost"), token, tls / "ca.pem")

    adapter = tmp_path / "new" / "adapter"
    options = ("--steps", 8, "--batch-size", 4, "--sequence-length", 32, "--learning-rate", 5e-3)
    out, err = ok(
        tenant("finetune", executor, "--data", TRAIN, "--held-out", HELD_OUT, "--output", adapter, *options)
    )
    before, after = map(float, re.search(r"perplexity: ([\d.]+) before, ([\d.]+) after", out).groups())  # type: ignore[union-attr]
    assert 1 < after < before
    assert "8 steps" in out
    assert "MB sent" in out
    assert "step 1 of 8: loss" in err
    assert json.loads((adapter / "adapter_config.json").read_text())["peft_type"] == "LORA"
    assert (adapter / "adapter_model.safetensors").stat().st_size > 0
    assert [path.name for path in adapter.parent.iterdir()] == ["adapter"]

    prompt = ("--prompt", "Mon 6 January.", "--max-new-tokens", 12)
    runs = [tenant("generate", executor, *prompt, *more) for more in ((), ("--adapter", adapter))]
    sampling = ("--temperature", 0.9, "--top-p", 0.9, "--seed", 3)
    runs.append(tenant("generate", executor, *prompt, *sampling, "--mask-source", f"local:{BASE_MODEL}"))
    texts = []
    for run in runs:
        out, err = ok(run)
        assert "12 tokens" in err
        texts.append(out)
    assert all(text.strip() for text in texts)
    assert len(set(texts)) == 3

    assert served.process is not None
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(30) == 0


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
            preexec_fn=limit,
        )
    )
    assert status == 1
    assert "error: cannot write a checkpoint" in err
    assert "File too large" in err
    assert "--resume" in err
    assert "Traceback" not in err
    assert not output.exists()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def examined(
    serve: Callable[..., Executor],
    checkpoint: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[int, str, str]]:
    """What doctor says in several situations; the processes run side by side."""
    executor = serve(checkpoint("llama"))
    other_ca = tmp_path_factory.mktemp("other")
    ok(start("provider.cli", "certs", other_ca))

    def doctor(url: str = executor.url, ca: Path = executor.ca, token: str = executor.token) -> object:
        options = ("--provider", url, "--ca", ca, "--token-env", "TENANT_TOKEN", "--timeout", 20)
        return start("tenant_sdk.cli", "doctor", *options, token=token)

    running = {
        "well": doctor(),
        "port": doctor(url=f"wss://127.0.0.1:{free_port()}"),
        "authority": doctor(ca=other_ca / "ca.pem"),
        "token": doctor(token="x" * 43),
        "host": doctor(url="wss://no-such-host.invalid:8765"),
        "variable": doctor(token=""),
    }
    return {name: finish(process) for name, process in running.items()}  # type: ignore[arg-type]


def test_doctor_finds_nothing(examined: dict[str, tuple[int, str, str]]) -> None:
    status, out, err = examined["well"]
    assert status == 0, out + err
    assert "✗" not in out
    steps = ("url", "dns", "tcp", "tls", "certificate", "token", "protocol", "manifest", "digest")
    for step in (*steps, "round trip", "upload", "download"):
        assert f"✓ {step}" in out
    assert "TLSv1.3" in out
    assert "LlamaForCausalLM" in out


@pytest.mark.parametrize(
    ("situation", "step", "wrong", "cure"),
    [
        ("port", "tcp", "Connection refused", "compare --provider with the URL that `serve` printed"),
        ("authority", "tls", "authority is not trusted", "ask the provider for the ca.pem"),
        ("token", "token", "refused the token", "symbiosis-provider token add"),
        ("host", "dns", "cannot resolve the host name 'no-such-host.invalid'", "typing error"),
        ("variable", "token", "TENANT_TOKEN is not set", "export TENANT_TOKEN="),
    ],
)
def test_doctor_says_what_is_wrong_and_what_to_do(
    examined: dict[str, tuple[int, str, str]], situation: str, step: str, wrong: str, cure: str
) -> None:
    status, out, err = examined[situation]
    assert status == 1, out + err
    assert "Traceback" not in err
    finding, arrow = out.splitlines()[-2:]
    assert finding.startswith(f"✗ {step}")
    assert wrong in finding
    assert arrow.strip().startswith("→")
    assert cure in arrow
    assert out.count("✗") == 1


def test_doctor_examines_mask_sources_too(llama: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENANT_TOKEN", llama.token)
    monkeypatch.setenv("SOURCE_TOKEN", "x" * 43)
    where = ["--provider", llama.url, "--ca", str(llama.ca), "--token-env", "TENANT_TOKEN"]
    source = ["--mask-source", llama.url.replace("127.0.0.1", "localhost"), "--mask-source", "local:folder"]
    result = CliRunner().invoke(app, ["doctor", *where, *source])
    assert result.exit_code == 0, result.output
    assert result.output.count("✓ manifest") == 2
    result = CliRunner().invoke(app, ["doctor", *where, *source, "--mask-source-token-env", "SOURCE_TOKEN"])
    assert result.exit_code == 1
    assert result.output.count("✓ manifest") == result.output.count("✗ token") == 1


def test_one_line_and_status_1_for_an_error(tmp_path: Path) -> None:
    status, out, err = finish(
        start(
            "tenant_sdk.cli", "generate", "--provider", "wss://h", "--token-env", "NOT_SET", "--prompt", "x"
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
    assert (status, out) == (1, "")
    assert err.startswith(f"error: {path} is not a token file")
    assert len(err.splitlines()) == 1


COMMON = ("--provider", "wss://localhost:1", "--token-env", "TENANT_TOKEN")
FINETUNE = ("finetune", *COMMON, "--data", str(TRAIN), "--output")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--privacy", "rot13"), "unknown privacy mode 'rot13'; choose from plain"),
        (("--wire-dtype", "float8"), "float8"),
        (("--method", "dora"), "which reads the base weights"),
        (("--method", "magic"), "choose from lora"),
        (("--client-key", "k.pem"), "go together"),
        (("--privacy", "plain", "--mask-source", "wss://m"), "uses no masks"),
        (("--ca", "missing.pem"), "missing.pem"),
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
