"""``report.json`` for programs, ``report.html`` for people: one file that needs no network."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from security import plots
from security.attacks import ATTACKS
from security.capture import ONE_TIME
from security.claims import CLAIMS, Verdict
from security.findings import plain
from security.plan import PROVIDER, Result


def write_json(result: Result, verdicts: list[Verdict], path: Path) -> None:
    """Every figure, the verdicts, and what the audit ran on."""
    data = {
        "about": result.about,
        "claims": [dataclasses.asdict(verdict) for verdict in verdicts],
        "findings": [
            dataclasses.asdict(finding) | {"beats_chance": finding.beats_chance}
            for finding in result.findings
        ],
        "randomness": {
            mode: dataclasses.asdict(found) | {"histogram": found.histogram.tolist()}
            for mode, found in result.randomness.items()
        },
        "seeds": dataclasses.asdict(result.seeds) if result.seeds else None,
        "figures": result.figures,
    }
    path.write_text(json.dumps(plain(data), indent=1))


def write_html(result: Result, verdicts: list[Verdict], path: Path) -> None:
    """The page."""
    environment = Environment(
        loader=PackageLoader("security", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    traffic = {
        (
            f.sees,
            f.mode.rpartition(", ")[2],
        ): f"{round(f.success.value * f.success.trials)} of {f.success.trials}"
        for f in result.findings
        if f.attack.startswith("traffic")
    }
    one_time = [f for f in result.findings if (f.mode, f.sees) == (ONE_TIME, PROVIDER) and f.success.trials]
    page = environment.get_template("report.html.jinja").render(
        about=result.about,
        findings=result.findings,
        figures=result.figures,
        agreement=result.figures.get("agreement with the tenant's model"),
        verdicts=verdicts,
        rows=list(zip(CLAIMS, verdicts, strict=True)),
        passed=all(verdict.holds for verdict in verdicts),
        failed_claims=[v.identity for v in verdicts if not v.holds and not v.identity.startswith("control")],
        failed_controls=[v.identity for v in verdicts if not v.holds and v.identity.startswith("control")],
        controls=sum(claim.identity.startswith("control") for claim in CLAIMS),
        attacks=ATTACKS,
        traffic=traffic,
        resolution=max((f.resolution or 0.0 for f in one_time), default=1.0),
        plots={
            "heat_map": plots.heat_map(result),
            "reuse": plots.reuse_curve(result),
            "extraction": plots.extraction_curve(result),
            "histogram": plots.byte_histogram(result),
            "timing": plots.timing(result),
        },
    )
    path.write_text(page)
