"""The name of a model's base, so that adapters say where it is found without any executor."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import NamedTuple

from torch import nn

from shared.encoded import path_text
from shared.errors import ConfigurationError
from shared.gguf import is_gguf
from shared.hub import HUB, HubId, checkpoint_folder, hub_id, id_of_snapshot, parse_hub_name, pinned
from shared.wire.messages import Manifest
from tenant_sdk.trust.attestation import base_model, open_checkpoint

log = logging.getLogger(__name__)


class Base(NamedTuple):
    """``name``: a folder, or a model's name at a hub; empty: unknown. ``revision``: at the hub."""

    name: str = ""
    revision: str | None = None

    @property
    def hub(self) -> HubId | None:
        """Of a name that is no folder here."""
        return None if Path(self.name).exists() else hub_id(self.name)


def find_base(named: str | Path, manifest: Manifest) -> Base:
    """What a tenant calls the base model that an executor serves.

    Args:
        named: a folder or a GGUF file, whose weights are compared with those that are served; a folder of
            another machine, by its absolute path; ``hub:NAME[@REVISION]``, and the hub is asked for the
            commit if it can be; or nothing.

    Raises:
        ConfigurationError: it is none of these.
        ModelMismatch: the folder holds another model.
        CheckpointError: the folder or file cannot be read; or the hub has no such model.
    """
    text = str(named)
    if not text:
        return Base()
    if is_gguf(Path(text)):  # which PEFT does not load
        text = str(checkpoint_folder(text))
        log.warning("adapters will say that their base is %s, the folder made of %s", text, named)
    if path_text(text) != text:
        raise ConfigurationError(
            f"the path {path_text(text)} of the base is not UTF-8 text, and an adapter's files cannot hold "
            "it: rename the folder, or make a link with another name"
        )
    if Path(text).is_dir():
        open_checkpoint(text, manifest)
        snapshot = id_of_snapshot(text)
        return Base(*snapshot) if snapshot else Base(text)
    if wanted := parse_hub_name(text):
        return Base(*pinned(wanted))
    if not Path(text).is_absolute():
        raise ConfigurationError(
            f"the base {text!r} is neither a folder here nor a model of a hub ({HUB}ORGANISATION/NAME, or "
            "with @REVISION); a folder of the machine that will load the adapter has an absolute path"
        )
    log.warning("there is no folder %s here; adapters will say that their base is there elsewhere", text)
    return Base(text)


def base_of_peer(manifest: Manifest) -> Base:
    """What a provider calls its model, if that is a name at a hub: never a path, nor a folder here."""
    named = hub_id(manifest.model)
    if named is None or Path(named.name).exists():
        return Base()
    return Base(named.name, named.commit)


def folder_of_peer(manifest: Manifest) -> Base:
    """The name that a provider's folder has, if it is one: good for people, but no address."""
    return Base(manifest.model if re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}", manifest.model, re.ASCII) else "")


def name_model(model: nn.Module, base: Base) -> None:
    """Set what PEFT and ``base_of`` read of a transformers model."""
    inner = base_model(model)
    inner.name_or_path = base.name  # type: ignore[assignment]
    inner.config._commit_hash = base.revision  # type: ignore[union-attr]


def base_of(model: nn.Module) -> Base:
    """What a transformers model, also below a PEFT model, says that it was loaded from."""
    inner = base_model(model)
    name = str(getattr(inner, "name_or_path", "") or "")
    if snapshot := id_of_snapshot(name):
        return Base(*snapshot)
    base = Base(name)
    return Base(name, getattr(inner.config, "_commit_hash", None) if base.hub else None)


def plain_name(text: str) -> str:
    """A peer's word for something, without what means anything to Markdown, a terminal or a file system."""
    return re.sub(r"[^\w.@/-]", "?", text[:200], flags=re.ASCII)
