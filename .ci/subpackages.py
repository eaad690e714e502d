"""What `make coverage` measured: a line for each subpackage, and for what lies beside."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path

from coverage import Coverage
from rich.console import Console
from rich.table import Table

COLUMNS = ("num_statements", "missing_lines", "num_branches", "missing_branches")


def main() -> None:
    """Print the table."""
    measured = Coverage()
    measured.load()
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.json"
        measured.json_report(outfile=str(report))
        files = json.loads(report.read_text())["files"]
    rows: dict[str, Counter[str]] = {}
    for name, file in sorted(files.items()):
        package, *folder, _ = Path(name).parts
        for where in (
            package + "/",
            "/".join([package, *folder[:1]]) if folder else f"{package}/*.py",
            "all",
        ):
            rows.setdefault(where, Counter()).update({key: file["summary"][key] for key in COLUMNS})
    table = Table("subpackage", "statements", "missed", "branches", "missed", "covered")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, found in sorted(rows.items(), key=lambda each: (each[0] == "all", each[0])):
        every = found["num_statements"] + found["num_branches"]
        missed = found["missing_lines"] + found["missing_branches"]
        share = f"{100 * (1 - missed / every):.1f} %" if every else ""
        style = "bold" if name.endswith("/") or name == "all" else None
        table.add_row(name, *(f"{found[key]:,}" for key in COLUMNS), share, style=style)
    Console().print(table)


if __name__ == "__main__":
    main()
