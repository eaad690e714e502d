"""GGUF files: each becomes a checkpoint folder, once, by transformers' own reader.

The weights of the folder are dense: what a block of the file stands for, as transformers computes it, in
float32, and so the same for everybody who has the file and the same version of transformers.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from shared.encoded import path_text
from shared.errors import CheckpointError

log = logging.getLogger(__name__)

_MAGIC = b"GGUF"
_DONE = "config.json"  # written last


def is_gguf(path: Path) -> bool:
    """Whether it is a file of this kind, by its name or its first bytes."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return path.suffix.lower() == ".gguf" or file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def check_gguf(file: Path) -> None:
    """Refuse what cannot be read, before anything is imported that takes seconds.

    Raises:
        CheckpointError: it is damaged, one part of several, or the package gguf is not installed.
    """
    try:
        with file.open("rb") as opened:
            begins = opened.read(len(_MAGIC))
    except OSError as error:
        raise CheckpointError(f"cannot read {path_text(file)}: {error.strerror}") from error
    if begins != _MAGIC:
        raise CheckpointError(f"{path_text(file)} is no GGUF file, whatever its name says: it is damaged")
    if "-of-0" in file.stem:
        raise CheckpointError(
            f"{path_text(file)} is one part of several: put them together with `llama-gguf-split --merge`"
        )
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError(
            "GGUF files need the package gguf: pip install '.[gguf]' in a checkout of this project"
        )


def folder_of(file: Path) -> Path:
    """The checkpoint folder that a file was made into, now or before, in the user's cache.

    It takes four bytes for each weight there.

    Raises:
        CheckpointError: see ``check_gguf``; or transformers cannot read the file, or there is no room.
    """
    check_gguf(file)
    base = Path(os.path.expanduser("~/.cache"), os.environ.get("XDG_CACHE_HOME", ""), "symbiosis", "gguf")
    try:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        folder = base / digest[:32] / file.stem
        if (folder / _DONE).is_file():
            return folder
        log.warning("making a checkpoint folder of %s, once: %s", path_text(file), path_text(folder))
        write_folder(file, folder)
    except OSError as error:
        raise CheckpointError(
            f"cannot make a checkpoint folder of {path_text(file)} below {path_text(base)}: "
            f"{error.strerror}; XDG_CACHE_HOME names another place"
        ) from error
    return folder


def write_folder(file: Path, folder: Path) -> None:
    """Make a file into a checkpoint folder, which is whole or absent.

    Raises:
        CheckpointError: see ``check_gguf``; or transformers cannot read the file.
        OSError: the folder cannot be written.
    """
    check_gguf(file)
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as made:
        # Alone: transformers would read adapters and tokenizers that lie beside it.
        alone, written = Path(made) / "alone", Path(made) / "written"
        alone.mkdir()
        (alone / "model.gguf").symlink_to(file.absolute())
        _convert(alone / "model.gguf", written, path_text(file))
        shutil.rmtree(folder, ignore_errors=True)
        written.rename(folder)


def _convert(file: Path, folder: Path, called: str) -> None:
    """Write the model, its tokenizer and its configuration.

    Raises:
        CheckpointError: transformers cannot read the file.
        OSError: they cannot be written.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **found)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **found)
    except Exception as error:  # whatever a file says that transformers does not expect
        raise CheckpointError(
            f"transformers cannot read {called}: {str(error)[:300] or repr(error)}"
        ) from error
    vars(model).pop("hf_quantizer", None)  # or transformers would refuse to write it
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    config = folder / _DONE
    said = json.loads(config.read_bytes())
    said.pop("quantization_config", None)
    config.write_text(json.dumps(said, indent=2) + "\n")
