"""Which replica of a party to connect to: the quicker of two drawn at random, and none that has just failed.

Power of two choices (Mitzenmacher 2001) on a moving figure of what connecting and greeting took. That is the
one thing that every replica is asked in the same way; round trips of requests differ by their sizes. A
replica without a figure, or with an old one, comes first, so that new replicas get work.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable

from shared.errors import ConnectError, OptionText, SymbiosisError

WEIGHT = 0.3  # of the latest measurement in the moving figure
STALE_SECONDS = 600.0  # after which a figure says nothing any more
FIRST_EJECTION = 1.0  # seconds, doubled by each further failure
MAX_EJECTION = 60.0


class _Replica:
    """What is known of one replica."""

    __slots__ = ("ejected_until", "error", "failures", "measured_at", "refused", "seconds", "wait_until")

    def __init__(self) -> None:
        self.seconds, self.measured_at = 0.0, float("-inf")
        self.failures = 0  # since it last answered
        self.ejected_until = self.wait_until = 0.0  # the latter: asking before is in vain
        self.error: SymbiosisError | None = None  # the last one
        self.refused = False  # for good, as far as it can be seen


class ReplicaSet:
    """The replicas of one party by their names. No I/O; the caller brings the time and opens connections.

    Args:
        uniform: draws from [0, 1), uniformly.
    """

    def __init__(self, uniform: Callable[[], float]) -> None:
        self._uniform = uniform
        self._all: dict[str, _Replica] = {}

    def update(self, names: Iterable[str]) -> None:
        """Set which replicas there are now, in this order; forget what is known of others."""
        self._all = {name: self._all.get(name) or _Replica() for name in names}

    @property
    def names(self) -> list[str]:
        """The names of all replicas."""
        return list(self._all)

    def choose(self, now: float, tried: Collection[str] = ()) -> str | None:
        """Chooses the replica to try next.

        Args:
            now: in seconds, of any clock that does not go back.
            tried: replicas that were tried in vain already.

        Returns:
            Of those that are not ejected one without a figure, or the quicker of two. If all are ejected, the
            one for the shortest time. None: all were tried, or trying them is in vain for now.
        """
        others = {name: each for name, each in self._all.items() if name not in tried}
        due = {name: each for name, each in others.items() if each.wait_until <= now}
        if due or tried:  # if nobody else is there to try, the first try is at once
            others = due
        free = [name for name, each in others.items() if each.ejected_until <= now]
        if not free:
            return min(others, key=lambda name: others[name].ejected_until, default=None)
        unknown = [name for name in free if now - others[name].measured_at > STALE_SECONDS]
        if unknown:
            return self._draw(unknown)
        one = self._draw(free)
        free.remove(one)
        other = self._draw(free) if free else one
        return min(one, other, key=lambda name: others[name].seconds)

    def opened(self, name: str, now: float, seconds: float) -> None:
        """Record how long connecting and greeting took. Only an answer shows that the replica works."""
        each = self._all.get(name)
        if each is not None:
            known = now - each.measured_at <= STALE_SECONDS
            each.seconds += (seconds - each.seconds) * (WEIGHT if known else 1.0)
            each.measured_at, each.refused = now, False

    def answered(self, name: str) -> None:
        """Record that a replica works: forget its failures."""
        each = self._all.get(name)
        if each is not None:
            each.failures, each.ejected_until, each.wait_until = 0, 0.0, 0.0
            each.error, each.refused = None, False

    def eject(
        self,
        name: str,
        now: float,
        error: SymbiosisError | None,
        *,
        refused: bool = False,
        at_once: bool = False,
    ) -> None:
        """Eject a replica that refused, timed out or broke, for twice as long as the last time.

        Args:
            error: its error; None: it is not known.
            refused: asking again is in vain, as far as it can be seen.
            at_once: it may be tried again before the time for which the error asks, if nobody else can be.
        """
        each = self._all.get(name)
        if each is None:
            return
        requested = (error.retry_after if error is not None else None) or 0.0
        if refused:
            requested = max(requested, MAX_EJECTION)
        doubled = min(MAX_EJECTION, FIRST_EJECTION * 2.0 ** min(each.failures, 9))
        each.failures += 1
        each.ejected_until = now + max(doubled, requested)
        each.wait_until = now if at_once else now + requested
        each.error, each.refused = error, refused

    @property
    def refused(self) -> bool:
        """Whether all of them refused for good."""
        return all(each.refused for each in self._all.values())

    def requested_wait(self, now: float) -> float:
        """Returns the seconds for which every replica has asked not to be tried again."""
        return max(0.0, min((each.wait_until for each in self._all.values()), default=0.0) - now)

    def why(self) -> OptionText:
        """Returns why no replica can be used; of several replicas, each with its name."""
        if len(self._all) == 1:
            return what_happened(next(iter(self._all.values())).error)
        reasons = {name: what_happened(each.error, name) for name, each in self._all.items()}
        return OptionText.joined(", ", [OptionText("{}: {}", *each) for each in reasons.items()])

    def error(self) -> SymbiosisError:
        """Returns the one replica's error; of several, an error that names all, of their common class."""
        errors = [each.error for each in self._all.values() if each.error is not None]
        if len(self._all) == 1 and errors:
            return errors[0]
        message = OptionText("none of {} replicas can be used: {}", len(self._all), self.why())
        if len({type(error) for error in errors}) != 1:
            return ConnectError(message)
        error = copy.copy(errors[0]).with_traceback(None)
        error.structured_message = message
        return error

    def _draw(self, names: list[str]) -> str:
        return names[int(self._uniform() * len(names))]


def what_happened(error: SymbiosisError | None, name: str = "") -> OptionText:
    """Returns an error's text without the name, and without the advice behind the semicolon."""
    if error is None:
        return OptionText("its connection broke")
    what, _ = error.structured_message.split_once(";")
    return what.without_prefix(f"{name}: ").without_prefix(f"{name} ") if name else what
