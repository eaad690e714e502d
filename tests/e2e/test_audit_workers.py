"""`symbiosis-audit run --workers`: the executors of an audit share their layers among processes."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from audits import MODEL
from typer.testing import CliRunner

from security.cli import app
from security.recordings.capture import ONE_TIME, Parties
from security.recordings.executors import AuditError, ExecutorProcess


def test_an_executor_of_an_audit_has_workers(tmp_path: Path) -> None:
    made = ExecutorProcess(tmp_path / "ring", MODEL, "ring", workers=2)
    made.token("nobody")
    made.launch()
    try:
        made.await_ready()
        parties = Parties(made, made, made, MODEL)
        with parties.connect(ONE_TIME, "tenant", mask_sources=[f"local:{MODEL}"]) as session:
            session.load_model(progress=False)
        with urllib.request.urlopen(f"{made.admin_url}/status.json", timeout=800) as page:
            assert [worker["up"] for worker in json.load(page)["workers"]] == [True, True]
    finally:
        made.stop()
    assert [transcript.tenants for transcript in made.transcripts()] == [{1: "tenant"}]


def test_run_gives_all_executors_as_many_as_it_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def launch(self: ExecutorProcess, port: int = 0) -> None:
        made.append(self.workers)
        if len(made) == 3:
            raise AuditError("enough")

    monkeypatch.setattr(ExecutorProcess, "launch", launch)
    done = CliRunner().invoke(app, ["run", "--report", str(tmp_path), "--quick", "--workers", "2"])
    assert isinstance(done.exception, AuditError), done.output
    assert made == [2, 2, 2]
