"""The PEFT methods that `symbiosis-tenant finetune` offers: those that never read a base weight."""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from shared.errors import ConfigurationError, peer_text

ALL_LINEAR = "all-linear"
# Methods whose adapters are trained further, by PEFT's names. AdaLoRA's ranks follow a schedule that is over.
_KINDS = {"lora": "LORA", "ia3": "IA3", "vera": "VERA", "loha": "LOHA", "lokr": "LOKR"}
_LORAS = ("lora", "rslora", "adalora")
# Two layers of each expert are one parameter, which PEFT gives twice the rank. It looks for it among layers
# alone before it says that it has not.
_FALSE_WARNING = (
    "The following (rank|alpha)_pattern keys did not match any targeted module and were ignored: "
)
_FUSED_LAYER, _FUSED_NOTE = "gate_up_proj", ", which is two layers in one"
_LONGEST_NAME = 40
_OF_EXPERTS = r"\[('[^']*\.gate_up_proj'(, )?)+\]"

# Of an adapter that is trained further: the least scale of what it adds, and the most dropout. With a smaller
# scale the usual learning rates change next to nothing.
_MIN_SCALE, _MAX_DROPOUT = 0.01, 0.99


@dataclass(frozen=True)
class AdapterOptions:
    """What the adapter shall be.

    ``rank`` of the low-rank methods. ``alpha`` (None: twice the rank) and ``dropout`` of LoRA's kinds.
    ``targets``: names of layers, or ``all-linear`` for every linear layer but the output head, for low-rank
    methods. ``virtual_tokens``: length of the prompt-like methods. ``steps``: optimizer steps of the whole
    training, for AdaLoRA's schedule. ``seed`` of VeRA's random projections, which are not trained.
    ``transposed``: the model's layers are GPT-2's ``Conv1D``, which PEFT wants to be told.
    ``gradient_accumulation``: batches of a step, for AdaLoRA's loss.
    """

    method: str = "lora"
    rank: int = 8
    targets: tuple[str, ...] = (ALL_LINEAR,)
    virtual_tokens: int = 20
    steps: int = 100
    seed: int = 0
    transposed: bool = False
    alpha: float | None = None
    dropout: float = 0.0
    gradient_accumulation: int = 1

    @property
    def scale(self) -> float:
        """Of LoRA's kinds."""
        return 2 * self.rank if self.alpha is None else self.alpha

    @property
    def target_modules(self) -> str | list[str]:
        """As PEFT wants it."""
        return ALL_LINEAR if ALL_LINEAR in self.targets else list(self.targets)


@dataclass(frozen=True)
class Method:
    """A row of the table below; ``learning_rate`` is what the command line takes if the user gives none."""

    learning_rate: float
    make: Callable[[AdapterOptions], Any]
    low_rank: bool = True
    prompt_like: bool = False


def _peft() -> ModuleType:
    """Imported when an adapter is made: it takes seconds, and a wrong method is told at once."""
    import peft

    return peft


def _lora(options: AdapterOptions, **more: Any) -> Any:
    return _peft().LoraConfig(
        r=options.rank,
        lora_alpha=options.scale,
        lora_dropout=options.dropout,
        target_modules=options.target_modules,
        fan_in_fan_out=options.transposed,
        task_type="CAUSAL_LM",
        **more,
    )


def _adalora(options: AdapterOptions) -> Any:
    # Starts with half as much rank again, gives it up between the first tenth and the last third.
    return _peft().AdaLoraConfig(
        init_r=options.rank + (options.rank + 1) // 2,
        target_r=options.rank,
        tinit=options.steps // 10,
        tfinal=options.steps // 3,
        deltaT=max(1, options.steps // 50),
        total_step=options.steps,
        # PEFT adds its term to the loss of each batch, and those of a step are summed up.
        orth_reg_weight=0.5 / options.gradient_accumulation,
        lora_alpha=options.scale,
        lora_dropout=options.dropout,
        target_modules=options.target_modules,
        fan_in_fan_out=options.transposed,
        task_type="CAUSAL_LM",
    )


def _vera(options: AdapterOptions) -> Any:
    return _peft().VeraConfig(
        r=options.rank,
        target_modules=options.target_modules,
        projection_prng_key=options.seed,
        fan_in_fan_out=options.transposed,
        task_type="CAUSAL_LM",
    )


def _loha(options: AdapterOptions) -> Any:
    return _peft().LoHaConfig(
        r=options.rank, alpha=options.rank, target_modules=options.target_modules, task_type="CAUSAL_LM"
    )


def _lokr(options: AdapterOptions) -> Any:
    return _peft().LoKrConfig(
        r=options.rank, alpha=options.rank, target_modules=options.target_modules, task_type="CAUSAL_LM"
    )


def _ia3(options: AdapterOptions) -> Any:
    # Which layers are scaled at their input and which at their output is PEFT's knowledge.
    return _peft().IA3Config(fan_in_fan_out=options.transposed, task_type="CAUSAL_LM")


def _prefix(options: AdapterOptions) -> Any:
    return _peft().PrefixTuningConfig(num_virtual_tokens=options.virtual_tokens, task_type="CAUSAL_LM")


def _prompt(options: AdapterOptions) -> Any:
    return _peft().PromptTuningConfig(num_virtual_tokens=options.virtual_tokens, task_type="CAUSAL_LM")


def _p_tuning(options: AdapterOptions) -> Any:
    return _peft().PromptEncoderConfig(num_virtual_tokens=options.virtual_tokens, task_type="CAUSAL_LM")


METHODS: dict[str, Method] = {
    "lora": Method(1e-3, _lora),
    "rslora": Method(1e-3, lambda options: _lora(options, use_rslora=True)),
    "adalora": Method(2e-3, _adalora),
    "ia3": Method(5e-3, _ia3, low_rank=False),
    "vera": Method(5e-3, _vera),
    "loha": Method(1e-3, _loha),
    "lokr": Method(2e-3, _lokr),
    "prefix": Method(1e-2, _prefix, low_rank=False, prompt_like=True),
    "prompt": Method(1e-2, _prompt, low_rank=False, prompt_like=True),
    "p-tuning": Method(1e-3, _p_tuning, low_rank=False, prompt_like=True),
}


def find_method(name: str) -> Method:
    """A row of ``METHODS``.

    Raises:
        ConfigurationError: no such method, or one that needs the base weights.
    """
    if name in METHODS:
        return METHODS[name]
    needs_weights = name.lower() in ("dora", "pissa", "olora", "corda", "milora")
    why = ", which reads the base weights; they stay with the provider" if needs_weights else ""
    raise ConfigurationError(f"unknown method {name!r}{why}; choose from {', '.join(METHODS)}")


def training_options_of(config: Any) -> dict[str, Any]:
    """The options of a training that made an adapter, from PEFT's configuration of it.

    Raises:
        ConfigurationError: it is of a kind that is not trained further, or its weights would not learn from
            all tokens.
    """
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    name = next((name for name, peft_type in _KINDS.items() if peft_type == kind), "")
    if not name:
        raise ConfigurationError(
            "{adapter}: an adapter of the kind {} cannot be trained further; these kinds can: {}",
            *(kind, ", ".join(_KINDS.values())),
        )
    options = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    least = _MIN_SCALE * _divisor(options)
    bad = [each for each in ("lora_alpha", "alpha") if abs(options.get(each, least)) < least]
    bad += [each for each, value in options.items() if each.endswith("_dropout") and value > _MAX_DROPOUT]
    scales = (options.get("alpha_pattern") or {}).values()
    bad += ["alpha_pattern"] if any(abs(each) < least for each in scales) else []
    # PEFT leaves such an adapter out of what stands before these tokens, and of packed records.
    bad += ["alora_invocation_tokens"] if options.get("alora_invocation_tokens") else []
    if bad:
        raise ConfigurationError(
            "{adapter}: an adapter with {} = {} cannot be trained further, since its weights would not learn "
            "from all tokens. Give another adapter, or give none to train a new one",
            *(bad[0], str(options[bad[0]])[:80]),
        )
    targets = config.target_modules or ()
    values = {
        "method": name,
        "target_modules": targets if isinstance(targets, str) else ",".join(sorted(targets)),
    }
    if name == "lora":
        values["method"] = "rslora" if config.use_rslora else name
        return values | {"rank": config.r, "alpha": config.lora_alpha, "dropout": config.lora_dropout}
    return values | ({} if name == "ia3" else {"rank": config.r, "alpha": options.get("alpha")})


def _divisor(options: dict[str, Any]) -> float:
    """The largest number that PEFT divides an adapter's scales by: each layer's rank, or the root of it."""
    ranks = [options.get("r") or 1, *(options.get("rank_pattern") or {}).values()]
    largest = max((rank for rank in ranks if isinstance(rank, int)), default=1)  # AdaLoRA's are lists
    return math.sqrt(largest) if options.get("use_rslora") else float(largest)


def default_rate(method: Method, model: Any) -> float:
    """The learning rate of a training that is given none: a method's, less for models wider than 824.

    LoRA's best rate falls with the width as ``5e-4 * (2000 / width) ** 0.781`` (Schulman and others, LoRA
    Without Regret, 2025, as measured there for Llama). Narrow models keep the method's own rate.
    """
    width = getattr(model.config.get_text_config(decoder=True), "hidden_size", None) or 0
    narrower = 0.5 * (2000 / width) ** 0.781 if width else 1.0
    return float(f"{method.learning_rate * min(1.0, narrower):.2g}")


@contextmanager
def without_false_warnings(keys: str = _OF_EXPERTS) -> Iterator[None]:
    """Around what makes an adapter: keep back PEFT's word that experts' rank was ignored.

    Args:
        keys: a regular expression of the keys that are not told; of a folder that was read, none are.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_FALSE_WARNING + keys, category=RuntimeWarning)
        yield


def other_ranks_text(adapted: Any) -> str:
    """Where LoRA's rank is another than was asked for, to go on a line with; or nothing."""
    patterns = getattr(adapted.peft_config["default"], "rank_pattern", None) or {}
    ranks = {key: rank for key, rank in patterns.items() if isinstance(rank, int)}  # AdaLoRA's are lists
    pairs = dict.fromkeys((key.rpartition(".")[2], rank) for key, rank in ranks.items())
    return "".join(
        f"; rank {rank} in {peer_text(name, _LONGEST_NAME)}{_FUSED_NOTE if name == _FUSED_LAYER else ''}"
        for name, rank in pairs
    )


def add_adapter(model: Any, options: AdapterOptions) -> Any:
    """A PEFT model with a fresh adapter around a transformers model.

    Raises:
        ConfigurationError: the method is unknown, or does not fit the model or the options.
    """
    method = find_method(options.method)
    if options.targets != (ALL_LINEAR,) and not method.low_rank:
        raise ConfigurationError(
            "{} chooses its layers itself; {target_modules} is for the low-rank methods", options.method
        )
    if options.method not in _LORAS and (options.alpha is not None or options.dropout):
        raise ConfigurationError(
            "{} has no such options: {alpha} and {dropout} are for {}", options.method, ", ".join(_LORAS)
        )
    if ALL_LINEAR in options.targets and len(options.targets) > 1:
        raise ConfigurationError(
            "{target_modules} means all linear layers: leave out other names", target_modules=ALL_LINEAR
        )
    from transformers.pytorch_utils import Conv1D

    from tenant_sdk.model.virtual import VirtConv1D, VirtLinear

    transposed = any(isinstance(module, Conv1D) for module in model.modules())
    options = dataclasses.replace(options, transposed=transposed)
    layers = {name for name, each in model.named_modules() if isinstance(each, (VirtLinear, VirtConv1D))}
    names = sorted({name.rpartition(".")[2] for name in layers})
    try:
        with without_false_warnings():
            adapted = _peft().get_peft_model(model, method.make(options))
    except (ValueError, KeyError, TypeError) as error:
        if method.low_rank and re.search("target.modules", str(error), re.IGNORECASE):
            fit = ",".join(name for name in names if f"'{name}'" not in str(error))
            raise ConfigurationError(
                "{} does not fit {} with {target_modules}; layers that it can be given: {}",
                *(options.method, type(model).__name__, fit),
                target_modules=",".join(options.targets),
            ) from error
        raise ConfigurationError(
            f"{options.method} does not fit {type(model).__name__} with these options: {error}"
        ) from error
    if method.low_rank and (lost := _targets_without_layers(adapted, options.targets)):
        raise ConfigurationError(
            "{target_modules}: {} has no layer of that name; those with the provider are {}",
            *(type(model).__name__, ",".join(names)),
            target_modules=",".join(lost),
        )
    # Nothing, until ``save_adapter``: with each checkpoint PEFT would ask a hub about the model of that name.
    adapted.peft_config["default"].base_model_name_or_path = ""
    return adapted


def _targets_without_layers(adapted: Any, targets: tuple[str, ...]) -> list[str]:
    """Targets that PEFT has found no layer for; those that it knows as parts of experts it takes out."""
    found, left = adapted.base_model.targeted_module_names, adapted.peft_config["default"].target_modules
    return [
        target
        for target in targets
        if target in left and not any(f".{name}".endswith(f".{target}") for name in found)
    ]
