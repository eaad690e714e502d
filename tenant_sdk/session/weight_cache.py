"""Kept weights on disk, so that the next session with the same executors does not ask for them again."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from shared.ownership import check_own

log = logging.getLogger(__name__)


class WeightCache:
    """A folder of the user's own, with a file for each group.

    Args:
        identity: all that the weights depend on: whose they are, how exact, and who answered for them. Other
            executors may have lied about the same digest, so they have another folder.
    """

    def __init__(self, identity: Sequence[object]) -> None:
        name = hashlib.sha256(msgspec.json.encode([str(each) for each in identity])).hexdigest()
        base = Path(os.path.expanduser("~/.cache"), os.environ.get("XDG_CACHE_HOME", ""))
        self._folder = base / "symbiosis" / "kept" / name[:32]

    def read(
        self, group: int, shapes: Sequence[tuple[int, int]], dtype: torch.dtype
    ) -> list[torch.Tensor] | None:
        """Weights of these shapes, or None if they are not there.

        Raises:
            ConfigurationError: others could have changed the file.
        """
        path = self._path(group)
        check_own(path)
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError):
            return None
        weights = [tensors.get(str(member), torch.empty(0)) for member in range(len(shapes))]
        fit = [tuple(weight.shape) for weight in weights] == list(shapes) and {w.dtype for w in weights} == {
            dtype
        }
        return weights if fit else None

    def write(self, group: int, weights: Sequence[torch.Tensor]) -> None:
        """Write a file that is there whole or not at all; a disk that takes none is only told of."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            number, name = tempfile.mkstemp(dir=self._folder)
            os.close(number)
            try:
                save_file({str(member): weight for member, weight in enumerate(weights)}, name)
                os.replace(name, self._path(group))
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)
        except (OSError, SafetensorError) as error:
            log.warning(
                "kept weights are not written to %s, and asked for again the next time: %s",
                self._folder,
                error,
            )

    def _path(self, group: int) -> Path:
        return self._folder / f"{group}.safetensors"
