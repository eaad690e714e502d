"""A gateway, its provider and its mask source as processes, with the clients that people have."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import openai
import peft
import pytest
from conftest import Executor, executor_processes
from gateways import (
    NUMERICS,
    PROMPTS,
    RunningGateway,
    chat_model,
    complete,
    gateway,
    local,
    metric,
    needed,
    ran,
    write_adapter,
)
from raw_peers import eventually
from transformers import AutoTokenizer

from shared.launching import free_port

pytestmark = needed

KEY = "a-key-that-is-nobody-s"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = chat_model(tmp_path_factory.mktemp("models") / "base")
    # How to sample is no model's matter: an answer is as OpenAI's without these.
    own = json.loads((folder / "generation_config.json").read_text())
    own |= {"do_sample": True, "temperature": 0.3, "top_p": 0.5}
    (folder / "generation_config.json").write_text(json.dumps(own))
    return folder


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``one`` and ``two`` in the folder that is watched, ``three`` beside it."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, place in enumerate(("watched/one", "watched/two", "three")):
        write_adapter(model, folder / place, seed)
    return folder


Start = Callable[..., Executor]


@pytest.fixture(scope="module")
def start(
    tls_dir: Path, token_file: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Start]:
    with executor_processes(tls_dir, token_file, tmp_path_factory.mktemp("executors")) as begin:
        yield begin


@pytest.fixture(scope="module")
def masks(start: Start, model: Path) -> Executor:
    return start(model, "--numerics", NUMERICS)


@pytest.fixture(scope="module")
def ports() -> tuple[str, ...]:
    """Options of the provider, which is found there again after it ended."""
    return "--port", str(free_port()), "--admin-port", str(free_port())


@pytest.fixture(scope="module")
def provider(start: Start, model: Path, ports: tuple[str, ...]) -> Executor:
    return start(model, "--numerics", NUMERICS, *ports)


@pytest.fixture(scope="module")
def running(
    provider: Executor, masks: Executor, adapters: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    options = ("--adapters", adapters / "watched", "--max-sequences", 8, "--max-waiting", 8, "--patience", 1)
    options += ("--max-adapters", 2)  # so that no memory for one is left over for rows without
    folder = tmp_path_factory.mktemp("gateway")
    with gateway(provider, masks, folder, *options, "--api-key-env", "KEYS", KEYS=f"other-{KEY} {KEY}") as it:
        assert metric(provider, "symbiosis_rows_total") == 0  # nothing is sent at the start
        yield it
        # An engine that dies ends the gateway, with a status that has it started again.
        engine = subprocess.check_output(["pgrep", "-P", str(it.process.pid), "-f", "EngineCore"])
        os.kill(int(engine), signal.SIGKILL)
        assert it.process.wait(800) == 1
        assert "vLLM's engine ended by itself" in it.said


@pytest.fixture(scope="module")
def client(running: RunningGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key=KEY, max_retries=0, timeout=800) as opened:
        yield opened


def get(running: RunningGateway, path: str) -> Any:
    request = urllib.request.Request(running.url + path, headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=800) as answer:
        text = answer.read().decode()
    return text if path == "/metrics" else json.loads(text)


def asked(running: RunningGateway, method: str, where: str, **body: str) -> tuple[int, dict[str, Any]]:
    """Status and content of an answer."""
    with closing(http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=800)) as connection:
        connection.request(method, where, json.dumps(body), {"Authorization": f"Bearer {KEY}"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def refused(url: str, key: str = "") -> int:
    """The status of a refusal."""
    try:
        urllib.request.urlopen(
            urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"}), timeout=800
        )
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    raise AssertionError(f"{url} was answered")


def likelihoods(client: openai.OpenAI, name: str) -> list[float | None]:
    """Of the tokens of a prompt."""
    answer = client.completions.create(model=name, prompt=PROMPTS[0], max_tokens=1, logprobs=1, echo=True)
    assert answer.choices[0].logprobs is not None
    found = answer.choices[0].logprobs.token_logprobs
    assert found is not None
    return found[1:-1]


def test_greedy_tokens_are_those_of_transformers(client: openai.OpenAI, model: Path, adapters: Path) -> None:
    """Of the base and of two adapters, together in one batch."""
    models = {"base": local(model)}
    for name in ("one", "two"):
        models[name] = peft.PeftModel.from_pretrained(local(model), str(adapters / "watched" / name))
    words = AutoTokenizer.from_pretrained(model)
    asked = [(name, prompt) for name in models for prompt in PROMPTS[:2]]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda each: complete(client, *each), asked))
    for (name, prompt), answer in zip(asked, answers, strict=True):
        ids = words(prompt, return_tensors="pt")
        whole = models[name].generate(**ids, max_new_tokens=16, do_sample=False)[0]
        expected = words.decode(whole[ids["input_ids"].shape[1] :], skip_special_tokens=True)
        assert answer == expected, name
    assert len({answers[0], answers[2], answers[4]}) == 3


def test_rows_of_many_sequences_are_one_request(
    client: openai.OpenAI, running: RunningGateway, provider: Executor
) -> None:
    before = Status(running)
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(
                lambda prompt: complete(client, "one", prompt, 24, extra_body={"ignore_eos": True}), PROMPTS
            )
        )
    eventually(lambda: Status(running).sequences >= before.sequences + 90)
    now = Status(running)
    assert (now.sequences - before.sequences) / (now.steps - before.steps) > 2
    assert metric(provider, "symbiosis_rows_total") > 0


class Status:
    """The worker's counters."""

    def __init__(self, running: RunningGateway) -> None:
        text = get(running, "/metrics")
        self.sequences, self.steps, self.failed_steps = (
            float(re.search(rf"(?m)^symbiosis_gateway_{name}_total (\S+)$", text)[1])  # type: ignore[index]
            for name in ("sequences", "steps", "failed_steps")
        )


def test_what_the_interface_has(client: openai.OpenAI) -> None:
    assert [each.id for each in client.models.list()][:3] == ["base", "one", "two"]
    answer = client.completions.create(
        model="base", prompt=PROMPTS[1], max_tokens=8, n=2, seed=5, temperature=1.0, logprobs=2, echo=True
    )
    first, second = answer.choices
    assert first.text.startswith(PROMPTS[1])
    assert first.text != second.text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert first.logprobs is not None
    assert first.logprobs.token_logprobs is not None
    assert first.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in first.logprobs.token_logprobs[1:] if value is not None)
    again = client.completions.create(
        model="base", prompt=PROMPTS[1], max_tokens=8, n=2, seed=5, temperature=1.0, echo=True
    )
    assert [each.text for each in again.choices] == [first.text, second.text]
    plain = complete(client, "base", PROMPTS[1])
    word = plain.split()[1]
    assert complete(client, "base", PROMPTS[1], stop=[word]) == plain[: plain.index(word)]
    token = client.completions.create(
        model="base", prompt=PROMPTS[1], max_tokens=3, temperature=0, logit_bias={"40": 100}
    )
    assert len(set(token.choices[0].text.strip().split()) | {""}) <= 4


def test_a_streaming_chat(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Biscuit, beagle, 6 y"}]
    options: Any = {"model": "two", "messages": messages, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options)
    parts = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    assert len(parts) > 5
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == 12


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Find an animal.",
        "parameters": {
            "type": "object",
            "properties": {"kind": {"type": "string", "enum": ["dog", "cat"]}},
            "required": ["kind"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>{"name": "look_up", "arguments": {"kind": "dog"}}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "function": {"name": "look_up"}}]
)
def test_tools(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    """The small model would choose no tool by itself, so that its answer is given if it may choose."""
    options: Any = {
        "model": "one",
        "messages": [{"role": "user", "content": "Which?"}],
        "tools": [TOOL],
        "tool_choice": choice,
        "max_tokens": 100,
        "temperature": 0,
        "stream": stream,
    }
    if choice == "auto":
        options["extra_body"] = {"structured_outputs": {"choice": [CALL]}}
    if choice == "required":
        options["parallel_tool_calls"] = False
    answer = client.chat.completions.create(**options)
    if not stream:
        (call,) = answer.choices[0].message.tool_calls
        name, arguments = call.function.name, call.function.arguments
        assert not answer.choices[0].message.content
    else:
        deltas = [each.choices[0].delta for each in answer if each.choices]
        parts = [call.function for each in deltas for call in each.tool_calls or []]
        name = "".join(part.name or "" for part in parts)
        arguments = "".join(part.arguments or "" for part in parts)
        assert not "".join(each.content or "" for each in deltas)
    assert name == "look_up"
    assert json.loads(arguments)["kind"] in ("dog", "cat")


def streamed(events: Any, kind: str) -> str:
    """What the events of a response's stream add up to."""
    return "".join(each.delta for each in events if each.type == f"response.{kind}.delta")


def test_responses(client: openai.OpenAI) -> None:
    """The same as chats, in other words; nothing is kept, and nothing is the model's own but its text."""
    options: Any = {"model": "two", "temperature": 0, "max_output_tokens": 12}
    said: Any = [
        {"role": "user", "content": "Biscuit, beagle, 6 y"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Noted."}]},
        {"type": "function_call", "call_id": "1", "name": "look_up", "arguments": '{"kind": "dog"}'},
        {"type": "function_call_output", "call_id": "1", "output": "Boaz"},
    ]
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"kind": "dog"}'}}
    messages: Any = [
        {"role": "system", "content": "You keep notes."},
        said[0],
        {"role": "assistant", "content": "Noted.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Boaz"},
    ]
    chat = client.chat.completions.create(model="two", temperature=0, max_tokens=12, messages=messages)
    whole = client.responses.create(**options, instructions="You keep notes.", input=said)
    assert whole.output_text == chat.choices[0].message.content != ""
    assert whole.status == "incomplete"
    assert chat.usage is not None
    assert whole.usage is not None
    counts = (whole.usage.input_tokens, whole.usage.output_tokens)
    assert counts == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    stream = list(client.responses.create(**options, instructions="You keep notes.", input=said, stream=True))
    assert streamed(stream, "output_text") == whole.output_text
    assert stream[-1].type == "response.completed"
    assert stream[-1].response.output_text == whole.output_text
    # As OpenAI's, whatever the model's files say.
    plain = client.responses.create(model="base", input="And", max_output_tokens=2)
    assert (plain.temperature, plain.top_p) == (1.0, 1.0)
    for kept in ({"store": True}, {"previous_response_id": whole.id}, {"background": True}):
        with pytest.raises(openai.BadRequestError, match="keeps neither answers nor other texts"):
            client.responses.create(**options, input="x", **kept)
    with pytest.raises(openai.NotFoundError, match="keeps no answers"):
        client.responses.retrieve(whole.id)


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "look_up"}])
def test_tools_and_schemas_of_responses(client: openai.OpenAI, choice: Any) -> None:
    tool: Any = {"type": "function", **TOOL["function"]}
    options: Any = {"model": "one", "input": "Which?", "max_output_tokens": 100, "temperature": 0}
    called = options | {"tools": [tool], "tool_choice": choice}
    if choice == "auto":
        called["extra_body"] = {"structured_outputs": {"choice": [CALL]}}
    if choice == "required":
        called["parallel_tool_calls"] = False
    (call,) = client.responses.create(**called).output
    assert (call.type, call.name) == ("function_call", "look_up")
    assert json.loads(call.arguments)["kind"] in ("dog", "cat")
    events = client.responses.create(**called, stream=True)
    assert json.loads(streamed(events, "function_call_arguments")) == json.loads(call.arguments)
    form = {"type": "json_schema", "name": "animal", "schema": TOOL["function"]["parameters"]}
    answer = client.responses.create(**options, text={"format": form})
    assert json.loads(answer.output_text)["kind"] in ("dog", "cat")


def test_models_are_named(client: openai.OpenAI) -> None:
    assert client.models.retrieve("one").id == "one"
    for ask in (
        lambda: client.models.retrieve("three/four"),
        lambda: complete(client, "three/four", "x"),
    ):
        with pytest.raises(openai.NotFoundError) as error:
            ask()
        assert "three/four is not served: the models here are base, one, two" in error.value.message
    with pytest.raises(openai.NotFoundError) as error:
        client.embeddings.create(model="base", input="x")
    assert "vLLM makes embeddings with others" in error.value.message


def test_lm_eval(running: RunningGateway, model: Path, tmp_path: Path) -> None:
    told = ran("lm_eval_client.py", running.url, KEY, model, tmp_path)
    assert len(told["gateway"]) == 8
    assert told["gateway"] == pytest.approx(told["transformers"], abs=1e-3)


def test_products_of_adapters_are_made_once() -> None:
    assert ran("segmented_lora.py") == {"steps": 5}


def test_langchain(running: RunningGateway, client: openai.OpenAI) -> None:
    told = ran("langchain_client.py", running.url, KEY, "one")["answers"]
    assert told["chat"] == told["stream"] == told["responses"] != ""
    assert told["completion"] == complete(client, "one", "And in the beginning", 16)
    assert {told["tools"]["kind"], told["schema"]["kind"]} <= {"dog", "cat"}


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/completions", "/v1/adapters", "/status.json", "/metrics"]
)
def test_without_a_key(running: RunningGateway, path: str) -> None:
    assert refused(running.url + path) == 401


def test_other_paths_are_not_there(client: openai.OpenAI, running: RunningGateway) -> None:
    for path in (
        "/docs",
        "/v1/responses/resp_1",
        "/inference/v1/abort_requests",
        "/v1/load_lora_adapter",
        "/invocations",
    ):
        assert refused(running.url + path, KEY) == 404


def test_no_page_of_elsewhere_can_read(running: RunningGateway) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "Origin": "https://elsewhere.example"}
    request = urllib.request.Request(f"{running.url}/v1/models", headers=headers)
    with urllib.request.urlopen(request, timeout=800) as answer:
        assert answer.headers["access-control-allow-origin"] is None


def test_who_hangs_up_frees_the_sequence(client: openai.OpenAI, running: RunningGateway) -> None:
    def told(name: str) -> float:
        found = re.search(rf"(?m)^vllm:{name}{{.*}} (\S+)$", get(running, "/metrics"))
        assert found is not None
        return float(found[1])

    before = told("generation_tokens_total")
    stream = client.completions.create(
        model="base", prompt="And", max_tokens=480, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()

    eventually(lambda: told("num_requests_running") == 0)
    assert told("generation_tokens_total") - before < 480
    assert get(running, "/status.json")["samples"]


def test_a_full_queue(client: openai.OpenAI) -> None:
    """As many as are computed and wait; the others are told when to come back."""

    def ask(_: int) -> str:
        try:
            return complete(client, "base", "And in the beginning", 40)
        except openai.RateLimitError as error:
            return f"429 {error.response.headers['retry-after']}"

    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(ask, range(24)))
    refused = [answer for answer in answers if answer.startswith("429")]
    assert 1 <= len(refused) <= 12  # four of sixteen places are the other key's
    assert all(int(answer.split()[1]) >= 1 for answer in refused)
    assert len({answer for answer in answers if not answer.startswith("429")}) == 1


def test_adapters_come_and_go_under_load(
    client: openai.OpenAI, running: RunningGateway, model: Path, adapters: Path, tmp_path: Path
) -> None:
    watched, stop, errors, answers = adapters / "watched", threading.Event(), list[str](), list[str]()

    def load(name: str) -> None:
        while not stop.is_set():
            try:
                answers.append(complete(client, name, "And in the beginning", 8))
            except openai.APIError as error:
                errors.append(str(error))

    def names() -> list[str]:
        return [each["id"] for each in get(running, "/v1/adapters")["data"]]

    with ThreadPoolExecutor(3) as pool:
        for name in ("base", "one", "two"):
            pool.submit(load, name)
        try:
            shutil.copytree(adapters / "three", tmp_path / "three")
            (tmp_path / "three").rename(watched / "three")
            eventually(lambda: "three" in names())
            assert asked(running, "POST", "/v1/adapters", path="three", name="other-name")[0] == 201
            said = likelihoods(client, "three")
            write_adapter(model, tmp_path / "other", seed=7)
            shutil.rmtree(watched / "three")
            (tmp_path / "other").rename(watched / "three")
            for name in ("three", "other-name"):
                eventually(lambda name=name: likelihoods(client, name) != pytest.approx(said, abs=1e-2))
            shutil.rmtree(watched / "three")
            eventually(lambda: not {"three", "other-name"} & {*names()})
            with pytest.raises(openai.NotFoundError):
                complete(client, "three", "And")
        finally:
            stop.set()
    assert not errors
    assert len(answers) > 5


def test_adapters_by_request(client: openai.OpenAI, running: RunningGateway, adapters: Path) -> None:
    ask = partial(asked, running)
    said = complete(client, "one", "And", 8)
    assert ask("POST", "/v1/adapters", path="one", name="also")[0] == 201
    assert complete(client, "also", "And", 8) == said
    # Three versions of one name are at work in a step, beside the base model.
    began = []
    for folder, name in (("", "base"), ("two", "also"), ("one", "also"), ("two", "also")):
        if folder:
            assert ask("POST", "/v1/adapters", path=folder, name=name)[0] == 201
        began.append(
            client.completions.create(
                model=name,
                prompt="And",
                max_tokens=40,
                stream=True,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
        )
        next(began[-1])
    texts = ["".join(each.choices[0].text for each in stream) for stream in began]
    assert texts[1] == texts[3] != texts[2]
    assert ask("POST", "/v1/adapters", path="a/" * 1000)[0] == 400
    assert ask("DELETE", "/v1/adapters/also") == (200, {"id": "also", "deleted": True})
    assert ask("DELETE", "/v1/adapters/also")[0] == 404
    # One content has one place in memory, which stays as long as one of its names.
    assert ask("POST", "/v1/adapters", path="one", name="again")[0] == 201
    assert ask("DELETE", "/v1/adapters/again")[0] == 200
    assert complete(client, "one", "And", 8) == said
    status, told = ask("POST", "/v1/adapters", path="../three")
    assert status == 400
    assert "from below" in told["error"]["message"]
    assert ask("POST", "/v1/adapters", nonsense="x")[0] == 400
    assert ask("POST", "/v1/adapters", path="one", name="base")[0] == 400
    assert "another folder" in ask("POST", "/v1/adapters", path="one", name="two")[1]["error"]["message"]
    assert ask("POST", "/v1/adapters", path=".two")[0] == 400


def test_the_log_has_no_texts(client: openai.OpenAI, running: RunningGateway) -> None:
    complete(client, "base", "Quite a secret sentence of mine", 4)
    assert "secret sentence" not in running.said
    assert KEY not in running.said


def test_the_provider_dies_and_comes_back(
    client: openai.OpenAI,
    running: RunningGateway,
    provider: Executor,
    start: Start,
    model: Path,
    ports: tuple[str, ...],
) -> None:
    """Clients see 503, in streams an error, and then answers."""
    said = complete(client, "one", "And in the beginning")
    found, waits, stop = list[int](), list[int](), threading.Event()
    streamed, responded = list[str](), list[str]()

    def load() -> None:
        while not stop.is_set():
            try:
                found.append(200 if complete(client, "one", "And in the beginning") == said else 0)
            except openai.APIStatusError as error:
                found.append(error.status_code)
                waits.append(int(error.response.headers["retry-after"]))

    def stream() -> None:
        try:
            options: Any = {"stream": True, "extra_body": {"ignore_eos": True}}
            for _ in client.completions.create(model="two", prompt="And", max_tokens=480, **options):
                continue
            streamed.append("ended")
        except openai.APIError as error:
            streamed.append(str(error))

    def respond() -> None:
        while not stop.is_set() and not responded:
            try:
                for _ in client.responses.create(model="two", input="And", stream=True):
                    continue
            except openai.APIError as error:
                responded.append(str(error))

    with ThreadPoolExecutor(4) as pool:
        try:
            for task in (load, load, stream, respond):
                pool.submit(task)
            eventually(lambda: 200 in found)  # the load runs
            assert provider.process is not None
            provider.process.kill()
            eventually(lambda: 503 in found)
            assert refused(f"{running.url}/healthz") == 503
            assert get(running, "/status.json")["failing"]
            again = start(model, "--numerics", NUMERICS, *ports)
            failed = len(found)
            eventually(lambda: 200 in found[failed:])
        finally:
            stop.set()
    assert set(found) == {200, 503}
    assert min(waits) >= 1
    assert streamed
    assert "Internal server error" not in streamed[0]
    assert responded
    assert not re.search("Internal server error|its log says why", responded[0])
    assert complete(client, "one", "And in the beginning") == said
    eventually(lambda: get(running, "/healthz") == {"status": "ok"})
    assert again.process is not None
    failed_steps = Status(running).failed_steps
    again.process.kill()

    def status_of(_: int) -> int:
        with pytest.raises(openai.APIStatusError) as refusal:
            complete(client, "one", "And in the beginning")
        return int(refusal.value.status_code)

    with ThreadPoolExecutor(6) as pool:  # the first step has one of them, and the others wait for it
        assert set(pool.map(status_of, range(6))) == {503}
    # They all end with that step: none of them retries for as long again.
    assert Status(running).failed_steps == failed_steps + 1
    # vLLM's next step computes nothing, which says nothing of the provider. Its engine loads adapters between
    # steps, so that step is over when the second is loaded.
    for name in ("also", "more"):
        assert asked(running, "POST", "/v1/adapters", path="one", name=name)[0] == 201
    assert refused(f"{running.url}/healthz") == 503
    for name in ("also", "more"):
        assert asked(running, "DELETE", f"/v1/adapters/{name}")[0] == 200
    start(model, "--numerics", NUMERICS, *ports)  # for the tests to come

    def answered() -> bool:
        with contextlib.suppress(openai.APIStatusError):
            return complete(client, "one", "And in the beginning") == said
        return False

    eventually(answered)
    eventually(lambda: get(running, "/healthz") == {"status": "ok"})
