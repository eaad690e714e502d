"""Models other than Llama in a gateway: transformers' tokens, of the base and of an adapter.

``pytest -m architectures tests/e2e/test_gateway_models.py`` tries all of them, in a quarter of an hour.
"""

from __future__ import annotations

import re
import shutil
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import peft
import pytest
import torch
import transformers
from commands import BASE_MODEL
from conftest import Executor
from gateways import gateway, needed
from raw_peers import eventually

from shared.launching import LaunchError

pytestmark = needed

PROMPT = [0, 300, 17, 1040, 5, 222, 901]
TOKENS = 12
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # vLLM's attention on processors takes none that is narrower
    "intermediate_size": 96,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "query_pre_attn_scalar": 32,
    "rotary_dim": 16,
    "moe_intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
# What transformers calls sizes in some configurations.
ALIASES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
ADAPTED = (
    "Qwen2ForCausalLM",
    "MistralForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "PhiForCausalLM",
    "Phi3ForCausalLM",
    "OPTForCausalLM",
    "GPTNeoXForCausalLM",
    "Starcoder2ForCausalLM",
    "CohereForCausalLM",
    "Cohere2ForCausalLM",
    "GlmForCausalLM",
    "GraniteForCausalLM",
    "Exaone4ForCausalLM",
    "NemotronForCausalLM",
    "Ernie4_5ForCausalLM",
    "ApertusForCausalLM",
    "OlmoForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "SmolLM3ForCausalLM",
    "SeedOssForCausalLM",
    "ArceeForCausalLM",
    "HunYuanDenseV1ForCausalLM",
)
PLAIN = ("GPT2LMHeadModel", "GPTJForCausalLM", "StableLmForCausalLM", "Glm4ForCausalLM")
MIXTURES = (
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "OlmoeForCausalLM",
    "GptOssForCausalLM",
    "GraniteMoeForCausalLM",
)
REFUSED = {
    "BloomForCausalLM": "in one layer, in an order",
    "FalconForCausalLM": "in one layer, in an order",
    "Qwen2MoeForCausalLM": "layers.0.mlp.shared_expert_gate",
}
Said = tuple[list[int], list[float]]


def tiny(class_name: str) -> Any:
    """A model of chance, whose numbers are large enough for it to have opinions."""
    torch.manual_seed(0)
    of = getattr(transformers, class_name)
    known = of.config_class().to_dict()
    named = {ALIASES.get(name, name) if name not in known else name: size for name, size in SIZES.items()}
    model = of(of.config_class(**{name: size for name, size in named.items() if name in known}))
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def greedy(model: Any) -> Said:
    """Tokens after the prompt, and logarithms of their probabilities."""
    tokens, logarithms = list(PROMPT), []
    for _ in range(TOKENS):
        with torch.no_grad():
            scores = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        tokens.append(int(scores.argmax()))
        logarithms.append(float(scores.max()))
    return tokens[len(PROMPT) :], logarithms


def check(
    serve: Callable[..., Executor], model: Any, folder: Path, *options: object, adapted: str | list[str]
) -> str:
    """Serve it, alone if nothing is adapted, and compare what is said; returns the gateway's metrics."""
    base = folder / "base"
    model.save_pretrained(base)
    words = transformers.AutoTokenizer.from_pretrained(BASE_MODEL)
    words.add_tokens(["<beyond>"])  # the embeddings, as in some checkpoints
    words.save_pretrained(base)
    expected = {"base": greedy(model)}
    if adapted:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=adapted))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(folder / "adapters" / "one")
        expected["one"] = greedy(model)
        for name in ("another", "base"):  # neither is served, and the base model is all the same
            (folder / "adapters" / name).mkdir()
            (folder / "adapters" / name / "adapter_config.json").write_text('{"peft_type": "IA3"}')
        shutil.copytree(folder / "adapters" / "one", folder / "elsewhere")
        (folder / "adapters" / "linked").symlink_to(folder / "elsewhere")
        options += ("--adapters", folder / "adapters")
        assert expected["one"] != expected["base"]
    provider, masks = (serve(base, numerics="ring-fine") for _ in range(2))
    options += ("--kv-memory-gib", 0.1)
    with gateway(provider, masks, folder / "gateway", *options, TMPDIR=str(folder)) as running:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
            listed = {each.id: each.root for each in client.models.list()}  # type: ignore[attr-defined]
            assert listed == {name: name for name in expected}
            with pytest.raises(openai.BadRequestError, match="out of vocabulary"):
                client.completions.create(model="base", prompt="what is <beyond>?")
            with pytest.raises(
                openai.NotFoundError, match="holds no adapter" if adapted else "is not served"
            ):
                client.completions.create(model="another", prompt="who is that?")
            with pytest.raises(openai.NotFoundError, match="leads out of it" if adapted else "is not served"):
                client.completions.create(model="linked", prompt="who is that?")
            for name, (tokens, logarithms) in expected.items():
                (said,) = client.completions.create(
                    model=name,
                    prompt=PROMPT,
                    max_tokens=TOKENS,
                    temperature=0,
                    logprobs=1,
                    extra_body={"return_token_ids": True, "ignore_eos": True},
                ).choices
                assert said.token_ids == tokens  # type: ignore[attr-defined]
                assert said.logprobs is not None
                # Rows have 24 bits of an activation; the largest difference seen is 1.3e-4.
                assert said.logprobs.token_logprobs == pytest.approx(logarithms, abs=1e-3)
        with urllib.request.urlopen(f"{running.url}/metrics", timeout=800) as answer:
            metrics: str = answer.read().decode()
        if adapted:
            away = urllib.request.Request(f"{running.url}/v1/adapters/one", method="DELETE")
            urllib.request.urlopen(away, timeout=800).close()
            eventually(lambda: not list(folder.glob("symbiosis-gateway-*/adapters/*")))
    return metrics


def test_another_model_and_what_it_drafts_itself(serve: Callable[..., Executor], tmp_path: Path) -> None:
    """Guesses by the base are right for the base; many are not for its adapter, and nobody notices."""
    draft = ("--speculate", tmp_path / "base", "--draft-tokens", 3)
    metrics = check(serve, tiny("Qwen3ForCausalLM"), tmp_path, *draft, adapted="all-linear")
    at_first = re.search(r'accepted_tokens_per_pos_total{.*position="0"} (\S+)', metrics)
    guesses = re.search(r"num_drafts_total{.*} (\S+)", metrics)
    assert at_first is not None
    assert guesses is not None
    assert 0 < float(at_first[1]) < float(guesses[1])


@pytest.mark.architectures
@pytest.mark.parametrize("class_name", ADAPTED)
def test_served_with_adapters(serve: Callable[..., Executor], tmp_path: Path, class_name: str) -> None:
    check(serve, tiny(class_name), tmp_path, adapted="all-linear")


@pytest.mark.architectures
@pytest.mark.parametrize("class_name", PLAIN)
def test_served_alone(serve: Callable[..., Executor], tmp_path: Path, class_name: str) -> None:
    """vLLM has no adapters for these, or not for all of their layers."""
    check(serve, tiny(class_name), tmp_path, adapted="")


@pytest.mark.architectures
@pytest.mark.parametrize("class_name", MIXTURES)
def test_mixtures_of_experts(serve: Callable[..., Executor], tmp_path: Path, class_name: str) -> None:
    """Experts are multiplied here, attention elsewhere."""
    check(serve, tiny(class_name), tmp_path, adapted=["q_proj", "k_proj", "v_proj", "o_proj"])


@pytest.mark.architectures
@pytest.mark.parametrize("class_name", REFUSED)
def test_refused_in_a_sentence(serve: Callable[..., Executor], tmp_path: Path, class_name: str) -> None:
    with pytest.raises(LaunchError, match=REFUSED[class_name]) as caught:
        check(serve, tiny(class_name), tmp_path, adapted="")
    assert "Traceback" not in str(caught.value)
