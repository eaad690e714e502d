"""The example of records, from the command line: what is said, and what is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from commands import BASE_MODEL, TRAIN, here, ok, ok_here, tenant
from conftest import Executor

from tenant_sdk.storage import check_new_folder

NOTES = TRAIN.with_name("note_fields_train.jsonl")
HELD_OUT = TRAIN.with_name("note_fields_heldout.jsonl")


def test_records_are_learned(tmp_path: Path, serve: Callable[..., Executor]) -> None:
    executor, adapter = serve(BASE_MODEL), check_new_folder(tmp_path / "adapter")
    few = tmp_path / "few.jsonl"
    few.write_text("".join(HELD_OUT.read_text().splitlines(keepends=True)[:4]))
    plain = ("--privacy", "plain")
    learn = ("finetune", executor, *plain, "--data", NOTES, "--data", TRAIN, "--held-out", few)
    learn += ("--steps", 10, "--batch-size", 4, "--learning-rate", 5e-3, "--sequence-length", 96)
    out, err = ok(tenant(*learn, "--output", adapter))
    assert f"{NOTES}: 600 records, " in err
    assert re.search(r"tokens in \d+ blocks of 96", err)
    assert re.search(r"estimate: 10 steps in about [\d.]+ seconds, [\d.]+ GB up and [\d.]+ GB down", err)
    assert re.search(r"step 10 of 10: loss [\d.]+, [\d,]+ tokens/s, 0:00:00 left", err)
    before, after = map(float, re.search(r"perplexity: ([\d.]+) before, ([\d.]+) after", out).groups())  # type: ignore[union-attr]
    assert after < before / 5
    note = json.loads(few.read_text().splitlines()[0])["prompt"]
    write = ("generate", executor, *plain, "--adapter", adapter, "--prompt", note, "--max-new-tokens", 20)
    out, err = ok_here(*write, "--stop", ":")
    assert out.rstrip("\n").count(":") == 1
    assert "ended by: --stop" in err
    refused = here(*write, "--chat")
    assert "the prompt: a chat needs a chat template" in str(refused.exception)
    assert note not in refused.output + str(refused.exception)
