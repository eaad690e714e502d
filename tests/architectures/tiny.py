"""A tiny model of any architecture of transformers, and inputs of its kind.

A configuration's defaults are made small by the names of their numbers. ``OVERRIDES`` has what the names do
not tell; an architecture that is missing there needs nothing.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import transformers
from overrides import OVERRIDES
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

VOCABULARY, HEADS, WIDTH, TOKEN = 160, 4, 64, 3
MAX_PARAMETERS = 80_000_000

# A number's name, and the most that it may be; the first that is found counts.
_SIZES = [
    (re.compile(pattern), most)
    for pattern, most in (
        (r"vocab_size|^n_words$", VOCABULARY),
        (r"(key_value|kv)_heads|head_kv|multi_query_group_num|num_query_groups|^num_kv", 2),
        (r"d_head$", 16),
        (r"heads?$", HEADS),
        (r"(per_tok|per_token|selected_experts|top_?k|moe_k|activated_experts|k_experts)$", 2),
        (r"^n_group$|topk_group|expert_group", 1),
        (r"shared_experts?$", 1),
        (r"experts?$|expert_num$|^expert_nums$", 4),
        (r"first_k_dense|num_dense_layers|layer_start_index|layers_offset", 1),
        (r"nextn_predict", 0),
        (r"(q|kv|low|o|lora).*rank|lora_(dim|r)$|low_rank", 16),
        (r"qk_head_dim", 32),
        (r"rotary_(dim|emb_dim)|rope_dim", 8),
        (r"head_dim|d_kv$|head_size|kv_channels|(key|value)_length", 16),
        (r"dt_rank|time_step_rank|state_size|d_state|ssm_state", 8),
        (
            r"(intermediate|ffn|ff|feed_?forward|mlp|inner|expert\w*)_(size|dim|hidden_size)$|d_ff$|d_inner|n_inner",
            96,
        ),
        (
            r"max_position|n_positions|n_ctx|max_(seq|sequence|target|source|text)|context_length|seq_length",
            256,
        ),
        (r"sliding_window|attention_window|window_size|chunk_size|block_size|local_attention", 8),
        (r"image_size|^img_size|input_size$|resolution", 32),
        (r"patch_size$", 8),
        (r"upsample_groups", WIDTH),
        (r"(num_quer|num_latents|query_length|query_tokens)", 8),
        (
            r"hidden_size|d_model|n_embd|(^|_)dim$|embed_?dim|emb_dim|embedding_(size|dim)|hidden_dim|width$|"
            r"embed_proj|proj(ection)?_(dim|size)|d_embed|hidden_channels|channels_latent",
            WIDTH,
        ),
    )
]
_LAYERS = re.compile(r"(num|n)_.*(layers?|blocks)$|^n_layers?$|_layers$|^num_layers$|^depth$|_depth$")
_IS_TOKEN = re.compile(r"_token_(id|index)$|_index$|(^|_)(bos|eos|pad|sep|cls|unk|mask)_(id|index)")
_APART = (
    "model_type",
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "id2label",
    "label2id",
)
_MATTERS_NOT = ("rope_scaling", "rope_parameters", *_APART)


class NotBuilt(Exception):
    """transformers makes no tiny model of an architecture."""


def architectures() -> list[tuple[str, str, str]]:
    """All of transformers: ``causal`` or ``base``, model type, and class."""
    found = []
    for kind, mapping in (("causal", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), ("base", MODEL_MAPPING_NAMES)):
        for model_type, classes in sorted(mapping.items()):
            for name in classes if isinstance(classes, list | tuple) else (classes,):
                found.append((kind, model_type, name))
    return found


def candidates(model_type: str, class_name: str) -> Iterator[PreTrainedModel]:
    """Tiny models on the meta device, likely ones first.

    Raises:
        NotBuilt: there is none, and why.
    """
    built, errors = 0, list[str]()
    for layers in (2, 4, 8):
        for way in (_constructed, _changed):
            try:
                config = way(model_type, class_name, layers)
                config.dtype = torch.float32
                config.use_cache = False  # states of earlier tokens are no part of what is compared
                with torch.device("meta"):
                    model = getattr(transformers, class_name)._from_config(config)
            except Exception as error:  # as many kinds as there are architectures
                errors.append(f"{type(error).__name__}: {error}")
                continue
            size = sum(parameter.numel() for parameter in model.parameters())
            if size > MAX_PARAMETERS:
                errors.append(f"the smallest has {size / 1e6:.0f} million parameters")
                continue
            built += 1
            yield model.eval()
    if not built:
        raise NotBuilt(errors[0])


def _constructed(model_type: str, class_name: str, layers: int) -> PreTrainedConfig:
    """From the defaults as a dictionary, so that what is derived of them is derived again."""
    made = _configuration(model_type, class_name)
    values = _shrunk(made(**_required(model_type)).to_dict(), layers)
    values.pop("model_type", None)
    return made(**_merged(values, _override(model_type, class_name)))


def _changed(model_type: str, class_name: str, layers: int) -> PreTrainedConfig:
    """The defaults, changed in place."""
    config = _configuration(model_type, class_name)(**_required(model_type))
    _change(config, layers)
    for key, value in _override(model_type, class_name).items():
        part = getattr(config, key, None)
        if isinstance(part, PreTrainedConfig) and isinstance(value, Mapping):
            for name, each in value.items():
                setattr(part, name, each)
        else:
            setattr(config, key, value)
    return config


def _configuration(model_type: str, class_name: str) -> type[PreTrainedConfig]:
    """Of the type, unless the class wants that of a part, as a causal model beside one with a tower does."""
    usual, wanted = CONFIG_MAPPING[model_type], getattr(transformers, class_name).config_class
    return usual if wanted is None or issubclass(usual, wanted) else wanted


def _required(model_type: str) -> dict[str, Any]:
    """What a configuration cannot be made without."""
    return dict(OVERRIDES.get(f"{model_type}!", {}))


def _override(model_type: str, class_name: str) -> dict[str, Any]:
    return {**_required(model_type), **OVERRIDES.get(model_type, {}), **OVERRIDES.get(class_name, {})}


def _merged(values: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in more.items():
        there = values.get(key)
        values[key] = (
            _merged(there, value) if isinstance(there, dict) and isinstance(value, Mapping) else value
        )
    return values


def _size(key: str, value: int, layers: int) -> int:
    if _IS_TOKEN.search(key):
        return value if value < VOCABULARY else TOKEN
    if _LAYERS.search(key) and not re.search(r"dense|predict|start|offset|shared|kv|feat_extract", key):
        return min(value, layers)
    return next((min(value, most) for pattern, most in _SIZES if pattern.search(key)), value)


def _shrunk(values: Mapping[str, Any], layers: int) -> dict[str, Any]:
    old = next(
        (values[key] for key in ("num_hidden_layers", "n_layer") if isinstance(values.get(key), int)), -1
    )
    # Stages halve an image several times, and windows have to fit them.
    pixels = re.compile(r"image_size|window_size|patch_size|img_size" if "depths" in values else r"^$")
    small = {}
    for key, value in values.items():
        if key in _APART and key != "model_type":
            continue
        if isinstance(value, dict) and key not in _MATTERS_NOT:
            numbered = all(str(name).isdigit() for name in value)
            value = (
                {n: v for n, v in value.items() if int(n) < layers} if numbered else _shrunk(value, layers)
            )
        elif isinstance(value, list):
            value = _shorter(key, value, old, layers)
        elif type(value) is int and not pixels.search(key):
            value = _size(key, value, layers)
        small[key] = value
    return _consistent(small)


def _shorter(key: str, value: list[Any], old: int, layers: int) -> list[Any]:
    """A list with an entry for each layer, for fewer of them; one of each kind if it names kinds."""
    if key == "depths":
        return [min(each, 1) for each in value]
    if value and all(isinstance(each, str) for each in value) and (len(value) == old or "layer_types" in key):
        kinds = list(dict.fromkeys(value))
        return (kinds * layers)[:layers]
    return value[:layers] if len(value) == old else value


def _consistent(values: dict[str, Any]) -> dict[str, Any]:
    """Numbers that depend on one another."""
    if isinstance(values.get("kv_lora_rank"), int):  # latent attention: a key for each head
        values |= {k: HEADS for k in ("num_attention_heads", "num_key_value_heads") if values.get(k)}
    values |= {
        k: most for k, most in (("head_dim", 16), ("num_key_value_heads", HEADS)) if values.get(k, 0) is None
    }
    for rope in (values.get("rope_parameters"), values.get("rope_scaling")):
        if isinstance(rope, dict) and len(rope.get("mrope_section") or ()) == 3:
            partial = values.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0
            rope["mrope_section"] = [2, 3, 3] if partial == 1.0 else [1, 1, 2]  # of half a head
    if "out_features" in values:  # they name stages, of which there are fewer
        values = {k: v for k, v in values.items() if k not in ("out_features", "out_indices", "stage_names")}
    heads = values.get("num_heads")
    if isinstance(heads, list) and isinstance(values.get("embed_dim"), int):  # a width for each stage
        values["embed_dim"] = 8 * heads[0]
        values.pop("hidden_size", None)
    return values


def _change(config: PreTrainedConfig, layers: int) -> None:
    for key, value in list(vars(config).items()):
        if key in _APART or key.startswith("_"):
            continue
        if isinstance(value, PreTrainedConfig):
            _change(value, layers)
        elif type(value) is int:
            setattr(config, key, _size(key, value, layers))
        elif isinstance(value, list):
            setattr(config, key, _shorter(key, value, -1, layers))


# -- inputs ----------------------------------------------------------------------------------------

ROWS, COLUMNS, SAMPLES, FRAMES = 2, 8, 4000, 64
# What they give of a text is where it ends, or its first token if it does not: that attends to itself alone,
# and gradients of its queries and keys are zero.
_POOLED_AT_END = ("clip", "clipseg", "metaclip_2")


def inputs_of(model: PreTrainedModel) -> Iterator[dict[str, torch.Tensor]]:
    """Inputs that a model may take, the plainest first; the same at every call."""
    config, named = model.config, model.main_input_name
    main = named if isinstance(named, str) else named[0]
    generator = torch.Generator().manual_seed(1)
    most = min(_number(config, ("vocab_size",), VOCABULARY), VOCABULARY) - 8
    # Above the tokens that mean something to a model.
    ids = torch.randint(min(20, most // 2), max(most, 1), (ROWS, COLUMNS), generator=generator)
    if config.model_type in _POOLED_AT_END:
        ids[:, -1] = config.text_config.eos_token_id
    text = {"input_ids": ids}
    decoder = {"decoder_input_ids": ids} if config.is_encoder_decoder else {}
    mask = {"attention_mask": torch.ones_like(ids)}

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    if main == "input_ids":
        yield text | decoder
        yield text | decoder | mask
        yield text | {"bbox": torch.zeros(*ids.shape, 4, dtype=torch.long)}
    image = (ROWS, _number(config, ("num_channels", "in_channels", "in_chans"), 3), *_pair(config))
    mel = _number(config, ("num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels"), 80)
    places = _number(config, ("max_source_positions",), FRAMES)
    width = _number(config, ("hidden_size", "d_model"), WIDTH)
    frames = _number(config, ("num_frames", "frames_per_clip"), 4)
    shapes: dict[str, list[tuple[int, ...]]] = {
        "pixel_values": [image, (*image[:2], 64, 64), (*image[:2], 224, 224), (ROWS, frames, *image[1:])],
        "pixel_values_videos": [(ROWS, frames, *image[1:])],
        "input_features": [
            (ROWS, mel, 2 * places),
            (ROWS, FRAMES, mel),
            (ROWS, mel, FRAMES),
            (ROWS, 1, 256, 64),
        ],
        "input_values": [(ROWS, SAMPLES), (ROWS, 1, SAMPLES), (ROWS, FRAMES, mel), (ROWS, 1024, 128)],
        "inputs_embeds": [(ROWS, COLUMNS, width)],
        "audio_values": [(ROWS, SAMPLES), (ROWS, 1, SAMPLES)],
    }
    names = (
        [main] if main != "input_ids" else ["pixel_values", "input_features", "input_values", "inputs_embeds"]
    )
    for name in names:
        for shape in shapes.get(name, ()):
            for rest in ({}, text, text | mask) if name != "inputs_embeds" else ({},):
                yield {name: normal(*shape)} | rest | decoder
    asked = _asked(model, ids, image, mel, width, normal)
    if asked:
        yield asked
        yield asked | text


def _asked(
    model: PreTrainedModel,
    ids: torch.Tensor,
    image: tuple[int, ...],
    mel: int,
    width: int,
    normal: Callable[..., torch.Tensor],
) -> dict[str, torch.Tensor]:
    """A value for each argument that has no default; nothing if one is unknown."""
    config = model.config
    patch = _number(config, ("patch_size", "spatial_patch_size"), 8)
    inside = image[1] * patch**2 * _number(config, ("temporal_patch_size",), 1)
    context = _number(config, ("context_length",), 8)
    past = context + max(getattr(config, "lags_sequence", None) or [0])
    channels, times = _number(config, ("num_input_channels",), 1), _number(config, ("num_time_features",), 1)
    series = (past, channels) if hasattr(config, "num_input_channels") else (past,)
    known: dict[str, Callable[[], torch.Tensor]] = {
        "input_ids": lambda: ids,
        "decoder_input_ids": lambda: ids,
        "attention_mask": lambda: torch.ones_like(ids),
        "pixel_values": lambda: normal(*image),
        "input_features": lambda: normal(ROWS, mel, FRAMES),
        "input_features_mask": lambda: torch.ones(ROWS, FRAMES, dtype=torch.long),
        "bbox": lambda: torch.zeros(*ids.shape, 4, dtype=torch.long),
        "query_embeds": lambda: normal(ROWS, COLUMNS, width),
        "hidden_states": lambda: normal(16, inside),
        "grid_thw": lambda: torch.tensor([[1, 4, 4]]),
        "past_values": lambda: normal(ROWS, *series),
        "past_time_features": lambda: normal(ROWS, past, times),
        "past_observed_mask": lambda: torch.ones(ROWS, past),
        "future_values": lambda: normal(ROWS, _number(config, ("prediction_length",), 4)),
        "future_time_features": lambda: normal(ROWS, _number(config, ("prediction_length",), 4), times),
    }
    taken = inspect.signature(model.forward).parameters.values()
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    asked = {each.name for each in taken if each.default is each.empty and each.kind in plain}
    if "past_values" in asked:  # its decoder has to be told as well
        asked |= {"future_values", "future_time_features"} & {each.name for each in taken}
    return {name: known[name]() for name in sorted(asked)} if asked <= known.keys() else {}


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for name in (
        "vision_config",
        "audio_config",
        "text_config",
        "encoder",
        "backbone_config",
        "encoder_config",
    ):
        if isinstance(getattr(config, name, None), PreTrainedConfig):
            yield getattr(config, name)


def _number(config: Any, names: tuple[str, ...], default: int) -> int:
    values = (getattr(part, name, None) for part in _parts(config) for name in names)
    return next((value for value in values if type(value) is int), default)


def _pair(config: Any) -> tuple[int, int]:
    """Height and width of an image."""
    value = next((v for part in _parts(config) if (v := getattr(part, "image_size", None))), 32)
    if isinstance(value, int):
        return value, value
    return (value[0], value[1]) if isinstance(value, list | tuple) and len(value) == 2 else (32, 32)
