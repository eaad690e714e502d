"""The counters of a session."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass
class Stats:
    """Counters of a session; ``session.stats`` returns a copy.

    Attributes:
        requests: Number of requests for products.
        effect_requests: Number of requests for effects to mask sources.
        rows: Number of rows in requests for products.
        effect_rows: Number of rows of masks whose effects a mask source computed.
        verified_rows: Number of rows of answers that passed the check.
        bytes_sent: Bytes of payloads sent, for products and effects.
        bytes_received: Bytes of payloads received, for products and effects.
        seconds_waiting: Time to send rows and to wait for their products. It includes the network, encryption
            and the executor's work, but not the time of other work that the session did meanwhile.
        seconds_waiting_for_effects: Further time to wait for effects that had not arrived.
        seconds_masking: Time to convert to fixed point, to draw, add and subtract masks, and to check
            answers.
        refusals: Number of times that an overloaded executor put a request off.
        seconds_throttled: Time for which these requests waited until the session sent them again.
        reconnections: Number of connections that the session opened again.
        seconds_reconnecting: Time to open these connections, including all waiting for unavailable executors.
        moves: Number of reconnections to another replica than before.
        replicas: URL of the replica in use, for each party by its first URL.
        key_exchange: Group of the last TLS handshake, such as ``X25519MLKEM768``, or ``unknown``, for the URL
            of each executor that uses TLS.
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
