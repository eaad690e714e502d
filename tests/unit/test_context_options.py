"""Prompts from the command line and from files."""

import io
from pathlib import Path

import pytest

from shared.errors import ConfigurationError
from tenant_sdk.command_line.context_options import PromptOptions
from tenant_sdk.tuning.records import prompts_of


def prompt_text(prompt: str | None, file: Path | None) -> str:
    return PromptOptions(prompt=prompt, prompt_file=file).text()


def test_a_prompt_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Größe\n", encoding="utf-8")
    assert prompt_text("x", None) == "x"
    assert prompt_text("", None) == ""
    with pytest.raises(ConfigurationError, match="prompt is not UTF-8 text: byte 0xe9 at character 4"):
        prompt_text("caf\udce9", None)  # as Python has the bytes of another encoding
    assert prompt_text(None, file) == "Größe\n"


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("Größe".encode())))
    assert prompt_text(None, Path("-")) == "Größe"


def test_what_is_no_prompt(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"ok \xff")
    for prompt, file in ((None, None), ("x", tmp_path / "bytes")):
        with pytest.raises(ConfigurationError, match="one of prompt, prompt_file and prompts"):
            prompt_text(prompt, file)
    with pytest.raises(ConfigurationError, match="not UTF-8 text: byte 3"):
        prompt_text(None, tmp_path / "bytes")
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        prompt_text(None, tmp_path / "absent")


def test_many_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text(" One\n\nTwo \n")
    assert prompts_of(file) == ["One", "Two"]
    file.write_text('{"prompt": " One\\nline", "id": 7}\n\n{"prompt": "Two"}\n')
    assert prompts_of(file) == [" One\nline", "Two"]
    file.write_text('{"prompt": "One"}\n{"text": "secret"}\n')
    with pytest.raises(ConfigurationError, match=r"prompts, line 2: .*`prompt`") as refused:
        prompts_of(file)
    assert "secret" not in str(refused.value)
    file.write_text(" \n")
    with pytest.raises(ConfigurationError, match="holds no prompt"):
        prompts_of(file)
