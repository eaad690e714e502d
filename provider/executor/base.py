"""The base executor: all groups of one checkpoint in this process, and its catalog."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from provider.catalog.catalog import Catalog
from provider.catalog.discovery import discover, part_of
from provider.executor.loading import LoadedGroup, Numerics, device_of
from provider.executor.memory_check import check_memory, memory_errors
from provider.executor.products import GroupExecutor
from shared.checkpoint import Checkpoint
from shared.wire.messages import Limits, Manifest

T = TypeVar("T")
Progress = Callable[[Iterable[T], str], Iterable[T]]


def _silent(items: Iterable[T], _what: str) -> Iterable[T]:
    return items


class BaseExecutor(GroupExecutor):
    """Serves every group of one checkpoint in one numerics (Symbiosis §3.2).

    Args:
        folder: the checkpoint.
        numerics: a name in ``NUMERICS``.
        device: of weights and products, such as ``cpu`` or ``cuda:0``.
        limits: what one message may hold.
        serve_head: also serve the output head.
        recorded: tell tenants that what they send is kept.
        part: serve only the k-th of n parts of the groups, (k, n) from 1; tenants find the others elsewhere.
        progress: wraps an iterable to show how far loading is, as ``tqdm`` does.

    Attributes:
        catalog: the manifest, and what tenants download.

    Raises:
        CheckpointError: see ``discover``.
        ConfigurationError: unknown numerics or device; not enough memory; ring numerics where no product is
            exact.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        numerics: str,
        device: str = "cpu",
        limits: Limits | None = None,
        serve_head: bool = False,
        recorded: bool = False,
        part: tuple[int, int] | None = None,
        progress: Progress = _silent,  # type: ignore[type-arg]
    ) -> None:
        kind, where = Numerics.named(numerics), device_of(device)
        with memory_errors(Path(folder).name):
            checkpoint = Checkpoint(folder)
            with checkpoint.kept_open():
                conversion = checkpoint.stored.largest_conversion
                check_memory(checkpoint.name, [], 0, conversion=conversion)
                discovery = discover(checkpoint, serve_head=serve_head)
                here = where.type == "cpu"
                groups = list(discovery.groups)
                first, stop = served = part_of(groups, *part) if part else (0, len(groups))
                weight_bytes = kind.weight_bytes if here else 0
                check_memory(checkpoint.name, groups[first:stop], weight_bytes, conversion=conversion)
                loaded: dict[int, LoadedGroup] = {}
                for number in progress(range(first, stop), "loading layers"):
                    loaded[number] = kind.load(checkpoint, groups[number], where)
                    groups[number] = loaded[number].info
                super().__init__(loaded, numerics, where)
                self.catalog = Catalog(
                    checkpoint,
                    discovery,
                    numerics=numerics,
                    groups=groups,
                    scales={i: group.scales for i, group in loaded.items() if group.scales is not None},
                    limits=limits,
                    recorded=recorded,
                    part=served if part else None,
                )

    @property
    def manifest(self) -> Manifest:
        """The catalog's."""
        return self.catalog.manifest
