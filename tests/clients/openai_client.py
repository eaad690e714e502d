"""OpenAI's client against a gateway; prints what it gets as JSON.

python openai_client.py URL KEY MODEL
"""

from __future__ import annotations

import sys

import openai
from asked import ANIMAL, MESSAGES, PROMPT, SAID, SHORT, TOOL, tell

url, key, model = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
common = {"model": model, "temperature": 0}
asked = common | {"messages": MESSAGES}
short, long = {"max_tokens": SHORT}, {"max_tokens": 80}
named = {"tool_choice": {"type": "function", "function": {"name": "Animal"}}}
schema = {"type": "json_schema", "json_schema": {"name": "Animal", "schema": ANIMAL, "strict": True}}
said = {"instructions": MESSAGES[0]["content"], "input": SAID, "max_output_tokens": SHORT}
stream = client.chat.completions.create(**asked, **short, stream=True)
call = client.chat.completions.create(**asked, **long, tools=[TOOL], **named).choices[0].message.tool_calls[0]
events = [*client.responses.create(**common, **said, stream=True)]
response = client.responses.create(**common, **said)
assert (
    "".join(each.delta for each in events if each.type == "response.output_text.delta")
    == response.output_text
)
tell(
    "openai",
    openai.__version__,
    models=[each.id for each in client.models.list()],
    completion=client.completions.create(**common, **short, prompt=PROMPT).choices[0].text,
    chat=client.chat.completions.create(**asked, **short).choices[0].message.content,
    stream="".join(part.choices[0].delta.content or "" for part in stream),
    tools=call.function.arguments,
    schema=client.chat.completions.create(**asked, **long, response_format=schema).choices[0].message.content,
    responses=response.output_text,
)
