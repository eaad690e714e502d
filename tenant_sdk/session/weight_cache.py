"""Kept weights on disk, so that the next session with the same executors does not ask for them again."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from shared.atomic import atomic_file
from shared.ownership import check_own
from shared.user_folders import cache_home
from shared.wire.messages import GroupInfo, member_identity
from tenant_sdk.storage import UNREADABLE_TENSORS

log = logging.getLogger(__name__)


class WeightCache:
    """A folder of the user's own, with a file for each group.

    Args:
        identity: all that the weights depend on: whose they are, how exact, who answered for them, and what
            the answers were checked with. Other executors may have lied about the same digest, and other
            checks may not have noticed, so they have another folder.
    """

    def __init__(self, identity: Sequence[object]) -> None:
        name = hashlib.sha256(msgspec.json.encode([str(each) for each in identity])).hexdigest()
        self._base = cache_home()
        self._folder = self._base / "symbiosis" / "kept" / name[:32]

    def read(self, group: GroupInfo, dtype: torch.dtype) -> list[torch.Tensor] | None:
        """Weights of a group's members, [O, D] each, or None if they are not there.

        Raises:
            ConfigurationError: others could have changed the file.
        """
        path = self._path(group)
        check_own(path)
        try:
            tensors = load_file(path)
        except UNREADABLE_TENSORS:
            return None
        weights = [tensors.get(str(member), torch.empty(0)) for member in range(len(group.members))]
        fit = all(
            weight.shape == (member.outputs, group.inputs) and weight.dtype == dtype
            for member, weight in zip(group.members, weights, strict=True)
        )
        return weights if fit else None

    def write(self, group: GroupInfo, weights: Sequence[torch.Tensor]) -> None:
        """Write a file that is there whole or not at all; a disk that takes none is only told of."""
        try:
            folder = self._base
            folder.mkdir(parents=True, exist_ok=True)
            for each in self._folder.relative_to(self._base).parts:
                folder = folder / each
                folder.mkdir(mode=0o700, exist_ok=True)
            with atomic_file(self._path(group)) as file:
                save_file({str(member): weight for member, weight in enumerate(weights)}, file)
        except (OSError, SafetensorError) as error:
            log.warning(
                "kept weights are not written to %s, and asked for again the next time: %s",
                self._folder,
                error,
            )

    def _path(self, group: GroupInfo) -> Path:
        # By the layers' names: an executor chooses the order of its groups, and of members of a group.
        layers = [member_identity(member, group.inputs) for member in group.members]
        return self._folder / f"{hashlib.sha256(msgspec.json.encode(layers)).hexdigest()[:32]}.safetensors"
