"""The command line `llm` against a gateway; prints what it gets as JSON.

python llm_client.py URL KEY MODEL FOLDER_FOR_ITS_SETTINGS
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from asked import ANIMAL, MESSAGES, PROMPT, SAID, SHORT, tell

url, key, model, folder = sys.argv[1:]
common = f"  model_name: {model}\n  api_base: {url}/v1\n  api_key_name: gateway\n"
Path(folder, "keys.json").write_text(json.dumps({"gateway": key}))
Path(folder, "extra-openai-models.yaml").write_text(
    f"- model_id: gateway\n{common}  supports_schema: true\n"
    f"- model_id: gateway-text\n{common}  completion: true\n"
)


def ask(*arguments: str, tokens: int = SHORT) -> str:
    """Its answer, without the line's end that it adds."""
    command = [sys.executable, "-m", "llm", *arguments]
    command += ["-o", "temperature", "0", "-o", "max_tokens", str(tokens)]
    environment = os.environ | {"LLM_USER_PATH": folder}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout[:-1]


chat = ("-m", "gateway", "-s", MESSAGES[0]["content"], SAID)
tell(
    "`llm`",
    version("llm"),
    completion=ask("-m", "gateway-text", "--no-stream", PROMPT),
    chat=ask(*chat, "--no-stream"),
    stream=ask(*chat),
    schema=ask(*chat, "--schema", json.dumps(ANIMAL), tokens=80),
)
