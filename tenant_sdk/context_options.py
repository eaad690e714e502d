"""Command-line options of prompts, contexts and examples that are long."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from shared.errors import ConfigurationError
from shared.options import check_text

Prompt = Annotated[Optional[str], typer.Option(help="What to go on from.")]  # noqa: UP045
PromptFile = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(help="File with the prompt instead, in UTF-8, however long; it is read in chunks."),
]
Kv = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="device|host|disk",
        help="Where keys and values of the context lie. host: in buffers in this machine's memory. disk: in "
        "an encrypted file without a name that is gone at the end, so memory need not have room for them. "
        "device: as transformers keeps them. Default: host, or device on an accelerator.",
    ),
]
KvMemory = Annotated[
    float, typer.Option(min=0, metavar="GIB", help="Keys and values that stay in memory with --kv disk.")
]
KvFolder = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(help="Folder for the file of --kv disk. Default: TMPDIR, else /var/tmp."),
]
PromptMemory = Annotated[
    float,
    typer.Option(metavar="GIB", help="What reading a chunk of the prompt may take, besides keys and values."),
]
SequenceLength = Annotated[
    int,
    typer.Option(
        min=2,
        help="Tokens a block of text, and of a record at most: longer ones with `text` are split, others "
        "left out, and both said. Long ones are learned from in windows, if memory asks for it.",
    ),
]
MaxLength = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(min=2, help="Another name of --sequence-length."),
]
TrainOnPrompt = Annotated[
    bool, typer.Option("--train-on-prompt", help="Learn whole records, not the answers alone.")
]
Memory = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(
        metavar="GIB", help="What this process may have; default: 80 % of what is free on top of what it has."
    ),
]


LENGTH = 256  # tokens, if nobody says


def text_length(sequence_length: int, max_length: int | None) -> int:
    """Tokens of a text at most, by either of their names.

    Raises:
        ConfigurationError: by both.
    """
    if max_length is not None and sequence_length not in (LENGTH, max_length):
        raise ConfigurationError("--sequence-length and --max-length are the same: give one of them")
    return max_length or sequence_length


def prompt_text(prompt: str | None, file: Path | None) -> str:
    """The prompt that was given, one way or the other.

    Raises:
        ConfigurationError: both ways, or neither; or the file cannot be read, or it is no UTF-8.
    """
    if (prompt is None) == (file is None):
        raise ConfigurationError("give the prompt either with --prompt or with --prompt-file")
    if file is None:
        check_text("--prompt", prompt or "")
        return prompt or ""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{file} is not UTF-8 text: byte {error.start:,}") from error
