"""LangChain's classes for OpenAI against a gateway; prints what they get as JSON.

python langchain_client.py URL KEY MODEL
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Literal

from asked import MESSAGES, PROMPT, SHORT, tell
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Animal(BaseModel):
    """An animal of the clinic."""

    kind: Literal["dog", "cat"]


url, key, model = sys.argv[1:]
common = {"base_url": f"{url}/v1", "api_key": key, "model": model, "temperature": 0, "max_tokens": SHORT}
chat, longer = ChatOpenAI(**common), ChatOpenAI(**common | {"max_tokens": 80})
by_call = longer.with_structured_output(Animal, method="function_calling").invoke(MESSAGES)
assert isinstance(by_call, Animal)
tell(
    "LangChain (`langchain-openai`)",
    version("langchain-openai"),
    completion=OpenAI(**common).invoke(PROMPT),
    chat=chat.invoke(MESSAGES).content,
    stream="".join(part.content for part in chat.stream(MESSAGES)),
    tools=longer.bind_tools([Animal], tool_choice="Animal").invoke(MESSAGES).tool_calls[0]["args"],
    schema=longer.with_structured_output(Animal, method="json_schema").invoke(MESSAGES).model_dump(),
    responses=ChatOpenAI(**common, use_responses_api=True).invoke(MESSAGES).text,
)
