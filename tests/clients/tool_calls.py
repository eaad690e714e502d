"""In the gateway's environment: what vLLM's parsers find with the gateway's bounds is what they find without.

python tool_calls.py
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

os.environ["VLLM_ENFORCE_STRICT_TOOL_CALLING"] = "0"  # as ``tenant_sdk.gateway.serving`` does

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.v1.structured_output import backend_xgrammar

from tenant_sdk.gateway import folder
from tenant_sdk.gateway.constraints import tool_arguments_constraint, tool_calls_constraint
from tenant_sdk.gateway.tool_calls import GROWTH, JSON_CALLS
from tenant_sdk.gateway.vllm_patches import bound_parsers, leave_constraints_alone

PART = 4  # characters of a token
SCHEMA = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/text"}},
    "$defs": {"text": {"type": "string"}},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
LONG = {"a": "some words here, " * 40}
SAID = "It is < than that. " * 10
CALLS = "".join(
    f"<tool_call>\n{json.dumps({'name': 'f', 'arguments': each})}\n</tool_call>\n"
    for each in (LONG, {"a": ""})
)
LLAMA = "; ".join(json.dumps({"name": "f", "parameters": each}) for each in (LONG, {"a": ""}))
FORCED = json.dumps([{"name": "f", "parameters": LONG}] * 2)
KIMI = [f"<|tool_call{each}|>" for each in ("s_section_begin", "s_section_end", "_begin", "_end")]
KIMI.append("<|tool_call_argument_begin|>")
MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", *KIMI]
MARKS += ["<|tool_call_start|>", "<|tool_call_end|>"]


class Tokenizer:
    """With the marks of all parsers; texts are given to parsers as they are."""

    all_special_ids: tuple[int, ...] = ()
    all_special_tokens: tuple[str, ...] = ()

    def get_vocab(self) -> dict[str, int]:
        return {mark: at for at, mark in enumerate(MARKS)}

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return [0]

    def decode(self, *_: Any, **__: Any) -> str:
        return ""


def asked(choice: Any) -> ChatCompletionRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}
    return ChatCompletionRequest.model_validate(body | {"tool_choice": choice})


def parsers(name: str) -> tuple[Any, Any]:
    """Of a request, without and with bounds."""
    plain = ParserManager.get_parser(name, enable_auto_tools=True)
    state: Any = SimpleNamespace(
        online_renderer=SimpleNamespace(parser=plain),
        openai_serving_chat=SimpleNamespace(parser_cls=plain),
        openai_serving_responses=SimpleNamespace(parser=plain),
    )
    bound_parsers(state)
    return plain, state.openai_serving_chat.parser_cls


def streamed(kind: Any, request: ChatCompletionRequest, text: str) -> dict[str, Any]:
    """What a stream adds up to, and how many of its events have how much."""
    parser = kind(Tokenizer(), request.tools)
    parts = [text[at : at + PART] for at in range(0, len(text), PART)]
    content, calls, most, events = "", dict[int, list[Any]](), 0, 0
    for at, part in enumerate(parts):
        found = parser.parse_delta(part, [0], request, [0], finished=at == len(parts) - 1)
        events += found is not None
        if found is not None and found.content:
            content, most = content + found.content, max(most, len(found.content))
        for call in (found.tool_calls or []) if found is not None else []:
            made = calls.setdefault(call.index, [0, "", ""])
            made[0] += call.id is not None
            made[1] += (call.function.name or "") if call.function else ""
            made[2] += (call.function.arguments or "") if call.function else ""
    calls_ = [(ids, name, json.loads(arguments)) for ids, name, arguments in calls.values()]
    return {"content": content, "calls": calls_, "most": most, "events": events}


def same(name: str, choice: Any, text: str, *, collects: bool = True) -> bool:
    """Whether a stream has the same with bounds, its text at once, and its calls in fewer events."""
    (before, after), request = parsers(name), asked(choice)
    one, other = streamed(before, request, text), streamed(after, request, text)
    assert calls_made(after, request, text) == other["calls"]
    fewer = GROWTH < other.pop("events") < one["events"]
    return one["calls"] != [] and one.items() >= other.items() and fewer is collects


def calls_made(kind: Any, request: ChatCompletionRequest, text: str) -> list[tuple[int, str, Any]]:
    """In a whole answer, as ``streamed`` has them."""
    _, _, made = kind(Tokenizer(), request.tools).parse(text, request, enable_auto_tools=True)
    return [(1, each.name, json.loads(each.arguments)) for each in made]


def constrained(name: str) -> list[bool]:
    """Whether a call that must be made, any or a named one, has the constraint that is tried, and is read."""
    _, kind = parsers(name)
    named = {"type": "function", "function": {"name": "f"}}
    made = []
    for choice, tried in (
        ("required", tool_calls_constraint({"f": SCHEMA})),
        (named, tool_arguments_constraint(SCHEMA)),
    ):
        request = asked(choice)
        text = FORCED if choice == "required" else json.dumps(LONG)
        found = kind(Tokenizer(), request.tools).adjust_request(request).structured_outputs
        calls = streamed(kind, request, text)["calls"]
        made += [found is not None and found.json == json.loads(tried.text)]
        made += [calls == calls_made(kind, request, text) == [(1, "f", LONG)] * (1 + (choice == "required"))]
    return made


def strict() -> bool:
    """Whether a constraint beside a strict tool stays as it is, and xgrammar has not looked at it."""

    def looked(_: Any) -> None:
        raise AssertionError("xgrammar takes time squared in the bounds of a pattern")

    leave_constraints_alone()
    backend_xgrammar.validate_xgrammar_grammar = looked
    _, kind = parsers(JSON_CALLS)
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
    pattern = {"type": "string", "pattern": "^[a-z]{0,16000}$"}
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    body["structured_outputs"] = {"json": {"type": "object", "properties": {"code": pattern}}}
    request = ChatCompletionRequest.model_validate(body)
    given = request.structured_outputs.json
    adjusted = kind(Tokenizer(), request.tools).adjust_request(request)
    return adjusted.structured_outputs is not None and adjusted.structured_outputs.json == given


names = [name for _, name in folder._CALLS]
said = {
    "streams": {
        "text and calls": same(JSON_CALLS, "auto", SAID + CALLS),
        "calls that must be made": same(JSON_CALLS, "required", FORCED),
        "calls by tokens": same("llama3_json", "auto", LLAMA, collects=False),
    },
    "constrained": {name: constrained(name) for name in names},
    "strict": strict(),
}
print(json.dumps(said))
