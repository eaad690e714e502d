"""Work in Python is stopped after its time, and only then."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from shared import time_limit as module
from shared.time_limit import TimeLimitExceeded, time_limit


def test_a_loop_without_end_is_stopped() -> None:
    def endless() -> None:
        for _ in itertools.count():
            with suppress(Exception):
                time.process_time()

    with pytest.raises(TimeLimitExceeded), time_limit(0.01):
        endless()


def test_nothing_comes_after_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.01)
    for _ in range(10):
        with suppress(TimeLimitExceeded), time_limit(-1.0):
            time.sleep(0.05)  # exceptions are asked for meanwhile, and come at its end
        for _ in range(100_000):
            pass


def test_an_exception_at_the_end_of_the_block_ends_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the watch would raise others in this thread for ever."""

    here, tries = threading.get_ident(), list[int]()

    class Interrupted(threading.Event):
        def set(self) -> None:
            if threading.get_ident() == here:  # another is a new thread's own
                tries.append(1)
                if len(tries) == 1:
                    raise TimeLimitExceeded
            super().set()

    monkeypatch.setattr(module.threading, "Event", Interrupted)
    with pytest.raises(TimeLimitExceeded), time_limit(1e9):
        pass
    assert not [each for each in threading.enumerate() if each.name == "limit of time"]


WAITS = """
import time
from shared.time_limit import time_limit
with time_limit(0.25):
    time.sleep(0.75)
print("done")
"""


def test_what_waits_takes_no_time() -> None:
    """In a process of its own: the time of other threads counts."""
    done = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=800)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


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
