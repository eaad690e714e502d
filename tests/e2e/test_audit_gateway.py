"""The audit of a real gateway, where an environment with vLLM is there."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from audits import MODEL, lines, silent

from security.audit import Audit
from security.recordings.gateway_process import gateway_command
from security.trials.context import Trials
from security.trials.gateway import Gateways
from security.verdicts.claims import CLAIMS
from security.verdicts.plan import GATEWAY_LOOKUP, GATEWAY_PADDED, PROVIDER, QUICK_PLAN

ROOT = Path(__file__).parents[2]
VARIABLE = "SYMBIOSIS_GATEWAY_PYTHON"
PYTHON = Path(os.environ.get(VARIABLE, ROOT / ".venv-gateway" / "bin" / "python"))


@pytest.mark.skipif(
    not PYTHON.exists(),
    reason=f"needs vLLM: name a python that has it in {VARIABLE}, or make .venv-gateway",
)
def test_a_real_gateway(tmp_path: Path) -> None:
    plan = replace(QUICK_PLAN, gateway_trials=4)
    audit = Audit(MODEL, lines(), plan, silent)
    with audit.executors(tmp_path) as parties:
        rng = np.random.default_rng(0)
        trials = Trials(parties, tmp_path, plan, audit.text, rng, audit.confidence)
        Gateways(trials, gateway_command(PYTHON)).run(audit.result, silent)
    result = audit.result
    result.about["confidence_of_one_interval"] = audit.confidence
    judged = [claim.verdict(result) for claim in CLAIMS if "gateway" in claim.identity]
    assert [verdict for verdict in judged if not verdict.holds] == []
    read = {f.mode: f.success.value for f in result.findings if f.attack == "traffic analysis, gateway"}
    assert read[GATEWAY_PADDED] < 0.1
    (told,) = [f for f in result.findings if (f.mode, f.sees) == (GATEWAY_LOOKUP, PROVIDER)]
    assert told.success.trials == 8
    # Five: a token and four guesses, found or not.
    assert result.figures["gateway, rows of a step that checks guesses"] == [5]
