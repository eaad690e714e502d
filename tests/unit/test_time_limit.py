"""Work in Python is stopped after its time, and only then."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from shared.time_limit import TimeLimitExceeded, time_limit


def test_a_loop_without_end_is_stopped() -> None:
    def endless() -> None:
        for _ in itertools.count():
            with suppress(Exception):
                time.process_time()

    with pytest.raises(TimeLimitExceeded), time_limit(0.01):
        endless()


def test_nothing_comes_after_the_block() -> None:
    for _ in range(3):
        with suppress(TimeLimitExceeded), time_limit(-1.0):
            pass
        for _ in range(100_000):
            pass


def test_what_waits_takes_no_time() -> None:
    with time_limit(0.25):
        time.sleep(0.75)


TRACED = """
import resource, sys
from shared.time_limit import TimeLimitExceeded, time_limit
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
with time_limit(60.0):
    pass
sys.setprofile(lambda *_: None)
print(len("done"))
"""


def test_a_profiler_works_afterwards() -> None:
    """Python 3.11 would hang in its first instruction if an exception had been taken back."""
    done = subprocess.run([sys.executable, "-c", TRACED], capture_output=True, text=True, timeout=800)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr
