"""The audit: its quick form as users run it, and products broken on purpose, which it must notice."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from audits import MODEL, PLAN, Short
from raw_peers import eventually
from typer.testing import CliRunner

import security
from security.cli import app, console
from security.recordings.transcript import TranscriptError
from security.verdicts.claims import CLAIMS


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """Attacks on the record of what nobody changed: its folder, and the claims that they refute."""
    folder = tmp_path_factory.mktemp("honest")
    audit = Short(PLAN, crash=True)
    audit.passive(folder).attack()
    return folder, audit.refuted()


def test_an_honest_product_passes(honest: tuple[Path, set[str]]) -> None:
    assert honest[1] == set()


@pytest.mark.parametrize(("party", "view"), [("ring", "provider"), ("source", "mask-source")])
def test_a_transcript_of_a_deployment(
    party: str, view: str, honest: tuple[Path, set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "width", 200)  # whatever the terminal is
    before_the_crash = honest[0] / party / "transcripts" / "1.transcript"
    arguments = ["attack", str(before_the_crash), "--model", str(MODEL), "--view", view]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    tenant = next(
        part
        for part in done.output.split("tenant ")[1:]
        if part.startswith(("4-one-time, as", "4-one-time), as"))
    )
    if view == "mask-source":
        assert re.search(r"seed prediction .*; 0 repeated of [1-9][0-9,]* seeds; 0 other requests", tenant)
        return
    matches = re.search(r"vocabulary matching\s*│[0-9, ]+│\s*([0-9.]+)\s*│\s*([0-9.]+)", tenant)
    assert matches is not None
    assert abs(float(matches[1]) - float(matches[2])) < 0.02  # no better than random rows
    assert "rows look uniform, and nothing did better than on random rows" in done.output
    assert "0 repeated blocks, 0 repeated runs" in tenant
    assert "trains; gradients end" in tenant


def test_a_transcript_of_seeds_is_no_providers(honest: tuple[Path, set[str]]) -> None:
    arguments = ["attack", str(honest[0] / "source" / "transcripts"), "--model", str(MODEL)]
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, TranscriptError)
    assert "--view mask-source" in str(done.exception)


def test_every_claim_has_a_figure_in_the_document() -> None:
    """Its table is where claims are read from."""
    text = (Path(security.__file__).parent / "CLAIMS.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len(CLAIMS)
    assert all(len(row) == 6 and all(row) for row in rows)


def test_the_quick_audit(tmp_path: Path) -> None:
    """As users run it: processes, all modes, all claims; both kinds of control.

    Those about gateways are skipped, and said to be; ``test_audit_gateway`` has them.
    """
    command = [sys.executable, "-m", "security.cli", "run", "--quick", "--no-gateway"]
    command += ["--report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert {claim["identity"] for claim in report["claims"]} == {claim.identity for claim in CLAIMS}
    skipped = {claim["identity"] for claim in report["claims"] if claim["skipped"]}
    gateways = {claim.identity for claim in CLAIMS if "gateway" in claim.identity}
    assert skipped == gateways
    assert all(claim["holds"] for claim in report["claims"] if claim["identity"] not in skipped)
    cells = {(f["attack"], f["mode"], f["sees"]): f for f in report["findings"]}
    assert cells["vocabulary matching", "plain", "provider"]["success"]["value"] >= 0.95
    assert (
        cells["known-mask subtraction", "noise-bank, same executor", "provider"]["success"]["value"] >= 0.95
    )
    assert not cells["vocabulary matching", "one-time", "provider"]["beats_chance"]
    page = (tmp_path / "report.html").read_text()
    assert f"All {len(CLAIMS) - len(skipped)} claims hold" in page
    assert ("Not judged: gateway-tokens" in page) == bool(skipped)
    for told in ("mask source collude", "Not protected", "run --quick", report["about"]["digest"]):
        assert told in page
    assert not re.search(r"""(src|href)\s*=\s*["']?\s*(https?:)?//|url\(\s*["']?http|@import""", page)


def test_an_audit_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    """Its transcripts have gigabytes. Status 1 would say that a claim does not hold."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = ["env", f"TMPDIR={temporary}", sys.executable, "-m", "security.cli", "run", "--no-gateway"]
    command += ["--report", str(tmp_path / "report")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as audit:
        assert audit.stdout is not None
        assert any("starting three executors" in line for line in audit.stdout)
        eventually(lambda: any(temporary.glob("symbiosis-audit-*/*")))
        audit.terminate()
        audit.stdout.read()  # its executors have it too, and have ended
    assert audit.returncode == 128 + signal.SIGTERM
    assert not list(temporary.iterdir())
