"""Hostile configurations: no model larger than the manifest says, nothing loaded, no say in generation."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from conftest import Executor
from hostile_files import config_of, nothing_opens
from transformers import CONFIG_MAPPING, GenerationConfig, PatchTSTConfig

from shared.errors import ModelMismatch
from shared.wire.messages import Manifest, ParameterInfo, digest_of
from tenant_sdk.model.configuration import LENGTHS, TOKENS, generation_configuration, model_configuration
from tenant_sdk.model.loading import _LargeOnMeta, _model_class

pytest_plugins = ("hostile_fixtures",)

Hostile = Callable[..., Executor]


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 2_000_000_000},
        {"num_hidden_layers": 1_000_000_000},
        {"num_hidden_layers": 10**30},
        {"num_labels": 10**12},
        {"vocab_size": 10**15},
        {"hidden_size": 1 << 40},
        {"intermediate_size": 10**9},
        {"head_dim": 128},  # a number like others, and another shape
        {
            "head_dim": 1 << 18
        },  # as wide as a vocabulary, and nothing is made of it before shapes are compared
        {"intermediate_size": 1 << 18},
        {"hidden_size": 1 << 18},
        {"num_attention_heads": 1 << 16, "num_key_value_heads": 1 << 16},
        {"num_hidden_layers": 3},
        {"rope_parameters": {"a": {"b": {"c": {"d": {"e": {"f": {"g": {}}}}}}}}},
    ],
)
def test_a_configuration_that_the_manifest_does_not_account_for(
    change: dict[str, Any], hostile: Hostile, llama: Executor
) -> None:
    config = config_of(llama)[0] | change
    executor = hostile({"config.json": json.dumps(config).encode()})
    with executor.connect() as session, pytest.raises(ModelMismatch):
        session.load_model(progress=False)


DOWN = [["Subsample", 16, 8, 4, 2, 2], ["Subsample", 16, 16, 4, 2, 2], [""]]
INFINITE = {"__float__": "Infinity"}
USED: list[tuple[str, str, Any, Any]] = [
    ("kimi_linear", "model_max_length", 1 << 20, 1 << 25),
    ("llama4_text", "floor_scale", 8192, 1 << 19),
    ("inkling2_text", "log_scaling_n_floor", 128_000, 1 << 19),
    ("mimi", "sampling_rate", 24_000, 1 << 19),
    ("mimi", "codebook_size", 2048, 1 << 19),
    ("dac", "hop_length", 1920, 1 << 19),
    ("wav2vec2", "tdnn_dim", [512, 1500], [512, 1 << 19]),
    ("llava_onevision", "image_grid_pinpoints", [[384, 2304]], [[384, 4097]]),
    ("mamba2", "time_step_limit", [0.0, INFINITE], [0.0, {"__float__": "../x"}]),
    ("levit", "down_ops", DOWN, [*DOWN[:2], ["../x", 1 << 19]]),
    # Every pair of 64 x 64 patches would be a list of 16 million.
    ("levit", "image_size", 512, 1024),
    ("levit", "patch_size", 7, 2),
    ("levit", "image_size", 224, [224, 224]),
]


@pytest.mark.parametrize(("model_type", "key", "used", "refused"), USED)
def test_numbers_in_use_pass_beside_narrow_layers(
    model_type: str, key: str, used: Any, refused: Any, llama: Executor
) -> None:
    """Rates, scales and lengths, of which nothing is made, and infinity as transformers writes it."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    _, manifest = config_of(llama)

    def read(value: Any) -> Any:
        data = json.dumps({"model_type": model_type, key: value}).encode()
        return model_configuration(data, manifest, {})

    expected = [0.0, math.inf] if key == "time_step_limit" else used
    assert json.dumps(getattr(read(used), key)) == json.dumps(expected)
    with pytest.raises(ModelMismatch, match=key):
        read(refused)


def test_a_backbone_that_the_configuration_describes(llama: Executor) -> None:
    """It is built of the peer's numbers like any other part; others would be loaded from elsewhere."""
    _, manifest = config_of(llama)
    for model_type, kept in (("sam3_vit_model", True), ("timm_backbone", False), ("detr", False)):
        backbone = {"model_type": model_type, "hidden_size": 64, "backbone": "resnet50"}
        for raw in (
            {"model_type": "sam3_vision_model", "backbone_config": backbone},
            {"model_type": "sam3", "vision_config": {"backbone_config": backbone}},
        ):
            config = model_configuration(json.dumps(raw).encode(), manifest, {})
            built = getattr(config, "vision_config", config).backbone_config
            assert (built.model_type, built.hidden_size) == ("sam3_vit_model", 64 if kept else 1024)
            assert getattr(built, "backbone", None) is None


SOUND = {"model_type": "wav2vec2", "hidden_size": 64, "intermediate_size": 96, "tdnn_dim": [64] * 5}


def test_more_pixels_than_an_image_has(llama: Executor) -> None:
    _, manifest = config_of(llama)
    for size, refused in ((1540, False), (4097, True), ([32, 1 << 20], True)):
        raw = {"model_type": "vit", "hidden_size": 64, "intermediate_size": 96, "image_size": size}
        with pytest.raises(ModelMismatch, match="image_size is") if refused else nullcontext():
            assert model_configuration(json.dumps(raw).encode(), manifest, {}).image_size == size


def test_more_rows_of_sound_than_convolutions_make(llama: Executor) -> None:
    """No parameter's shape says how far a convolution steps: 16,000 rows a second instead of 50."""
    _, manifest = config_of(llama)
    for kernels, strides, refused in (
        ([10, 3, 2], [5, 2, 2], False),
        ([10, 3, 2], [1, 1, 1], True),
        ([10, 3, 2], [5, 2, 0], True),
        ([10, 3, 2], [5, 2], True),
        ([10, 3, 2], ["a", 2, 2], True),
        ([10, 3, 2], [None, 2, 2], True),
        ([10, 1, 3], [5, 1, 2], False),
    ):
        raw = SOUND | {"conv_kernel": kernels, "conv_stride": strides, "conv_dim": [32] * 3}
        with pytest.raises(ModelMismatch) if refused else nullcontext():
            config = model_configuration(json.dumps(raw).encode(), manifest, {})
            assert (config.conv_kernel, config.conv_stride) == (kernels, strides)
    parts = {"encoder": SOUND | {"conv_stride": [1] * 7}, "decoder": {"model_type": "bart"}}
    with pytest.raises(ModelMismatch, match="conv_stride"):
        model_configuration(
            json.dumps({"model_type": "speech-encoder-decoder", **parts}).encode(), manifest, {}
        )


@pytest.mark.parametrize("kernel", [["gpt2"], [[1]], [None], {"a": 1}, ["kernels-community/x", 3]])
def test_widths_of_convolutions_are_numbers(kernel: Any, llama: Executor) -> None:
    _, manifest = config_of(llama)
    config = model_configuration(json.dumps(SOUND | {"conv_kernel": kernel}).encode(), manifest, {})
    assert list(config.conv_kernel) == [10, 3, 3, 3, 3, 2, 2]


def test_names_of_classes_are_no_paths(llama: Executor) -> None:
    _, manifest = config_of(llama)
    given = {"0": "tench, Tinca tinca", "1": "../x", "2": {"a": "/x"}, "3": "http://x", "4": "x" * 200}
    raw = {"model_type": "vit", "hidden_size": 64, "intermediate_size": 96, "id2label": given}
    config = model_configuration(json.dumps(raw).encode(), manifest, {})
    assert config.id2label == {0: "tench, Tinca tinca"} | {i: f"LABEL_{i}" for i in range(1, 5)}
    raw["label2id"] = {"a": 0, "/x": 1, "http://x": 2, "x" * 200: 3}
    assert model_configuration(json.dumps(raw).encode(), manifest, {}).label2id == {"a": 0}


@pytest.mark.parametrize("model_type", ["distilbert", "flaubert", "marian", "pegasus", "roformer", "xlm"])
def test_tables_that_are_filled_in_loops_are_short(model_type: str, llama: Executor) -> None:
    _, manifest = config_of(llama)
    raw = {"model_type": model_type, "max_position_embeddings": 512}
    for given in (raw, {"model_type": "encoder-decoder", "encoder": raw, "decoder": raw}):
        model_configuration(json.dumps(given).encode(), manifest, {})
    raw["max_position_embeddings"] = 1 << 20
    for given in (raw, {"model_type": "encoder-decoder", "encoder": raw, "decoder": raw}):
        with pytest.raises(ModelMismatch, match="one by one"):
            model_configuration(json.dumps(given).encode(), manifest, {})


def test_models_of_other_inputs_are_not_built_for_a_peer(llama: Executor) -> None:
    _, manifest = config_of(llama)
    other = msgspec.structs.replace(manifest, architecture="PatchTSTModel")
    with pytest.raises(
        ModelMismatch, match=r"PatchTSTModel reads past_values; .*pixel_values.*session\.attach"
    ):
        _model_class(other, PatchTSTConfig(), None)


def test_tables_that_a_model_computes_are_bounded(
    hostile: Hostile, serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    """A causal mask of positions squared, where the manifest has as many positions."""
    executor = hostile({}, architecture="gpt_bigcode")
    with executor.connect() as session:
        remote = session.executor
        (info,) = (info for info in remote.manifest.files if info.name == "config.json")
        config = json.loads(remote.file(info)) | {"n_positions": 1 << 20}
        parameters = tuple(
            msgspec.structs.replace(each, shape=(1 << 20, *each.shape[1:])) if "wpe" in each.name else each
            for each in remote.manifest.parameters
        )
        lied = msgspec.structs.replace(remote.manifest, parameters=parameters)
        remote.manifest = msgspec.structs.replace(lied, digest=digest_of(lied))
        remote.file = lambda info: json.dumps(config).encode()  # type: ignore[method-assign]
        with pytest.raises(ModelMismatch, match=r"tables of|cannot be built"):
            session.load_model(progress=False)


def test_more_parameters_than_this_machine_has_memory_for(hostile: Hostile) -> None:
    with hostile({}).connect() as session:
        remote = session.executor
        parameters = tuple(
            msgspec.structs.replace(each, shape=(1 << 30, 1 << 20)) if "embed" in each.name else each
            for each in remote.manifest.parameters
        )
        remote.manifest = msgspec.structs.replace(remote.manifest, parameters=parameters)
        with pytest.raises(ModelMismatch, match="GiB for this machine"):
            session.load_model(progress=False)


def test_sizes_that_wrap_around_are_counted(hostile: Hostile) -> None:
    """2^64 numbers less some are a negative number of them to whoever counts in 64 bits."""
    most = (1 << 31) - 1
    with hostile({}).connect() as session:
        remote = session.executor
        decoy = ParameterInfo("decoy", (most, most, 2, 2), "float32", "0" * 64)
        parameters = (*remote.manifest.parameters, decoy)
        remote.manifest = msgspec.structs.replace(remote.manifest, parameters=parameters)
        with pytest.raises(ModelMismatch, match="GiB for this machine"):
            session.load_model(progress=False)


@pytest.mark.parametrize("name", ["conv_kernel", "max_position_embeddings"])
def test_numbers_that_layers_have_each(name: str, llama: Executor) -> None:
    _, manifest = config_of(llama)
    raw = SOUND | {name: 8, "per_layer_config": {"0": {name: 4}}}
    with pytest.raises(ModelMismatch, match=f"several {name}|cannot read"):
        model_configuration(json.dumps(raw).encode(), manifest, {})


def test_experts_larger_than_this_machine_take_no_memory() -> None:
    with _LargeOnMeta():
        large, own = torch.empty(1 << 20, 1 << 20), torch.empty((4, 4))
        assert large.is_meta
        assert not own.is_meta
        assert not torch.empty(3, 3).is_meta


def test_parameters_that_the_model_does_not_have(hostile: Hostile) -> None:
    """They would say how large the configuration's numbers may be."""

    def lie(manifest: Manifest) -> Manifest:
        extra = ParameterInfo("model.extra", (1 << 18, 1), "float32", "0" * 64)
        return msgspec.structs.replace(manifest, parameters=(*manifest.parameters, extra))

    with (
        hostile({}, lie=lie).connect() as session,
        pytest.raises(ModelMismatch, match=r"model\.extra, which"),
    ):
        session.load_model(progress=False)


@pytest.mark.parametrize("value", ["PATH", "gpt2", True, {"name": "gpt2"}, ["gpt2"]])
def test_nothing_in_a_configuration_is_loaded(value: Any, llama: Executor, secret: Path) -> None:
    """Paths, names of models to fetch, kernels, code: under every key by which anything is loaded."""
    raw, manifest = config_of(llama)
    value = str(secret) if value == "PATH" else value
    for key in (
        "auto_map",
        "_name_or_path",
        "name_or_path",
        "_attn_implementation",
        "attn_implementation",
        "experts_implementation",
        "_experts_implementation_internal",
        "quantization_config",
        "backbone",
        "backbone_config",
        "use_timm_backbone",
        "use_pretrained_backbone",
        "tokenizer_class",
        "custom_pipelines",
        "compile_config",
        "cache_implementation",
        "use_kernels",
        "adapter_path",
        "_commit_hash",
        "transformers_weights",
    ):
        with nothing_opens(secret):
            try:
                config = model_configuration(json.dumps(raw | {key: value}).encode(), manifest, {})
            except ModelMismatch:
                continue
        assert str(secret) not in str(config.to_dict())
        if key not in ("custom_pipelines", "transformers_weights"):
            assert getattr(config, key, None) in (None, "", "sdpa", False), key


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("mra", "fetch"),
        ("rwkv", "fetch"),
        ("sam3_video", "fetch"),
        ("yoso", "fetch"),
        ("videomae", "take as long to build as their configuration says"),
    ],
)
def test_model_types_that_fetch_code_or_loop(model_type: str, said: str, llama: Executor) -> None:
    """They load compiled kernels from a public hub once built or run, or fill their tables slowly."""
    raw, manifest = config_of(llama)
    for change in ({"model_type": model_type}, {"text_config": {"model_type": model_type}}):
        with pytest.raises(ModelMismatch, match=f"{model_type} .*{said}"):
            model_configuration(json.dumps(raw | change).encode(), manifest, {})


@pytest.mark.parametrize("model_type", ["detr", "timm_wrapper", "of-tomorrow", "../llama", None, 3])
def test_model_types_that_load_from_elsewhere(model_type: Any, llama: Executor) -> None:
    _, manifest = config_of(llama)
    raw = json.dumps({"model_type": model_type}).encode()
    with pytest.raises(ModelMismatch):
        _model_class(manifest, model_configuration(raw, manifest, {}), None)


# -- how text is generated --------------------------------------------------------------------------

STRANGE: dict[type, Any] = {
    bool: True,
    int: 7,
    float: 0.5,
    str: "dynamic",
    type(None): 5,
    dict: {},
    list: [1],
}


@pytest.mark.parametrize("where", ["generation_config.json", "config.json"])
def test_generation_is_the_tenants(where: str, hostile: Hostile, llama: Executor) -> None:
    """Of every option that transformers has, token ids and lengths are taken, and no other."""
    options = {
        name: STRANGE[type(value)]
        for name, value in GenerationConfig().to_dict().items()
        if name not in (*TOKENS, *LENGTHS, "transformers_version", "use_cache")
    }
    options |= {
        "prompt_lookup_num_tokens": 10,
        "num_beams": 3,
        "assistant_early_exit": 1,
        "stop_strings": "x",
    }
    raw = config_of(llama)[0]
    files: dict[str, bytes | None] = {"generation_config.json": None, "config.json": json.dumps(raw).encode()}
    files[where] = json.dumps((raw if where == "config.json" else {"eos_token_id": 5}) | options).encode()
    with hostile(files).connect() as session:
        model = session.load_model(progress=False)
    ours = model.generation_config.to_diff_dict()
    assert ours.keys() <= {*TOKENS, *LENGTHS, "transformers_version"}
    assert not model.config._get_generation_parameters()


def test_tokens_of_one_step_are_one_row(hostile: Hostile) -> None:
    """Prompt lookup, which the provider asks for, would show where generated tokens occur in the prompt."""
    evil = json.dumps({"prompt_lookup_num_tokens": 10, "max_new_tokens": 12}).encode()
    with hostile({"generation_config.json": evil}).connect() as session:
        model = session.load_model(progress=False)
        prompt = torch.tensor([[5, 6, 7, 8] * 5])
        before = session.stats.rows
        made = model.generate(input_ids=prompt, max_new_tokens=6, eos_token_id=None, pad_token_id=0)
        groups = sum(not group.head for group in session.manifest.groups)
        assert made.shape[1] == 26
        assert session.stats.rows - before == groups * (20 + 5)


@pytest.mark.parametrize(
    "given",
    [
        {"eos_token_id": "x"},
        {"eos_token_id": [-1]},
        {"max_length": 1 << 40},
        {"max_length": [1]},
        {"pad_token_id": True},
        {"bos_token_id": 1.5},
    ],
)
def test_ids_and_lengths_are_numbers(given: dict[str, Any]) -> None:
    with pytest.raises(ModelMismatch, match=r"generation_config\.json"):
        generation_configuration(json.dumps(given).encode(), None)
