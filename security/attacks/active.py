"""Attacks that send or answer: a lying provider, a tenant that copies weights, a tenant beside another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from provider.engine.engine import Completion, Engine, OnCompletion
from provider.executor.base import BaseExecutor
from security.recordings.executors import AuditError
from security.views.public_model import PublicModel
from shared.errors import VerificationError
from shared.wire.header import DTYPE_CODES, RINGS, Direction, Header, Operation
from tenant_sdk.session.session import Session

POISONED_ROWS = 9  # of a request that is lied about; fingerprints are made and tried with other numbers


class LyingProvider(Engine):
    """Alters some answers: a malicious provider's view and power, or a mask source's.

    Attributes:
        operation: what it lies about: PRODUCT, or SEED_EFFECT as a mask source.
        lie: makes of a request's header and its answer another answer, or None to be honest.
        told: how many lies were told.
    """

    def __init__(self, *engine: Any, **options: Any) -> None:
        super().__init__(*engine, **options)
        self.operation = Operation.PRODUCT
        self.lie: Callable[[Header, torch.Tensor], torch.Tensor | None] = lambda header, answer: None
        self.lies = 0

    def submit(
        self, tenant: str, session: Hashable, header: Header, payload: torch.Tensor, completed: OnCompletion
    ) -> None:
        """See Engine."""

        def altered(done: Completion | Exception) -> None:
            if header.operation == self.operation and isinstance(done, Completion):
                lie = self.lie(header, torch.cat([tensor.view(-1) for tensor in done.tensors]))
                if lie is not None:
                    self.lies += 1
                    done = done._replace(tensors=[lie])
            completed(done)

        super().submit(tenant, session, header, payload, altered)


class Poison:
    """Change what one layer computes: any one bit, all numbers, another row's or an old answer.

    Args:
        provider: who lies: a provider, or a mask source about the effects of its masks.
        group: about which products.
        direction: of those.
    """

    name: ClassVar[str] = "wrong answers"
    goal: ClassVar[str] = "make a tenant use wrong answers"
    sees: ClassVar[str] = "everything that a malicious provider sees"
    metric: ClassVar[str] = "wrong answers that were noticed"
    source: ClassVar[str] = "Tramer and Boneh, Slalom, arXiv 1806.03287; Freivalds, 1977"

    LIES = ("one bit", "one layer poisoned", "rows swapped", "an old answer")
    # Of half answers: as small as their rounding.
    SMALL_LIES = ("one number by one unit", "always rounded down")

    def __init__(self, provider: LyingProvider, group: int, direction: Direction) -> None:
        self.provider, self.group, self.direction = provider, group, direction

    def attack(self, session: Session, kind: str, bit: int, rng: np.random.Generator) -> bool:
        """Tell one lie, after an honest answer to the same size of request; whether it was noticed.

        A session that noticed asks for nothing more, so each lie needs one of its own.

        Args:
            session: one that fetches no effects ahead.
            kind: of LIES or SMALL_LIES.
            bit: which one of a number's is altered, if it is one.
            rng: chooses rows, and which number is altered.

        Raises:
            AuditError: it was not told, or more than once.
        """
        info = session.manifest.groups[self.group]
        forward = self.direction == Direction.FORWARD
        widths = [info.inputs] if forward else [member.outputs for member in info.members]
        tensors = [
            torch.from_numpy(rng.standard_normal((POISONED_ROWS, n)).astype(np.float32)) for n in widths
        ]
        member_bits = (1 << len(info.members)) - 1
        old: list[torch.Tensor] = []

        def ask() -> None:
            session.products.submit(self.group, self.direction, member_bits, tensors).result()

        bits: list[int] = []

        def meant(header: Header) -> bool:
            """Whether it is this request; a half answer that is asked for again is honest then."""
            if (header.group, header.direction, header.rows) != (self.group, self.direction, POISONED_ROWS):
                return False
            bits.append(header.answer_bits)
            return header.answer_bits == bits[0]

        def keep(header: Header, answer: torch.Tensor) -> None:
            if meant(header):
                old.append(answer.clone())

        self.provider.lie = keep
        ask()
        sent = self.provider.lies
        self.provider.lie = lambda header, answer: (
            _altered(kind, bit, answer, old[-1], rng) if meant(header) else None
        )
        noticed = False
        try:
            ask()
        except VerificationError:
            noticed = True
        finally:
            self.provider.lie = lambda header, answer: None
        if self.provider.lies != sent + 1:
            raise AuditError(f"a lie ({kind}) was to be told once, not {self.provider.lies - sent} times")
        return noticed


def _altered(
    kind: str, bit: int, answer: torch.Tensor, old: torch.Tensor, rng: np.random.Generator
) -> torch.Tensor:
    lie = answer.clone()
    half = lie.dtype == torch.int16
    if kind == "one number by one unit":
        lie.view(-1)[int(rng.integers(lie.numel()))] += 1
    elif kind == "always rounded down":
        lie &= -2
    elif kind == "one bit" and half:  # of those that are beyond what rounding does to a row
        lie.view(-1)[int(rng.integers(lie.numel()))] ^= 1 << 9 + bit % 6
    elif kind == "one bit":
        lie.view(-1)[int(rng.integers(lie.numel()))] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)
    elif kind == "one layer poisoned":
        lie += 1 << (4 if half else 20)
    elif kind == "rows swapped":
        lie = lie.view(POISONED_ROWS, -1).roll(1, 0).reshape(lie.shape).contiguous()
    else:
        lie = old.clone()
    return lie


class WeightExtraction:
    """Send the rows of an identity matrix: the answers are the weight."""

    name: ClassVar[str] = "weight extraction"
    goal: ClassVar[str] = "the base model's weights, by a tenant"
    sees: ClassVar[str] = "answers to its own requests"
    metric: ClassVar[str] = "relative error of the copied weight"
    source: ClassVar[str] = "linearity; documented as what an executor cannot keep"

    def __init__(self, group: int) -> None:
        self.group = group

    def attack(self, view: Session, rng: np.random.Generator) -> torch.Tensor:
        """The weight of all members: [O, D]."""
        info = view.manifest.groups[self.group]
        member_bits = (1 << len(info.members)) - 1
        columns = view.products.submit(
            self.group, Direction.FORWARD, member_bits, [torch.eye(info.inputs)]
        ).result()
        return torch.cat(columns, 1).T


@dataclass(frozen=True)
class CrossTalk:
    """``wrong`` of ``replies`` that tenants got were not their own, by the canaries in them.

    ``products`` made them; were they as many as the replies, nothing would have been shared, or shown.
    """

    wrong: int
    replies: int
    products: int


class CanaryRows:
    """Tenants at once, each with rows of its own whose answers are known exactly.

    Args:
        replies: how many in all.
        weight: what a row is multiplied with, float32 [O, D], or on the ring the planes, int32 [P O, D];
            that of ``GROUP``.
    """

    name: ClassVar[str] = "co-tenant canaries"
    goal: ClassVar[str] = "another tenant's rows in one's own answers"
    sees: ClassVar[str] = "answers to its own requests"
    metric: ClassVar[str] = "wrong replies"
    source: ClassVar[str] = "batching of many tenants: Symbiosis, section 3.6; Punica"

    GROUP, TENANTS = 1, 16  # which one is asked for, all members; how many ask at once

    def __init__(self, replies: int, weight: torch.Tensor) -> None:
        self.replies, self.weight = replies, weight

    def attack(self, view: BaseExecutor, rng: np.random.Generator) -> CrossTalk:
        """Through the executor's scheduler, one row a request: a power of two in the tenant's own place.

        The right answer is the weight's column times it, exactly, in floats and on the ring.
        """
        products: list[int] = []  # rows of each
        engine = Engine.of(view, on_batch=lambda rows, seconds, processor: products.append(rows))
        info = view.manifest.groups[self.GROUP]
        member_bits = (1 << len(info.members)) - 1
        wrong = [0] * self.TENANTS
        each = self.replies // self.TENANTS

        ended, failed = threading.Semaphore(0), list[Exception]()

        def tenant(number: int) -> Callable[[], None]:
            header = Header(
                Operation.PRODUCT,
                Direction.FORWARD,
                DTYPE_CODES[self.weight.dtype],
                self.GROUP,
                1,
                1,
                info.inputs,
                member_bits,
            )
            canary = torch.zeros(1, info.inputs, dtype=self.weight.dtype)
            canary[0, number] = 1 << number
            expected = (self.weight[:, number] * (1 << number)).numpy().tobytes()
            count = 0

            def ask() -> None:
                nonlocal count
                count += 1
                engine.submit(f"tenant {number}", number, header, canary, answered)

            def answered(done: Completion | Exception) -> None:
                if isinstance(done, Exception):
                    failed.append(done)
                elif b"".join([tensor.numpy().tobytes() for tensor in done.tensors]) != expected:
                    wrong[number] += 1
                if count < each and not failed:
                    ask()
                else:
                    ended.release()

            return ask

        for number in range(self.TENANTS):
            engine.loop.call_soon_threadsafe(tenant(number))
        for _ in range(self.TENANTS):
            ended.acquire()
        engine.close()
        if failed:
            raise failed[0]
        return CrossTalk(sum(wrong), each * self.TENANTS, len(products))


def canaries(model: Path, numerics: str, replies: int) -> CrossTalk:
    """CanaryRows through an executor of its own."""
    executor = BaseExecutor(model, numerics=numerics)
    public = PublicModel(model, executor.manifest)
    ring = numerics in RINGS
    weight = (
        public.planes(CanaryRows.GROUP).planes.flatten(0, 1).int()
        if ring
        else public.weight(CanaryRows.GROUP)
    )
    return CanaryRows(replies, weight).attack(executor, np.random.default_rng(0))


class CoTenantTiming:
    """Time one's own requests: are they slower while another tenant is at work?"""

    name: ClassVar[str] = "co-tenant timing"
    goal: ClassVar[str] = "whether another tenant is active"
    sees: ClassVar[str] = "times of its own answers"
    metric: ClassVar[str] = "moments told apart"
    source: ClassVar[str] = "contention for a shared processor"

    def __init__(self, probe: Callable[[], Any], victim: Callable[[], Any], moments: int) -> None:
        self.probe, self.victim, self.moments = probe, victim, moments

    def attack(self, view: None, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of probes while the victim rests and while it works, alternately."""
        times: tuple[list[float], list[float]] = ([], [])
        for moment in range(2 * self.moments):
            busy = bool(moment % 2)
            stop = threading.Event()

            def work(stop: threading.Event = stop) -> None:
                while not stop.is_set():
                    self.victim()

            thread = threading.Thread(target=work) if busy else None
            if thread is not None:
                thread.start()
            for _ in range(5):
                started = time.perf_counter()
                self.probe()
                times[busy].append(time.perf_counter() - started)
            stop.set()
            if thread is not None:
                thread.join()
        return np.array(times[0]), np.array(times[1])
