"""An executor's log on standard error: lines for people, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
import threading
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

console = Console(stderr=True, soft_wrap=True)
FIELDS = ("tenant", "peer", "reason", "request_class", "requests", "seconds")  # what ``extra=`` may name


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message; those of FIELDS that there are; a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """See the class."""
        time = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class VisibleFormatter(logging.Formatter):
    """Without control characters, which names of folders may hold; lines are broken by tracebacks alone."""

    def format(self, record: logging.LogRecord) -> str:
        """See the class."""
        return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in super().format(record))


def log_to_console(log_format: str = "text") -> None:
    """From now on, what this process logs goes there.

    Args:
        log_format: ``text``: for people, in whole lines if it is no terminal; ``json``: see JsonFormatter.
    """
    handler: logging.Handler = logging.StreamHandler()
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
        _log_everything()
    elif console.is_terminal:
        handler = RichHandler(console=console, show_path=False, rich_tracebacks=False)
        handler.setFormatter(VisibleFormatter("%(message)s"))
    else:  # rich would break lines at 80 columns
        handler.setFormatter(VisibleFormatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S%z"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    if isinstance(handler, RichHandler):
        with (
            console.capture()
        ):  # the first line imports modules; a later one may say that no file can be opened
            logging.getLogger(__name__).info("")


def logs_json() -> bool:
    """Whether this process was told to."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def _log_everything() -> None:
    """Also what Python writes itself: warnings, and errors that nobody handles."""

    def uncaught(kind: type[BaseException], error: BaseException | None, at: TracebackType | None) -> None:
        info = (kind, error, at) if error is not None else None
        logging.getLogger(__name__).critical("nobody handled %s", kind.__name__, exc_info=info)

    logging.captureWarnings(True)
    sys.excepthook = uncaught
    threading.excepthook = lambda thread_error: uncaught(
        thread_error.exc_type, thread_error.exc_value, thread_error.exc_traceback
    )
