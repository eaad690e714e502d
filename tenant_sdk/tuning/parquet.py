"""Parquet files of training data, as the JSONL that says the same, read in a process of their own.

Some damaged files end the process that reads them, since pyarrow's C++ code raises where nothing catches it.
The sizes in a file are its author's words, so that process also has a limit of memory.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import resource
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shared.encoded import is_sparse
from shared.errors import ConfigurationError, peer_text
from tenant_sdk.tuning.tables import check_header

_MAX_VALUES, _MAX_BYTES = 20_000_000, 2 << 30  # of a file, whose bytes are those of its text
# Equal values take next to nothing in a file. Beyond so many rows or bytes of text, a file has a byte for
# each row, and for so many bytes of text.
_FEW_ROWS, _FEW_BYTES, _PACKED = 1 << 20, 64 << 20, 100
_ROWS, _ROWS_BYTES, _MAX_ROWS_VALUES = 8, 256 << 20, 1 << 20  # that are in memory at once
_MEMORY_BYTES = 3 << 30  # bytes that the process takes, a third of a gigabyte of libraries among them
_SAFE = (14, 0, 1)  # of pyarrow
_MIN_SECONDS, _SECOND_BYTES = 60, 100_000  # of a processor, and bytes of a file for each second more
_REFUSED = 3  # the status of a process that has written why it refuses the file
_LAST_WORDS = 300


def parquet_records(path: Path, known: Sequence[str], used: Collection[str]) -> str:
    """JSONL of a Parquet file; a record has the number of its row, and None is left out.

    Args:
        known: keys of records, of which the file's columns name one at least.
        used: names of columns that are decoded. The first record names the others.

    Raises:
        ConfigurationError: pyarrow is not installed; or it is no such file, or has no column that is known.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigurationError(f"{path}: Parquet files need pyarrow: pip install pyarrow")
    if is_sparse(path):  # the limits below are by its size
        raise ConfigurationError(f"most of {path} is a hole: the file was copied only in part; copy it again")
    words = [str(path), ",".join(known), ",".join(used)]
    done = subprocess.run(  # noqa: S603 - this program
        [sys.executable, "-P", "-m", "tenant_sdk.tuning.parquet", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    if done.returncode == 0:
        return done.stdout.decode()
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode == _REFUSED:
        raise ConfigurationError(said)
    if done.returncode == -signal.SIGXCPU:
        raise ConfigurationError(
            f"cannot read {path}: it takes more than {_seconds(path):,} s of a processor, and no file "
            "of its size should. Split it, or write it as JSONL"
        )
    raise ConfigurationError(
        f"cannot read {path}: pyarrow's process ended with status {done.returncode}; the file may be "
        f"damaged: {peer_text(said[-_LAST_WORDS:])}"
    )


def _seconds(path: Path) -> int:
    """Of a processor, for reading a file."""
    return _MIN_SECONDS + path.stat().st_size // _SECOND_BYTES


def main(path: Path, known: Sequence[str], used: Collection[str]) -> int:
    """Write a file's records, or why it is refused; the process's status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits for this one then ends it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the file's text would lie in it
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    try:
        limit_memory(_MEMORY_BYTES + path.stat().st_size)
        seconds = _seconds(path)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        for number, line in enumerate(lines_of(path, known, used)):
            sys.stdout.write(f"\n{line}" if number else line)
    except OSError as error:
        sys.stderr.write(f"cannot read {path}: {error.strerror}")
        return _REFUSED
    except ConfigurationError as error:
        sys.stderr.write(str(error))
        return _REFUSED
    return 0


def limit_memory(size: int) -> None:
    """Have a MemoryError raised where this process takes more, where the system has such a limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [size, *(each for each in (soft, hard) if each != resource.RLIM_INFINITY)]
    with contextlib.suppress(ValueError, OSError):  # macOS has none
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))


def lines_of(path: Path, known: Sequence[str], used: Collection[str]) -> Iterator[str]:
    """The lines of ``parquet_records``, read by this process.

    Raises:
        ConfigurationError: as ``parquet_records`` has it.
    """
    try:
        import pyarrow.parquet
    except Exception as error:  # of a damaged installation, or for lack of memory
        raise ConfigurationError(f"cannot read {path}: pyarrow cannot be used: {error}") from error
    if tuple(map(int, pyarrow.__version__.split(".")[:3])) < _SAFE:
        raise ConfigurationError(
            f"{path}: Parquet files need pyarrow 14.0.1 or newer; earlier ones run code in files"
        )
    try:
        table = pyarrow.parquet.ParquetFile(path, memory_map=False)
        check_header(path, table.schema_arrow.names, known)
        _check_size(path, table.metadata, used)
        yield from _lines(path, table, used)
    except MemoryError:  # also pyarrow's
        raise ConfigurationError(f"cannot read {path}: it takes more memory than there is") from None
    except RecursionError:
        raise ConfigurationError(f"cannot read {path}: its lists and objects are too deep") from None
    except (OSError, ValueError, pyarrow.ArrowException, TypeError) as error:
        raise ConfigurationError(f"cannot read {path}: {peer_text(str(error))}") from error


def _check_size(path: Path, metadata: Any, used: Collection[str]) -> None:
    """Refuse a file that says that its rows, which may be packed into next to nothing, take all memory."""
    groups = [metadata.row_group(at) for at in range(metadata.num_row_groups)]
    columns = [group.column(at) for group in groups for at in range(group.num_columns)]
    columns = [column for column in columns if column.path_in_schema.partition(".")[0] in used]
    # Of an object, also of none, each row has a value in each of its columns.
    cells = metadata.num_rows * (len(columns) // max(1, len(groups)))
    # What the footer says; what there is, is counted when it is decoded.
    _check_values(path, max(metadata.num_rows, cells, sum(column.num_values for column in columns)))
    _check_text(path, sum(column.total_uncompressed_size for column in columns))
    if metadata.num_rows > max(_FEW_ROWS, size := path.stat().st_size):
        raise ConfigurationError(
            f"{path} has {metadata.num_rows:,} rows in {size:,} bytes, so most are the same: remove them"
        )


def _check_values(path: Path, values: int) -> None:
    """Refuse a file with so many values, if these are too many."""
    if values > _MAX_VALUES:
        raise ConfigurationError(
            f"{path} has {values:,} values or more, and {_MAX_VALUES:,} are the most: split it"
        )


def _check_text(path: Path, size: int) -> None:
    """Refuse a file with so many bytes of text, if these are too many."""
    if size > _MAX_BYTES:
        raise ConfigurationError(f"{path} has more than {_MAX_BYTES / 2**30:g} GiB of text: split it")


def _lines(path: Path, table: Any, used: Collection[str]) -> Iterator[str]:
    number = size = values = 0
    max_bytes = max(_FEW_BYTES, _PACKED * path.stat().st_size)
    names = table.schema_arrow.names
    others = {name: "" for name in names if name not in used}
    columns = [name for name in names if name in used]
    batches = table.iter_batches(batch_size=_ROWS, columns=columns, use_threads=False)
    for batch in batches:
        values += _check_batch(path, batch, number + 1)
        _check_values(path, values)
        rows = enumerate(batch.to_pylist(), number + 1)
        lines = [_line(path, at, row | others if at == 1 else row) for at, row in rows]
        number += len(lines)
        for line in lines:
            size += len(line) if line.isascii() else len(line.encode())
            _check_text(path, size)
            if size > max_bytes:
                raise ConfigurationError(
                    f"{path} has more than {_PACKED:,} bytes of text for each of its own, so most rows are "
                    "the same: remove them"
                )
            yield line
    if number != table.metadata.num_rows:
        raise ConfigurationError(
            f"{path} says {table.metadata.num_rows:,} rows, and has {number:,}: it is damaged"
        )


def _check_batch(path: Path, batch: Any, first: int) -> int:
    """Refuse rows that take too much memory as objects; how many values they have.

    Args:
        first: the number of the first row.
    """
    values, size = map(sum, zip(*map(_measured, batch.columns), strict=True))
    limit = f"{_MAX_ROWS_VALUES:,} values" if values > _MAX_ROWS_VALUES else ""
    limit = f"{_ROWS_BYTES >> 20} MiB" if size > _ROWS_BYTES else limit
    if limit:
        raise ConfigurationError(
            f"{path}, row {first}: it and the next {_ROWS - 1} have more than {limit}: split them"
        )
    return values


def _measured(array: Any) -> tuple[int, int]:
    """How many values an Arrow array has, with those within its lists and objects; and their bytes."""
    import pyarrow

    kind = array.type
    if pyarrow.types.is_dictionary(kind):  # names each value once, and objects are made of each
        array = array.dictionary_decode()
    if not kind.num_fields:
        return len(array), array.nbytes
    within = array.flatten()
    parts = [_measured(each) for each in (within if pyarrow.types.is_struct(kind) else [within])]
    return len(array) + sum(count for count, _ in parts), sum(size for _, size in parts)


def _line(path: Path, number: int, row: dict[str, Any]) -> str:
    """A row as JSON.

    Raises:
        ConfigurationError: a value is no text.
    """
    try:
        return msgspec.json.encode(_plain(row)).decode()
    except (UnicodeDecodeError, TypeError) as error:
        raise ConfigurationError(f"{path}, row {number}: a value is no text or number: {error}") from error


def _plain(value: Any) -> Any:
    """As JSON has it: without None, which Parquet gives all objects of a list, and with text for bytes."""
    if isinstance(value, dict):
        plain = {key: _plain(each) for key, each in value.items()}
        return {key: each for key, each in plain.items() if each is not None}
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):  # which is how tables say that there is none
            return None
        raise TypeError(f"{value} is no number")
    return [_plain(each) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3].split(",")))
