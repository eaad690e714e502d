"""Log-probabilities of a token that a model has and its tokenizer has not: without the patch, and with it."""

import json
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsTensors

from tenant_sdk.gateway.vllm_patches import answer_each_alone

IDS = [4, 2, 63]  # the first begins with a space

rules = Tokenizer(models.BPE({"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4}, [("▁", "a")], unk_token="<unk>"))
rules.pre_tokenizer, rules.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules, unk_token="<unk>")


def texts() -> list[Any] | str:
    """What a client gets of a prompt with these tokens."""
    processor = LogprobsProcessor(
        tokenizer=tokenizer,
        logprobs=None,
        prompt_logprobs=[None],
        cumulative_logprob=None,
        num_logprobs=None,
        num_prompt_logprobs=0,
    )
    each = torch.tensor([[token] for token in IDS])
    computed = LogprobsTensors(each, torch.zeros(len(IDS), 1), torch.ones(len(IDS), dtype=torch.long))
    try:
        processor.update_from_output(
            SimpleNamespace(
                new_logprobs=None, new_prompt_logprobs_tensors=computed, prompt_token_id_logprobs=None
            )
        )
    except TypeError as error:
        return type(error).__name__
    return [next(iter(place.values())).decoded_token for place in processor.prompt_logprobs[1:]]


before = texts()
output_processor = SimpleNamespace(process_outputs=None)
answer_each_alone(
    SimpleNamespace(
        renderer=SimpleNamespace(get_tokenizer=lambda: tokenizer), output_processor=output_processor
    )
)
print(json.dumps([before, texts()]))
