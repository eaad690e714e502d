"""``symbiosis-tenant draft``: a draft for a model, or for an adapter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

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
from tenant_sdk.drafts.options import KEPT_PARTS, DraftOptions
from tenant_sdk.tuning.options import ModelOptions

if TYPE_CHECKING:
    from tenant_sdk.drafts.making import DraftCallbacks, DraftReport


UNITS = {"writing answers": "prompt", "reading texts": "text", "training": "step"}


@options.command_line.takes
def draft(making: DraftOptions, own: ModelOptions, connection: options.SessionOptions) -> None:
    """Train a draft: a small network that guesses the next tokens.

    With a draft, one pass (one run of the model) can yield several tokens. Text stays on this machine.
    """
    from tenant_sdk.storage import check_new_folder
    from tenant_sdk.tuning.checkpoints import TrainingCheckpoints
    from tenant_sdk.tuning.records import check_data, prompts_of

    output = check_new_folder(making.output)
    TrainingCheckpoints(output, {}, parts=KEPT_PARTS).check(resume=making.resume)
    config = connection.session()
    check_data(making.data)
    for file in making.prompts:
        if not file.exists() or file.is_file():  # a pipe is read once
            prompts_of(file)
    with report_interruption(), opened_model(making, own, config) as (session, model, tokenizer):
        from tenant_sdk.drafts.making import make_draft

        with bars(UNITS) as show:
            report = make_draft(making, model, tokenizer, session, callbacks_of(show))
    print_draft(report, making.output)
    print_stats(session, config, RESULTS)
    if report.pays_from < math.inf:
        words = ["chat", "--draft", str(making.output)]
        RESULTS.print(f"next: {escape(connection.command(words, making.adapter))}")


def callbacks_of(show: Callable[[str, int, int], None]) -> DraftCallbacks:
    """Of bars with ``UNITS``."""
    from tenant_sdk.drafts.making import DraftCallbacks

    return DraftCallbacks(
        lambda line: STATUS.print(escape(shown(line))),
        lambda done, total: show("writing answers", done, total),
        lambda done, total: show("reading texts", done, total),
        lambda done, total, _loss: show("training", done, total),
    )


def print_draft(report: DraftReport, output: Path) -> None:
    """Print what a draft promises, and where it is."""
    for line in _lines(report):
        RESULTS.print(line)
    RESULTS.print(f"draft: {escape(str(output))}")


def _lines(report: DraftReport) -> Iterator[str]:
    """What the draft promises."""
    shares = ", ".join(f"{share:.0%}" for share in report.acceptance)
    yield f"held-out text: {report.tokens_a_pass:.2f} tokens a pass; right guesses: {shares}"
    alone, whole = (
        f"{seconds * 1e3:.0f} ms" for seconds in (report.seconds_without_guesses, report.seconds_with_guesses)
    )
    yield f"a pass takes {alone} here, and {whole} with {len(report.acceptance)} guesses"
    if report.pays_from == math.inf:
        yield "the guesses are too seldom right to pay at any distance: train the draft on more text"
    elif report.pays_from == 0:
        yield f"the draft pays at this distance already: {report.faster:.2f} times the tokens a second"
    else:
        yield (
            f"the draft pays from {report.pays_from * 1e3:.1f} ms of round trip more than here; nearer, it "
            "guesses fewer tokens or none"
        )
