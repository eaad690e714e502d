"""Which tests only `make release` runs, and why they can wait that long.

Each of these files takes long. What it tests has quicker tests in `make test` too, or depends on files that
seldom change.
"""

from __future__ import annotations

RELEASE: dict[str, str] = {}
