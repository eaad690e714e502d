"""Options of a prompt, and of where a long context lies."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from shared.errors import ConfigurationError, OptionText
from shared.options import Option, check_fields, check_text
from tenant_sdk.tuning.options import AdapterChoice

_PROMPT, _CONTEXT = "Prompt", "Context"


@dataclass(frozen=True)
class AnswerOptions(AdapterChoice):
    """What answers, and what it is told before anything else."""

    draft: Annotated[
        Path | None,
        Option(
            _PROMPT,
            "Folder of a draft, for example the output of `symbiosis-tenant draft`. A pass (one run of the "
            "model) then checks several guessed tokens. The number of passes tells the provider something "
            "about the text.",
            unit="FOLDER",
        ),
    ] = None
    pace: Annotated[
        float | None,
        Option(
            _PROMPT,
            "With {draft}: seconds from the beginning of a pass to that of the next. The number of passes of "
            "an answer is then a multiple of 32, so it says little about the text.",
            minimum=0,
            exclusive_minimum=True,
            unit="SECONDS",
        ),
    ] = None
    system: Annotated[
        str | None,
        Option(_PROMPT, "System message. Default: that of the model's chat template, if any.", unit="TEXT"),
    ] = None

    def __post_init__(self) -> None:
        """Refuse a text that is not UTF-8, and values out of bounds."""
        check_text("system", self.system or "")
        check_fields(self)
        if self.pace is not None and self.draft is None:
            raise ConfigurationError(OptionText("{pace} needs {draft}"))

    @property
    def opening(self) -> list[dict[str, str]]:
        """The messages before a user's first one."""
        return [] if self.system is None else [{"role": "system", "content": self.system}]


@dataclass(frozen=True)
class PromptOptions(AnswerOptions):
    """What `symbiosis-tenant generate` goes on from, and how it is shown."""

    prompt: Annotated[str | None, Option(_PROMPT, "Message to answer, or text to continue.", unit="TEXT")] = (
        None
    )
    prompt_file: Annotated[
        Path | None,
        Option(
            _PROMPT,
            "File with the prompt, in UTF-8 and of any length, instead of {prompt}. -: standard input.",
            unit="FILE",
        ),
    ] = None
    prompts: Annotated[
        Path | None,
        Option(
            _PROMPT,
            "File with many prompts: one a line, or JSON objects that have `prompt`. Each answer is printed "
            "as a JSON object with `prompt` and `answer`.",
            unit="FILE",
        ),
    ] = None
    raw: Annotated[
        bool,
        Option(
            _PROMPT,
            "Continue the prompt as it is. By default, if the tokenizer has a chat template, the prompt is a "
            "user's message, and the model answers it.",
        ),
    ] = False
    quiet: Annotated[bool, Option(_PROMPT, "Print no statistics at the end.")] = False

    def __post_init__(self) -> None:
        """Refuse options that exclude each other."""
        super().__post_init__()
        if [self.prompt, self.prompt_file, self.prompts].count(None) != 2:
            raise ConfigurationError(OptionText("give one of {prompt}, {prompt_file} and {prompts}"))
        if self.raw and self.system is not None:
            raise ConfigurationError(
                OptionText("{system} needs the chat template: leave out {raw}", raw=True)
            )

    def text(self) -> str:
        """The prompt that was given, one way or the other.

        Raises:
            ConfigurationError: the file cannot be read, or it is not UTF-8.
        """
        file = self.prompt_file
        if file is None:
            check_text("prompt", self.prompt or "")
            return self.prompt or ""
        try:
            if file == Path("-"):
                return sys.stdin.buffer.read().decode().removesuffix("\n")
            return file.read_bytes().decode()
        except OSError as error:
            raise ConfigurationError(f"{file} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"{file} is not UTF-8 text: byte {error.start:,}") from error


@dataclass(frozen=True)
class ContextOptions:
    """Where the keys and values of a context lie; see ``LongContext``."""

    kv: Annotated[
        str | None,
        Option(
            _CONTEXT,
            "Place of keys and values. host: in this machine's memory. disk: in an encrypted file, "
            "which the system deletes at the end; keys and values then need not fit into memory. device: in "
            "transformers' own cache, with the model. Default: host, or device if the model is on an "
            "accelerator.",
            unit="device|host|disk",
        ),
    ] = None
    kv_memory_gib: Annotated[
        float,
        Option(
            _CONTEXT,
            "If {kv} is disk: memory for keys and values. The keys and values of two layers take memory in "
            "addition.",
            minimum=0,
            unit="GIB",
        ),
    ] = 0.0
    kv_folder: Annotated[
        Path | None,
        Option(
            _CONTEXT,
            "If {kv} is disk: folder for the encrypted file. Default: TMPDIR, else /var/tmp.",
            unit="FOLDER",
        ),
    ] = None
    memory_gib: Annotated[
        float,
        Option(
            _CONTEXT,
            "Memory for reading the prompt in chunks, in addition to keys and values.",
            unit="GIB",
        ),
    ] = 1.0

    def __post_init__(self) -> None:
        """Refuse values out of bounds."""
        check_fields(self)
