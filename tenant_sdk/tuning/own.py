"""What is a tenant's own: a copy of the model, of which only frozen layers run remotely; a tokenizer.

A tokenizer is a tenant's own if its folder was named for that (``--tokenizer``, ``--model``), and in no other
case. It decides how many rows a text has, which the provider sees, and its options may name files to read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from shared.errors import CheckpointError, ConfigurationError, ModelMismatch
from shared.hub import checkpoint_folder
from tenant_sdk.model.loading import check_causal
from tenant_sdk.model.naming import find_base, name_model
from tenant_sdk.session import Session
from tenant_sdk.trust.attestation import open_checkpoint


def attach_own(session: Session, name: str, base: str | None = None) -> tuple[Any, Path]:
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
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        check_causal(session.executor, AutoConfig.from_pretrained(folder, **local))
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype="float32", use_safetensors=True, **local
        )
    except (ImportError, OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"no model of your own in {folder}: {_reason(str(error))}. Leave out --model: then the "
            "provider's dense weights are used"
        ) from error
    try:
        open_checkpoint(folder, session.manifest)
    except ModelMismatch as error:
        raise ModelMismatch(
            f"{error.message}. Give the very checkpoint that the executor serves, or none: then all that is "
            "needed of it is downloaded"
        ) from error
    session.attach(model.requires_grad_(False).eval())
    if base is not None:
        name_model(model, find_base(base, session.manifest))
    return model, folder


def _reason(error: str) -> str:
    """The first line of an error; of hundreds of configuration classes, only the one that was not found."""
    if unknown := re.match(r"Unrecognized configuration class <class '[\w.]*?(\w+)'>", error):
        return f"AutoModelForCausalLM does not load a {unknown[1]}"
    return error.partition("\n")[0][:200].rstrip(". ")


def own_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder that its user has named.

    Raises:
        ConfigurationError: there is none, or no such folder.
    """
    if not folder.is_dir():  # transformers would look for a model of that name
        raise ConfigurationError(f"there is no folder {folder} to take a tokenizer from")
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"no tokenizer in {folder}: {error}") from error


def not_used(adapter: Path) -> str:
    """What to say of a tokenizer that came with an adapter, whose author may be the provider."""
    return (
        f"the tokenizer in {adapter} is not used: it decides how many tokens a text has, which the provider "
        f"sees. If you trust its author: --tokenizer {adapter}"
    )


def tokenizer_in(folder: Path) -> Path | None:
    """The folder, if it has a tokenizer."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    return folder if any((folder / name).is_file() for name in names) else None
