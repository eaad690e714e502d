"""The example of ``docs/how-to/auditing.md``, run on two sessions that were made up."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from audits import MODEL
from recordings import Recording, activations, masked

from security.verdicts.plan import AuditResult

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "how-to" / "auditing.md"


def test_an_attack_of_ones_own(tmp_path: Path) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL))
    there: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, str(DOCUMENT), "exec"), there)
    recording, rows = Recording(tmp_path), activations().repeat(20, 1)
    recording.send(recording.writer.opened("alice"), masked(rows))
    recording.send(recording.writer.opened("bob"), rows)
    recording.writer.close()
    findings = [
        there["look"](str(recording.path), str(MODEL), tenant, mode)
        for tenant, mode in (("alice", "one-time"), ("bob", "plain"))
    ]
    one_time, control = there["CLAIMS"]
    assert one_time.verdict(AuditResult(findings=findings)).holds
    assert control.verdict(AuditResult(findings=findings)).holds, findings[1].measured
    swapped = [there["look"](str(recording.path), str(MODEL), "bob", "one-time")]
    assert not one_time.verdict(AuditResult(findings=swapped)).holds
