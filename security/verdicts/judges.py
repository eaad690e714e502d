"""Judges of claims: of a whole audit, whether one holds, and the figure that says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

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
    """The intervals of all these attacks hold chance; those of ``may_run`` too, where they could be run."""

    def judge(result: AuditResult) -> tuple[bool, str]:
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
        text = f"{apart} of {len(found)} attacks away from chance; farthest: " if len(found) > 1 else ""
        return all(map(math.isfinite, numbers)) and not apart, text + _figure(worst)

    return judge


def same_for_all(attack: str) -> Callable[[AuditResult], tuple[bool, str]]:
    """What a hostile provider observed was the same in every trial, and its guesses are at chance."""

    def judge(result: AuditResult) -> tuple[bool, str]:
        found = next((hostile for hostile in result.hostile if hostile.attack == attack), None)
        if found is None or not found.defended.success.trials:
            return False, "not measured"
        same = "the same" if found.same else "not the same"
        text = f"what was observed was {same} in every trial; {_figure(found.defended)}"
        return bool(found.same) and not found.defended.off_chance, text

    return judge


def none_succeed(attack: str) -> Callable[[AuditResult], tuple[bool, str]]:
    """A hostile provider did not succeed once."""

    def judge(result: AuditResult) -> tuple[bool, str]:
        found = next((hostile for hostile in result.hostile if hostile.attack == attack), None)
        if found is None or not found.defended.success.trials:
            return False, "not measured"
        return found.defended.success.value == 0, _figure(found.defended)

    return judge


def controlled(least: dict[str, float]) -> Callable[[AuditResult], tuple[bool, str]]:
    """With its defence off, each of these attacks by a hostile provider succeeds at least so well.

    Where there are enough trials for it, its interval lies above chance as well; see ``weak``.
    """

    def judge(result: AuditResult) -> tuple[bool, str]:
        found = {hostile.attack: hostile.control for hostile in result.hostile}
        figures = [_figure(found[attack]) for attack in least if attack in found]
        holds = all(
            attack in found
            and found[attack].success.value >= least[attack]
            and (found[attack].chance is None or found[attack].beats_chance or _few(found[attack], result))
            for attack in least
        )
        return holds, "; ".join(figures) or "not measured"

    return judge


def weak(result: AuditResult, attacks: Iterable[str]) -> bool:
    """Whether the control of one of these attacks has so few trials that chance could pass it."""
    controls = [hostile.control for hostile in result.hostile if hostile.attack in attacks]
    return any(control.success.trials and _few(control, result) for control in controls)


def _few(finding: Finding, result: AuditResult) -> bool:
    """Whether not even success in every trial would have its interval above chance."""
    if finding.chance is None:
        return False
    trials = finding.success.trials
    confidence = result.about.get("confidence_of_one_interval", CONFIDENCE)
    return not trials or rate(trials, trials, confidence).low <= finding.chance


def succeeds(mode: str, sees: str, attack: str, least: float) -> Callable[[AuditResult], tuple[bool, str]]:
    """An attack succeeds at least so well."""

    def judge(result: AuditResult) -> tuple[bool, str]:
        found = _select(result, mode, sees, (attack,))
        if not found:
            return False, "not measured"
        worst = min(found, key=lambda f: f.success.value)
        return worst.success.value >= least, _figure(worst)

    return judge


def all_succeed(mode: str, least: dict[str, float]) -> Callable[[AuditResult], tuple[bool, str]]:
    """Each of these attacks of both parties together succeeds at least so well."""

    def judge(result: AuditResult) -> tuple[bool, str]:
        found = {attack: _select(result, mode, BOTH, (attack,)) for attack in least}
        figures = [f"{attack}: {f.spell(f.success.value)}" for attack, each in found.items() for f in each]
        holds = all(each and each[0].success.value >= least[attack] for attack, each in found.items())
        return holds, "; ".join(figures) or "not measured"

    return judge


def resolved(result: AuditResult) -> tuple[bool, str]:
    """What every attack on one-time would have shown."""
    found = against_one_time(result)
    if not found:
        return False, "not measured"
    least, attack = max((math.inf if f.resolution is None else f.resolution, f.attack) for f in found)
    asked = result.about["resolution"]
    text = f"{100 * least:.2f} points of 100 or fewer in {len(found)} attacks (most in {attack})"
    low = [100 * f.below for f in found if f.below is not None]
    text += f"; below chance {max(low, default=0.0):.2f} or fewer in {len(low)}, and nothing in the others"
    powers = [(f.power, f.attack) for f in found if f.power is not None]
    if powers:
        power, weakest = min(powers)
        text += f"; a true advantage of {100 * asked:g} of 100 is found with probability {percent(power)} "
        text += f"or more (least in {weakest})"
    sure = 100 * surely_found(found)
    return max(
        least, *(f.below or 0.0 for f in found)
    ) <= asked, f"{text}; one of {sure:.1f} with 99 % or more in every attack"


def against_one_time(result: AuditResult) -> list[Finding]:
    """The attacks on what the provider saw under one-time, whose success is to be told from chance."""
    passive = _select(result, ONE_TIME, PROVIDER, (*TOKEN_ATTACKS, *LEARNING_ATTACKS, *SINGLE_ATTACKS))
    return passive + _select(result, ONE_TIME, MALICIOUS, IMPRINTS)


def surely_found(findings: list[Finding]) -> float:
    """The true advantage over chance that each of these attacks finds with probability POWER."""
    return max((f.detectable or 0.0 for f in findings), default=1.0)


def _figure(finding: Finding) -> str:
    where = f" ({finding.detail})" if finding.hits is None and finding.detail else ""
    return f"{finding.attack}: {finding.measured}{where}"


def uniform(result: AuditResult, mode: str = ONE_TIME) -> tuple[bool, str]:
    """Bytes are uniform and nothing repeats."""
    found = result.randomness.get(mode)
    if found is None:
        return False, "not measured"
    level = 1 - result.about["confidence_of_one_interval"]
    repeated = found.repeated_blocks + found.repeated_tops
    return found.bytes_tested > 0 and found.p_value > level and repeated == 0, (
        f"{found.bytes_tested:,} bytes: {_p_value(found, level)}, {found.repeated_blocks} repeated blocks of "
        f"16 bytes, {found.repeated_tops} repeated runs of the top bytes of 8 numbers"
    )


def _p_value(test: Randomness | SeedStatistics, level: float) -> str:
    return (
        f"p = {test.p_value:.3g}, the smallest of {test.tests} tests times their number, 1 at most "
        f"({test.worst}; fails below {level:.2g})"
    )


def separated(result: AuditResult) -> tuple[bool, str]:
    """Provider and mask source were asked for different things."""
    found = result.figures.get("operations", {})
    figures = [
        f"{party}: "
        + (
            ", ".join(f"{n:,} {ASKED.get(name, name)}" for name, n in found.get(party, {}).items())
            or "nothing"
        )
        for party in (PROVIDER, SOURCE)
    ]
    only = set(found.get(PROVIDER, {})) == {"PRODUCT"} and set(found.get(SOURCE, {})) == {"SEED_EFFECT"}
    return only, "; ".join(figures)


def seeds_fresh(result: AuditResult) -> tuple[bool, str]:
    """Seeds are many, new and uniform."""
    found = result.seeds
    if found is None or found.count < MIN_SEEDS:
        return False, "not measured"
    level = 1 - result.about["confidence_of_one_interval"]
    return found.p_value > level and not found.repeated and not found.others, (
        f"{found.count:,} seeds, {found.repeated} repeated, {found.others} other requests: "
        f"{_p_value(found, level)}"
    )


def repeats_found(result: AuditResult) -> tuple[bool, str]:
    """Masks of a bank are seen to repeat."""
    found = result.randomness.get(RING_BANK)
    if found is None:
        return False, "not measured"
    figures = (
        f"{found.repeated_tops:,} repeated runs of the top bytes of 8 numbers in {found.bytes_tested:,} bytes"
    )
    return found.repeated_tops > 0, figures


def stolen(result: AuditResult) -> tuple[bool, str]:
    """In the clear every adapter is copied."""
    errors = [
        more["relative_error"]
        for name, more in result.figures.items()
        if name.startswith("adapter extraction") and name.endswith(f"{PLAIN}, {PROVIDER}")
    ]
    worst = max(errors, default=math.nan)
    return worst < 1e-2, f"relative error at most {worst:.2g}; layers copied: {len(errors)}"


def no_cross_talk(result: AuditResult) -> tuple[bool, str]:
    """Nobody got what is another's, though products were shared."""
    found = result.figures.get("canaries")
    if not found:
        return False, "not measured"
    if not found["products"]:
        return False, "no product was counted"
    return found["wrong"] == 0 and found["products"] < found["replies"] / 2, (
        f"{found['wrong']} of {found['replies']:,} replies wrong; {found['replies'] / found['products']:.1f} "
        "requests of 16 tenants were computed in one product on average"
    )


def silent(result: AuditResult) -> tuple[bool, str]:
    """No secret was found in what was written."""
    found = result.figures.get("secrets in logs")
    if found is None:
        return False, "not measured"
    searched = result.figures["log characters searched"]
    text = f"{len(found)} found in {sum(searched.values()):,} characters of {len(searched)} logs and listings"
    return not found, text + (f": {found[0]}" if found else "")


def planted_found(result: AuditResult) -> tuple[bool, str]:
    """What was planted was found everywhere."""
    found = result.figures.get("planted secret found", {})
    missed = [where for where, secrets in found.items() if not secrets]
    return bool(found) and not missed, f"found in {len(found) - len(missed)} of {len(found)} places" + (
        f", not in {', '.join(missed)}" if missed else ""
    )


def reuse_counted(result: AuditResult) -> tuple[bool, str]:
    """Every bank of masks was broken by reuse."""
    broken = result.figures.get("broken after messages", {})
    figures = [f"{bank_name(label)}: {'never' if n is None else n}" for label, n in broken.items()]
    on_floats_too = RING_BANK in broken and len(broken) > 1
    return on_floats_too and None not in broken.values(), (
        "messages until 95 % of tokens are right: " + ("; ".join(figures) or "not measured")
    )


def sent_nothing_plain(result: AuditResult) -> tuple[bool, str]:
    """Nothing of a gateway's tenant was found in what executors recorded, where its name was."""
    found, planted = (result.figures.get(f"gateway, {what} found") for what in ("secrets", "planted"))
    if found is None:
        return False, "not measured"
    text = f"{len(found)} found in {result.figures['gateway, bytes searched']:,} bytes of two transcripts"
    text += f": {found[0]}" if found else ""
    return not found and bool(planted), text + ("" if planted else "; nor was what is there")


def steps_vary(result: AuditResult) -> tuple[bool, str]:
    """A gateway that speculates takes more steps for some texts than for others, all of one length."""
    found = result.figures.get("gateway, steps by text")
    if found is None:
        return False, "not measured"
    steps = sorted(count for counts in found.values() for count in counts)
    rows = result.figures["gateway, rows of a step that checks guesses"]
    return len(set(steps)) > 1, (
        f"{len(set(steps))} different numbers, from {min(steps)} to {max(steps)} steps, in {len(steps)} "
        f"prompts; rows of each later step: {', '.join(map(str, rows))}"
    )


def none_noticed(result: AuditResult) -> tuple[bool, str]:
    """No lie was noticed."""
    found = _select(result, f"{ONE_TIME}, verify=off", "malicious provider", ("altered answers",))
    return bool(found) and found[0].success.value == 0, _figure(found[0]) if found else "not measured"
