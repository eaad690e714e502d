"""``adapter_config.json`` of an untrusted adapter, and the part of it that PEFT gets.

To PEFT some of its keys are names: of modules to import, of files and models to read, of tokenizers to load.
None of them is needed for an adapter that has been trained, and none is passed on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, LoraConfig, PeftConfig, PeftType, TaskType
from torch import nn

from shared.encoded import UNREADABLE, decode_json
from shared.errors import ConfigurationError
from tenant_sdk.storage import ADAPTER_CONFIG as FILE
from tenant_sdk.storage import read_blocks
from tenant_sdk.tuning.patterns import MAX_ENTRIES, without_patterns

MAX_JSON_BYTES = 1 << 20  # of each JSON file of an adapter
KINDS = (
    *("ADALORA", "IA3", "LOHA", "LOKR", "LORA", "OFT", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "VERA"),
)
_USUAL_RANK = 1024  # may be larger than a small model's layers
_Few = Annotated[int, Meta(ge=0, le=64)]
_Count = Annotated[int, Meta(ge=0, le=1 << 24)]
_Rank = Annotated[int, Meta(ge=0, le=1 << 20)]
_Number = Annotated[int, Meta(ge=-(10**6), le=10**6)] | Annotated[float, Meta(ge=-1e6, le=1e6)]
_Share = Annotated[int, Meta(ge=0, le=1)] | Annotated[float, Meta(ge=0, le=1)]
_Counts = Annotated[list[_Count], Meta(max_length=1 << 16)]
_Names = Annotated[list[str], Meta(max_length=MAX_ENTRIES)]
_Table = Annotated[dict[str, _Number], Meta(max_length=MAX_ENTRIES)]
_Pruned = Annotated[dict[str, Annotated[list[bool], Meta(max_length=1 << 16)]], Meta(max_length=1 << 16)]
# Numbers, switches, and names of the model's own layers, each with the values that it can have: they say what
# an adapter computes, and lead nowhere.
_VALUES: dict[str, Any] = {
    "task_type": Literal[*(each.value for each in TaskType)],
    **dict.fromkeys(
        ("target_modules", "exclude_modules", "feedforward_modules", "layers_pattern"), str | _Names
    ),
    **dict.fromkeys(("modules_to_save", "target_parameters"), _Names),
    "layers_to_transform": _Count | _Counts,
    "alora_invocation_tokens": _Counts,
    "trainable_token_indices": _Counts | Annotated[dict[str, _Counts], Meta(max_length=MAX_ENTRIES)],
    "rank_pattern": Annotated[dict[str, _Rank], Meta(max_length=MAX_ENTRIES)],
    "alpha_pattern": _Table,
    "bias": Literal["none", "all", "lora_only", "oft_only"],
    "encoder_reparameterization_type": Literal["MLP", "LSTM"],
    **dict.fromkeys(("r", "target_r", "init_r"), _Rank),
    **dict.fromkeys(("tinit", "tfinal", "deltaT", "total_step"), Annotated[int, Meta(ge=0, le=1 << 40)]),
    "projection_prng_key": Annotated[int, Meta(ge=0, le=(1 << 63) - 1)],
    **dict.fromkeys(("lora_alpha", "alpha", "orth_reg_weight", "d_initial", "eps"), _Number),
    **dict.fromkeys(("lora_dropout", "vera_dropout", "rank_dropout", "module_dropout"), _Share),
    **dict.fromkeys(("encoder_dropout", "beta1", "beta2"), _Share),
    "decompose_factor": Annotated[int, Meta(ge=-1, le=1 << 20)],
    **dict.fromkeys(("oft_block_size", "encoder_hidden_size"), _Rank),
    "num_virtual_tokens": Annotated[int, Meta(ge=1, le=4096)],
    **dict.fromkeys(("encoder_num_layers", "num_cayley_neumann_terms"), _Few),
    **dict.fromkeys(("fan_in_fan_out", "use_rslora", "lora_bias", "ensure_weight_tying"), bool),
    **dict.fromkeys(
        ("save_projection", "use_effective_conv2d", "decompose_both", "rank_dropout_scale"), bool
    ),
    **dict.fromkeys(("coft", "block_share", "use_cayley_neumann", "prefix_projection"), bool),
}
# How training began, where it was, what the model says, and what only goes with a key that is refused. The
# weights in the folder are enough without; some of these PEFT would follow.
_LEFT_OUT = frozenset(
    """
    peft_type auto_mapping base_model_name_or_path revision peft_version inference_mode runtime_config
    init_weights init_ia3_weights eva_config loftq_config qalora_group_size megatron_core
    token_dim num_transformer_submodules num_attention_heads num_layers
    prompt_tuning_init prompt_tuning_init_text tokenizer_name_or_path tokenizer_kwargs
    """.split()  # noqa: SIM905
)
# Ways to begin that leave the base's weights as they are.
ALLOWED_INIT_LORA_WEIGHTS = (True, False, "gaussian", "orthogonal")
# Of a ``LoraConfig`` what may be other than PEFT's default in plain LoRA of linear layers.
_PLAIN = {
    *("r", "lora_alpha", "use_rslora", "lora_dropout", "rank_pattern", "alpha_pattern", "init_lora_weights"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"),
    *("task_type", "base_model_name_or_path", "revision", "auto_mapping", "peft_version"),
}


def read_raw_config(folder: Path) -> dict[str, Any]:
    """What ``adapter_config.json`` says, unchecked, of one of the ``KINDS``.

    Raises:
        ConfigurationError: it is larger than such a file is, no object, or of another kind.
    """
    try:
        content = b"".join(read_blocks(folder / FILE, MAX_JSON_BYTES))
        fields = decode_json(content, dict[str, Any])
    except (OSError, *UNREADABLE) as error:
        raise ConfigurationError(f"cannot read {folder / FILE}: {error}") from error
    if fields.get("peft_type") not in KINDS:
        raise ConfigurationError(
            f"the adapter in {folder} is of the kind {fields.get('peft_type')!r:.40}, which cannot be "
            f"loaded; these kinds can: {', '.join(KINDS)}"
        )
    return fields


def read_adapter_config(folder: Path, model: nn.Module) -> PeftConfig:
    """PEFT's configuration of the adapter in a folder, without patterns.

    Args:
        model: that it is for.

    Raises:
        ConfigurationError: it is of another kind than those that work with remote layers, or asks for
            something that nobody's folder may ask for.
    """
    fields = read_raw_config(folder)
    kind = PeftType(fields["peft_type"])
    if fields.pop("init_lora_weights", True) not in (*ALLOWED_INIT_LORA_WEIGHTS, None, "eva"):
        raise ConfigurationError(
            f"the training of the adapter in {folder} began with changes to the base's weights, which stay "
            "with the provider: convert it to plain LoRA where it was trained (PEFT's "
            "path_initial_model_for_weight_conversion)"
        )
    config_class: type[PeftConfig] = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    known = _VALUES.keys() & {field.name for field in dataclasses.fields(config_class)}
    for name, value in fields.items():
        if name not in known | _LEFT_OUT and value:
            raise ConfigurationError(
                f"the adapter in {folder} has {name[:80]}: {value!r:.80}, which is not accepted from "
                "an adapter's folder: anybody may have written it. Use an adapter that was trained without it"
            )
    values = _VALUES | ({"rank_pattern": _Pruned} if kind == PeftType.ADALORA else {})
    fields = {name: fields[name] for name in fields.keys() & known if fields[name] is not None}
    for name, value in fields.items():
        try:
            msgspec.convert(value, values[name])
        except (msgspec.ValidationError, RecursionError) as error:
            raise ConfigurationError(
                f"{folder / FILE} cannot be used: {name} is {value!r:.80}: {error}"
            ) from error
    _check_ranks(fields, model, folder)
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    try:
        return config_class(**without_patterns(fields, names, folder))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{folder / FILE} cannot be used: {error}") from error


def _check_ranks(fields: Mapping[str, Any], model: nn.Module, folder: Path) -> None:
    """Refuse a rank that no layer of a model can have.

    Raises:
        ConfigurationError: one is larger than the smaller side of every layer.
    """
    sides = [min(each.shape[-2:]) for each in model.parameters() if each.dim() > 1]
    largest = max(sides, default=0)
    of_layers = [each for each in (fields.get("rank_pattern") or {}).values() if isinstance(each, int)]
    for rank in (*(fields.get(name, 0) for name in ("r", "init_r", "target_r")), *of_layers):
        if rank > max(largest, _USUAL_RANK):
            raise ConfigurationError(
                f"the adapter in {folder} has rank {rank}, and no layer of this model has more than "
                f"{largest} inputs and outputs"
            )
    pruned = [each for each in (fields.get("rank_pattern") or {}).values() if isinstance(each, list)]
    if any(len(each) != fields.get("init_r") for each in pruned):
        raise ConfigurationError(f"the adapter in {folder} is damaged: its rank_pattern does not fit init_r")


def not_plain(config: LoraConfig) -> list[str]:
    """Options of a configuration that make it more than plain LoRA of linear layers, with their values."""
    usual = LoraConfig()

    def value(of: LoraConfig, name: str) -> object:
        found = getattr(of, name)
        # PEFT writes an empty list for a mixture of experts of which it adapts none.
        return None if found == [] else found

    return [
        f"{field.name}={getattr(config, field.name)!r:.80}"
        for field in dataclasses.fields(config)
        if field.name not in _PLAIN and value(config, field.name) != value(usual, field.name)
    ]
