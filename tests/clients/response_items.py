"""In the gateway's environment: whether vLLM keeps a response's items as they were read, each of one type."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI

from tenant_sdk.gateway.vllm_patches import read_responses_as_chats

read_responses_as_chats()
from vllm.entrypoints.openai.responses.api_router import router  # noqa: E402

app = FastAPI()
app.include_router(router)
(route,) = [
    each for each in app.routes if getattr(each, "path", "") == "/v1/responses" and "POST" in each.methods
]
items: list[dict[str, Any]] = [
    {"type": "message", "role": "user", "content": "and?"},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "1"},
]
request, _ = route.body_field.validate({"model": "base", "input": items}, {}, loc=("body",))
kept = [each is given for each, given in zip(request.input, items, strict=True)]
print(json.dumps([kept[0], type(request.input[1]).__name__, kept[2]]))
