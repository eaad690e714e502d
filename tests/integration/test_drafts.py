"""Writing with a draft: the same text in fewer passes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import Knowing, guessing
from parity import add_lora
from scipy.stats import chisquare
from test_long_generation import MASK, PADDED, PLACES, PROMPT, SMALL, save
from torch import Tensor
from trainings import Letters
from transformers import LlamaConfig, LlamaForCausalLM

import tenant_sdk
from provider import serve_in_process
from shared.errors import ConfigurationError
from tenant_sdk.drafts import decoding
from tenant_sdk.drafts.decoding import Draft, DraftPace
from tenant_sdk.drafts.head import DraftHead, Guesser, Vocabulary
from tenant_sdk.drafts.length import DraftLength
from tenant_sdk.drafts.making import DraftCallbacks, make_draft
from tenant_sdk.drafts.options import DraftOptions
from tenant_sdk.drafts.repeats import LONGEST
from tenant_sdk.session.session import Session

TOKENS = 24


def written(model: Any, ids: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(7)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, **options}
    found: Tensor = model.generate(ids, max_new_tokens=TOKENS, **options)
    return found


Opened = Callable[[str], tuple[Session, Any]]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """A session with a tiny model, and the model."""
    sessions: dict[str, tuple[Session, Any]] = {}

    def get(name: str) -> tuple[Session, Any]:
        if name not in sessions:
            folder = tmp_path_factory.mktemp(name)
            save(name, folder)
            session = tenant_sdk.connect(serve_in_process(folder, numerics="float32"), privacy="plain")
            model = session.load_model(progress=False)
            model.generation_config.eos_token_id = None  # it would end texts at any time
            sessions[name] = session, model
        return sessions[name]

    yield get
    for session, _ in sessions.values():
        session.close()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "mistral", "gemma2", "gemma3", "lfm2"])
def test_greedy_text_is_the_same(name: str, place: str, opened: Opened) -> None:
    session, model = opened(name)
    options = session.generate_options(model, **PLACES[place], memory_gib=SMALL)
    expected = written(model, PROMPT)
    draft = Knowing(model, expected, PROMPT.shape[1] + 1)
    assert torch.equal(written(model, PROMPT, custom_generate=draft, **options), expected)
    assert draft.tokens > 2.5 * draft.passes
    options = session.generate_options(model, **PLACES[place])
    assert torch.equal(written(model, PROMPT, custom_generate=guessing(model), **options), expected)


@pytest.mark.parametrize("name", ["jamba", "qwen3.5", "falcon_h1"])
def test_models_with_a_state_are_refused(name: str, opened: Opened, tmp_path: Path) -> None:
    """No pass takes a wrong guess out of a recurrent state again."""
    session, model = opened(name)
    before = session.stats.requests
    with pytest.raises(ConfigurationError, match=r"recurrent state.*leave out the draft"):
        written(model, PROMPT[:, :40], custom_generate=guessing(model))
    text = tmp_path / "text.txt"
    text.write_text("In the beginning\n" * 50)
    with pytest.raises(ConfigurationError, match="recurrent state"):
        make_draft(DraftOptions(tmp_path / "draft", data=[text]), model, Letters(), session, DraftCallbacks())
    assert session.stats.requests == before


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"stop_strings": None, "eos_token_id": list(range(3, 40))},
        {"output_scores": True, "output_logits": True, "return_dict_in_generate": True},
    ],
)
def test_several_sequences_with_padding(options: dict[str, Any], opened: Opened) -> None:
    _, model = opened("llama")
    got, expected = (
        written(model, PADDED, attention_mask=MASK, **options, **how)
        for how in ({"custom_generate": guessing(model)}, {})
    )
    if isinstance(expected, Tensor):
        assert torch.equal(got, expected)
        return
    assert torch.equal(got.sequences, expected.sequences)
    for mine, theirs in ((got.scores, expected.scores), (got.logits, expected.logits)):
        # Several rows at once: the sums of float32 products have other last bits.
        torch.testing.assert_close(torch.stack(mine), torch.stack(theirs), rtol=1e-4, atol=1e-4)


def test_a_context_without_room_for_guesses(opened: Opened) -> None:
    """GPT-2 has no positions behind the last one."""
    _, model = opened("gpt2")
    ids = PROMPT.repeat(1, 4)[:, : 2048 - TOKENS]
    assert torch.equal(written(model, ids, custom_generate=guessing(model)), written(model, ids))


def test_with_an_adapter(opened: Opened) -> None:
    _, model = opened("qwen2")
    adapted = add_lora(model)
    try:
        got = written(adapted, PROMPT, custom_generate=guessing(model))
        assert torch.equal(got, written(adapted, PROMPT))
    finally:
        adapted.unload()


def small() -> Any:
    torch.manual_seed(2)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=4,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def favour_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong sampler: the first guess is four times as likely as the model says."""
    accept = decoding._GeneratedText.accept

    def wrong(self: Any, logits: Tensor, guesses: Tensor | None) -> int:
        if guesses is not None and guesses.shape[1]:
            logits[:, 0].scatter_add_(1, guesses[:, :1], torch.full((len(logits), 1), math.log(4)))
        return accept(self, logits, guesses)

    monkeypatch.setattr(decoding._GeneratedText, "accept", wrong)


@pytest.mark.parametrize("right", [True, False])
def test_sampled_text_has_the_models_distribution(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All texts of four tokens: how often each is written, against the model's probabilities."""
    if not right:
        favour_guesses(monkeypatch)
    model, ids, count = small(), torch.tensor([[1, 2]]), 600
    head = DraftHead(16, 16)
    guesser = Guesser(head, Vocabulary.of(model, torch.arange(4)), (0.3,) * LONGEST)
    draft = Draft(guesser, DraftLength((0.5,) * 3, 3, 3))
    texts = torch.tensor(list(product(range(4), repeat=4)))
    with torch.no_grad():
        logits = model(torch.cat([ids.expand(len(texts), -1), texts], 1)).logits[:, 1:-1]
    each = logits.double().log_softmax(-1).gather(2, texts[..., None]).sum(1).exp().squeeze(-1)
    found = Counter[tuple[int, ...]]()
    for seed in range(count):
        torch.manual_seed(seed)
        got = model.generate(
            ids, custom_generate=draft, do_sample=True, top_k=0, max_new_tokens=4, pad_token_id=0
        )
        found[tuple(got[0, 2:].tolist())] += 1
    # Texts that are expected less than five times count as one.
    often = each * count >= 5
    observed = torch.tensor([found[tuple(text)] for text in texts.tolist()], dtype=torch.double)
    rest = [observed[~often].sum(), each[~often].sum() * count]
    seen = [*observed[often].tolist(), float(rest[0])]
    wanted = [*(each[often] * count).tolist(), float(rest[1])]
    likely = chisquare(seen, wanted).pvalue
    assert draft.tokens > 1.2 * draft.passes
    if right:
        assert likely > 1e-4
    else:
        assert likely < 1e-6


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_beams": 2}, "beams"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "hidden states"),
    ],
)
def test_other_ways_of_writing_are_refused(options: dict[str, Any], said: str, opened: Opened) -> None:
    _, model = opened("llama")
    with pytest.raises(ConfigurationError, match=said):
        written(model, PROMPT, custom_generate=guessing(model), **options)


def test_a_pace_hides_how_many_passes_a_text_needs(opened: Opened) -> None:
    """Passes begin at equal distances, and their number is a multiple; the text is the same."""
    session, model = opened("llama")
    now, begun = [0.0], list[float]()

    def clock() -> float:
        now[0] += 0.01  # what is computed takes time
        return now[0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        begun.append(now[0])

    draft = guessing(model, 2, pace=DraftPace(1.0, 16), clock=clock, sleep=sleep)
    guess, guessed = draft._guess, list[Tensor]()
    draft._guess = lambda *of: guessed.append(guess(*of)) or guessed[-1]  # type: ignore[method-assign, func-returns-value]
    before = session.stats.requests
    expected = written(model, PROMPT, custom_generate=guessing(model))
    needed = session.stats.requests - before
    for ids in (PROMPT, PROMPT[:, :40]):
        begun.clear()
        guessed.clear()
        passes, before = draft.passes, session.stats.requests
        options = session.generate_options(model)
        got = written(model, ids, custom_generate=draft, **options)
        assert torch.equal(got, expected if ids is PROMPT else written(model, ids))
        assert draft.passes - passes == len(guessed) == 32  # guesses take time that shows
        assert session.stats.requests - before >= needed
        apart = torch.tensor(begun).diff()
        assert torch.allclose(apart, torch.ones(len(apart)), atol=0.05)
    assert draft.late == 0


def test_sizes_of_paced_passes_do_not_show_where_a_text_ends(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the number of guesses is chosen, passes with and without guesses alternate."""
    _, model = opened("llama")
    now, sizes = [0.0], list[list[int]]()

    def clock() -> float:
        now[0] += 0.01
        return now[0]

    for tokens in (2, 3, 6):
        draft = guessing(model, pace=DraftPace(1.0, 16), clock=clock, sleep=lambda _: None)
        draft._length = DraftLength((0.5,) * 4, 4)
        seen, guess = list[int](), draft._guess
        monkeypatch.setattr(
            draft, "_guess", lambda s, i, n, seen=seen, guess=guess: seen.append(n) or guess(s, i, n)
        )
        options = {"max_new_tokens": tokens, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
        model.generate(PROMPT, custom_generate=draft, attention_mask=torch.ones_like(PROMPT), **options)
        sizes.append(seen)
    assert [len(each) for each in sizes] == [16] * 3
    assert sizes[0][:6] == sizes[1][:6] == sizes[2][:6]
    assert {0, 4} == {*sizes[0][:6]}


def test_passes_that_are_slower_than_the_pace_are_counted(opened: Opened) -> None:
    _, model = opened("llama")
    now = [0.0]

    def clock() -> float:
        now[0] += 5.0
        return now[0]

    draft = guessing(model, pace=DraftPace(1.0, 4), clock=clock)
    written(model, PROMPT, custom_generate=draft)
    assert draft.late >= draft.passes - 1
    assert "later than the pace" in str(draft)
