"""Options of one text: ``generate`` goes on from it, and refuses another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_long_generation import MASK, PADDED, PLACES, PROMPT, SMALL, Opened, opened, tokens
from transformers import DynamicCache

from shared.compat import cache_name
from shared.errors import ConfigurationError

__all__ = ["opened"]  # the fixture

HELD = {place: options for place, options in PLACES.items() if place != "device"}
OTHER = PROMPT.flip(1)
SHORT = PROMPT[:, :9]  # for what depends on no length
REFUSED = "make new options"


def turn(ids: torch.Tensor, more: int = 300) -> torch.Tensor:
    """The next turn of a chat."""
    return torch.cat([ids, PROMPT[:, :more].expand(len(ids), -1)], 1)


@pytest.mark.parametrize("place", HELD)
@pytest.mark.parametrize("memory", [SMALL, None], ids=["chunks", "at once"])
def test_another_text_is_refused(place: str, memory: float | None, opened: Opened) -> None:
    """Longer, as long, shorter, and the same once more; then the text itself goes on as if nothing was."""
    session, model = opened("llama")
    options = session.generate_options(model, **HELD[place], memory_gib=memory)
    first = tokens(model, **options)
    before = session.stats.rows
    last_differs = first.clone()
    last_differs[0, -2] += 1  # the last token that has keys
    for other in (turn(OTHER), OTHER, OTHER[:, :99], PROMPT, first[:, :-1], turn(last_differs)):
        with pytest.raises(ConfigurationError, match=REFUSED):
            tokens(model, other, **options)
    assert session.stats.rows == before  # at once, not when the text was read
    second = tokens(model, turn(first), **options)
    assert session.stats.rows - before == 3 * 4 * (301 + 11)
    assert torch.equal(second, tokens(model, turn(first)))


@pytest.mark.parametrize("name", ["mistral", "gemma3", "jamba", "gpt2"])
def test_layers_of_other_kinds(name: str, opened: Opened) -> None:
    session, model = opened(name)
    options = session.generate_options(model, kv="host")
    first = tokens(model, **options)
    with pytest.raises(ConfigurationError, match=REFUSED):
        tokens(model, turn(OTHER), **options)
    assert torch.equal(tokens(model, turn(first), **options), tokens(model, turn(first)))


def test_how_the_text_is_given(opened: Opened) -> None:
    """By position or name, as a tensor or with more in the result, or only what is new of it."""
    session, model = opened("llama")
    options = session.generate_options(model, kv="host")
    few: dict[str, Any] = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    text = model.generate(inputs=SHORT, return_dict_in_generate=True, **few, **options).sequences
    for name in ("inputs", "input_ids"):
        with pytest.raises(ConfigurationError, match=REFUSED):
            model.generate(**{name: turn(OTHER)}, **few, **options)
        text = model.generate(**{name: turn(text, 2)}, **few, **options)
    new = torch.cat([text[:, -1:], PROMPT[:, :5]], 1)
    whole = torch.cat([text[:, :-1], new], 1)
    answer = model.generate(new, attention_mask=torch.ones_like(whole), **few, **options)
    expected = model.generate(whole, **few)
    assert torch.equal(answer[:, 6:], expected[:, -3:])
    assert torch.equal(
        model.generate(turn(expected), **few, **options), model.generate(turn(expected), **few)
    )


def test_a_batch_and_several_sequences(opened: Opened) -> None:
    session, model = opened("llama")
    options = session.generate_options(model, kv="host")
    first = tokens(model, PADDED, attention_mask=MASK, **options)
    mask = torch.nn.functional.pad(MASK, (0, 12 + 300), value=1)
    with pytest.raises(ConfigurationError, match=REFUSED):
        tokens(model, turn(first.flip(0)), attention_mask=mask, **options)
    found = tokens(model, turn(first), attention_mask=mask, **options)
    assert torch.equal(found, tokens(model, turn(first), attention_mask=mask))

    options = session.generate_options(model, kv="host")
    sampled = tokens(model, SHORT, do_sample=True, num_return_sequences=3, **options)
    assert len(sampled.unique(dim=0)) == 3
    with pytest.raises(ConfigurationError, match=REFUSED):
        tokens(model, turn(sampled[:1]), num_return_sequences=3, do_sample=True, **options)
    assert torch.equal(tokens(model, turn(sampled), **options), tokens(model, turn(sampled)))


def test_beams_end_with_keys_of_other_texts(opened: Opened) -> None:
    """They are those of candidates, of which the best may have ended: only the prompt is known."""
    session, model = opened("llama")
    options = session.generate_options(model, kv="host")
    best = tokens(model, num_beams=3, **options)
    with pytest.raises(ConfigurationError, match="beams"):
        tokens(model, turn(best), num_beams=3, **options)
    options[cache_name()].crop(-12)
    again = tokens(model, num_beams=3, **options)
    assert torch.equal(again, best)


@pytest.mark.parametrize("how", ["lookup", "assistant"])
def test_proposed_tokens_need_new_options(how: str, opened: Opened) -> None:
    """With them transformers reads the whole text, whatever the cache has of it."""
    session, model = opened("llama")
    more = {"prompt_lookup_num_tokens": 3} if how == "lookup" else {"assistant_model": opened("qwen2")[1]}
    options = session.generate_options(model, kv="host")
    first = tokens(model, **more, **options)
    with pytest.raises(ConfigurationError, match=REFUSED):
        tokens(model, turn(OTHER), **more, **options)
    for prepared, chat in ((options, turn(first)), (session.prefill(model, PROMPT), PROMPT)):
        with pytest.raises(ConfigurationError, match="prompt lookup and assistant models"):
            tokens(model, chat, **more, **prepared)
        assert torch.equal(tokens(model, chat, **prepared), tokens(model, chat))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("copies", [1, 3])
def test_a_prompt_read_ahead(place: str, copies: int, opened: Opened) -> None:
    session, model = opened("llama")
    how: dict[str, Any] = {"num_return_sequences": copies, "do_sample": True}
    prefilled = session.prefill(model, PROMPT, copies=copies, memory_gib=SMALL, **PLACES[place])
    with pytest.raises(ConfigurationError, match=REFUSED):
        tokens(model, OTHER, **how, **prefilled)
    first = tokens(model, **how, **prefilled)
    assert torch.equal(first, tokens(model, **how))
    assert torch.equal(tokens(model, turn(first), **prefilled), tokens(model, turn(first)))


def test_with_an_adapter(opened: Opened) -> None:
    session, model = opened("qwen2")
    torch.manual_seed(3)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).eval()
    options = session.generate_options(adapted, kv="host")
    first = tokens(adapted, SHORT, **options)
    with pytest.raises(ConfigurationError, match=REFUSED):
        tokens(adapted, turn(OTHER), **options)
    assert torch.equal(tokens(adapted, turn(first), **options), tokens(adapted, turn(first)))
    adapted.unload()


def test_what_was_done_to_the_cache(opened: Opened) -> None:
    """An answer is taken back, rows are chosen, repeated and copied, and all is forgotten."""
    session, model = opened("llama")
    options = session.generate_options(model, kv="host")
    cache = options[cache_name()]
    first = tokens(model, PADDED, attention_mask=MASK, **options)
    cache.crop(-12)  # all but the last token of the prompt
    assert torch.equal(tokens(model, PADDED, attention_mask=MASK, **options), first)
    cache.batch_select_indices(torch.tensor([1]))
    with pytest.raises(ConfigurationError, match=REFUSED):
        tokens(model, turn(first[:1]), **options)
    cache.batch_repeat_interleave(2)
    chat, copied = turn(first[1:].expand(2, -1)), options | {cache_name(): copy.deepcopy(cache)}
    for each in (options, copied):
        assert torch.equal(tokens(model, chat, **each), tokens(model, chat))
    cache.reset()
    assert torch.equal(tokens(model, OTHER, **options), tokens(model, OTHER))


def test_what_the_model_was_called_with_directly_is_not_known(opened: Opened) -> None:
    session, model = opened("llama")
    options = session.generate_options(model, kv="host")
    with torch.no_grad():
        model(PROMPT[:, :-1], **{cache_name(): options[cache_name()]})
    assert torch.equal(tokens(model, **options), tokens(model))


def test_what_was_interrupted_goes_on(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt was read in part; what was, is known."""
    session, model = opened("llama")
    options = session.generate_options(model, kv="host", memory_gib=SMALL)
    forward, calls = model.forward, []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(model, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tokens(model, **options)
    assert 0 < options[cache_name()].get_seq_length() < PROMPT.shape[1]
    with pytest.raises(ConfigurationError, match=REFUSED):
        tokens(model, OTHER, **options)
    assert torch.equal(tokens(model, **options), tokens(model))


def test_a_model_is_changed_once_and_others_do_not_notice(opened: Opened) -> None:
    session, model = opened("llama")
    session.generate_options(model, kv="host")
    made = model.generate
    session.generate_options(model, kv="host")
    assert model.generate == made
    own = DynamicCache(config=model.config)
    tokens(model, **{cache_name(): own})
    assert own.get_seq_length() == PROMPT.shape[1] + 11
