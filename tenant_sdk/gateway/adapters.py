"""The adapters that a gateway serves: checks of a folder before vLLM reads it, and copies of it."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import ConfigurationError, OptionText
from tenant_sdk.gateway.options import RANKS
from tenant_sdk.storage import ADAPTER_CONFIG as CONFIG
from tenant_sdk.storage import check_below, disk_errors
from tenant_sdk.tuning.provenance import Provenance

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import nn

    from shared.wire.messages import Manifest

USUAL_RANK = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:-]{0,199}")


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
    """The adapters below a folder, by name; what begins with a dot is being written.

    Also such as this process may not look into: ``import_adapter`` says why they are not served.
    """
    for path in sorted(folder.iterdir()):
        try:
            is_adapter = not path.name.startswith(".") and (path / CONFIG).is_file()
        except OSError:
            is_adapter = True
        if is_adapter:
            yield path


def largest_rank(folder: Path) -> int:
    """The smallest of ``RANKS`` that every adapter below a folder fits into, at least ``USUAL_RANK``.

    Unreadable ones do not count.
    """
    from tenant_sdk.tuning.adapter_config import read_raw_config

    ranks = [USUAL_RANK]
    for path in folders_in(folder):
        try:
            raw = read_raw_config(path)
        except ConfigurationError:
            continue  # reported when it is to be served
        others = raw.get("rank_pattern")
        candidates = (raw.get("r"), *(others.values() if isinstance(others, dict) else ()))
        ranks += [rank for rank in candidates if isinstance(rank, int) and rank <= RANKS[-1]]
    return _rank_bound(max(ranks))


def _rank_bound(rank: int) -> int:
    return next((each for each in RANKS if each >= rank), RANKS[-1])


def import_adapter(
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
        StorageError: the disk is full.
    """
    from tenant_sdk.tuning.untrusted_adapter import copy_and_check

    name = name or source.name
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"{name[:80]!r} is no name for a model: letters, digits and . _ @ : - are")
    if within is not None:
        check_below(within, source, source.resolve())
    with (
        disk_errors(copies, f"a copy of {source}", "The adapter is not served until then."),
        tempfile.TemporaryDirectory(prefix=".", dir=copies, ignore_cleanup_errors=True) as temporary,
    ):
        copy = Path(temporary)
        check = partial(_check_servable, source=source, most_rank=most_rank)
        checked = copy_and_check(source, copy, _stub_model(manifest), within=within, check=check)
        record = None if allow_other_base else Provenance.read(copy, source)
        notes = record.check(manifest, source) if record is not None else ""
        folder = copies / checked.digest[:32]
        if not folder.exists():
            (copy / CONFIG).write_text(json.dumps(_vllm_config(checked.config)), encoding="utf-8")
            copy.rename(folder)
    return Adapter(name, source, folder, _rank(checked.config), notes)


def _stub_model(manifest: Manifest) -> nn.Module:
    """Stubs, without memory, of the layers that adapters can change here, by their names in adapters."""
    import torch
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    model = nn.Module()
    for group in manifest.groups:
        for member in group.members:
            if group.head or member.expert is not None:
                continue
            *above, name = f"{manifest.base_prefix}.{member.name}".removeprefix(".").split(".")
            place = model
            for part in above:
                if not hasattr(place, part):
                    place.add_module(part, nn.Module())
                place = getattr(place, part)
            layer: Any
            with torch.device("meta"):
                if member.transposed:
                    layer = Conv1D(member.outputs, group.inputs)
                else:
                    layer = nn.Linear(group.inputs, member.outputs)
            layer.bias, shape = None, layer.weight.shape
            layer.weight = nn.Parameter(torch.zeros(()).expand(shape), False)
            place.add_module(name, layer)
    return model


def _rank(config: Any) -> int:
    return int(max([config.r, *config.rank_pattern.values()]))


def _check_servable(config: PeftConfig, source: Path, most_rank: int) -> None:
    """Refuse an adapter that cannot be served as it is.

    Raises:
        ConfigurationError: it is more than plain LoRA, or of a higher rank.
    """
    from peft import LoraConfig

    from tenant_sdk.tuning.adapter_config import not_plain

    if type(config) is not LoraConfig:  # AdaLoRA's is a subclass
        raise ConfigurationError(
            f"{source} holds an adapter of the kind {type(config).__name__.removesuffix('Config')}: the "
            "gateway serves LoRA alone. Use `generate`"
        )
    if options := not_plain(config):
        raise ConfigurationError(
            f"the adapter in {source} has {options[0]}, which the gateway does not compute. Use `generate` "
            "for it, or train one without"
        )
    if (rank := _rank(config)) > most_rank:
        how = OptionText("start it with {max_rank}", max_rank=_rank_bound(rank))
        raise ConfigurationError(
            "the adapter in {} has rank {}; this gateway has room for {}: {}",
            *(str(source), rank, most_rank),
            how if rank <= RANKS[-1] else "train one of a lower rank",
        )


def _vllm_config(config: Any) -> dict[str, Any]:
    """An adapter's configuration in names: vLLM matches patterns while all sequences wait."""
    fields = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
    plain = {name: getattr(config, name) for name in fields}
    return plain | {"peft_type": "LORA", "target_modules": sorted(config.target_modules)}
