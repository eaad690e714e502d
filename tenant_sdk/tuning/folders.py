"""Folders of adapters: standard ones of PEFT, with a note about their base."""

from __future__ import annotations

import inspect
import logging
import tempfile
from pathlib import Path
from typing import Any

from peft import PeftModel

from shared.errors import ConfigurationError
from shared.options import closest
from tenant_sdk.model.naming import base_of, find_base, folder_of_peer
from tenant_sdk.model.remote_weight import RemoteWeight
from tenant_sdk.session.session import Session
from tenant_sdk.storage import disk_errors
from tenant_sdk.trust.attestation import base_model
from tenant_sdk.tuning.adapters import without_false_warnings
from tenant_sdk.tuning.provenance import Provenance, training_of, write_card
from tenant_sdk.tuning.untrusted_adapter import copy_and_check

log = logging.getLogger(__name__)


def save_adapter(
    model: Any,
    folder: str | Path,
    session: Session,
    *,
    adapter: str | None = None,
    base: str | Path | None = None,
    training: Any = None,
    tokenizer: Any = None,
    **options: Any,
) -> None:
    """Save the adapter of a PEFT model and the record of its base, without requests to a model hub.

    The folder has PEFT's format, so PEFT alone can load it. It also holds a model card and
    ``symbiosis.json``, which records the base's digests, numerics, privacy mode and training.

    Args:
        model: PEFT model whose frozen layers belong to the session.
        folder: Folder for the adapter. It is made if it does not exist.
        session: Session of the model.
        adapter: Name of the adapter to save, if the model has several. Default: all adapters. Each adapter
            except ``default`` then gets a folder with its name, as in PEFT.
        base: Place of the base model, as for ``session.load_model``. Default: the place that the model has,
            else the provider's name for the model.
        training: ``transformers.Trainer`` that trained the adapter, or figures by name. See ``training_of``.
        tokenizer: Another tokenizer than the base's, to save with the adapter. `generate --tokenizer` takes
            it from there.
        options: Other arguments of PEFT's ``save_pretrained``.

    Raises:
        ConfigurationError: The model is no PEFT model or has no such adapter, ``base`` is neither a folder
            nor the name of a model on a hub, or there is no such argument.
        ModelMismatch: ``base`` is another model.
    """
    configs = getattr(model, "peft_config", None)
    if not configs or not hasattr(model, "save_pretrained"):
        raise ConfigurationError(f"{type(model).__name__} has no adapter; make one with peft.get_peft_model")
    passed_on = {*inspect.signature(PeftModel.save_pretrained).parameters, "state_dict"}
    parameters = {*inspect.signature(save_adapter).parameters}
    for name in options.keys() - passed_on:  # PEFT would say nothing
        raise ConfigurationError(
            f"save_adapter({name}=...): there is no such argument, and PEFT's save_pretrained has none; "
            + (
                closest(name, parameters | passed_on)
                or f"there are {', '.join(sorted(parameters | passed_on))}"
            )
        )
    if adapter not in (None, *configs):
        raise ConfigurationError(f"adapter={adapter!r}: the model has {', '.join(configs)}")
    named_base = base_of(model) if base is None else find_base(base, session.manifest)
    called = named_base if named_base.name or base is not None else folder_of_peer(session.manifest)
    for config in configs.values():
        config.base_model_name_or_path, config.revision = called.name or None, called.revision
    # PEFT's own default would ask a hub how large the vocabulary was.
    options = {"save_embedding_layers": bool(_resized(model, session))} | options
    if adapter is None:
        model.save_pretrained(str(folder), **options)
    else:
        _save_one(model, Path(folder), adapter, options)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
    entries = training_of(training) if hasattr(training, "state") else training or {}
    record = Provenance.of(session, entries)
    record.write(Path(folder))
    write_card(Path(folder), record, named_base, configs[adapter] if adapter else model.active_peft_config)


def _resized(model: Any, session: Session) -> list[str]:
    """Names of the parameters of a model's embeddings and head, if they are not the base's any more."""
    embeddings = model.get_input_embeddings()
    supplied = {info.shape for info in session.manifest.parameters}
    if embeddings is None or tuple(embeddings.weight.shape) in supplied:
        return []
    layers = (embeddings, model.get_output_embeddings())
    base = base_model(model)
    return [f"{name}.weight" for name, each in base.named_modules() if any(each is one for one in layers)]


def _save_one(model: Any, folder: Path, adapter: str, options: dict[str, Any]) -> None:
    """PEFT's files of one adapter, not in a folder of its name."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        model.save_pretrained(temporary, selected_adapters=[adapter], **options)
        for file in (Path(temporary) / ("" if adapter == "default" else adapter)).iterdir():
            file.replace(folder / file.name)


def load_adapter(
    model: Any,
    folder: str | Path,
    session: Session,
    *,
    allow_other_base: bool = False,
    trainable: bool = False,
) -> Any:
    """Returns a PEFT model with the adapter of a folder in PEFT's format.

    The folder may come from anybody. This function runs no code from it, follows no reference to another file
    or a model hub, and does not read a tokenizer in it.

    Args:
        model: Model whose frozen layers belong to the session. It gets the adapter, in place.
        folder: Folder of the adapter.
        session: Session of the model.
        allow_other_base: Load an adapter that was made for another base. A folder without ``symbiosis.json``
            does not name its base, so its adapter is always loaded.
        trainable: Let the adapter be trained further. Default: only inference.

    Raises:
        ConfigurationError: The folder has no adapter, or the adapter is damaged or of a kind that is not
            supported.
        ModelMismatch: The adapter was made for another base model.
    """
    source = Path(folder)
    if hasattr(model, "peft_config"):
        raise ConfigurationError(f"{type(model).__name__} has an adapter already; give the base model")
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary)
        with disk_errors(copy, f"a copy of {source}", "TMPDIR names another place."):
            checked = copy_and_check(source, copy, model, own_modules=_resized(model, session))
        record = None if allow_other_base else Provenance.read(copy, source)
        if record is not None and (differs := record.check(session.manifest, source)):
            log.warning("%s", differs)
        base = dict(model.named_parameters())
        versions = {name: each._version for name, each in base.items() if not isinstance(each, RemoteWeight)}
        try:
            with without_false_warnings(""):
                loaded = PeftModel.from_pretrained(
                    model, temporary, config=checked.config, is_trainable=trainable
                )
        except Exception as error:  # what nobody has seen of a model, or of a later PEFT
            raise ConfigurationError(f"cannot read the adapter in {source}: {error}") from error
    # Whatever PEFT makes of the names in the file.
    for name, version in versions.items():
        if base[name]._version != version and name not in checked.overwritten:
            raise ConfigurationError(
                f"the adapter in {source} has written over {name} of the base model: load the model again"
            )
    return loaded
