"""GGUF files: each becomes a checkpoint folder, once, by transformers' own reader.

The weights of the folder are dense: what a block of the file stands for, as transformers computes it, in
float32, and so the same for everybody who has the file and the same version of transformers.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.encoded import path_text
from shared.errors import CheckpointError
from shared.ownership import check_tree

log = logging.getLogger(__name__)

_MAGIC = b"GGUF"
_LONGEST_TOKEN = 1024  # bytes
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
        folder = base / digest[:32] / (file.stem.strip(".") or "model")
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Provider and mask source of a trial begin at the same time.
        with (folder.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (folder / _DONE).is_file():
                check_tree(folder)
            else:
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
    names = _names_in(file)
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as made:
        # Alone: transformers would read adapters and tokenizers that lie beside it.
        alone, written = Path(made) / "alone", Path(made) / "written"
        alone.mkdir()
        (alone / "model.gguf").symlink_to(file.absolute())
        _convert(alone / "model.gguf", written, path_text(file), names)
        shutil.rmtree(folder, ignore_errors=True)
        written.rename(folder)


def _names_in(file: Path) -> list[str]:
    """The tensors of a file that transformers neither takes for ever to read nor leaves out in part.

    Raises:
        CheckpointError: what it is.
    """
    from gguf import GGUFReader

    called = path_text(file)
    try:
        reader = GGUFReader(file)
        fields, tensors = reader.fields, {tensor.name: tensor for tensor in reader.tensors}
        architecture = str(fields["general.architecture"].contents())
        blocks = int(fields[f"{architecture}.block_count"].contents())
        tokens = fields["tokenizer.ggml.tokens"]
        longest = max((len(tokens.parts[at]) for at in tokens.data), default=0)
        width = int(fields[f"{architecture}.embedding_length"].contents())
        widths = {int(size) for size in tensors["token_embd.weight"].shape}
    except Exception as error:  # whatever a damaged file makes of its reader
        raise CheckpointError(f"{called} has a header that cannot be used: {str(error)[:200]!r}") from error
    found = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    if blocks != len(found) or width not in widths:
        raise CheckpointError(
            f"{called} says {blocks} blocks of width {width}, and has tensors of {len(found)} blocks, with "
            f"widths {sorted(widths)}: it is damaged"
        )
    if longest > _LONGEST_TOKEN:
        raise CheckpointError(f"{called} has a token of {longest:,} bytes; {_LONGEST_TOKEN:,} are the most")
    scaled = [name for name in fields if ".rope.scaling." in name]
    lost = [name for name in scaled if str(fields[name].contents()) != "none"]
    lost += [name for name in tensors if name.startswith("rope_")]
    if lost:
        raise CheckpointError(
            f"{called} has {lost[0]}, which transformers leaves out when it reads GGUF files: another model "
            "would be served. Use the model's safetensors"
        )
    return list(tensors)


def _convert(file: Path, folder: Path, called: str, names: Sequence[str]) -> None:
    """Write the model, its tokenizer and its configuration.

    Args:
        names: of the file's tensors.

    Raises:
        CheckpointError: transformers cannot read the file.
        OSError: they cannot be written.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=torch.float32, output_loading_info=True, **found
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **found)
    except Exception as error:  # whatever a file says that transformers does not expect
        raise CheckpointError(
            f"transformers cannot read {called}: {str(error)[:300] or repr(error)}"
        ) from error
    model, told = loaded
    if missing := sorted(told["missing_keys"]):
        raise CheckpointError(f"{called} lacks {missing[0][:100]}, which would be made of random numbers")
    for kind in (".weight", ".bias"):  # experts' are put together, or taken apart
        given = [name for name in names if name.endswith(kind) and "_exps" not in name]
        taken = [name for name in model.state_dict() if name.endswith(kind) and ".experts." not in name]
        if len(given) > len(taken):
            raise CheckpointError(
                f"{called} has {len(given)} tensors {kind[1:]}, and transformers' model has {len(taken)}: "
                "another model would be served. Use the model's safetensors"
            )
    vars(model).pop("hf_quantizer", None)  # or transformers would refuse to write it
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    config = folder / _DONE
    said = json.loads(config.read_bytes())
    said.pop("quantization_config", None)
    config.write_text(json.dumps(said, indent=2) + "\n")
