"""What a tiny pass shows of models: of every kind of input, that read weights, that look at values."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

import provider.catalog.probe
from provider.catalog.probe import Probe, probe

_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
_IMAGE = _SMALL | {"image_size": 32, "patch_size": 8}
_TEXT = _SMALL | {"vocab_size": 128, "max_position_embeddings": 16}
_SEQ2SEQ: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "vocab_size": 128,
    "pad_token_id": 0,
}


def on_meta(model_class: type[PreTrainedModel], **options: Any) -> PreTrainedModel:
    config = model_class.config_class(**options)  # type: ignore[misc]
    config._attn_implementation = "eager"
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model: PreTrainedModel = model_class._from_config(config)
    return model.eval()


def linear(model: PreTrainedModel, *, head: bool = False) -> list[str]:
    kinds, own = (nn.Linear, Conv1D), model.get_output_embeddings()
    return [name for name, m in model.named_modules() if isinstance(m, kinds) and (head or m is not own)]


def probed(class_name: str, **options: Any) -> tuple[Probe, list[str]]:
    model = on_meta(getattr(transformers, class_name), **options)
    return probe(model, linear(model)), linear(model)


@pytest.mark.parametrize(
    ("class_name", "options"),
    [
        ("ViTForImageClassification", _IMAGE),
        ("ViTModel", _IMAGE | {"image_size": [32, 16], "num_channels": 1}),
        ("CLIPModel", {"text_config": _TEXT, "vision_config": _IMAGE}),
        ("BlipForConditionalGeneration", {"text_config": _TEXT, "vision_config": _IMAGE}),
        ("VideoMAEModel", _IMAGE | {"num_frames": 2}),
        ("WhisperForConditionalGeneration", _SEQ2SEQ | {"max_source_positions": 20, "num_mel_bins": 8}),
        ("Speech2TextForConditionalGeneration", _SEQ2SEQ | {"input_feat_per_channel": 16}),
        ("Wav2Vec2BertModel", _SMALL | {"feature_projection_input_dim": 20}),
        ("Wav2Vec2ForCTC", _SMALL | {"num_conv_pos_embedding_groups": 4}),
        ("ASTModel", _IMAGE | {"num_mel_bins": 16, "max_length": 32}),
        ("Qwen3ForCausalLM", _TEXT | {"head_dim": 16, "num_key_value_heads": 2}),
        ("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128}),
    ],
)
def test_models_of_every_input_are_reached(class_name: str, options: dict[str, Any]) -> None:
    found, layers = probed(class_name, **options)
    assert found.stopped is None
    assert found.kept == {}
    assert found.reached == len(layers)
    assert sorted(name for group in found.groups for name in group) == sorted(layers)
    assert len(found.groups) < len(layers) or class_name == "GPT2LMHeadModel"


_LARGER = {**_TEXT, "num_key_value_heads": 2, "vocab_size": 160}
_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("class_name", "text", "vision"),
    [
        (
            "LlavaForConditionalGeneration",
            _LARGER | {"model_type": "llama"},
            _IMAGE | {"model_type": "clip_vision_model"},
        ),
        ("Idefics3ForConditionalGeneration", _LARGER | {"model_type": "llama"}, _IMAGE),
        # Its tower looks at how many patches there are.
        (
            "Qwen2VLForConditionalGeneration",
            _LARGER | {"rope_parameters": _ROPE},
            {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 8},
        ),
    ],
)
def test_towers_beside_a_text(class_name: str, text: dict[str, Any], vision: dict[str, Any]) -> None:
    found, layers = probed(class_name, text_config=text, vision_config=vision, pad_token_id=0)
    assert found.stopped is None
    assert found.reached == len(layers)
    together = [group for group in found.groups if len(group) > 1]
    assert sum("self_attn" in group[0] for group in together) >= 2


def test_an_input_that_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    found, layers = probed(
        "PatchTSTModel", d_model=64, num_attention_heads=4, num_hidden_layers=1, ffn_dim=96
    )
    assert found.groups == [[name] for name in layers]
    assert "takes past_values, and nothing like it is known. The others are served" in caplog.text


# -- weights that are read ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("class_name", "options", "kept", "reason"),
    [
        (
            "SiglipVisionModel",
            _IMAGE,
            ["head.attention.out_proj"],
            "reads the weight itself",
        ),
        (
            "MambaForCausalLM",
            {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 128, "state_size": 8},
            ["backbone.layers.0.mixer.dt_proj"],
            "reads the weight itself",
        ),
        (
            "Llama4ForCausalLM",
            _TEXT
            | {"num_hidden_layers": 1, "num_key_value_heads": 2, "num_local_experts": 4, "head_dim": 16}
            | {"intermediate_size_mlp": 96},
            ["model.layers.0.feed_forward.router"],
            "Llama4Router does more than multiply",
        ),
    ],
)
def test_weights_that_no_product_stands_for(
    class_name: str, options: dict[str, Any], kept: list[str], reason: str
) -> None:
    found, layers = probed(class_name, **options)
    assert list(found.kept) == kept
    assert reason in found.kept[kept[0]]
    assert sorted([*kept, *(name for group in found.groups for name in group)]) == sorted(layers)


def test_a_head_tied_to_the_embeddings_is_served_alone() -> None:
    """The embeddings read its weight, as they must."""
    model = on_meta(LlamaForCausalLM, **_TEXT, tie_word_embeddings=True)
    found = probe(model, linear(model, head=True))
    assert found.kept == {}
    assert ["lm_head"] in found.groups


class Copies(LlamaForCausalLM):
    """Multiplies with a copy of a layer's weight."""

    def forward(self, input_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """Twice the head, once with a copy."""
        out = super().forward(input_ids=input_ids, **kwargs)
        weight = self.model.layers[0].mlp.gate_proj.weight.detach().to(torch.float32)
        return out.logits @ out.logits.transpose(-1, -2), weight @ weight.T


def test_a_copy_of_a_weight_is_that_weight() -> None:
    model = on_meta(Copies, **_TEXT)
    assert list(probe(model, linear(model)).kept) == ["model.layers.0.mlp.gate_proj"]


# -- values ------------------------------------------------------------------------------------------


class Looks(LlamaForCausalLM):
    """Looks at its input's values, and at an activation's."""

    def forward(self, input_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """As the base class."""
        assert input_ids is not None
        assert input_ids.sum().item() == input_ids.numel()
        out = super().forward(input_ids=input_ids, **kwargs)
        assert out.logits.abs().max().item() == 0.0  # of weights that are all zero
        return out


def test_a_model_that_looks_at_values() -> None:
    found, layers = probe(model := on_meta(Looks, **_TEXT), linear(model)), linear(model)
    plain, _ = probed("LlamaForCausalLM", **_TEXT)
    assert found.stopped is None
    assert found.groups == plain.groups
    assert found.reached == len(layers)


def test_values_take_little_memory_and_time() -> None:
    """A model of 70 billion parameters, in bfloat16, whose head alone is two gigabytes."""
    large = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "vocab_size": 128256}
    model = on_meta(Looks, **large, num_hidden_layers=80, num_key_value_heads=8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = probe(model, linear(model))
    assert found.stopped is None
    assert len(found.groups) == 4 * 80
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10  # KiB


@pytest.mark.parametrize(
    ("name", "value", "error"), [("SECONDS", -1.0, TimeoutError), ("MAX_BYTES", 1000, MemoryError)]
)
def test_a_pass_with_values_is_bounded(
    name: str, value: float, error: type, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(provider.catalog.probe, name, value)
    found = probe(model := on_meta(Looks, **_TEXT), linear(model))
    again = provider.catalog.probe._best(provider.catalog.probe._with_values(model), linear(model), "cpu")
    assert isinstance(again.stopped, error)
    assert sum(map(len, found.groups)) == len(linear(model))  # all are served nevertheless
    assert "layers were reached before" in caplog.text
