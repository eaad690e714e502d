"""Tenants that replay a trace against an executor over its real transport; one process for some of them.

A tenant here is what an executor sees of one: it sends the requests of a model's passes, in order, each
when the answer to the last has come, and computes nothing itself. ``think`` stands for what a real one
would compute between them. ``serving.py`` starts these processes and sums up.

    python benchmarks/load.py    # a plan on one line of standard input, on the next when to begin
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

import tenant_sdk
from shared.errors import SymbiosisError
from shared.wire.header import Direction, Operation, RequestClass
from tenant_sdk.connection.keys import ProductKey


class Tenant(threading.Thread):
    """One tenant.

    Args:
        plan: ``name``, ``token``, and what it does: ``tokens`` to decode after a prompt of ``prompt``
            rows, again and again, or ``tune`` rows forward and backward, in requests of ``window`` rows if
            that is said; ``think`` seconds between requests; ``arrivals`` seconds at which conversations
            begin, or none: all the time.
    """

    def __init__(self, plan: dict[str, Any], url: str, ca: str, timeout: float) -> None:
        super().__init__(daemon=True)
        self.plan, self.url = plan, url
        self.errors: Counter[str] = Counter()
        self.tokens: list[tuple[float, float]] = []  # when it came, and how long it waited for answers
        self.first_tokens: list[tuple[float, float]] = []
        self.steps: list[tuple[float, float]] = []
        self.rows = 0  # through one group each
        self.session = tenant_sdk.connect(url, token=plan["token"], ca=ca, privacy="plain", timeout=timeout)
        self.remote = self.session.executor
        self.groups = range(len(self.remote.shapes))

    @property
    def passes(self) -> float:
        """Passes of one row through all groups that it has done, the last in part: tokens, if it decodes."""
        return self.rows / len(self.groups)

    def until(self, begin: float, end: float) -> None:
        """Work between two moments of ``time.time``, which all processes share."""
        self.begin, self.end = begin, end
        self.start()

    def run(self) -> None:
        """Of Thread."""
        time.sleep(max(0.0, self.begin - time.time()))
        for _ in self._conversations():
            try:
                if "tune" in self.plan:
                    self._tune(self.plan["tune"])
                else:
                    self._converse(self.plan["prompt"], self.plan["tokens"])
            except SymbiosisError as error:
                self.errors[error.code] += 1
                time.sleep(error.retry_after or 0.1)
        self.session.close()

    def _conversations(self) -> Iterator[None]:
        if "arrivals" not in self.plan:
            while time.time() < self.end:
                yield
            return
        for at in self.plan["arrivals"]:
            if self.begin + at > self.end:
                return
            time.sleep(max(0.0, self.begin + at - time.time()))
            yield

    def _pass(self, rows: int, direction: Direction, request_class: RequestClass) -> float:
        """Through all groups; the seconds that it waited for answers."""
        waited = 0.0
        for group in self.groups if direction == Direction.FORWARD else reversed(self.groups):
            if time.time() > self.end:
                break
            shape = self.remote.shapes[group]
            members = (1 << len(shape.outputs)) - 1
            widths = shape.widths(direction, members).request_widths
            window = self.plan.get("window", rows)
            for at in range(0, rows, window):
                part = min(window, rows - at)
                tensors = [torch.zeros((part, width), dtype=self.remote.wire_dtype) for width in widths]
                asked = time.perf_counter()
                key = ProductKey(group, direction, members)
                self.remote.submit(Operation.PRODUCT, key, tensors, request_class).result()
                waited += time.perf_counter() - asked
                self.rows += part
                if self.plan.get("think"):
                    time.sleep(self.plan["think"])
        return waited

    def _timed(
        self,
        kept: list[tuple[float, float]],
        rows: int,
        *directions: Direction,
        request_class: RequestClass = RequestClass.DECODE,
    ) -> None:
        waited = sum(self._pass(rows, direction, request_class) for direction in directions)
        ended = time.time()
        if ended <= self.end:
            kept.append((ended - self.begin, waited))

    def _converse(self, prompt: int, tokens: int) -> None:
        if prompt:
            self._timed(self.first_tokens, prompt, Direction.FORWARD, request_class=RequestClass.PREFILL)
        for _ in range(tokens):
            if time.time() >= self.end:
                return
            self._timed(self.tokens, 1, Direction.FORWARD)

    def _tune(self, rows: int) -> None:
        both = (Direction.FORWARD, Direction.BACKWARD)
        self._timed(self.steps, rows, *both, request_class=RequestClass.FINETUNING)


def poisson(rate: float, seconds: float, draw: random.Random) -> list[float]:
    """Arrivals at a mean rate."""
    found, now = [], draw.expovariate(rate)
    while now < seconds:
        found.append(now)
        now += draw.expovariate(rate)
    return found


def bursty(rate: float, seconds: float, draw: random.Random, bursts: int = 2) -> list[float]:
    """Arrivals of the same mean rate, nearly all in as many bursts, which take a quarter of the time."""
    found, period = [], seconds / bursts
    for start in range(bursts):
        for at in poisson(4 * rate * 0.95, period / 4, draw) + poisson(0.05 * rate, period, draw):
            found.append(start * period + at)
    return sorted(found)


def main() -> None:
    """Read a plan, connect its tenants, say so, read when to begin, write what they saw."""
    torch.set_num_threads(1)
    plan = json.loads(sys.stdin.readline())
    tenants = [Tenant(each, plan["url"], plan["ca"], plan["timeout"]) for each in plan["tenants"]]
    print("ready", flush=True)
    begin = float(sys.stdin.readline())
    for tenant in tenants:
        tenant.until(begin, begin + plan["seconds"])
    for tenant in tenants:
        tenant.join()
    fields = ("tokens", "first_tokens", "steps", "passes", "rows", "errors")
    print(json.dumps([{"name": t.plan["name"], **{f: getattr(t, f) for f in fields}} for t in tenants]))


if __name__ == "__main__":
    main()
