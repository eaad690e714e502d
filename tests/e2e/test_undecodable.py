"""Command lines with bytes that are no UTF-8, and terminals that cannot show everything."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import BASE_MODEL, finish, here, ok, start
from conftest import Executor

from shared.errors import ConfigurationError
from tenant_sdk.session.profiles import approve, check_approved

# What the kernel takes as a name, and Python hands on as half a character.
BYTE = os.fsdecode(b"\xff")


@pytest.mark.parametrize(
    ("module", "arguments", "status", "said"),
    [
        (
            "tenant_sdk.command_line.main",
            ("generate", "--prompt", f"a{BYTE}"),
            1,
            "--prompt is not UTF-8 text: byte 0xff",
        ),
        ("provider.cli", ("certs", f"FOLDER/tls{BYTE}"), 0, "tls\\udcff"),
        ("security.cli", (f"a{BYTE}",), 2, "No such command"),
    ],
)
def test_bytes_that_are_no_text(
    module: str, arguments: tuple[str, ...], status: int, said: str, tmp_path: Path
) -> None:
    given = [each.replace("FOLDER", str(tmp_path)) for each in arguments]
    got, out, err = finish(start(module, *given, secrets={"PYTHONIOENCODING": "ascii:strict"}))
    assert got == status, err
    assert said in out + err
    assert "Traceback" not in err
    if module == "provider.cli":
        assert (tmp_path / f"tls{BYTE}" / "ca.pem").is_file()


def test_folders_and_variables(llama: Executor, tmp_path: Path) -> None:
    """Folders are looked for as they are; what is no folder is refused."""
    (tmp_path / f"adapter{BYTE}").mkdir()
    for option, value, said in [
        ("--adapter", tmp_path / f"adapter{BYTE}", "adapter_config.json"),
        ("--adapter", tmp_path / f"other{BYTE}", "there is no such folder"),
        ("--stop", f"a{BYTE}", "--stop is not UTF-8 text"),
        ("--token-env", f"A{BYTE}", "takes the name of an environment variable"),
        ("--config", tmp_path / f"a{BYTE}", "cannot read"),
        ("--kv", f"a{BYTE}", "one of device, host, disk"),
    ]:
        done = here("generate", llama, "--privacy", "plain", "--prompt", "a", option, value)
        assert isinstance(done.exception, ConfigurationError)
        assert said in str(done.exception)
    token = here(
        "generate", llama, "--privacy", "plain", "--prompt", "a", secrets={"TENANT_TOKEN": f"a{BYTE}"}
    )
    assert isinstance(token.exception, ConfigurationError)


def test_names_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written as JSON has escapes for their bytes."""
    records = tmp_path / f"{BYTE}.jsonl"
    records.write_text('{"prompt": "a", "completion": " b"}\n')
    out = ok(start("tenant_sdk.command_line.main", "data", records, "--tokenizer", BASE_MODEL, "--json"))[0]
    assert json.loads(out)["file"] == f"{tmp_path}/\\xff.jsonl"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"wandb{BYTE}").write_text("x")
    approve(Path(f"wandb{BYTE}"))
    check_approved(Path(f"wandb{BYTE}"), "it says", "leave it")


def test_a_training_whose_files_have_such_names(tmp_path: Path, serve: Callable[..., Executor]) -> None:
    """A name is no reason to lose what was learned."""
    executor, records = serve(BASE_MODEL), tmp_path / f"{BYTE}.jsonl"
    records.write_text('{"prompt": "a", "completion": " b"}\n' * 4)
    base, adapter = tmp_path / f"base{BYTE}", tmp_path / f"adapter{BYTE}"
    base.symlink_to(Path(BASE_MODEL).resolve())
    learn = ("finetune", executor, "--privacy", "plain", "--data", records, "--held-out", records)
    learn += ("--steps", 2, "--batch-size", 2, "--save-steps", 1, "--output", adapter)
    assert "is not UTF-8 text, and an adapter" in str(here(*learn, "--base", base).exception)
    done = here(*learn)
    assert done.exit_code == 0, done.output + repr(done.exception)
    done = here("generate", executor, "--privacy", "plain", "--adapter", adapter, "--raw", "--prompt", "a")
    assert done.exit_code == 0, done.output + repr(done.exception)
    answers = tmp_path / f"answers{BYTE}.jsonl"
    done = here(
        "evaluate", executor, records, "--privacy", "plain", "--adapter", adapter, "--output", answers
    )
    assert done.exit_code == 0, done.output + repr(done.exception)
