"""Attacks on a gateway's traffic, on rows that hide it and on supplies of masks that do not."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from security.attacks.batches import ByteSearch, CachedPrefix, SeenSequences, SequenceBoundary, StepCounts
from security.recordings import gateway_process
from security.recordings.executors import AuditError
from security.recordings.gateway_process import Work, gateway_command
from security.trials.context import Trials
from security.trials.gateway import LEAST, PAIR, TOGETHER, Gateways, during
from security.verdicts.claims import CLAIMS
from security.verdicts.judges import GATEWAY_TOKENS
from security.verdicts.plan import BOTH, PROVIDER, QUICK_PLAN, AuditResult
from security.views.adversaries import ObservedRequest, View
from shared.launching import LaunchError
from shared.wire.header import Direction

RNG = np.random.default_rng(0)
VOCABULARY, WIDTH, BEHIND = 128, 64, 3
TABLE = torch.from_numpy(RNG.integers(-(2**20), 2**20, (VOCABULARY, WIDTH)).astype(np.int32))
PUBLIC: Any = SimpleNamespace(
    first_inputs=TABLE.float(),
    own_text=lambda count: torch.from_numpy(np.random.default_rng(9).integers(0, VOCABULARY, (8, 32))),
)
Masks = Callable[[int, int], torch.Tensor]  # for rows of one sequence under one adapter: int32 [N, WIDTH]


def uniform(count: int, adapter: int = 0) -> torch.Tensor:
    return torch.from_numpy(RNG.integers(-(2**31), 2**31, (count, WIDTH)).astype(np.int32))


def none(count: int, adapter: int = 0) -> torch.Tensor:
    return torch.zeros(count, WIDTH, dtype=torch.int32)


def one_for_each_sequence(count: int, adapter: int = 0) -> torch.Tensor:
    return uniform(1).expand(count, -1)


def seeded_by_the_adapter(count: int, adapter: int = 0) -> torch.Tensor:
    numbers = np.random.default_rng(adapter).integers(-(2**31), 2**31, (count, WIDTH))
    return torch.from_numpy(numbers.astype(np.int32))


def marked_with_the_adapter(count: int, adapter: int = 0) -> torch.Tensor:
    return uniform(count) & ~1 | adapter & 1  # whatever the row is made even before


def gateways() -> Gateways:
    trials: Any = SimpleNamespace(
        parties=None, plan=QUICK_PLAN, rng=RNG, confidence=0.9993, folder=Path("none")
    )
    trials.score_guesses = partial(Trials.score_guesses, trials)
    return Gateways(trials, None)


def seen(at: float, rows: torch.Tensor, group: int = 0) -> ObservedRequest:
    return ObservedRequest(group, Direction.FORWARD, 1, 1, at, rows)


def bursts(masks: Masks) -> tuple[View, list[int], list[Work]]:
    """One prompt in four sequences: under one adapter, under another, and each under another."""
    kinds = [int(kind) for _ in range(8) for kind in RNG.permutation(3)]
    inside = [TABLE[:8] * 2 + 64 * TABLE[8 + adapter] // 64 * 2 for adapter in range(TOGETHER)]
    requests = []
    for at, kind in enumerate(kinds):
        adapters = range(TOGETHER) if kind == 2 else [kind] * TOGETHER
        rows = torch.cat([inside[adapter] + masks(8, adapter) for adapter in adapters])
        requests.append(seen(at + 0.5, rows, BEHIND))
    return View(PUBLIC, requests), kinds, [Work(at, at + 1) for at in range(len(kinds))]


def pairs(masks: Masks) -> tuple[View, list[int], list[Work]]:
    """Two prompts of one word each behind a row of an answer."""
    lengths = [int(n) for n in RNG.integers(LEAST, PAIR - LEAST + 1, 32)]
    requests = []
    for at, length in enumerate(lengths):
        one, other = RNG.choice(VOCABULARY, 2, replace=False)
        parts = [(one, length), (other, PAIR - length)]
        rows = [TABLE[word].expand(count, -1) + masks(count, 0) for word, count in parts]
        requests.append(seen(at + 0.5, torch.cat([uniform(1), *rows])))
    return View(PUBLIC, requests), lengths, [Work(at, at + 1) for at in range(len(lengths))]


def prompts(masks: Masks) -> tuple[View, list[Work]]:
    """Prompts of which four share each request."""
    requests, works = [], []
    for at in range(40):
        tokens = torch.from_numpy(RNG.integers(0, VOCABULARY, 4 * 8))
        rows = torch.cat([TABLE[part] + masks(len(part), 0) for part in tokens.split(8)])
        requests.append(seen(at + 0.5, rows))
        works.append(Work(at, at + 1, tokens.tolist()))
    return View(PUBLIC, requests), works


def verdict(identity: str, findings: list[Any]) -> str:
    (claim,) = [claim for claim in CLAIMS if claim.identity == identity]
    return claim.verdict(AuditResult(findings=findings)).word


@pytest.mark.parametrize(
    ("masks", "word"),
    [
        (uniform, "holds"),
        (none, "REFUTED"),
        (seeded_by_the_adapter, "REFUTED"),
        (marked_with_the_adapter, "REFUTED"),
    ],
)
def test_which_adapter_and_how_many(masks: Masks, word: str) -> None:
    view, kinds, works = bursts(masks)
    assert verdict("gateway-adapters", gateways()._adapters(PROVIDER, view, BEHIND, kinds, works)) == word


@pytest.mark.parametrize(
    ("masks", "word"), [(uniform, "holds"), (none, "REFUTED"), (one_for_each_sequence, "REFUTED")]
)
def test_which_rows_are_one_sequence(masks: Masks, word: str) -> None:
    view, lengths, works = pairs(masks)
    found = gateways()._boundaries(PROVIDER, view, lengths, works)
    assert verdict("gateway-sequences", [found]) == word


def test_pairs_that_did_not_come_into_one_request_are_not_measured() -> None:
    view, lengths, works = pairs(uniform)
    view.requests = [seen(each.arrived, each.raw[:-2]) for each in view.requests]
    found = gateways()._boundaries(PROVIDER, view, lengths, works)
    assert "0 of 32 pairs" in found.detail
    assert verdict("gateway-sequences", [found]) == "REFUTED"


@pytest.mark.parametrize(("masks", "word"), [(uniform, "holds"), (none, "REFUTED")])
def test_tokens(masks: Masks, word: str) -> None:
    view, works = prompts(masks)
    clear = View(PUBLIC, [seen(w.begin + 0.5, TABLE[torch.tensor(w.sent)]) for w in works])
    found = gateways()._tokens({PROVIDER: view, BOTH: clear}, works)
    assert found[0].success.value == 1.0
    assert [each.attack for each in found[1:]] == list(GATEWAY_TOKENS)
    assert verdict("gateway-tokens", found) == word


def test_what_clients_did_not_send_is_no_truth() -> None:
    view, works = prompts(none)
    works[0] = Work(works[0].begin, works[0].end, [*works[0].sent[1:], VOCABULARY])
    truth, read = gateways()._truth(view, works)
    assert truth.sent[0].tokens is not None
    assert truth.sent[1].tokens is not None
    assert truth.sent[0].tokens.eq(-1).all()
    assert truth.sent[1].tokens.ge(0).all()
    assert read.value < 1.0


def test_sequences_are_counted() -> None:
    steps = [9, 1, 8, 2, 2, 6, 3, 2, 2, 1]  # prompts of 9, 7 and 4, of which one ends, then another, the last
    assert StepCounts().attack(steps, RNG) == SeenSequences([9, 7, 4], 3, 3)
    padded = [32] * len(steps)
    assert StepCounts().attack(padded, RNG).prompts != [9, 7, 4]


def test_a_prompt_that_was_met_before() -> None:
    met = [0, 1] * 8
    guesses = CachedPrefix().attack(([270 - 256 * kind for kind in met], met[:8]), RNG)
    assert guesses.tolist() == [bool(kind) for kind in met[8:]]


def test_bytes_are_found() -> None:
    search = ByteSearch({b"adapter-1": "a name", b"key": "a key"})
    assert search.attack({"one": b"..adapter-1..", "other": b"adapter-2"}, RNG) == ["a name in one"]


def test_the_boundary_lies_where_it_may() -> None:
    guesses = SequenceBoundary(LEAST).attack([uniform(PAIR) for _ in range(300)], RNG)
    assert set(guesses.tolist()) == set(range(LEAST, PAIR - LEAST + 1))


def test_only_what_came_meanwhile() -> None:
    view = View(PUBLIC, [seen(at, uniform(1)) for at in (0.5, 1.5, 2.5)])
    assert [each.arrived for each in during(view, [Work(0, 1), Work(2, 3)]).requests] == [0.5, 2.5]


def test_without_a_gateway_nothing_passes() -> None:
    result = AuditResult()
    gateways().run(result, partial(pytest.fail, "nothing is to be done"))
    words = {claim.identity: claim.verdict(result) for claim in CLAIMS if "gateway" in claim.identity}
    assert len(words) == 10
    for told in words.values():
        assert (told.word, told.holds, told.refuted) == ("skipped", False, False)
        assert told.figure.startswith("skipped: --no-gateway was given, or no environment with vLLM")
        assert "--gateway" in told.figure
    assert not any(claim.verdict(result).skipped for claim in CLAIMS if claim.identity not in words)


def test_how_a_gateway_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_process, "_ROOT", tmp_path)
    monkeypatch.setattr(gateway_process.importlib.util, "find_spec", lambda _: None)
    assert gateway_command() is None
    programs = tmp_path / ".venv-gateway" / "bin"
    programs.mkdir(parents=True)
    for name in ("symbiosis-tenant", "python3.11"):
        (programs / name).touch()
        os.chmod(programs / name, 0o755)
    assert gateway_command() == [str(programs / "symbiosis-tenant")]
    named = programs / "python3.11"
    assert gateway_command(named) == [str(named), "-m", "tenant_sdk.command_line.main"]
    with pytest.raises(AuditError, match="no such program"):
        gateway_command(tmp_path / "nothing")


def test_a_gateway_that_does_not_start(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo last words; exit 3"]
    with (
        pytest.raises(LaunchError, match="last words"),
        gateway_process.gateway(command, [], {}, "key", tmp_path / "log"),
    ):
        pytest.fail("it did not start")
