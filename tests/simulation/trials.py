"""Faults that are put into the product on purpose: a simulation that does not find them proves nothing.

Each trial changes the product while it is open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

from provider.engine.engine import Engine
from provider.engine.fairness import VirtualTokenCounters
from provider.engine.lanes import ProcessLane
from provider.session.quota import Quotas, _Account
from shared.errors import RequestRefused
from shared.wire.header import Header, Operation
from shared.wire.protocol import TenantProtocol
from tenant_sdk.connection.channel import Channel
from tenant_sdk.connection.remote import RemoteExecutor
from tenant_sdk.connection.replicas.reconnecting import ReconnectingConnection
from tenant_sdk.connection.replicas.retrying import GiveUp, Reconnect, RequestPolicy
from tenant_sdk.products.one_time_masks import OneTimeMask, OneTimeMasks
from tenant_sdk.products.ring_products import RingProducts


class Trial(NamedTuple):
    """A fault of the product.

    Attributes:
        shows: a part of what the simulation says of it.
        kinds: faults around the product, without which it does not show.
        patched: puts it into the product.
    """

    shows: str
    kinds: frozenset[str]
    patched: Callable[[], Any]


TRIALS: dict[str, Trial] = {}


def trial(shows: str, *kinds: str) -> Callable[[Callable[[], Iterator[None]]], Callable[[], Iterator[None]]]:
    """Register what changes the product."""

    def register(change: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
        name = change.__name__.replace("_", " ")
        TRIALS[name] = Trial(shows, frozenset(kinds), contextlib.contextmanager(change))
        return change

    return register


def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> Any:
    """Replace a method by one that is given the original first."""
    original = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        return around(original, *args, **options)

    return mock.patch.object(owner, name, call)


# -- masks ---------------------------------------------------------------------------------------


@trial("one mask", "cuts")
def a_repeated_request_has_other_rows_under_the_old_mask() -> Iterator[None]:
    def submit(original: Any, self: Channel, header_of: Any, blocks: Any) -> Any:
        def other(protocol: TenantProtocol) -> Header:
            header: Header = header_of(protocol)
            if header.operation == Operation.PRODUCT:
                blocks[0] += sent.get(id(blocks), 0)
                sent[id(blocks)] = 1
                kept.append(blocks)
            return header

        return original(self, other, blocks)

    sent, kept = dict[int, int](), list[Any]()
    with wrapped(Channel, "submit", submit):
        yield


@trial("one seed")
def a_seed_serves_two_requests() -> Iterator[None]:
    def request_effects(original: Any, self: OneTimeMasks, *args: Any) -> None:
        entropy, seeds = self._entropy, self.__dict__.setdefault("seeds", [])

        def again(count: int) -> bytes:
            if len(seeds) > 6:
                return bytes(seeds[len(seeds) % 2])
            seeds.append(entropy(count))
            return bytes(seeds[-1])

        self._entropy = again
        original(self, *args)
        self._entropy = entropy

    with wrapped(OneTimeMasks, "_request_effects", request_effects):
        yield


@trial("without a mask")
def some_rows_have_no_mask() -> Iterator[None]:
    def take_values(original: Any, self: OneTimeMask) -> torch.Tensor:
        mask: torch.Tensor = original(self)
        return mask.zero_() if len(mask) == 5 else mask

    with wrapped(OneTimeMask, "take_values", take_values):
        yield


@trial("source received rows")
def a_source_receives_the_rows() -> Iterator[None]:
    def seed_effect(original: Any, self: RemoteExecutor, *args: Any) -> Any:
        sources.append(self)
        return original(self, *args)

    def submit(original: Any, self: RemoteExecutor, *args: Any) -> Any:
        return original(sources.pop() if sources else self, *args)

    sources = list[RemoteExecutor]()
    with (
        wrapped(RemoteExecutor, "seed_effect", seed_effect),
        wrapped(RemoteExecutor, "submit_pieces", submit),
    ):
        yield


# -- answers -------------------------------------------------------------------------------------


@trial("not the product", "lies")
def no_answer_is_verified() -> Iterator[None]:
    with mock.patch.object(RingProducts, "_check_failed"):
        yield


@trial("raised", "lies")
def headers_of_answers_are_not_compared() -> Iterator[None]:
    def accept(self: TenantProtocol, header: Header) -> None:
        """Believe everything."""

    with mock.patch.object(TenantProtocol, "accept", accept):
        yield


@trial("")
def an_answer_is_given_to_another_request() -> Iterator[None]:
    def multiply(original: Any, self: ProcessLane, batch: Any) -> Any:
        result = original(self, batch)
        answers = result.answers
        if len(answers) > 1 and batch[0].request.header.rows == batch[1].request.header.rows:
            answers[0], answers[1] = answers[1], answers[0]
        return result

    with wrapped(ProcessLane, "multiply", multiply):
        yield


@trial("")
def a_row_is_multiplied_wrongly() -> Iterator[None]:
    def multiply(original: Any, self: ProcessLane, batch: Any) -> Any:
        result = original(self, batch)
        for answer in result.answers:
            if isinstance(answer, list) and len(answer[0]) == 17:
                answer[0][3] += 1
        return result

    with wrapped(ProcessLane, "multiply", multiply):
        yield


# -- memory and waiting --------------------------------------------------------------------------


@trial("still holds", "deaths")
def quota_of_abandoned_requests_is_not_given_back() -> Iterator[None]:
    def ended(original: Any, self: Engine, tenant: str, session: Any) -> None:
        for submission in self._submissions.values():
            if submission.queued.session == session:
                submission.completed = lambda done: None
        original(self, tenant, session)

    with wrapped(Engine, "session_ended", ended):
        yield


@trial("quota is", "overload")
def quota_is_not_asked() -> Iterator[None]:
    def admit(
        self: Quotas, tenant: str, rows: int, bytes_in_memory: int, received_bytes: int, now: float
    ) -> None:
        own = self._tenants.get(tenant)
        if own is None:
            own = self._tenants[tenant] = _Account(self._quota, now)
        for account in (own, self._all):
            account.charge(rows, bytes_in_memory, received_bytes)

    with mock.patch.object(Quotas, "admit", admit):
        yield


@trial("", "workers")
def a_request_that_waits_for_a_worker_is_forgotten() -> Iterator[None]:
    def turn_away(self: Engine, lane: int, now: float) -> None:
        for submission in [each for each in self._submissions.values() if not each.in_flight]:
            self.policy.drop(submission.queued)
            del self._submissions[submission.queued]

    with mock.patch.object(Engine, "_refuse_overdue", turn_away):
        yield


@trial("are promised")
def nobody_is_told_to_lead_a_channel() -> Iterator[None]:
    def pass_leadership(original: Any, self: Channel, pending: Any) -> None:
        others = [each for each in self._pending.values() if each.waited]
        for each in others:
            each.waited = False
        original(self, pending)
        for each in others:
            each.waited = True

    with wrapped(Channel, "_pass_leadership", pass_leadership):
        yield


@trial("failed after", "restarts")
def lost_requests_are_not_repeated() -> Iterator[None]:
    def after_error(original: Any, self: RequestPolicy, error: Any, now: float, **more: Any) -> Any:
        step = original(self, error, now, **more)
        return GiveUp(error) if isinstance(step, Reconnect) else step

    with wrapped(RequestPolicy, "after_error", after_error):
        yield


@trial("in good weather", "restarts")
def broken_channels_are_not_replaced() -> Iterator[None]:
    with mock.patch.object(Channel, "broken", False):
        yield


@trial("failed after", "overload")
def refusals_are_not_repeated() -> Iterator[None]:
    def refused(self: RequestPolicy, error: RequestRefused, now: float, url: str, timeout: float) -> Any:
        return GiveUp(error)

    with mock.patch.object(RequestPolicy, "_refused", refused):
        yield


@trial("are promised", "cuts")
def a_request_is_retried_for_too_long() -> Iterator[None]:
    def wait(original: Any, self: ReconnectingConnection, until: float) -> None:
        original(self, until + 3000.0)

    with wrapped(ReconnectingConnection, "_wait", wait):
        yield


@trial("tokens more", "flood")
def shares_are_not_counted() -> Iterator[None]:
    with mock.patch.object(VirtualTokenCounters, "charge"):
        yield
