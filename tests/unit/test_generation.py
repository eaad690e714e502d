"""Streaming of a continuation, and how tokens are chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Executor

from shared.errors import ConfigurationError
from tenant_sdk.tuning.data import chat_prompt, prompt_tokens
from tenant_sdk.tuning.generation import GenerationOutput, Sampling, repeats_itself, stream


class Numbers:
    """A tokenizer whose words are numbers below 128."""

    chat_template = "5 {{ messages[0].content }} 6"

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def get_chat_template(self, tools: Any = None) -> str:
        return self.chat_template

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return self.chat_template.replace("{{ messages[0].content }}", messages[0]["content"])

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(f"{int(token)} " for token in ids)


@pytest.fixture(scope="module")
def model(serve: Callable[..., Executor], checkpoint: Callable[[str], Path]) -> Iterator[Any]:
    with serve(checkpoint("llama")).connect() as session:
        loaded = session.load_model(progress=False)
        loaded.generation_config.eos_token_id = None  # random weights may end at once
        yield loaded


def goes_on(model: Any, tokenizer: Any, prompt: str, sampling: Sampling) -> GenerationOutput:
    return stream(model, tokenizer, prompt_tokens(tokenizer, prompt), sampling)


def words(capsys: pytest.CaptureFixture[str]) -> list[int]:
    return [int(word) for word in capsys.readouterr().out.split()]


def test_greedy_text_is_what_generate_gives(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    text = goes_on(model, Numbers(), "5 6 7", Sampling(max_new_tokens=9))
    ids = torch.tensor([[5, 6, 7]])
    expected = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False
    )
    assert words(capsys) == expected[0, 3:].tolist()
    assert (text.tokens, text.end) == (9, "max_new_tokens")
    assert text.seconds > 0


def test_tokens_come_one_by_one(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []
    monkeypatch.setattr("builtins.print", lambda text, **_: pieces.append(text))
    goes_on(model, Numbers(), "5 6 7", Sampling(max_new_tokens=9))
    assert sum(1 for piece in pieces if piece.strip()) >= 8


def test_sampling_depends_on_the_seed_alone(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in (1, 1, 2):
        goes_on(model, Numbers(), "5 6 7", Sampling(12, temperature=1.5, top_p=0.95, seed=seed))
        texts.append(words(capsys))
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "prompt is empty"),
        ("5 6", {"max_new_tokens": 127}, "at most 126 with max_new_tokens"),
        ("5 " * 127, {}, "at most 1 with max_new_tokens"),
        ("5 " * 128, {}, "shorten the prompt by at least 1 token, or more"),
        ("5 " * 200, {}, "shorten the prompt by at least 73 tokens"),
        ("5", {"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ("5", {"temperature": -1.0}, "temperature"),
        ("5", {"top_p": 0.0}, "top_p"),
        ("5", {"stop": ("",)}, "stop must be a text that is not empty"),
        ("5", {"stop": ("a", "b\udcff")}, "stop is not UTF-8 text: byte 0xff at character 2"),
        ("5", {"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be more than 0"),
    ],
)
def test_what_cannot_be_generated(model: Any, prompt: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        goes_on(model, Numbers(), prompt, Sampling(**options))


def test_the_models_and_the_tokenizers_end_both_end_a_text(
    model: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on(model, Numbers(), "5 6 7", Sampling(9, temperature=1.5, seed=1))
    free = words(capsys)
    assert len(set(free[:4])) == 4
    tokenizer = Numbers()
    tokenizer.eos_token_id, tokenizer.eos_token = free[3], f"{free[3]} "  # type: ignore[attr-defined]
    for of_the_model, tokens in ((None, 4), (free[1], 2), ([free[2], free[1]], 2)):
        monkeypatch.setattr(model.generation_config, "eos_token_id", of_the_model)
        text = goes_on(model, tokenizer, "5 6 7", Sampling(9, temperature=1.5, seed=1))
        assert (text.tokens, text.end) == (tokens, "the model ended its text")


def test_a_loop_ends_the_text_unless_allowed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = model.forward

    def always_nine(*args: Any, **options: Any) -> Any:
        out = forward(*args, **options)
        out.logits[..., 9] = 1e9
        return out

    monkeypatch.setattr(model, "forward", always_nine)
    text = goes_on(model, Numbers(), "5 6 7", Sampling(60))
    assert text.tokens == 32
    assert "repeated itself (allow_loops" in text.end
    assert goes_on(model, Numbers(), "5 6 7", Sampling(60, allow_loops=True)).tokens == 60


@pytest.mark.parametrize(
    ("tokens", "loop"),
    [
        ([7] * 31, False),
        ([7] * 32, True),
        ([1, 2] + [3, 4, 5] * 11, True),
        ([3, 4, 5] * 11 + [1], False),
        (list(range(40)) * 2, False),
        (list(range(40)) * 3, True),
        ([0, *range(40), 1, *range(40), 2, *range(40)], False),  # a form that is filled in
    ],
)
def test_what_is_a_loop(tokens: list[int], loop: bool) -> None:
    assert repeats_itself(tokens) is loop


def test_a_chat(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    goes_on(model, Numbers(), "5 9 6", Sampling(9))
    plain = words(capsys)
    stream(model, Numbers(), chat_prompt(Numbers(), [{"role": "user", "content": "9"}]), Sampling(9))
    assert words(capsys) == plain


def test_a_penalty_for_repetition(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    goes_on(model, Numbers(), "5 6 7", Sampling(40, repetition_penalty=1e6, allow_loops=True))
    assert len(set(words(capsys))) == 40  # each new token another one


def test_a_look_for_loops_stops_at_the_first_difference() -> None:
    """Else it would take the square of an answer's length for each token: here, an hour."""
    assert not repeats_itself(list(range(1_000_000)))
