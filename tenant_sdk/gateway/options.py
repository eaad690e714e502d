"""The options of a gateway, beside those of its session."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from shared.errors import ConfigurationError, OptionReference, OptionText
from shared.hosts import LOOPBACK
from shared.options import Option, check_fields
from shared.secrets import Secret, text_of
from tenant_sdk.drafts.card import draft_folders
from tenant_sdk.drafts.options import MAX_GUESSES
from tenant_sdk.products.modes import Privacy

if TYPE_CHECKING:
    from tenant_sdk.session.options import SessionConfig

_SERVER, _MODEL = "Server", "Model and adapters"
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has memory laid out for
LOOKUP = "prompt-lookup"
DRAFT_TOKENS = 4
DEFAULT_PATIENCE = 10.0  # seconds; clients wait as long
# Options of its sessions that the gateway decides.
DECIDED: dict[str, Any] = {"experts": "local", "fill_masks": True}


@dataclass(frozen=True, kw_only=True)
class GatewayOptions:
    """What the server of ``symbiosis-tenant serve`` is given.

    Raises:
        ConfigurationError: a value is out of bounds, or does not fit the others.
    """

    adapters: Annotated[
        Path | None,
        Option(
            _MODEL,
            "Folder that contains folders of LoRA adapters. A client selects an adapter by giving its "
            "folder's name as the model. Changes of the folder take effect while the server runs.",
            unit="FOLDER",
        ),
    ] = None
    host: Annotated[
        str,
        Option(
            _SERVER, "Address to listen on. An address other than loopback needs {api_key}.", unit="ADDRESS"
        ),
    ] = "127.0.0.1"
    port: Annotated[int, Option(_SERVER, "Port to listen on.", minimum=1, maximum=65535)] = 8000
    api_key: Annotated[
        str | Secret,
        Option(
            _SERVER,
            "API keys for clients, each of 16 characters or more, separated by spaces. Without keys, only "
            "clients on this machine are served.",
            confidential="the API keys for clients, separated by spaces",
        ),
    ] = field(default="", repr=False)
    name: Annotated[
        str,
        Option(
            _MODEL,
            "Name by which clients request the model without an adapter. Default: the provider's "
            "name of the model.",
            unit="NAME",
        ),
    ] = ""
    allow_other_base: Annotated[
        bool, Option(_MODEL, "Do not refuse adapters that were made for another model.")
    ] = False
    chat_template: Annotated[
        Path | None,
        Option(
            _MODEL,
            "Jinja file with a chat template. Default: the tokenizer's, if it has one.",
            unit="FILE",
        ),
    ] = None
    tool_parser: Annotated[
        str,
        Option(
            _MODEL,
            "vLLM's parser for tool calls: hermes, llama3_json, mistral and others; or none. Default: "
            "hermes, if the chat template writes calls in this form. Other parsers are slow for some "
            "answers.",
            unit="NAME",
        ),
    ] = ""
    context: Annotated[
        int | None,
        Option(
            _MODEL,
            "Maximum length of prompt and answer together. Default: the model's limit, or with LongRoPE the "
            "length up to which the position frequencies do not depend on the length of the text.",
            minimum=2,
            unit="TOKENS",
        ),
    ] = None
    dtype: Annotated[
        str,
        Option(
            _MODEL,
            "Element type of activations, keys and values: float32 or bfloat16.",
            choices=("float32", "bfloat16"),
            unit="NAME",
        ),
    ] = "float32"
    max_sequences: Annotated[
        int, Option(_SERVER, "Maximum number of sequences that one step computes.", minimum=1)
    ] = 32
    max_waiting: Annotated[
        int,
        Option(_SERVER, "Maximum number of sequences that wait. Further requests get status 429.", minimum=0),
    ] = 64
    kv_memory_gib: Annotated[
        float,
        Option(
            _MODEL,
            "Memory for keys and values of all sequences.",
            minimum=0,
            exclusive_minimum=True,
            unit="GIB",
        ),
    ] = 1.0
    max_adapters: Annotated[
        int,
        Option(
            _MODEL,
            "Maximum number of different adapters in one step. Each adapter takes memory in all layers.",
            minimum=1,
        ),
    ] = 16
    max_rank: Annotated[
        int | None,
        Option(
            _MODEL,
            "Largest rank of adapters: 8, 16, 32, 64, 128, 256, 320 or 512. Default: enough for all adapters "
            "in the folder at the start, and at least 16.",
            choices=RANKS,
            unit="RANK",
        ),
    ] = None
    no_constraints: Annotated[
        bool,
        Option(
            _MODEL, "Refuse requests for structured outputs (JSON schemas, patterns, choices and grammars)."
        ),
    ] = False
    prefix_cache: Annotated[
        bool,
        Option(
            _MODEL,
            "Keep keys and values of prompts, and use them for prompts that begin in the same way. The "
            "provider can then see that a prompt begins as an earlier one, because it has fewer rows. Other "
            "clients can see it, because they wait less.",
        ),
    ] = False
    speculate: Annotated[
        str,
        Option(
            _MODEL,
            "Guess several tokens and check them in one step. FOLDER has a draft (docs/how-to/distance.md), "
            "several drafts (for the base model and for adapters), or a small model, which makes the "
            "guesses. prompt-lookup: guesses are taken from the text so far. The number of steps then tells "
            "the provider something about the text (docs/how-to/gateway.md).",
            unit="prompt-lookup|FOLDER",
        ),
    ] = ""
    draft_tokens: Annotated[
        int | None,
        Option(
            _MODEL,
            f"Maximum number of tokens that are guessed at once. Default: {DRAFT_TOKENS}.",
            minimum=1,
            maximum=MAX_GUESSES,
        ),
    ] = None
    ready_file: Annotated[
        Path | None,
        Option(_SERVER, "File to which the URL is written when the server is ready.", unit="FILE"),
    ] = None

    def __post_init__(self) -> None:
        """Refuse what cannot be, before anything takes time."""
        check_fields(self)
        if self.host not in LOOPBACK and not self.api_key:
            raise ConfigurationError(
                "{host} lets others in: give {api_key}, the variable with the key that they need",
                host=self.host,
            )
        if self.adapters is not None and not self.adapters.is_dir():
            raise ConfigurationError(f"there is no such folder: {self.adapters}; make it, it may be empty")
        if self.max_rank is not None and self.adapters is None:
            raise ConfigurationError(OptionText("{max_rank} is for adapters: give {adapters} too"))
        if self.draft_tokens is not None and not self.speculate:
            raise ConfigurationError(OptionText("{draft_tokens} is for {speculate}: give that too"))
        if self.chat_template is not None and not self.chat_template.is_file():
            raise ConfigurationError(
                "{chat_template}: there is no such file", chat_template=self.chat_template
            )
        small = (Path(self.speculate) / "config.json").is_file()
        if self.speculate not in ("", LOOKUP) and not small and not self.drafts:
            raise ConfigurationError(
                "{speculate}: give {}, or the folder of a draft, of several drafts, or of a small model with "
                "the same tokenizer, which then runs here",
                LOOKUP,
                speculate=self.speculate,
            )
        self._check_keys()

    def _check_keys(self) -> None:
        if self.api_key and not self.keys:
            raise ConfigurationError(OptionText("{api_key} holds no API key"))
        if any(len(key) < 16 or not key.isascii() or not key.isprintable() for key in self.keys):
            raise ConfigurationError("an API key has at least 16 printable ASCII characters")
        for name in ("max_sequences", *(["max_adapters"] if self.adapters is not None else [])):
            if getattr(self, name) < len(self.keys):
                raise ConfigurationError(
                    "{} is less than one for each of {} keys: give a larger one",
                    OptionReference(name, getattr(self, name)),
                    len(self.keys),
                )

    def session_config(self, config: SessionConfig) -> SessionConfig:
        """The options of the gateway's sessions.

        Raises:
            ConfigurationError: the gateway cannot have such sessions.
        """
        if self.speculate and not Privacy(config.privacy).hides_zeros:
            raise ConfigurationError(
                "{speculate} pads requests with rows of zeros, which {privacy} would show; use it with "
                "one-time masks",
                privacy=config.privacy,
            )
        if config.experts not in (None, DECIDED["experts"]):
            raise ConfigurationError(
                "{experts}: a gateway multiplies experts itself; leave it out, or give local",
                experts=config.experts,
            )
        return dataclasses.replace(config, **DECIDED)

    @property
    def max_in_flight(self) -> int:
        """Sequences that are in flight at once, computed or waiting."""
        return self.max_sequences + self.max_waiting

    @property
    def drafts(self) -> Sequence[Path]:
        """Folders of the drafts that guess tokens; without any, something else does, or nothing."""
        return () if self.speculate in ("", LOOKUP) else draft_folders(Path(self.speculate))

    @property
    def keys(self) -> Sequence[str]:
        """The API keys; empty: clients on this machine need none."""
        return tuple(text_of(self.api_key).split())
