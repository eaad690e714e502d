"""Pages of this project in a browser, as the tests of them need it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian package chromium)")


def dumped(url: str, folder: Path) -> str:
    """What a browser makes of a page; it uses no network beside."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--disable-quic", "--no-first-run", "--disable-background-networking"]
    command += ["--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={folder}", "--virtual-time-budget=3000", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=800, check=True).stdout
