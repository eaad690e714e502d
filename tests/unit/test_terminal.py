"""Text that a command prints: as its author wrote it, but for control characters."""

from __future__ import annotations

import io
import json
import sys

import pytest

from tenant_sdk.terminal import Terminal, json_line, visible

# Spaces without a break, a wide space, joined letters and emoji, a soft hyphen, and names between colons.
TEXT = (
    "10\xa0000 «\u202fbonjour\u202f» 東京\u3000大阪 می\u200cروم 👩\u200d⚕️ soft\xadhyphen "
    ":heart: a:b:c [bold]\ttab"
)
HOSTILE = ["\x1b[2J", "\x9b2J", "\u202eevil", "\u2028", "\x00", "\ud800", "\U000e0041"]


def printed(text: str) -> str:
    out = io.StringIO()
    Terminal(file=out).print(text, markup=False)
    return out.getvalue()


def test_text_is_printed_as_it_is() -> None:
    assert visible(TEXT) == TEXT
    assert printed(TEXT.replace("\t", " ")) == TEXT.replace("\t", " ") + "\n"


@pytest.mark.parametrize("text", HOSTILE)
def test_control_characters_are_not_printed(text: str) -> None:
    assert "\ufffd" in visible(text)
    assert text[0] not in printed(text)


def test_a_line_of_json_for_an_output_of_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would write its own escapes, which are not JSON's."""
    output = io.TextIOWrapper(io.BytesIO(), "ascii", "backslashreplace")
    monkeypatch.setattr(sys, "stdout", output)
    print(json_line({"answer": "Grüße 你好"}), flush=True)
    assert json.loads(output.buffer.getvalue()) == {"answer": "Grüße 你好"}  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", [TEXT, *HOSTILE, "\n", "\\u0041", '"'])
def test_a_line_of_json_is_the_value(text: str) -> None:
    line = json_line({"answer": text})
    assert visible(line) == line
    assert json.loads(printed(line)) == {"answer": text}
    assert line.encode()
