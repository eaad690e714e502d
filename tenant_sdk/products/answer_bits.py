"""How many bits of each number of an answer to ask for. No I/O, no clock."""

from __future__ import annotations

from shared.wire.header import EXACT, RequestClass, half_bits

FAST_LINK = 5e8  # bytes a second, above which checking half answers takes longer than their bytes save
_BULK = frozenset({RequestClass.PREFILL, RequestClass.FINETUNING})


class AnswerBits:
    """Chooses the answer bits of each request.

    Args:
        answers: ``exact``, ``half`` or ``auto``, as ``tenant_sdk.connect`` describes them.
        numerics: the executor's.

    Attributes:
        measures: whether the choice depends on answers' rates, so that ``record`` must be called.
    """

    def __init__(self, answers: str, numerics: str) -> None:
        self._answers, self.measures = answers, answers == "auto"
        self._half = half_bits(numerics)
        self._fastest = 0.0  # bytes a second

    def choose(self, request_class: RequestClass) -> int:
        """Returns the answer bits for a request of this class."""
        if self._answers == "exact":
            return EXACT
        slow = 0 < self._fastest < FAST_LINK
        return self._half if self._answers == "half" or (slow and request_class in _BULK) else EXACT

    def record(
        self, request_class: RequestClass, answer_bytes: int, seconds: float, *, is_over_network: bool
    ) -> None:
        """Record the rate of an answer. The link is at least as fast as the fastest answer.

        Args:
            seconds: from request to answer.
            is_over_network: the answer came over a network.
        """
        if is_over_network and request_class in _BULK and seconds > 0:
            self._fastest = max(self._fastest, answer_bytes / seconds)
