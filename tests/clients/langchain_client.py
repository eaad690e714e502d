"""LangChain's classes for OpenAI against a gateway; prints what they get as JSON.

python langchain_client.py URL KEY MODEL
"""

from __future__ import annotations

import json
import sys
from typing import Literal

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Animal(BaseModel):
    """An animal of the clinic."""

    kind: Literal["dog", "cat"]


url, key, model = sys.argv[1:]
common = {"base_url": f"{url}/v1", "api_key": key, "model": model, "temperature": 0, "max_tokens": 12}
chat, completion = ChatOpenAI(**common), OpenAI(**common)
longer = ChatOpenAI(**common | {"max_tokens": 80})
question = [("system", "You keep notes."), ("human", "Biscuit, beagle, 6 y")]
print(
    json.dumps(
        {
            "chat": chat.invoke(question).content,
            "stream": "".join(part.content for part in chat.stream(question)),
            "completion": completion.invoke("And in the beginning"),
            "call": longer.bind_tools([Animal], tool_choice="Animal").invoke(question).tool_calls[0]["args"],
            "by_call": longer.with_structured_output(Animal, method="function_calling").invoke(question).kind,
            "by_schema": longer.with_structured_output(Animal, method="json_schema").invoke(question).kind,
        }
    )
)
