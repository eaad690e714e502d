"""Forked children: objects that belong to one process do not work in its copy.

A child has the parent's keys, counters and connections. What it sent would garble the parent's stream, or
show rows under the masks that the parent uses next. Its process id does not tell: process 1 of a container
may fork process 1 of another. So Python counts forks here, and every owner compares; the process id is for
forks that Python does not see.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from shared.errors import ConnectionLost


class ForkAware(Protocol):
    """Holds what a child must not have."""

    def forked(self) -> None:
        """Let go of it, in a child; once.

        Nothing may be sent, and no lock taken: a thread that does not exist here may hold it.
        """
        ...


_generation = 0
_owners: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def register_for_fork(owner: ForkAware) -> None:
    """Have an owner told in every child that is forked from now on."""
    _owners.add(owner)


def _in_child() -> None:
    global _generation
    _generation += 1
    owners = list(_owners)
    _owners.clear()  # a child's own children have nothing more of them
    for owner in owners:
        owner.forked()


os.register_at_fork(after_in_child=_in_child)


class ForkGuard:
    """Refuses use in forked children of the process in which something was made."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made = _generation, os.getpid()

    @property
    def in_child(self) -> bool:
        """Whether this process is another one."""
        return self._made != (_generation, os.getpid())

    def check(self) -> None:
        """Refuse another process.

        Raises:
            ConnectionLost: this is a forked child.
        """
        if self.in_child:
            raise ConnectionLost("a session stays in the process that opened it; open one in this process")
