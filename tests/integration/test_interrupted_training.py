"""A training that is interrupted, resumed, and meets a full disk."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from datetime import date
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from test_characters import own_tokenizer
from trainings import LONGER, learned_record, options, records, train

import tenant_sdk
from shared.errors import (
    AuthenticationError,
    ConfigurationError,
    RequestRefused,
    StorageError,
    SymbiosisError,
)
from tenant_sdk.tuning import finetuning
from tenant_sdk.tuning.checkpoints import TrainingCheckpoints
from tenant_sdk.tuning.held_out import HeldOutLoss
from tenant_sdk.tuning.options import TrainingOptions
from tenant_sdk.tuning.progress import TrainingStep


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
    monkeypatch.setattr("tenant_sdk.tuning.preparation.free_megabytes", lambda _: 1.0)
    with pytest.raises(StorageError, match="only 1 MB are free"):
        train(session, options(text, "adapter"))
    assert not (text.parent / "adapter.checkpoints").exists()


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
    measure = HeldOutLoss.measure
    for interrupted in range(2, 7):  # the first is before the training; the last after it
        counted = 0

        def stops(self: Any, *steps: int) -> float:
            nonlocal counted
            counted += 1
            if counted == interrupted:  # noqa: B023
                raise KeyboardInterrupt
            return measure(self, *steps)

        with monkeypatch.context() as patch:
            patch.setattr(HeldOutLoss, "measure", stops)
            with pytest.raises(KeyboardInterrupt):
                train(session, options(path, f"at-{interrupted}", **more))
        report, _ = train(session, options(path, f"at-{interrupted}", resume=True, **more))
        assert report.best_step == whole.best_step
        found = load_file(text.parent / f"at-{interrupted}" / "adapter_model.safetensors")
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


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
