"""What a sweep found, as a table for people: ``docs/architectures.md``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from examination import SHARE, TOLERANCE, Result

AIM = 0.95  # of the architectures whose tiny model runs locally


def is_met(results: Sequence[Result]) -> bool:
    """Whether as many architectures as promised are equal, with most of their parameters at the provider."""
    ran = [each for each in results if each.ran]
    return bool(ran) and sum(each.good for each in ran) >= AIM * len(ran)


def summary(results: Sequence[Result]) -> str:
    return "\n".join(
        f"{kind}: {len(of)} classes, {sum(r.stage != 'build' for r in of)} build, {sum(r.ran for r in of)} run, "
        f"{sum(r.equal for r in of)} equal, {sum(r.good for r in of)} good"
        for kind in ("causal", "base")
        if (of := [each for each in results if each.kind == kind])
    )


def document(results: Sequence[Result]) -> str:
    return summary(results) + "\n"
