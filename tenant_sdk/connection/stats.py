"""The counters of a session."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass
class Stats:
    """Counters of a session; ``session.stats`` returns a copy.

    ``bytes_*`` count payloads, of products and effects. ``effect_rows`` are rows of masks whose
    effect a mask source computed; ``verified_rows`` are rows of answers that passed the check.
    ``seconds_waiting`` is what sending products and waiting for their answers took: network, encryption
    and the executor's work, less what was done meanwhile; ``seconds_waiting_for_effects`` is what came on
    top because an effect was not there yet. ``seconds_masking`` is spent on fixed point, on drawing, adding
    and subtracting masks, and on checking answers, which goes with them. ``refusals`` counts requests that
    an overloaded executor put off, and ``seconds_throttled`` how long they waited to be sent again.
    ``reconnections`` counts connections that were opened again, and ``seconds_reconnecting`` is how long that
    took, with all waiting for unavailable executors. ``moves`` counts those that led to another replica
    than the one before; ``replicas`` has, for every party by its first URL, the replica in use.
    ``key_exchange``: for the URL of every executor behind TLS, the group that the last handshake agreed on,
    such as ``X25519MLKEM768``, or ``unknown``.
    """

    requests: int = 0
    effect_requests: int = 0
    rows: int = 0
    effect_rows: int = 0
    verified_rows: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_waiting: float = 0.0
    seconds_waiting_for_effects: float = 0.0
    seconds_masking: float = 0.0
    refusals: int = 0
    seconds_throttled: float = 0.0
    reconnections: int = 0
    seconds_reconnecting: float = 0.0
    moves: int = 0
    replicas: dict[str, str] = field(default_factory=dict)
    key_exchange: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the lock, which is no field, so that ``dataclasses.asdict`` gives plain values."""
        self.lock = threading.Lock()

    def add(self, **amounts: float) -> None:
        """Add to numeric counters. Any thread may call this."""
        with self.lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)
