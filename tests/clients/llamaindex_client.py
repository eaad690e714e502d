"""LlamaIndex's class for servers like OpenAI's against a gateway; prints what it gets as JSON.

python llamaindex_client.py URL KEY MODEL
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Literal

from asked import MESSAGES, PROMPT, SHORT, tell
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Animal(BaseModel):
    """An animal of the clinic."""

    kind: Literal["dog", "cat"]


url, key, model = sys.argv[1:]
common = {"api_base": f"{url}/v1", "api_key": key, "model": model, "temperature": 0, "context_window": 512}
common |= {"is_chat_model": True, "is_function_calling_model": True}
chat, longer = OpenAILike(**common, max_tokens=SHORT), OpenAILike(**common, max_tokens=80)
structured = OpenAILike(**common, max_tokens=80, should_use_structured_outputs=True)
messages = [ChatMessage(**each) for each in MESSAGES]
tool = FunctionTool.from_defaults(fn=lambda kind: kind, name="Animal", fn_schema=Animal)
called = longer.chat_with_tools([tool], chat_history=messages, tool_choice="Animal")
tell(
    "LlamaIndex (`llama-index-llms-openai-like`)",
    version("llama-index-llms-openai-like"),
    completion=OpenAILike(**common | {"is_chat_model": False}, max_tokens=SHORT).complete(PROMPT).text,
    chat=chat.chat(messages).message.content,
    stream="".join(part.delta for part in chat.stream_chat(messages)),
    tools=longer.get_tool_calls_from_response(called)[0].tool_kwargs,
    schema=structured.as_structured_llm(Animal).chat(messages).raw.model_dump(),
)
