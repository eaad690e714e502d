"""A tenant's own parts: a copy of the model, of which only frozen layers run remotely; a tokenizer.

A tokenizer is a tenant's own if its folder was named for that (``--tokenizer``, ``--model``), and in no other
case. It decides how many rows a text has, which the provider sees, and its options may name files to read.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers import logging as transformers_logging

from shared.buffers import check_loading
from shared.checkpoint import Checkpoint
from shared.configuration import quantisation_of
from shared.encoded import OF_WEIGHTS, check_texts
from shared.errors import CheckpointError, ConfigurationError, ModelMismatch, OptionText
from shared.hub import checkpoint_folder, lies_within
from shared.recipes import bounded_build, config_in
from tenant_sdk.model.configuration import generation_configuration, read_configuration
from tenant_sdk.model.loading import check_causal
from tenant_sdk.model.naming import find_base, name_model
from tenant_sdk.session.session import Session
from tenant_sdk.storage import ADAPTER_CONFIG, disk_errors
from tenant_sdk.trust.attestation import open_checkpoint
from tenant_sdk.tuning.sampling import ends_of


def load(
    session: Session, tokenizer: Path | None, local_model: str | None, base: str | None = None, *, bars: bool
) -> tuple[Any, Any]:
    """A model, on an accelerator if there is one, and its tokenizer, as the command line wants them.

    Args:
        tokenizer: folder that the user has named.
        local_model: the user's own copy of the model, see ``attach_local_model``.
        base: see there.
        bars: show progress bars, which need a terminal.

    Raises:
        ConfigurationError: there is no such tokenizer, or it has more tokens than the model.
    """
    # Warnings of transformers are for those who wrote the code that calls it.
    transformers_logging.set_verbosity_error()
    if not bars:  # where a bar is drawn anew, each time a line
        transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    with disk_errors(Path(tempfile.gettempdir()), "temporary files", "Then run again."):
        loaded = None
        if tokenizer is not None:  # before anything large is loaded
            loaded = local_tokenizer(tokenizer, embedded(read_configuration(session.executor)[0]))
        model: Any
        if local_model is None:
            check_causal(session.executor)
            model = session.load_model(base=base, progress=bars)
        else:
            model, folder = attach_local_model(session, local_model, base)
            if loaded is None and tokenizer_in(folder):
                loaded = local_tokenizer(folder)
        if loaded is None:
            loaded = session.load_tokenizer()
    if torch.cuda.is_available():
        return model.to("cuda"), loaded
    os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")  # no copies of keys and values for every head
    return model, loaded


def attach_local_model(session: Session, name: str, base: str | None = None) -> tuple[Any, Path]:
    """A causal language model from the tenant's own checkpoint, frozen and attached; and its folder.

    Args:
        name: folder, or ``hub:NAME[@REVISION]`` (``shared.hub``).
        base: what adapters shall say that their base is; default: this.

    Raises:
        CheckpointError: it cannot be had or read.
        ConfigurationError: the executor serves no causal language model.
        ModelMismatch: its linear layers' weights are not, byte for byte, those that the executor serves.
    """
    folder = checkpoint_folder(name)
    if (folder / ADAPTER_CONFIG).exists():  # transformers would put that into the model, unsaid
        raise CheckpointError(
            "{} holds an adapter beside the model: move it to a folder of its own, and give that with "
            "{adapter}",
            str(folder),
        )
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        checkpoint = Checkpoint(folder)
        tensors = len(checkpoint.names())
        config = config_in(folder, tensors)
        check_causal(session.executor, config)
        with torch.device("meta"), bounded_build(f"{folder}/config.json", tensors):
            blank = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        check_loading(blank, checkpoint.file_bytes(), str(folder))
        if said := quantisation_of(folder):
            config.quantization_config = said
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype="float32", use_safetensors=True, **local
        )
    except (ImportError, OSError, ValueError, RecursionError, SafetensorError) as error:
        raise CheckpointError(
            "no model of your own in {}: {}. Leave out {model}: then the provider's dense weights are used",
            *(str(folder), _reason(str(error))),
        ) from error
    try:
        open_checkpoint(folder, session.manifest)
    except ModelMismatch as error:
        raise ModelMismatch(
            OptionText(
                "{}. Give the very checkpoint that the executor serves, or give none to download the "
                "necessary parts",
                error.structured_message,
            )
        ) from error
    generates = folder / "generation_config.json"
    data = generates.read_bytes() if generates.is_file() else None
    model.generation_config = generation_configuration(data, model.config, f"{folder}/")
    session.attach(model.requires_grad_(False).eval())
    if base is not None:
        name_model(model, find_base(base, session.manifest))
    return model, folder


@dataclass(frozen=True)
class TokenizerInfo:
    """A tokenizer, and what a model says of it.

    ``ends``: ids of the tokens at which `generate` stops. ``embeddings``: how many tokens the model knows;
    None: it is not at hand.
    """

    tokenizer: Any
    ends: tuple[int, ...]
    embeddings: int | None = None


def tokenizer_info_of(session: Session) -> TokenizerInfo:
    """The executor's tokenizer.

    Raises:
        ConfigurationError: it serves none.
        ModelMismatch: its files are refused.
    """
    config, generation = read_configuration(session.executor)
    tokenizer = session.load_tokenizer()
    return TokenizerInfo(tokenizer, ends_of(generation, tokenizer), embedded(config))


def tokenizer_info_in(folder: Path) -> TokenizerInfo:
    """The tokenizer of a folder of the user's own, in which the model's configuration may be too.

    Raises:
        ConfigurationError: there is no tokenizer in it.
    """
    tokenizer = local_tokenizer(folder)
    generation, embeddings = GenerationConfig(), None
    try:
        if (folder / "config.json").is_file():
            embeddings = embedded(config_in(folder))
        if (folder / "generation_config.json").is_file():
            generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"the configuration in {folder} cannot be read: {error}") from error
    return TokenizerInfo(tokenizer, ends_of(generation, tokenizer), embeddings)


def embedded(config: Any) -> int | None:
    """How many tokens a model of this configuration knows."""
    return getattr(config.get_text_config(), "vocab_size", None)


def _reason(error: str) -> str:
    """The first line of an error; of hundreds of configuration classes, only the one that was not found."""
    if unknown := re.match(r"Unrecognized configuration class <class '[\w.]*?(\w+)'>", error):
        return f"AutoModelForCausalLM does not load a {unknown[1]}"
    return error.partition("\n")[0][:200].rstrip(". ")


def local_tokenizer(folder: Path, embeddings: int | None = None) -> Any:
    """The tokenizer of a folder that its user has named.

    Args:
        embeddings: how many tokens the model knows; None: that is not looked at.

    Raises:
        ConfigurationError: there is none, or no such folder; or it has tokens that the model does not know.
    """
    if not folder.is_dir():  # transformers would look for a model of that name
        raise ConfigurationError(f"there is no folder {folder} to take a tokenizer from")
    check_texts(folder)
    for file in (*folder.glob("*"), *folder.glob("additional_chat_templates/*")):
        if file.suffix not in OF_WEIGHTS and not lies_within(folder, file):
            raise ConfigurationError(
                f"{file} is a link to {os.path.realpath(file)}, which is not in that folder, and would be "
                "saved beside adapters. If that is what you want, put a copy into the folder"
            )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # every class of transformers has errors of its own for files that it lacks
        raise ConfigurationError(f"no tokenizer in {folder}: {str(error) or repr(error)}") from error
    if embeddings is not None and len(tokenizer) > embeddings:
        raise ConfigurationError(
            f"the tokenizer in {folder} has {len(tokenizer)} tokens, and the model has embeddings for "
            f"{embeddings}. Tokens that were added to it (`add_special_tokens`) cannot be used: give the "
            "model's own tokenizer, or use tokens that it has already"
        )
    return tokenizer


def tokenizer_ignored_message(adapter: Path) -> OptionText:
    """Returns the message about a tokenizer that came with an adapter, whose author may be the provider."""
    return OptionText(
        "the tokenizer in {} is not used: it decides how many tokens a text has, which the provider sees. If "
        "you trust its author: {tokenizer}",
        str(adapter),
        tokenizer=shlex.quote(str(adapter)),
    )


def tokenizer_in(folder: Path) -> Path | None:
    """The folder, if it has a tokenizer."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    return folder if any((folder / name).is_file() for name in names) else None
