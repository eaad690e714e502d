"""litellm against a gateway; prints what it gets as JSON.

python litellm_client.py URL KEY MODEL
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it downloads one

import litellm
from asked import MESSAGES, PROMPT, SAID, SHORT, TOOL, tell
from pydantic import BaseModel


class Animal(BaseModel):
    """An animal of the clinic."""

    kind: Literal["dog", "cat"]


url, key, model = sys.argv[1:]
common = {"api_base": f"{url}/v1", "api_key": key, "temperature": 0}
asked = common | {"model": f"openai/{model}", "messages": MESSAGES}
short, long = {"max_tokens": SHORT}, {"max_tokens": 80}
named = {"tool_choice": {"type": "function", "function": {"name": "Animal"}}}
said = {"instructions": MESSAGES[0]["content"], "input": SAID, "max_output_tokens": SHORT}
text = litellm.text_completion(**common, **short, model=f"text-completion-openai/{model}", prompt=PROMPT)
stream = litellm.completion(**asked, **short, stream=True)
call = litellm.completion(**asked, **long, tools=[TOOL], **named).choices[0].message.tool_calls[0]
response = litellm.responses(**common, **said, model=f"openai/{model}")
tell(
    "litellm",
    version("litellm"),
    completion=text.choices[0].text,
    chat=litellm.completion(**asked, **short).choices[0].message.content,
    stream="".join(part.choices[0].delta.content or "" for part in stream),
    tools=call.function.arguments,
    schema=litellm.completion(**asked, **long, response_format=Animal).choices[0].message.content,
    responses=response.output[0].content[0].text,
)
