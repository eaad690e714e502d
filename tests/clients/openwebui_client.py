"""The requests that Open WebUI sends to a server like OpenAI's; prints what it gets as JSON.

Written after ``routers/openai.py``, ``routers/tasks.py`` and ``utils/middleware.py`` of the version below.

python openwebui_client.py URL KEY MODEL
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx
from asked import MESSAGES, SHORT, TOOL, tell

VERSION = "0.12.4"
TASK = """### Task:
Generate a concise title summarizing the chat history.
### Output:
JSON format: { "title": "your concise title here" }
### Chat History:
<chat_history>
USER: Biscuit, beagle, 6 y
</chat_history>"""
url, key, model = sys.argv[1:]
client = httpx.Client(
    base_url=f"{url}/v1", headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
)
# A chat has what users set for it; its built-in tools go along unless they are switched off.
asked = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": SHORT}
chat = {"stream": True, **asked, "stream_options": {"include_usage": True}}


def post(path: str, body: dict[str, Any]) -> httpx.Response:
    answer = client.post(path, content=json.dumps(body), timeout=800)
    answer.raise_for_status()
    return answer


def events(answer: httpx.Response) -> Iterator[Any]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    for line in answer.text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def text(parts: list[Any]) -> str:
    return "".join(each["choices"][0]["delta"].get("content") or "" for each in parts if each["choices"])


plain = [*events(post("/chat/completions", chat))]
assert plain[-1]["usage"]["completion_tokens"] == SHORT
# The small model would choose no tool by itself; users may set other fields of a request as well.
call = '<tool_call>{"name": "Animal", "arguments": {"kind": "dog"}}</tool_call>'
forced = {"max_tokens": 80, "tools": [TOOL], "structured_outputs": {"choice": [call]}}
called = [
    each["choices"][0]["delta"]
    for each in events(post("/chat/completions", chat | forced))
    if each["choices"]
]
calls = [part for each in called for part in each.get("tool_calls") or []]
# Titles, tags and follow-ups: a message of instructions, which is not streamed.
post("/chat/completions", asked | {"stream": False, "messages": [{"role": "user", "content": TASK}]})
# If the connection's API type is Responses.
items = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": MESSAGES[1]["content"]}]}
]
said = {"stream": True, "model": model, "temperature": 0, "input": items, "max_output_tokens": SHORT}
said |= {"instructions": MESSAGES[0]["content"]}
response = [*events(post("/responses", said))]
post("/responses", said | {"tools": [{"type": "function", **TOOL["function"]}]})
tell(
    "Open WebUI (its requests)",
    VERSION,
    models=[each["id"] for each in client.get("/models").raise_for_status().json()["data"]],
    chat=post("/chat/completions", asked | {"stream": False}).json()["choices"][0]["message"]["content"],
    stream=text(plain),
    tools="".join(each["function"].get("arguments") or "" for each in calls),
    responses="".join(each["delta"] for each in response if each["type"] == "response.output_text.delta"),
)
