"""Streaming of a continuation, and how tokens are chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Executor

from shared.errors import ConfigurationError
from tenant_sdk.tuning.generation import Sampling, stream


class Numbers:
    """A tokenizer whose words are numbers below 128."""

    def __call__(self, text: str, verbose: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(f"{int(token)} " for token in ids)


@pytest.fixture(scope="module")
def model(serve: Callable[..., Executor], checkpoint: Callable[[str], Path]) -> Iterator[Any]:
    with serve(checkpoint("llama")).connect() as session:
        loaded = session.load_model(progress=False)
        loaded.generation_config.eos_token_id = None  # random weights may end at once
        yield loaded


def words(capsys: pytest.CaptureFixture[str]) -> list[int]:
    return [int(word) for word in capsys.readouterr().out.split()]


def test_greedy_text_is_what_generate_gives(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    count, seconds = stream(model, Numbers(), "5 6 7", Sampling(max_new_tokens=9))
    ids = torch.tensor([[5, 6, 7]])
    expected = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False
    )
    assert words(capsys) == expected[0, 3:].tolist()
    assert count == 9
    assert seconds > 0


def test_tokens_come_one_by_one(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []
    monkeypatch.setattr("builtins.print", lambda text, **_: pieces.append(text))
    stream(model, Numbers(), "5 6 7", Sampling(max_new_tokens=9))
    assert sum(1 for piece in pieces if piece.strip()) >= 8


def test_sampling_depends_on_the_seed_alone(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in (1, 1, 2):
        stream(model, Numbers(), "5 6 7", Sampling(12, temperature=1.5, top_p=0.95, seed=seed))
        texts.append(words(capsys))
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "prompt is empty"),
        ("5 6", {"max_new_tokens": 127}, "at most 126 with --max-new-tokens"),
        ("5", {"max_new_tokens": 0}, "--max-new-tokens is at least 1"),
        ("5", {"temperature": -1.0}, "--temperature"),
        ("5", {"top_p": 0.0}, "--top-p"),
    ],
)
def test_what_cannot_be_generated(model: Any, prompt: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        stream(model, Numbers(), prompt, Sampling(**options))
