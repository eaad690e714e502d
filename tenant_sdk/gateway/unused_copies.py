"""Finds the copies of adapters that no request can use any more. No I/O."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from tenant_sdk.gateway.admission import SequenceLimit


class UnusedCopies:
    """Copies of adapters that no name has any more, until the earlier requests have ended.

    Args:
        sequence_limit: with the requests that may use copies.
    """

    def __init__(self, sequence_limit: SequenceLimit) -> None:
        self._sequence_limit, self._oldest = sequence_limit, sequence_limit.oldest_period
        self._since = dict[Path, int]()  # the period in which each was found

    def used_again(self, copy: Path) -> None:
        """A name has this copy from now on."""
        self._since.pop(copy, None)

    def removable(self, present: Collection[Path], used: Collection[Path]) -> list[Path]:
        """The copies that can be removed. Begins a period; call it each second.

        Args:
            present: all copies.
            used: those that names have.
        """
        period = self._sequence_limit.period
        self._since = {each: self._since.get(each, period) for each in present if each not in used}
        # As of the last time: the worker may not have heard yet of the end of requests that left since.
        oldest, self._oldest = self._oldest, self._sequence_limit.oldest_period
        self._sequence_limit.period += 1
        return [each for each, since in self._since.items() if since < oldest]
