"""A tenant: the real products of a session above the socket, and the requests that it makes.

Real are fixed point, masks, forecasts, verification, the remote executor, reconnecting and the channel. What
opens a TLS connection is replaced, because there is no TLS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from shared.errors import ConnectError, ConnectionRefused, SymbiosisError
from shared.wire.header import Direction, RequestClass, half_bits
from shared.wire.incoming import Incoming
from simulation.executors import Executor
from simulation.kernel import Kernel
from simulation.model import Model
from simulation.network import Network
from simulation.substitutes import SimulatedClock
from tenant_sdk.connection.channel import Channel
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.connection.remote import LazyResult, RemoteExecutor
from tenant_sdk.connection.replicas.reconnecting import ConnectionOptions
from tenant_sdk.connection.stats import Stats
from tenant_sdk.connection.websocket_channel import WebsocketChannel
from tenant_sdk.products.half_checks import FACTOR
from tenant_sdk.products.ring_products import RingProducts
from tenant_sdk.session.assembly import assemble, opened_sources
from tenant_sdk.session.options import SessionConfig
from tenant_sdk.trust.attestation import check_agreement

PROVIDER = "wss://simulated"
KEYS = [
    ProductKey(group, direction, members)
    for group, members in ((0, 0b111), (0, 0b101), (0, 0b010), (1, 1), (2, 1))
    for direction in (Direction.FORWARD, Direction.BACKWARD)
]


@dataclass(frozen=True)
class Options:
    """Of a session, as ``tenant_sdk.connect`` takes them.

    Attributes:
        opening: seconds for a handshake.
        piece_bytes: of a request that is cut.
    """

    timeout: float = 5.0
    retry_seconds: float = 30.0
    opening: float = 5.0
    answers: str = "exact"
    verify_rate: float = 1.0
    repeat_rate: float = 0.1
    mask_budget: int = 1 << 16
    chunk_rows: int = 8
    piece_bytes: int = 2048


@dataclass
class Outcome:
    """How a tenant's request ended; nothing in ``error``: it is right."""

    tenant: str
    key: ProductKey
    rows: int
    began: float
    ended: float
    error: SymbiosisError | None
    wrong: str = ""


@dataclass(eq=False)
class Tenant:
    """One tenant's process.

    Args:
        parties: the executors of the provider, and of each mask source.
        requests: that each task makes, one after the other.
        keys: of its requests.

    Attributes:
        outcomes: of all requests.
        waits: seconds of each request to an executor, also those for effects and scales.
        opened: sessions.
    """

    name: str
    kernel: Kernel
    network: Network
    model: Model
    numerics: str
    parties: list[list[Executor]]
    options: Options
    requests: int
    keys: list[ProductKey]
    outcomes: list[Outcome] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    opened: int = 0
    life: int = 0  # of its process; each has an owner of its own

    @property
    def owner(self) -> str:
        """Of the tasks of its process."""
        return f"{self.name}.{self.life}"

    def die(self) -> None:
        """Its process is killed."""
        self.kernel.note(f"{self.name} is killed")
        self.kernel.end(self.owner)
        self.network.cut_all(self.name)
        self.life += 1

    # -- the session -----------------------------------------------------------------------------

    def connect(self) -> RingProducts:
        """Open a session, as ``tenant_sdk.session.opening`` does.

        Raises:
            SymbiosisError: it cannot be opened.
        """
        options, stats, remotes = self.options, Stats(), list[RemoteExecutor]()
        try:
            for number, party in enumerate(self.parties):
                how = ConnectionOptions(
                    stats=stats, retry_seconds=options.retry_seconds, party=party[0].party,
                    clock=SimulatedClock(self.kernel),
                )  # fmt: skip
                remotes.append(RemoteExecutor(partial(self._find, party), options=how))
                self._watch(remotes[-1])
                if number:
                    check_agreement(remotes[-1].url, remotes[-1].manifest, remotes[0].manifest)
        except SymbiosisError:
            for remote in remotes:
                remote.close()
            raise
        config = SessionConfig(
            PROVIDER,
            token="-",
            mask_sources=[f"{PROVIDER}/{number}" for number in range(1, len(remotes))],
            mask_source_token="-",
            mask_budget_mib=options.mask_budget / 2**20,
            verify="always" if options.verify_rate == 1.0 else "sampled",
            verify_rate=options.verify_rate,
            repeat_rate=options.repeat_rate,
            answers=options.answers,
        )
        sources = opened_sources(config, remotes)
        entropy = self.kernel.random.randbytes
        products = assemble(config, remotes, sources, None, entropy=entropy, clock=lambda: self.kernel.now)
        assert isinstance(products, RingProducts)
        masks: Any = products._masks
        masks._store.chunk_rows = options.chunk_rows
        self.opened += 1
        return products

    def _watch(self, remote: RemoteExecutor) -> None:
        """Note how long each request waits for its answer, however often it is sent."""
        for connection in remote._parts.all:
            connection.answer = partial(self._answer, connection.answer)  # type: ignore[method-assign]

    def _answer(self, answer: Callable[..., Incoming], *args: Any) -> Incoming:
        began = self.kernel.now
        try:
            return answer(*args)
        finally:
            self.waits.append(self.kernel.now - began)

    def close(self, products: RingProducts) -> None:
        """End a session; see ``tenant_sdk.session.session``."""
        products.close()
        products._remote.close()

    def _find(self, party: list[Executor]) -> dict[str, Callable[[], Channel]]:
        return {each.name: partial(self._open, each) for each in party}

    def _open(self, executor: Executor) -> Channel:
        """In place of TCP, TLS and the websocket handshake."""
        kernel, network, options = self.kernel, self.network, self.options
        conditions = network.conditions
        kernel.sleep(network.delay())
        if not executor.up or executor.connections.draining or kernel.random.random() < conditions.refuse:
            raise ConnectionRefused(f"cannot connect to {executor.name}: refused; is the executor running?")
        if kernel.random.random() < conditions.silent:
            kernel.sleep(options.opening)
            raise ConnectError(f"{executor.name} did not answer within {options.opening:.0f} s")
        connection = network.connect(self.name, executor.name)
        mine, theirs = connection.ends
        if not executor.accept(theirs, self.name):
            raise ConnectError(f"{executor.name}: no room for another session", retry_after=1.0)
        kernel.note(f"{connection.name}: open")
        kernel.sleep(network.delay())
        channel = WebsocketChannel(
            mine,  # type: ignore[arg-type]
            executor.name,
            timeout=options.timeout,
            entropy=kernel.random.randbytes,
            clock=SimulatedClock(kernel),
        )
        channel.piece_bytes = options.piece_bytes
        return channel

    # -- requests --------------------------------------------------------------------------------

    def work(self, products: RingProducts, requests: int) -> None:
        """Make requests, of which some are in flight together."""
        draw = self.kernel.random
        while requests > 0 and products._failed is None:
            together = min(requests, draw.choice((1, 1, 2, 3)))
            asked = [self.ask(products, *self._drawn()) for _ in range(together)]
            for result in asked:
                result()
            requests -= together
            self.kernel.sleep(draw.choice((0.0, 0.0, 0.01, 0.3)))

    def _drawn(self) -> tuple[ProductKey, int, RequestClass]:
        draw = self.kernel.random
        rows = draw.choice((1, 1, 2, 5, 17, 40))
        return draw.choice(self.keys), rows, RequestClass(draw.randrange(4))

    def ask(
        self, products: RingProducts, key: ProductKey, count: int, request_class: RequestClass
    ) -> Callable[[], Outcome]:
        """Submit a product; the call that waits for it and judges it."""
        kernel, began = self.kernel, self.kernel.now
        drawn = torch.Generator().manual_seed(kernel.random.getrandbits(40))
        scale = 10.0 ** kernel.random.uniform(-3, 3)
        tensors = [scale * torch.randn(count, width, generator=drawn) for width in self.model.widths(key)[0]]
        kernel.note(
            f"{self.name} asks for {key.direction.name.lower()} {key.group}/{key.member_bits:b}, {count} rows"
        )

        def end(error: SymbiosisError | None, wrong: str = "") -> Outcome:
            outcome = Outcome(self.name, key, count, began, kernel.now, error, wrong)
            self.outcomes.append(outcome)
            told = error if kernel.traces else type(error).__name__  # making the text takes long
            kernel.note(f"{self.name} has {wrong or (told if error is not None else 'an answer')}")
            return outcome

        try:
            pending = products.submit(*key.product, tensors, request_class)
        except SymbiosisError as error:
            failed = error
            return lambda: end(failed)
        return lambda: self._judged(pending, key, tensors, end)

    def _judged(
        self,
        pending: LazyResult,
        key: ProductKey,
        tensors: list[torch.Tensor],
        end: Callable[..., Outcome],
    ) -> Outcome:
        try:
            results = pending.result()
        except SymbiosisError as error:
            return end(error)
        return end(None, self._wrong(key, tensors, results))

    def _wrong(self, key: ProductKey, tensors: Sequence[torch.Tensor], results: list[torch.Tensor]) -> str:
        """What is wrong with an accepted answer; empty: nothing."""
        sources = len(self.parties) - 1
        if self.options.answers == "exact":
            expected = self.model.expected(key, list(tensors), sources)
            same = all(torch.equal(one, other) for one, other in zip(expected, results, strict=True))
            return "" if same else "an answer that is not the product"
        key = key._replace(answer_bits=half_bits(self.numerics))
        expected = self.model.expected(key, list(tensors), sources)
        unit = self.model.unit(key, list(tensors), sources)
        errors = (torch.cat(results, 1) - torch.cat(expected, 1)).double() / unit
        errors[unit == 0] = 0.0
        # Honest rounding is within a unit, and one for each effect. A lie may be what the check lets pass.
        if self.name in self.network.damaged:
            most = 2 * FACTOR * math.sqrt(errors.shape[1]) * (1 + sources)
            return "" if float(errors.norm(dim=1).max()) <= most else "an answer far from the product"
        return (
            "" if float(errors.abs().max()) <= sources + 1.5 else "an answer that rounding does not explain"
        )
