"""The files in deploy/: they name metrics that there are, and what systemd understands."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import Executor
from prometheus_client import generate_latest
from typer.testing import CliRunner

from provider.cli import CONFIGURATION, app
from provider.observe.metrics import Metrics

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "symbiosis-provider.service"
ANALYZE, PROMTOOL = shutil.which("systemd-analyze"), shutil.which("promtool")
DASHBOARD = json.loads((DEPLOY / "grafana.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
ENDINGS = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def shown(page: str) -> set[str]:
    """Names of all samples that a page of metrics has, or would have once something is counted."""
    kinds = re.findall(r"(?m)^# TYPE (symbiosis_\w+) (\w+)$", page)
    return {
        name + ending for name, kind in kinds if not name.endswith("_created") for ending in ENDINGS[kind]
    }


def queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def named(text: str) -> set[str]:
    return set(re.findall(r"symbiosis_\w+", text))


def test_dashboard_and_alerts_name_metrics_that_there_are(
    serve_process: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    executor = serve_process(checkpoint("llama"))
    there = shown(urllib.request.urlopen(executor.admin_url + "/metrics", timeout=800).read().decode())
    variables = "".join(
        each["definition"] for each in DASHBOARD["templating"]["list"] if "definition" in each
    )
    shows = named(" ".join(queries()) + variables)
    warns = named(" ".join(rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]))
    assert shows
    assert warns
    assert shows | warns <= there
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in shows}
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in there} == families  # none is left out
    document = named((DEPLOY.parent / "docs" / "how-to" / "operations.md").read_text())
    assert document == families


def test_whatever_alerts_look_for_is_counted_from_the_start() -> None:
    """``increase`` sees nothing in a series that begins with its first failure."""
    there = re.findall(
        r"(?m)^(symbiosis_\w+)\{(\w+)=\"(\w+)\"\} 0\.0$", generate_latest(Metrics().registry).decode()
    )
    sought = set()
    for rule in (rule for group in ALERTS["groups"] for rule in group["rules"]):
        for name, label, values in re.findall(r"(symbiosis_\w+)\{(\w+)=~?\"([\w|]+)\"", rule["expr"]):
            sought |= {(name, label, value) for value in values.split("|")}
    assert ("symbiosis_refused_total", "code", "internal") in sought
    assert sought <= set(there)


def test_no_two_panels_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_alert_says_what_it_means() -> None:
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"].keys() == {"summary", "description"}
            assert rule["labels"]["severity"] in ("page", "ticket")
            assert rule["alert"] in (DEPLOY.parent / "docs" / "how-to" / "operations.md").read_text()


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian package prometheus)")
def test_prometheus_understands_alerts_and_queries(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    rules = [
        {"record": "some:name", "expr": re.sub(r"\$__\w+", "5m", query), "labels": {"number": str(number)}}
        for number, query in enumerate(queries())
    ]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    for file in (DEPLOY / "alerts.yml", tmp_path / "queries.yml"):
        done = subprocess.run([PROMTOOL, "check", "rules", file], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed (Debian package systemd)")
def test_systemd_understands_the_unit_and_finds_it_safe(tmp_path: Path) -> None:
    assert ANALYZE is not None
    unit = tmp_path / UNIT.name
    unit.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text()))
    done = subprocess.run([ANALYZE, "verify", unit], capture_output=True, text=True, timeout=800, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    command = [ANALYZE, "security", "--offline=true", "--threshold=20", unit]  # of 100, least is best
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout


def test_the_steps_of_the_document_place_what_the_unit_needs(tmp_path: Path) -> None:
    """They are run, but for users and the service, in a folder that stands for the root."""
    text = (DEPLOY.parent / "docs" / "how-to" / "operations.md").read_text()
    (steps,) = re.findall(r"(?s)```\n(useradd .*?)```", text)
    (options,) = re.findall(r"(?s)```toml\n(.*?)```", text)
    for name in ("MODEL/config.json", "TLS/server.pem", "TLS/server.key"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "provider.toml").write_text(options)
    (tmp_path / "deploy").symlink_to(DEPLOY)
    (tmp_path / "etc" / "systemd" / "system").mkdir(parents=True)
    (tmp_path / "var" / "lib").mkdir(parents=True)
    skipped = ("useradd", "python3", "/opt/", "chown", "systemctl")
    lines = [line for line in steps.splitlines() if not line.startswith(skipped)]
    script = "\n".join(re.sub(" /(etc|var)/", rf" {tmp_path}/\1/", line) for line in lines)
    script = script.replace("-o symbiosis -g symbiosis ", "").replace(
        "sudo -u symbiosis /opt/symbiosis/.venv/bin/", ""
    )
    script = script.replace("symbiosis-provider token", f"{sys.executable} -m provider.cli token")
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(DEPLOY.parent)},
        check=False,
    )
    assert done.returncode == 0
    config = tomllib.loads(options)
    needed = re.findall(r"/(?:etc|var)/[\w./]+", UNIT.read_text().partition("User=")[0])
    needed += [config["tls_dir"] + "/server.pem", config["tls_dir"] + "/server.key", config["token_file"]]
    for path in needed:
        assert (tmp_path / path.strip("/.")).exists(), path
    for secret in (
        "etc/symbiosis",
        "etc/symbiosis/tls/server.key",
        "etc/symbiosis/tokens.json",
        "var/lib/symbiosis/model",
    ):
        assert not (tmp_path / secret).stat().st_mode & 0o077, secret
    assert (tmp_path / "etc/systemd/system" / UNIT.name).read_text() == UNIT.read_text()


def test_the_unit_starts_what_there_is_and_holds_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = UNIT.read_text()
    (command,) = re.findall(r"(?m)^ExecStart=(.*)$", text)
    _, *words = shlex.split(command)
    config = tmp_path / "provider.toml"
    config.write_text('tls_dir = "none"\ntoken_file = "none"\n')
    words[words.index("--config") + 1] = str(config)
    for name in ("log_to_console", "keep_freed_memory"):  # they are for a process of one's own
        monkeypatch.setattr(f"provider.cli.{name}", lambda *_: None)
    result = CliRunner().invoke(app, words)
    assert "is not a checkpoint folder" in str(result.exception)  # all options were understood
    assert not re.search(r"(?i)token=|secret|password", text)
    (kept_down,) = re.findall(r"(?m)^RestartPreventExitStatus=(.*)$", text)
    assert kept_down.split() == ["2", str(CONFIGURATION)]
    drained, stopped = 10, int(re.findall(r"(?m)^TimeoutStopSec=(\d+)$", text)[0])
    assert drained < stopped
