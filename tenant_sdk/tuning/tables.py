"""Tables of training data, CSV and Parquet, as the JSONL that says the same: a row is a record."""

from __future__ import annotations

import csv
import io
import resource
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ConfigurationError, peer_text

TABLES = (".csv", ".tsv", ".parquet")
_NESTED = ("messages", "conversations", "tools")  # in CSV they are written as JSON
_MAX_NAMES, _LONGEST_NAME = 12, 40
_MAX_VALUES, _MAX_BYTES = 20_000_000, 2 << 30  # of a Parquet file, whose bytes are those of its text
# Equal values take next to nothing in a file. Beyond so many rows or bytes of text, a file has a byte for
# each row, and for so many bytes of text.
_FEW_ROWS, _FEW_BYTES, _PACKED = 1 << 20, 64 << 20, 1000
_ROWS, _ROWS_BYTES, _MAX_ROWS_VALUES = 8, 256 << 20, 1 << 20  # that are in memory at once
_ROOM = 2 << 30  # bytes that decoding and converting them takes, beside those of the file
_TAKEN = Path("/proc/self/statm")
_SAFE = (14, 0, 1)  # of pyarrow


def is_table(path: Path) -> bool:
    """Whether a file's name says so."""
    return path.suffix.lower() in TABLES


def csv_records(path: Path, text: str, known: Sequence[str]) -> str:
    """JSONL of a CSV file with a header, or of one whose columns are separated by tabs.

    A record has the line on which its row begins. Empty cells are left out.

    Args:
        known: keys of records, of which the header names one at least.

    Raises:
        ConfigurationError: there is no such header; or a row has too many or too few cells.
    """
    dialect = csv.excel_tab if path.suffix.lower() == ".tsv" else csv.excel
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # by default texts of 128 KiB are refused
    rows = csv.reader(io.StringIO(text, newline=""), dialect, strict=True)
    lines: list[str] = []
    try:
        header = [name.strip() for name in next(rows, [])]
        _check_header(path, header, known)
        begin = rows.line_num
        for row in rows:
            lines += [""] * (begin - len(lines))
            begin = rows.line_num
            if not row:
                continue
            if len(row) != len(header):
                raise ConfigurationError(
                    f"{path}, line {len(lines) + 1}: the row has {len(row)} cells, and the header "
                    f"{len(header)}: put a cell that holds a comma, a quote or a line's end between quotes"
                )
            if any(cell.lstrip().startswith('"') > cell.startswith('"') for cell in row):
                raise ConfigurationError(
                    f"{path}, line {len(lines) + 1}: a cell begins with a space and a quote, which would be "
                    "learned: remove the space, or use JSONL if both are meant"
                )
            if path.suffix.lower() == ".tsv" and any("\t" in cell or "\n" in cell for cell in row):
                raise ConfigurationError(
                    f"{path}, line {len(lines) + 1}: a cell has a tab or a line's end, so a quote may have "
                    'joined two rows: write "" for a quote, or use CSV'
                )
            record = {name: _cell(name, cell) for name, cell in zip(header, row, strict=True) if cell}
            lines.append(msgspec.json.encode(record).decode())
    except csv.Error as error:
        raise ConfigurationError(f"{path}, line {rows.line_num}: {error}") from error
    return "\n".join(lines)


def parquet_records(path: Path, known: Sequence[str], used: Collection[str]) -> str:
    """JSONL of a Parquet file; a record has the number of its row, and None is left out.

    Args:
        known: as ``csv_records`` has it.
        used: names of columns that are decoded. The first record names the others.

    Raises:
        ConfigurationError: pyarrow is not installed; or it is no such file, or has no column that is known.
    """
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigurationError(f"{path}: Parquet files need pyarrow: pip install pyarrow") from error
    if tuple(map(int, pyarrow.__version__.split(".")[:3])) < _SAFE:
        raise ConfigurationError(
            f"{path}: Parquet files need pyarrow 14.0.1 or newer; earlier ones run code in files"
        )
    try:
        with _bounded(path):
            table = pyarrow.parquet.ParquetFile(path, memory_map=False)
            _check_header(path, table.schema_arrow.names, known)
        _check_size(path, table.metadata, used)
        return "\n".join(_lines(path, table, used))
    except MemoryError:  # also pyarrow's
        raise ConfigurationError(f"cannot read {path}: it takes more memory than there is") from None
    except RecursionError:
        raise ConfigurationError(f"cannot read {path}: its lists and objects are too deep") from None
    except (OSError, ValueError, pyarrow.ArrowException, TypeError) as error:
        raise ConfigurationError(f"cannot read {path}: {peer_text(str(error))}") from error


@contextmanager
def _bounded(path: Path) -> Iterator[None]:
    """Have a MemoryError raised for more than ``_ROOM``, whatever sizes the file says.

    A system that does not say how much is taken, such as macOS, sets no such limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        taken = int(_TAKEN.read_text().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        yield
        return
    most = taken + _ROOM + path.stat().st_size
    limit = most if soft == resource.RLIM_INFINITY else min(most, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _check_size(path: Path, metadata: Any, used: Collection[str]) -> None:
    """Refuse a file that says that its rows, which may be packed into next to nothing, take all memory."""
    groups = [metadata.row_group(at) for at in range(metadata.num_row_groups)]
    columns = [group.column(at) for group in groups for at in range(group.num_columns)]
    columns = [column for column in columns if column.path_in_schema.partition(".")[0] in used]
    # What the footer says; what there is, is counted when it is decoded.
    _check_values(path, max(metadata.num_rows, sum(column.num_values for column in columns)))
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
    most = max(_FEW_BYTES, _PACKED * path.stat().st_size)
    names = table.schema_arrow.names
    others = {name: "" for name in names if name not in used}
    columns = [name for name in names if name in used]
    batches = table.iter_batches(batch_size=_ROWS, columns=columns, use_threads=False)
    while True:
        with _bounded(path):  # decoding and converting have one room
            batch = next(batches, None)
            if batch is None:
                return
            values += _check_batch(path, batch, number + 1)
            _check_values(path, values)
            rows = enumerate(batch.to_pylist(), number + 1)
            lines = [_line(path, at, row | others if at == 1 else row) for at, row in rows]
        number += len(lines)
        for line in lines:
            size += len(line)
            _check_text(path, size)
            if size > most:
                raise ConfigurationError(
                    f"{path} has more than {_PACKED:,} bytes of text for each of its own, so most rows are "
                    "the same: remove them"
                )
            yield line


def _check_batch(path: Path, batch: Any, first: int) -> int:
    """Refuse rows that take too much memory as objects; how many values they have.

    Args:
        first: the number of the first row.
    """
    values, size = map(sum, zip(*map(_measured, batch.columns), strict=True))
    most = f"{_MAX_ROWS_VALUES:,} values" if values > _MAX_ROWS_VALUES else ""
    most = f"{_ROWS_BYTES >> 20} MiB" if size > _ROWS_BYTES else most
    if most:
        raise ConfigurationError(
            f"{path}, row {first}: it and the next {_ROWS - 1} have more than {most}: split them"
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
        raise ConfigurationError(f"{path}, row {number}: a value is no text: {error}") from error


def _plain(value: Any) -> Any:
    """As JSON has it: without None, which Parquet gives all objects of a list, and with text for bytes."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items() if each is not None}
    if isinstance(value, bytes):
        return value.decode()
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _cell(name: str, cell: str) -> Any:
    """JSON where a record has lists; what is no JSON stays, and is refused as text is."""
    if name not in _NESTED:
        return cell
    try:
        return msgspec.json.decode(cell)
    except (msgspec.DecodeError, RecursionError):
        return cell


def _check_header(path: Path, header: Sequence[str], known: Sequence[str]) -> None:
    if len(set(header)) < len(header):
        raise ConfigurationError(f"{path}: two columns have the same name")
    if not set(header) & set(known):
        names = ", ".join(peer_text(name, _LONGEST_NAME) for name in header[:_MAX_NAMES]) or "nothing"
        raise ConfigurationError(
            f"{path}: the first line of a table names its columns as the keys of a record: text; or prompt "
            "and completion; or, for a chat, instruction, input and output; or messages. This one has "
            f"{names}. Rename the columns; or name the file .txt if it is to be learned as plain text"
        )
