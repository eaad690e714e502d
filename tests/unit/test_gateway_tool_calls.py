"""How often vLLM's parsers look at an answer, and at how much of it; without vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tenant_sdk.gateway.tool_calls import MAX_CHARACTERS, bounded_parser

AUTO, REQUIRED = SimpleNamespace(tool_choice="auto"), SimpleNamespace(tool_choice="required")
MARK = "<call>"


@dataclass
class Message:
    """Of a stream."""

    content: str | None = None
    tool_calls: list[str] = field(default_factory=list)


class Parser:
    """What follows the mark is a call; the text before it is passed on, but for a part of the mark."""

    def __init__(self) -> None:
        self.text, self.sent, self.looks, self.tokens = "", 0, list[int](), list[int]()
        self.ended = False

    def adjust_request(self, request: Any) -> Any:
        return type(self)

    def parse(self, model_output: str, request: Any, enable_auto_tools: bool = False) -> Any:
        content, mark, call = model_output.partition(MARK)
        self.looks.append(len(model_output))
        return None, content, [call] if mark else None

    def parse_delta(
        self, delta_text: str, delta_token_ids: list[int], request: Any, prompt: Any = None, *, finished: bool
    ) -> Message | None:
        assert not self.ended
        self.text, self.tokens, self.ended = self.text + delta_text, self.tokens + delta_token_ids, finished
        self.looks.append(len(self.text))
        content, mark, _ = self.text.partition(MARK)
        if not mark:
            content = content.removesuffix("<")
        new, self.sent = self.text[self.sent : len(content)], max(self.sent, len(content))
        if new:
            return Message(new)
        return Message(tool_calls=[delta_text.removeprefix(MARK)]) if mark else None


class Forced(Parser):
    """Of calls that must be made."""


def stream(parser: Any, request: Any, deltas: list[str]) -> list[Message | None]:
    return [
        parser.parse_delta(text, [at], request, [1], finished=at == len(deltas) - 1)
        for at, text in enumerate(deltas)
    ]


def text_of(told: list[Message | None]) -> str:
    return "".join((each.content or "") + "".join(each.tool_calls) for each in told if each is not None)


@pytest.mark.parametrize("request_", [AUTO, REQUIRED])
def test_a_call_is_looked_at_when_it_has_grown(request_: Any) -> None:
    """All looks together cost some nine times as much as the last, where the cost is linear."""
    parser, deltas = bounded_parser(Parser, Forced, Message, collects=True)(), [MARK, *["1234"] * 10_000]
    told = stream(parser, request_, deltas)
    read = parser._forced if request_ is REQUIRED else parser
    assert len(read.looks) < 100
    assert sum(read.looks) < 10 * len("".join(deltas))
    assert text_of(told) == "1234" * 10_000
    assert read.text == "".join(deltas)
    assert read.tokens == list(range(len(deltas)))
    assert read.ended


def test_text_before_a_call_is_passed_on_at_once() -> None:
    """What begins like a mark stops it no longer than until the next token."""
    parser, deltas = bounded_parser(Parser, Forced, Message, collects=True)(), ["ab <", " c "] * 500
    told = stream(parser, AUTO, [*deltas, MARK, "1234"])
    assert len(parser.looks) >= 1000
    assert all(each is not None for each in told[:1000])
    assert text_of(told) == "".join(deltas) + "1234"


def test_a_parser_that_goes_by_tokens_gets_each() -> None:
    parser = bounded_parser(Parser, Forced, Message, collects=False)()
    stream(parser, AUTO, [MARK, *["1234"] * 100])
    assert len(parser.looks) == 101


@pytest.mark.parametrize("collects", [True, False])
def test_beyond_a_bound_an_answer_is_text(collects: bool) -> None:
    kind = bounded_parser(Parser, Forced, Message, collects=collects)
    deltas = ["text", MARK, *["1234"] * (MAX_CHARACTERS // 4), "end"]
    parser = kind()
    told = stream(parser, AUTO, deltas)
    assert max(parser.looks) <= MAX_CHARACTERS
    assert parser.ended
    assert text_of(told) == "".join(deltas).replace(MARK, "")
    assert [each.content for each in told[-2:] if each is not None] == ["1234", "end"]
    whole = kind()
    _, content, (call,) = whole.parse("".join(deltas), AUTO, enable_auto_tools=True)
    assert whole.looks == [MAX_CHARACTERS]
    assert content.endswith("end")
    assert content.removeprefix("text") == "".join(deltas)[MAX_CHARACTERS:]
    assert call == "".join(deltas)[len("text" + MARK) : MAX_CHARACTERS]
    assert kind().parse("text", AUTO) == (None, "text", None)


@pytest.mark.parametrize("choice", ["required", SimpleNamespace(name="f")])
def test_calls_that_must_be_made_have_one_parser(choice: Any) -> None:
    """It has a constraint for them, and not every other has."""
    kind = bounded_parser(Parser, Forced, Message, collects=True)
    request = SimpleNamespace(tool_choice=choice)
    assert kind().adjust_request(request) is Forced
    assert issubclass(kind().adjust_request(AUTO), kind)
    parser = kind()
    parser.parse("text", request)
    assert (parser.looks, parser._forced.looks) == ([], [4])
