"""``report.json`` for programs, ``report.html`` for people: one file that needs no network."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from security.attacks import ATTACKS
from security.recordings.capture import ELSEWHERE, ONE_TIME, PLAIN, RING_BANK, RING_MASKS, SAME, bank_name
from security.recordings.workload import ADAPTED, LORA_ALPHA, LORA_RANK, REPEATED_TOKENS
from security.report import plots
from security.trials.request_routing import LONG, SHORT
from security.verdicts.claims import CLAIMS, Verdict
from security.verdicts.findings import Finding, percent, plain
from security.verdicts.judges import IMPRINTS, STATISTICAL, against_one_time, surely_found
from security.verdicts.plan import BOTH, PROVIDER, AuditResult
from shared.atomic import write_atomically
from tenant_sdk import NoiseBankOptions
from tenant_sdk.model.experts import FEW_TOKENS

COLUMNS = (
    (PLAIN, PROVIDER),
    (SAME, PROVIDER),
    (ELSEWHERE, PROVIDER),
    (RING_BANK, PROVIDER),
    (ONE_TIME, PROVIDER),
    (ONE_TIME, BOTH),
)
_FREQUENCIES = (
    "the same attack on uniform rows that its adversary drew itself: sum over all tokens of share among "
    "those guesses times share among the true tokens"
)
_ROWS = "rows of the first layer, those of prompts that were sent again included"
# Attacks, what their n counts, and what their chance is.
COUNTED = (
    (
        "vocabulary matching, known-mask subtraction, subspace projection, noise-aware retrieval",
        _ROWS,
        _FREQUENCIES,
    ),
    ("mask reuse", f"{_ROWS}; first rows of messages, which are known, left out", _FREQUENCIES),
    ("averaging", "places of the repeated prompts, each guessed once from all its rows", _FREQUENCIES),
    (
        "search in hidden states",
        "first places of the repeated prompts, each time they were sent",
        _FREQUENCIES,
    ),
    ("label recovery", "places in training batches that have a next token", _FREQUENCIES),
    (
        "gradient span check",
        "different tokens in each part of 32 rows of a training batch",
        "how many are among the first guesses of the same attack on uniform rows",
    ),
    ("adapter extraction", "rows that the copies were made from", "cosine 0: a random direction"),
    (
        "imprinted embeddings, imprinted head",
        "rows of a layer in the middle; places in training batches that have a next token",
        _FREQUENCIES,
    ),
    (
        "abort oracle, speculation, topic from traffic, filler, speculation that the provider asks for",
        "sessions or prompts to guess, as many of each kind",
        "half of the guesses",
    ),
    (
        "text from passes",
        "texts, of as many that the provider knows",
        "one of as many as there are texts",
    ),
    (
        "a file of the tenant's as vocabulary, sizes without bounds",
        "ways to write such a file",
        "none: nothing is guessed",
    ),
    (
        "substituted mask source, a forked child's masks",
        "tokens that the tenant has to send; rows of the parent beside which its child asks",
        "none: one success is too many",
    ),
    (
        "routing",
        "prompts, of a few tokens and of many, each one of as many that the provider knows",
        "one of as many as there are prompts",
    ),
    (
        "adapter of a row",
        "rows of a layer behind the adapters, under one of two",
        "half of the guesses",
    ),
    (
        "adapters in a step, cached prefix, speculation of a gateway",
        "requests or prompts to guess, as many of each kind",
        "half of the guesses",
    ),
    (
        "boundary of sequences",
        "requests with two prompts of one length together, each divided once",
        "one of the places where they may be divided",
    ),
    ("distinguishing game", "rows to guess, each drawn by a coin", "advantage 0: half of the guesses right"),
)


@dataclass(frozen=True)
class Cell:
    """One of the table of attacks; ``share`` is success away from chance, 0 to 1."""

    text: str
    share: float = 0.0


def write_json(result: AuditResult, verdicts: list[Verdict], path: Path) -> None:
    """Every figure, the verdicts, and what the audit ran on."""
    data = {
        "about": result.about,
        "claims": [dataclasses.asdict(verdict) for verdict in verdicts],
        "hostile": [dataclasses.asdict(hostile) for hostile in result.hostile],
        "findings": [
            dataclasses.asdict(finding)
            | {"beats_chance": finding.beats_chance, "off_chance": finding.off_chance}
            for finding in result.findings
        ],
        "randomness": {
            mode: dataclasses.asdict(randomness) | {"histogram": randomness.histogram.tolist()}
            for mode, randomness in result.randomness.items()
        },
        "seeds": dataclasses.asdict(result.seeds) if result.seeds else None,
        "figures": result.figures,
    }
    _write(path, json.dumps(plain(data), indent=1))


def write_html(result: AuditResult, verdicts: list[Verdict], path: Path) -> None:
    """The page."""
    environment = Environment(
        loader=PackageLoader("security.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["percent"] = percent
    environment.filters["fit"] = lambda text: text.replace(" %", "\u00a0%")
    rows = list(zip(CLAIMS, verdicts, strict=True))
    failed = [verdict.identity for verdict in verdicts if verdict.refuted]
    judged = [verdict.identity for verdict in verdicts if not verdict.skipped]
    page = environment.get_template("page.html.jinja").render(
        about=result.about,
        findings=result.findings,
        hostile=result.hostile,
        find={(f.attack, f.mode, f.sees): f for f in result.findings},
        figures=result.figures,
        unlearned=[
            points[0][1] for label, points in result.figures["mask reuse"].items() if label != RING_BANK
        ],
        agreement=result.figures.get("agreement with the tenant's model"),
        claims=len(judged),
        judged_controls=sum(name.startswith("control") for name in judged),
        skipped=[verdict.identity for verdict in verdicts if verdict.skipped],
        reasons=result.skipped.values(),
        protections=[row for row in rows if not row[0].identity.startswith("control")],
        controls=[row for row in rows if row[0].identity.startswith("control")],
        failed_claims=[name for name in failed if not name.startswith("control")],
        failed_controls=[name for name in failed if name.startswith("control")],
        against=against_one_time(result),
        sure=surely_found(against_one_time(result)),
        least_power=min((f.power for f in against_one_time(result) if f.power is not None), default=0.0),
        statistical=STATISTICAL,
        randomness=result.randomness,
        seeds=result.seeds,
        outside={mode: plots.outside_band(randomness) for mode, randomness in result.randomness.items()},
        bank_name=bank_name,
        noise_bank=NoiseBankOptions(),
        ring_masks=RING_MASKS,
        lora={"rank": LORA_RANK, "alpha": LORA_ALPHA, "layers": ", ".join(ADAPTED)},
        repeated_tokens=REPEATED_TOKENS,
        attacks=ATTACKS,
        counted=COUNTED,
        columns=COLUMNS,
        weak=[verdict.identity for verdict in verdicts if verdict.weak],
        imprints=IMPRINTS,
        grid=_grid(result),
        routed={"short": SHORT, "long": LONG, "few": FEW_TOKENS},
        plots={
            "reuse": plots.reuse_curve(result),
            "extraction": plots.extraction_curve(result),
            "histogram": plots.byte_histogram(result),
            "timing": plots.timing(result),
        },
    )
    _write(path, page)


def _write(path: Path, text: str) -> None:
    """Replace a file; a link there, which may be another user's, is not followed."""
    write_atomically(path, text.encode(), 0o644)


def _grid(result: AuditResult) -> list[tuple[str, list[Cell]]]:
    """Every attack that only watches on every view of COLUMNS, in the order in which they were run."""
    findings = {(f.attack, f.mode, f.sees): f for f in result.findings}
    more = {hostile.attack for hostile in result.hostile}  # which have a table of their own
    names = dict.fromkeys(name for name, *column in findings if tuple(column) in COLUMNS and name not in more)
    return [(name, [_cell(findings.get((name, *column))) for column in COLUMNS]) for name in names]


def _cell(finding: Finding | None) -> Cell:
    if finding is None:
        return Cell("not run")
    if not finding.success.trials:
        return Cell("sees none")
    if finding.chance is None or not finding.off_chance:
        return Cell("chance" if finding.mode == ONE_TIME else "failed")
    above = (abs(finding.success.value) - finding.chance) / (1 - finding.chance)  # a cosine of -1 is a copy
    value = finding.success.value
    return Cell(f"{100 * value:.1f} %" if finding.is_rate else f"{value:.2f}", min(max(above, 0.0), 1.0))
