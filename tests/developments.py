"""``symbiosis-provider serve --dev`` as a process, and what it printed."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from commands import BASE_MODEL, SECONDS, start


@dataclass(frozen=True)
class Development:
    """Attributes: what it printed, and the commands in it."""

    process: subprocess.Popen[str]
    printed: str
    commands: list[str]


@contextmanager
def development(folder: Path, *options: object, model: Path = BASE_MODEL) -> Iterator[Development]:
    """Run it in a folder until the block ends."""
    with tempfile.TemporaryFile("w+") as errors:
        arguments = ("serve", model, "--dev", "--port", 0, *options)
        process = start("provider.cli", *arguments, cwd=folder, stderr=errors)
        try:
            printed = ""
            while not re.search("^symbiosis-tenant (generate|chat)", printed, re.MULTILINE):
                line = process.stdout.readline()  # type: ignore[union-attr]
                if not line:
                    errors.seek(0)
                    raise AssertionError(f"it ended: {process.wait(SECONDS)}\n{errors.read()}")
                printed += line
            yield Development(process, printed, re.findall("^symbiosis-tenant .*", printed, re.MULTILINE))
        finally:
            process.kill()
            process.communicate()
