"""What the clients of this folder ask, each in its own way, and how they tell the answers."""

from __future__ import annotations

import json
from typing import Any

PROMPT, SAID, SHORT = "And in the beginning", "Biscuit, beagle, 6 y", 16  # tokens; litellm asks for no fewer
MESSAGES: list[Any] = [{"role": "system", "content": "You keep notes."}, {"role": "user", "content": SAID}]
ANIMAL: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"type": "string", "enum": ["dog", "cat"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "Animal", "description": "An animal of the clinic.", "parameters": ANIMAL},
}


def tell(client: str, version: str, **answers: Any) -> None:
    """Print them as JSON; an animal's fields may be JSON or not."""
    for name in ("tools", "schema"):
        if isinstance(answers.get(name), str):
            answers[name] = json.loads(answers[name])
    print(json.dumps({"client": client, "version": version, "answers": answers}))
