"""Drafts in the gateway: which sequence has which, and which tokens they may guess."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shared.errors import ConfigurationError
from tenant_sdk.drafts.card import DraftCard
from tenant_sdk.drafts.folder import WEIGHTS, digest_of_tensors
from tenant_sdk.drafts.head import DraftHead
from tenant_sdk.drafts.options import CARD
from tenant_sdk.gateway.draft_proposer import FOLDER, Proposer
from tenant_sdk.gateway.options import GatewayOptions
from tenant_sdk.gateway.serving import check_drafts
from tenant_sdk.storage import ADAPTER_WEIGHTS

KNOWN, ROWS, WIDTH = 2000, 2048, 8  # tokens of the model, and rows of vLLM's head, which fills up a block
GUESSES = 2
TEXTS = np.full(5, 4), np.array([[9, 7, 3, 7, 0, 0]] * 5)  # of each sequence four tokens
MANIFEST: Any = SimpleNamespace(weights="w", model="m")


@pytest.fixture(autouse=True)
def session(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(manifest=MANIFEST)
    monkeypatch.setattr("tenant_sdk.gateway.draft_proposer.session_here", lambda: found)


def write_draft(folder: Path, *tokens: int, adapter: str = "", repeats: tuple[float, ...] = ()) -> None:
    """A draft that guesses the first of these tokens."""
    folder.mkdir(exist_ok=True)
    head = DraftHead(WIDTH, WIDTH)
    save_file(head.state_dict() | {"tokens": torch.tensor(tokens)}, folder / WEIGHTS)
    card = DraftCard(
        symbiosis="0",
        model="m",
        weights="w",
        adapter=adapter,
        width=WIDTH,
        hidden=WIDTH,
        acceptance=(0.5,),
        repeats=repeats,
        learned_tokens=1,
        held_out_tokens=1,
    )
    (folder / CARD).write_bytes(msgspec.json.encode(card))


def write_adapter(folder: Path, value: float) -> str:
    """The digest of an adapter of one tensor."""
    tensors = {"layer.lora_A.weight": torch.full((2, WIDTH), value)}
    folder.mkdir()
    save_file(tensors, folder / ADAPTER_WEIGHTS)
    return digest_of_tensors(tensors)


def loaded(folder: Path) -> tuple[Proposer, Any]:
    """A proposer, and vLLM's model, to which it listens."""
    config: Any = SimpleNamespace(
        additional_config={FOLDER: str(folder)},
        speculative_config=SimpleNamespace(num_speculative_tokens=GUESSES),
        model_config=SimpleNamespace(get_vocab_size=lambda: KNOWN),
        lora_config=SimpleNamespace(max_loras=3),
    )
    model: Any = SimpleNamespace(
        lm_head=SimpleNamespace(weight=torch.zeros(ROWS, WIDTH), bias=None),
        embed_input_ids=nn.Embedding(ROWS, WIDTH),
        compute_logits=lambda hidden: hidden,
    )
    proposer = Proposer(config)
    proposer.load_model(model)
    return proposer, model


def guessed(
    proposer: Proposer, model: Any, hidden: Tensor, steps: int = 2, **adapters: Path | None
) -> list[list[int]]:
    """The guesses for sequences of these adapters, each with one new token."""
    requests = {
        name: SimpleNamespace(lora_request=path and SimpleNamespace(lora_path=str(path)))
        for name, path in adapters.items()
    }
    runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=[*adapters]), requests=requests)
    guesses = []
    for _ in range(steps):  # the first one has the drafts read
        proposer.begin(runner, {})
        model.compute_logits(hidden)
        guesses = proposer.propose([[7] for _ in adapters], *TEXTS)
        wait(proposer._drafts.values())
    return guesses


def test_tokens_of_the_padding_are_not_guessed(tmp_path: Path) -> None:
    """vLLM's sampler would take their probabilities from the next sequence's row."""
    write_draft(tmp_path, 5, KNOWN - 1)
    loaded(tmp_path)
    write_draft(tmp_path, 5, KNOWN)
    with pytest.raises(ConfigurationError, match="ids that the model does not have"):
        loaded(tmp_path)


def test_each_sequence_has_the_draft_of_its_adapter(tmp_path: Path) -> None:
    drafts, one, two = tmp_path / "drafts", tmp_path / "one", tmp_path / "two"
    drafts.mkdir()
    write_draft(drafts / "base", 5)
    write_draft(drafts / "adapted", 6, adapter=write_adapter(one, 1.0))
    write_adapter(two, 2.0)
    sequences = {"a": one, "b": None, "c": two, "d": one, "e": tmp_path / "removed"}
    expected = [[6, 6], [5, 5], [5, 5], [6, 6], [5, 5]]
    assert guessed(*loaded(drafts), torch.randn(5, WIDTH), **sequences) == expected


def test_a_text_that_repeats_itself(tmp_path: Path) -> None:
    """The draft finds each of two tokens as likely as the other; its text ends with 7, after which came 3."""
    write_draft(tmp_path, 5, 6, repeats=(0.6,) * 4)
    assert guessed(*loaded(tmp_path), torch.randn(1, WIDTH), a=None) == [[3, 7]]
    write_draft(tmp_path, 5, 6, repeats=(0.4,) * 4)
    assert guessed(*loaded(tmp_path), torch.randn(1, WIDTH), a=None) == [[5, 5]]


def test_drafts_that_are_added_while_it_serves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    drafts, one, two = tmp_path / "drafts", tmp_path / "one", tmp_path / "two"
    drafts.mkdir()
    write_draft(drafts / "adapted", 6, adapter=write_adapter(one, 1.0))
    other = write_adapter(two, 2.0)
    serving, hidden = loaded(drafts), torch.randn(3, WIDTH)
    sequences = {"a": one, "b": None, "c": two}
    assert guessed(*serving, hidden, **sequences) == [[6, 6], [], []]  # no draft of the base
    write_draft(drafts / "damaged", KNOWN, adapter=other)
    assert guessed(*serving, hidden, **sequences) == [[6, 6], [], []]
    assert "ids that the model does not have" in caplog.text
    write_draft(drafts / "added", 8, adapter=other)
    write_draft(drafts / "base", 5)
    assert guessed(*serving, hidden, **sequences) == [[6, 6], [5, 5], [8, 8]]


def test_a_draft_that_is_copied_file_by_file(tmp_path: Path) -> None:
    drafts, one = tmp_path / "drafts", tmp_path / "one"
    (drafts / "new").mkdir(parents=True)
    write_draft(tmp_path / "made", 6, adapter=write_adapter(one, 1.0))
    serving, hidden = loaded(drafts), torch.randn(1, WIDTH)
    for name in (CARD, WEIGHTS):
        assert guessed(*serving, hidden, a=one) == [[]]
        (drafts / "new" / name).write_bytes((tmp_path / "made" / name).read_bytes())
    assert guessed(*serving, hidden, a=one) == [[6, 6]]
    write_draft(
        drafts / "new", 7, adapter=msgspec.json.decode((drafts / "new" / CARD).read_bytes())["adapter"]
    )
    assert guessed(*serving, hidden, a=one) == [[7, 7]]


def test_other_drafts_guess_on_while_one_is_copied(tmp_path: Path) -> None:
    """A copy changes in each step, and no other draft has to be read again for it."""
    drafts, one, two = tmp_path / "drafts", tmp_path / "one", tmp_path / "two"
    drafts.mkdir()
    write_draft(drafts / "base", 5)
    write_draft(drafts / "adapted", 6, adapter=write_adapter(one, 1.0))
    write_draft(tmp_path / "copied", 7, adapter=write_adapter(two, 2.0))
    (proposer, model), hidden = loaded(drafts), torch.randn(3, WIDTH)
    sequences = {"a": one, "b": None, "c": two}
    assert guessed(proposer, model, hidden, **sequences) == [[6, 6], [5, 5], [5, 5]]
    (drafts / "copied").mkdir()
    (drafts / "copied" / CARD).write_bytes((tmp_path / "copied" / CARD).read_bytes())
    content = (tmp_path / "copied" / WEIGHTS).read_bytes()
    for written in range(0, len(content), len(content) // 8):
        (drafts / "copied" / WEIGHTS).write_bytes(content[:written])
        assert guessed(proposer, model, hidden, steps=1, **sequences) == [[6, 6], [5, 5], [5, 5]]
    (drafts / "copied" / WEIGHTS).write_bytes(content)
    assert guessed(proposer, model, hidden, **sequences) == [[6, 6], [5, 5], [7, 7]]
    write_draft(drafts / "adapted", 8, adapter=digest_of_tensors(load_file(one / ADAPTER_WEIGHTS)))
    assert guessed(proposer, model, hidden, **sequences) == [[8, 8], [5, 5], [7, 7]]
    shutil.rmtree(drafts / "base")
    assert guessed(proposer, model, hidden, **sequences) == [[8, 8], [], [7, 7]]


def test_no_step_waits_for_a_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is there, the base's guesses; and those that nobody waits for any more are not read."""
    drafts, go = tmp_path / "drafts", threading.Event()
    drafts.mkdir()
    write_draft(drafts / "base", 5)
    adapters = {name: tmp_path / name for name in "abcdef"}
    for value, (name, folder) in enumerate(adapters.items()):
        write_draft(drafts / name, 6 + value, adapter=write_adapter(folder, float(value)))
    proposer, model = loaded(drafts)
    read = list[str]()

    def slow(folder: Path) -> dict[str, Tensor]:
        go.wait()
        read.append(folder.parent.name)
        return load_file(folder)

    monkeypatch.setattr("tenant_sdk.gateway.draft_proposer.load_file", slow)
    requests = {
        name: SimpleNamespace(lora_request=SimpleNamespace(lora_path=str(path)))
        for name, path in adapters.items()
    }
    for name in adapters:
        proposer.begin(SimpleNamespace(input_batch=SimpleNamespace(req_ids=[name]), requests=requests), {})
        model.compute_logits(torch.randn(1, WIDTH))
        assert proposer.propose([[7]], *TEXTS) == [[5, 5]]
    go.set()
    proposer._reader.shutdown()
    # One of the others may have begun: the first, if its thread was there in time.
    assert read[-3:] == [*"def"]
    assert len(read) <= 4


def test_drafts_that_no_sequence_could_use(tmp_path: Path) -> None:
    drafts, adapters = tmp_path / "drafts", tmp_path / "adapters"
    drafts.mkdir()
    adapters.mkdir()
    write_draft(drafts / "base", 5)
    write_draft(drafts / "adapted", 5, adapter="some")
    with pytest.raises(ConfigurationError, match="is for an adapter: give"):
        check_drafts(GatewayOptions(speculate=str(drafts)), MANIFEST)
    options = GatewayOptions(speculate=str(drafts), adapters=adapters)
    check_drafts(options, MANIFEST)
    write_draft(drafts / "again", 5)
    with pytest.raises(ConfigurationError, match=r"again and .*base are drafts for the same base model"):
        check_drafts(options, MANIFEST)
