"""Making drafts, and folders with drafts, which may be anybody's."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import BASE_MODEL, HELD_OUT, here, ok_here
from conftest import Executor
from drafting import guessing, with_adapter
from parity import add_lora
from peft import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from test_drafts import written
from test_long_generation import PROMPT, save
from torch import Tensor
from trainings import Letters
from transformers import AutoTokenizer

import tenant_sdk
from provider import serve_in_process
from shared.errors import ConfigurationError, ModelMismatch, SymbiosisError
from tenant_sdk.command_line.output import NAMES
from tenant_sdk.drafts.card import draft_folders
from tenant_sdk.drafts.decoding import Draft
from tenant_sdk.drafts.folder import WEIGHTS, load_draft
from tenant_sdk.drafts.head import MAX_VOCABULARY, Guesser, Vocabulary
from tenant_sdk.drafts.length import DraftLength
from tenant_sdk.drafts.making import DraftCallbacks, make_draft
from tenant_sdk.drafts.options import CARD, DraftOptions
from tenant_sdk.drafts.training import GUESSES, Positions, collect, gain
from tenant_sdk.session.session import Session
from tenant_sdk.tuning.conversations import IGNORE_INDEX


@pytest.fixture(scope="module")
def served(serve: Callable[..., Executor]) -> Executor:
    return serve(BASE_MODEL)


@pytest.fixture(scope="module")
def session(served: Executor) -> Iterator[Session]:
    with served.connect() as opened_session:
        yield opened_session


@pytest.fixture(scope="module")
def model(session: Session) -> Any:
    return session.load_model(progress=False)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BASE_MODEL)


def text_file(folder: Path, count: int) -> Path:
    """A few of the held-out texts, which the model knows well."""
    file = folder / "texts.txt"
    file.write_text("\n".join(HELD_OUT.read_text().splitlines()[:count]))
    return file


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, session: Session, model: Any, tokenizer: Any
) -> tuple[Path, DraftOptions]:
    """The folder of a draft for the small model, from its own answers, and how it was made."""
    folder = tmp_path_factory.mktemp("draft")
    prompts = folder / "prompts.txt"
    words = ("the man", "a woman", "this house", "the sea", "our king", "that night", "every ship", "my son")
    begin = ("And then", "In the morning", "He said that", "When", "It was", "After all,")
    prompts.write_text("\n".join(f"{first} {second}" for first in begin for second in words))
    options = DraftOptions(folder / "draft", prompts=[prompts], answer_tokens=24, epochs=12)
    make_draft(options, model, tokenizer, session, DraftCallbacks())
    return options.output, options


def test_a_trained_draft_saves_passes(
    made: tuple[Path, DraftOptions], session: Session, model: Any, tokenizer: Any
) -> None:
    draft = load_draft(made[0], model, session, guesses=3)
    ids = tokenizer("In the morning the king", return_tensors="pt").input_ids
    options = {"eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(written(model, ids, custom_generate=draft, **options), written(model, ids, **options))
    assert draft.tokens > 1.1 * draft.passes
    assert f"{draft.tokens / draft.passes:.2f} tokens a pass" in str(draft)


def test_the_promised_gain_is_that_of_writing(
    made: tuple[Path, DraftOptions], session: Session, model: Any, tokenizer: Any
) -> None:
    """Hidden states are kept in bfloat16, so a guess may be another one where two are almost as likely."""
    trained = load_draft(made[0], model, session)
    everything = Vocabulary.of(model, torch.arange(model.get_output_embeddings().weight.shape[0]))
    guesser = Guesser(trained._guesser.head, everything, trained._guesser.repeats)
    draft = Draft(guesser, DraftLength((0.5,) * GUESSES, GUESSES, GUESSES))
    examples = []
    for prompt in ("In the morning the king", "And then they went", "He said that his"):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        text = written(model, ids, custom_generate=draft, eos_token_id=None, pad_token_id=0)[0].tolist()
        labels = [IGNORE_INDEX] * ids.shape[1] + text[ids.shape[1] :]
        examples.append({"input_ids": text, "labels": labels})
    found = gain(guesser, Positions(collect(model, examples, 1)))
    assert found.tokens_a_pass == pytest.approx(draft.tokens / draft.passes, rel=0.06)
    assert 1.0 < found.tokens_a_pass < 1 + sum(found.acceptance)


def test_the_card(made: tuple[Path, DraftOptions], session: Session) -> None:
    card = json.loads((made[0] / CARD).read_text())
    assert card["weights"] == session.manifest.weights
    assert card["adapter"] == ""
    assert sorted(card["acceptance"], reverse=True) == card["acceptance"]
    assert 0.1 < card["acceptance"][0] <= 1


def other_base(folder: Path) -> None:
    edit_card(folder, weights="0" * 64)


def other_adapter(folder: Path) -> None:
    edit_card(folder, adapter="0" * 64)


def edit_card(folder: Path, **changes: Any) -> None:
    card = json.loads((folder / CARD).read_text())
    (folder / CARD).write_text(json.dumps({**card, **changes}))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def odd_tensor(folder: Path, dtype: str, shape: list[int], size: int) -> None:
    """One more tensor, which safetensors takes and torch does not."""
    header = json.dumps({"odd": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))


DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a type that torch lacks": (lambda folder: odd_tensor(folder, "F4", [8], 4), "is damaged"),
    "a shape without numbers": (lambda folder: odd_tensor(folder, "F32", [0, 1 << 63], 0), "is damaged"),
    "a shape that overflows": (
        lambda folder: odd_tensor(folder, "F32", [0, 1 << 62, 1 << 62], 0),
        "is damaged",
    ),
    "no card": (lambda folder: (folder / CARD).unlink(), "holds no draft"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "is damaged"),
    "half a card": (lambda folder: (folder / CARD).write_text("{"), "is damaged"),
    "half the weights": (
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:5000]),
        "is damaged",
    ),
    "a large file": (lambda folder: os.truncate(folder / WEIGHTS, 1 << 32), "larger than"),
    "a wide layer": (lambda folder: edit_card(folder, hidden=1 << 40), "width"),
    "another width": (lambda folder: edit_card(folder, width=7), "width"),
    "absurd shares": (lambda folder: edit_card(folder, acceptance=[2.0]), "shares"),
    "absurd repeats": (lambda folder: edit_card(folder, repeats=[-1.0] * 4), "shares"),
    "few repeats": (lambda folder: edit_card(folder, repeats=[0.5]), "repeats"),
    "many guesses": (lambda folder: edit_card(folder, acceptance=[0.5] * 1000), "shares"),
    "a tensor less": (
        lambda folder: edit_weights(folder, lambda each: each.pop("up.weight")),
        "other tensors",
    ),
    "infinite": (
        lambda folder: edit_weights(folder, lambda each: each["up.weight"].fill_(torch.inf)),
        "finite",
    ),
    "a foreign token": (lambda folder: edit_weights(folder, lambda each: each["tokens"].fill_(-1)), "ids"),
    "a token twice": (lambda folder: edit_weights(folder, lambda each: each["tokens"].fill_(1)), "twice"),
    "many tokens": (
        lambda folder: edit_weights(
            folder, lambda each: each.update(tokens=torch.arange(MAX_VOCABULARY + 1))
        ),
        "at most 8192 token ids",
    ),
    "tokens as floats": (
        lambda folder: edit_weights(folder, lambda each: each.update(tokens=each["tokens"].float())),
        "token ids",
    ),
}


def test_folders_that_cannot_be_read_hold_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as lost+found, or another user's."""
    for name in ("good", "lost+found"):
        (tmp_path / name).mkdir()
        (tmp_path / name / CARD).touch()
    is_file = Path.is_file

    def closed(self: Path, **more: Any) -> bool:
        if self.parent.name == "lost+found":
            raise PermissionError(errno.EACCES, "Permission denied")
        return is_file(self, **more)

    monkeypatch.setattr(Path, "is_file", closed)
    assert draft_folders(tmp_path) == [tmp_path / "good"]


@pytest.mark.parametrize("fault", DAMAGED)
def test_damaged_drafts_are_refused(
    fault: str, made: tuple[Path, DraftOptions], tmp_path: Path, session: Session, model: Any
) -> None:
    damage, said = DAMAGED[fault]
    folder = Path(shutil.copytree(made[0], tmp_path / "draft"))
    damage(folder)
    with pytest.raises(ConfigurationError, match=said) as refused:
        load_draft(folder, model, session)
    assert str(folder) in str(refused.value)


@pytest.mark.parametrize(
    ("change", "said"), [(other_base, "session's base is"), (other_adapter, "is for an adapter, and none")]
)
def test_foreign_drafts_are_refused(
    change: Callable[[Path], None],
    said: str,
    made: tuple[Path, DraftOptions],
    tmp_path: Path,
    session: Session,
    model: Any,
) -> None:
    folder = Path(shutil.copytree(made[0], tmp_path / "draft"))
    change(folder)
    with pytest.raises(ModelMismatch, match=said):
        load_draft(folder, model, session)


def test_a_draft_belongs_to_its_adapter(
    made: tuple[Path, DraftOptions], session: Session, tokenizer: Any, tmp_path: Path
) -> None:
    """Of another adapter, or of the base, it is refused; of the same one from a folder it is not."""
    adapted = add_lora(session.load_model(progress=False))
    with pytest.raises(ModelMismatch, match="is for the base model, and an adapter is used"):
        load_draft(made[0], adapted, session)
    options = replace(made[1], output=tmp_path / "draft", epochs=1)
    make_draft(options, adapted, tokenizer, session, DraftCallbacks())
    load_draft(tmp_path / "draft", adapted, session)
    tenant_sdk.save_adapter(adapted, tmp_path / "adapter", session)
    again = tenant_sdk.load_adapter(session.load_model(progress=False), tmp_path / "adapter", session)
    load_draft(tmp_path / "draft", again, session)
    next(iter(get_peft_model_state_dict(again).values())).data += 1
    with pytest.raises(ModelMismatch, match="another adapter"):
        load_draft(tmp_path / "draft", again, session)


def test_an_interrupted_draft_asks_for_nothing_twice(
    made: tuple[Path, DraftOptions], session: Session, model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """After the interruption the text is not computed again, and the draft is the same."""
    options = replace(made[1], output=tmp_path / "draft")

    def interrupt(done: int, total: int, loss: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_draft(options, model, tokenizer, session, DraftCallbacks(training=interrupt))
    asked: list[int] = []

    def before_training(done: int, total: int, loss: float) -> None:
        asked.append(session.stats.requests)

    before = session.stats.requests
    with pytest.raises(ConfigurationError, match="go on with resume"):
        make_draft(options, model, tokenizer, session, DraftCallbacks())
    make_draft(
        replace(options, resume=True), model, tokenizer, session, DraftCallbacks(training=before_training)
    )
    assert asked[0] == before
    for name in (CARD, WEIGHTS):
        assert (tmp_path / "draft" / name).read_bytes() == (made[0] / name).read_bytes()


def test_a_draft_is_resumed_on_another_day(session: Session, model: Any, tmp_path: Path) -> None:
    """Chat templates may write the date into each record: it stays that of the first day."""
    words = AutoTokenizer.from_pretrained(BASE_MODEL)
    words.chat_template = (
        "{{ strftime_now('%d %b %Y') }}: {% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    )
    (tmp_path / "prompts.txt").write_text("\n".join(f"And what then, {name}?" for name in ("Ruth", "Boaz")))
    chats = [
        {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": name}]}
        for name in ("Ruth gleaned.", "Boaz came.", "Naomi wept.")
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    files = {"data": [tmp_path / "chats.jsonl"], "prompts": [tmp_path / "prompts.txt"]}
    options = DraftOptions(tmp_path / "draft", **files, answer_tokens=8, epochs=1)
    said: list[str] = []

    def interrupt(done: int, total: int, loss: float) -> None:
        raise KeyboardInterrupt

    first, second = date(2026, 11, 26), date(2026, 11, 27)
    with pytest.raises(KeyboardInterrupt):
        make_draft(
            options,
            model,
            words,
            session,
            DraftCallbacks(said.append, training=interrupt),
            today=lambda: first,
        )
    resumed = replace(options, resume=True)
    make_draft(resumed, model, words, session, DraftCallbacks(said.append), today=lambda: second)
    line = "the chat template writes the date: 2026-11-26 in each record, and at inference that of the day"
    assert said.count(line) == 2


def test_a_pipe_is_no_draft(tmp_path: Path, session: Session, model: Any) -> None:
    """To open it would wait for its other end."""
    os.mkfifo(tmp_path / CARD)
    with pytest.raises(ConfigurationError, match="is no file"):
        load_draft(tmp_path, model, session)


def test_answers_of_an_interrupted_draft_are_not_taken_by_another(
    session: Session, model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("And what then?\nWhy?\nWhence?\n")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    options = DraftOptions(
        tmp_path / "draft", prompts=[tmp_path / "prompts.txt"], answer_tokens=8, batch_size=1
    )
    with pytest.raises(KeyboardInterrupt):
        make_draft(options, model, tokenizer, session, DraftCallbacks(writing=interrupt))
    other = replace(options, answer_tokens=9)
    with pytest.raises(ConfigurationError, match="holds an interrupted training"):
        make_draft(other, model, tokenizer, session, DraftCallbacks())
    with pytest.raises(ConfigurationError, match="answer_tokens was 8, now 9"):
        make_draft(replace(other, resume=True), model, tokenizer, session, DraftCallbacks())


def test_the_commands(served: Executor, tmp_path: Path) -> None:
    """A draft from plain text, and the same answer with it."""
    folder = tmp_path / "draft"
    plainly, shape = ("--privacy", "plain"), ("--sequence-length", 64, "--epochs", 2)
    out, _ = ok_here("draft", served, "--data", text_file(tmp_path, 60), "--output", folder, *plainly, *shape)
    assert "tokens a pass" in out
    assert f"draft: {folder}" in out.replace("\n", "")
    prompt = ("--prompt", "In the beginning", "--max-new-tokens", 12, *plainly)
    plain, _ = ok_here("generate", served, *prompt)
    drafted, told = ok_here("generate", served, *prompt, "--draft", folder)
    assert drafted == plain
    assert "tokens a pass" in told
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for options, said in (
        (("--draft", tmp_path), "holds no draft"),
        (("--draft", tmp_path / "adapter"), "holds an adapter and no draft: give it with --adapter"),
        (("--adapter", folder), "holds a draft and no adapter: give it with --draft"),
    ):
        refused = here("generate", served, *prompt, *options)
        assert refused.exit_code == 1
        error = refused.exception
        assert isinstance(error, SymbiosisError)
        error.show_options(NAMES)
        assert said in str(error)


def test_a_training_makes_a_draft_of_its_adapter(served: Executor, tmp_path: Path) -> None:
    folder, adapter = tmp_path / "draft", tmp_path / "adapter"
    data = ("--data", text_file(tmp_path, 60), "--sequence-length", 64, "--steps", 2)
    learn = ("finetune", served, "--privacy", "plain", *data, "--with-draft", folder)
    out, err = ok_here(*learn, "--output", adapter)
    assert f"draft: {folder}" in out.replace("\n", "")
    assert "reading texts: " in err
    prompt = ("--prompt", "In the beginning", "--max-new-tokens", 4, "--privacy", "plain")
    assert "tokens a pass" in ok_here("generate", served, *prompt, "--adapter", adapter, "--draft", folder)[1]
    assert "--adapter" in str(here("generate", served, *prompt, "--draft", folder).exception)
    refused = here(*learn, "--output", tmp_path / "other")
    assert "exists already" in str(refused.exception)
    assert not (tmp_path / "other").exists()
    os.mkfifo(tmp_path / "pipe")
    piped = ("finetune", served, "--data", tmp_path / "pipe", "--with-draft", tmp_path / "new")
    assert "possible only for files" in str(here(*piped, "--output", tmp_path / "other").exception)


@pytest.mark.parametrize("prompts", ["Who?\n", '{"prompt": "Who?"}\n'])
def test_the_command_takes_prompts_of_both_forms(
    prompts: str, served: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / ("prompts.jsonl" if "{" in prompts else "prompts.txt")
    asked = ("draft", served, "--privacy", "plain", "--prompts", file, "--output", tmp_path / "draft")
    file.write_text("{}\n")
    assert "line 1: " in str(here(*asked).exception)

    def open_session(_: Any) -> Session:
        raise ConfigurationError("the files were read")

    monkeypatch.setattr("tenant_sdk.session.opening.open_session", open_session)
    file.write_text(prompts)
    assert str(here(*asked).exception) == "the files were read"


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
@pytest.mark.parametrize("method", ["prompt", "p-tuning", "prefix"])
def test_adapters_of_virtual_tokens_have_no_draft(method: str, served: Executor, tmp_path: Path) -> None:
    """PEFT computes one token of a pass, so a draft would change the text."""
    save("llama", tmp_path / "model")
    executor = serve_in_process(tmp_path / "model", numerics="float32")
    with tenant_sdk.connect(executor, privacy="plain") as session:
        adapted = with_adapter(session.load_model(progress=False), method)
        options = DraftOptions(tmp_path / "new", data=[text_file(tmp_path, 8)])
        with pytest.raises(ConfigurationError, match="virtual tokens"):
            make_draft(options, adapted, Letters(), session, DraftCallbacks())
        with pytest.raises(ConfigurationError, match="virtual tokens"):
            load_draft(tmp_path, adapted, session)
        if method != "prefix":  # of which PEFT makes keys and values that the model does not take
            with pytest.raises(ConfigurationError, match="computed 1 of 5 tokens"):
                written(adapted, PROMPT, custom_generate=guessing(adapted.get_base_model()))
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    learn = ("finetune", served, "--data", text_file(tmp_path, 8), "--output", tmp_path / "out")
    learn += ("--with-draft", tmp_path / "draft")
    for more in (("--method", method), ("--adapter", tmp_path / "adapter")):
        assert "virtual tokens" in str(here(*learn, *more).exception)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("prompts.txt", '{"messages": []}\n', "line 1: .*a file of prompts has one a line"),
        ("prompts.jsonl", "Who?\n", "line 1: .*a file of prompts has one a line"),
        ("prompts.txt", "\n \n", "holds no prompt"),
    ],
)
def test_files_without_prompts_are_refused(
    name: str, text: str, said: str, tmp_path: Path, session: Session, model: Any, tokenizer: Any
) -> None:
    (tmp_path / name).write_text(text)
    options = DraftOptions(tmp_path / "draft", prompts=[tmp_path / name])
    with pytest.raises(ConfigurationError, match=said):
        make_draft(options, model, tokenizer, session, DraftCallbacks())
