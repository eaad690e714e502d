"""Models that read images or sound: served, attached and loaded like those of text.

``tests/architectures`` has more of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RING, Executor, relative_error
from parity import add_lora, worst_error
from safetensors.torch import save_file
from stored_models import build
from torch import nn
from transformers import PreTrainedModel

_VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_TEXT = {k: v for k, v in _VISION.items() if k not in ("image_size", "patch_size")} | {
    "vocab_size": 128,
    "max_position_embeddings": 16,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
_WHISPER: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "vocab_size": 128,
    "max_source_positions": 30,
    "max_target_positions": 40,
    "num_mel_bins": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def saved(class_name: str, config_name: str, options: dict[str, Any], folder: Path) -> PreTrainedModel:
    """A random model, saved under the names that its parameters have in transformers."""
    local = build(class_name, config_name, options, folder)
    tensors = {name: tensor.contiguous().clone() for name, tensor in local.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return local


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


IDS = torch.arange(3, 19).view(2, 8)
IMAGE = {"pixel_values": _random(2, 3, 32, 32)}
FEATURES = {"input_features": _random(2, 8, 60), "decoder_input_ids": IDS}

# A picture is 16 tokens of a text.
SEEN = {"pixel_values": _random(1, 3, 32, 32), "input_ids": torch.tensor([[3, *[120] * 16, 4, 5]])}
_LLAMA = _TEXT | {"model_type": "llama", "num_key_value_heads": 2, "max_position_embeddings": 64}
_LLAVA: dict[str, Any] = {
    "text_config": _LLAMA,
    "vision_config": _VISION | {"model_type": "clip_vision_model"},
    "image_token_id": 120,
}

# As classes of images are called; the last name is none, and still a class.
LABELS = {0: "tench, Tinca tinca", 1: "jack-o'-lantern", 2: "n/a: http://x"}

# Class, configuration class, its options, inputs, round trips of one pass.
TABLE: dict[str, tuple[str, str, dict[str, Any], dict[str, torch.Tensor], int]] = {
    "vit": ("ViTForImageClassification", "ViTConfig", _VISION | {"id2label": LABELS}, IMAGE, 9),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", _WHISPER, FEATURES, 21),
    "llava": ("LlavaForConditionalGeneration", "LlavaConfig", _LLAVA, SEEN, 18),
    "llava-text": ("LlavaForConditionalGeneration", "LlavaConfig", _LLAVA, {"input_ids": IDS}, 8),
}


@pytest.mark.parametrize("architecture", TABLE)
def test_equals_local(architecture: str, serve: Callable[..., Executor], tmp_path: Path) -> None:
    *names, inputs, round_trips = TABLE[architecture]
    local = saved(*names, tmp_path)  # type: ignore[arg-type]
    with serve(tmp_path).connect() as session, torch.no_grad():
        expected = local(**inputs)[0]
        for model in (session.load_model(progress=False), session.attach(local)):
            before = session.stats.requests
            got = model(**inputs)[0]
            # float32 in another order of additions.
            assert relative_error(got, expected) < 1e-5
            assert session.stats.requests - before == round_trips


@pytest.mark.parametrize("architecture", ["vit", "whisper"])
def test_hidden_images_and_sound(architecture: str, serve: Callable[..., Executor], tmp_path: Path) -> None:
    """With one-time masks and every product verified."""
    *names, inputs, _ = TABLE[architecture]
    local = saved(*names, tmp_path)  # type: ignore[arg-type]
    executor = serve(tmp_path, numerics=RING)
    options: dict[str, Any] = {"privacy": "one-time", "mask_sources": [f"local:{tmp_path}"]}
    with executor.connect(**options) as session, torch.no_grad():
        model = session.load_model(progress=False)
        # Each of 12 layers as narrow as these is off by 1e-4 or less: ``docs/explanation/numerics.md``.
        assert relative_error(model(**inputs)[0], local(**inputs)[0]) < 1e-3
        assert session.stats.verified_rows > 0


def _gradients(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model(**inputs)[0].square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_an_adapter_learns_as_locally(serve: Callable[..., Executor], tmp_path: Path) -> None:
    *names, inputs, _ = TABLE["llava"]
    local = add_lora(saved(*names, tmp_path))  # type: ignore[arg-type]
    expected = _gradients(local, inputs)
    with serve(tmp_path).connect() as session:
        got = _gradients(add_lora(session.load_model(progress=False)), inputs)
    # float32 in another order of additions, through the model and back.
    assert worst_error(got, expected) < 1e-4


def test_a_provider_of_sound(serve_process: Callable[..., Executor], tmp_path: Path) -> None:
    """``symbiosis-provider serve`` of a Whisper, a process of its own."""
    folder = tmp_path / "model"
    *names, inputs, _ = TABLE["whisper"]
    local = saved(*names, folder)  # type: ignore[arg-type]
    with serve_process(folder).connect() as session, torch.no_grad():
        model = session.load_model(progress=False)
        assert relative_error(model(**inputs)[0], local(**inputs)[0]) < 1e-5
