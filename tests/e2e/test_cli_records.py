"""The example of records, from the command line: what is said, and what is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from commands import BASE_MODEL, TRAIN, here, ok, ok_here, tenant
from conftest import Executor
from transformers import AutoTokenizer

from shared.errors import ConfigurationError
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
    assert "what is learned of it is between ⟦ and ⟧:\n<s>Seen: Jonah, mare" in err
    assert "Fields:⟦ name: Jonah; kind: horse; owner: Mrs Field; trouble: belly; again: ten days</s>⟧" in err
    assert re.search(r"tokens in \d+ blocks of 96", err)
    assert re.search(r"estimate: 6 more steps in about [\d.]+ seconds, [\d.]+ GB up and [\d.]+ GB down", err)
    figures = r"[\d,]+ tokens/s, [\d,.]+ MB/s(?:, 0:00:\d\d left)?\n"
    assert re.search(rf"step 10 of 10: loss [\d.]+, (held-out [\d.]+, )?{figures}", err)
    shown = re.findall(rf"step \d+ of 10: loss [\d.]+, held-out ([\d.]+), {figures}", err)
    assert len(shown) == len(set(shown)) > 3, "each measurement is told once"
    for shown in (
        r"held-out  Seen: .* Fields:\n  expected  name: .*\n  base      .*\n  adapter   .*",
        r"loss      [▁-█]{10}  [\d.]+ → [\d.]+",
        r"held-out  [▁-█]{6}  [\d.]+ → [\d.]+",
        r"held-out answers right to the letter: 0 of 4 by the base, \d of 4 by the adapter",
        rf"next: symbiosis-tenant generate --adapter {adapter} --prompt \.\.\. \(and the options of the",
    ):
        assert re.search(shown, out), shown
    before, after = map(float, re.search(r"perplexity: ([\d.]+) before, ([\d.]+) after", out).groups())  # type: ignore[union-attr]
    assert after < before / 5
    answers = tmp_path / "answers.jsonl"
    measure = ("evaluate", executor, few, *plain, "--sequence-length", 96, "--adapter", adapter)
    measured, _ = ok_here(*measure, "--output", answers)
    assert f"perplexity: {before:.2f} of the base, {after:.2f} of the adapter" in measured
    right = re.search(r"held-out answers right to the letter: .*", out)
    assert right is not None
    assert right[0] in measured
    assert len(answers.read_text().splitlines()) == 4
    assert json.loads(answers.read_text().splitlines()[0]).keys() == {"prompt", "expected", "base", "adapter"}
    assert answers.stat().st_mode & 0o777 == 0o600
    assert f"--output {answers} exists already" in str(here(*measure, "--output", answers).exception)
    nowhere = tmp_path / "nowhere" / "answers.jsonl"
    assert f"--output {nowhere} cannot be written" in str(here(*measure, "--output", nowhere).exception)
    note = json.loads(few.read_text().splitlines()[0])["prompt"]
    write = ("generate", executor, *plain, "--adapter", adapter, "--prompt", note, "--max-new-tokens", 20)
    out, err = ok_here(*write, "--stop", ":")
    assert out.rstrip("\n").count(":") == 1
    assert "ended by: --stop" in err
    refused = here(*write, "--system", "Be brief.")
    assert "the prompt: a chat needs a chat template" in str(refused.exception)
    assert note not in refused.output + str(refused.exception)


def test_what_is_learned_is_shown(tmp_path: Path, serve: Callable[..., Executor]) -> None:
    """With the executor's tokenizer as with the same one of a folder."""
    executor = serve(BASE_MODEL)
    records = NOTES.read_text().splitlines(keepends=True)[:3]
    file = tmp_path / "few [1]\x1b]0;red.jsonl"  # a name that a terminal would obey
    file.write_text("".join([*records, records[0], json.dumps({"prompt": "a", "completion": " b" * 99})]))
    arguments = (file, "--sequence-length", 96, "--privacy", "plain")
    out, _ = ok_here("data", executor, *arguments, "--head", 1)
    shown = str(file).replace("\x1b", "\ufffd")
    assert f"{shown}, line 1, " in out
    assert "Fields:⟦ name: Jonah; kind: horse" in out
    assert f"{shown}, line 2" not in out
    assert f"{shown}, line 4: the same as {shown}, line 1\n" in out
    assert re.search(r"line 5: left out, \d+ tokens are more than 96\n", out)
    assert re.search(r"64 to +127 tokens  █+ 4\n", out)
    out, _ = ok_here("data", executor, *arguments, "--json")
    same, _ = ok_here("data", executor, *arguments, "--json", "--tokenizer", BASE_MODEL)
    assert out == same
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["line"] for line in lines] == [1, 2, 3, 4, 5]
    assert all(line["file"] == str(file) and len(line["tokens"]) == len(line["learned"]) for line in lines)
    tokenizer = AutoTokenizer.from_pretrained(BASE_MODEL)
    learned = [token for token, yes in zip(lines[0]["tokens"], lines[0]["learned"], strict=True) if yes]
    assert tokenizer.decode(learned) == json.loads(records[0])["completion"] + "</s>"


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    tmp_path: Path, serve: Callable[..., Executor]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BASE_MODEL)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<note>"]})
    tokenizer.save_pretrained(tmp_path / "words")
    plain = ("--privacy", "plain", "--tokenizer", tmp_path / "words")
    learn = ("finetune", serve(BASE_MODEL), *plain, "--data", TRAIN, "--output", tmp_path / "adapter")
    refused = here(*learn)
    assert f"words has {len(tokenizer)} tokens, and the model has embeddings for" in str(refused.exception)
    assert isinstance(refused.exception, ConfigurationError)
    assert not (tmp_path / "adapter").exists()
