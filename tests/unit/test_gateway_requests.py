"""Which requests a gateway takes, and with which constraints on answers; without vLLM."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tenant_sdk.gateway.admission import Refusal
from tenant_sdk.gateway.constraints import (
    CHOICES,
    MEMBERS,
    SPEC_BYTES,
    ConstraintRefused,
    _check_schema,
    close_objects,
    read_constraint,
)
from tenant_sdk.gateway.request_limits import PARTS
from tenant_sdk.gateway.requests import RESPONSES, STRINGS_BYTES, ParsedRequest, parse_request

CONTEXT = 64
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "x"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]
PARTED = [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1000}] * 5
FLAT_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
FLAT_CALL = {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "f", "arguments": "{}"}
SMALL_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def defined(name: str, kind: str) -> dict[str, Any]:
    parameters = {"$defs": {"x": {"type": kind}}, "properties": {"a": {"$ref": "#/$defs/x"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


DEFINED, DEFINED_OTHERWISE = defined("f", "string"), defined("g", "integer")


def chosen(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def deep() -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(70):
        schema = {"type": "object", "properties": {"a": schema}}
    return {"type": "function", "function": {"name": "deep", "parameters": schema}}


DEEP = deep()
CALLED = [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "["}}]}]
BIASES = {str(at): 1 for at in range(300)}
NUMBERED = {"function": {"name": "f", "parameters": {"const": int("9" * 21)}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "x" * 10**5}}


def ask(path: str, body: Any) -> ParsedRequest | Refusal:
    usual = {TEXT: {"prompt": "x"}, CHAT: {"messages": MESSAGES}, RESPONSES: {"input": "x"}}.get(path, {})
    return parse_request(path, json.dumps(usual | body).encode(), CONTEXT)


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 2**66),
        ("top_k", -2),
        ("n", 0),
        ("n", 2**40),
        ("seed", 2**63),
        ("max_tokens", -1),
        ("max_tokens", 2**31),
        ("temperature", 3),
        ("temperature", "1"),
        ("top_p", 0),
        ("presence_penalty", 2.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-100),
        ("logit_bias", {"1": 101}),
        ("logit_bias", [1]),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop", "x" * 257),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1] * 129),
        ("logit_bias", {"9" * 8: 1}),
        ("logit_bias", {"1\n": 1}),
        ("logit_bias", {str(at): 1 for at in range(301)}),
        ("bad_words", ["x"]),
        ("truncate_prompt_tokens", 1),
        ("truncation_side", "left"),
        ("allowed_token_ids", [1]),
        ("prompt_logprobs", 1),
        ("cache_salt", ""),
        ("stream_options", 1),
        ("model", 1),
        ("model", "x" * 257),
        ("kv_transfer_params", {"do_remote_prefill": True}),
        ("priority", 1),
        ("prompt_embeds", "x"),
        ("vllm_xargs", {"x": 1}),
        ("use_beam_search", True),
        ("chat_template", "{{ x }}"),
        ("whatever", False),
    ],
)
def test_what_is_refused(path: str, field: str, value: Any) -> None:
    refusal = ask(path, {field: value})
    assert isinstance(refusal, Refusal)
    assert refusal.status == 400
    assert field in refusal.message


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        (TEXT, {"prompt": []}, "not empty"),
        (TEXT, {"prompt": ["x", 1]}, "texts, or tokens"),
        (TEXT, {"prompt": [[1], []]}, "no tokens"),
        (TEXT, {"prompt": ["x", ""], "echo": True}, "echo"),
        (TEXT, {"prompt": "", "echo": True}, "echo"),
        (TEXT, {"prompt": ["x", "x" * 6000]}, "5120 are the most"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 3000}] * 2}, "5120 are the most"),
        (TEXT, {"prompt": [[1], ["x"]]}, "prompt"),
        (TEXT, {"prompt": [1] * (CONTEXT + 1)}, "64 at most"),
        (TEXT, {"prompt": [[1], [1] * (CONTEXT + 1)]}, "64 at most"),
        (TEXT, {"logprobs": 21}, "logprobs"),
        (TEXT, {"echo": True, "logprobs": 1, "stream": True, "n": 2}, "for one answer only"),
        (TEXT, {"prompt": ["x"] * 33}, "33 prompts; a request here has 32"),
        (TEXT, {"prompt": ["x"] * 9, "n": 7, "logit_bias": BIASES, "stop": "x"}, "18963, and 16384"),
        (TEXT, {"prompt": [[1] * CONTEXT] * 7, "n": 3, "echo": True, "logprobs": 20}, "4194304 are the most"),
        (TEXT, {"prompt": ["\x01" * 800] * 2, "n": 500, "echo": True, "stream": True}, "its answer may have"),
        (TEXT, {"n": 20, "max_tokens": 999, "logprobs": 20}, "answers or log-probabilities"),
        (CHAT, {"n": 20, "logprobs": True, "top_logprobs": 20}, "its answer may have"),
        (TEXT, {"n": 20_000}, "set max_tokens"),
        (CHAT, {"tools": [NUMBERED]}, "more than 20 digits"),
        (CHAT, {"structured_outputs": {"json": '{"const": %s}' % ("9" * 21)}}, "more than 20 digits"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"chat_template_kwargs": {"date": "x" * 5000}}, "4096 bytes"),
        (CHAT, {"messages": IMAGE}, "type"),
        (CHAT, {"messages": PARTED}, str(PARTS)),
        (CHAT, {"tool_choice": "required"}, "tool_choice needs tools"),
        (CHAT, {"tool_choice": "auto", "tools": []}, "tool_choice needs tools"),
        (CHAT, {"tools": [SMALL_TOOL], "tool_choice": chosen("g")}, "a function that is not in tools"),
        (CHAT, {"tools": [SMALL_TOOL] * 2}, "two tools have the same name"),
        (CHAT, {"tools": [SMALL_TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
         "leave out response_format"),
        (CHAT, {"tools": [DEFINED, DEFINED_OTHERWISE], "tool_choice": "required"}, "equal where their names"),
        (CHAT, {"tools": [DEEP], "tool_choice": chosen("deep")}, "nests more than"),
        (CHAT, {"tools": [TOOL]}, "tools"),
        (CHAT, {"chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"tokenize": True, "max_length": 2**31}}, "no variable"),
        (RESPONSES, {"chat_template_kwargs": {"padding": "max_length"}}, "padding is no variable"),
        (CHAT, {"messages": CALLED}, "arguments"),
        (RESPONSES, {"store": True}, "store: this gateway keeps neither answers"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id: this gateway keeps neither"),
        (RESPONSES, {"background": True}, "background: this gateway keeps neither"),
        (RESPONSES, {"conversation": "conv_1"}, "conversation: this gateway keeps neither"),
        (RESPONSES, {"prompt": {"id": "1"}}, "prompt: this gateway keeps neither"),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include"),
        (RESPONSES, {"truncation": "auto"}, "truncation"),
        (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": "x" * 6000}, "5120 are the most"),
        (RESPONSES, {"input": "x" * 3000, "instructions": "x" * 3000}, "5120 are the most"),
        (RESPONSES, {"input": [{"role": "user"}]}, "a message has role and content"),
        (RESPONSES, {"input": [{"type": "function_call", "name": "f"}]}, "has call_id and name and"),
        (RESPONSES, {"input": [FLAT_CALL | {"arguments": "["}]}, "arguments"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference"),
        (RESPONSES, {"input": [{"role": "x", "content": "x"}]}, "role"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools"),
        (RESPONSES, {"tool_choice": "required"}, "tool_choice needs tools"),
        (RESPONSES, {"tools": [FLAT_TOOL], "tool_choice": {"type": "function", "name": "g"}}, "not in tools"),
        (RESPONSES, {"max_tool_calls": 1}, "does not take the field 'max_tool_calls'"),
        ("/detokenize", {"tokens": [1] * (CONTEXT + 1)}, "64 at most"),
        ("/detokenize", {"tokens": [2**31]}, "tokens"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": "x" * STRINGS_BYTES, "return_token_strs": True}, "return_token_strs"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x" * STRINGS_BYTES}], "return_token_strs": True},
            "return_token_strs",
        ),
    ],
)  # fmt: skip
def test_what_is_too_much(path: str, body: Any, why: str) -> None:
    refusal = ask(path, body)
    assert isinstance(refusal, Refusal)
    assert why in refusal.message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": [[1] * CONTEXT] * 32, "max_tokens": 999}),
        (TEXT, {"prompt": [[1] * CONTEXT] * 19, "echo": True, "logprobs": 20, "max_tokens": 0}),
        (TEXT, {"n": 75, "max_tokens": 999, "logprobs": 20, "stream": True}),
        (TEXT, {"n": 74, "logprobs": 20}),
        (TEXT, {"prompt": "9" * 30, "temperature": 1e-20, "logit_bias": BIASES}),
        (CHAT, {"n": 74, "max_tokens": 8, "logprobs": True, "top_logprobs": 20}),
    ],
)
def test_what_is_not_too_much(path: str, body: Any) -> None:
    assert isinstance(ask(path, body), ParsedRequest)


def test_a_stream_of_a_response_counts_its_text() -> None:
    """Its last events have all of it."""
    for context, refused in ((1 << 18, False), ((1 << 18) + 1, True)):
        found = parse_request(RESPONSES, b'{"input": "x", "stream": true}', context)
        assert isinstance(found, Refusal) is refused


def test_prompts_count_together() -> None:
    """Up to twice the context, or as many as are always taken."""
    many = {"prompt": [[1] * 10_000] * 2}
    for context, refused in ((10_000, False), (9_999, True)):
        found = parse_request(TEXT, json.dumps(many | {"max_tokens": 1}).encode(), context)
        assert isinstance(found, Refusal) is refused
    texts = parse_request(TEXT, json.dumps({"prompt": ["x" * 2000] * 17}).encode(), 1000)
    assert isinstance(texts, Refusal)
    assert "up to 17000 tokens; those of a request have 16384" in texts.message


def test_what_vllm_reads_is_what_was_read_here() -> None:
    body = {"user": "u", "store": True, "priority": None, "max_tokens": None, "n": 2, "temperature": 0.5}
    wanted = ask(TEXT, body)
    assert isinstance(wanted, ParsedRequest)
    assert json.loads(wanted.body) == {"prompt": "x", "max_tokens": None, "n": 2, "temperature": 0.5}
    chat = ask(CHAT, {"messages": [{"role": "user", "content": "x", "audio": {"id": 1}}]})
    assert isinstance(chat, ParsedRequest)
    assert json.loads(chat.body) == {"messages": MESSAGES}


@pytest.mark.parametrize(
    ("field", "value", "kind", "text"),
    [
        ("response_format", {"type": "json_object"}, "json", '{"type": "object"}'),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}, "json", '{"a":1}'),
        ("structured_outputs", {"json": {"a": 1}}, "json", '{"a":1}'),
        ("structured_outputs", {"choice": ["a", "b"]}, "choice", '["a","b"]'),
        ("structured_outputs", {"regex": "a+", "json": None}, "regex", "a+"),
        ("structured_outputs", {"grammar": "root ::= x"}, "grammar", "root ::= x"),
    ],
)
def test_constraints(field: str, value: Any, kind: str, text: str) -> None:
    wanted = ask(CHAT, {field: value})
    assert isinstance(wanted, ParsedRequest)
    assert wanted.constraint == (kind, text)
    assert wanted.constraint is not None
    assert json.loads(wanted.body)["structured_outputs"] == wanted.constraint.as_field()
    assert "response_format" not in json.loads(wanted.body)


def test_no_constraint() -> None:
    wanted = ask(CHAT, {"response_format": {"type": "text"}, "structured_outputs": None})
    assert isinstance(wanted, ParsedRequest)
    assert wanted.constraint is None


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


SCHEMAS: dict[str, dict[str, Any]] = {
    "leads back": {"$ref": "#"},
    "itself": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "begins with #": {"$ref": "https://elsewhere.example/schema"},
    "nests more": nested(100),
    str(MEMBERS): {"properties": {f"p{i}": {} for i in range(MEMBERS + 1)}},
    "list of the schema": {"enum": list(range(MEMBERS + 1))},
    "minItems": {"minItems": 10**6},
    "maxItems": {"items": {"maxItems": 1e100}},
    "text in the schema": {"const": "x" * 5000},
    str(SPEC_BYTES): {"anyOf": [{"const": f"{i}" * 2000} for i in range(20)]},
}


@pytest.mark.parametrize("why", SCHEMAS)
def test_schemas_that_are_refused(why: str) -> None:
    with pytest.raises(ConstraintRefused, match=why):
        read_constraint(None, {"json": SCHEMAS[why]})


@pytest.mark.parametrize(
    "given",
    [
        {"json": "{"},
        {"json": "[" * 10**4},
        {"json": "1"},
        {"json": {}, "regex": "a"},
        {"regex": ""},
        {"regex": "a" * 5000},
        {"regex": "a\0"},
        {"choice": []},
        {"choice": [""]},
        {"choice": ["x"] * (CHOICES + 1)},
        {"choice": ["x" * 2000]},
        {"choice": "x"},
        {"grammar": "x" * (SPEC_BYTES + 1)},
        {"structural_tag": "{}"},
        {"json_object": False},
        {},
        "x",
    ],
)
def test_constraints_that_are_refused(given: Any) -> None:
    with pytest.raises(ConstraintRefused):
        read_constraint(None, given)


def test_a_tree_is_no_circle() -> None:
    tree = {"$defs": {"n": {"properties": {"c": {"items": {"$ref": "#/$defs/n"}}}}}, "$ref": "#/$defs/n"}
    assert read_constraint(None, {"json": tree}) is not None


@pytest.mark.parametrize(
    "given",
    [{"type": "json_schema"}, {"type": "structural_tag"}, {"type": "json_schema", "json_schema": 1}, 1],
)
def test_formats_that_are_refused(given: Any) -> None:
    with pytest.raises(ConstraintRefused, match="response_format"):
        read_constraint(given, None)


def test_two_constraints() -> None:
    with pytest.raises(ConstraintRefused, match="not both"):
        read_constraint({"type": "json_object"}, {"regex": "a"})


def test_a_chain_of_references_is_followed_once() -> None:
    """Not from each of its links to the end, which would take the square of its length."""
    count, looks = 450, 0

    class Links(dict[str, Any]):
        def get(self, *arguments: Any) -> Any:
            nonlocal looks
            looks += 1
            return super().get(*arguments)

    def chain(end: str) -> Links:
        links = {str(at): {"$ref": f"#/links/{at + 1}"} for at in range(count)}
        return Links(links | {str(count): {"$ref": end}})

    _check_schema(Links({"links": chain("#/nothing")}))
    assert count <= looks <= 3 * count
    with pytest.raises(ConstraintRefused, match="leads back to itself"):
        _check_schema(Links({"links": chain("#/links/7")}))


@pytest.mark.parametrize(
    ("choice", "may_call", "kind"),
    [(None, True, None), ("auto", True, None), ("none", False, None), ("required", False, "array"),
     (chosen("f"), False, "object")],
)  # fmt: skip
def test_calls_that_must_be_made_fix_the_form_of_an_answer(
    choice: Any, may_call: bool, kind: str | None
) -> None:
    found = ask(CHAT, {"tools": [SMALL_TOOL]} | ({} if choice is None else {"tool_choice": choice}))
    assert isinstance(found, ParsedRequest)
    assert found.may_call == may_call
    schema = None if found.constraint is None else json.loads(found.constraint.text)
    assert (schema or {}).get("type") == kind
    body = json.loads(found.body)
    assert body.get("tool_choice") == choice
    assert "structured_outputs" not in body  # vLLM makes it


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize(
    ("kind", "value"), [("regex", "a"), ("grammar", "root ::= x"), ("json", {}), ("choice", ["a"])]
)
def test_beside_tools_a_client_cannot_form_the_text_that_is_looked_at(
    path: str, kind: str, value: Any
) -> None:
    """A choice is short."""
    tools = [SMALL_TOOL if path == CHAT else FLAT_TOOL]
    body = {"tools": tools, "structured_outputs": {kind: value}}
    refused = kind in ("regex", "grammar")
    assert isinstance(ask(path, body), Refusal) is refused
    assert isinstance(ask(path, body | {"tool_choice": "auto"}), Refusal) is refused
    assert isinstance(ask(path, body | {"tool_choice": "none"}), ParsedRequest)


def test_what_vllm_reads_of_a_response() -> None:
    """Instructions are a message, texts have one part, and nothing is kept."""
    said = {"type": "message", "id": "msg_1", "role": "assistant", "status": "incomplete"}
    said["content"] = [
        {"type": "output_text", "text": "a", "annotations": []},
        {"type": "output_text", "text": "b"},
    ]
    asked = [{"role": "developer", "content": [{"type": "input_text", "text": "c"}]}, said, FLAT_CALL]
    returned = {"type": "function_call_output", "call_id": "1", "output": "d", "name": "e"}
    body = {
        "instructions": "i",
        "input": [*asked, returned],
        "user": "u",
        "metadata": {},
        "temperature": None,
    }
    body |= {"store": False, "background": False, "previous_response_id": None, "max_output_tokens": 3}
    body |= {"stream_options": {"include_obfuscation": False}, "text": {"verbosity": "low"}}
    found = ask(RESPONSES, body)
    assert isinstance(found, ParsedRequest)
    assert (found.sequences, found.constraint, found.may_call) == (1, None, False)
    assert json.loads(found.body) == {
        "input": [
            {"type": "message", "role": "system", "content": "i"},
            {"type": "message", "role": "system", "content": "c"},
            {"type": "message", "role": "assistant", "content": "a\nb"},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "d"},
        ],
        "max_output_tokens": 3,
        "store": False,
    }


@pytest.mark.parametrize(
    ("fields", "may_call", "kind"),
    [
        ({}, True, None),
        ({"tool_choice": "required"}, False, "array"),
        ({"tool_choice": {"type": "function", "name": "f"}}, False, "object"),
        ({"tool_choice": "none", "text": {"format": {"type": "json_object"}}}, False, "object"),
        (
            {
                "tools": [],
                "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "string"}}},
            },
            False,
            "string",
        ),
    ],
)
def test_constraints_of_a_response(fields: Any, may_call: bool, kind: str | None) -> None:
    found = ask(RESPONSES, {"tools": [FLAT_TOOL]} | fields)
    assert isinstance(found, ParsedRequest)
    assert found.may_call == may_call
    schema = None if found.constraint is None else json.loads(found.constraint.text)
    assert (schema or {}).get("type") == kind
    body = json.loads(found.body)
    assert "text" not in body
    assert ("structured_outputs" in body) == ("text" in fields)


def test_definitions_of_tools_are_put_together() -> None:
    other = defined("g", "string")
    found = ask(CHAT, {"tools": [DEFINED, other], "tool_choice": "required", "parallel_tool_calls": False})
    assert isinstance(found, ParsedRequest)
    assert found.constraint is not None
    schema = json.loads(found.constraint.text)
    assert schema["$defs"] == {"x": {"type": "string"}}
    names = [each["properties"]["name"]["enum"] for each in schema["items"]["anyOf"]]
    assert names == [["f"], ["g"]]
    assert json.loads(found.body)["parallel_tool_calls"] is False


def test_objects_have_no_members_that_their_schema_does_not_describe() -> None:
    inner = {"properties": {"b": {"type": "string"}}}
    schema = {
        "type": "object",
        "properties": {"properties": inner, "open": inner | {"additionalProperties": True}},
        "const": inner | {"allOf": [inner, inner]},
        "$defs": {"x": {"anyOf": [inner, {"type": "array", "items": inner}]}},
    }
    shut = inner | {"additionalProperties": False}
    assert close_objects(schema) == {
        "type": "object",
        "properties": {"properties": shut, "open": inner | {"additionalProperties": True}},
        "const": inner | {"allOf": [inner, inner]},
        "$defs": {"x": {"anyOf": [shut, {"type": "array", "items": shut}]}},
        "additionalProperties": False,
    }
    assert close_objects(True) is True
    assert "additionalProperties" not in schema


PART = {"properties": {"b": {"type": "string"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [PART, PART]},
        PART | {"allOf": [{"$ref": "#/$defs/x"}]},
        PART | {"$ref": "#/$defs/x"},
        PART | {"anyOf": [PART, PART]},
        {"additionalProperties": {"type": "string"}, "oneOf": [PART]},
        {"oneOf": [PART], "anyOf": [PART]},
    ],
)
def test_an_object_that_is_described_in_several_places_stays_open(schema: dict[str, Any]) -> None:
    """Closed, each of them would forbid the members of the others."""
    for whole in (schema, {"$defs": {"x": PART}, "items": {"properties": {"a": schema}}}):
        assert close_objects(whole) == whole
    assert close_objects(PART | {"items": {"allOf": [PART]}}) != PART, "one place alone"
