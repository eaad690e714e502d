"""What clients send to the gateway."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from fuzzing.oracle import Finding, Target
from shared.encoded import UNREADABLE
from tenant_sdk.gateway.admission import Refusal
from tenant_sdk.gateway.constraints import ConstraintRefused, close_objects, read_constraint
from tenant_sdk.gateway.requests import RESPONSES, parse_request

_CONTEXT = 64
_PATHS = ("/v1/completions", "/v1/chat/completions", RESPONSES, "/tokenize", "/detokenize")


def gateway_request(data: bytes) -> None:
    """The body of a request; what is taken is written so that it is taken again, as the same."""
    path = _PATHS[data[0] % len(_PATHS)] if data else _PATHS[0]
    found = parse_request(path, data[1:], _CONTEXT)
    if isinstance(found, Refusal):
        if not 400 <= found.status < 500:
            raise Finding(f"the refusal says {found.status}")
        return
    again = parse_request(path, found.body, _CONTEXT)
    if path != RESPONSES and again != found and not isinstance(again, Refusal):
        raise Finding("what is written is another request")
    if path in (_PATHS[0], *_PATHS[3:]) and isinstance(again, Refusal):
        raise Finding(f"what is written is refused: {again}")


def answer_constraint(data: bytes) -> None:
    """Constraints on answers, and schemas that forbid what they do not name."""
    try:
        given = msgspec.json.decode(data, type=dict[str, Any])
    except UNREADABLE:
        return
    found = read_constraint(given.get("response_format"), given.get("structured_outputs"))
    if found is None or found.kind != "json":
        return
    json.dumps(found.as_field())
    schema = msgspec.json.decode(found.text)
    if close_objects(close_objects(schema)) != close_objects(schema):
        raise Finding("a closed schema is not closed")


_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}},
}
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"anyOf": [{"type": "string"}, {"enum": [1]}]}},
    "required": ["a"],
    "$defs": {"x": {"type": "array", "items": {"type": "integer"}, "minItems": 1}},
}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}
_MESSAGES = [
    {"role": "system", "content": "x"},
    {"role": "user", "content": [{"type": "text", "text": "x"}]},
    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": "x"},
]
_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "x"},
]


def _requests() -> list[bytes]:
    sampling = {"model": "m", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "seed": 1, "n": 1}
    sampling |= {"logit_bias": {"5": 1.0}, "stop": ["x"], "stop_token_ids": [1], "stream": True}
    bodies: list[tuple[int, Any]] = [
        (0, {"prompt": "x", "echo": True, "logprobs": 2, **sampling}),
        (0, {"prompt": [[1, 2], [3]], "structured_outputs": {"choice": ["a", "b"]}}),
        (1, {"messages": _MESSAGES, "tools": [_TOOL], "tool_choice": "required", "logprobs": True}),
        (1, {"messages": _MESSAGES[:2], "response_format": _FORMAT, "chat_template_kwargs": {"a": True}}),
        (2, {"input": _ITEMS, "instructions": "x", "tools": [{"type": "function", "name": "f"}]}),
        (2, {"input": "x", "text": {"format": {"type": "json_schema", "schema": _SCHEMA}}, "store": False}),
        (3, {"prompt": "x", "add_special_tokens": True}),
        (3, {"messages": _MESSAGES, "tools": [_TOOL]}),
        (4, {"tokens": [1, 2, 3]}),
    ]
    return [bytes([at]) + json.dumps(body).encode() for at, body in bodies]


def _constraints() -> list[bytes]:
    outputs: list[Any] = [
        {"regex": "a+"},
        {"choice": ["a", "b"]},
        {"grammar": 'root ::= "a"'},
        {"json": _SCHEMA},
    ]
    outputs += [{"json_object": True}, {"json": json.dumps(_SCHEMA)}]
    found = [json.dumps({"structured_outputs": each}).encode() for each in outputs]
    return [*found, json.dumps({"response_format": _FORMAT}).encode()]


_WORDS = (b"$ref", b"#/$defs/x", b"#", b"allOf", b"oneOf", b"minItems", b"$defs", b"json_schema", b"9" * 30)
_WORDS += (
    b"\\ud800",
    b"null",
    b"1e400",
    b"additionalProperties",
    b"stream",
    b"tool_choice",
    b"response_format",
)
_CONSTRAINTS = ("tenant_sdk/gateway/constraints.py",)
_REQUESTS = (
    *(f"tenant_sdk/gateway/{name}.py" for name in ("requests", "completions", "chats", "responses")),
    *_CONSTRAINTS,
)
TARGETS: Sequence[Target] = (
    Target("gateway_request", gateway_request, _requests, _REQUESTS, (), _WORDS),
    Target(
        *("answer_constraint", answer_constraint, _constraints, _CONSTRAINTS),
        (ConstraintRefused,),
        _WORDS,
    ),
)
