"""Tables of training data: CSV as the JSONL that says the same, where a row is a record."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from shared.encoded import decode_json
from shared.errors import ConfigurationError, peer_text

TABLES = (".csv", ".tsv", ".parquet")
_NESTED = ("messages", "conversations", "tools")  # in CSV they are written as JSON
_MAX_NAMES, _LONGEST_NAME = 12, 40


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
        check_header(path, header, known)
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


def _cell(name: str, cell: str) -> Any:
    """JSON where a record has lists; what is no JSON stays, and is refused as text is."""
    if name not in _NESTED:
        return cell
    try:
        return decode_json(cell)
    except (msgspec.DecodeError, RecursionError):
        return cell


def check_header(path: Path, header: Sequence[str], known: Sequence[str]) -> None:
    """Refuse a table whose columns no record has.

    Raises:
        ConfigurationError: no name is known, or a name occurs twice.
    """
    if len(set(header)) < len(header):
        raise ConfigurationError(f"{path}: two columns have the same name")
    if not set(header) & set(known):
        names = ", ".join(peer_text(name, _LONGEST_NAME) for name in header[:_MAX_NAMES]) or "nothing"
        raise ConfigurationError(
            f"{path}: the first line of a table names its columns as the keys of a record: text; or prompt "
            "and completion; or, for a chat, instruction, input and output; or messages. This one has "
            f"{names}. Rename the columns; or name the file .txt if it is to be learned as plain text"
        )
