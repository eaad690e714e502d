"""Each tenant's answers, counted, as CSV: for the admin port, and in files to bill by."""

from __future__ import annotations

import csv
import io
import logging
import os
import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from provider.file_lock import lock_exclusively
from provider.observe.metrics import Usage, UsageBy
from provider.observe.periodic import Periodic
from shared.errors import ConfigurationError

log = logging.getLogger(__name__)

COLUMNS = ("from", "until", "tenant", "request_class", *Usage._fields)


def usage_csv(since: datetime, until: datetime, usage: UsageBy) -> str:
    """A header and a line for each tenant and request class."""
    return _lines([COLUMNS]) + _table(since, until, usage)


def _table(since: datetime, until: datetime, usage: UsageBy) -> str:
    times = _shown(since), _shown(until)
    return _lines(
        (*times, *of, *used[:-1], f"{used.product_seconds:.6f}") for of, used in usage.items() if any(used)
    )


def _lines(rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _shown(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


class UsageFile:
    """Appends what was used in each interval to a file: a line for each tenant and request class.

    An interval's lines are written together and reach the disk together: a line that a crash or a full disk
    cut is removed when they are written again. What cannot be written is in the next interval's lines.
    Several executors may have the same file.

    Args:
        path: may hold ``%Y``, ``%m``, ``%d``, for a file a year, month or day of UTC; made if need be.
        usage: reports what was used since the start.
        seconds: the interval, by the clock: 3600 is from hour to hour.
        clock: what time it is, with its zone.
        failed: is called each time that it cannot be written.

    Raises:
        ConfigurationError: it cannot be written, or its name has other % than these.
    """

    def __init__(
        self,
        path: Path,
        usage: Callable[[], UsageBy],
        seconds: float,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._path, self._usage, self._clock, self._failed = path, usage, clock, failed
        if "%" in re.sub("%[Ymd]", "", str(path)):
            raise ConfigurationError(f"cannot write usage to {path}: of % a name may have %Y, %m and %d")
        self._failing = False
        self._since, self._written = clock(), usage()
        try:
            self._append("")
        except OSError as error:
            raise ConfigurationError(f"cannot write usage to {self._now}: {error.strerror}") from error
        self._periodic = Periodic(seconds, self.write, "usage")

    def write(self) -> None:
        """Append what was used since the last time that this succeeded."""
        now, usage = self._clock(), self._usage()
        more = {of: used.plus(self._written.get(of, Usage()), -1) for of, used in usage.items()}
        try:
            self._append(_table(self._since, now, more))
        except OSError as error:
            log.error("no usage is written to %s until this is repaired: %s", self._now, error.strerror)
            self._failing = True
            self._failed()
            return
        if self._failing:
            log.info("usage is written to %s again, with what was left", self._now)
        self._failing = False
        self._since, self._written = now, usage

    def close(self) -> None:
        """Append what is left."""
        self._periodic.close()
        self.write()

    @property
    def _now(self) -> Path:
        """The file of the time when the interval began."""
        return Path(self._since.astimezone(UTC).strftime(str(self._path)))

    def _append(self, lines: str) -> None:
        with ExitStack() as opened:
            file = os.open(self._now, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            opened.callback(os.close, file)
            lock_exclusively(file)  # the operator may let others read the file
            end = _end_of_lines(file)
            os.ftruncate(file, end)
            data = ("" if end else _lines([COLUMNS])).encode() + lines.encode()
            written = 0
            try:
                while written < len(data):
                    written += os.pwrite(file, data[written:], end + written)
                os.fsync(file)
            except OSError:
                os.ftruncate(file, end)
                raise


def _end_of_lines(file: int) -> int:
    """Where the last line that is complete ends."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - 4096)
        at = os.pread(file, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0
