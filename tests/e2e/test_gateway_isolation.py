"""What one client of a gateway can do to another: hostile values, constraints, adapters, traces of texts."""

from __future__ import annotations

import http.client
import json
import random
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import peft
import psutil
import pytest
import torch
from commands import BASE_MODEL
from conftest import executor_processes
from gateways import RunningGateway, chat_model, gateway, needed, ran
from raw_peers import SYN_SENT, connecting
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tenant_sdk.gateway.chats import RESERVED_VARIABLES

pytestmark = needed

KEYS = ("a-key-that-is-nobody-s", "another-that-is-nobody-s")
TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MARK = "zebraquagga"
MARKED_TOKENS = [1717, 1818, 1919, 1616]
# Each may be right for one field and is wrong for most.
HOSTILE = (
    str(2**70),
    str(2**31 - 1),
    "-1",
    "1e400",
    "NaN",
    "null",
    '"x"',
    "[]",
    '["x", 1]',
    f"[{2**40}]",
    "{}",
    '{"1": 1e300}',
    '{"$ref": "#"}',
    "[" * 300 + "]" * 300,
)


@pytest.fixture(scope="module")
def running(
    tls_dir: Path, token_file: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    folder = tmp_path_factory.mktemp("isolation")
    model = chat_model(folder / "base")
    write_adapter(model, folder / "adapters" / "one")
    (folder / "tmp").mkdir()
    with executor_processes(tls_dir, token_file, folder) as start:
        provider, masks = (start(model, "--numerics", "ring") for _ in range(2))
        options = ("--adapters", folder / "adapters", "--max-sequences", 8, "--max-waiting", 8)
        options += ("--max-adapters", 4)
        options += ("--api-key-env", "KEYS", "--prefix-cache")
        variables = {"KEYS": " ".join(KEYS), "TMPDIR": str(folder / "tmp")}
        with gateway(provider, masks, folder / "gateway", *options, **variables) as it:
            yield it


def write_adapter(model: Path, folder: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(folder)


def private(running: RunningGateway) -> Path:
    """The folder of the gateway's own."""
    (folder,) = (running.log.parent.parent / "tmp").glob("symbiosis-gateway-*")
    return folder


class Client:
    """Sends bodies as they are."""

    def __init__(self, running: RunningGateway, key: int = 0) -> None:
        self._address = running.url.removeprefix("http://")
        self._headers = {"Authorization": f"Bearer {KEYS[key]}", "Content-Type": "application/json"}

    def ask(self, path: str, body: Any = None, method: str = "POST") -> tuple[int, bytes]:
        sent = body if isinstance(body, (str, type(None))) else json.dumps(body)
        with closing(http.client.HTTPConnection(self._address, timeout=800)) as connection:
            connection.request(method, path, sent, self._headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def text(self, **body: Any) -> str:
        status, told = self.ask(TEXT, {"model": "base", "prompt": "And", "max_tokens": 8} | body)
        assert status == 200, told
        return str(json.loads(told)["choices"][0]["text"])


@pytest.fixture
def client(running: RunningGateway) -> Client:
    return Client(running)


@pytest.fixture
def other(running: RunningGateway) -> Iterator[Client]:
    """One with another key, whose answers stay as they were whatever a test does."""
    opened = Client(running, 1)
    said = opened.text(temperature=0)
    yield opened
    assert opened.text(temperature=0) == said
    assert opened.ask("/healthz", method="GET")[0] == 200


@pytest.fixture(scope="module")
def vllm() -> dict[str, Any]:
    """The fields of its requests, and the paths of its server."""
    return ran("request_fields.py")


USUAL: dict[str, dict[str, Any]] = {
    TEXT: {"model": "base", "prompt": "And", "max_tokens": 1},
    CHAT: {"model": "base", "messages": [{"role": "user", "content": "And"}], "max_tokens": 1},
    RESPONSES: {"model": "base", "input": "And", "max_output_tokens": 1},
    "/tokenize": {"model": "base", "prompt": "And"},
    "/detokenize": {"model": "base", "tokens": [1]},
}


def test_templates_get_variables_alone(vllm: dict[str, Any]) -> None:
    """No option of the functions that apply them: one pads a prompt until memory ends."""
    assert set(vllm["of_templates"]) <= RESERVED_VARIABLES


@pytest.mark.parametrize("path", USUAL)
def test_no_value_of_any_field_is_an_error_of_the_server(
    client: Client, other: Client, vllm: dict[str, Any], path: str
) -> None:
    found: dict[str, int] = {}
    for field in vllm["fields"][path]:
        usual = json.dumps({name: value for name, value in USUAL[path].items() if name != field})
        for value in HOSTILE:
            status, _ = client.ask(path, f'{usual[:-1]}, "{field}": {value}}}')
            found[f"{field}: {value[:20]}"] = status
    assert {each: status for each, status in found.items() if status not in (200, 400, 404)} == {}


# Values that are fine by themselves, and do not fit all the others.
TOGETHER: dict[str, list[Any]] = {
    "add_special_tokens": [False],
    "cache_salt": ["x"],
    "ignore_eos": [True],
    "include_stop_str_in_output": [True],
    "logit_bias": [{"1": 1}],
    "max_tokens": [0, 1],
    "min_tokens": [1, 5],
    "n": [2],
    "seed": [1],
    "top_k": [5],
    "return_token_ids": [True],
    "return_tokens_as_token_ids": [True],
    "skip_special_tokens": [False],
    "stop": ["a", ["a", "b"]],
    "stop_token_ids": [[1]],
    "stream": [True],
    "structured_outputs": [{"choice": ["a"]}, {"regex": "a+"}],
    "temperature": [0, 1.0],
}
OF_TEXTS = {"echo": [True], "logprobs": [0, 3], "prompt": ["", [""], ["And", ""], [[]], [1], [[1], []]]}
OF_CHATS: dict[str, list[Any]] = {
    "add_generation_prompt": [False],
    "continue_final_message": [True],
    "logprobs": [True],
    "messages": [[{"role": "user"}], [{"role": "assistant", "content": "x"}], [{"role": "x", "content": []}]],
    "tools": [[], [{"type": "function", "function": {"name": "x"}}]],
    "top_logprobs": [0, 5],
}


OF_RESPONSES: dict[str, list[Any]] = {
    "input": [
        [{"role": "user", "content": ""}],
        [{"role": "assistant", "content": [{"type": "output_text", "text": "x"}]}],
        [{"type": "function_call", "call_id": "1", "name": "x", "arguments": "{}"}],
        [{"type": "function_call_output", "call_id": "1", "output": "x"}],
    ],
    "instructions": ["", "x"],
    "max_output_tokens": [1, 5],
    "reasoning": [{}, {"effort": "low"}],
    "text": [{"format": {"type": "json_object"}}],
    "tool_choice": ["none", "auto", "required", {"type": "function", "name": "x"}],
    "tools": [[], [{"type": "function", "name": "x"}]],
}
BOTH = {"cache_salt", "seed", "stream", "structured_outputs", "temperature", "top_k"}


@pytest.mark.parametrize(
    ("path", "choices"),
    [
        (TEXT, TOGETHER | OF_TEXTS),
        (CHAT, TOGETHER | OF_CHATS),
        (RESPONSES, {each: TOGETHER[each] for each in BOTH} | OF_RESPONSES),
    ],
)
def test_no_values_together_are_an_error_of_the_server(
    client: Client, other: Client, path: str, choices: dict[str, list[Any]]
) -> None:
    draw, found = random.Random(3), {}
    for _ in range(200):
        fields = draw.sample(sorted(choices), draw.randint(2, 7))
        body = USUAL[path] | {each: draw.choice(choices[each]) for each in fields}
        status, told = client.ask(path, body)
        # 422: a constraint of which other fields leave nothing.
        if status not in (200, 400, 422) or b"failed" in told:
            found[json.dumps(body)] = (status, told[-200:])
    assert found == {}


def test_a_prompt_of_several_steps_with_a_seed(client: Client, other: Client) -> None:
    """A generator of a processor has no place to be set back to."""
    long = {"prompt": [[5] * 250] * 3, "temperature": 1, "seed": 1, "max_tokens": 4}
    assert client.ask(TEXT, USUAL[TEXT] | long)[0] == 200


def test_paths_that_are_not_named_are_closed(client: Client, vllm: dict[str, Any]) -> None:
    """Whatever vLLM's server has."""
    answered = {"/v1/models", "/health", "/version", "/metrics", *USUAL}
    for path in vllm["paths"]:
        for method in ("GET", "POST"):
            status, told = client.ask(path, "{}" if method == "POST" else None, method)
            assert (status == 404) == (path not in answered), (method, path, status)
            if status == 404:
                assert json.loads(told)["error"]["type"] == "not_found_error"


CONSTRAINTS: list[tuple[dict[str, Any], int]] = [
    ({"choice": ["yes", "no"]}, 200),
    ({"json": {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}}, 200),
    ({"json": {"$defs": {"n": {"properties": {"c": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}}, 200),
    ({"json": {"type": "string", "maxLength": 10**9}}, 200),
    ({"json": {"properties": {f"p{i}": {"type": "string"} for i in range(300)}}}, 200),
    ({"json": {"anyOf": [{"$ref": "#"}]}}, 400),
    ({"json": {"allOf": [{"anyOf": [{"const": f"{i}{j}"} for j in range(4)]} for i in range(20)]}}, 400),
    ({"json": {"type": "integer", "multipleOf": 999999937}}, 400),
    ({"regex": "[a-z]{1,5000}"}, 200),
    ({"regex": "(a{1,1000}){1,1000}"}, 200),
    ({"regex": r"\p{L}{1,100}"}, 200),
    ({"regex": "(" * 1000 + "a" + ")" * 1000}, 400),
    ({"regex": r"(a)\1"}, 400),
    ({"grammar": 'root ::= root "a" | "a"'}, 200),
    ({"grammar": "root ::= ((("}, 400),
    ({"grammar": "root ::= nothere"}, 400),
    ({"grammar": 'root ::= ("a"{1,1000}){1,1000}'}, 400),
]


def test_constraints_have_the_same_answer_in_any_order(client: Client, other: Client) -> None:
    """The first that comes decides nothing for the others."""
    for order in (CONSTRAINTS, CONSTRAINTS[::-1]):
        for given, expected in order:
            status, told = client.ask(TEXT, USUAL[TEXT] | {"max_tokens": 12, "structured_outputs": given})
            assert status == expected, (given, told[:300])
    assert client.text(structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    shape = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": shape}}
    assert client.text(response_format=schema).startswith("{")


def test_a_grammar_that_grows_without_end_is_ended(client: Client, other: Client) -> None:
    grammar = 'root ::= root root root | root root | "a" | "b"'
    body = {"structured_outputs": {"grammar": grammar}, "ignore_eos": True, "max_tokens": 400}
    status, told = client.ask(TEXT, USUAL[TEXT] | body)
    assert status == 422
    assert "constraint" in json.loads(told)["error"]["message"]


def test_a_trial_ends_at_its_time_and_clients_take_turns() -> None:
    said = ran("grammar_trials.py", BASE_MODEL)
    assert (said["choice"], said["again"]) == ("", "")
    assert "takes more than" in said["endless"]
    assert said["died"] == "", "another process takes its place"
    assert said["compilations"] == [2, 2, 3]
    assert said["order"] == ["a1", "a2", "b1", "a4"]
    assert said["large"] == ""
    assert said["lengths"] == [2, 6, 2]
    assert said["ended"] == [[], ["a"], ["7"]]
    assert said["parts"] == [True] * 5, "members that a part of a schema describes"


def test_items_of_responses_are_not_compared_with_all_types() -> None:
    assert ran("response_items.py") == [True, "ResponseFunctionToolCall", True]


def test_a_token_that_the_tokenizer_does_not_know_has_no_text() -> None:
    """In vLLM it would end all clients' requests."""
    assert ran("unknown_tokens.py") == ["TypeError", [" a", "a", ""]]


def test_calls_are_found_as_without_bounds() -> None:
    said = ran("tool_calls.py")
    assert all(said["streams"].values()), said
    assert len(said["constrained"]) == 8
    assert all(each == [True] * 4 for each in said["constrained"].values()), said
    assert said["strict"]


@pytest.mark.parametrize(
    ("factor", "alpha", "why"), [(1e19, None, b"diverged"), (1.0, 1e30, b"lora_alpha is 1e+30")]
)
def test_an_adapter_with_absurd_weights_is_refused(
    running: RunningGateway, client: Client, factor: float, alpha: float | None, why: bytes
) -> None:
    adapters = running.log.parent.parent / "adapters"
    folder = adapters / f"absurd-{factor:g}"
    shutil.copytree(adapters / "one", folder)
    weights = {name: each * factor for name, each in load_file(folder / "adapter_model.safetensors").items()}
    save_file(weights, folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    config["lora_alpha"] = alpha or config["lora_alpha"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    status, told = client.ask("/v1/adapters", {"path": folder.name, "name": "absurd"})
    assert status == 400
    assert why in told, told
    assert client.ask(TEXT, USUAL[TEXT] | {"model": "absurd"})[0] == 404


def test_adapters_of_one_client_do_not_keep_those_of_another_waiting(client: Client, other: Client) -> None:
    """There are four places, and an adapter that is used without a pause keeps its own."""
    names = [f"name-{at}" for at in range(5)]
    for name in names:
        assert client.ask("/v1/adapters", {"path": "one", "name": name})[0] == 201
    stop = threading.Event()

    def go_on(name: str) -> None:
        while not stop.is_set():
            client.ask(TEXT, {"model": name, "prompt": "And", "max_tokens": 40, "ignore_eos": True})

    with ThreadPoolExecutor(8) as pool:
        hostile = [pool.submit(go_on, name) for name in 2 * names[:4]]
        status, _ = other.ask(TEXT, {"model": names[4], "prompt": "And", "max_tokens": 4})
        assert not any(each.done() for each in hostile)
        stop.set()
    assert status == 200
    for name in names:
        assert client.ask(f"/v1/adapters/{name}", method="DELETE")[0] == 200


def test_rows_that_an_adapter_spoils_end_their_sequence_alone() -> None:
    assert ran("lost_rows.py")["lost"] == [False, False, True, True, True]


def test_a_models_own_configuration_opens_no_session() -> None:
    """Its secrets may be programs. vLLM loads this package's plugin wherever both are installed."""
    found = ran("foreign_model.py")
    assert found == {"known": [False, True], "foreign": [False] * 5, "own": True, "without": False}


def test_nothing_of_the_gateway_listens_for_strangers(running: RunningGateway) -> None:
    """vLLM's process group does, on two ports that nobody named."""
    own = psutil.Process(running.process.pid)
    listening = {
        each.laddr
        for process in (own, *own.children(recursive=True))
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }
    reached = {address.port for address in listening if connecting(address) != SYN_SENT}
    assert reached == {urlsplit(running.url).port}


def test_a_client_that_hangs_up_owes_what_its_constraint_took() -> None:
    assert ran("hang_up.py") == [["1"], ["1"]]


def test_connections_and_their_headers_have_limits() -> None:
    assert ran("connection_limits.py")["known"] == {"0": 0, "1": 0}


def test_layers_with_a_window_need_no_more_than_it() -> None:
    """Else a long prompt of one client would wait for ever while another has sequences."""
    found = ran("windowed_memory.py")
    blocks, more = found["blocks"], found["more"]
    assert max(blocks) <= more[0] <= 300  # three layers of four have the window: 976 with all tokens in each
    assert all(have + need <= more[0] for have, need in zip(blocks, more, strict=True))
    assert blocks[-1] == 299 - found["free"]
    alone, beside = found["warnings"]
    assert alone == ""
    assert "holds 1.1 sequences of the whole context, and there are 2 keys" in beside


def test_clients_hear_that_the_server_ends() -> None:
    answers, hung_up = ran("server_ends.py")
    assert len(hung_up) == len(answers), "nothing is computed for any of them"
    waits, chat, response, partly = answers
    assert waits.startswith("HTTP/1.1 503 ")
    assert "Retry-After: 10" in waits
    assert json.loads(waits.partition("\r\n\r\n")[2])["error"]["message"] == "the gateway is shutting down"
    assert re.search(r"4\r\ndata\r\n\w+\r\ndata: {.*shutting down.*\n\n\r\n0\r\n\r\n$", chat)
    assert re.search(
        r"4\r\ndata\r\n\w+\r\nevent: error\ndata: {.*shutting down.*\n\n\r\n0\r\n\r\n$", response
    )
    assert partly.endswith("\r\n\r\ndata"), "a part of an answer is no whole one"


def test_nothing_is_compiled_for_a_request(running: RunningGateway, client: Client) -> None:
    """A compiler would stop every stream."""
    client.text(echo=True, logprobs=1)
    client.text(top_k=3, top_p=0.5, temperature=1.0, seed=1, min_p=0.1)
    assert not [each for each in (private(running) / "compiled").rglob("*") if each.is_file()]


def marked(fields: list[str]) -> Iterator[dict[str, Any]]:
    """Bodies with marks in each field, of the kinds that it may have."""
    tool = {"type": "function", "function": {"name": MARK, "description": MARK, "parameters": {MARK: MARK}}}
    for field in fields:
        for value in (MARK, [MARK], {MARK: MARK}, MARKED_TOKENS):
            yield {field: value}
    yield {"messages": [{"role": MARK, "content": MARK}, {"role": MARK, "content": [{"text": MARK}]}]}
    yield {"tools": [tool]}
    yield {"tools": [tool | tool["function"]], "tool_choice": "required"}
    yield {
        "instructions": MARK,
        "input": [{"role": "user", "content": [{"type": "input_text", "text": MARK}]}],
    }
    schema = {"properties": {MARK: {"const": MARK}}, "required": [MARK]}
    constraints: list[dict[str, Any]] = [{"json": schema}, {"choice": [MARK]}]
    constraints += [{"regex": f"{MARK}("}, {"regex": f"{MARK}+"}]
    constraints += [{"grammar": f"root ::= {MARK}"}, {"grammar": f'root ::= "{MARK}" root root | "x"'}]
    for constraint in constraints:
        yield {"structured_outputs": constraint, "max_tokens": 16}


def test_texts_leave_no_trace(running: RunningGateway, client: Client, vllm: dict[str, Any]) -> None:
    """In the log, files, and what other clients see, whatever field had them and whether it was taken."""
    for path, fields in vllm["fields"].items():
        for body in marked([*fields, MARK]):
            client.ask(path, USUAL[path] | body)
        client.ask(f"{path}?{MARK}={MARK}", USUAL[path])
        client.ask(path, f'{{"prompt": "{MARK}')
    client.ask(f"/{MARK}")
    client.ask("/v1/adapters", {"path": MARK})
    client.ask(f"/v1/adapters/{MARK}", method="DELETE")
    client.text(prompt=MARKED_TOKENS, echo=True, logprobs=5)
    traces = [MARK, ", ".join(map(str, MARKED_TOKENS)), *KEYS]
    told = {path: client.ask(path, method="GET")[1].decode() for path in ("/metrics", "/status.json")}
    told["the log"] = running.said
    for folder in (private(running), running.log.parent):
        told |= {str(each): each.read_bytes().decode("latin-1") for each in files(folder)}
    assert [(where, trace) for where, text in told.items() for trace in traces if trace in text] == []


def files(folder: Path) -> list[Path]:
    return [each for each in folder.rglob("*") if each.is_file()]
