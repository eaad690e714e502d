"""Log lines of libraries once requests come: their place and kind, and never their words."""

from __future__ import annotations

import logging
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from shared.log_rate_limit import LogRateLimiter

OURS = ("tenant_sdk", "shared")  # whose words hold no text of a client
# Clients may have one place log at each request, or each token: it may do so once in so many seconds, and a
# place of this project, each of whose lines tells something else, so many times.
PLACE_SECONDS, OUR_LINES = 60.0, 20


def redact_library_logs(clock: Callable[[], float] = time.monotonic) -> None:
    """From now on, in this process: a library's words, and those of an exception, may hold a client's."""
    make = logging.getLogRecordFactory()
    places = dict[tuple[str, int], LogRateLimiter]()

    def record_of(*arguments: Any, **options: Any) -> logging.LogRecord:
        record = make(*arguments, **options)
        ours = record.name.partition(".")[0] in OURS
        key, times = (record.pathname, record.lineno), OUR_LINES if ours else 1
        place = places.setdefault(key, LogRateLimiter(PLACE_SECONDS, times))
        if not place.due(clock()):
            record.levelno = logging.NOTSET - 1  # below the level of any handler
            return record
        if ours:
            record.msg = f"{record.msg}{place.more()}"
            return record
        record.msg, record.args = _described(record) + place.more(), ()
        record.exc_info = record.exc_text = record.stack_info = None
        return record

    logging.setLogRecordFactory(record_of)
    warnings.simplefilter("ignore")  # these have words too, and are for developers


def _described(record: logging.LogRecord) -> str:
    """Where, and for an exception its kind and the way it took."""
    text = f"from {record.pathname}:{record.lineno}; its words may hold a client's and are left out"
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return text
    return f"{text}\n{redacted(error)}"


def redacted(error: BaseException) -> str:
    """The way that an exception took, and its kind."""
    return "".join(traceback.format_tb(error.__traceback__)) + type(error).__name__
