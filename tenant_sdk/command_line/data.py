"""``symbiosis-tenant data``: the learned tokens of a data set, before anything is trained."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import msgspec
import typer
from rich.markup import escape

from shared import imports
from shared.encoded import path_text
from tenant_sdk.command_line import options
from tenant_sdk.terminal import Terminal
from tenant_sdk.tuning.options import ReadingOptions
from tenant_sdk.tuning.records import check_data, where

if TYPE_CHECKING:
    from tenant_sdk.tuning.data import Entry, ReadFile

_HEAD = 5  # records that people are shown
_NAMED = 20  # records of which something is said one by one


@options.command_line.takes
def data(
    connection: options.SessionOptions,
    reading: ReadingOptions,
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Files of training data, as for finetune --data.")
    ],
    head: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            metavar="COUNT",
            min=0,
            help="Number of records to show of each file. Default: 5, or all with --json.",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print each example as a line of JSON: file, line, tokens (ids), learned (true or false for "
            "each token). A record that makes several examples has several lines.",
        ),
    ] = False,
    tokenizer: options.Tokenizer = None,
) -> None:
    """Show which tokens of files are learned, and which records are left out, split or duplicate."""
    check_data(files)
    config = None if tokenizer is not None else connection.session()
    with imports.without_gc():
        from tenant_sdk.session.opening import open_session
        from tenant_sdk.tuning.data import Reader
        from tenant_sdk.tuning.local_model import TokenizerInfo, tokenizer_info_in, tokenizer_info_of

    info: TokenizerInfo
    if config is None:
        info = tokenizer_info_in(tokenizer or Path())
    else:
        with open_session(replace(config, keep_gib=0.0)) as session:
            info = tokenizer_info_of(session)
    length, whole = reading.sequence_length, reading.train_on_prompt
    reader = Reader(info.tokenizer, length, whole, ends=info.ends, embeddings=info.embeddings)
    read = [reader.file(path) for path in files]
    if as_json:
        for file in read:
            for entry in islice(file.entries, head):
                sys.stdout.buffer.write(_line(file, entry) + b"\n")
        sys.stdout.buffer.flush()
    else:
        _show(info.tokenizer, read, length, _HEAD if head is None else head)


def _line(file: ReadFile, entry: Entry) -> bytes:
    from tenant_sdk.tuning.conversations import IGNORE_INDEX

    learned = [label != IGNORE_INDEX and not entry.left_out for label in entry.example["labels"]]
    fields = {"file": path_text(file.path), "line": entry.line, "tokens": entry.example["input_ids"]}
    return msgspec.json.encode({**fields, "learned": learned})


def _show(tokenizer: Any, read: Sequence[ReadFile], length: int, head: int) -> None:
    from tenant_sdk.tuning.preview import lengths, shown

    console = Terminal()
    for file in read:
        for entry in islice((each for each in file.entries if not each.left_out), head):
            place = where(file.path, entry.line) if entry.line else str(file.path)
            console.print(f"[bold]{escape(place)}[/], {len(entry.example['input_ids'])} tokens:")
            console.print(shown(tokenizer, entry.example, colour=console.color_system is not None))
            console.print()
    for file in read:
        for line in file.summary(length):
            console.print(escape(line))
    remarks = list(_remarks(read, length))
    for remark in remarks[:_NAMED]:
        console.print(escape(remark))
    if len(remarks) > _NAMED:
        console.print(f"and {len(remarks) - _NAMED:,} more such records")
    for line in lengths([len(each["input_ids"]) for file in read for each in file.examples]):
        console.print(line)


def _remarks(read: Sequence[ReadFile], length: int) -> Iterator[str]:
    """Records that are left out, split, or there twice, each in a line."""
    seen: dict[tuple[int, ...], str] = {}
    for file in read:
        split = set()
        for entry in file.entries:
            if entry.line is None:
                continue
            place, ids = where(file.path, entry.line), entry.example["input_ids"]
            if entry.left_out:
                yield f"{place}: left out, {len(ids)} tokens are more than {length}"
            elif entry.pieces > 1 and entry.line not in split:
                split.add(entry.line)
                yield f"{place}: split into {entry.pieces} pieces of at most {length} tokens"
            if (first := seen.setdefault(tuple(ids), place)) != place:
                yield f"{place}: the same as {first}"
