"""A wheel, built and installed elsewhere, holds all that the programs need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import importlib, pkgutil, sys
from importlib.util import find_spec
import provider.observe.status, shared.ring.native, security.report.page
APART = "adapter_registry", "connection_limits", "endpoints", "grammars", "linear"
APART += "scheduler", "segmented", "structured", "vllm_patches", "worker"
VLLM = tuple(f"gateway.{name}" for name in APART)
for name in ("shared", "provider", "tenant_sdk", "security"):
    package = importlib.import_module(name)
    assert package.__file__.startswith(sys.argv[1]), package.__file__
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        gpu = module.name.endswith("triton_kernel")
        others = module.name.endswith(VLLM) and not find_spec("vllm")
        if "._" not in module.name and (find_spec("triton") or not gpu) and not others:
            importlib.import_module(module.name)
            print(module.name)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's contents, and nothing of this one."""
    built, folder = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    source = tmp_path_factory.mktemp("source") / "source"
    subprocess.run(["git", "clone", "-q", ROOT, source], check=True)
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", built, source]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = built.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", folder, wheel], check=True, capture_output=True)
    return folder


def test_every_module_can_be_imported(installed: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(installed)]
    environment = {"PYTHONPATH": str(installed), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sources = {path for name in ("shared", "provider", "tenant_sdk") for path in (ROOT / name).rglob("*.py")}
    assert len(done.stdout.split()) >= len(sources) - 3 - 8  # but for the packages themselves, and vLLM's


def test_the_files_that_are_no_modules_are_there(installed: Path) -> None:
    for name in (
        "shared/PROTOCOL.md",
        "provider/observe/status.html",
        "security/CLAIMS.md",
        "security/report/page.html.jinja",
        "tenant_sdk/gateway/page.html",
        "tenant_sdk/py.typed",
    ):
        assert (installed / name).exists(), name
