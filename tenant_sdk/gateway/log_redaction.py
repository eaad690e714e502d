"""Log lines of libraries once requests come: their call site and kind, and never their words."""

from __future__ import annotations

import logging
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from shared.log_rate_limit import LogRateLimiter
from tenant_sdk.gateway.client_locks import current_client

FIRST_PARTY = ("tenant_sdk", "shared")  # loggers whose words hold no text of a client
# Clients may have one call site log at each request, or each token. In so many seconds, it has one line for
# each client; one of this project has more, since each of its lines reports something else. What lasts, such
# as a full disk, has a stricter limit of its own (``status.REMIND_SECONDS``), so this one adds nothing there.
CALL_SITE_SECONDS, LINES_PER_CALL_SITE = 60.0, 20


def redact_library_logs(clock: Callable[[], float] = time.monotonic) -> None:
    """From now on, in this process: a library's words, and those of an exception, may hold a client's."""
    make = logging.getLogRecordFactory()
    limiters = dict[tuple[str, str, int], LogRateLimiter]()

    def record_of(*arguments: Any, **options: Any) -> logging.LogRecord:
        record = make(*arguments, **options)
        first_party = record.name.partition(".")[0] in FIRST_PARTY
        key = (current_client.get(), record.pathname, record.lineno)
        times = LINES_PER_CALL_SITE if first_party else 1
        limiter = limiters.setdefault(key, LogRateLimiter(CALL_SITE_SECONDS, times))
        if not limiter.due(clock()):
            record.levelno = logging.NOTSET - 1  # below the level of any handler
            return record
        if first_party:
            record.msg = f"{record.msg}{limiter.more()}"
            return record
        record.msg, record.args = _described(record) + limiter.more(), ()
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
