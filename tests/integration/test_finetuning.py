"""Packing, perplexity, and a training that is interrupted, resumed, and meets a full disk."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from conftest import RING, Executor
from safetensors.torch import load_file, save_file
from test_characters import own_tokenizer
from transformers import LlamaConfig, TrainerCallback
from transformers.integrations import integration_utils

import tenant_sdk
from shared.errors import (
    AuthenticationError,
    ConfigurationError,
    RequestRefused,
    StorageError,
    SymbiosisError,
)
from tenant_sdk.sequences.planning import Plan
from tenant_sdk.storage import TrainingCheckpoints
from tenant_sdk.tuning import finetuning, trainer
from tenant_sdk.tuning.adapters import METHODS, default_rate, options_of
from tenant_sdk.tuning.conversations import whole
from tenant_sdk.tuning.data import Reader, pack, read_tokens
from tenant_sdk.tuning.finetuning import Told, TrainingReport, check_reports, finetune, perplexity
from tenant_sdk.tuning.options import TrainingOptions
from tenant_sdk.tuning.progress import TrainingStep
from tenant_sdk.tuning.samples import Sample, answers, asked


class Letters:
    """A tokenizer: one token a letter, within the tiny models' vocabulary."""

    eos_token_id, eos_token = 2, "."

    def __call__(
        self, text: str, verbose: bool = True, add_special_tokens: bool = True
    ) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(letter) % 100 for letter in text]}

    def decode(self, ids: list[int], clean_up_tokenization_spaces: bool) -> str:
        return "".join(chr(each - 3 if each - 3 >= 32 else each + 97) for each in ids)

    def batch_decode(self, rows: Any, skip_special_tokens: bool) -> list[str]:
        return [self.decode([int(each) for each in row if each != self.eos_token_id], False) for row in rows]


@pytest.fixture(scope="module")
def session(
    serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> Iterator[tenant_sdk.Session]:
    with serve(checkpoint("llama")).connect() as opened:
        yield opened


def train(
    session: tenant_sdk.Session,
    training: TrainingOptions,
    show: Callable[..., None] = lambda *_: None,
    tokenizer: Any = None,
    **more: Any,
) -> tuple[TrainingReport, list[str]]:
    said: list[str] = []
    model = session.load_model(progress=False)
    report = finetune(training, model, tokenizer or Letters(), session, Told(said.append, show), **more)
    return report, said


def options(text: Path, name: str, **more: Any) -> TrainingOptions:
    small: dict[str, Any] = {"steps": 4, "batch_size": 2, "sequence_length": 16, "save_steps": 2, "rank": 2}
    return TrainingOptions((text,), text.parent / name, **(small | more))


def test_packing() -> None:
    assert pack(range(7), 3, keep_tail=False) == [[0, 1, 2], [3, 4, 5]]
    assert pack(range(8), 3, keep_tail=True) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert pack(range(7), 3, keep_tail=True) == [[0, 1, 2], [3, 4, 5], [5, 6]]  # one token predicts nothing
    assert pack(range(2), 3, keep_tail=False) == [[0, 1]]


def test_reading(tmp_path: Path) -> None:
    for content, message in ((b"\xff\xfe", "not plain text in UTF-8"), (b"", "no text to learn from")):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(ConfigurationError, match=message):
            read_tokens(tmp_path / "file", Letters())
    with pytest.raises(ConfigurationError, match="No such file"):
        read_tokens(tmp_path / "missing", Letters())


def test_perplexity_weighs_every_predicted_token_the_same(session: tenant_sdk.Session) -> None:
    model = session.load_model(progress=False)
    blocks = pack(list(range(3, 50)), 10, keep_tail=True)
    assert len(blocks[-1]) == 7
    nats: list[float] = []
    with torch.no_grad():
        for block in blocks:
            logits = model(input_ids=torch.tensor([block])).logits[0].log_softmax(-1)
            nats += [-float(logits[i, token]) for i, token in enumerate(block[1:])]
    examples = [whole(block) for block in blocks]
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
    assert record["weights"] == session.manifest.weights
    assert record["training"].items() >= {"method": "lora", "steps": 8, "tokens": 23 * 16, "rank": 2}.items()
    assert record["training"]["targets"] == ["all-linear"]
    assert record["training"]["last_loss"] == pytest.approx(report.last_loss, rel=1e-3)
    assert record["training"]["perplexity_after"] == pytest.approx(report.perplexity_after, rel=1e-3)
    assert "data" not in record["training"]
    assert said[-1].startswith("the adapter's card does not say where its base is found")
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


def test_resumed_training_gives_the_adapter_of_an_uninterrupted_one(
    session: tenant_sdk.Session, text: Path
) -> None:
    train(session, options(text, "whole"))

    def stop_in_step_3(now: TrainingStep) -> None:
        if now.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(session, options(text, "resumed"), stop_in_step_3)
    assert (text.parent / "resumed.checkpoints" / "checkpoint-3").is_dir()  # not only the one of step 2
    assert not (text.parent / "resumed").exists()
    assert TrainingCheckpoints(text.parent / "resumed", {}).kept("day") is None  # no template writes it
    with pytest.raises(ConfigurationError, match="resume=True"):
        train(session, options(text, "resumed"))
    with pytest.raises(ConfigurationError, match="rank was 2, now 3"):
        train(session, options(text, "resumed", rank=3, resume=True))
    first: list[TrainingStep] = []
    report, said = train(session, options(text, "resumed", resume=True), first.append)
    assert any(line.startswith("the training goes on after step 3 of 4, from ") for line in said)
    assert min(now.step for now in first) == 4
    assert report.resumed_at == 3
    figures = json.loads((text.parent / "resumed" / "symbiosis.json").read_text())["training"]
    assert (figures["steps"], figures["resumed_at_step"]) == (4, 3)
    assert figures["seconds_since_resumed"] == pytest.approx(report.seconds, rel=1e-3)
    assert "seconds" not in figures
    one, other = (
        load_file(text.parent / name / "adapter_model.safetensors") for name in ("whole", "resumed")
    )
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-6)
    assert not (text.parent / "resumed.checkpoints").exists()


def test_the_date_that_a_template_writes_is_that_of_the_first_day(
    session: tenant_sdk.Session, text: Path
) -> None:
    words = own_tokenizer()
    words.chat_template = "{{ strftime_now('%d %b %Y, %H:%M') }} " + words.chat_template
    path = text.parent / "chats.jsonl"
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ruth."}]
    path.write_text(json.dumps({"messages": messages}))
    training = options(path, "adapter", sequence_length=128, held_out=(path,))
    whole = dataclasses.replace(training, output=text.parent / "whole")
    resumed = dataclasses.replace(training, resume=True)
    train(session, whole, tokenizer=words, today=lambda: date(2026, 11, 25))

    def stop(now: TrainingStep) -> None:
        if now.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(session, training, stop, words, today=lambda: date(2026, 11, 25))
    settings = text.parent / "adapter.checkpoints" / "settings.json"
    kept = settings.read_text()
    for damaged in ('"2026-11-99"', "7"):
        settings.write_text(kept.replace('"2026-11-25"', damaged))
        with pytest.raises(ConfigurationError, match=f"day was {json.loads(damaged)}, now 2026-11-26"):
            train(session, resumed, tokenizer=words, today=lambda: date(2026, 11, 26))
    settings.write_text(kept)
    report, said = train(session, resumed, tokenizer=words, today=lambda: date(2026, 11, 26))
    assert report.resumed_at == 2
    one, other = (load_file(each.output / "adapter_model.safetensors") for each in (whole, resumed))
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-6)
    line = "the chat template writes the date: 2026-11-25 in each record, and at inference that of the day"
    assert said.count(line) == 1


@pytest.mark.parametrize("error", [AuthenticationError("refused"), RequestRefused("draining", "gone")])
def test_whatever_ends_a_training_says_how_it_goes_on(
    error: SymbiosisError, session: tenant_sdk.Session, text: Path
) -> None:
    def stop_in_step_3(now: TrainingStep) -> None:
        if now.step == 3:
            raise error

    with pytest.raises(type(error)) as ended:
        train(session, options(text, "adapter"), stop_in_step_3)
    folder = text.parent / "adapter.checkpoints"
    note = f"step 3 is kept in {folder}; to go on from it, run the same training with resume=True"
    assert ended.value.__notes__ == [note]


def test_nothing_is_said_of_a_training_that_kept_nothing(session: tenant_sdk.Session, text: Path) -> None:
    def stop(now: TrainingStep) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError) as ended:  # no checkpoint is made of a step that broke
        train(session, options(text, "adapter"), stop)
    assert not hasattr(ended.value, "__notes__")


def test_checkpoints_that_are_in_the_way_show_before_there_is_a_session(
    session: tenant_sdk.Session, text: Path
) -> None:
    def stop(now: TrainingStep) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(session, options(text, "adapter", save_steps=1), stop)
    checkpoints = TrainingCheckpoints(text.parent / "adapter", {})
    checkpoints.check(resume=True)
    with pytest.raises(ConfigurationError, match="holds an interrupted training; go on with resume=True"):
        checkpoints.check(resume=False)
    with pytest.raises(ConfigurationError, match="there is nothing to resume"):
        TrainingCheckpoints(text.parent / "other", {}).check(resume=True)


def test_a_disk_that_is_full_at_the_end(
    session: tenant_sdk.Session, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = peft.PeftModel.save_pretrained

    def full(model: Any, folder: str, **more: Any) -> None:
        save(model, folder, **more)
        if ".partial-" in folder:
            (Path(folder) / "adapter_model.safetensors").write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(peft.PeftModel, "save_pretrained", full)
        with pytest.raises(StorageError, match="No space left on device; free some space there") as caught:
            train(session, options(text, "adapter"))
    assert "resume" in str(caught.value)
    assert {path.name for path in text.parent.iterdir()} == {"notes.txt", "adapter.checkpoints"}
    report, _ = train(session, options(text, "adapter", resume=True))  # nothing left to train
    assert report.steps == 4
    assert load_file(text.parent / "adapter" / "adapter_model.safetensors")


def test_too_little_space_is_noticed_before_the_training(
    session: tenant_sdk.Session, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenant_sdk.tuning.finetuning.free_megabytes", lambda _: 1.0)
    with pytest.raises(StorageError, match="only 1 MB are free"):
        train(session, options(text, "adapter"))
    assert not (text.parent / "adapter.checkpoints").exists()


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


def records(folder: Path, count: int = 12) -> Path:
    path = folder / "records.jsonl"
    lines = [{"prompt": "Rex, terrier" + "." * (n % 3), "completion": f" dog {n % 2}"} for n in range(count)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


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


LONGER = {"sequence_length": 32}


def learned_record(folder: Path) -> Path:
    """One record many times, which is soon learned by heart."""
    path = folder / "one.jsonl"
    path.write_text("\n".join([json.dumps({"prompt": "Rex, terrier", "completion": "d"})] * 4))
    return path


def test_held_out_prompts_are_answered(session: tenant_sdk.Session, text: Path) -> None:
    path = learned_record(text.parent)
    training = options(
        path, "adapter", held_out=(path,), learning_rate=0.02, steps=40, samples=3, rank=8, **LONGER
    )
    samples: list[Sample] = []
    said: list[str] = []
    told = Told(said.append, lambda _: None, samples=samples.extend)
    report = finetune(training, session.load_model(progress=False), Letters(), session, told)
    assert [(each.prompt, each.expected) for each in samples] == [("Rex, terrier", "d")] * 3
    assert {each.adapted for each in samples} == {"d"}
    assert (report.answered, report.right_base, report.right_adapter) == (3, 0, 3)
    assert "terrier" not in (training.output / "symbiosis.json").read_text()
    model = session.load_model(progress=False)
    loaded = tenant_sdk.load_adapter(model, training.output, session)
    ids = Letters()("Rex, terrier")["input_ids"]
    assert answers(loaded, Letters(), [ids, ids[1:]], 5)[0] == "d"


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


def test_an_adapter_is_trained_further(session: tenant_sdk.Session, text: Path) -> None:
    first = options(text, "first", learning_rate=0.05, steps=8, held_out=(text,))
    before, _ = train(session, first)
    further = options(
        text, "further", adapter=first.output, held_out=(text,), steps=4, rank=TrainingOptions.rank
    )
    report, _ = train(session, further)
    assert report.perplexity_before == pytest.approx(before.perplexity_after, rel=1e-5)
    assert report.perplexity_after < report.perplexity_before
    config = json.loads((further.output / "adapter_config.json").read_text())
    assert config["r"] == 2


@pytest.mark.parametrize(("method", "rate"), [("ia3", 5e-3), ("rslora", 1e-3), ("loha", 1e-3)])
def test_an_adapter_decides_how_it_is_trained_further(
    session: tenant_sdk.Session, text: Path, method: str, rate: float
) -> None:
    rank = {} if method == "ia3" else {"rank": 3}
    first = options(text, "first", method=method, **{"rank": 2, **rank} if rank else {})
    train(session, dataclasses.replace(first, steps=2))
    further = dataclasses.replace(
        options(text, "further", steps=2, rank=TrainingOptions.rank), adapter=first.output
    )
    _, said = train(session, further)
    assert any(f"learning rate {rate:g}" in line for line in said)
    assert any(line.startswith(f"{method} adapter with ") for line in said)
    assert not any("learn nothing" in line for line in said)
    record = json.loads((further.output / "symbiosis.json").read_text())["training"]
    assert record["method"] == method
    assert record.get("rank", 3) == 3


def test_what_an_adapter_decides_is_not_given(session: tenant_sdk.Session, text: Path) -> None:
    with pytest.raises(ConfigurationError, match="adapter decides these: leave out method, rank"):
        options(text, "further", adapter=text.parent)
    train(session, options(text, "first", method="adalora", steps=6))
    further = options(text, "further", adapter=text.parent / "first", rank=TrainingOptions.rank)
    with pytest.raises(ConfigurationError, match="ADALORA is not trained further; these are: LORA"):
        train(session, further)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (peft.LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6]), "alora_invocation_tokens"),
        (peft.LoraConfig(lora_alpha=0), "lora_alpha"),
        (peft.LoraConfig(alpha_pattern={"q_proj": 0}), "alpha_pattern"),
        (peft.LoraConfig(lora_dropout=1), "lora_dropout"),
        (peft.LoHaConfig(alpha=0), "alpha"),
        (peft.LoHaConfig(rank_dropout=1.0), "rank_dropout"),
        (peft.LoKrConfig(module_dropout=1.0), "module_dropout"),
        (peft.VeraConfig(vera_dropout=1.0), "vera_dropout"),
        (peft.LoraConfig(lora_alpha=1e-12), "lora_alpha"),
        (peft.LoraConfig(r=64, lora_alpha=-1e-3), "lora_alpha"),
        (peft.LoraConfig(alpha_pattern={"q_proj": 1e-12}), "alpha_pattern"),
        (peft.LoraConfig(lora_dropout=0.9999999), "lora_dropout"),
        (peft.LoHaConfig(alpha=1e-12), "alpha"),
    ],
)
def test_adapters_that_would_not_learn(config: Any, key: str) -> None:
    with pytest.raises(ConfigurationError, match=f"an adapter with {key} = .* is not trained further"):
        options_of(config)


def test_an_adapter_of_zeros_is_not_trained_further(session: tenant_sdk.Session, text: Path) -> None:
    """Either half of its product has a gradient that the other half is a factor of."""
    train(session, options(text, "first"))
    file = text.parent / "first" / "adapter_model.safetensors"
    save_file(
        {name: torch.zeros_like(each) for name, each in load_file(file).items()}, file, {"format": "pt"}
    )
    further = options(text, "further", adapter=text.parent / "first", rank=TrainingOptions.rank)
    with pytest.raises(ConfigurationError, match="would learn nothing: all its gradients are 0"):
        train(session, further)


def test_layers_of_an_adapter_that_learn_nothing_are_named(session: tenant_sdk.Session, text: Path) -> None:
    _, said = train(session, options(text, "first"))
    assert not any("learn" in line and "nothing" in line for line in said)
    file = text.parent / "first" / "adapter_model.safetensors"
    weights = load_file(file)
    save_file({name: each * ("q_proj" not in name) for name, each in weights.items()}, file, {"format": "pt"})
    further = options(text, "further", adapter=text.parent / "first", rank=TrainingOptions.rank)
    _, said = train(session, further)
    assert any(
        line.startswith(f"2 of {len(weights) // 2} layers of the adapter learn nothing")
        and "layers.0.self_attn.q_proj" in line
        for line in said
    )


def test_an_adapter_whose_configuration_has_changed_is_not_resumed(
    session: tenant_sdk.Session, text: Path
) -> None:
    def stop(now: TrainingStep) -> None:
        if now.step == 3:
            raise KeyboardInterrupt

    train(session, options(text, "first"))
    further = options(text, "further", adapter=text.parent / "first", rank=TrainingOptions.rank)
    with pytest.raises(KeyboardInterrupt):
        train(session, further, stop)
    file = text.parent / "first" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"alpha_pattern": {"q_proj": 1}}))
    with pytest.raises(ConfigurationError, match=r"adapter was [0-9a-f]{16}, now "):
        train(session, dataclasses.replace(further, resume=True))


def test_the_record_of_an_adapter_has_its_own_layers(session: tenant_sdk.Session, text: Path) -> None:
    first = options(text, "first", method="loha", target_modules="v_proj, q_proj", steps=1)
    train(session, first)
    further = options(text, "further", adapter=first.output, steps=1, rank=TrainingOptions.rank)
    train(session, further)
    record = json.loads((further.output / "symbiosis.json").read_text())["training"]
    assert record.items() >= {"targets": ["q_proj", "v_proj"], "alpha": 2, "rank": 2}.items()


def test_the_best_step_is_that_of_the_same_held_out_text(session: tenant_sdk.Session, text: Path) -> None:
    path, other = records(text.parent), text.parent / "other.txt"
    other.write_text("Quite another text. ")
    more: dict[str, Any] = {"held_out": (path,), "eval_steps": 2, "samples": 0, **LONGER}

    def stop(now: TrainingStep) -> None:
        if now.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(session, options(text, "adapter", early_stopping=2, **more), stop)
    for changed, message in (
        ({"held_out": (other,), "early_stopping": 2}, "held_out was [0-9a-f]{16}, now "),
        ({}, "early_stopping was 2, now None"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            train(session, options(text, "adapter", resume=True, **more | changed))
    report, _ = train(session, options(text, "adapter", early_stopping=2, resume=True, **more))
    assert report.best_step is not None
    assert "held_out" not in json.loads((text.parent / "adapter" / "symbiosis.json").read_text())["training"]


def test_an_interruption_of_held_out_answers(
    session: tenant_sdk.Session, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(finetuning, "compare", stop)
    path = learned_record(text.parent)
    with pytest.raises(KeyboardInterrupt) as stopped:
        train(session, options(path, "adapter", held_out=(path,), **LONGER))
    assert [*map(str, stopped.value.__notes__)] == [
        f"the training is complete, and the adapter is saved in {text.parent / 'adapter'}"
    ]
    assert (text.parent / "adapter" / "adapter_model.safetensors").is_file()
    assert not (text.parent / "adapter.checkpoints").exists()


def test_answers_of_a_base_whose_biases_an_adapter_has(
    serve: Callable[..., Executor], checkpoint: Callable[[str], Path], text: Path
) -> None:
    """PEFT leaves them in place when the adapter is switched off."""
    path = learned_record(text.parent)
    with serve(checkpoint("qwen2")).connect() as session:
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", bias="all")
        model = peft.get_peft_model(session.load_model(progress=False), config)
        model.peft_config["default"].base_model_name_or_path = ""
        tenant_sdk.save_adapter(model, text.parent / "first", session)
        training = options(
            path,
            "further",
            adapter=text.parent / "first",
            held_out=(path,),
            rank=TrainingOptions.rank,
            **LONGER,
        )
        samples: list[Sample] = []
        told = Told(lambda _: None, lambda _: None, samples=samples.extend)
        report = finetune(training, session.load_model(progress=False), Letters(), session, told)
    assert report.right_base is None
    assert [each.base for each in samples] == [None] * 4


def test_early_stopping_is_resumed_to_the_same_adapter(
    session: tenant_sdk.Session, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in any measurement, also in the last one, after which the best adapter is loaded."""
    path, other = learned_record(text.parent), records(text.parent)
    more: dict[str, Any] = {"held_out": (other,), "learning_rate": 0.1, "eval_steps": 2, "early_stopping": 9}
    more |= {"schedule": "constant", "samples": 0, "steps": 8, **LONGER}
    whole, _ = train(session, options(path, "whole", **more))
    assert whole.best_step is not None
    assert whole.best_step < 8
    expected = load_file(text.parent / "whole" / "adapter_model.safetensors")
    measure = finetuning._HeldOut.measure
    for interrupted in range(2, 7):  # the first is before the training; the last after it
        counted = 0

        def stops(self: Any, *steps: int) -> float:
            nonlocal counted
            counted += 1
            if counted == interrupted:  # noqa: B023
                raise KeyboardInterrupt
            return measure(self, *steps)

        with monkeypatch.context() as patch:
            patch.setattr(finetuning._HeldOut, "measure", stops)
            with pytest.raises(KeyboardInterrupt):
                train(session, options(path, f"at-{interrupted}", **more))
        report, _ = train(session, options(path, f"at-{interrupted}", resume=True, **more))
        assert report.best_step == whole.best_step
        found = load_file(text.parent / f"at-{interrupted}" / "adapter_model.safetensors")
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


def test_held_out_records_that_are_learned_are_told(session: tenant_sdk.Session, text: Path) -> None:
    path, other = records(text.parent, 6), text.parent / "other.jsonl"
    lines = path.read_text().splitlines()
    other.write_text("\n".join([*lines[:2], json.dumps({"prompt": "Ruth, tabby", "completion": " cat"})]))
    _, said = train(session, options(path, "adapter", held_out=(other,), sequence_length=32, samples=0))
    assert any(line.startswith("2 of 3 held-out records are learned too") for line in said)


def test_answers_that_fail_lose_nothing(
    session: tenant_sdk.Session, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise IndexError("of the model")

    monkeypatch.setattr(finetuning, "compare", fails)
    path = records(text.parent)
    report, said = train(session, options(path, "adapter", held_out=(path,), sequence_length=32))
    assert (text.parent / "adapter" / "adapter_model.safetensors").is_file()
    assert report.answered == 0
    assert any("held-out prompts could not be answered: IndexError" in line for line in said)


def test_prompts_that_are_answered_fit_the_context() -> None:
    examples = [
        {"input_ids": [5] * (count + 2), "labels": [-100] * count + [5, 2]} for count in (10, 60, 70, 2000)
    ]
    assert [len(prompt) for prompt, _ in asked(examples, 9, 128)] == [10, 60]
    assert [len(prompt) for prompt, _ in asked(examples, 9, 9999)] == [10, 60, 70]


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
    monkeypatch.setattr(
        "tenant_sdk.tuning.finetuning.get_available_reporting_integrations", lambda: ["wandb"]
    )
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

    def plan(*_: Any, **more: Any) -> Plan:
        asked.append(more)
        return Plan(chunked_loss=True, checkpointed=packing, window=None if packing else 8)

    monkeypatch.setattr("tenant_sdk.tuning.long_sequences.plan_step", plan)
    got, said = train(session, dataclasses.replace(usual, output=tmp_path / "fit", held_out=(data,)))
    assert asked == [{"window": None, "packed": packing, "given": 1000}]
    assert any(("made again" if packing else "windows of 8 tokens") in each for each in said)
    assert got.first_loss == pytest.approx(expected.first_loss, rel=1e-4)
    assert got.last_loss == pytest.approx(expected.last_loss, rel=1e-3)


def test_too_little_memory_is_said_before_the_training(session: tenant_sdk.Session, text: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"take 0\.\d\d GiB of memory at least.* give memory_gib=\d"):
        train(session, options(text, "adapter", memory_gib=0.01))
    assert not (text.parent / "adapter").exists()
