"""What libraries write into the log once requests come: where and of what kind, and never their words."""

from __future__ import annotations

import logging
import traceback
import warnings
from typing import Any

OURS = ("tenant_sdk", "shared")  # whose words hold no text of a client


class _Wordless(logging.LogRecord):
    """A record of a library: its words, and those of an exception, may hold what a client sent."""

    def __init__(
        self, name: str, level: int, path: str, line: int, message: Any, args: Any, trouble: Any, **more: Any
    ) -> None:
        ours = name.partition(".")[0] in OURS
        super().__init__(
            name,
            level,
            path,
            line,
            message if ours else _told(path, line, trouble),
            args if ours else (),
            trouble if ours else None,
            **more,
        )


def leave_words_out() -> None:
    """From now on, in this process, for all loggers but those of this project."""

    def record(
        name: str,
        level: int,
        path: str,
        line: int,
        message: Any,
        args: Any,
        trouble: Any,
        func: str | None = None,
        sinfo: str | None = None,
        **_: Any,
    ) -> logging.LogRecord:
        return _Wordless(name, level, path, line, message, args, trouble, func=func)

    logging.setLogRecordFactory(record)
    warnings.simplefilter("ignore")  # these have words too, and are for developers


def _told(path: str, line: int, trouble: Any) -> str:
    """Where, and for an exception its kind and the way it took."""
    told = f"(from {path}:{line}; words are left out, they may be a client's)"
    error = trouble[1] if isinstance(trouble, tuple) else trouble
    if not isinstance(error, BaseException):
        return told
    way = "".join(traceback.format_tb(error.__traceback__))
    return f"{told}\n{way}{type(error).__name__}"
