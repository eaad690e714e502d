"""A tenant's own copy of the model, for those who have one: only its frozen layers run on the executor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from shared.errors import CheckpointError, ModelMismatch
from shared.hub import checkpoint_folder
from tenant_sdk.model.naming import find_base, name_model
from tenant_sdk.session import Session
from tenant_sdk.trust.attestation import open_checkpoint


def attach_own(session: Session, name: str, base: str | None = None) -> tuple[Any, Path]:
    """A causal language model from the tenant's own checkpoint, frozen and attached; and its folder.

    Args:
        name: folder, or name at a hub (``shared.hub``).
        base: what adapters shall say that their base is; default: this.

    Raises:
        CheckpointError: it cannot be had or read.
        ModelMismatch: its linear layers' weights are not, byte for byte, those that the executor serves.
    """
    folder = checkpoint_folder(name)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype="float32", local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"no model of your own in {folder}: {error}") from error
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


def tokenizer_in(folder: Path) -> Path | None:
    """The folder, if it has a tokenizer."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    return folder if any((folder / name).is_file() for name in names) else None
