"""The claims of ``CLAIMS.md``, each with the figure that would refute it.

Controls are claims too: an audit whose attacks fail where they must succeed is blind, and proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from security.attacks.masking import Randomness
from security.attacks.seeds import SeedStatistics
from security.capture import ELSEWHERE, ONE_TIME, PLAIN, RING_BANK, SAME, bank_name
from security.findings import Finding, percent
from security.plan import BOTH, PROVIDER, SOURCE, Result

TOKEN_ATTACKS = (
    "vocabulary matching",
    "mask reuse",
    "subspace projection",
    "noise-aware retrieval",
    "averaging",
    "search in hidden states",
)
WITH_MASKS = (
    "known-mask subtraction",
)  # an attack where the party has masks, which under one-time is a fault
LEARNING_ATTACKS = ("label recovery", "gradient span check")
SINGLE_ATTACKS = ("adapter extraction", "distinguishing game")
# Judgements about one-time that chance alone could upset: these attacks, and the smallest p-values of
# bytes and of seeds.
STATISTICAL = len(TOKEN_ATTACKS) + len(LEARNING_ATTACKS) + len(SINGLE_ATTACKS) + 2
ASKED = {"PRODUCT": "requests to multiply rows", "SEED_EFFECT": "seeds", "EFFECT": "masks"}
LEAST_SEEDS = 64  # fewer show nothing

# What has to succeed where masks are known, and how well.
ON_RING = {
    "search in hidden states": 0.95,
    "label recovery": 0.5,
    "gradient span check": 0.9,
    "adapter extraction": 0.99,
}


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds, with the figure that says so."""

    identity: str
    holds: bool
    figure: str


@dataclass(frozen=True)
class Claim:
    """One line of ``CLAIMS.md``; ``judge`` gives whether it holds and the figure."""

    identity: str
    text: str
    mode: str
    attack: str
    bound: str
    judge: Callable[[Result], tuple[bool, str]]

    def verdict(self, result: Result) -> Verdict:
        """Of one audit. What was not measured does not hold."""
        holds, figure = self.judge(result)
        return Verdict(self.identity, holds, figure)


def _select(result: Result, mode: str, sees: str, attacks: Iterable[str]) -> list[Finding]:
    return [
        finding
        for finding in result.findings
        if (finding.mode, finding.sees) == (mode, sees)
        and any(finding.attack == attack or finding.attack.startswith(f"{attack}, ") for attack in attacks)
    ]


def _at_chance(
    mode: str, sees: str, attacks: tuple[str, ...], may_run: tuple[str, ...] = ()
) -> Callable[[Result], tuple[bool, str]]:
    def judge(result: Result) -> tuple[bool, str]:
        found = []
        for attack in attacks:
            measured = [f for f in _select(result, mode, sees, (attack,)) if f.success.trials]
            if not measured:
                return False, f"not measured: {attack}"
            found += measured
        found += _select(result, mode, sees, may_run)
        numbers = [n for f in found for n in (f.distance, f.success.value, f.success.low, f.success.high)]
        apart = sum(f.off_chance for f in found)
        worst = max(found, key=lambda f: f.distance)
        told = f"{apart} of {len(found)} attacks away from chance; farthest: " if len(found) > 1 else ""
        return all(map(math.isfinite, numbers)) and not apart, told + _figure(worst)

    return judge


def _succeeds(mode: str, sees: str, attack: str, least: float) -> Callable[[Result], tuple[bool, str]]:
    def judge(result: Result) -> tuple[bool, str]:
        found = _select(result, mode, sees, (attack,))
        if not found:
            return False, "not measured"
        worst = min(found, key=lambda f: f.success.value)
        return worst.success.value >= least, _figure(worst)

    return judge


def _all_succeed(mode: str, sees: str, least: dict[str, float]) -> Callable[[Result], tuple[bool, str]]:
    def judge(result: Result) -> tuple[bool, str]:
        found = {attack: _select(result, mode, sees, (attack,)) for attack in least}
        told = [f"{attack}: {f.spell(f.success.value)}" for attack, each in found.items() for f in each]
        holds = all(each and each[0].success.value >= least[attack] for attack, each in found.items())
        return holds, "; ".join(told) or "not measured"

    return judge


def _resolved(result: Result) -> tuple[bool, str]:
    found = against_one_time(result)
    if not found:
        return False, "not measured"
    least, attack = max((math.inf if f.resolution is None else f.resolution, f.attack) for f in found)
    asked = result.about["resolution"]
    told = f"{100 * least:.2f} points of 100 or fewer in {len(found)} attacks (most in {attack})"
    low = [100 * f.below for f in found if f.below is not None]
    told += f"; below chance {max(low, default=0.0):.2f} or fewer in {len(low)}, and nothing in the others"
    powers = [(f.power, f.attack) for f in found if f.power is not None]
    if powers:
        power, weakest = min(powers)
        told += f"; a true advantage of {100 * asked:g} of 100 is found with probability {percent(power)} "
        told += f"or more (least in {weakest})"
    sure = 100 * surely_found(found)
    return max(
        least, *(f.below or 0.0 for f in found)
    ) <= asked, f"{told}; one of {sure:.1f} with 99 % or more in every attack"


def against_one_time(result: Result) -> list[Finding]:
    """The attacks on what the provider saw under one-time, whose success is to be told from chance."""
    return _select(result, ONE_TIME, PROVIDER, (*TOKEN_ATTACKS, *LEARNING_ATTACKS, *SINGLE_ATTACKS))


def surely_found(found: list[Finding]) -> float:
    """The true advantage over chance that each of these attacks finds with probability POWER."""
    return max((f.detectable or 0.0 for f in found), default=1.0)


def _figure(finding: Finding) -> str:
    where = f" ({finding.detail})" if finding.hits is None and finding.detail else ""
    return f"{finding.attack}: {finding.measured}{where}"


def _uniform(result: Result) -> tuple[bool, str]:
    found = result.randomness.get(ONE_TIME)
    if found is None:
        return False, "not measured"
    level = 1 - result.about["confidence_of_one_interval"]
    repeated = found.repeated_blocks + found.repeated_tops
    return found.bytes_tested > 0 and found.p_value > level and repeated == 0, (
        f"{found.bytes_tested:,} bytes: {_p_value(found, level)}, {found.repeated_blocks} repeated blocks of "
        f"16 bytes, {found.repeated_tops} repeated runs of the top bytes of 8 numbers"
    )


def _p_value(found: Randomness | SeedStatistics, level: float) -> str:
    return (
        f"p = {found.p_value:.3g}, the smallest of {found.tests} tests times their number, 1 at most "
        f"({found.worst}; fails below {level:.2g})"
    )


def _separated(result: Result) -> tuple[bool, str]:
    found = result.figures.get("operations", {})
    told = [
        f"{party}: "
        + (
            ", ".join(f"{n:,} {ASKED.get(name, name)}" for name, n in found.get(party, {}).items())
            or "nothing"
        )
        for party in (PROVIDER, SOURCE)
    ]
    only = set(found.get(PROVIDER, {})) == {"PRODUCT"} and set(found.get(SOURCE, {})) == {"SEED_EFFECT"}
    return only, "; ".join(told)


def _seeds_fresh(result: Result) -> tuple[bool, str]:
    found = result.seeds
    if found is None or found.count < LEAST_SEEDS:
        return False, "not measured"
    level = 1 - result.about["confidence_of_one_interval"]
    return found.p_value > level and not found.repeated and not found.others, (
        f"{found.count:,} seeds, {found.repeated} repeated, {found.others} other requests: "
        f"{_p_value(found, level)}"
    )


def _repeats_found(result: Result) -> tuple[bool, str]:
    found = result.randomness.get(RING_BANK)
    if found is None:
        return False, "not measured"
    told = (
        f"{found.repeated_tops:,} repeated runs of the top bytes of 8 numbers in {found.bytes_tested:,} bytes"
    )
    return found.repeated_tops > 0, told


def _stolen(result: Result) -> tuple[bool, str]:
    errors = [
        more["relative_error"]
        for name, more in result.figures.items()
        if name.startswith("adapter extraction") and name.endswith(f"{PLAIN}, {PROVIDER}")
    ]
    worst = max(errors, default=math.nan)
    return worst < 1e-2, f"relative error at most {worst:.2g}; layers copied: {len(errors)}"


def _no_cross_talk(result: Result) -> tuple[bool, str]:
    found = result.figures.get("canaries")
    if not found:
        return False, "not measured"
    return found["wrong"] == 0 and found["products"] < found["replies"] / 2, (
        f"{found['wrong']} of {found['replies']:,} replies wrong; {found['replies'] / found['products']:.1f} "
        "requests of 16 tenants were computed in one product on average"
    )


def _silent(result: Result) -> tuple[bool, str]:
    found = result.figures.get("secrets in logs")
    if found is None:
        return False, "not measured"
    searched = result.figures["log characters searched"]
    told = f"{len(found)} found in {sum(searched.values()):,} characters of {len(searched)} logs and listings"
    return not found, told + (f": {found[0]}" if found else "")


def _planted_found(result: Result) -> tuple[bool, str]:
    found = result.figures.get("planted secret found", {})
    missed = [where for where, there in found.items() if not there]
    return bool(found) and not missed, f"found in {len(found) - len(missed)} of {len(found)} places" + (
        f", not in {', '.join(missed)}" if missed else ""
    )


def _reuse_counted(result: Result) -> tuple[bool, str]:
    broken = result.figures.get("broken after messages", {})
    told = [f"{bank_name(label)}: {'never' if n is None else n}" for label, n in broken.items()]
    on_floats_too = RING_BANK in broken and len(broken) > 1
    return on_floats_too and None not in broken.values(), (
        "messages until 95 % of tokens are right: " + ("; ".join(told) or "not measured")
    )


CLAIMS = (
    Claim(
        "one-time-tokens",
        "An honest-but-curious provider cannot tell any token from rows but by guessing",
        ONE_TIME,
        ", ".join(TOKEN_ATTACKS),
        "every interval holds chance",
        _at_chance(ONE_TIME, PROVIDER, TOKEN_ATTACKS, WITH_MASKS),
    ),
    Claim(
        "one-time-training",
        "An honest-but-curious provider cannot tell labels or a batch's tokens from rows but by guessing",
        ONE_TIME,
        ", ".join(LEARNING_ATTACKS),
        "every interval holds chance",
        _at_chance(ONE_TIME, PROVIDER, LEARNING_ATTACKS),
    ),
    Claim(
        "one-time-adapter",
        "An honest-but-curious provider cannot copy the adapter, or its negative, from rows",
        ONE_TIME,
        "adapter extraction",
        "the interval holds cosine 0",
        _at_chance(ONE_TIME, PROVIDER, ("adapter extraction",)),
    ),
    Claim(
        "one-time-indistinguishable",
        "Rows of two inputs that the provider chose itself look the same to it",
        ONE_TIME,
        "distinguishing game",
        "the interval holds advantage 0",
        _at_chance(ONE_TIME, PROVIDER, ("distinguishing game",)),
    ),
    Claim(
        "one-time-uniform",
        "Every byte of products' rows is uniform, and no mask serves twice, for whatever product",
        ONE_TIME,
        "uniformity and independence",
        "smallest p above its level; no block of 16 bytes, no run of the top bytes of 8 numbers comes again",
        _uniform,
    ),
    Claim(
        "one-time-separation",
        "The provider is sent rows and neither masks nor seeds, a mask source seeds and no rows",
        ONE_TIME,
        "operations in both transcripts",
        "provider: requests to multiply rows only; mask source: seeds only; some of each",
        _separated,
    ),
    Claim(
        "one-time-mask-source",
        "What a mask source gets are fresh random seeds, which have nothing to do with any row",
        f"{ONE_TIME}, {SOURCE}",
        "seed prediction",
        "32 bytes each, none twice, smallest p above its level",
        _seeds_fresh,
    ),
    Claim(
        "verified",
        "A wrong product is noticed",
        f"{ONE_TIME}, verify=always",
        "altered answers",
        "every lie",
        _succeeds(f"{ONE_TIME}, verify=always", "malicious provider", "altered answers", 1.0),
    ),
    Claim(
        "verified-effects",
        "A wrong effect of a mask is noticed",
        f"{ONE_TIME}, verify=always",
        "altered answers",
        "every lie of a mask source",
        _succeeds(f"{ONE_TIME}, verify=always", "malicious mask source", "altered answers", 1.0),
    ),
    Claim(
        "no-cross-talk",
        "A tenant gets its own answers only",
        "any",
        "co-tenant canaries",
        "0 wrong replies, 2 or more in a product",
        _no_cross_talk,
    ),
    Claim(
        "silent",
        "Nothing secret is logged, counted or printed",
        "any",
        "log scan",
        "0 found",
        _silent,
    ),
    Claim(
        "control-planted",
        "What is planted in logs and among printed objects is found",
        "any",
        "log scan",
        "in every place",
        _planted_found,
    ),
    Claim(
        "control-clear",
        "In the clear the provider reads the tokens",
        PLAIN,
        "vocabulary matching",
        "at least 95 %",
        _succeeds(PLAIN, PROVIDER, "vocabulary matching", 0.95),
    ),
    Claim(
        "control-deep",
        "In the clear it reads them in the middle of the model too",
        PLAIN,
        "search in hidden states",
        "at least 95 %",
        _succeeds(PLAIN, PROVIDER, "search in hidden states", 0.95),
    ),
    Claim(
        "control-labels",
        "In the clear it reads what fine-tuning teaches",
        PLAIN,
        "label recovery",
        "at least 50 %",
        _succeeds(PLAIN, PROVIDER, "label recovery", 0.5),
    ),
    Claim(
        "control-adapter",
        "In the clear it copies the adapter",
        PLAIN,
        "adapter extraction",
        "relative error below 1e-2",
        _stolen,
    ),
    Claim(
        "control-game",
        "In the clear it tells chosen inputs apart",
        PLAIN,
        "distinguishing game",
        "advantage at least 0.99",
        _succeeds(PLAIN, PROVIDER, "distinguishing game", 0.99),
    ),
    Claim(
        "control-same-executor",
        "The paper's scheme hides no token from the executor that computes its noise effects",
        SAME,
        "known-mask subtraction",
        "at least 95 %",
        _succeeds(SAME, PROVIDER, "known-mask subtraction", 0.95),
    ),
    Claim(
        "control-reuse",
        "A bank of masks is broken by reuse, wherever its effects come from",
        f"{ELSEWHERE}; {RING_BANK}",
        "mask reuse",
        "at least 95 % after some messages, for every bank",
        _reuse_counted,
    ),
    Claim(
        "control-repetition",
        "Masks that serve again under other rows are seen by their top bytes",
        RING_BANK,
        "uniformity and independence",
        "some runs of the top bytes of 8 numbers come again",
        _repeats_found,
    ),
    Claim(
        "control-collusion",
        "Provider and mask source together read the tokens",
        f"{ONE_TIME}, {BOTH}",
        "vocabulary matching",
        "at least 95 %",
        _succeeds(ONE_TIME, BOTH, "vocabulary matching", 0.95),
    ),
    Claim(
        "control-ring",
        "Together they also read hidden states, labels, batches and the adapter, so attacks work on a ring",
        f"{ONE_TIME}, {BOTH}",
        ", ".join(ON_RING),
        ", ".join(f"{attack} at least {least:g}" for attack, least in ON_RING.items()),
        _all_succeed(ONE_TIME, BOTH, ON_RING),
    ),
    Claim(
        "control-resolution",
        "In every attack on one-time a score a little away from chance would have counted",
        ONE_TIME,
        "all attacks on the provider's view",
        "an observed score 1 point of 100 above chance counts (in a quick audit 10); below, where any can",
        _resolved,
    ),
    Claim(
        "control-unverified",
        "Without verification lies go unnoticed",
        f"{ONE_TIME}, verify=off",
        "altered answers",
        "none noticed",
        lambda result: _none_noticed(result),
    ),
)


def _none_noticed(result: Result) -> tuple[bool, str]:
    found = _select(result, f"{ONE_TIME}, verify=off", "malicious provider", ("altered answers",))
    return bool(found) and found[0].success.value == 0, _figure(found[0]) if found else "not measured"


def judge(result: Result) -> list[Verdict]:
    """Every claim, in the order of ``CLAIMS.md``."""
    return [claim.verdict(result) for claim in CLAIMS]
