"""The executor's work over the last minutes: samples for the page on the admin port."""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from provider.observe.metrics import Metrics, Usage

PAGE = (Path(__file__).parent / "status.html").read_bytes()
SECONDS = 1.0  # between two samples
KEPT = 900


class StatusHistory:
    """Takes a sample of the metrics now and then, and keeps the last KEPT of them.

    Args:
        metrics: what is sampled.
        about: what does not change: model, numerics, objective.

    Attributes:
        about: may be replaced, by one who knows more.
    """

    def __init__(self, metrics: Metrics, about: dict[str, Any]) -> None:
        self._metrics, self.about = metrics, about
        self._samples: deque[dict[str, float]] = deque(maxlen=KEPT)
        self._before = self._totals()
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="status", daemon=True).start()

    def sample(self, now: float, seconds: float) -> None:
        """Compare with the sample before, which was so many seconds ago; ``now`` is since the epoch."""
        after = self._totals()
        change = {name: after[name] - self._before[name] for name in after}
        self._before = after
        products, tokens = change["products"], change["met"] + change["late"]
        self._samples.append(
            {
                "time": round(now, 1),
                "rows_per_second": change["rows"] / seconds,
                "requests_per_second": change["requests"] / seconds,
                "rows_per_product": change["rows"] / products if products else 0.0,
                "busy": change["product_seconds"] / seconds,
                "waiting": self._metrics.value("symbiosis_waiting_requests"),
                "sessions": self._metrics.value("symbiosis_connections"),
                "met": change["met"] / tokens if tokens else -1.0,
                "refused": change["refused"] / seconds,
            }
        )

    def report(self) -> dict[str, Any]:
        """What ``/status.json`` shows."""
        by_tenant: dict[str, Usage] = {}
        for (tenant, _), usage in self._metrics.usage().items():
            by_tenant[tenant] = by_tenant.get(tenant, Usage()).plus(usage)
        tenants = [{"name": name, **usage._asdict()} for name, usage in by_tenant.items()]
        return {
            **self.about,
            "samples": list(self._samples),
            "workers": [state._asdict() for state in self._metrics.workers()],
            "tenants": sorted(tenants, key=lambda tenant: -tenant["rows"]),
        }

    def close(self) -> None:
        """Take no more samples."""
        self._stop.set()

    def _totals(self) -> dict[str, float]:
        total, workers = self._metrics.total, self._metrics.workers()
        # A batch that waits for a worker behind another one is no work; of several workers, their mean.
        busy = sum(worker.seconds for worker in workers) / len(workers) if workers else None
        return {
            "rows": total("symbiosis_batch_rows_sum"),
            "products": total("symbiosis_batch_rows_count"),
            "product_seconds": total("symbiosis_batch_seconds_sum") if busy is None else busy,
            "requests": total("symbiosis_reply_seconds_count"),
            "met": total("symbiosis_decode_tokens_met_total"),
            "late": total("symbiosis_decode_tokens_late_total"),
            "refused": total("symbiosis_refused_total"),
        }

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(SECONDS):
            now = time.monotonic()
            self.sample(time.time(), now - before)
            before = now
