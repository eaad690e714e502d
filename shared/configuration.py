"""Parts of an untrusted ``config.json`` that transformers would open, fetch, import or run.

Such entries are left out, and so are words that could be a path or a URL. What is left describes layers.
How a checkpoint was quantised is read here too, since it is told before torch is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from shared.encoded import UNREADABLE, decode_json
from shared.errors import CheckpointError

# Keys by which transformers finds something to load or to run. Numbers under such names are harmless.
_LOADS = re.compile(
    r"^_|auto_map|backbone|timm|path|url|file|repo|kernel|implementation|quantiz|tokenizer|processor|"
    r"checkpoint|pretrained_|compile|cache_",
    re.IGNORECASE,
)
_KERNELS = re.compile(r"^(conv|tdnn)_kernel$")  # lists of how wide convolutions are
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+ -]{0,63}")  # no separator of a path or a URL
LABELS = ("id2label", "label2id")
_LABEL = re.compile(r"[^/\\:\x00-\x1f]{1,128}")  # what a class is called: words, and no path or URL
# Built or run, these load compiled code, or models of another library, from elsewhere.
FETCHING = frozenset({"mra", "rwkv", "sam3_video", "timm_backbone", "timm_wrapper", "yoso"})
# Parts of a model that its configuration describes, and that are built of it like any other part.
BACKBONES = ("sam3_vit_model",)
SERVED = "fp8, mxfp4, compressed-tensors, or 4-bit gptq or awq"
_METHODS = ("fp8", "mxfp4", "compressed-tensors", "gptq", "awq")
_DENSE = ("F64", "F32", "F16", "BF16")
MAX_DEPTH = 6  # how far entries may be nested


def without_loading(value: Any, where: str, key: str = "", depth: int = 0) -> Any:
    """A configuration without what transformers would load.

    Args:
        value: as JSON has it.
        where: the file, for errors.

    Raises:
        CheckpointError: it is nested too deeply, or of a model that loads something when it is built.
    """
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{where}: {key[:80]} is nested too deeply")
    if key == "model_type" and isinstance(value, str) and value in FETCHING:
        raise CheckpointError(f"{where}: {value} models fetch code or weights when they are built")
    if infinite(value):
        return value
    if isinstance(value, dict):
        return {
            name: label(name, each) if key in LABELS else without_loading(each, where, name, depth + 1)
            for name, each in value.items()
            # A backbone that is described, and not named, is built like any other part.
            if keeps(key, name, each) or (name == "backbone_config" and isinstance(each, dict))
        }
    if isinstance(value, list):
        # An empty word keeps the places of what follows it.
        return [
            without_loading(each, where, key, depth + 1) for each in value if each == "" or harmless(each)
        ]
    return value


def infinite(value: Any) -> bool:
    """Whether it is infinity, as transformers writes it, since JSON lacks that."""
    if not isinstance(value, dict) or value.keys() != {"__float__"}:
        return False
    return value["__float__"] in ("Infinity", "-Infinity")


def keeps(key: str, name: str, value: Any) -> bool:
    """Whether an entry stays: of the object under ``key`` the one of this name."""
    if key in LABELS:
        return _LABEL.fullmatch(name) is not None
    if not harmless(value) or not _WORD.fullmatch(name):
        return False
    return not _LOADS.search(name) or number(value) or _widths(name, value) or _described(name, value)


def label(name: str, value: Any) -> Any:
    """A class's name or number; another name if it is neither, for names are counted."""
    fine = isinstance(value, int) or (isinstance(value, str) and _LABEL.fullmatch(value))
    return value if fine else f"LABEL_{name[:20]}"


def harmless(value: Any) -> bool:
    """Whether it is no string, or a word."""
    return not isinstance(value, str) or _WORD.fullmatch(value) is not None


def number(value: Any) -> bool:
    """Whether it is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _widths(key: str, value: Any) -> bool:
    """Whether this is how wide several convolutions are."""
    return bool(_KERNELS.search(key)) and isinstance(value, list) and all(map(number, value))


def _described(key: str, value: Any) -> bool:
    """Whether this is the configuration of a part, without anything to load."""
    return key == "backbone_config" and isinstance(value, dict) and value.get("model_type") in BACKBONES


def quantisation_of(folder: Path) -> Mapping[str, Any] | None:
    """What a ``config.json`` says of how the checkpoint was quantised; None: it was not.

    Raises:
        CheckpointError: it is no configuration.
    """
    try:
        config = decode_json((folder / "config.json").read_bytes(), dict[str, Any])
    except (OSError, *UNREADABLE) as error:
        raise CheckpointError(f"{folder}/config.json cannot be used: {error}") from error
    for part in (config, config.get("text_config")):
        said = part.get("quantization_config") if isinstance(part, dict) else None
        if isinstance(said, dict) and said:
            return said
    return None


def served_method(said: Mapping[str, Any]) -> str:
    """How a checkpoint was quantised.

    Args:
        said: its ``quantization_config``.

    Raises:
        CheckpointError: this method is not served.
    """
    bitsandbytes = said.get("load_in_4bit") or said.get("load_in_8bit")  # old ones do not name themselves
    method = str(said.get("quant_method") or ("bitsandbytes" if bitsandbytes else "no known method"))
    if method not in _METHODS:
        raise CheckpointError(
            f"the checkpoint was quantised by {method[:40]}, which is not served; serve one that was not "
            f"quantised, or by {SERVED}"
        )
    return method


def check_quantisation(folder: Path) -> None:
    """Refuse a checkpoint that was quantised by a method that is not served, unless its tensors are dense.

    Raises:
        CheckpointError: it was.
    """
    if (said := quantisation_of(folder)) is None:
        return
    try:
        served_method(said)
    except CheckpointError:
        if not all(map(_is_dense, folder.glob("*.safetensors"))):
            raise


def _is_dense(file: Path) -> bool:
    """Whether all tensors of a file are floats; what cannot be read is told when it is loaded."""
    try:
        with safe_open(file, framework="np") as tensors:
            return all(tensors.get_slice(name).get_dtype() in _DENSE for name in tensors.keys())  # noqa: SIM118
    except (OSError, SafetensorError):
        return True
