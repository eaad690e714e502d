"""OpenMP threads that sleep while they wait.

By default the threads of libgomp spin for milliseconds after each parallel region, and so take a processor
from an executor on the same machine. libgomp reads GOMP_SPINCOUNT when torch loads it, and never again. If
there are more threads than processors, though, each spins as briefly as with GOMP_SPINCOUNT=1000. So where
torch was imported first, a team of more threads than there are processors is made, and sleeps.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
from pathlib import Path

log = logging.getLogger(__name__)

_late = threading.Event()  # torch was there already, and had threads spin


def before_torch() -> None:
    """Set the variable, which works if torch is not imported yet."""
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ["GOMP_SPINCOUNT"] = "1000"
        if "torch" in sys.modules:
            _late.set()


def libraries_in(maps: str) -> set[str]:
    """Absolute paths in ``/proc/PID/maps`` of each libgomp: several packages have their own."""
    # The sixth field is the whole path, also if it has spaces.
    paths = {fields[5] for line in maps.splitlines() if len(fields := line.split(maxsplit=5)) == 6}
    return {path for path in paths if path[0] == "/" and Path(path).name.startswith("libgomp")}


def stop_spinning() -> None:
    """Have threads sleep although torch was imported before; without libgomp, nothing is done."""
    if not _late.is_set():
        return
    _late.clear()
    try:
        # Nothing is loaded that is not there already.
        libraries = [
            ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            for path in libraries_in(Path("/proc/self/maps").read_text())
        ]
        # A function that does nothing, in each thread of a team.
        nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
        parallels = [each.GOMP_parallel for each in libraries]
    except (OSError, AttributeError) as error:
        log.info("threads of OpenMP spin while they wait: %r", error)
        return
    event = threading.Event()

    def teams() -> None:
        for parallel in parallels:
            parallel(nothing, None, len(os.sched_getaffinity(0)) + 1, 0)
        event.set()
        threading.Event().wait()  # the teams last as long as this thread

    threading.Thread(target=teams, name="symbiosis-spinning", daemon=True).start()
    event.wait()
