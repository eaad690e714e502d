"""The process that matches patterns of an adapter's folder; see ``tenant_sdk.tuning.patterns``.

An expression can take any time, and any memory as soon as it is compiled, so this process has limits of both.
It imports nothing but the standard library, and so begins in a few hundredths of a second.

Standard input is one JSON object: ``seconds`` of a processor, ``names`` and ``patterns``. Standard output is
a JSON list: for each name, the index of the first pattern that matches the whole of it, or null. If a pattern
is none, it is an object instead: the index of that ``pattern``, and ``why``.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
import warnings

MEMORY = 256 << 20  # bytes of address space, with Python's own


def main() -> None:
    """Read, match and write."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits for this one then ends it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    request = json.loads(sys.stdin.buffer.read())
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # ends this process, also within an expression
    warnings.simplefilter("ignore", FutureWarning)
    json.dump(_first_matches(request["patterns"], request["names"]), sys.stdout)


def _first_matches(patterns: list[str], names: list[str]) -> list[int | None] | dict[str, object]:
    found: list[int | None] = [None] * len(names)
    for number, pattern in enumerate(patterns):
        try:
            matches = re.compile(pattern).fullmatch
        except (re.error, OverflowError, RecursionError) as error:
            return {"pattern": number, "why": str(error)}
        for at, name in enumerate(names):
            if found[at] is None and matches(name):
                found[at] = number
    return found


if __name__ == "__main__":
    main()
