"""Keys and values in buffers or on the disk, and prompts in chunks: the tokens that ``generate`` gives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers.cache_utils import DynamicSlidingWindowLayer

import tenant_sdk
from provider import serve_in_process
from shared.compat import cache_name
from shared.errors import ConfigurationError
from tenant_sdk.sequences.contexts import LongContext, default_place
from tenant_sdk.sequences.kv_layers import DiskLayer, HostLayer
from tenant_sdk.tuning.local_model import load

_PLAIN: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # so that a text depends on what keys, values and states hold
}
_MAMBA: dict[str, Any] = {
    "use_mamba_kernels": False,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_experts": 2,
    "expert_layer_period": 3,
    "expert_layer_offset": 2,
}
_LINEAR: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA2: dict[str, Any] = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
ZOO: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _PLAIN),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _PLAIN),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_PLAIN, "sliding_window": 40}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_PLAIN, "head_dim": 16, "sliding_window": 40}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_PLAIN, "head_dim": 16, "sliding_window": 40, "sliding_window_pattern": 3},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 128, "n_positions": 2048, "eos_token_id": 2}
        | {"initializer_range": 0.2},
    ),
    "jamba": ("JambaForCausalLM", "JambaConfig", {**_PLAIN, **_MAMBA}),
    "qwen3.5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {**_PLAIN, **_LINEAR, "num_hidden_layers": 4}),
    "falcon_h1": ("FalconH1ForCausalLM", "FalconH1Config", {**_PLAIN, **_MAMBA2}),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", {**_PLAIN, "layer_types": ["conv", "full_attention", "conv"]}),
}
ONE_LAYER = 1000 * 64 * 4 / 2**30  # GiB: of three layers, one stays in memory
PLACES: dict[str, dict[str, Any]] = {
    "device": {"kv": "device"},
    "host": {"kv": "host"},
    "disk": {"kv": "disk"},
    "budget": {"kv": "disk", "kv_memory_gib": ONE_LAYER},
}
SMALL = 0.004  # GiB: the prompt is read in several chunks
PROMPT = torch.randint(3, 128, (1, 620), generator=torch.Generator().manual_seed(1))
PADDED = torch.cat([torch.nn.functional.pad(PROMPT[:, 300:], (300, 0)), PROMPT.flip(1)])
MASK = torch.cat([torch.arange(620)[None] >= 300, torch.ones(1, 620)]).long()

Opened = Callable[[str], tuple[tenant_sdk.Session, Any]]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """A session with a tiny model of the zoo, and its model."""
    sessions: dict[str, tuple[tenant_sdk.Session, Any]] = {}

    def get(name: str) -> tuple[tenant_sdk.Session, Any]:
        if name not in sessions:
            folder = tmp_path_factory.mktemp(name)
            save(name, folder)
            session = tenant_sdk.connect(serve_in_process(folder, numerics="float32"), privacy="plain")
            sessions[name] = session, session.load_model(progress=False)
        return sessions[name]

    yield get
    for session, _ in sessions.values():
        session.close()


def save(name: str, folder: Path) -> None:
    class_name, config_name, options = ZOO[name]
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(getattr(transformers, config_name)(**options))
    model.save_pretrained(folder)


def tokens(model: Any, ids: torch.Tensor = PROMPT, **options: Any) -> torch.Tensor:
    torch.manual_seed(7)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 12, **options}
    found = model.generate(ids, min_new_tokens=12, **options)
    assert found.shape[1] == ids.shape[1] + 12
    return found


@contextmanager
def kept(session: tenant_sdk.Session, model: Any, place: str, **options: Any) -> Iterator[dict[str, Any]]:
    """What ``generate_options`` says, for a prompt in several chunks, looked at when it was used."""
    found = session.generate_options(model, **PLACES[place], memory_gib=SMALL, **options)
    if "Jamba" in type(model).__name__:
        assert "prefill_chunk_size" not in found
    else:
        assert found["prefill_chunk_size"] <= 512
    yield found
    cache = found.get(cache_name())
    if place in ("disk", "budget"):
        placed = [layer for layer in cache.layers if isinstance(layer, DiskLayer)]
        assert [layer.resident for layer in placed].count(True) == (place == "budget")
    elif place == "host":
        assert any(type(layer) is HostLayer for layer in cache.layers)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "jamba", "gemma2", "gemma3"])
def test_the_same_tokens(name: str, place: str, opened: Opened) -> None:
    session, model = opened(name)
    with kept(session, model, place) as options:
        assert torch.equal(tokens(model, **options), tokens(model))


@pytest.mark.parametrize("name", ["jamba", "qwen3.5", "falcon_h1"])
def test_a_state_is_not_taken_for_another_text(name: str, opened: Opened) -> None:
    """A text that leaves the one before begins anew, because no token can be removed from a state."""
    session, model = opened(name)
    place, groups = LongContext("host"), session.manifest.groups
    first = place.resumed(model, groups, PROMPT[:, :60], 80, {})
    tokens(model, PROMPT[:, :60], **first)
    other = torch.cat([PROMPT[:, :50], PROMPT[:, 100:110]], 1)
    again = place.resumed(model, groups, other, 80, first)
    assert torch.equal(tokens(model, other, **again), tokens(model, other))


def test_a_sliding_window_stays_with_transformers(opened: Opened) -> None:
    session, model = opened("mistral")
    options = session.generate_options(model, kv="disk", memory_gib=SMALL)
    assert all(type(each) is DynamicSlidingWindowLayer for each in options[cache_name()].layers)
    assert options["prefill_chunk_size"] < PROMPT.shape[1]
    assert torch.equal(tokens(model, **options), tokens(model))


GENERATE_CASES: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {
    "beams": (PROMPT, {"num_beams": 3}),
    "sampling beams": (PADDED, {"num_beams": 2, "do_sample": True, "attention_mask": MASK}),
    "left padding": (PADDED, {"attention_mask": MASK}),
    "several sequences": (PROMPT, {"do_sample": True, "num_return_sequences": 3}),
    "prompt lookup": (PROMPT, {"prompt_lookup_num_tokens": 3}),
}


@pytest.mark.parametrize("place", ["host", "disk", "budget"])
@pytest.mark.parametrize("way", GENERATE_CASES)
def test_ways_of_decoding(way: str, place: str, opened: Opened) -> None:
    session, model = opened("llama")
    ids, how = GENERATE_CASES[way]
    options = session.generate_options(model, **PLACES[place])
    assert torch.equal(tokens(model, ids, **how, **options), tokens(model, ids, **how))


@pytest.mark.parametrize("name", ["gemma3", "llama"])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_an_assistant_proposes(name: str, place: str, opened: Opened) -> None:
    session, model = opened(name)
    _, helper = opened("qwen2")
    options = session.generate_options(model, **PLACES[place])
    assert torch.equal(tokens(model, assistant_model=helper, **options), tokens(model))


@pytest.mark.parametrize("place", PLACES)
def test_with_an_adapter(place: str, opened: Opened) -> None:
    session, model = opened("qwen2")
    torch.manual_seed(3)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).eval()
    with kept(session, adapted, place) as options:
        assert torch.equal(tokens(adapted, **options), tokens(adapted))
    adapted.unload()


@pytest.mark.parametrize("place", PLACES)
def test_a_text_goes_on(place: str, opened: Opened) -> None:
    """The cache has the first turn; only the second is read."""
    session, model = opened("llama")
    options = session.generate_options(model, **PLACES[place])
    first = tokens(model, **options)
    second = torch.cat([first, PROMPT[:, :300]], 1)
    before = session.stats.rows
    found = tokens(model, second, **options)
    if place != "device":
        assert session.stats.rows - before == 3 * 4 * (301 + 11)
    assert torch.equal(found, tokens(model, second))


# -- what attention copies ----------------------------------------------------------------------------


FORCED = "TRANSFORMERS_SDPA_FORCE_GQA"  # transformers' own, from 5.23 on: no copies
COPIES = 2 * 4 * 16 * 4  # bytes for each token: keys and values of all heads


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_copies_for_every_head_are_counted(
    attention: str, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pairs of keys and values serve four heads: both are copied twice, of the whole context."""
    monkeypatch.delenv(FORCED, raising=False)
    session, model = opened("llama")
    monkeypatch.setattr(model.config, "_attn_implementation", attention)
    for context, batch in ((2000, 1), (1000, 2)):
        size = {"kv": "device", "context": context, "batch_size": batch}
        with pytest.raises(ConfigurationError, match="copied for every head"):
            session.generate_options(model, memory_gib=2000 * COPIES / 2**30, **size)
        assert "prefill_chunk_size" in session.generate_options(model, memory_gib=SMALL, **size)


def test_transformers_may_not_copy(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its variable is read, the same tokens come from fewer keys, and more of the prompt is read."""
    session, model = opened("llama")
    counted, attend = [], torch.nn.functional.scaled_dot_product_attention

    def counting(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        counted.append(key.shape[1])
        return attend(query, key, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counting)
    found, chunks = [], []
    for value in ("0", "1"):
        monkeypatch.setenv(FORCED, value)
        options = session.generate_options(model, memory_gib=SMALL)
        chunks.append(options["prefill_chunk_size"])
        counted.clear()
        found.append(tokens(model, **options))
        assert max(counted) == (4 if len(set(chunks)) == 1 else 2)  # as the estimate believes
    assert torch.equal(*found)
    assert chunks[0] <= chunks[1]


def test_commands_on_a_cpu_do_without_copies(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    session, _ = opened("llama")
    monkeypatch.setattr(session, "load_tokenizer", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for given, found in ((None, "1"), ("0", "0")):
        monkeypatch.setenv(FORCED, given or "")
        if given is None:
            monkeypatch.delenv(FORCED)
        load(session, None, None, bars=False)
        assert os.environ[FORCED] == found


def test_only_what_a_window_keeps_is_copied(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FORCED, raising=False)
    session, model = opened("mistral")
    size: dict[str, Any] = {"kv": "device", "memory_gib": 0.04, "context": 100_000}
    assert session.generate_options(model, **size)["prefill_chunk_size"] > 0
    assert size["context"] * COPIES > 0.04 * 2**30
    with pytest.raises(ConfigurationError, match="copied for every head"):
        session.generate_options(opened("llama")[1], **size)


# -- a prompt that is read ahead -------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", ["left padding", "beams", "several sequences"])
def test_a_prompt_read_ahead_goes_on(way: str, place: str, opened: Opened) -> None:
    session, model = opened("llama")
    ids, how = GENERATE_CASES[way]
    copies = how.get("num_beams", how.get("num_return_sequences", 1))
    before = session.stats.rows
    prefilled = session.prefill(model, ids, how.get("attention_mask"), copies=copies, **PLACES[place])
    assert session.stats.rows - before == 3 * 4 * ids.shape[0] * 619  # once, whatever becomes of it
    assert torch.equal(tokens(model, ids, **how, **prefilled), tokens(model, ids, **how))


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
@pytest.mark.parametrize("place", PLACES)
def test_read_in_one_dtype_continued_in_another(name: str, place: str, opened: Opened) -> None:
    """Stands for an accelerator and the host: the cache is what bfloat16 made, the rest is float32."""
    session, _ = opened(name)
    found = []
    for options in (PLACES[place], {"kv": "device"}):
        model = session.load_model(dtype=torch.bfloat16, progress=False)
        prefilled = session.prefill(model, PROMPT, decode_on="cpu", dtype=torch.float32, **options)
        cache = prefilled[cache_name()]
        assert model.dtype == torch.float32
        assert cache.get_seq_length() == 619
        found.append(tokens(model, **prefilled))
        states = [
            each.dtype for layer in cache.layers for each in vars(layer).values() if torch.is_tensor(each)
        ]
        assert torch.bfloat16 not in states
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_another_dtype_is_as_if_loaded_in_it(
    name: str, dtypes: tuple[torch.dtype, torch.dtype], opened: Opened
) -> None:
    """Tables of frequencies stay float32: rounded, they would say other positions."""
    session, _ = opened(name)
    loaded = session.load_model(dtype=dtypes[1], progress=False)
    model = session.load_model(dtype=dtypes[0], progress=False)
    tokens(model, **session.prefill(model, PROMPT, kv="host", dtype=dtypes[1]))
    for kind in ("named_parameters", "named_buffers"):
        expected = dict(getattr(loaded, kind)())
        assert {key: each.dtype for key, each in getattr(model, kind)()} == {
            key: each.dtype for key, each in expected.items()
        }
    for key, each in loaded.named_buffers():
        assert "inv_freq" not in key or torch.equal(model.get_buffer(key), each)


def test_several_prompts_read_ahead_share_the_memory(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    session, model = opened("llama")
    chunks = []
    monkeypatch.setattr(
        "tenant_sdk.session.session.prefill",
        lambda *given, **_: chunks.append(given[3]["prefill_chunk_size"]),
    )
    session.prefill(model, PADDED, MASK, memory_gib=SMALL)
    session.prefill(model, PADDED, MASK, memory_gib=SMALL, batch_size=2)
    session.prefill(model, PADDED, MASK, memory_gib=SMALL, batch_size=1)
    assert chunks[0] == chunks[1] < chunks[2]


def test_a_prompt_of_one_token_is_not_read_ahead(opened: Opened) -> None:
    session, model = opened("llama")
    with pytest.raises(ConfigurationError, match="two tokens"):
        session.prefill(model, PROMPT[:, :1])


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kv": "tape"}, "one of device, host, disk"),
        ({"kv": "disk", "kv_memory_gib": -1.0}, "must be at least 0"),
        ({"kv": "host", "kv_memory_gib": 1.0}, "need kv='disk'"),
        ({"kv": "disk", "kv_folder": "/nowhere"}, "/nowhere"),
        ({"memory_gib": 1e-5}, "give memory_gib="),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], sentence: str, opened: Opened) -> None:
    session, model = opened("llama")
    with pytest.raises(tenant_sdk.SymbiosisError, match=sentence):
        session.generate_options(model, **options)


def test_an_adapter_that_brings_keys_and_values(opened: Opened) -> None:
    session, _ = opened("qwen2")
    model = session.load_model(progress=False)
    adapted = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ConfigurationError, match="in front of the prompt"):
        session.generate_options(adapted, kv="disk")
    with pytest.raises(ConfigurationError, match="in front of the prompt"):
        session.prefill(adapted, PROMPT, kv="device")
    assert session.generate_options(adapted, kv="device") == {}
    assert (default_place(adapted), default_place(model)) == ("device", "host")


def test_models_without_keys_and_values_of_their_own(opened: Opened) -> None:
    session, _ = opened("llama")
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(d_model=8, d_ff=8, num_layers=1))
    with pytest.raises(ConfigurationError, match="encoder"):
        session.generate_options(t5)
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(hidden_size=8, num_hidden_layers=1))
    old = transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(n_embd=8, n_head=1, n_layer=1))
    for model in (mamba, old):
        with pytest.raises(ConfigurationError, match="state"):
            session.generate_options(model)


def test_a_context_that_fits_is_read_at_once(opened: Opened) -> None:
    session, model = opened("llama")
    assert session.generate_options(model, kv="device", context=700) == {}
    assert session.generate_options(model, kv="device", memory_gib=SMALL)["prefill_chunk_size"] < 700


def test_layers_that_share_keys_stay_in_memory(opened: Opened) -> None:
    session, _ = opened("llama")
    config = transformers.Gemma3nTextConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=64,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4,
        sliding_window=16,
    )
    model = transformers.Gemma3nForCausalLM(config).eval()
    with pytest.raises(ConfigurationError, match="use keys and values of others"):
        session.generate_options(model, kv="disk")
    ids = PROMPT[:, :100] % 64
    options = session.generate_options(model, kv="host")
    assert torch.equal(tokens(model, ids, **options), tokens(model, ids))
