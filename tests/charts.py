"""The Helm chart, rendered and linted by Helm's own library, in a process of its own.

``python tests/charts.py`` writes ``deploy/kubernetes.yml``: the chart with its own values. It needs what
``pip install -e '.[deploy]'`` installs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[1] / "deploy" / "helm" / "symbiosis-provider"
MANIFESTS = CHART.parents[1] / "kubernetes.yml"
NAME = "symbiosis-provider"
HEAD = """\
# A provider in a cluster without Helm. docs/how-to/operations.md, "In Kubernetes", says what it needs.
# Made of the chart in helm/symbiosis-provider with its own values, by `python tests/charts.py`: change those.
"""
# Helm is written in Go, whose runtime stays out of the process that runs the tests.
PROGRAM = """
import json, sys
from helm_python import chart
path, name, values = sys.argv[1], sys.argv[2], json.load(sys.stdin)
report, rendered, error = chart.lint(path, values, strict=True), {}, ""
try:
    with chart.Chart.load(path) as it:
        rendered = it.render(values, name=name, namespace="executors")
except Exception as problem:
    error = str(problem)
json.dump({"lint": report, "rendered": rendered, "error": error}, sys.stdout)
"""


def helm(values: dict[str, Any] | None = None) -> dict[str, Any]:
    """What Helm makes of the chart: its report ``lint``, ``rendered`` texts by template, and ``error``."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(CHART), NAME],
        input=json.dumps(values or {}),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def manifests(values: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """What the chart comes to with these values, by kind; of Services, the headless one is ``Replicas``."""
    made = helm(values)
    assert not made["error"], made["error"]
    return by_kind("\n---\n".join(text for path, text in made["rendered"].items() if path.endswith(".yaml")))


def by_kind(text: str) -> dict[str, dict[str, Any]]:
    """Manifests of a text by kind; of Services, the headless one is ``Replicas``."""
    there = [each for each in yaml.safe_load_all(text) if each]
    kinds = [
        "Replicas" if each.get("spec", {}).get("clusterIP") == "None" else each["kind"] for each in there
    ]
    assert len(set(kinds)) == len(kinds)
    return dict(zip(kinds, there, strict=True))


def plain() -> str:
    """What ``deploy/kubernetes.yml`` is to be."""
    rendered = helm()["rendered"]
    texts = [rendered[path].strip() for path in sorted(rendered) if path.endswith(".yaml")]
    return HEAD + "".join(f"---\n{text}\n" for text in texts if text)


if __name__ == "__main__":
    MANIFESTS.write_text(plain())
