"""The environment of an audit, for its report: program, machine, model card, text."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from pathlib import Path

import torch
import transformers

from shared.command_line import version

_ROOT = Path(__file__).resolve().parents[2]
CARD_LETTERS = 400


def program() -> dict[str, str]:
    """Version, and the commit where this is a checkout, else ""."""
    return {"version": version(), "commit": _commit(_ROOT)}


def _commit(root: Path) -> str:
    if not (root / ".git").exists():
        return ""  # installed, perhaps inside a checkout of something else
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def machine() -> dict[str, str | int]:
    """Processor, memory and operating system."""
    info = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return {
        "processor": named[1] if named else platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "memory": f"{memory / 2**30:.0f} GiB" if memory else "",
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Of the libraries that compute."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def card(folder: Path) -> str:
    """The first paragraph of the README in a model's folder, "" if there is none."""
    file = folder / "README.md"
    if not file.is_file():
        return ""
    text = re.sub(r"\A---\n.*?\n---\n", "", file.read_text(errors="replace"), flags=re.DOTALL)
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    first = next((part for part in paragraphs if part[:1].isalnum()), "")
    return first if len(first) <= CARD_LETTERS else first[:CARD_LETTERS].rpartition(" ")[0] + " …"


def text_file(file: Path) -> dict[str, str | int]:
    """Name, size and SHA-256 of the text that the tenants worked on."""
    data = file.read_bytes()
    return {"name": file.name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
