"""The adapters that a gateway serves: what is checked of a folder before vLLM reads it, and copies of it."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from shared.errors import ConfigurationError, Message
from tenant_sdk.gateway.options import RANKS
from tenant_sdk.storage import ADAPTER_CONFIG as CONFIG
from tenant_sdk.storage import ADAPTER_WEIGHTS as WEIGHTS
from tenant_sdk.storage import check_adapter_folder, check_below, copy_file, disk_errors
from tenant_sdk.tuning.patterns import without_patterns
from tenant_sdk.tuning.provenance import RECORD, Provenance

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from shared.wire.messages import Manifest

USUAL_RANK = 16
_FLOATS = ("F64", "F32", "F16", "BF16")
VALUES = 256  # of a table: each becomes a pattern, and Python keeps 512 of them compiled
PREFIX = "base_model.model."
_WORDS_BYTES = 1 << 20  # of configurations, and of what a file has beside its numbers
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:-]{0,199}")
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# Of PEFT's configuration: what changes the product, and the value with which it does not.
_PLAIN: dict[str, Collection[Any]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "use_bdlora": (None,),
    "alora_invocation_tokens": (None,),
    "layer_replication": (None,),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "megatron_config": (None,),
}


@dataclass(frozen=True)
class Adapter:
    """One that is served.

    Attributes:
        name: the ``model`` of requests.
        source: its folder.
        folder: a copy, which does not change, under a name that no other content has.
        rank: the largest of its layers.
        notes: what its user should know.
    """

    name: str
    source: Path
    folder: Path
    rank: int
    notes: str = ""


def folders_in(folder: Path) -> Iterator[Path]:
    """The adapters below a folder, by name; what begins with a dot is being written."""
    for path in sorted(folder.iterdir()):
        if not path.name.startswith(".") and (path / CONFIG).is_file():
            yield path


def mark_of(folder: Path) -> object:
    """What changes when an adapter's files do, without reading them."""
    found = []
    for name in (CONFIG, WEIGHTS, RECORD):
        try:
            state = (folder / name).stat()
            found.append((state.st_mtime_ns, state.st_size, state.st_ino))
        except OSError:
            found.append((0, 0, 0))
    return found


def largest_rank(folder: Path) -> int:
    """The smallest of ``RANKS`` that every adapter below a folder fits into, at least ``USUAL_RANK``.

    Unreadable ones do not count.
    """
    ranks = [USUAL_RANK]
    for path in folders_in(folder):
        try:
            ranks.append(_rank(_config(path, path), path))
        except ConfigurationError:
            continue  # told when it is to be served
    return next((rank for rank in RANKS if rank >= max(ranks)), RANKS[-1])


def take(
    source: Path,
    copies: Path,
    manifest: Manifest,
    *,
    name: str = "",
    most_rank: int = RANKS[-1],
    allow_other_base: bool = False,
    within: Path | None = None,
) -> Adapter:
    """Check an adapter and copy it, so that what is served is what was checked, and only that.

    Args:
        source: folder in PEFT's format.
        copies: where copies lie, each under the digest of its content.
        manifest: of the base that it must be for.
        name: default: the folder's.
        within: the folder that adapters are taken from; None: wherever they are.

    Raises:
        ConfigurationError: no adapter, a damaged one, one that is more than LoRA of linear layers, or one
            that is not below ``within``.
        ModelMismatch: it was made for another base.
        StorageError: no room for the copy.
    """
    name = name or source.name
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"{name[:80]!r} is no name for a model: letters, digits and . _ @ : - are")
    if within is not None:
        check_below(within, source, source.resolve())
    check_adapter_folder(source)
    # An adapter of the highest rank for every layer, in 8 bytes a number.
    axes = sum(group.inputs + each.outputs for group in manifest.groups for each in group.members)
    sizes = {CONFIG: _WORDS_BYTES, WEIGHTS: 8 * RANKS[-1] * axes + _WORDS_BYTES}
    if (source / RECORD).exists():
        sizes[RECORD] = _WORDS_BYTES
    digest = hashlib.sha256()
    with (
        disk_errors(copies, f"a copy of {source}", "The adapter is not served until then."),
        tempfile.TemporaryDirectory(prefix=".", dir=copies, ignore_cleanup_errors=True) as writing,
    ):
        for each, most in sizes.items():
            content = copy_file(source / each, Path(writing) / each, most, within)
            digest.update(f"{each} {content} ".encode())
        folder = copies / digest.hexdigest()[:32]
        new = not folder.exists()
        if new:
            _write_without_patterns(Path(writing), source)
            Path(writing).rename(folder)
    try:
        rank = _check(folder, source, manifest, most_rank)
        record = None if allow_other_base else Provenance.read(folder, source)
        notes = record.check(manifest, source) if record is not None else ""
    except BaseException:
        if new:  # else it may be served
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return Adapter(name, source, folder, rank, notes)


def _config(folder: Path, source: Path) -> dict[str, Any]:
    """Of a folder, which errors call ``source``."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"cannot read {source / CONFIG}: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise ConfigurationError(
            f"{source} holds an adapter of the kind {kind!r}: the gateway serves LoRA alone. Use `generate`"
        )
    return config


def _write_without_patterns(folder: Path, source: Path) -> None:
    """Have vLLM find names in the configuration of a copy; it matches patterns while all sequences wait.

    Raises:
        ConfigurationError: a pattern is refused, or the folder cannot be read.
    """
    config = _config(folder, source)
    try:
        with safe_open(str(folder / WEIGHTS), "pt") as file:
            layers = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigurationError(f"cannot read {source / WEIGHTS}: {error}") from error
    config = without_patterns(config, sorted(layers), source)
    for field in ("rank_pattern", "alpha_pattern"):
        same: dict[float, list[str]] = {}
        for name, value in (config.get(field) or {}).items():
            same.setdefault(value, []).append(re.escape(name))
        if len(same) > VALUES:
            raise ConfigurationError(
                f"{field} of the adapter in {source} has {len(same)} values; {VALUES} are the most"
            )
        config[field] = {f"^({'|'.join(names)})": value for value, names in same.items()}
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")


def _rank(config: dict[str, Any], source: Path) -> int:
    others = config.get("rank_pattern") or {}
    if not isinstance(others, dict):
        raise ConfigurationError(f"the adapter in {source} has a rank_pattern that is no table")
    ranks: list[int] = [config.get("r", 0), *others.values()]
    if not all(isinstance(rank, int) and 0 < rank <= RANKS[-1] for rank in ranks):
        raise ConfigurationError(
            f"the adapter in {source} has the ranks {ranks}: one is from 1 to {RANKS[-1]}"
        )
    return max(ranks)


def _check(folder: Path, source: Path, manifest: Manifest, most_rank: int) -> int:
    """The rank of an adapter that can be served as it is.

    Raises:
        ConfigurationError: it cannot.
    """
    config = _config(folder, source)
    for option, fine in _PLAIN.items():
        if option in config and config[option] not in fine:
            raise ConfigurationError(
                f"the adapter in {source} has {option}={config[option]!r}, which the gateway does not "
                "compute. Use `generate` for it, or train one without"
            )
    rank = _rank(config, source)
    if rank > most_rank:
        raise ConfigurationError(
            Message(
                "the adapter in {} has rank {}; this gateway has room for {}: start it with {max_rank}",
                *(str(source), rank, most_rank),
                max_rank=next(each for each in RANKS if each >= rank),
            )
        )
    served = {
        member.name: {"A": (group.inputs, 1), "B": (member.outputs, 0)}
        for group in manifest.groups
        for member in group.members
        if not group.head and member.expert is None
    }
    prefix = f"{manifest.base_prefix}."
    try:
        with safe_open(str(folder / WEIGHTS), "pt") as file:
            names = list(file.keys())
            for tensor in names:
                if file.get_slice(tensor).get_dtype() not in _FLOATS:
                    raise ConfigurationError(
                        f"{tensor[:200]} of the adapter in {source} holds no plain floats"
                    )
                _check_tensor(tensor, file.get_tensor(tensor), served, prefix, rank, source)
    except (SafetensorError, OSError) as error:
        raise ConfigurationError(f"cannot read {source / WEIGHTS}: {error}") from error
    halves = {name.replace(".lora_A.", ".lora_B.") for name in names if ".lora_A." in name}
    if not names or halves != {name for name in names if ".lora_B." in name}:
        raise ConfigurationError(f"the adapter in {source} is empty, or a half of it is missing")
    return rank


def _check_tensor(
    name: str,
    tensor: torch.Tensor,
    served: Mapping[str, Mapping[str, tuple[int, int]]],
    prefix: str,
    rank: int,
    source: Path,
) -> None:
    """Whether it is of a layer's LoRA, of its shape and of finite numbers.

    Args:
        served: of each layer the width of both matrices, and which axis that is.

    Raises:
        ConfigurationError: no.
    """
    found = _TENSOR.fullmatch(name)
    layer = served.get(found[1].removeprefix(prefix)) if found else None
    if found is None or layer is None:
        raise ConfigurationError(
            f"the adapter in {source} has {name[:200]}, which is not of LoRA on a layer that the "
            "executor serves; the gateway would have to leave it out"
        )
    width, axis = layer[found[2]]
    if tensor.dim() != 2 or tensor.shape[axis] != width or not 0 < tensor.shape[1 - axis] <= rank:
        raise ConfigurationError(
            f"{name[:200]} of the adapter in {source} has shape {list(tensor.shape)}, which is not that of a "
            f"layer of this model and of rank {rank}"
        )
    if not tensor.isfinite().all():
        raise ConfigurationError(f"{name[:200]} of the adapter in {source} holds NaN or infinity")
