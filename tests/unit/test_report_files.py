"""Where an audit's report is written."""

from __future__ import annotations

from pathlib import Path

from security.report.page import write_json
from security.verdicts.plan import AuditResult


def test_a_link_in_the_reports_folder_is_replaced(tmp_path: Path) -> None:
    """Another user, or an archive, may have put it there."""
    (victim := tmp_path / "victim").write_text("mine")
    (report := tmp_path / "report.json").symlink_to(victim)
    write_json(AuditResult(), [], report)
    assert victim.read_text() == "mine"
    assert not report.is_symlink()
    assert "findings" in report.read_text()
