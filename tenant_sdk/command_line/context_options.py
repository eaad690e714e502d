"""Options of a prompt, and of where a long context lies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from shared.errors import ConfigurationError, Message
from shared.options import Option, check_fields, check_text

_PROMPT, _CONTEXT = "Prompt", "Context"


@dataclass(frozen=True)
class PromptOptions:
    """What `symbiosis-tenant generate` goes on from, and how it is shown."""

    prompt: Annotated[str | None, Option(_PROMPT, "Text to continue.", unit="TEXT")] = None
    prompt_file: Annotated[
        Path | None,
        Option(
            _PROMPT,
            "File with the prompt, in UTF-8 and of any length, instead of {prompt}.",
            unit="FILE",
        ),
    ] = None
    chat: Annotated[
        bool,
        Option(
            _PROMPT,
            "Answer the prompt as a user's message to a chat model, with the tokenizer's chat template. "
            "Without this, the model continues the prompt as it is.",
        ),
    ] = False
    adapter: Annotated[
        Path | None, Option(_PROMPT, "Folder of an adapter, such as finetune writes.", unit="FOLDER")
    ] = None
    allow_other_base: Annotated[bool, Option(_PROMPT, "Load an adapter that was made for another model.")] = (
        False
    )
    quiet: Annotated[bool, Option(_PROMPT, "Print no statistics at the end.")] = False

    def text(self) -> str:
        """The prompt that was given, one way or the other.

        Raises:
            ConfigurationError: both ways, or neither; or the file cannot be read, or it is no UTF-8.
        """
        file = self.prompt_file
        if (self.prompt is None) == (file is None):
            raise ConfigurationError(Message("give the prompt either with {prompt} or with {prompt_file}"))
        if file is None:
            check_text("prompt", self.prompt or "")
            return self.prompt or ""
        try:
            return file.read_text(encoding="utf-8")
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
            "Where keys and values are kept. host: in this machine's memory. disk: in an encrypted file, "
            "which the system deletes at the end; they need not fit into memory. device: in transformers' "
            "own cache, with the model. Default: host, or device if the model is on an accelerator.",
            unit="device|host|disk",
        ),
    ] = None
    kv_memory_gib: Annotated[
        float,
        Option(
            _CONTEXT,
            "Memory for keys and values, if {kv} is disk.",
            least=0,
            unit="GIB",
        ),
    ] = 0.0
    kv_folder: Annotated[
        Path | None,
        Option(
            _CONTEXT,
            "Folder for that file, if {kv} is disk. Default: TMPDIR, else /var/tmp.",
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
