"""The claims of ``CLAIMS.md``, each with its judge.

Controls are claims too: an audit whose attacks fail where they must succeed is blind, and proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from security.recordings.capture import ONE_TIME, PLAIN, SAME
from security.verdicts.claim import Claim, Verdict
from security.verdicts.judges import (
    GATEWAY_ADAPTERS,
    GATEWAY_READ,
    GATEWAY_TOKENS,
    IMPRINTS,
    LEARNING_ATTACKS,
    ON_RING,
    TOKEN_ATTACKS,
    WITH_MASKS,
    all_succeed,
    at_chance,
    controlled,
    no_cross_talk,
    none_noticed,
    none_succeed,
    planted_found,
    repeats_found,
    resolved,
    reuse_counted,
    same_for_all,
    seeds_fresh,
    sent_nothing_plain,
    separated,
    silent,
    steps_vary,
    stolen,
    succeeds,
    uniform,
)
from security.verdicts.plan import BOTH, GATEWAY, MALICIOUS, PROVIDER, AuditResult

__all__ = ["CLAIMS", "Claim", "Verdict", "judge"]

_JUDGES: dict[str, Callable[[AuditResult], tuple[bool, str]]] = {
    "one-time-tokens": at_chance(ONE_TIME, PROVIDER, TOKEN_ATTACKS, WITH_MASKS),
    "one-time-training": at_chance(ONE_TIME, PROVIDER, LEARNING_ATTACKS),
    "one-time-adapter": at_chance(ONE_TIME, PROVIDER, ("adapter extraction",)),
    "one-time-indistinguishable": at_chance(ONE_TIME, PROVIDER, ("distinguishing game",)),
    "one-time-uniform": uniform,
    "one-time-separation": separated,
    "one-time-mask-source": seeds_fresh,
    "verified": succeeds(f"{ONE_TIME}, verify=always", "malicious provider", "wrong answers", 1.0),
    "verified-effects": succeeds(f"{ONE_TIME}, verify=always", "malicious mask source", "wrong answers", 1.0),
    "abort-oracle": same_for_all("abort oracle"),
    "imprinted-parameters": at_chance(ONE_TIME, MALICIOUS, IMPRINTS),
    "no-speculation": same_for_all("speculation"),
    "paced-draft": same_for_all("text from passes"),
    "local-experts": same_for_all("routing, local experts"),
    "padded-experts": same_for_all("routing, padded experts"),
    "gateway-tokens": at_chance(GATEWAY, PROVIDER, GATEWAY_TOKENS),
    "gateway-adapters": at_chance(GATEWAY, PROVIDER, GATEWAY_ADAPTERS),
    "gateway-sequences": at_chance(GATEWAY, PROVIDER, ("boundary of sequences",)),
    "gateway-uniform": partial(uniform, mode=GATEWAY),
    "gateway-transcript": sent_nothing_plain,
    "gateway-no-speculation": same_for_all("speculation of a gateway"),
    "hostile-tokenizer": none_succeed("a file of the tenant's as vocabulary"),
    "hostile-filler": same_for_all("filler"),
    "hostile-generation": same_for_all("speculation that the provider asks for"),
    "hostile-sizes": none_succeed("sizes without bounds"),
    "substituted-source": none_succeed("substituted mask source"),
    "forked-child": none_succeed("a forked child's masks"),
    "no-cross-talk": no_cross_talk,
    "silent": silent,
    "control-planted": planted_found,
    "control-clear": succeeds(PLAIN, PROVIDER, "vocabulary matching", 0.95),
    "control-deep": succeeds(PLAIN, PROVIDER, "search in hidden states", 0.95),
    "control-labels": succeeds(PLAIN, PROVIDER, "label recovery", 0.5),
    "control-adapter": stolen,
    "control-game": succeeds(PLAIN, PROVIDER, "distinguishing game", 0.99),
    "control-same-executor": succeeds(SAME, PROVIDER, "known-mask subtraction", 0.95),
    "control-reuse": reuse_counted,
    "control-repetition": repeats_found,
    "control-collusion": succeeds(ONE_TIME, BOTH, "vocabulary matching", 0.95),
    "control-ring": all_succeed(ONE_TIME, ON_RING),
    "control-resolution": resolved,
    "control-unverified": none_noticed,
    "control-abort-oracle": controlled({"abort oracle": 0.95}),
    "control-imprinted": controlled({"imprinted embeddings": 0.95, "imprinted head": 0.9}),
    "control-speculation": controlled({"speculation": 0.75}),
    "control-draft": controlled({"text from passes": 0.5}),
    "control-routing": controlled({"routing, padded experts": 0.95}),
    "control-gateway": all_succeed(GATEWAY, GATEWAY_READ),
    "control-gateway-counts": succeeds(GATEWAY, PROVIDER, "traffic analysis, gateway", 0.75),
    "control-gateway-cache": succeeds(GATEWAY, PROVIDER, "cached prefix", 0.95),
    "control-gateway-speculation": steps_vary,
    "control-hostile-tokenizer": controlled({"a file of the tenant's as vocabulary": 1.0}),
    "control-hostile-filler": controlled({"filler": 0.95}),
    "control-hostile-generation": controlled({"speculation that the provider asks for": 0.75}),
    "control-hostile-sizes": controlled({"sizes without bounds": 1.0}),
    "control-substituted-source": controlled({"substituted mask source": 1.0}),
    "control-forked-child": controlled({"a forked child's masks": 1.0}),
}


def _from_document() -> tuple[Claim, ...]:
    """Reads the claims from the document's table, in its order."""
    text = Path(__file__).parents[1].joinpath("CLAIMS.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    cells = {row[0].strip("`"): row[1:5] for row in rows}
    if list(cells) != list(_JUDGES):
        raise ValueError("the table of CLAIMS.md has other lines than there are judges")
    return tuple(
        Claim(identity, claim, mode, attack, bound, _JUDGES[identity])
        for identity, (claim, mode, attack, bound) in cells.items()
    )


CLAIMS = _from_document()


def judge(result: AuditResult) -> list[Verdict]:
    """Judges every claim, in the order of ``CLAIMS.md``."""
    return [claim.verdict(result) for claim in CLAIMS]
