"""Prompts from the command line and from files."""

from pathlib import Path

import pytest

from shared.errors import ConfigurationError
from tenant_sdk.context_options import LENGTH, prompt_text, text_length


def test_a_prompt_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Größe\n", encoding="utf-8")
    assert prompt_text("x", None) == "x"
    assert prompt_text("", None) == ""
    with pytest.raises(ConfigurationError, match="--prompt is not UTF-8 text: byte 0xe9 at character 4"):
        prompt_text("caf\udce9", None)  # as Python has the bytes of another encoding
    assert prompt_text(None, file) == "Größe\n"


def test_what_is_no_prompt(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"ok \xff")
    for prompt, file in ((None, None), ("x", tmp_path / "bytes")):
        with pytest.raises(ConfigurationError, match="either with --prompt or"):
            prompt_text(prompt, file)
    with pytest.raises(ConfigurationError, match="not UTF-8 text: byte 3"):
        prompt_text(None, tmp_path / "bytes")
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        prompt_text(None, tmp_path / "absent")


def test_a_length_has_two_names() -> None:
    assert text_length(LENGTH, None) == LENGTH
    assert text_length(64, None) == text_length(LENGTH, 64) == text_length(64, 64) == 64
    with pytest.raises(ConfigurationError, match="give one of them"):
        text_length(64, 128)
