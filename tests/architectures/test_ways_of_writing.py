"""Causal models of transformers write the same together, in chunks and with a draft as alone.

    pytest -m architectures tests/architectures/test_ways_of_writing.py -n 2

So an architecture that counts positions in a way of its own, or keeps a state, is noticed before a tenant is.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
import transformers
from drafting import guessing

from shared.errors import ConfigurationError
from shared.wire.messages import GroupInfo, Member
from tenant_sdk.drafts.passes import check_supported
from tenant_sdk.sequences.contexts import LongContext
from tenant_sdk.tuning.generation import ignores_padding

TOKENS, CHUNK = 16, 8
CAUSAL = [(each, name) for kind, each, name in tiny.architectures() if kind == "causal"]
NOT_TOGETHER = {"git"}  # a model of captions, whose padding counts
NO_DRAFT = {"cpmant"}  # one token in some hundred is another one
# Attention to a choice of tokens, which in tiny models is of few, with ties.
CHOOSING = {"axk2", "deepseek_v32", "doge", "glm_moe_dsa", "hyv4"}
GROUPS = (GroupInfo(64, (Member("layer", 64, "layer"),)),)
NO_CHUNKS = {"cpmant", "electra", "moshi", "prophetnet", "xlm-prophetnet"}  # docs/how-to/long-contexts.md


@torch.no_grad()
def written(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """Continuations of prompts, with padding before the shorter ones."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(each)) + each for each in prompts])
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in prompts])
    lengths = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
    out = model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths, **options)
    return out[:, longest:].tolist()  # type: ignore[no-any-return]


def _candidates(model_type: str, class_name: str) -> Iterator[Any]:
    with contextlib.suppress(tiny.NotBuilt):
        yield from tiny.candidates(model_type, class_name)


def made(model_type: str, class_name: str, prompts: list[list[int]]) -> tuple[Any, list[list[int]]]:
    """A tiny model, and how it answers each prompt alone; skips those that do not generate on their own."""
    said = ""
    for blank in itertools.islice(_candidates(model_type, class_name), 4):
        config = blank.config
        config.use_cache = True
        try:
            torch.manual_seed(0)
            model = getattr(transformers, class_name)._from_config(config).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(3 if parameter.dim() > 1 and parameter.isfinite().all() else 1)
            model.generation_config = transformers.GenerationConfig()
            alone = [written(model, [each])[0] for each in prompts]
            ways = ([written(model, [each, each])[1] for each in prompts],)
            ways += ([written(model, [each], use_cache=False)[0] for each in prompts],)
            if looks_ahead(model, prompts[0]):
                said = "it is no decoder as it is: earlier tokens see later ones"
            elif all(each == alone for each in ways):
                return model, alone
            else:
                said = "it writes something else when it is asked twice, or reads all anew for each token"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"[:200]
    pytest.skip(said or "nothing is built")


@torch.no_grad()
def looks_ahead(model: Any, ids: list[int]) -> bool:
    """Whether what a model says after a token depends on later tokens."""
    whole, part = (model(input_ids=torch.tensor([each])).logits[0, 4] for each in (ids, ids[:5]))
    return not torch.allclose(whole, part, rtol=1e-2, atol=1e-3)


def reads_chunks(model: Any) -> bool:
    """Whether the SDK reads a long prompt of this model in chunks."""
    try:
        found = LongContext(kv="device", memory_gib=1e-9, context=64).options(model, GROUPS)
    except ConfigurationError:  # the memory is too small for any chunk
        return True
    return "prefill_chunk_size" in found


@pytest.mark.architectures
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model_type", "class_name"), CAUSAL, ids=[name for name, _ in CAUSAL])
def test_a_text_does_not_depend_on_how_it_is_written(model_type: str, class_name: str) -> None:
    chance = torch.Generator().manual_seed(5)
    prompts = [torch.randint(4, 100, (length,), generator=chance).tolist() for length in (9, 21, 30)]
    model, alone = made(model_type, class_name, prompts)
    if model_type in CHOOSING:
        pytest.skip("it attends to a choice of tokens")
    if ignores_padding(model, 30 + TOKENS) and model_type not in NOT_TOGETHER:
        assert written(model, prompts) == alone, "together"
    with contextlib.suppress(ConfigurationError):  # a draft is refused
        check_supported(model)
        for prompt, text in zip(prompts, alone if model_type not in NO_DRAFT else [], strict=False):
            assert written(model, [prompt], custom_generate=guessing(model)) == [text], "draft"
    if model_type not in NO_CHUNKS and reads_chunks(model):
        assert [written(model, [each], prefill_chunk_size=CHUNK)[0] for each in prompts] == alone, "chunks"
