"""Clients that people have against a gateway; a table of what they used is in docs/how-to/gateway.md."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT
from conftest import executor_processes
from gateways import PYTHON, RunningGateway, chat_model, gateway, needed, ran

CLIENTS = Path(os.environ.get("SYMBIOSIS_CLIENTS_PYTHON", ROOT / ".venv-clients" / "bin" / "python"))
pytestmark = [
    needed,
    pytest.mark.skipif(not CLIENTS.exists(), reason="no environment with clients: `make clients` makes it"),
]
KEY = "a-key-that-is-nobody-s"
PROGRAMS = {
    "openai_client.py": PYTHON,
    "langchain_client.py": PYTHON,
    "llamaindex_client.py": CLIENTS,
    "litellm_client.py": CLIENTS,
    "llm_client.py": CLIENTS,
    "openwebui_client.py": PYTHON,
}
USED = {
    "models": "list of models",
    "completion": "completion",
    "chat": "chat",
    "stream": "stream",
    "tools": "tools",
    "schema": "JSON schema",
    "responses": "responses",
}


@pytest.fixture(scope="module")
def running(
    tls_dir: Path, token_file: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    folder = tmp_path_factory.mktemp("clients")
    model = chat_model(folder / "base")
    with executor_processes(tls_dir, token_file, folder) as start:
        provider, masks = (start(model, "--numerics", "ring") for _ in range(2))
        with gateway(provider, masks, folder / "gateway", "--api-key-env", "KEYS", KEYS=KEY) as it:
            yield it


@pytest.fixture(scope="module")
def told(running: RunningGateway, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The answers of each client, the openai client's first."""
    settings = tmp_path_factory.mktemp("settings")
    return [
        ran(
            program,
            running.url,
            KEY,
            "base",
            *([settings] if program == "llm_client.py" else []),
            python=python,
        )
        for program, python in PROGRAMS.items()
    ]


def test_clients_get_the_same(told: list[dict[str, Any]]) -> None:
    expected = told[0]["answers"]
    text = expected["chat"]
    assert text
    assert expected["models"] == ["base"]
    for each in told:
        for name, answer in each["answers"].items():
            if name in ("tools", "schema"):
                assert answer["kind"] in ("dog", "cat"), each
            else:
                assert answer == (text if name in ("stream", "responses") else expected[name]), each


def test_the_table_of_clients_says_what_they_used(told: list[dict[str, Any]]) -> None:
    """If it changed, put the printed one into the document."""
    lines = [f"| client | version | {' | '.join(USED.values())} |", "|---" * (2 + len(USED)) + "|"]
    for each in told:
        used = ("yes |" if name in each["answers"] else "|" for name in USED)
        lines.append(" ".join(["|", each["client"], "|", each["version"], "|", *used]))
    table = "\n".join(lines)
    print(table)
    assert table in (ROOT / "docs" / "how-to" / "gateway.md").read_text()
