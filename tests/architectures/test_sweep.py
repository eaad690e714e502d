"""What a run remembers of an earlier one, and what is said of a process that does not answer."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import sweep
from examination import Result

ONE = ("base", "bert", "BertModel")


def test_results_of_other_versions_are_dropped(tmp_path: Path) -> None:
    here = dataclasses.asdict(Result(*ONE, stage="done"))
    older = here | {"model_type": "older", "versions": "transformers 4.0.0"}
    undated = {"kind": "base", "model_type": "undated", "class_name": "BertModel", "stage": "done"}
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in (older, here, undated)))
    assert list(sweep.read(file)) == [ONE]


@pytest.mark.parametrize(
    ("way", "stage"),
    [("late", "serve"), ("dead", "build"), ("dead", "local"), ("dead", "serve"), ("dead", "backward")],
)
def test_the_stage_of_what_does_not_end(way: str, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def examine(kind: str, model_type: str, class_name: str, tell: Callable[[str], None]) -> Result:
        tell(stage)
        if way == "dead":
            os._exit(7)
        time.sleep(600)
        raise AssertionError

    monkeypatch.setattr(sweep, "examine", examine)
    # A busy machine takes some time to begin the process that says its stage.
    monkeypatch.setattr(sweep, "SECONDS", 10.0 if way == "late" else 600.0)
    (result,) = sweep.examined([ONE], 1)
    assert (result.key, result.stage) == (ONE, stage)
    assert result.ran == (stage not in ("build", "local"))
    assert ("more than 10 s" if way == "late" else "status 7") in result.said
