"""Metrics of the gateway: for Prometheus, and points of the page's lines."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tenant_sdk.gateway.status import GatewayStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from prometheus_client.core import Metric

    from tenant_sdk.gateway.adapter_registry import AdapterRegistry
    from tenant_sdk.gateway.admission import SequenceLimit


def rates(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    """A point of each line: a second's counts, and means of its steps."""
    seconds = max(now["time"] - before["time"], 1e-3)
    since = {name: value - before.get(name, 0.0) for name, value in now.items()}
    steps = since.get("steps", 0.0)
    return {
        "time": now["time"],
        "tokens": since["tokens"] / seconds,
        "prompt_tokens": since["prompt_tokens"] / seconds,
        "batch": since.get("sequences", 0.0) / steps if steps else 0.0,
        "tokens_a_step": since["tokens"] / steps if steps else 0.0,
        "steps": steps / seconds,
        "round_trips": since.get("products", 0.0) / seconds,
        "milliseconds": 1e3 * since.get("seconds_waiting", 0.0) / max(1.0, since.get("products", 0.0)),
        "masks_ahead": now.get("rows_ahead", 0.0),
        "waiting": now["waiting"],
        "running": now["running"],
        "kv_used": now["kv_used"],
    }


class CachedAnswer:
    """What is made once in a while, in a thread, for all who ask meanwhile.

    It is for coroutines, as the provider's ``FreshAnswer`` is for threads.

    Args:
        make: makes it.
        seconds: for which it is good.
        clock: in seconds.
    """

    def __init__(
        self, make: Callable[[], bytes], seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._make, self._seconds, self._clock = make, seconds, clock
        self._made, self._until, self._lock = b"", -math.inf, asyncio.Lock()

    async def __call__(self) -> bytes:
        """It, at most so many seconds old."""
        async with self._lock:
            if self._clock() >= self._until:
                self._made = await asyncio.to_thread(self._make)
                self._until = self._clock() + self._seconds
            return self._made


class Collector:
    """The worker's status for Prometheus."""

    def __init__(self, folder: Path, sequence_limit: SequenceLimit, adapters: AdapterRegistry) -> None:
        self._folder, self._sequence_limit, self._adapters = folder, sequence_limit, adapters

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        status = GatewayStatus.read(self._folder)
        for name, help_ in {
            "steps": "Steps of the model.",
            "failed_steps": "Steps that failed, with all requests in them.",
            "sequences": "Sequences in all steps.",
            "products": "Requests to the executor: round trips.",
            "rows": "Rows of these.",
            "bytes_sent": "Payloads sent to executors.",
            "bytes_received": "Payloads of their answers.",
            "seconds_waiting": "Time that steps waited for answers and effects.",
        }.items():
            metric = CounterMetricFamily(f"symbiosis_gateway_{name}", help_)
            metric.add_metric([], getattr(status, name))
            yield metric
        for name, help_, value in (
            ("adapters", "Adapters served.", len(self._adapters.served)),
            ("sequences_under_way", "Sequences computed or waiting.", self._sequence_limit.in_flight),
            ("masks_ahead", "Rows of masks whose effects have arrived or are requested.", status.rows_ahead),
            ("provider_up", "0 after a failed step, until a step or a test succeeds.", not status.failing),
        ):
            gauge = GaugeMetricFamily(f"symbiosis_gateway_{name}", help_)
            gauge.add_metric([], float(value))
            yield gauge
        refused = CounterMetricFamily(
            "symbiosis_gateway_refused", "Requests refused because too many sequences were in flight."
        )
        refused.add_metric([], self._sequence_limit.refused)
        yield refused
