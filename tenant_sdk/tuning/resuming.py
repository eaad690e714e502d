"""Trainings that go on from a Trainer's checkpoint as if they had not stopped, to the bit.

The Trainer has PEFT save and load a checkpoint's adapter, and PEFT saves what inference needs. Training needs
more: p-tuning's encoder besides the prompt that it makes, the ranks that AdaLoRA has given up for now and the
scores that it ranks them by, parameters outside of the adapter that are trained. So a file with all of that
lies beside PEFT's files in a checkpoint. It is written along with them, before the Trainer's own state, which
makes a checkpoint whole.

A session learns from its model which layers share a request (``tenant_sdk.model.virtual``), and gradients are
rounded by request: to the bit a training goes on in a new session, or after a pass of such a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import msgspec
import torch
from peft import AdaLoraConfig, AdaLoraModel, PeftModel
from peft.tuners.tuners_utils import BaseTuner
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from shared.atomic import atomic_file
from shared.encoded import UNREADABLE
from shared.errors import ConfigurationError
from tenant_sdk.storage import UNREADABLE_TENSORS
from tenant_sdk.tuning.checkpoints import is_checkpoint, step_of

STATE = "training_state.safetensors"
_FORMAT = 1
# The Trainer goes on without them, unsaid.
_OPTIMIZER_FILES = (OPTIMIZER_NAME, SCHEDULER_NAME, "rng_state*.pth")
_SCORES = ("ipt", "exp_avg_ipt", "exp_avg_unc")  # by name of a parameter, in AdaLoRA's ``RankAllocator``
# Options of methods that keep something else from step to step, in plain attributes.
_UNSUPPORTED = ("velora_config", "monteclora_config", "use_asa")
_RESUMED = "_resumed_from"  # of a model, between its loading and the training's begin


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    """What the file says beside its tensors. ``rank_patterns``: of AdaLoRA, by adapter and parameter."""

    format: int
    step: int
    rank_patterns: dict[str, dict[str, list[bool]]]


class _Resumed(NamedTuple):
    folder: Path
    step: int


class ExactResume(TrainerCallback):
    """A callback of a ``transformers.Trainer`` that makes resuming exact, for every method of PEFT.

    Give it to the Trainer in ``callbacks=``. It adds one file to each checkpoint. The callback reads all
    trained values from this file for ``train(resume_from_checkpoint=...)`` and for
    ``load_best_model_at_end``. Make the model in the same way as before. The Trainer itself restores the
    optimizer, its schedule and the random numbers. It reads them with ``torch.load`` (``weights_only``), so
    resume only from your own folders.

    Raises:
        ConfigurationError: The Trainer raises this error if the model has no adapter, if the callback does
            not know the state of the adapter's method, if the Trainer uses FSDP or DeepSpeed, or if a
            checkpoint is damaged, lacks a file or belongs to another model.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """See TrainerCallback. The Trainer calls this before it loads a checkpoint."""
        if not isinstance(model, PeftModel):
            raise ConfigurationError(
                f"ExactResume: {type(model).__name__} has no adapter; leave it out, or give the Trainer the "
                "model of peft.get_peft_model"
            )
        for config in model.peft_config.values():
            if unknown := [name for name in _UNSUPPORTED if getattr(config, name, None)]:
                raise ConfigurationError(
                    f"ExactResume does not know what {unknown[0]} keeps between steps; leave one of them out"
                )
        if args.deepspeed or args.fsdp:
            raise ConfigurationError(
                "ExactResume needs all parameters in one process: leave out FSDP and DeepSpeed"
            )
        vars(model).update(
            save_pretrained=MethodType(_save_pretrained, model), load_adapter=MethodType(_load_adapter, model)
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """See TrainerCallback. The checkpoint is loaded, except the states of random generators."""
        if not isinstance(vars(model).get("load_adapter"), MethodType):
            raise ConfigurationError(
                "ExactResume was added too late: give it in the Trainer's callbacks=, with model=, not "
                "model_init="
            )
        resumed = vars(model).pop(_RESUMED, None)
        if not state.global_step:
            return
        if resumed is None or resumed.step != state.global_step:
            raise ConfigurationError(
                f"the model is at step {resumed.step if resumed else 0} and the Trainer at step "
                f"{state.global_step}: the checkpoint has files of different trainings; remove it"
            )
        for name in _OPTIMIZER_FILES:
            if not any(resumed.folder.glob(name)):
                raise ConfigurationError(
                    f"{resumed.folder / name} is missing, so training cannot continue from this checkpoint; "
                    "remove the folder"
                )

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """See TrainerCallback. The Trainer has loaded the best model."""
        vars(model).pop(_RESUMED, None)


def state_bytes(model: PeftModel) -> int:
    """Size of the file of a model, at most."""
    return sum(
        tensor.nbytes for tensor in [*_trained_tensors(model).values(), *_score_parameters(model).values()]
    )


def _save_pretrained(self: Any, save_directory: Any, *args: Any, **more: Any) -> None:
    """PEFT's, and in a Trainer's checkpoint the file beside it."""
    type(self).save_pretrained(self, save_directory, *args, **more)
    folder = Path(save_directory)
    if is_checkpoint(folder) and more.get("is_main_process", True):
        _write(self, folder, step_of(folder))


def _load_adapter(self: Any, model_id: Any, adapter_name: str, *args: Any, **more: Any) -> Any:
    """PEFT's, but of a Trainer's checkpoint all that its file holds, if the adapter is there already."""
    folder = Path(model_id)
    if adapter_name in self.peft_config:
        for each in (folder, folder.parent):  # several adapters lie in folders of their names
            if (each / STATE).is_file():
                return _restore(self, each)
        if (folder / TRAINER_STATE_NAME).is_file():
            raise ConfigurationError(
                f"{folder} holds no {STATE}: it was made without ExactResume, or by an earlier version; "
                "training cannot continue from it, so remove it"
            )
    return type(self).load_adapter(self, model_id, adapter_name, *args, **more)


def _trained_tensors(model: Any) -> dict[str, Tensor]:
    """What training changes: parameters that are trained or an adapter's, and buffers that are saved."""
    marks = ["prompt_encoder.", "modules_to_save.", "trainable_tokens_"]
    if isinstance(model.base_model, BaseTuner):
        marks.append(model.base_model.prefix)
    tensors: dict[str, Tensor] = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or any(mark in name for mark in marks)
    }
    saved_names = model.state_dict().keys()
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in saved_names}
    return {f"values/{name}": tensor for name, tensor in tensors.items()}


def _score_parameters(model: Any) -> dict[str, Tensor]:
    """The parameters that AdaLoRA may have scores of, which have their shapes, by kind and name."""
    if not isinstance(model.base_model, AdaLoraModel):
        return {}
    parameters = {name: each for name, each in model.base_model.model.named_parameters() if "lora_" in name}
    return {f"{kind}/{name}": each for kind in _SCORES for name, each in parameters.items()}


def _adalora_configs(model: Any) -> Iterator[tuple[str, AdaLoraConfig]]:
    return ((name, each) for name, each in model.peft_config.items() if isinstance(each, AdaLoraConfig))


def _write(model: Any, folder: Path, step: int) -> None:
    tensors = _trained_tensors(model)
    if isinstance(model.base_model, AdaLoraModel):
        for kind in _SCORES:
            scores = getattr(model.base_model.rankallocator, kind)
            tensors |= {f"{kind}/{name}": tensor for name, tensor in scores.items()}
    patterns = {name: config.rank_pattern for name, config in _adalora_configs(model) if config.rank_pattern}
    header = msgspec.json.encode(_Header(_FORMAT, step, patterns)).decode()
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    with atomic_file(folder / STATE) as file:
        save_file(copies, file, metadata={"state": header})


@torch.no_grad()
def _restore(model: Any, folder: Path) -> None:
    """Put into the model what the file holds; after an error it is as it was."""
    file, values, scored = folder / STATE, _trained_tensors(model), _score_parameters(model)
    header, tensors = _read(file, values, scored)
    patterns = header.rank_patterns
    for name, _ in _adalora_configs(model):
        if name in patterns:
            _check_pattern(file, model, name, patterns[name])
    for name, value in values.items():
        value.copy_(tensors[name])
    for name, config in _adalora_configs(model):
        config.rank_pattern = patterns.get(name)
    if scored:
        allocator = model.base_model.rankallocator
        for kind in _SCORES:
            setattr(allocator, kind, {})
        for name in scored.keys() & tensors.keys():
            kind, _, parameter = name.partition("/")
            getattr(allocator, kind)[parameter] = tensors[name].to(scored[name].device)
    vars(model)[_RESUMED] = _Resumed(folder, header.step)


def _read(
    file: Path, values: Mapping[str, Tensor], scored: Mapping[str, Tensor]
) -> tuple[_Header, dict[str, Tensor]]:
    """What the file holds, if it fits the model: all values, and perhaps scores."""
    like, tensors = {**scored, **values}, {}
    try:
        with safe_open(file, framework="pt") as stored:
            header = msgspec.json.decode((stored.metadata() or {}).get("state", ""), type=_Header)
            if header.format != _FORMAT:
                raise _other_model_error(file, f"it has format {header.format}, this version reads {_FORMAT}")
            names = set(stored.keys())
            if missing := sorted(values.keys() - names):
                raise _other_model_error(file, f"{missing[0]} is not there")
            for name in sorted(names):
                if name not in like:
                    raise _other_model_error(file, f"{name} is only there")
                if (shape := stored.get_slice(name).get_shape()) != list(like[name].shape):
                    raise _other_model_error(
                        file, f"{name} is {shape} there and {list(like[name].shape)} here"
                    )
                tensors[name] = stored.get_tensor(name)
                if tensors[name].dtype != like[name].dtype:
                    raise _other_model_error(
                        file, f"{name} is {tensors[name].dtype} there and {like[name].dtype} here"
                    )
    except (*UNREADABLE_TENSORS, *UNREADABLE) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}; remove the folder") from error
    return header, tensors


def _check_pattern(file: Path, model: Any, adapter: str, pattern: Mapping[str, list[bool]]) -> None:
    """Each layer must be said the ranks of, by PEFT's names, with the adapter's name or without."""
    end = f".lora_E.{adapter}"
    ranks = {n: len(each) for n, each in model.base_model.model.named_parameters() if n.endswith(end)}
    short = {name.removesuffix(f".{adapter}"): rank for name, rank in ranks.items()}
    if {name: len(kept) for name, kept in pattern.items()} not in (ranks, short):
        raise _other_model_error(file, "the ranks that AdaLoRA keeps are other layers'")


def _other_model_error(file: Path, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{file} is of another model, adapter or version: {what}; go on with what wrote it, or remove it"
    )
