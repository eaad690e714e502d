"""Models whose positions depend on a text's length write the same together, in chunks and with a draft."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers
from drafting import Knowing, guessing
from test_answers_together import Numbers, model_of
from test_long_generation import _PLAIN

from shared.errors import ConfigurationError
from shared.wire.messages import GroupInfo, Member
from tenant_sdk.drafts.passes import check_supported
from tenant_sdk.sequences.contexts import LongContext, prefill
from tenant_sdk.sequences.positions import rope_stable_length
from tenant_sdk.tuning.conversations import Example
from tenant_sdk.tuning.evaluation import perplexity
from tenant_sdk.tuning.generation import generate_answers
from tenant_sdk.tuning.multi_adapter import MultiAdapter
from tenant_sdk.tuning.sampling import Sampling

STABLE_LENGTH, TOKENS = 48, 30
LENGTH_OF = {"short": 20, "long": 52, "middle": 40, "longer": 60}  # of adapters' batches
LENGTHS = (12, 36, 60, 47)  # shorter than that with their answers, crossing it, and longer
SMALL = 1e-4  # GiB
GROUPS = (GroupInfo(64, (Member("layer", 64, "layer"),)),)
_FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0 + at for at in range(8)]}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": STABLE_LENGTH,
    **_FACTORS,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "phi3": (
        "Phi3ForCausalLM",
        "Phi3Config",
        {**_PLAIN, "original_max_position_embeddings": STABLE_LENGTH, "rope_parameters": _LONG},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_PLAIN, "rope_parameters": _LONG}),
    "dynamic": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_PLAIN, "max_position_embeddings": STABLE_LENGTH, "rope_parameters": _DYNAMIC},
    ),
}

STABLE = ("phi3", "llama")  # the other kind remembers the longest text, and computes later ones otherwise


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_prompts_alone(kind: str) -> None:
    """With padding, in chunks of sixteen, and with four guesses a pass, of which few are right."""
    model, chance = model_of(kind, KINDS), torch.Generator().manual_seed(5)
    assert rope_stable_length(model) == STABLE_LENGTH
    prompts = [torch.randint(3, 120, (length,), generator=chance).tolist() for length in LENGTHS]
    sampling = Sampling(max_new_tokens=TOKENS)

    def options(count: int, length: int) -> dict[str, Any]:
        context = LongContext(batch_size=count, memory_gib=SMALL * count, context=length)
        return context.options(model, GROUPS)

    alone = [next(generate_answers(model, Numbers(), [each], sampling)) for each in prompts]
    assert len({*alone}) == len(prompts)
    assert list(generate_answers(model, Numbers(), prompts, sampling)) == alone
    assert list(generate_answers(model, Numbers(), prompts, sampling, options)) == alone
    drafted = [
        next(
            generate_answers(
                model, Numbers(), [each], sampling, lambda *_: {"custom_generate": guessing(model)}
            )
        )
        for each in prompts
    ]
    assert drafted == alone


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_in_one_batch_do_not_see_each_others_lengths(kind: str) -> None:
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    names, generator = list(LENGTH_OF), torch.Generator().manual_seed(3)

    def losses(batches: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Of a new model: one kind remembers the longest text."""
        torch.manual_seed(0)
        model = model_of(kind, KINDS).train()
        return MultiAdapter(model, dict.fromkeys(names, config), seeds=dict.fromkeys(names, 1)).losses(
            batches
        )

    batches = dict[str, Any]()
    for name, length in LENGTH_OF.items():
        ids = torch.randint(3, 120, (2, length), generator=generator)
        batches[name] = {"input_ids": ids, "labels": ids}
    together = losses(batches)
    for name, batch in batches.items():
        (alone,) = losses({name: batch}).values()
        # Sums in another order, as tests/integration/test_multi_adapter.py has it.
        torch.testing.assert_close(together[name], alone, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_perplexity_does_not_depend_on_the_batches(kind: str) -> None:
    generator = torch.Generator().manual_seed(4)
    drawn = [torch.randint(3, 120, (n,), generator=generator).tolist() for n in (30, 46, 50, 60, 60)]
    examples: list[Example] = [{"input_ids": ids, "labels": ids} for ids in drawn]
    found = [perplexity(model_of(kind, KINDS), examples, size) for size in (1, 5)]
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_a_model_that_begins_anew_at_a_length() -> None:
    """As Phi-3 does, whatever its positions are: guesses end there."""
    options = {**_PLAIN, "original_max_position_embeddings": STABLE_LENGTH}
    torch.manual_seed(0)
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**options)).eval()
    model.generation_config.eos_token_id = None
    ids = torch.randint(3, 120, (1, STABLE_LENGTH - 12), generator=torch.Generator().manual_seed(1))
    expected = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)
    for draft in (guessing(model), Knowing(model, expected, ids.shape[1] + 1)):
        assert torch.equal(
            model.generate(ids, max_new_tokens=TOKENS, do_sample=False, custom_generate=draft), expected
        )
        assert draft.passes < TOKENS or draft.tokens == draft.passes


@pytest.mark.parametrize("kind", STABLE)
def test_a_conversation_that_grows(kind: str) -> None:
    """With what is kept of the text before, it goes on as if all of it was read anew."""
    model, options, ids = model_of(kind, KINDS), dict[str, Any](), torch.full((1, 20), 7)
    for _ in range(4):
        options = LongContext().resumed(model, GROUPS, ids, ids.shape[1] + 9, options)
        expected = model.generate(ids, max_new_tokens=9, do_sample=False)
        assert torch.equal(model.generate(ids, max_new_tokens=9, do_sample=False, **options), expected)
        ids = torch.cat([expected, torch.tensor([[5, 6, 7]])], 1)


@pytest.mark.parametrize("kind", STABLE)
def test_a_prompt_that_is_read_ahead(kind: str) -> None:
    model = model_of(kind, KINDS)
    for length in (STABLE_LENGTH - 9, STABLE_LENGTH, STABLE_LENGTH + 9):
        ids = torch.randint(3, 120, (1, length), generator=torch.Generator().manual_seed(length))
        options = prefill(model, ids, None, {})
        got = model.generate(ids, max_new_tokens=9, do_sample=False, **options)
        assert torch.equal(got, model.generate(ids, max_new_tokens=9, do_sample=False))
    with pytest.raises(ConfigurationError, match="depends on its last token"):
        prefill(model, torch.full((1, STABLE_LENGTH + 1), 7), None, {})


def test_short_prompts_are_still_read_in_chunks() -> None:
    """And those of models whose positions never change."""
    for kind, context, chunks in (("llama", STABLE_LENGTH, True), ("llama", STABLE_LENGTH + 1, False)):
        options = LongContext(memory_gib=SMALL, context=context).options(model_of(kind, KINDS), GROUPS)
        assert ("prefill_chunk_size" in options) == chunks
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_PLAIN))
    assert rope_stable_length(plain) is None
    assert "prefill_chunk_size" in LongContext(memory_gib=SMALL, context=64).options(plain, GROUPS)


def test_an_adapter_that_tokens_activate() -> None:
    """PEFT counts its rows from the end of each pass: chunks and drafts would count otherwise."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_PLAIN)).eval()
    model.generation_config.eos_token_id = None
    config = peft.LoraConfig(
        r=4, target_modules="all-linear", task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6]
    )
    adapted: Any = peft.get_peft_model(model, config).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    with pytest.raises(ConfigurationError, match=r"aLoRA.*leave out the draft"):
        check_supported(adapted)
    with pytest.raises(ConfigurationError, match="depends on its last token"):
        prefill(adapted, torch.full((1, 9), 7), None, {})
    assert "prefill_chunk_size" not in LongContext(memory_gib=SMALL, context=64).options(adapted, GROUPS)
    prompts = [[9, 8, 5, 6, 7], [11, 5, 6], [20, 21, 22, 23, 24, 25, 5, 6, 9, 9], [30, 31, 32]]
    sampling = Sampling(max_new_tokens=12)
    alone = [next(generate_answers(adapted, Numbers(), [each], sampling)) for each in prompts]
    assert list(generate_answers(adapted, Numbers(), prompts, sampling)) == alone
