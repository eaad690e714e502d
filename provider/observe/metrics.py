"""The executor's counters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from provider.engine.engine import Completion
from provider.workers.state import WorkerState
from shared.wire.header import Direction, Header, Operation, RequestClass

_DIRECTIONS = {Direction.FORWARD: "forward", Direction.BACKWARD: "backward"}
_OPERATIONS = {
    Operation.PRODUCT: "product",
    Operation.EFFECT: "effect",
    Operation.SEED_EFFECT: "seed_effect",
}
# Why a connection got no session; a label.
Reason = Literal[
    "closed",
    "expired",
    "full",
    "http",
    "internal",
    "overloaded",
    "protocol_version",
    "slow",
    "tenant_full",
    "tls",
    "unauthorized",
    "unexpected",
]
# Those of ``shared/PROTOCOL.md``, "Errors", that executors answer with; a label.
CODES = (
    "answer_bits",
    "control_message",
    "direction",
    "dtype",
    "fetch",
    "frame",
    "group",
    "header",
    "internal",
    "members",
    "non_finite",
    "operation",
    "overloaded",
    "payload_length",
    "place",
    "protocol_version",
    "request_class",
    "restarting",
    "text",
    "too_large",
    "unauthorized",
    "unavailable",
    "unexpected",
    "width",
    "zero_rows",
)
DOWNLOAD = "download"  # in place of a request class: parameters and files, which have no rows


class Usage(NamedTuple):
    """What one tenant was answered, of one request class.

    Bytes are those of payloads; ``product_seconds`` the time of products, of which tenants who share one
    have shares by their rows.
    """

    requests: int = 0
    rows: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    product_seconds: float = 0.0

    def plus(self, more: Usage, sign: int = 1) -> Usage:
        """Both together; with sign -1, what this has on top of the other."""
        return Usage(
            self.requests + sign * more.requests,
            self.rows + sign * more.rows,
            self.received_bytes + sign * more.received_bytes,
            self.sent_bytes + sign * more.sent_bytes,
            self.product_seconds + sign * more.product_seconds,
        )


UsageBy = dict[tuple[str, str], Usage]  # by tenant and request class


class _UsageCollector(Collector):
    """Shows usage as metrics, whose names are those of its fields."""

    def __init__(self, usage: UsageBy) -> None:
        self._usage = usage

    def collect(self) -> Iterable[CounterMetricFamily]:
        now = self._usage.copy()
        for index, name in enumerate(Usage._fields):
            family = CounterMetricFamily(
                f"symbiosis_tenant_{name}",
                f"Answered, by tenant and request class: {name.replace('_', ' ')}.",
                labels=("tenant", "request_class"),
            )
            for of, usage in now.items():
                family.add_metric(of, usage[index])
            yield family


class _Shown(Collector):
    """Shows what others count, asked at each scrape: name, text, value of each."""

    def __init__(self, *counters: tuple[str, str, Callable[[], float]]) -> None:
        self._counters = counters

    def collect(self) -> Iterable[CounterMetricFamily]:
        for name, text, value in self._counters:
            yield CounterMetricFamily(f"symbiosis_{name}", text, value=value())


class _TokensCollector(Collector):
    """Shows when each tenant's last token ends."""

    def __init__(self, ends: Callable[[], dict[str, float]]) -> None:
        self._ends = ends

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "symbiosis_token_expires_timestamp_seconds",
            "When the last token of a tenant ends, in seconds since the epoch; none for those without end.",
            labels=("tenant",),
        )
        for tenant, seconds in self._ends().items():
            family.add_metric((tenant,), seconds)
        yield family


_OF_WORKERS: tuple[tuple[type[CounterMetricFamily | GaugeMetricFamily], str, str, str], ...] = (
    (GaugeMetricFamily, "up", "up", "Whether a worker takes products (1), or is being started again (0)."),
    (GaugeMetricFamily, "since_timestamp_seconds", "since", "When that began, in seconds since the epoch."),
    (CounterMetricFamily, "restarts", "restarts", "Times that a worker was started again."),
    (CounterMetricFamily, "products", "products", "Products of a worker, of one request or many."),
    (CounterMetricFamily, "rows", "rows", "Rows of a worker's products."),
    (CounterMetricFamily, "busy_seconds", "seconds", "Time in which a worker had something to multiply."),
    (GaugeMetricFamily, "batches", "batches", "Products that a worker has now, the next one among them."),
    (GaugeMetricFamily, "waiting_requests", "waiting", "Requests without an answer, of a worker's groups."),
    (GaugeMetricFamily, "groups", "groups", "Groups that a worker holds, or a stripe of."),
    (GaugeMetricFamily, "weight_bytes", "weight_bytes", "Weights of a worker's share."),
    (GaugeMetricFamily, "resident_bytes", "resident_bytes", "Memory of a worker's process."),
)


class _WorkersCollector(Collector):
    """Shows what workers are and do, asked at each scrape."""

    def __init__(self, states: Callable[[], Sequence[WorkerState]]) -> None:
        self._states = states

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        states = self._states()
        info = GaugeMetricFamily(
            "symbiosis_worker_info", "Where a worker's products run.", labels=("worker", "device", "stripe")
        )
        for state in states:
            info.add_metric((state.name, state.device, state.stripe), 1)
        yield info
        for kind, name, field, text in _OF_WORKERS:
            family = kind(f"symbiosis_worker_{name}", text, labels=("worker",))
            for state in states:
                family.add_metric((state.name,), float(getattr(state, field)))
            yield family


class Metrics:
    """Counters of one executor. Labels have few values; the provider chose the tenants' names.

    Attributes:
        workers: reports what workers are and do; replaced by whoever has some.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.workers: Callable[[], Sequence[WorkerState]] = list
        self.registry.register(_WorkersCollector(lambda: self.workers()))
        counter = functools.partial(Counter, registry=self.registry)
        seconds = functools.partial(
            Histogram,
            registry=self.registry,
            buckets=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1, 3, 10),
        )
        labels = ("operation", "direction")
        rows = counter("symbiosis_rows", "Rows of answered products and effects.", labels)
        products = seconds(
            "symbiosis_product_seconds",
            "Products and effects answered: time from a complete request to its computed answer.",
            labels,
        )
        self._products = {
            (o, d): (rows.labels(operation, direction), products.labels(operation, direction))
            for o, operation in _OPERATIONS.items()
            for d, direction in _DIRECTIONS.items()
        }
        self._queue = seconds(
            "symbiosis_queue_seconds",
            "From a complete request to the beginning of its first product.",
            ("request_class",),
        )
        self._reply = seconds(
            "symbiosis_reply_seconds", "From a complete request to its computed answer.", ("request_class",)
        )
        self._batch_rows = Histogram(
            "symbiosis_batch_rows",
            "Rows of products.",
            registry=self.registry,
            buckets=tuple(4**i for i in range(9)),
        )
        self._batch_seconds = seconds("symbiosis_batch_seconds", "Time of products.")
        self._processor = counter(
            "symbiosis_product_cpu_seconds",
            "Processor time of products, in the thread that gathers and begins them; with --threads 1, all.",
        )
        self._usage: UsageBy = {}
        self.registry.register(_UsageCollector(self._usage))
        self._by_class = {
            c: (self._queue.labels(c.name.lower()), self._reply.labels(c.name.lower()))
            for c in RequestClass
            if c
        }
        self.received = counter("symbiosis_received_bytes", "Payload bytes received.")
        self.sent = counter("symbiosis_sent_bytes", "Payload bytes sent.")
        self.refused = counter("symbiosis_refused", "Requests answered with an error.", ("code",))
        self.handshakes_failed = counter(
            "symbiosis_handshakes_failed", "Connections that ended before a session began.", ("reason",)
        )
        self.usage_failures = counter(
            "symbiosis_usage_write_failures", "Times that usage could not be written to its file."
        )
        # A series that appears with its first failure would show no increase to Prometheus.
        for code in CODES:
            self.refused.labels(code)
        for reason in get_args(Reason):
            self.handshakes_failed.labels(reason)
        self.connections = Gauge("symbiosis_connections", "Open tenant sessions.", registry=self.registry)

    def watch(
        self, waiting: Callable[[], int], in_flight: Callable[[], int], tokens: Callable[[], tuple[int, int]]
    ) -> None:
        """Show what others keep: requests that wait, bytes in flight, and tokens met and late."""
        for name, text, value in (
            ("waiting_requests", "Requests without an answer.", waiting),
            ("in_flight_bytes", "Of requests and answers, as quotas count them.", in_flight),
        ):
            Gauge(f"symbiosis_{name}", text, registry=self.registry).set_function(value)
        self.registry.register(
            _Shown(
                ("decode_tokens_met", "Decoded tokens within the objective.", lambda: tokens()[0]),
                ("decode_tokens_late", "Decoded tokens that took longer.", lambda: tokens()[1]),
            )
        )

    def tokens(self, ends: Callable[[], dict[str, float]]) -> None:
        """Show when each tenant's last token ends: seconds since the epoch, of those that end."""
        self.registry.register(_TokensCollector(ends))

    def certificate(self, expires: Callable[[], float]) -> None:
        """Show when the TLS certificate ends, in seconds since the epoch."""
        text = "When the TLS certificate that is in use ends, in seconds since the epoch."
        Gauge("symbiosis_certificate_expires_seconds", text, registry=self.registry).set_function(expires)

    def handshake_failed(self, reason: Reason) -> None:
        """A connection ended before a session began."""
        self.handshakes_failed.labels(reason).inc()

    def connected(self, change: int) -> None:
        """A session began (1) or ended (-1)."""
        self.connections.inc(change)

    def value(self, name: str) -> float:
        """Of a metric without labels; 0 if there is none."""
        return self.registry.get_sample_value(name) or 0.0

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The values of a metric by one of its labels."""
        sums: dict[str, float] = {}
        for family in self.registry.collect():
            for sample in family.samples:
                if sample.name == name:
                    value = sample.labels.get(label, "")
                    sums[value] = sums.get(value, 0.0) + sample.value
        return sums

    def total(self, name: str) -> float:
        """The values of a metric under all its labels together."""
        return sum(self.by_label(name, "").values())

    def answered(self, tenant: str, header: Header, answer: Header, done: Completion) -> None:
        """Count one answered product or effect."""
        rows, histogram = self._products[Operation(header.operation), Direction(header.direction)]
        rows.inc(header.rows)
        histogram.observe(done.reply_seconds)
        queue, reply = self._by_class[done.request_class]
        queue.observe(done.queue_seconds)
        reply.observe(done.reply_seconds)
        self.received.inc(header.payload_bytes)
        self.sent.inc(answer.payload_bytes)
        sizes = header.payload_bytes, answer.payload_bytes
        self._used(
            tenant, done.request_class.name.lower(), Usage(1, header.rows, *sizes, done.product_seconds)
        )

    def downloaded(self, tenant: str, header: Header, answer: Header) -> None:
        """Count one answered request for parameters, or for a part of a file."""
        self.sent.inc(answer.payload_bytes)
        self._used(tenant, DOWNLOAD, Usage(1, 0, header.payload_bytes, answer.payload_bytes))

    def usage(self) -> UsageBy:
        """What has been answered since the start, by tenant and request class (or DOWNLOAD)."""
        return dict(sorted(self._usage.copy().items()))

    def _used(self, tenant: str, request_class: str, usage: Usage) -> None:
        """In the loop's thread."""
        of = tenant, request_class
        self._usage[of] = self._usage.get(of, Usage()).plus(usage)

    def batch(self, rows: int, seconds: float, processor: float) -> None:
        """Count one product, of one request or many; ``processor`` seconds are those of its first thread."""
        self._processor.inc(processor)
        self._batch_rows.observe(rows)
        self._batch_seconds.observe(seconds)
