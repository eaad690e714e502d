"""The audit's intervals and scores, against figures that are known."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import security
from security.attacks.extraction import StolenAdapter
from security.attacks.logs import LogScan, Secrets
from security.attacks.masking import DistinguishingGame
from security.recordings.workload import GroundTruth, SentRequest
from security.report import environment
from security.verdicts import statistics
from security.verdicts.claims import CLAIMS
from security.verdicts.findings import Finding, advantage, of_adapters, of_spans, of_tokens
from security.verdicts.judges import STATISTICAL
from security.verdicts.plan import FULL_PLAN, AuditResult
from security.verdicts.statistics import POWER, Estimate, blind_hits, detectable, power_at, rate, visible
from shared.errors import ConfigurationError
from shared.wire.header import Direction

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (0, 10, 0.0, 0.3085),  # the table of Clopper and Pearson, 95 %
        (5, 10, 0.1871, 0.8129),
        (10, 10, 0.6915, 1.0),
        (50, 1000, 0.0373, 0.0654),
    ],
)
def test_rates(successes: int, trials: int, low: float, high: float) -> None:
    found = rate(successes, trials, 0.95)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)
    assert found.value == successes / trials


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    inside = [f.low <= 0.3 <= f.high for f in (rate(int(k), 200) for k in RNG.binomial(200, 0.3, 2000))]
    assert np.mean(inside) >= statistics.CONFIDENCE - 3 * np.sqrt(0.01 * 0.99 / 2000)


def test_what_was_not_measured_does_not_hold() -> None:
    verdicts = [claim.verdict(AuditResult()) for claim in CLAIMS]
    assert {(verdict.word, verdict.holds) for verdict in verdicts} == {("REFUTED", False)}


def test_no_trials_are_no_rate() -> None:
    with pytest.raises(ConfigurationError):
        rate(0, 0)


def test_always_guessing_the_commonest_is_chance() -> None:
    truth = RNG.choice(5, 10_000, p=[0.6, 0.1, 0.1, 0.1, 0.1])
    guess = np.zeros_like(truth)
    success, chance = of_tokens(*map(torch.from_numpy, (guess, truth, guess)), 0.99)
    assert success.value == pytest.approx(chance, rel=1e-3) == pytest.approx(0.6, abs=0.02)
    assert blind_hits(guess, truth) == pytest.approx((truth == 0).mean(), rel=1e-3)
    assert not Finding("a", "m", "s", "t", success, chance).off_chance


def test_a_commonest_token_that_was_learned_is_not_chance() -> None:
    """Who knows nothing guesses any; a token that only the tenant's rows show to be common is information."""
    truth = RNG.choice(5, 10_000, p=[0.6, 0.1, 0.1, 0.1, 0.1])
    guess, blind = np.zeros_like(truth), RNG.integers(0, 5, 10_000)
    success, chance = of_tokens(*map(torch.from_numpy, (guess, truth, blind)), 0.99)
    assert chance == pytest.approx(0.2, abs=0.02)
    assert Finding("a", "m", "s", "t", success, chance).off_chance


def test_a_token_that_was_never_guessed_is_not_impossible() -> None:
    assert 0 < blind_hits(np.zeros(1000, int), np.full(10, 3)) < 1 / 1000


def test_the_chance_of_a_part_is_that_of_other_rows() -> None:
    """Guesses that put one part's tokens first, among blind ones that put all in any order."""
    truth = GroundTruth([SentRequest(0, Direction.BACKWARD, 4, tokens=torch.tensor([3, 1, 4, 1]))])
    ranked = [[torch.tensor([1, 3, 4, 0, 2, 5, 6, 7])]]
    blind = [torch.from_numpy(RNG.permutation(8)) for _ in range(4000)]
    success, chance = of_spans(ranked, truth, 32, blind, 0.99)
    assert (success.value, success.trials) == (1.0, 3)
    assert chance == pytest.approx(3 / 8, abs=0.02)


def test_an_advantage_of_one_percent_is_seen() -> None:
    """With as many rows, and as wide an interval, as the whole audit has."""
    trials = FULL_PLAN.game_rows // 2
    right = torch.arange(trials) < trials * (1 + FULL_PLAN.resolution) / 2
    found = advantage(right, torch.ones_like(right), 1 - FULL_PLAN.family_error / STATISTICAL)
    assert found.value == pytest.approx(0.01)
    assert Finding("a", "m", "s", "t", found, 0.0).beats_chance
    assert not Finding("a", "m", "s", "t", Estimate(0.01, -0.01, 0.03, 9), 0.0).beats_chance


@pytest.mark.parametrize(("chance", "trials"), [(0.0012, 1260), (0.0147, 3652), (0.5, 140_000), (0.0, 50)])
def test_what_is_visible(chance: float, trials: int) -> None:
    """One success more is above chance with its interval, one fewer is not."""
    successes = round((chance + visible(chance, trials, 0.999)) * trials)
    assert rate(successes, trials, 0.999).low > chance
    assert rate(successes - 1, trials, 0.999).low <= chance


@pytest.mark.parametrize(("chance", "trials"), [(0.0012, 1260), (0.0147, 3652), (0.5, 140_000), (0.0, 50)])
def test_what_is_detectable(chance: float, trials: int) -> None:
    """A true advantage of that size is above chance as often as it says; a just visible one half the time."""
    size = detectable(chance, trials, 0.999)
    assert power_at(size, chance, trials, 0.999) == pytest.approx(POWER)
    found = [
        rate(int(hits), trials, 0.999).low > chance for hits in RNG.binomial(trials, chance + size, 2000)
    ]
    assert np.mean(found) == pytest.approx(POWER, abs=4 * np.sqrt(0.01 * 0.99 / 2000))
    assert 0.4 < power_at(visible(chance, trials, 0.999), chance, trials, 0.999) < 0.7


def test_few_trials_detect_nothing() -> None:
    assert detectable(0.5, 3, 0.999) == 0.5
    assert power_at(0.5, 0.5, 3, 0.999) == 0.0


@pytest.mark.parametrize(
    ("attack", "measured"),
    [
        ("mask reuse", "3 of 4,032, 0.0744 % (interval 0.0034 % to 0.3532 %; chance 0.0740 %)"),
        ("distinguishing game", "2,018 of 4,032 right, advantage 0.0007"),
        ("adapter extraction", "cosine 0.0007 (interval 0.0000 to 0.0035; chance 0.0007) from 4,032 rows"),
    ],
)
def test_figures_as_text(attack: str, measured: str) -> None:
    """With a count wherever something was counted, and enough digits."""
    success = rate(3, 4032, 0.99923)
    assert Finding(attack, "m", "s", "t", success, 0.00074).measured.startswith(measured)
    assert "chance" not in Finding("wrong answers", "m", "s", "t", success, None).measured
    assert not Finding("wrong answers", "m", "s", "t", success, None).beats_chance


def test_a_model_card(tmp_path: Path) -> None:
    assert environment.card(tmp_path) == ""
    (tmp_path / "README.md").write_text(
        "---\nlicense: x\n---\n\n# Title\n\nA model,\ntrained here.\n\nMore.\n"
    )
    assert environment.card(tmp_path) == "A model, trained here."
    (tmp_path / "README.md").write_text("word " * 200)
    assert len(environment.card(tmp_path)) <= environment.CARD_LETTERS + 2


def test_a_folder_that_is_no_checkout_has_no_commit(tmp_path: Path) -> None:
    assert environment._commit(tmp_path) == ""
    (tmp_path / ".git").mkdir()
    assert environment._commit(tmp_path) == ""


def low_rank(rank: int) -> torch.Tensor:
    left, right = (torch.from_numpy(RNG.standard_normal(shape)).float() for shape in ((96, rank), (rank, 64)))
    return left * torch.logspace(0, -2, rank) @ right


@pytest.mark.parametrize(("stolen_rank", "layers"), [(1, 1), (4, 1), (1, 3)])
def test_an_adapter_that_was_not_stolen(stolen_rank: int, layers: int) -> None:
    """The bound holds more often than it says, but is not idle: two standard deviations are not enough."""
    beaten, widths = 0, []
    for _ in range(300):
        pairs = [(StolenAdapter(low_rank(stolen_rank), stolen_rank, 9), low_rank(8)) for _ in range(layers)]
        found, chance = of_adapters(pairs, 0.99)
        beaten += not found.low <= chance <= found.high
        widths.append(found.high - found.value)
    assert beaten <= 8  # of 300, of which 3 are expected: once in 100 runs more
    assert max(widths) < 8 / np.sqrt(96 * 64 * layers)


def test_an_adapter_that_was_stolen_in_part() -> None:
    real = low_rank(8)
    found, _ = of_adapters([(StolenAdapter(real + 3 * low_rank(4), 12, 9), real)], 0.9999)
    assert found.low > 0


@pytest.mark.parametrize("bit", [0, 13, 31])
def test_the_game_is_won_by_one_bit(bit: int) -> None:
    """Of one number among 64 that are uniform."""
    answer = torch.from_numpy(RNG.integers(0, 2, 4000).astype(bool))
    rows = torch.from_numpy(RNG.integers(-(2**31), 2**31, (4000, 64)).astype(np.int32))
    rows[:, 5] = rows[:, 5] & ~(1 << bit) | (answer.int() << bit)
    guesses = DistinguishingGame().attack((rows, answer[:2000]), RNG)
    assert (guesses == answer[2000:]).float().mean() > 0.95


def test_the_game_is_won_by_a_mask_that_serves_twice() -> None:
    masks = torch.from_numpy(RNG.integers(-(2**31), 2**31, (16, 64)).astype(np.int32))
    answer = torch.from_numpy(RNG.integers(0, 2, 2000).astype(bool))
    rows = masks[torch.from_numpy(RNG.integers(0, 16, 2000))] + answer.int()[:, None]
    guesses = DistinguishingGame().attack((rows, answer[:1000]), RNG)
    assert torch.equal(guesses, answer[1000:])


SEED = bytes(range(100, 132))
SECRETS = Secrets(
    tensors=[torch.tensor([0.12345678, -2.5, 3.25, 9.0])],
    seeds=[SEED],
    token_ids=[17, 4, 2041, 99, 7, 7, 8, 9, 10],
    text=["Biscuit, beagle, six years old, was lame"],
    passwords=["hunter2-hunter2"],
)


@pytest.mark.parametrize(
    "line",
    [
        f"drew {SEED.hex()}",
        f"drew {SEED!r}",
        f"drew {list(SEED)}",
        "x = tensor([ 0.1235, -2.5000,  3.2500])",
        f"x = {torch.tensor([0.12345678, -2.5, 3.25]).tolist()}",
        "ids [17, 4, 2041, 99]",
        "prompt: Biscuit, beagle, six",
        "Authorization: Bearer hunter2-hunter2",
    ],
)
def test_what_is_secret_is_found(line: str) -> None:
    assert LogScan(SECRETS).attack({"a log": f"2026 INFO {line} and more"}, RNG)


def test_what_is_not_secret_is_not_found() -> None:
    line = "tenant alice connected; 2041 rows, 99 requests, 0.1235 s, digest 64656667"
    assert not LogScan(SECRETS).attack({"a log": line}, RNG)


def test_the_page_asks_for_figures_that_an_audit_has() -> None:
    """The template is filled at the end of an audit, which takes minutes or hours."""
    package = Path(security.__file__).parent
    source = "".join(file.read_text() for file in package.rglob("*.py"))
    template = (package / "report" / "page.html.jinja").read_text()
    asked = re.findall(r"figures\[['\"][^'\"]+['\"]\]\.(\w+)", template)
    assert "told_apart" in asked
    for key in set(asked) - {"keys", "items", "values"}:
        assert f'"{key}"' in source
