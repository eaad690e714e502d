"""Judges of claims: of a whole audit, whether one holds, and the figure that says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from security.attacks.masking import Randomness
from security.attacks.seeds import SeedStatistics
from security.recordings.capture import ONE_TIME, PLAIN, RING_BANK, bank_name
from security.verdicts.findings import Finding, percent
from security.verdicts.plan import BOTH, MALICIOUS, PROVIDER, SOURCE, AuditResult
from security.verdicts.statistics import CONFIDENCE, rate

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
IMPRINTS = ("imprinted embeddings", "imprinted head")
GATEWAY_TOKENS = ("vocabulary matching", "subspace projection", "noise-aware retrieval")
GATEWAY_ADAPTERS = ("adapter of a row", "adapters in a step")
# Judgements about one-time that chance alone could upset: these attacks, and the smallest p-values of
# bytes and of seeds.
STATISTICAL = len(TOKEN_ATTACKS) + len(LEARNING_ATTACKS) + len(SINGLE_ATTACKS) + len(IMPRINTS) + 2
ASKED = {"PRODUCT": "requests to multiply rows", "SEED_EFFECT": "seeds", "EFFECT": "masks"}
MIN_SEEDS = 64  # fewer show nothing

# What has to succeed where masks are known, and how well.
ON_RING = {
    "search in hidden states": 0.95,
    "label recovery": 0.5,
    "gradient span check": 0.9,
    "adapter extraction": 0.99,
}

GATEWAY_READ = {
    "vocabulary matching": 0.95,
    "adapter of a row": 0.95,
    "adapters in a step": 0.95,
    "boundary of sequences": 0.95,
}


def _select(result: AuditResult, mode: str, sees: str, attacks: Iterable[str]) -> list[Finding]:
    return [
        finding
        for finding in result.findings
        if (finding.mode, finding.sees) == (mode, sees)
        and any(finding.attack == attack or finding.attack.startswith(f"{attack}, ") for attack in attacks)
    ]


def at_chance(
    mode: str, sees: str, attacks: tuple[str, ...], may_run: tuple[str, ...] = ()
) -> Callable[[AuditResult], tuple[bool, str]]:
    """Judges whether chance is in the intervals of all attacks, and of those of ``may_run`` that ran."""

    def judge(result: AuditResult) -> tuple[bool, str]:
        findings = []
        for attack in attacks:
            measured = [f for f in _select(result, mode, sees, (attack,)) if f.success.trials]
            if not measured:
                return False, f"not measured: {attack}"
            findings += measured
        findings += _select(result, mode, sees, may_run)
        numbers = [n for f in findings for n in (f.distance, f.success.value, f.success.low, f.success.high)]
        apart = sum(f.off_chance for f in findings)
        worst = max(findings, key=lambda f: f.distance)
        text = f"{apart} of {len(findings)} attacks away from chance; farthest: " if len(findings) > 1 else ""
        return all(map(math.isfinite, numbers)) and not apart, text + _figure(worst)

    return judge


def same_for_all(attack: str) -> Callable[[AuditResult], tuple[bool, str]]:
    """Judges whether a hostile provider observed the same in every trial, and its guesses are at chance."""

    def judge(result: AuditResult) -> tuple[bool, str]:
        outcome = next((hostile for hostile in result.hostile if hostile.attack == attack), None)
        if outcome is None or not outcome.defended.success.trials:
            return False, "not measured"
        same = "the same" if outcome.same else "not the same"
        text = f"what was observed was {same} in every trial; {_figure(outcome.defended)}"
        return bool(outcome.same) and not outcome.defended.off_chance, text

    return judge


def none_succeed(attack: str) -> Callable[[AuditResult], tuple[bool, str]]:
    """Judges whether a hostile provider did not succeed once."""

    def judge(result: AuditResult) -> tuple[bool, str]:
        outcome = next((hostile for hostile in result.hostile if hostile.attack == attack), None)
        if outcome is None or not outcome.defended.success.trials:
            return False, "not measured"
        return outcome.defended.success.value == 0, _figure(outcome.defended)

    return judge


@dataclass(frozen=True)
class Control:
    """Judges attacks that must succeed, and names the findings that show it."""

    judge: Callable[[AuditResult], tuple[bool, str]]
    findings: Callable[[AuditResult], Iterable[Finding]]

    def __call__(self, result: AuditResult) -> tuple[bool, str]:
        """Returns whether the attacks succeed, and the figure."""
        return self.judge(result)

    def weak(self, result: AuditResult) -> bool:
        """Returns whether an attack has so few trials that it could succeed by chance."""
        return any(finding.success.trials and _few(finding, result) for finding in self.findings(result))


def controlled(least: dict[str, float]) -> Control:
    """Judges whether each of these attacks by a hostile provider succeeds so well with its defence off.

    Where there are enough trials for it, its interval must lie above chance as well; see ``Control.weak``.
    """

    def judge(result: AuditResult) -> tuple[bool, str]:
        controls = {hostile.attack: hostile.control for hostile in result.hostile}
        figures = [_figure(controls[attack]) for attack in least if attack in controls]
        holds = all(
            attack in controls
            and controls[attack].success.value >= least[attack]
            and (
                controls[attack].chance is None
                or controls[attack].beats_chance
                or _few(controls[attack], result)
            )
            for attack in least
        )
        return holds, "; ".join(figures) or "not measured"

    return Control(judge, lambda result: [each.control for each in result.hostile if each.attack in least])


def _few(finding: Finding, result: AuditResult) -> bool:
    """Returns whether not even success in every trial would put the interval above chance."""
    if finding.chance is None:
        return False
    trials = finding.success.trials
    confidence = result.about.get("confidence_of_one_interval", CONFIDENCE)
    return not trials or rate(trials, trials, confidence).low <= finding.chance


def succeeds(mode: str, sees: str, attack: str, least: float) -> Control:
    """Judges whether the success of an attack is at least ``least``."""

    def judge(result: AuditResult) -> tuple[bool, str]:
        findings = _select(result, mode, sees, (attack,))
        if not findings:
            return False, "not measured"
        worst = min(findings, key=lambda f: f.success.value)
        return worst.success.value >= least, _figure(worst)

    return Control(judge, lambda result: _select(result, mode, sees, (attack,)))


def all_succeed(mode: str, least: dict[str, float]) -> Control:
    """Judges whether each of these attacks of both parties together succeeds at least so well."""

    def judge(result: AuditResult) -> tuple[bool, str]:
        findings = {attack: _select(result, mode, BOTH, (attack,)) for attack in least}
        figures = [f"{attack}: {f.spell(f.success.value)}" for attack, each in findings.items() for f in each]
        holds = all(each and each[0].success.value >= least[attack] for attack, each in findings.items())
        return holds, "; ".join(figures) or "not measured"

    return Control(judge, lambda result: _select(result, mode, BOTH, tuple(least)))


def resolved(result: AuditResult) -> tuple[bool, str]:
    """Judges whether every attack on one-time would have shown an advantage of the plan's resolution."""
    attacks = against_one_time(result)
    if not attacks:
        return False, "not measured"
    least, attack = max((math.inf if f.resolution is None else f.resolution, f.attack) for f in attacks)
    resolution = result.about["resolution"]
    text = f"{100 * least:.2f} points of 100 or fewer in {len(attacks)} attacks (most in {attack})"
    low = [100 * f.below for f in attacks if f.below is not None]
    text += f"; below chance {max(low, default=0.0):.2f} or fewer in {len(low)}, and nothing in the others"
    powers = [(f.power, f.attack) for f in attacks if f.power is not None]
    if powers:
        power, weakest = min(powers)
        text += (
            f"; a true advantage of {100 * resolution:g} of 100 is found with probability {percent(power)} "
        )
        text += f"or more (least in {weakest})"
    sure = 100 * surely_found(attacks)
    return max(
        least, *(f.below or 0.0 for f in attacks)
    ) <= resolution, f"{text}; one of {sure:.1f} with 99 % or more in every attack"


def against_one_time(result: AuditResult) -> list[Finding]:
    """Returns the attacks on the provider's view under one-time, whose success is to be told from chance."""
    passive = _select(result, ONE_TIME, PROVIDER, (*TOKEN_ATTACKS, *LEARNING_ATTACKS, *SINGLE_ATTACKS))
    return passive + _select(result, ONE_TIME, MALICIOUS, IMPRINTS)


def surely_found(findings: list[Finding]) -> float:
    """Returns the true advantage over chance that each of these attacks finds with probability POWER."""
    return max((f.detectable or 0.0 for f in findings), default=1.0)


def _figure(finding: Finding) -> str:
    where = f" ({finding.detail})" if finding.hits is None and finding.detail else ""
    return f"{finding.attack}: {finding.measured}{where}"


def uniform(result: AuditResult, mode: str = ONE_TIME) -> tuple[bool, str]:
    """Judges whether bytes are uniform and nothing repeats."""
    randomness = result.randomness.get(mode)
    if randomness is None:
        return False, "not measured"
    level = 1 - result.about["confidence_of_one_interval"]
    repeated = randomness.repeated_blocks + randomness.repeated_tops
    return randomness.bytes_tested > 0 and randomness.p_value > level and repeated == 0, (
        f"{randomness.bytes_tested:,} bytes: {_p_value(randomness, level)}, {randomness.repeated_blocks} "
        f"repeated blocks of 16 bytes, {randomness.repeated_tops} repeated runs of the top bytes of 8 numbers"
    )


def _p_value(test: Randomness | SeedStatistics, level: float) -> str:
    return (
        f"p = {test.p_value:.3g}, the smallest of {test.tests} tests times their number, 1 at most "
        f"({test.worst}; fails below {level:.2g})"
    )


def separated(result: AuditResult) -> tuple[bool, str]:
    """Judges whether provider and mask source were asked for different things."""
    operations = result.figures.get("operations", {})
    figures = [
        f"{party}: "
        + (
            ", ".join(f"{n:,} {ASKED.get(name, name)}" for name, n in operations.get(party, {}).items())
            or "nothing"
        )
        for party in (PROVIDER, SOURCE)
    ]
    only = set(operations.get(PROVIDER, {})) == {"PRODUCT"} and set(operations.get(SOURCE, {})) == {
        "SEED_EFFECT"
    }
    return only, "; ".join(figures)


def seeds_fresh(result: AuditResult) -> tuple[bool, str]:
    """Judges whether seeds are many, new and uniform."""
    seeds = result.seeds
    if seeds is None or seeds.count < MIN_SEEDS:
        return False, "not measured"
    level = 1 - result.about["confidence_of_one_interval"]
    return seeds.p_value > level and not seeds.repeated and not seeds.others, (
        f"{seeds.count:,} seeds, {seeds.repeated} repeated, {seeds.others} other requests: "
        f"{_p_value(seeds, level)}"
    )


def repeats_found(result: AuditResult) -> tuple[bool, str]:
    """Judges whether masks of a bank are seen to repeat."""
    randomness = result.randomness.get(RING_BANK)
    if randomness is None:
        return False, "not measured"
    figures = (
        f"{randomness.repeated_tops:,} repeated runs of the top bytes of 8 numbers in "
        f"{randomness.bytes_tested:,} bytes"
    )
    return randomness.repeated_tops > 0, figures


def stolen(result: AuditResult) -> tuple[bool, str]:
    """Judges whether every adapter is copied in the clear."""
    errors = [
        more["relative_error"]
        for name, more in result.figures.items()
        if name.startswith("adapter extraction") and name.endswith(f"{PLAIN}, {PROVIDER}")
    ]
    worst = max(errors, default=math.nan)
    return worst < 1e-2, f"relative error at most {worst:.2g}; layers copied: {len(errors)}"


def no_cross_talk(result: AuditResult) -> tuple[bool, str]:
    """Judges whether no tenant got another's answer, though products were shared."""
    canaries = result.figures.get("canaries")
    if not canaries:
        return False, "not measured"
    if not canaries["products"]:
        return False, "no product was counted"
    return canaries["wrong"] == 0 and canaries["products"] < canaries["replies"] / 2, (
        f"{canaries['wrong']} of {canaries['replies']:,} replies wrong; "
        f"{canaries['replies'] / canaries['products']:.1f} requests of 16 tenants were computed in "
        "one product on average"
    )


def silent(result: AuditResult) -> tuple[bool, str]:
    """Judges whether no secret was found in what was written."""
    secrets = result.figures.get("secrets in logs")
    if secrets is None:
        return False, "not measured"
    searched = result.figures["log characters searched"]
    text = (
        f"{len(secrets)} found in {sum(searched.values()):,} characters of {len(searched)} logs and listings"
    )
    return not secrets, text + (f": {secrets[0]}" if secrets else "")


def planted_found(result: AuditResult) -> tuple[bool, str]:
    """Judges whether planted secrets were found everywhere."""
    planted = result.figures.get("planted secret found", {})
    missed = [where for where, secrets in planted.items() if not secrets]
    return bool(planted) and not missed, f"found in {len(planted) - len(missed)} of {len(planted)} places" + (
        f", not in {', '.join(missed)}" if missed else ""
    )


def reuse_counted(result: AuditResult) -> tuple[bool, str]:
    """Judges whether every bank of masks was broken by reuse."""
    broken = result.figures.get("broken after messages", {})
    figures = [f"{bank_name(label)}: {'never' if n is None else n}" for label, n in broken.items()]
    on_floats_too = RING_BANK in broken and len(broken) > 1
    return on_floats_too and None not in broken.values(), (
        "messages until 95 % of tokens are right: " + ("; ".join(figures) or "not measured")
    )


def sent_nothing_plain(result: AuditResult) -> tuple[bool, str]:
    """Judges whether executors' records have nothing of a gateway's tenant, although its name is there."""
    secrets, planted = (result.figures.get(f"gateway, {what} found") for what in ("secrets", "planted"))
    if secrets is None:
        return False, "not measured"
    text = f"{len(secrets)} found in {result.figures['gateway, bytes searched']:,} bytes of two transcripts"
    text += f": {secrets[0]}" if secrets else ""
    return not secrets and bool(planted), text + ("" if planted else "; nor was what is there")


def steps_vary(result: AuditResult) -> tuple[bool, str]:
    """Judges whether a speculating gateway takes more steps for some texts than for others of one length."""
    by_text = result.figures.get("gateway, steps by text")
    if by_text is None:
        return False, "not measured"
    steps = sorted(count for counts in by_text.values() for count in counts)
    rows = result.figures["gateway, rows of a step that checks guesses"]
    return len(set(steps)) > 1, (
        f"{len(set(steps))} different numbers, from {min(steps)} to {max(steps)} steps, in {len(steps)} "
        f"prompts; rows of each later step: {', '.join(map(str, rows))}"
    )


def none_noticed(result: AuditResult) -> tuple[bool, str]:
    """Judges whether no lie was noticed."""
    findings = _select(result, f"{ONE_TIME}, verify=off", "malicious provider", ("wrong answers",))
    return bool(findings) and findings[0].success.value == 0, _figure(
        findings[0]
    ) if findings else "not measured"
