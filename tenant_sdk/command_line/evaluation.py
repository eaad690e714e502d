"""``symbiosis-tenant evaluate``: losses and answers on data that was not learned."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from shared.errors import ConfigurationError, OptionText, StorageError
from tenant_sdk.command_line import options
from tenant_sdk.command_line.opened import opened_model
from tenant_sdk.command_line.output import (
    RESULTS,
    STATUS,
    bars,
    print_stats,
    report_interruption,
    shown,
)
from tenant_sdk.command_line.training import print_right, print_samples
from tenant_sdk.terminal import json_line
from tenant_sdk.tuning.options import EvaluationOptions, ModelOptions
from tenant_sdk.tuning.records import check_data

if TYPE_CHECKING:
    from tenant_sdk.tuning.samples import Sample

_UNITS = {"measuring the loss": "record", "writing answers": "answer"}


@options.command_line.takes
def evaluate(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Files of data, as for finetune --held-out.")
    ],
    evaluation: EvaluationOptions,
    local: ModelOptions,
    connection: options.SessionOptions,
) -> None:
    """Measure the base model and the adapter on data that was not learned.

    The command prints the perplexity (the exponential of the loss) of both, and
    counts the answers that are exactly those of the data.
    """
    if evaluation.output is not None:
        _check_new(evaluation.output)
    config = connection.session()
    check_data(files)
    with report_interruption(), opened_model(evaluation, local, config) as (session, model, tokenizer):
        from tenant_sdk.tuning import evaluation as evaluating
        from tenant_sdk.tuning.samples import right

        with bars(_UNITS) as show:
            callbacks = evaluating.EvaluationCallbacks(
                lambda line: STATUS.print(escape(shown(line))),
                lambda done, total: show("measuring the loss", done, total),
                lambda done, total: show("writing answers", done, total),
            )
            report = evaluating.evaluate(evaluation, files, model, tokenizer, callbacks)
    print_samples(report.samples)
    measured = ((report.base, "base"), (report.adapter, "adapter"))
    said = [f"{figure:.2f} of the {name}" for figure, name in measured if figure is not None]
    RESULTS.print(f"perplexity: {', '.join(said)}")
    by_base = right(report.samples, lambda each: each.base)
    by_adapter = right(report.samples, lambda each: each.adapted)
    print_right(len(report.samples), by_base, by_adapter)
    print_stats(session, config, RESULTS)
    if evaluation.output is not None:
        _write(evaluation.output, report.samples)
        RESULTS.print(f"answers: {escape(str(evaluation.output))}")


def _check_new(file: Path) -> None:
    """Refuse a place where the answers could not be written at the end."""
    if file.exists():
        raise ConfigurationError(OptionText("{output} exists already: name a new file", output=file))
    if not file.parent.is_dir() or not os.access(file.parent, os.W_OK | os.X_OK):
        raise ConfigurationError(
            OptionText("{output} cannot be written: make its folder, or choose another", output=file)
        )


def _write(file: Path, samples: Sequence[Sample]) -> None:
    """A line for each answered prompt, for its user's eyes alone."""
    lines = [
        {"prompt": each.prompt, "expected": each.expected, "base": each.base, "adapter": each.adapted}
        for each in samples
    ]
    try:
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
            out.writelines(json_line(line) + "\n" for line in lines)
    except OSError as error:
        raise StorageError(f"{file} cannot be written: {error.strerror}") from error
