"""A line of ``CLAIMS.md``, and an audit's verdict on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from security.verdicts.judges import Control
from security.verdicts.plan import AuditResult


@dataclass(frozen=True)
class Verdict:
    """The result of a claim: whether it holds, with the figure that says so.

    ``weak``: a control that holds, but in so few trials that it could by chance. ``skipped``: nothing was
    measured, since this audit had not what it takes, so it does not hold and is not refuted.
    """

    identity: str
    holds: bool
    figure: str
    weak: bool = False
    skipped: bool = False

    @property
    def refuted(self) -> bool:
        """Whether the claim was tested and does not hold."""
        return not self.holds and not self.skipped

    @property
    def word(self) -> str:
        """The verdict in a word, for readers."""
        if self.skipped:
            return "skipped"
        return "REFUTED" if not self.holds else "weak" if self.weak else "holds"


@dataclass(frozen=True)
class Claim:
    """One line of ``CLAIMS.md``. ``judge`` returns whether the claim holds, and the figure."""

    identity: str
    text: str
    mode: str
    attack: str
    bound: str
    judge: Callable[[AuditResult], tuple[bool, str]]

    def verdict(self, result: AuditResult) -> Verdict:
        """Judges the claim by one audit. A claim that was not measured does not hold."""
        for mode, why in result.skipped.items():
            if self.mode.startswith(mode):
                return Verdict(self.identity, False, f"skipped: {why}", skipped=True)
        holds, figure = self.judge(result)
        weak = isinstance(self.judge, Control) and self.judge.weak(result)
        return Verdict(self.identity, holds, figure, holds and weak)
