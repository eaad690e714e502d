"""Packing, perplexity, options and reports of a training."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from conftest import RING, Executor
from trainings import LONGER, Letters, learned_record, options, records, train
from transformers import LlamaConfig, MixtralConfig, MixtralForCausalLM, TrainerCallback
from transformers.integrations import integration_utils

import tenant_sdk
from shared.errors import (
    ConfigurationError,
)
from tenant_sdk.sequences.planning import MemoryPlan
from tenant_sdk.tuning import trainer
from tenant_sdk.tuning.adapters import METHODS, default_rate
from tenant_sdk.tuning.conversations import fully_learned
from tenant_sdk.tuning.data import Reader, pack, text_tokens
from tenant_sdk.tuning.evaluation import EvaluationCallbacks, evaluate, perplexity
from tenant_sdk.tuning.finetuning import TrainingCallbacks, finetune
from tenant_sdk.tuning.generation import generate_answers
from tenant_sdk.tuning.options import EvaluationOptions
from tenant_sdk.tuning.progress import TrainingStep
from tenant_sdk.tuning.records import read_text
from tenant_sdk.tuning.samples import Sample, sample_prompts
from tenant_sdk.tuning.sampling import Sampling
from tenant_sdk.tuning.trackers import check_reports


def test_packing() -> None:
    assert pack(range(7), 3, keep_tail=False) == [[0, 1, 2], [3, 4, 5]]
    assert pack(range(8), 3, keep_tail=True) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert pack(range(7), 3, keep_tail=True) == [[0, 1, 2], [3, 4, 5], [5, 6]]  # one token predicts nothing
    assert pack(range(2), 3, keep_tail=False) == [[0, 1]]


def test_reading(tmp_path: Path) -> None:
    for content, message in ((b"\xff\xfe", "not plain text in UTF-8"), (b"", "no text to learn from")):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(ConfigurationError, match=message):
            text_tokens(tmp_path, read_text(tmp_path / "file"), Letters())
    with pytest.raises(ConfigurationError, match="No such file"):
        read_text(tmp_path / "missing")


def test_the_loss_of_a_router_does_not_count() -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, router_aux_loss_coef=5.0,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    examples = [
        {"input_ids": [1, 2, 3, 4, 5], "labels": [1, 2, 3, 4, 5]},
        {"input_ids": [6, 7], "labels": [6, 7]},
    ]
    right = perplexity(model, examples, 2)
    model.config.output_router_logits = True
    assert perplexity(model, examples, 2) == right


def test_perplexity_weighs_every_predicted_token_the_same(session: tenant_sdk.Session) -> None:
    model = session.load_model(progress=False)
    blocks = pack(list(range(3, 50)), 10, keep_tail=True)
    assert len(blocks[-1]) == 7
    nats: list[float] = []
    with torch.no_grad():
        for block in blocks:
            logits = model(input_ids=torch.tensor([block])).logits[0].log_softmax(-1)
            nats += [-float(logits[i, token]) for i, token in enumerate(block[1:])]
    examples = [fully_learned(block) for block in blocks]
    assert perplexity(model.train(), examples, 3) == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-5)
    assert model.training


def test_a_training(session: tenant_sdk.Session, text: Path) -> None:
    shown: list[TrainingStep] = []
    training = options(text, "adapter", held_out=(text,), learning_rate=0.05, steps=8)
    report, said = train(session, training, shown.append)
    assert report.steps == 8
    assert report.last_loss < report.first_loss
    assert report.perplexity_after is not None
    assert report.perplexity_before is not None
    assert report.perplexity_after < report.perplexity_before
    assert sorted({now.step for now in shown if now.loss is None}) == list(range(1, 9))
    assert all(now.steps == 8 and now.tokens_per_second > 0 for now in shown)
    assert shown[0].seconds_left is None
    assert shown[-1].seconds_left == 0
    assert len({now.held_out for now in shown}) == 1 + 4  # before the first step, and after every second one
    assert shown[-1].held_out == pytest.approx(math.log(report.perplexity_after))
    assert any("372 tokens in 23 blocks of 16" in line for line in said)
    assert any("8 steps of 2 out of 23 examples" in line for line in said)
    assert {path.name for path in text.parent.iterdir()} == {"notes.txt", "adapter"}
    names = {path.name for path in training.output.iterdir()}
    assert names == {"README.md", "symbiosis.json", "adapter_config.json", "adapter_model.safetensors"}
    record = json.loads((training.output / "symbiosis.json").read_text())
    # Users publish this folder: an option that is added to a training must not get there by itself.
    assert record["training"].keys() == {
        *("method", "rank", "targets", "dropout", "learning_rate", "schedule", "weight_decay"),
        *("batch_size", "gradient_accumulation", "packing", "sequence_length"),
        *("train_on_prompt", "seed", "tokens_of_data", "steps", "seconds", "first_loss", "last_loss"),
        *("perplexity_before", "perplexity_after"),
    }
    assert record["weights"] == session.manifest.weights
    assert (
        record["training"].items()
        >= {"method": "lora", "steps": 8, "tokens_of_data": 23 * 16, "rank": 2}.items()
    )
    assert record["training"]["targets"] == ["all-linear"]
    assert record["training"]["last_loss"] == pytest.approx(report.last_loss, rel=1e-3)
    assert record["training"]["perplexity_after"] == pytest.approx(report.perplexity_after, rel=1e-3)
    assert "data" not in record["training"]
    assert any(line.startswith("the adapter's files will not say where its base is found") for line in said)
    for path in training.output.iterdir():
        assert b"terrier" not in path.read_bytes()
    with pytest.raises(ConfigurationError, match="exists already"):
        train(session, training)


def test_one_time_masks_train_the_same_adapter(
    session: tenant_sdk.Session, serve: Callable[..., Executor], checkpoint: Callable[[str], Path], text: Path
) -> None:
    one, other = (serve(checkpoint("llama"), numerics=RING) for _ in range(2))
    plain, _ = train(session, options(text, "plain"))
    masks: dict[str, Any] = {"mask_sources": [other.url], "allow_same": ["all"]}
    with one.connect(privacy="one-time", **masks) as hidden:
        report, _ = train(hidden, options(text, "hidden"))
        stats = hidden.stats
    # Fixed point against float32, four steps of AdamW.
    assert report.last_loss == pytest.approx(plain.last_loss, abs=1e-3)
    assert stats.effect_rows >= stats.rows > stats.verified_rows > 0


def test_epochs_become_steps(session: tenant_sdk.Session, text: Path) -> None:
    report, _ = train(session, options(text, "adapter", steps=None, epochs=0.5, batch_size=8))
    assert report.steps == 2  # half of 23 blocks, 8 at a time


@pytest.mark.parametrize("method", ["adalora", "prefix"])
def test_methods_that_need_more_than_a_configuration(
    session: tenant_sdk.Session, text: Path, method: str
) -> None:
    report, _ = train(session, options(text, "adapter", method=method, steps=6, held_out=(text,)))
    assert report.perplexity_after is not None
    config = peft.PeftConfig.from_pretrained(str(text.parent / "adapter"))
    if method == "adalora":
        assert sum(map(sum, config.rank_pattern.values())) < 3 * 14  # it gave up some of its rank 3


def test_a_sequence_length_beyond_the_context_is_cut_and_said(
    session: tenant_sdk.Session, text: Path
) -> None:
    _, said = train(session, options(text, "adapter", sequence_length=100_000, steps=1))
    assert "sequence_length=100000 is cut to 128: the model's context has no room for more" in said
    assert any("in 2 blocks of 128" in line for line in said)
    prompt = options(text, "prompt", method="prompt", virtual_tokens=8, sequence_length=128, steps=1)
    assert any("is cut to 120:" in line for line in train(session, prompt)[1])
    assert not any("is cut" in line for line in train(session, options(text, "short"))[1])


def test_no_room_for_text(session: tenant_sdk.Session, text: Path) -> None:
    with pytest.raises(ConfigurationError, match="128 of them for virtual tokens"):
        train(session, options(text, "adapter", method="prompt", virtual_tokens=128))


def test_records_and_text_together(session: tenant_sdk.Session, text: Path) -> None:
    both = options(text, "adapter", steps=8, learning_rate=0.05, sequence_length=24)
    both = dataclasses.replace(both, data=(text, records(text.parent)), held_out=(records(text.parent),))
    report, said = train(session, both)
    assert report.perplexity_after is not None
    assert report.perplexity_before is not None
    assert report.perplexity_after < report.perplexity_before
    assert any(line.endswith("12 records, 240 tokens, 84 of them to learn") for line in said)
    assert any("out of 27 examples" in line for line in said)  # 372 // 24 blocks and 12 records


def test_prompts_are_not_learned(session: tenant_sdk.Session, text: Path) -> None:
    """Perplexity over the answers: from the logits, with no padding and no masks."""
    examples = Reader(Letters(), 64).read([records(text.parent, 3)])
    model, nats = session.load_model(progress=False), []
    for each in examples:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([each["input_ids"]])).logits[0].log_softmax(-1)
        answer = len(" dog 1") + 1
        ids = each["input_ids"]
        nats += [-float(logits[at - 1, ids[at]]) for at in range(len(ids) - answer, len(ids))]
    assert len({len(each["input_ids"]) for each in examples}) == 3
    assert perplexity(model, examples, 3) == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-5)


def test_the_estimate_is_what_the_training_takes(session: tenant_sdk.Session, text: Path) -> None:
    """In bytes, which no load of the machine changes; blocks all have the same size."""
    sent: list[tuple[int, int]] = []

    def note(now: TrainingStep) -> None:
        if now.loss is None:
            sent.append((session.stats.bytes_sent, session.stats.bytes_received))

    _, said = train(session, options(text, "adapter", steps=8, sequence_length=31), note)
    (line,) = (line for line in said if re.match(r"estimate: 4 more steps in about [\d.]+ seconds, ", line))
    assert "about 0 seconds" not in line
    up, down = (float(found) for found in re.findall(r"([\d.]+) GB", line))
    for index, told in enumerate((up, down)):
        a_step = (sent[-1][index] - sent[0][index]) / (len(sent) - 1) / 1e9
        assert told == pytest.approx(4 * a_step, rel=0.01), line


def test_held_out_prompts_are_answered(session: tenant_sdk.Session, text: Path) -> None:
    path = learned_record(text.parent)
    training = options(
        path, "adapter", held_out=(path,), learning_rate=0.02, steps=40, samples=3, rank=8, **LONGER
    )
    samples: list[Sample] = []
    said: list[str] = []
    told = TrainingCallbacks(said.append, lambda _: None, samples=samples.extend)
    report = finetune(training, session.load_model(progress=False), Letters(), session, told)
    assert [(each.prompt, each.expected) for each in samples] == [("Rex, terrier", "d")] * 3
    assert {each.adapted for each in samples} == {"d"}
    assert (report.answered, report.right_base, report.right_adapter) == (3, 0, 3)
    assert "terrier" not in (training.output / "symbiosis.json").read_text()
    model = session.load_model(progress=False)
    loaded = tenant_sdk.load_adapter(model, training.output, session)
    ids = Letters()("Rex, terrier")["input_ids"]
    assert next(generate_answers(loaded, Letters(), [ids, ids[1:]], Sampling(max_new_tokens=5))) == "d"


def test_an_evaluation_measures_what_a_training_does(session: tenant_sdk.Session, text: Path) -> None:
    path, other = learned_record(text.parent), records(text.parent, 6)
    training = options(
        path, "adapter", held_out=(other,), learning_rate=0.02, steps=8, samples=6, rank=8, **LONGER
    )
    report, _ = train(session, training)
    loaded = tenant_sdk.load_adapter(session.load_model(progress=False), training.output, session)
    told: list[tuple[str, int, int]] = []
    callbacks = EvaluationCallbacks(
        reading=lambda *done: told.append(("reading", *done)),
        answering=lambda *done: told.append(("answering", *done)),
    )
    asked = EvaluationOptions(sequence_length=32)
    found = evaluate(asked, [other], loaded, Letters(), callbacks)
    # Other batches are other sums of floats.
    assert found.base == pytest.approx(report.perplexity_before, rel=1e-5)
    assert found.adapter == pytest.approx(report.perplexity_after, rel=1e-5)
    assert len(found.samples) == 6
    assert sum(each.adapted == each.expected for each in found.samples) == report.right_adapter
    assert told[-1] == ("answering", 12, 12)
    alone = evaluate(asked, [other], session.load_model(progress=False), Letters(), EvaluationCallbacks())
    assert (alone.base, alone.adapter) == (found.base, None)
    assert [each.base for each in alone.samples] == [each.base for each in found.samples]
    short = EvaluationOptions(sequence_length=32, answer_tokens=2)
    assert evaluate(short, [other], loaded, Letters(), EvaluationCallbacks()).samples == []


def test_texts_have_no_prompts_to_answer(session: tenant_sdk.Session, text: Path) -> None:
    report, _ = train(session, options(text, "adapter", held_out=(text,)))
    assert report.answered == 0


def test_a_training_stops_when_nothing_gets_better(session: tenant_sdk.Session, text: Path) -> None:
    """The held-out text has nothing to do with the data: learning by heart makes it less likely."""
    path, other = learned_record(text.parent), records(text.parent)
    training = options(
        path,
        "adapter",
        held_out=(other,),
        learning_rate=0.1,
        steps=40,
        eval_steps=2,
        early_stopping=2,
        schedule="constant",
        samples=0,
        **LONGER,
    )
    report, _ = train(session, training)
    assert report.best_step is not None
    assert report.best_step + 4 == report.steps < 40
    loaded = tenant_sdk.load_adapter(session.load_model(progress=False), training.output, session)
    examples = Reader(Letters(), 32).read([other])
    assert perplexity(loaded, examples, 2) == pytest.approx(report.perplexity_after, rel=1e-4)
    with pytest.raises(ConfigurationError, match="early_stopping needs held_out"):
        options(path, "other", early_stopping=1)


def test_held_out_records_that_are_learned_are_told(session: tenant_sdk.Session, text: Path) -> None:
    path, other = records(text.parent, 6), text.parent / "other.jsonl"
    lines = path.read_text().splitlines()
    other.write_text("\n".join([*lines[:2], json.dumps({"prompt": "Ruth, tabby", "completion": " cat"})]))
    _, said = train(session, options(path, "adapter", held_out=(other,), sequence_length=32, samples=0))
    assert any(line.startswith("2 of 3 held-out records are learned too") for line in said)


def test_prompts_that_are_answered_fit_the_context() -> None:
    examples = [
        {"input_ids": [5] * (count + 2), "labels": [-100] * count + [5, 2]} for count in (10, 60, 70, 2000)
    ]
    assert [len(prompt) for prompt, _ in sample_prompts(examples, 9, 128)] == [10, 60]
    assert [len(prompt) for prompt, _ in sample_prompts(examples, 9, 9999)] == [10, 60, 70]


def test_options_reach_the_adapter_and_the_optimizer(
    session: tenant_sdk.Session, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    arguments = trainer._arguments

    def noted(*given: Any) -> Any:
        made.append(arguments(*given))
        return made[-1]

    monkeypatch.setattr(trainer, "_arguments", noted)
    chosen = {"alpha": 7, "dropout": 0.25, "schedule": "cosine", "warmup_steps": 3, "weight_decay": 0.125}
    training = options(text, "adapter", gradient_accumulation=2, steps=None, epochs=1, **chosen)
    report, said = train(session, training)
    assert report.steps == math.ceil(23 / 4)
    assert any("6 steps of 4 out of 23 examples" in line for line in said)
    config = json.loads((training.output / "adapter_config.json").read_text())
    assert (config["lora_alpha"], config["lora_dropout"]) == (7, 0.25)
    (seen,) = made
    assert (seen.lr_scheduler_type, seen.warmup_steps, seen.weight_decay) == ("cosine", 3, 0.125)
    with pytest.raises(ConfigurationError, match="ia3 has no such options: alpha and dropout are for lora"):
        train(session, options(text, "other", method="ia3", dropout=0.5))


@pytest.mark.parametrize(("width", "rate"), [(64, 1e-3), (800, 1e-3), (2048, 4.9e-4), (4096, 2.9e-4)])
def test_wide_models_learn_more_slowly(width: int, rate: float) -> None:
    model = SimpleNamespace(config=LlamaConfig(hidden_size=width, num_attention_heads=8))
    assert default_rate(METHODS["lora"], model) == rate


def test_reports(session: tenant_sdk.Session, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[dict[str, float]] = []

    class Recorder(TrainerCallback):
        def on_log(self, *_: Any, logs: Any, **__: Any) -> None:
            collected.append(logs)

    with pytest.raises(
        ConfigurationError, match="needs its package, which is not installed: `pip install wand"
    ):
        check_reports(["wandb"])
    with pytest.raises(ConfigurationError, match=r"report_to='paper' must be one of .*tensorboard"):
        train(session, options(text, "adapter", report_to=["paper"]))
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "wandb", Recorder)
    monkeypatch.setattr("tenant_sdk.tuning.trackers.get_available_reporting_integrations", lambda: ["wandb"])
    train(session, options(text, "adapter", report_to=("wandb",)))
    assert any("loss" in each for each in collected)


def test_packed_records_are_learned_alike_with_fewer_rows(
    session: tenant_sdk.Session, tmp_path: Path
) -> None:
    """Their labels are the same tokens, so that losses are, but for the order in which floats are summed."""
    data = tmp_path / "records.jsonl"
    answers = ("rest", "walk twice a day", "no", "come again in two weeks")
    lines = [{"prompt": f"Plan {at}:", "completion": f" {answer}"} for at, answer in enumerate(answers)]
    data.write_text("\n".join(map(json.dumps, lines)))
    reports, rows = [], []
    for packing in (False, True):
        before = session.stats.rows
        chosen = options(data, f"{packing}", packing=packing, sequence_length=64, steps=3, batch_size=4)
        reports.append(train(session, chosen)[0])
        rows.append(session.stats.rows - before)
    assert reports[1].first_loss == pytest.approx(reports[0].first_loss, rel=1e-5)
    assert reports[1].last_loss == pytest.approx(reports[0].last_loss, rel=1e-4)
    assert rows[1] < 0.8 * rows[0]  # 82 tokens instead of 4 * 32, and what checks it


def test_packing_is_refused_where_records_would_see_each_other(
    serve: Callable[..., Executor], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    data = records(tmp_path)
    with (
        serve(checkpoint("opt")).connect() as opened,
        pytest.raises(ConfigurationError, match="Leave out packing"),
    ):
        train(opened, options(data, "opt", packing=True, sequence_length=64))
    with pytest.raises(ConfigurationError, match="packing does not go with method='prefix'"):
        options(data, "prefix", packing=True, method="prefix")


@pytest.mark.parametrize("packing", [False, True])
def test_long_examples_fit_into_memory(
    packing: bool, session: tenant_sdk.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the plan says is said and done, and the training is the same; whole rows of packed records."""
    data = records(tmp_path)
    usual = options(data, "usual", sequence_length=64, packing=packing, memory_gib=1000)
    expected, said = train(session, usual)
    assert any("nothing special is needed" in each for each in said)
    asked: list[dict[str, Any]] = []

    def plan(*_: Any, **more: Any) -> MemoryPlan:
        asked.append(more)
        return MemoryPlan(chunked_loss=True, checkpointed=packing, window=None if packing else 8)

    monkeypatch.setattr("tenant_sdk.tuning.long_sequences.plan_step", plan)
    got, said = train(session, dataclasses.replace(usual, output=tmp_path / "fit", held_out=(data,)))
    assert asked == [{"window": None, "packed": packing, "budget": 1000}]
    assert any(("made again" if packing else "windows of 8 tokens") in each for each in said)
    assert got.first_loss == pytest.approx(expected.first_loss, rel=1e-4)
    assert got.last_loss == pytest.approx(expected.last_loss, rel=1e-3)


def test_too_little_memory_is_said_before_the_training(session: tenant_sdk.Session, text: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"take 0\.\d\d GiB of memory at least.* give memory_gib=\d"):
        train(session, options(text, "adapter", memory_gib=0.01))
    assert not (text.parent / "adapter").exists()
