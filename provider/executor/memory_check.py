"""Whether a checkpoint fits into memory: estimated before it is read, and told in a sentence if not."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shared.errors import ConfigurationError, Metavar, OptionText

if TYPE_CHECKING:  # torch itself may be what does not fit
    from shared.wire.messages import GroupInfo

BASE_BYTES = 256 << 20  # what Python and torch still take while they load and serve
STORED_BYTES = 4  # of one weight in a checkpoint, at most
GIB = 2.0**30
ADVICE = OptionText(
    "choose a smaller model or a machine with more memory, raise the limit, or have each of several hosts "
    "serve a part of the layers ({part})",
    part=Metavar("k/n"),
)


def check_memory(
    model: str,
    groups: Sequence[GroupInfo],
    weight_bytes: int,
    available: Callable[[], tuple[float, str]] | None = None,
    *,
    conversion: int = 0,
) -> None:
    """Refuse to load what does not fit.

    Args:
        model: its name.
        groups: what will be served.
        weight_bytes: of one weight as it is served; 0: it is kept on a device of its own.
        available: bytes, and who says so; default: ``available_memory``.
        conversion: bytes that making one weight of what is stored takes, at most.

    Raises:
        ConfigurationError: how much is needed, and how much there is.
    """
    sizes = [member.outputs * group.inputs for group in groups for member in group.members]
    weights = weight_bytes * sum(sizes)
    more = BASE_BYTES + max(STORED_BYTES * max(sizes, default=0), conversion)
    free, where = (available or available_memory)()
    if weights + more > free:
        raise ConfigurationError(
            "not enough memory to load {}: needs about {} (weights {} + {} for Python and torch), {} "
            "available ({}); {}",
            *(model, gib(weights + more), gib(weights), gib(more), gib(free), where, ADVICE),
        )


@contextmanager
def memory_errors(model: str) -> Iterator[None]:
    """In this block, a want of memory is an error in a sentence.

    Raises:
        ConfigurationError: how much memory there is.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError, ImportError) as error:
        text = str(error).lower()
        wants = ["unable to mmap", "can't allocate memory", "cannot allocate memory", "out of memory"]
        wants.append("failed to map segment")  # of a library
        if not (isinstance(error, MemoryError) or any(want in text for want in wants)):
            raise
        free, where = available_memory()
        raise ConfigurationError(
            "not enough memory to load {}: {}; {} available ({}); {}",
            *(model, str(error).splitlines()[0] if text else "none is left", gib(free), where, ADVICE),
        ) from error


def available_memory() -> tuple[float, str]:
    """Bytes that this process may still take, and what limits it."""
    limits = [(float("inf"), "no limit is known"), _machine(), _address_space()]
    try:
        path = Path("/proc/self/cgroup").read_text().partition("0::/")[2].partition("\n")[0]
        group = Path("/sys/fs/cgroup") / path
        limits += [_of_group(each) for each in (group, *group.parents) if (each / "memory.max").is_file()]
    except OSError:
        pass
    return min(limits)


def _machine() -> tuple[float, str]:
    return _field(Path("/proc/meminfo"), "MemAvailable:") * 1024, "this machine's memory"


def _of_group(group: Path) -> tuple[float, str]:
    """Of cgroup v2; pages of files that were read long ago can be had."""
    try:
        used = int((group / "memory.current").read_text()) - _field(group / "memory.stat", "inactive_file")
        return float((group / "memory.max").read_text().replace("max", "inf")) - used, "limit of its cgroup"
    except (OSError, ValueError):
        return float("inf"), ""


def _address_space() -> tuple[float, str]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return float("inf"), ""
    return limit - _field(
        Path("/proc/self/status"), "VmSize:"
    ) * 1024, "limit of its address space, ulimit -v"


def _field(path: Path, name: str) -> float:
    """A number behind a name at the beginning of a line; infinite if there is none."""
    try:
        lines = path.read_text().splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(name)))
    except (OSError, StopIteration, IndexError, ValueError):
        return float("inf")


def gib(count: float) -> str:
    """Bytes as people read them."""
    return f"{max(count, 0.0) / GIB:.2f} GiB"
