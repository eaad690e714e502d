"""What is written to standard error, by a process whose standard error is a file, a pipe or a terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONG = "a long line " * 30
PROGRAM = f"""
import logging, sys, threading, warnings
from provider.observe.log import log_to_console
log_to_console(sys.argv[1])
log = logging.getLogger("some.place")
log.info("tenant %s: \\udcff {LONG}", "alice", extra={{"tenant": "alice", "seconds": 1.5, "secret": "no"}})
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
if sys.argv[1] == "json":
    warnings.warn("of a library")
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    raise SystemError("the end")
"""


def written(log_format: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", PROGRAM, log_format]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    return done.stderr.splitlines()


def test_every_line_is_one_object() -> None:
    first, failed, warned, thread, end = map(json.loads, written("json"))
    time = datetime.fromisoformat(first.pop("time"))
    assert time.utcoffset() is not None
    assert first == {
        "level": "info",
        "logger": "some.place",
        "message": f"tenant alice: \udcff {LONG}",
        "tenant": "alice",
        "seconds": 1.5,
    }
    assert failed["traceback"].endswith("ZeroDivisionError: division by zero")
    assert (warned["level"], "of a library" in warned["message"]) == ("warning", True)
    assert [line["level"] for line in (thread, end)] == ["critical", "critical"]
    assert "ZeroDivisionError" in thread["message"]
    assert "the end" in end["traceback"]


def test_text_in_a_file_is_in_whole_lines() -> None:
    first, *trace = written("text")
    time, level, message = first.split(" ", 2)
    assert datetime.fromisoformat(time).utcoffset() is not None
    assert (level, message.endswith(LONG.rstrip() + " ")) == ("INFO", True)
    assert trace[-1] == "ZeroDivisionError: division by zero"


def test_text_on_a_terminal_fits_it() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80"}
    command = [sys.executable, "-c", PROGRAM.replace(" \\udcff", ""), "text"]
    process = subprocess.Popen(command, env=environment, stderr=theirs)
    os.close(theirs)
    said = b""
    try:
        while more := os.read(ours, 1 << 16):
            said += more
    except OSError:  # how a terminal ends
        pass
    os.close(ours)
    assert process.wait(800) == 0
    assert b"tenant alice:" in said
    assert b'"level"' not in said
