"""``adapter_config.json`` of an adapter that may be anybody's: what of it PEFT is told.

To PEFT some of its keys are names: of modules to import, of files and models to read, of tokenizers to load.
None of them is needed for an adapter that has been trained, and none is passed on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import torch
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PeftConfig, PeftType
from safetensors import safe_open
from torch import Tensor

from shared.encoded import UNREADABLE
from shared.errors import ConfigurationError
from tenant_sdk.model.remote_weight import RemoteWeight
from tenant_sdk.storage import ADAPTER_CONFIG as FILE
from tenant_sdk.storage import ADAPTER_WEIGHTS as WEIGHTS
from tenant_sdk.tuning.patterns import without_patterns

# The kinds that are loaded, and what the names of their weights hold.
_KINDS = {
    **dict.fromkeys(("LORA", "ADALORA"), "lora_"),
    **dict.fromkeys(("PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING"), "prompt_embeddings"),
    "IA3": "ia3_",
    "VERA": "vera_",
    "LOHA": "hada_",
    "LOKR": "lokr_",
    "OFT": "oft_",
}
_TOKENS = "token_adapter"  # of ``trainable_token_indices``
# What PEFT calls the base model's own layers inside of its own.
_INNER = frozenset({"base_layer", "original_module"})
# Numbers, switches, and names of the model's own layers: they say what an adapter computes, and lead nowhere.
_COMPUTES = frozenset(
    """
    task_type r target_modules exclude_modules lora_alpha lora_dropout fan_in_fan_out bias use_rslora
    lora_bias modules_to_save layers_to_transform layers_pattern rank_pattern alpha_pattern target_parameters
    trainable_token_indices ensure_weight_tying alora_invocation_tokens
    target_r init_r tinit tfinal deltaT beta1 beta2 orth_reg_weight total_step
    feedforward_modules
    projection_prng_key save_projection vera_dropout d_initial
    alpha rank_dropout module_dropout use_effective_conv2d decompose_both decompose_factor rank_dropout_scale
    oft_block_size coft eps block_share use_cayley_neumann num_cayley_neumann_terms
    num_virtual_tokens token_dim num_transformer_submodules num_attention_heads num_layers
    encoder_hidden_size prefix_projection encoder_reparameterization_type encoder_num_layers encoder_dropout
    """.split()  # noqa: SIM905
)
# How training began, where it was, and what only goes with a key that is refused. The weights in the folder
# are enough without; some of these PEFT would follow.
_LEFT_OUT = frozenset(
    """
    peft_type auto_mapping base_model_name_or_path revision peft_version inference_mode runtime_config
    init_weights init_ia3_weights eva_config loftq_config qalora_group_size megatron_core
    prompt_tuning_init prompt_tuning_init_text tokenizer_name_or_path tokenizer_kwargs
    """.split()  # noqa: SIM905
)
# Ways to begin that leave the base's weights as they are.
_BEGINNINGS = (True, False, None, "gaussian", "orthogonal", "eva")


def read_adapter_config(folder: Path, modules: Iterable[str]) -> PeftConfig:
    """PEFT's configuration of the adapter in a folder, without patterns.

    Args:
        modules: names of all modules of the model that it is for, and of their parameters.

    Raises:
        ConfigurationError: it is of another kind than those that work with remote layers, or asks for
            something that nobody's folder may ask for.
    """
    try:
        given = msgspec.json.decode((folder / FILE).read_bytes(), type=dict[str, Any])
    except (OSError, *UNREADABLE) as error:
        raise ConfigurationError(f"cannot read {folder / FILE}: {error}") from error
    kind = given.get("peft_type")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigurationError(
            f"the adapter in {folder} is of the kind {kind!r:.40}; those of the kinds "
            f"{', '.join(sorted(_KINDS))} are loaded"
        )
    if given.pop("init_lora_weights", True) not in _BEGINNINGS:
        raise ConfigurationError(
            f"the adapter in {folder} was begun with changes to the base's weights, which stay with the "
            "provider: convert it to plain LoRA where it was trained (PEFT's path_initial_model_for_weight_"
            "conversion)"
        )
    made: type[PeftConfig] = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)]
    known = _COMPUTES & {field.name for field in dataclasses.fields(made)}
    for name, value in given.items():
        if name not in known | _LEFT_OUT and value:
            raise ConfigurationError(
                f"the adapter in {folder} has {name[:80]}: {value!r:.80}, which is not taken from an "
                "adapter's folder: anybody may have written it. Have it trained without"
            )
    try:
        given = {name: given[name] for name in given.keys() & known}
        return made(**without_patterns(given, modules, folder))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{folder / FILE} cannot be used: {error}") from error


def check_weights(
    folder: Path, config: PeftConfig, base: Mapping[str, Tensor], own: Collection[str]
) -> set[str]:
    """Refuse weights that are not the adapter's: PEFT would write them over the base model's, for good.

    Args:
        config: of the adapter, as ``read_adapter_config`` gives it.
        base: the model's parameters by name. The file may hold what they are already: PEFT saves embeddings
            that have an adapter.
        own: names of those that may be written over, such as embeddings that the user has resized.

    Returns:
        Names of the model's parameters that PEFT will write: those of ``own``, those that it writes with what
        they are already, and biases that the adapter was trained with.

    Raises:
        ConfigurationError: there are some; the message names one.
        SafetensorError: the file cannot be read.
    """
    mark = _KINDS[PeftType(config.peft_type).value]
    saved = tuple(getattr(config, "modules_to_save", None) or ())
    biases, written = getattr(config, "bias", "none"), set()
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        keys = list(file.keys())
        adapted = {key.split(f".{mark}")[0] for key in keys if f".{mark}" in key}
        for key in keys:
            parts = key.removeprefix("base_model.model.").split(".")
            name = ".".join(part for part in parts if part not in _INNER)
            if name in own or _same(base.get(name), file, key):
                written.add(name)
                continue
            inner = max((at for at, part in enumerate(parts) if part in _INNER), default=-1)
            if any(part.startswith((mark, _TOKENS)) for part in parts[inner + 1 :]):
                continue
            # As PEFT looks for modules to save: by how their names end.
            modules = accumulate(parts[:-1], lambda above, part: f"{above}.{part}")
            if inner < 0 and any(module.endswith(saved) for module in modules):
                continue
            adapted_bias = biases != "none" and key.removesuffix(".bias") in adapted
            if inner < 0 and parts[-1] == "bias" and (biases == "all" or adapted_bias):
                written.add(name)
                continue
            raise ConfigurationError(
                f"{folder / WEIGHTS} holds {name[:120]!r}, which is no part of the adapter: it would be "
                "written over the base model's. Take it out of the file"
            )
    return written


def _same(held: Tensor | None, file: Any, key: str) -> bool:
    """Whether a tensor of a file is what a parameter holds already; a remote one is not looked at."""
    if held is None or isinstance(held, RemoteWeight):
        return False
    if file.get_slice(key).get_shape() != list(held.shape):
        return False
    return torch.equal(file.get_tensor(key).to(held), held)
