"""What the audit reads off a mixture's routes, and that it notices experts that are not padded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from audits import PLAN, Short, lines

from security.attacks.routing import Routing, RoutingView
from security.trials.context import Trials
from security.trials.request_routing import Routes
from security.verdicts.claims import CLAIMS
from security.verdicts.plan import AuditResult
from tenant_sdk.model.experts import Padding

RNG = np.random.default_rng(0)


@contextmanager
def routes(folder: Path) -> Iterator[Routes]:
    audit = Short()
    with audit.executors(folder) as parties:
        plan = replace(PLAN, routed_prompts=8)
        yield Routes(Trials(parties, folder, plan, lines(), RNG, audit.confidence))


def judged(found: Routes) -> dict[str, bool]:
    hostile, _ = found.routes()
    result, names = AuditResult(hostile=hostile), {each.attack for each in hostile}
    return {c.identity: c.verdict(result).holds for c in CLAIMS if c.attack in names}


def test_the_product_as_it_is(tmp_path: Path) -> None:
    with routes(tmp_path) as found:
        assert judged(found) == {"local-experts": True, "padded-experts": True, "control-routing": True}


def test_experts_that_are_not_padded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Padding, "rows", lambda *_: 0)
    with routes(tmp_path) as found:
        assert judged(found) == {"local-experts": True, "padded-experts": False, "control-routing": True}


def test_the_nearest_text() -> None:
    known = np.array([[4, 0, 2], [0, 4, 2], [3, 3, 0]])
    view = RoutingView(known[[2, 0, 1, 1]], known)
    assert Routing().attack(view, RNG).tolist() == [2, 0, 1, 1]
    guesses = Routing().attack(RoutingView(np.zeros((300, 3)), np.zeros((3, 3))), RNG)
    assert set(guesses.tolist()) == {0, 1, 2}
