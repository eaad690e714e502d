"""One programme of faults: simulation, fuzzing, kills, overload, soak and more; a table and a page.

    make harden                 # 85 minutes
    make harden ARGS=--short    # 20 minutes

Each row is a program of its own, which exits with 0 if all of it held. This program runs one after the other,
keeps their output in ``out/harden``, and writes ``report.html`` there. docs/explanation/reliability.md
explains the rows.
"""

from __future__ import annotations

import argparse
import html
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
console = Console(width=None if sys.stdout.isatty() else 150)


class Row(NamedTuple):
    """A program: what must hold, how it is run for a short and a long time, and in which folder."""

    name: str
    claim: str
    short: str
    long: str
    folder: str = "."


class Outcome(NamedTuple):
    """Of a row: its exit status, seconds, and last line."""

    row: Row
    command: str
    status: int
    seconds: float
    said: str


ROWS = (
    Row(
        "simulation",
        "under faults from a seed, each answer is right, each mask has one row, each wait ends",
        "-m simulation --seconds 120",
        "-m simulation --seconds 900",
        "tests",
    ),
    Row(
        "fuzzing",
        "every reader of others' bytes returns a valid value or a documented error",
        "-m fuzzing --seconds 120",
        "-m fuzzing --seconds 900",
        "tests",
    ),
    Row(
        "kills",
        "a resumed training has the same adapter as an undisturbed one, bit for bit",
        "benchmarks/kills.py --kills 6",
        "benchmarks/kills.py --kills 60",
    ),
    Row(
        "cross-talk",
        "no tenant gets another tenant's answer",
        "benchmarks/cross_talk.py --replies 50000",
        "benchmarks/cross_talk.py --replies 1000000",
    ),
    Row(
        "randomness",
        "masked rows look random to the provider, and the controls do not",
        "benchmarks/mask_randomness.py --mib 4",
        "benchmarks/mask_randomness.py --mib 64",
    ),
    Row(
        "overload",
        "beside three times the work, others wait at most three times as long; refusals say why",
        "benchmarks/overload.py --minutes 1 --rounds 3",
        "benchmarks/overload.py --minutes 10",
    ),
    Row(
        "TLS",
        "an executor's TLS has Mozilla's modern profile, but for findings that are explained",
        "benchmarks/tls.py --sslyze .venv-sslyze/bin/sslyze",
        "benchmarks/tls.py --sslyze .venv-sslyze/bin/sslyze",
    ),
    Row(
        "soak",
        "memory, descriptors, threads, files and latency do not grow",
        "benchmarks/soak.py --minutes 2",
        "benchmarks/soak.py --minutes 15",
    ),
)
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Hardening</title>
<style>
 body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; }}
 table {{ border-collapse: collapse; width: 100%; }}
 td, th {{ border-bottom: 1px solid #ddd; padding: .5em .7em; text-align: left; vertical-align: top;
  overflow-wrap: anywhere; min-width: 5em; }}
 code {{ font-size: .85em; overflow-wrap: anywhere; }}
 b {{ white-space: nowrap; }}
 .held {{ color: #17692b; font-weight: 600; }} .failed {{ color: #a01212; font-weight: 600; }}
</style>
<h1>{title}</h1>
<p>{machine}</p>
<table><tr><th></th><th>claim</th><th>verdict</th><th>last line</th><th>time</th><th>command</th></tr>
{rows}
</table></html>
"""


def run(row: Row, *, short: bool, folder: Path) -> Outcome:
    """Run a row's program; what it prints goes to a file."""
    words = shlex.split(row.short if short else row.long)
    log = folder / f"{row.name.replace(' ', '_')}.log"
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000"}
    began = time.monotonic()
    with log.open("wb") as output:
        status = subprocess.run(
            [sys.executable, *words],
            cwd=ROOT / row.folder,
            env=variables,
            stdout=output,
            stderr=output,
            check=False,
        ).returncode
    lines = [line for line in re.split(r"[\r\n]+", log.read_text(errors="replace")) if re.search(r"\w", line)]
    command = f"{'cd ' + row.folder + ' && ' if row.folder != '.' else ''}python {shlex.join(words)}"
    return Outcome(row, command, status, time.monotonic() - began, lines[-1].strip() if lines else "")


def machine() -> str:
    """The processor, as its figures depend on it."""
    text = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*: (.*)", text)
    flags = set(re.findall(r"\b(avx2|avx512_vnni|amx_tile)\b", text))
    has = ", ".join(sorted(flags)) or "no AVX2"
    return f"{model[1] if model else 'unknown processor'}, {os.cpu_count()} cores, {has}"


def page(outcomes: list[Outcome], title: str) -> str:
    """The report."""
    rows = []
    for each in outcomes:
        verdict = (
            '<span class="held">held</span>' if not each.status else '<span class="failed">failed</span>'
        )
        cells = (
            f"<b>{each.row.name}</b>",
            html.escape(each.row.claim),
            verdict,
            html.escape(each.said[:400]),
        )
        times = f"{each.seconds:.0f} s"
        rows.append(
            "".join(
                f"<td>{cell}</td>" for cell in (*cells, times, f"<code>{html.escape(each.command)}</code>")
            )
        )
    table = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return _PAGE.format(title=title, machine=html.escape(machine()), rows=table)


def main() -> int:
    """Run the rows, print a table, write the report; 1 if a row failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="about ten minutes")
    parser.add_argument("--rows", nargs="*", default=[], help="names of those to run; none: all")
    parser.add_argument("--output", type=Path, default=Path("out/harden"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for row in ROWS:
        if options.rows and row.name not in options.rows:
            continue
        console.print(f"{row.name}: {row.claim} ...")
        outcomes.append(run(row, short=options.short, folder=options.output))
        console.print(f"  {'failed' if outcomes[-1].status else 'held'}: {outcomes[-1].said}")
        (options.output / "report.html").write_text(page(outcomes, "What was tried, and what held"))
    table = Table(title=machine())
    for title in ("", "verdict", "last line", "seconds"):
        table.add_column(title)
    for each in outcomes:
        table.add_row(each.row.name, "failed" if each.status else "held", each.said, f"{each.seconds:.0f}")
    console.print(table)
    console.print(f"{options.output / 'report.html'} has the page, and the folder what each row printed")
    return int(any(each.status for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
