"""Experts as groups: each expert of a projection gets rows of its own, so each is a group."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import msgspec

from shared.wire.messages import GroupInfo, Member
from shared.wire.protocol import MAX_ANSWER_CONTROL_BYTES, MAX_GROUPS

_BOUNDS_BYTES = 32  # of a group on the ring, which are known later

log = logging.getLogger(__name__)


def with_experts(groups: Sequence[GroupInfo], experts: Iterable[tuple[Member, int]]) -> list[GroupInfo]:
    """Groups and experts in the order of a pass: a block's experts come behind its other layers.

    Args:
        groups: of layers.
        experts: members and their inputs (``Stored.experts``).
    """
    by_block: dict[str, list[GroupInfo]] = {}
    for member, inputs in experts:
        block = _block(member.name.rpartition(".")[0])
        by_block.setdefault(block, []).append(GroupInfo(inputs, (member,)))
    together = [*groups, *(each for infos in by_block.values() for each in infos)]
    size = len(msgspec.json.encode(together)) + _BOUNDS_BYTES * len(together)
    max_bytes = MAX_ANSWER_CONTROL_BYTES * 3 // 4  # the rest is for parameters
    if len(together) > MAX_GROUPS or size > max_bytes:
        log.warning(
            "tenants download the experts' weights, wherever they want experts to be: with each as a group "
            "there were %d groups, %.1f MiB of a manifest, and no tenant takes more than %d and %.1f MiB",
            *(len(together), size / 2**20, MAX_GROUPS, max_bytes / 2**20),
        )
        return list(groups)
    ends = {block: _end(groups, block) for block in by_block}
    ordered: list[GroupInfo] = []
    for at in range(len(groups) + 1):
        ordered += [each for block, end in ends.items() if end == at for each in by_block[block]]
        ordered += groups[at : at + 1]
    return ordered


def _block(name: str) -> str:
    """A name up to its last number, such as ``layers.3.``; without one, nothing."""
    parts = name.split(".")
    last = max((at for at, part in enumerate(parts) if part.isdigit()), default=-1)
    return "".join(f"{part}." for part in parts[: last + 1])


def _end(groups: Sequence[GroupInfo], block: str) -> int:
    """Behind the last group of a block, or behind all."""
    positions = [
        at for at, group in enumerate(groups) if any(m.name.startswith(block) for m in group.members)
    ]
    return positions[-1] + 1 if positions else len(groups)
