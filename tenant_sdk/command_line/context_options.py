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
            "File with the prompt, in UTF-8, instead of {prompt}. The prompt may have any length; it is "
            "read in chunks.",
            unit="FILE",
        ),
    ] = None
    chat: Annotated[
        bool,
        Option(
            _PROMPT,
            "Treat the prompt as a user's message to a chat model and write the answer: the tokenizer's "
            "chat template puts the prompt into a conversation. Without this, the model continues the "
            "prompt as it is.",
        ),
    ] = False
    adapter: Annotated[
        Path | None, Option(_PROMPT, "Folder of an adapter, as finetune writes it.", unit="FOLDER")
    ] = None
    allow_other_base: Annotated[bool, Option(_PROMPT, "Load an adapter that was made for another model.")] = (
        False
    )
    quiet: Annotated[bool, Option(_PROMPT, "Print no figures at the end.")] = False

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
            "Where keys and values of the context are. host: in buffers in this machine's memory. disk: "
            "in an encrypted file without a name, which the system deletes at the end, so they need not "
            "fit into memory. device: as transformers keeps them. Default: host, or device on an "
            "accelerator.",
            unit="device|host|disk",
        ),
    ] = None
    kv_memory_gib: Annotated[
        float,
        Option(
            _CONTEXT,
            "Keys and values that stay in memory, if {kv} is disk.",
            least=0,
            unit="GIB",
        ),
    ] = 0.0
    kv_folder: Annotated[
        Path | None,
        Option(
            _CONTEXT,
            "Folder for the file, if {kv} is disk. Default: TMPDIR, else /var/tmp.",
            unit="FOLDER",
        ),
    ] = None
    memory_gib: Annotated[
        float,
        Option(
            _CONTEXT,
            "Memory for reading a chunk of the prompt, in addition to keys and values.",
            unit="GIB",
        ),
    ] = 1.0

    def __post_init__(self) -> None:
        """Refuse values out of bounds."""
        check_fields(self)
