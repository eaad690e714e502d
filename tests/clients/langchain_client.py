"""LangChain's classes for OpenAI against a gateway; prints what they get as JSON.

python langchain_client.py URL KEY MODEL
"""

from __future__ import annotations

import json
import sys

from langchain_openai import ChatOpenAI, OpenAI

url, key, model = sys.argv[1:]
common = {"base_url": f"{url}/v1", "api_key": key, "model": model, "temperature": 0, "max_tokens": 12}
chat, completion = ChatOpenAI(**common), OpenAI(**common)
question = [("system", "You keep notes."), ("human", "Biscuit, beagle, 6 y")]
print(
    json.dumps(
        {
            "chat": chat.invoke(question).content,
            "stream": "".join(part.content for part in chat.stream(question)),
            "completion": completion.invoke("And in the beginning"),
        }
    )
)
