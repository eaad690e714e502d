"""A gateway with one hostile client of each kind: how long another client waits, beside undisturbed.

    make gateway                                     # vLLM, in an environment of its own
    python benchmarks/gateway_hostile.py

Undisturbed and disturbed take turns, so that other work on the machine meets both. The clients have different
keys. Everything shares this machine's processors, the hostile clients too.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
from common import arguments, executor, save, write_model
from gateway import TOKENIZER, console, gateway, quantile, write_adapters
from rich.table import Table
from safetensors.torch import load_file, save_file

KEYS = ("the-key-of-the-plain-client", "the-key-of-the-hostile-client")
TOKENS = 8
QUIET_SECONDS = (
    3.0  # in which what hostile clients have left in flight ends, or it would count as undisturbed
)
Times = dict[str, tuple[list[float], list[float]]]
PLAIN = {"model": "base", "prompt": "And in the beginning", "temperature": 0, "ignore_eos": True}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}, called as <tool_call>...</tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
)
LONG_TEXT = {"type": "object", "properties": {"a": {"type": "string", "minLength": 500}}, "required": ["a"]}
CHAT = {
    "model": "base",
    "messages": [{"role": "user", "content": "x"}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": LONG_TEXT}}],
    "temperature": 0,
    "max_tokens": 300,
    "stream": True,
}


async def plain(client: openai.AsyncOpenAI, times: list[float]) -> None:
    """One stream of a few tokens."""
    began = time.perf_counter()
    options: Any = {"model": "base", "prompt": PLAIN["prompt"], "temperature": 0, "max_tokens": TOKENS}
    async for _ in await client.completions.create(**options, stream=True, extra_body={"ignore_eos": True}):
        continue
    times.append(time.perf_counter() - began)


class Hostile:
    """Clients with another key, or with none, that go on until they are cancelled."""

    def __init__(self, url: str, adapter: str) -> None:
        parts, self._adapter = urlsplit(url), adapter
        self._address = (parts.hostname or "", parts.port or 0)
        # Made once: this machine's processors are also those of the gateway.
        member = {"type": "object", "properties": {f"q{j}": {"type": "string"} for j in range(10)}}
        names = {f"p{i}": {"type": "string", "format": "date-time"} for i in range(490)}
        schemas: list[Any] = [
            {"properties": {f"property_{i}": member for i in range(5000)}},
            {"properties": names},
            {"anyOf": [{"properties": {f"a{i}": {}}} for i in range(490)]},
        ]
        constrained = [PLAIN | {"structured_outputs": {"json": each}, "max_tokens": 16} for each in schemas]
        self._schemas = [json.dumps(each).encode() for each in constrained]
        self._text = json.dumps({"prompt": "some words " * 700_000}).encode()
        self._tokens = json.dumps({"prompt": [1] * 2_500_000}).encode()
        many = (
            b'{"prompt": [' + b"[1]," * 2_000_000,
            b'{"prompt": "x", "response_format": [' + b"[]," * 2_500_000,
        )
        self._values = [each + b"[1]]}" for each in many]

    async def _post(self, path: str, body: Any, seconds: float = 60.0, method: str = "POST") -> None:
        """Send it, and read the answer, or leave."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS[1]}\r\n"
        head += f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        writer = None
        try:
            async with asyncio.timeout(seconds):
                reader, writer = await asyncio.open_connection(*self._address)
                writer.write(head.encode() + content)
                await reader.read()
        except (OSError, TimeoutError):
            pass  # it leaves, or is turned away
        finally:
            if writer is not None:
                writer.close()

    async def schemas(self) -> None:
        """Large ones, and as large as are taken, of clients that leave."""
        for body in self._schemas:
            await self._post("/v1/completions", body, 3.0)

    async def grammars(self) -> None:
        """That grow with every token."""
        grammar = 'root ::= root root root | root root | "a" | "b"'
        body = PLAIN | {"structured_outputs": {"grammar": grammar}, "max_tokens": 400}
        await self._post("/v1/completions", body)

    async def calls(self) -> None:
        """That must be made, of the client's own text, and of a form that is refused."""
        for more in (
            {"tool_choice": "required"},
            {"structured_outputs": {"choice": ["<tool_call>" + "[" * 1000]}},
            {"structured_outputs": {"regex": r"(\{\}; ){900}"}},
        ):
            await self._post("/v1/chat/completions", CHAT | more)

    async def tokenizing(self) -> None:
        """Bodies of 8 MB, and as large as are taken."""
        await self._post("/tokenize", self._text)
        await self._post("/tokenize", {"prompt": "some words " * 5_000})
        await self._post("/detokenize", self._tokens)

    async def adapter(self) -> None:
        """Adapters with absurd weights, added again and again."""
        await self._post("/v1/adapters", {"path": ".absurd", "name": "absurd"})
        await self._post("/v1/completions", PLAIN | {"model": "absurd", "max_tokens": 4})

    async def slow_headers(self) -> None:
        """Forty connections whose headers do not end."""
        await self._connections(40, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n", 11.0)

    async def slow_bodies(self) -> None:
        """Forty requests whose bodies do not end."""
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS[1]}\r\n"
        await self._connections(40, f'{head}Content-Length: 100000\r\n\r\n{{"prompt": "'.encode(), 31.0)

    async def many_connections(self) -> None:
        """That say nothing."""
        await self._connections(300, b"", 0.2)

    async def _connections(self, count: int, said: bytes, seconds: float) -> None:
        writers = []
        try:
            for _ in range(count):
                _, writer = await asyncio.open_connection(*self._address)
                writers.append(writer)
                writer.write(said)
            await asyncio.sleep(seconds)
        except OSError:
            pass  # turned away
        finally:
            for writer in writers:
                writer.close()

    async def log_probabilities(self) -> None:
        """Of prompts, which once had a compiler run; and as many as are taken, and more."""
        for prompts in (1, 2, 30):
            body = {"model": "base", "prompt": [[1] * 500] * prompts, "max_tokens": 1, "logprobs": 20}
            await self._post("/v1/completions", body | {"echo": True})

    async def settings(self) -> None:
        """Much of each prompt, and numbers that are long."""
        biases = {("9" * 4290 + str(at))[-4299:]: 1 for at in range(250)}
        for more in (
            {"logit_bias": biases},
            {"logit_bias": {str(at): 1 for at in range(300)}, "stop": ["x"]},
        ):
            await self._post("/v1/completions", PLAIN | {"prompt": ["a"] * 32, "max_tokens": 1} | more)

    async def figures(self) -> None:
        """Metrics and lists, without a pause."""
        for path in ("/metrics", "/status.json", "/v1/adapters", "/v1/models"):
            await self._post(path, b"", method="GET")

    async def long_answers(self) -> None:
        """As many as a key may have, each as long as may be."""
        body = PLAIN | {"prompt": [[5] * 250] * 24, "max_tokens": 250}
        await self._post("/v1/completions", body)

    async def passed(self) -> None:
        """Schemas that take long to compile, each of which has passed its trial."""
        for at in range(20):
            members = {f"p{i}": {"type": "integer", "multipleOf": 997 + 97 * at + i} for i in range(40)}
            await self._post(
                "/v1/completions",
                PLAIN | {"structured_outputs": {"json": {"properties": members}}, "max_tokens": 1},
            )

    async def left(self) -> None:
        """Schemas that take long to compile and have passed, of clients that leave at once."""
        for at in range(7):
            members = {f"p{i}": {"type": "integer", "multipleOf": 997 + 97 * at + i} for i in range(70)}
            body = PLAIN | {"structured_outputs": {"json": {"properties": members}}, "max_tokens": 1}
            await self._post("/v1/completions", body, 0.2)

    async def items(self) -> None:
        """Responses of as many messages as are taken, most of them empty."""
        messages = [{"role": "user", "content": "x" if at > 1000 else ""} for at in range(1020)]
        await self._post("/v1/responses", {"model": "base", "input": messages, "max_output_tokens": 1})

    async def too_many(self) -> None:
        """Prompts of one token, in a body that is small enough to be read by the server itself."""
        await self._post("/v1/completions", {"model": "base", "prompt": [[1]] * 15_000})

    async def strict(self) -> None:
        """Tools beside a pattern that another library would take long to read."""
        tool = {"type": "function", "function": {"name": "f", "parameters": LONG_TEXT, "strict": True}}
        pattern = {"type": "string", "pattern": "^[a-z]{0,8000}$"}
        schema = {"name": "s", "schema": {"type": "object", "properties": {"code": pattern}}}
        form = {"type": "json_schema", "json_schema": schema}
        await self._post(
            "/v1/chat/completions", CHAT | {"tools": [tool], "response_format": form, "max_tokens": 9}
        )

    async def padding(self) -> None:
        """Of a prompt, to a length that takes all memory."""
        options = {"tokenize": True, "padding": "max_length", "max_length": 2_000_000}
        await self._post("/v1/chat/completions", CHAT | {"chat_template_kwargs": options, "max_tokens": 9})

    async def repeated(self) -> None:
        """Prompts that are repeated in each of many answers, and not read."""
        body = PLAIN | {"prompt": ["\x01" * 500] * 2, "n": 32, "echo": True, "max_tokens": 1}
        text = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS[1]}\r\n"
        await self._connections(40, f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text, 5.0)

    async def long_prompts(self) -> None:
        """As many in a request as a key may have."""
        body = {"model": "base", "prompt": [[1] * 500] * 30, "max_tokens": 1}
        await self._post("/v1/completions", body)

    async def many_adapters(self) -> None:
        """One under as many names as have places, with two answers in flight for each."""
        for at in range(16):
            await self._post("/v1/adapters", {"path": self._adapter, "name": f"name-{at}"})
        bodies = [PLAIN | {"model": f"name-{at}", "max_tokens": 60} for at in range(16)]
        await asyncio.gather(*(self._post("/v1/completions", body) for body in 2 * bodies))

    async def small_values(self) -> None:
        """Bodies of 8 MB that take long to read."""
        for body in self._values:
            await self._post("/v1/completions", body)

    async def unread(self) -> None:
        """Answers that are not read, one after the other on one connection."""
        text = json.dumps({"prompt": "a " * 200, "return_token_strs": True}).encode()
        head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS[1]}\r\n"
        request = f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text
        _, writer = await asyncio.open_connection(*self._address)
        try:
            for _ in range(1000):
                writer.write(request)
                await asyncio.sleep(0.01)
        except OSError:
            pass  # it is turned away
        finally:
            writer.close()

    async def trailers(self) -> None:
        """Without an end, behind a body, and without a key."""
        _, writer = await asyncio.open_connection(*self._address)
        try:
            head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
            writer.write(head)
            while True:
                writer.write(b"x: y\r\n" * 1000)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def messages(self) -> None:
        """A small chat of many empty messages, which the template writes one by one."""
        chat = {"model": "base", "messages": [{"role": "user", "content": ""}] * 450, "max_tokens": 1}
        await self._post("/v1/chat/completions", chat)

    async def large_tools(self) -> None:
        """As large as a body may be that is read at once."""
        function = {"name": "f", "parameters": {"a": [{}] * 15_000}}
        tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "none"}
        await self._post("/v1/chat/completions", CHAT | tools | {"max_tokens": 1, "stream": False})

    async def bad_requests(self) -> None:
        """Values that do not fit, and bodies of 8 MB."""
        bodies: list[Any] = [{"top_k": 2**70}, {"kv_transfer_params": {}}, {"temperature": "x"}]
        for body in bodies:
            await self._post("/v1/completions", PLAIN | body)
        await self._post("/v1/completions", self._tokens)
        await self._post("/v1/completions", b"[" * 8_000_000)


def attack(kind: Callable[[], Awaitable[None]], count: int, begun: Any) -> None:
    """So many hostile clients of a kind, until this process is ended."""

    async def again() -> None:
        while True:
            await kind()

    async def all_of_them() -> None:
        begun.set()
        await asyncio.gather(*(again() for _ in range(count)))

    asyncio.run(all_of_them())


@contextmanager
def disturbed(kind: Callable[[], Awaitable[None]], count: int) -> Iterator[None]:
    """Hostile clients, in a process of their own, while this block lasts."""
    ways = multiprocessing.get_context("fork")
    begun = ways.Event()
    process = ways.Process(target=attack, args=(kind, count, begun), daemon=True)
    process.start()
    begun.wait()
    time.sleep(0.5)
    try:
        yield
    finally:
        process.kill()
        process.join()
        time.sleep(QUIET_SECONDS)


async def measure(hostile: Hostile, url: str, rounds: int, requests: int, words: list[str]) -> Times:
    """Seconds that the plain client's requests take, undisturbed and disturbed, for each kind."""
    found: Times = {}
    kinds: dict[str, tuple[Callable[[], Awaitable[None]], int]] = {
        "large schemas, clients that disconnect early": (hostile.schemas, 4),
        "grammars whose states grow with each token": (hostile.grammars, 2),
        "large texts to `/tokenize` and `/detokenize`": (hostile.tokenizing, 4),
        "adapters with absurd weights": (hostile.adapter, 2),
        "headers without an end": (hostile.slow_headers, 1),
        "bodies without an end": (hostile.slow_bodies, 1),
        "connections without a request": (hostile.many_connections, 1),
        "log-probabilities of prompts": (hostile.log_probabilities, 2),
        "bad requests": (hostile.bad_requests, 2),
        "long prompts": (hostile.long_prompts, 1),
        "many adapters": (hostile.many_adapters, 1),
        "bodies of millions of small values": (hostile.small_values, 2),
        "answers that are not read": (hostile.unread, 1),
        "chunked bodies with endless trailers": (hostile.trailers, 1),
        "many settings (`logit_bias`) for each prompt": (hostile.settings, 2),
        "metrics and lists, without a pause": (hostile.figures, 4),
        "long answers": (hostile.long_answers, 2),
        "slow constraints that passed their trial": (hostile.passed, 4),
        "slow constraints, clients that disconnect at once": (hostile.left, 16),
        "responses of many items": (hostile.items, 8),
        "strict tools beside a slow pattern": (hostile.strict, 4),
        "`padding` in `chat_template_kwargs`": (hostile.padding, 4),
        "`echo` in many answers that are not read": (hostile.repeated, 1),
        "tool calls, required and in the text": (hostile.calls, 8),
        "small chats of many messages": (hostile.messages, 36),
        "chats with large tools": (hostile.large_tools, 36),
        "many prompts that are refused": (hostile.too_many, 48),
    }
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key=KEYS[0], max_retries=0, timeout=120
    ) as client:

        async def some(times: list[float]) -> None:
            for _ in range(requests):
                await plain(client, times)

        await some([])
        for kind, (way, count) in kinds.items():
            if words and not any(word in kind for word in words):
                continue
            calm, loud = found.setdefault(kind, ([], []))
            for _ in range(rounds):
                await some(calm)
                with disturbed(way, count):
                    await some(loud)
            console.print(f"{kind}: {statistics.median(loud) / statistics.median(calm):.2f}")
    return found


def write_absurd(adapters: Path, name: str) -> None:
    """An adapter whose weights are finite and of no use."""
    folder = adapters / ".absurd"
    shutil.copytree(adapters / name, folder)
    weights = {key: value * 1e19 for key, value in load_file(folder / "adapter_model.safetensors").items()}
    save_file(weights, folder / "adapter_model.safetensors")


def main() -> None:
    """Measure in turn, print a table, write gateway_hostile.json."""
    parser = arguments(__doc__, rounds=4, output="out/bench")
    parser.add_argument("--requests", type=int, default=25, help="of the plain client in each half")
    parser.add_argument("--kinds", nargs="*", default=[], help="words of those to measure; none: all")
    options = parser.parse_args()
    os.environ["KEYS"] = " ".join(KEYS)
    with tempfile.TemporaryDirectory(prefix="symbiosis-bench-") as name, ExitStack() as stack:
        work = Path(name)
        model = work / "model"
        write_model(model, layers=6, width=256, heads=4, feed_forward=704, vocabulary=2048, context=512)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / file, model)
        adapter = write_adapters(model, work / "adapters")[0]
        write_absurd(work / "adapters", adapter)
        provider = stack.enter_context(executor(model, work / "provider", "--numerics", "ring"))
        masks = stack.enter_context(executor(model, work / "masks", "--numerics", "ring"))
        (work / "template").write_text(TEMPLATE)
        options_ = ("--api-key-env", "KEYS", "--chat-template", work / "template")
        url = stack.enter_context(gateway(provider, masks, work / "adapters", work, *options_))
        found = asyncio.run(
            measure(Hostile(url, adapter), url, options.rounds, options.requests, options.kinds)
        )
    table = Table(title=f"streams of {TOKENS} tokens, ms: p50, p99")
    for column in ("hostile client", "alone", "beside it", "ratio of medians", "ratio of 99th percentiles"):
        table.add_column(column)
    for kind, sides in found.items():
        quantiles = [[1e3 * quantile(side, share) for share in (0.5, 0.99)] for side in sides]
        calm, loud = quantiles
        cells = [f"{p50:.0f}, {p99:.0f}" for p50, p99 in quantiles]
        table.add_row(kind, *cells, *(f"{b / a:.2f}" for a, b in zip(calm, loud, strict=True)))
    console.print(table)
    save(options.output / "gateway_hostile.json", found)


if __name__ == "__main__":
    main()
