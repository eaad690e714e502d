"""A target, and which outcomes of it are findings."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from shared.errors import SymbiosisError
from shared.time_limit import TimeLimitExceeded, time_limit

ROOT = Path(__file__).resolve().parents[2]
CORPUS = Path(__file__).parent / "corpus"
PACKAGES = ("shared", "tenant_sdk", "provider", "security")
# Readers check sizes before they allocate, so that a small input takes little. Half of it is for libraries.
MEMORY = 1 << 30
SECONDS = 30.0  # of a processor, for one input that takes milliseconds


class Finding(Exception):
    """An input had an outcome that is none of the documented ones."""


@dataclass(frozen=True)
class Target:
    """A reader of bytes.

    Attributes:
        run: reads an input. It returns or raises one of the ``refusals``, or else there is a finding.
        seeds: valid inputs, and some that are not quite.
        modules: files of the product of which coverage is told.
        refusals: documented errors.
        words: what mutations put into an input.
        divided: the input has several parts with ``SEPARATOR`` in between.
    """

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], Sequence[bytes]]
    modules: tuple[str, ...]
    refusals: tuple[type[BaseException], ...] = (SymbiosisError,)
    words: tuple[bytes, ...] = ()
    divided: bool = False


SEPARATOR = b"\0\xff\0"


def parts_of(data: bytes, count: int) -> list[bytes]:
    """So many parts of an input; those that it lacks are empty."""
    parts = data.split(SEPARATOR, count - 1)
    return parts + [b""] * (count - len(parts))


def check(target: Target, data: bytes, *, timed: bool = False) -> None:
    """Run a target.

    Args:
        timed: have an input that takes ``SECONDS`` be a finding.

    Raises:
        Finding: see there.
    """
    try:
        with time_limit(SECONDS) if timed else nullcontext():
            target.run(data)
    except target.refusals:
        pass
    except TimeLimitExceeded:
        raise Finding(f"takes more than {SECONDS:g} s of a processor") from None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # panics of compiled libraries are no Exception
        raise Finding(f"{place(error)}: {type(error).__name__}: {str(error)[:200]}") from error


def place(error: BaseException) -> str:
    """The innermost line of the product, or of the targets, that an error went through."""
    found, trace = "nowhere", error.__traceback__
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in (*PACKAGES, "tests"):
            found = f"{path.relative_to(ROOT)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Have memory beyond what the process has, and ``MEMORY``, end in an error, which is a finding."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
