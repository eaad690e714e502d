"""One target for some time.

Atheris finds inputs that reach new lines and changes them further. A finding is written to
``FOLDER/findings`` once for each place, and the search goes on. Atheris does not see into child processes:
their inputs are changed at random. So are all inputs if Atheris is not installed.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from fuzzing.mutation import LARGEST, mutated
from fuzzing.oracle import Finding, Target, bounded_memory, check

_SLOWEST = 20  # seconds for an input


class Search:
    """Runs inputs, counts them and keeps findings."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.target, self.folder = target, folder
        self.count, self.found = 0, dict[str, str]()
        (folder / "findings").mkdir(parents=True, exist_ok=True)

    def run(self, data: bytes) -> None:
        """Try an input."""
        self.count += 1
        try:
            with bounded_memory():
                check(self.target, data)
        except Finding as finding:
            place = str(finding).partition(": ")[0]
            if place not in self.found:
                name = hashlib.sha256(data).hexdigest()[:12]
                self.found[place] = f"{finding} ({name})"
                (self.folder / "findings" / name).write_bytes(data)
                self.tell()

    def tell(self) -> None:
        """Write how much was done to a file."""
        told = {"count": self.count, "found": self.found}
        (self.folder / "done.json").write_text(json.dumps(told))


def guided(atheris: Any, search: Search, seconds: int, corpora: Sequence[Path]) -> None:
    """Fuzz with Atheris, which ends the process; the first corpus gets what is new."""
    seeds, end = list(search.target.seeds()), time.monotonic() + seconds - 1

    def one(data: bytes) -> None:
        search.run(data)
        if search.count % 256 == 0 or time.monotonic() > end:
            search.tell()

    def changed(data: bytes, most: int, seed: int) -> bytes:
        random = Random(seed)
        if random.random() < 0.5:
            return bytes(atheris.Mutate(data, most))
        return mutated(search.target, data, seeds, random)[:most]

    options = [f"-max_total_time={seconds}", f"-timeout={_SLOWEST}", f"-max_len={LARGEST}"]
    options += [f"-artifact_prefix={search.folder}/findings/", "-rss_limit_mb=8192", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *options, *map(str, corpora)], one, custom_mutator=changed)
    atheris.Fuzz()


def at_random(search: Search, seconds: int, corpora: Sequence[Path]) -> None:
    """Fuzz without a guide."""
    inputs = [path.read_bytes() for folder in corpora for path in sorted(folder.iterdir())]
    random, end = Random(time.time_ns()), time.monotonic() + seconds
    while time.monotonic() < end:
        search.run(mutated(search.target, random.choice(inputs), inputs, random))
        if search.count % 256 == 0:
            search.tell()
    search.tell()
