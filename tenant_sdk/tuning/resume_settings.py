"""What must be the same if a training is resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from shared.options import fields_of
from tenant_sdk.storage import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tenant_sdk.tuning.checkpoints import TrainingCheckpoints
from tenant_sdk.tuning.conversations import Example, TemplateDate
from tenant_sdk.tuning.options import ReadingOptions, TrainingOption, TrainingOptions


def unchanging(options: ReadingOptions) -> dict[str, Any]:
    """Returns the options that a resumed training must have as well: all without ``may_change``."""
    kind: Any = type(options)
    values = asdict(options)
    return {
        name: values[name]
        for name, field in fields_of(kind).items()
        if not isinstance(field.option, TrainingOption) or not field.option.may_change
    }


def resume_settings_of(
    training: TrainingOptions,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    day: TemplateDate,
    adapter_folder: Path | None,
) -> dict[str, Any]:
    """Returns what must be the same if the training is resumed, as a file in JSON has it.

    Args:
        adapter_folder: the folder of the adapter that is trained further.
    """
    settings = unchanging(training)
    if training.early_stopping is not None:  # the best step is that of these
        settings["eval_steps"] = training.eval_steps
        settings["held_out"] = digest_of(repr(held_out).encode())
    settings["targets"] = list(training.targets)
    del settings["target_modules"]
    if day.written:
        settings["day"] = str(day.day)
    settings["data"] = digest_of(repr(examples).encode())
    if adapter_folder is not None:  # the adapter that is trained further
        files = [(adapter_folder / name).read_bytes() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
        settings["adapter"] = digest_of(b"".join(files))
    return settings


def template_day(output: Path, today: Callable[[], date], *, resume: bool) -> TemplateDate:
    """Returns the day that chat templates write: that of the training that is resumed, or today."""
    day = TrainingCheckpoints(output, {}).kept("day") if resume else None
    try:
        return TemplateDate(date.fromisoformat(day) if isinstance(day, str) else today())
    except ValueError:
        return TemplateDate(today())


def digest_of(content: bytes) -> str:
    """Returns a short digest, to compare a setting by."""
    return hashlib.sha256(content).hexdigest()[:16]
