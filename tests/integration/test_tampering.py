"""Wrong answers, of the provider or of a mask source, are noticed before anything of them is used.

A proxy changes real answers of real executors on their way: what a dishonest executor would do.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import RING, Executor
from drafting import guessing
from intercepting_proxy import Change, InterceptingProxy, Message
from memory_sources import Entropy
from parity import add_lora, fixed_result, gradients, loss_of, token_ids
from raw_peers import SECONDS
from ring_sessions import ExecutorFactory, one_time, other_layers
from torch import nn

import tenant_sdk
from shared.errors import ModelMismatch, VerificationError, WireError
from shared.wire.header import RINGS, Direction
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.model.virtual import VirtLinear
from tenant_sdk.products.mask_sources import ExecutorSource
from tenant_sdk.products.verification import Fingerprint
from tenant_sdk.products.verifier import Verifier

pytest_plugins = ("ring_fixtures",)

Proxy = Callable[[Executor], InterceptingProxy]
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
TARGET = 5  # the second block's output projection, which has one member


def numbers(body: bytes, message: Message) -> np.ndarray[Any, np.dtype[np.int32]]:
    """An answer's integers, [rows, columns], to be changed."""
    return np.frombuffer(bytearray(body), np.int32).reshape(message.fields.rows, -1)


def on_numbers(change: Callable[[Any], Any]) -> Change:
    def apply(message: Message, body: bytes) -> bytes:
        integers = numbers(body, message)
        return np.ascontiguousarray(change(integers)).tobytes()

    return apply


def put(at: tuple[int, int], value: Callable[[Any], int]) -> Change:
    """Change one element."""

    def change(integers: Any) -> Any:
        integers[at] = np.int64(value(int(integers[at]))).astype(np.int32)
        return integers

    return on_numbers(change)


def one_row(integers: Any) -> Any:
    integers[-1] = np.random.default_rng(0).integers(-(2**31), 2**31, integers.shape[1])
    return integers


class Replay:
    """Answers with what a request of the same size got earlier: of the same group, or of any other."""

    def __init__(self, *, same_group: bool) -> None:
        self._same_group = same_group
        self.seen: list[tuple[int, bytes]] = []

    def remember(self, message: Message, body: bytes) -> bytes:
        self.seen.append((message.fields.group, body))
        return body

    def __call__(self, message: Message, body: bytes) -> bytes:
        group = message.fields.group
        return next(old for g, old in self.seen if (g == group) == self._same_group and len(old) == len(body))


CHANGES: dict[str, Callable[[], Change]] = {
    "one bit": lambda: put((3, 7), lambda value: value ^ 1),
    "one bit of the second plane": lambda: put((0, -1), lambda value: value ^ 1 << 13),
    "the sign bit": lambda: put((2, 0), lambda value: value ^ 1 << 31),
    "2^31 more": lambda: put((1, 1), lambda value: value + 2**31),
    "one element": lambda: put((4, 5), lambda value: 12345),
    "one row": lambda: on_numbers(one_row),
    "two rows swapped": lambda: on_numbers(lambda integers: integers[[1, 0, *range(2, len(integers))]]),
    "all rows swapped": lambda: on_numbers(lambda integers: integers[::-1]),
    "columns swapped": lambda: on_numbers(lambda integers: integers[:, ::-1]),
    "negated": lambda: on_numbers(lambda integers: -integers),
    "zeros": lambda: on_numbers(lambda integers: 0 * integers),
    "noise": lambda: lambda _, body: random.Random(0).randbytes(len(body)),
    "an old answer": lambda: Replay(same_group=True),
    "another group's answer": lambda: Replay(same_group=False),
}


@pytest.fixture
def step(
    executors: ExecutorFactory, proxy: Proxy
) -> Callable[..., tuple[tenant_sdk.Session, nn.Module, InterceptingProxy, list[str]]]:
    """A session with a proxy before one of its executors, a model that has been through one honest
    training step, and everybody's URL: ``step("provider", verify="always")``."""
    provider, source, other = executors("llama")

    def begin(who: str, **options: Any) -> tuple[tenant_sdk.Session, nn.Module, InterceptingProxy, list[str]]:
        parties = [provider, source, other]
        at = ["provider", "source", "second source"].index(who)
        middle = proxy(parties[at])
        parties[at] = middle.executor
        # Without effects fetched ahead every answer is used at once.
        session = one_time(*parties, **({"mask_budget_mib": 0, "verify": "always"} | options))
        model = add_lora(session.load_model(progress=False))
        gradients(model, token_ids())
        return session, model, middle, [party.url for party in parties]

    return begin


def aim(change: Change, middle: InterceptingProxy, model: nn.Module, direction: Direction) -> None:
    """Change answers to requests of TARGET in one direction from now on."""
    if isinstance(change, Replay):  # what is replayed is of an earlier step, under other masks
        middle.changes.append(change.remember)
        gradients(model, token_ids(seed=4))
        middle.changes.clear()
    middle.changes.append(
        lambda message, body: (
            change(message, body)
            if (message.fields.group, message.fields.direction) == (TARGET, direction)
            else body
        )
    )


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("who", ["provider", "source"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_wrong_answer_is_noticed(name: str, who: str, direction: Direction, step: Any) -> None:
    session, model, middle, urls = step(who)
    with session:
        aim(CHANGES[name](), middle, model, direction)
        with pytest.raises(VerificationError) as caught:
            gradients(model, token_ids())
    message = str(caught.value)
    assert all(url in message for url in urls)
    assert "layers.1.self_attn.o_proj" in message
    assert f"{direction.name.lower()} product of group {TARGET}" in message


def test_a_pass_that_checks_guesses_is_checked_too(step: Any) -> None:
    session, model, middle, _ = step("provider")
    with session:
        base = model.get_base_model().eval()
        options = {
            "custom_generate": guessing(base, 3),
            "max_new_tokens": 12,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        base.generate(token_ids()[:1], do_sample=False, **options)
        middle.changes.append(
            lambda message, body: (
                put((1, 0), lambda value: value ^ 1)(message, body)
                if (message.fields.group, message.fields.rows) == (TARGET, 4)
                else body
            )
        )
        with pytest.raises(VerificationError):
            base.generate(token_ids()[:1], do_sample=False, **options)


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_the_second_source_is_watched_too(direction: Direction, step: Any) -> None:
    session, model, middle, _ = step("second source")
    with session:
        aim(CHANGES["one bit"](), middle, model, direction)
        with pytest.raises(VerificationError):
            gradients(model, token_ids())


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_several_members_of_a_group_are_checked_together(direction: Direction, step: Any) -> None:
    session, model, middle, _ = step("provider")
    with session:
        # One bit of the second plane of the last of q, k and v; backward, of their common input's gradient.
        middle.changes.append(
            lambda message, body: (
                put((0, -1), lambda value: value ^ 1)(message, body)
                if (message.fields.group, message.fields.direction) == (4, direction)
                else body
            )
        )
        with pytest.raises(VerificationError, match=r"q_proj, .*k_proj, .*v_proj"):
            gradients(model, token_ids())


def test_nothing_of_a_wrong_answer_reaches_the_model_and_the_session_is_over(step: Any) -> None:
    session, model, middle, _ = step("provider")
    honest: list[torch.Tensor] = []
    got: list[torch.Tensor] = []
    with session:
        outputs = honest
        for layer in model.modules():
            if isinstance(layer, VirtLinear):
                layer.register_forward_hook(lambda _, __, output: outputs.append(output.detach().clone()))
        fixed_result(model, token_ids())
        aim(CHANGES["one bit"](), middle, model, FORWARD)
        outputs = got
        with pytest.raises(VerificationError):
            fixed_result(model, token_ids())
        assert len(got) == 7 + 3  # the first block, and q, k and v of the second
        assert all(torch.equal(one, other) for one, other in zip(got, honest, strict=False))
        # From now on nothing more is asked for, neither of the provider nor of the source.
        middle.changes.clear()
        before = session.stats
        for _ in range(2):
            with pytest.raises(VerificationError, match="wrong answer"):
                fixed_result(model, token_ids())
        after = session.stats
        assert (after.requests, after.effect_requests) == (before.requests, before.effect_requests)


def test_no_gradient_is_made_of_a_wrong_answer(step: Any) -> None:
    session, model, middle, _ = step("source")
    with session:
        honest = gradients(model, token_ids())
        aim(CHANGES["one element"](), middle, model, BACKWARD)
        model.zero_grad()
        with pytest.raises(VerificationError):
            loss_of(model, token_ids()).backward()
    made = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert 0 < len(made) < len(honest)
    assert all(torch.equal(gradient, honest[name]) for name, gradient in made.items())


@pytest.mark.parametrize("who", ["provider", "source"])
def test_an_executor_that_lies_from_the_beginning(who: str, executors: ExecutorFactory, proxy: Proxy) -> None:
    """Also while the fingerprints are made, and always in the same way."""
    parties = list(executors("llama")[:2])
    middle = proxy(parties[who == "source"])
    parties[who == "source"] = middle.executor
    middle.changes.append(put((0, 0), lambda value: value + 1))
    with one_time(*parties) as session:
        model = session.load_model(progress=False)
        with pytest.raises(VerificationError):
            fixed_result(model, token_ids())


@pytest.mark.parametrize("name", ["one row", "negated"])
def test_without_verification_nothing_is_noticed(name: str, step: Any) -> None:
    """Which shows that the tests above see verification at work."""
    session, model, middle, _ = step("provider", verify="off")
    with session:
        honest = fixed_result(model, token_ids())
        aim(CHANGES[name](), middle, model, FORWARD)
        assert not torch.equal(fixed_result(model, token_ids()), honest)
        assert session.stats.verified_rows == 0


# -- sampled --------------------------------------------------------------------------------------


class NoFingerprints:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def get(self, key: ProductKey, product: Any) -> Fingerprint:
        self.asked += 1
        return Fingerprint(torch.empty(0), torch.empty(0))


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.5, 1.0, 1e-12])
def test_the_rate_is_honoured(rate: float) -> None:
    """Within five standard deviations; secret bytes that are the same in every run."""
    verifier = Verifier(NoFingerprints(), (), rate=rate, entropy=Entropy(1), parties="")
    count = 20_000
    drawn = sum(
        verifier.fingerprint(ProductKey(0, FORWARD, 1), lambda *_: torch.empty(0)) is not None
        for _ in range(count)
    )
    assert abs(drawn - rate * count) <= 5 * (rate * (1 - rate) * count) ** 0.5 + 1e-6


def test_sampled_verification_notices_in_the_end(step: Any) -> None:
    session, model, middle, _ = step("provider", verify="sampled", verify_rate=0.2)
    with session:
        before = session.stats
        for seed in range(3):
            gradients(model, token_ids(seed=seed))
        after = session.stats
        checked = after.verified_rows - before.verified_rows
        assert 0 < checked < after.rows - before.rows
        aim(CHANGES["one bit"](), middle, model, FORWARD)

        def go_on() -> None:
            for _ in range(200):  # each is caught with probability 0.2
                fixed_result(model, token_ids())

        with pytest.raises(VerificationError):
            go_on()


def test_sampling_does_not_show_in_what_is_asked_for(executors: ExecutorFactory, proxy: Proxy) -> None:
    """If a fingerprint were made only when a request is to be checked, an executor could give wrong
    answers until it sees one made."""
    provider, source, _ = executors("llama")
    seen = []
    for rate in (1e-9, 1.0):
        middle = proxy(provider)
        middle.keep = True
        with one_time(middle.executor, source, verify="sampled", verify_rate=rate) as session:
            fixed_result(session.load_model(progress=False), token_ids())
        seen.append([(m.fields.group, m.fields.direction, m.fields.rows) for m in middle.requests])
    assert seen[0] == seen[1]
    assert len(seen[0]) == 3 * 8  # a fingerprint, its trial, the model's own


@pytest.mark.parametrize("who", ["provider", "source"])
@pytest.mark.parametrize("top", [False, True])
def test_a_falsified_fingerprint_is_noticed_before_any_row_is_sent(
    who: str, top: bool, executors: ExecutorFactory, proxy: Proxy
) -> None:
    """Else it would fit some of the tenant's rows and not others, and tell its author which."""
    parties = list(executors("llama")[:2])
    middle = proxy(parties[who == "source"])
    parties[who == "source"] = middle.executor
    planes = RINGS[RING]
    row, change = (3 * planes, -(2**31)) if top else (0, 1)  # of the highest digit, or the lowest

    def falsify(message: Message, body: bytes) -> bytes:
        if (message.fields.direction, message.fields.rows) != (BACKWARD, 4 * planes):
            return body
        return put((row, 3), lambda value: value + change)(message, body)

    middle.changes.append(falsify)
    with one_time(*parties, mask_budget_mib=0) as session:
        model = session.load_model(progress=False)
        with pytest.raises(VerificationError):
            fixed_result(model, token_ids())
        assert session.stats.verified_rows == 0
        asked = session.stats.requests
        with pytest.raises(VerificationError):
            fixed_result(model, token_ids())
        assert session.stats.requests == asked


def test_a_wrong_part_is_not_forgotten_when_a_later_one_fails(
    executors: ExecutorFactory, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executor that could undo its lies by failing would have as many guesses as it likes."""
    provider, source, _ = executors("llama")
    middle = proxy(source)
    with one_time(provider, middle.executor, mask_budget_mib=0, timeout=SECONDS) as session:
        model = session.load_model(progress=False)
        fixed_result(model, token_ids())
        monkeypatch.setattr(ExecutorSource, "max_rows", lambda *_: 3)
        lies = []

        def lie_then_fail(message: Message, body: bytes) -> bytes:
            if message.fields.rows != 3:
                middle.cut()
            lies.append(message)
            return put((0, 0), lambda value: value + 1)(message, body)

        middle.changes.append(lie_then_fail)
        with pytest.raises(VerificationError):
            session.products.submit(TARGET, FORWARD, 1, [torch.ones(4, 64)]).result()
        assert lies
        with pytest.raises(VerificationError):
            fixed_result(model, token_ids())


# -- weights --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stranger(
    tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., Executor]
) -> tuple[Executor, Executor]:
    """Two executors of the same model with other weights in its linear layers."""
    path = tmp_path_factory.mktemp("stranger")
    other_layers(path)
    return serve(path, numerics=RING), serve(path, numerics=RING)


def test_a_source_of_other_weights_is_refused(executors: ExecutorFactory, stranger: Any) -> None:
    with pytest.raises(ModelMismatch, match="do not serve the same"):
        one_time(executors("llama")[0], stranger[0])


@pytest.mark.parametrize("who", ["provider", "source"])
def test_other_weights_under_a_false_name(
    who: str, executors: ExecutorFactory, proxy: Proxy, stranger: Any
) -> None:
    """It claims the digest, the bounds and the scales of the others, and multiplies with its own weights."""
    honest = executors("llama")[0]
    middle = proxy(stranger[0])
    middle.claim(honest)
    parties = (middle.executor, honest) if who == "provider" else (honest, middle.executor)
    with one_time(*parties) as session:
        model = session.load_model(progress=False)
        with pytest.raises(VerificationError):
            fixed_result(model, token_ids())


def halved(_: dict[str, Any], body: bytes) -> bytes:
    return (np.frombuffer(body, np.float32) / 2).tobytes()


@pytest.mark.parametrize("sources", ["an executor", "local"])
def test_wrong_scales_are_refused(
    sources: str, executors: ExecutorFactory, proxy: Proxy, checkpoint: Callable[[str], Path]
) -> None:
    """No product shows them, so they are compared."""
    provider, source, _ = executors("llama")
    middle = proxy(provider)
    middle.scales = halved
    theirs = source if sources == "an executor" else checkpoint("llama")
    with (
        one_time(middle.executor, theirs) as session,
        pytest.raises(ModelMismatch, match="disagree about the scales of group 0"),
    ):
        fixed_result(session.load_model(progress=False), token_ids())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_impossible_scales_are_refused_in_every_mode(
    value: float, executors: ExecutorFactory, proxy: Proxy
) -> None:
    middle = proxy(executors("llama")[0])
    middle.scales = lambda _, body: np.full(len(body) // 4, value, np.float32).tobytes()
    with middle.executor.connect() as session, pytest.raises(ModelMismatch, match="scales"):
        fixed_result(session.load_model(progress=False), token_ids())


def with_bounds(factor: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(manifest: dict[str, Any]) -> dict[str, Any]:
        for group in manifest["groups"]:
            group["bounds"] = [int(bound * factor) for bound in group["bounds"]]
        return manifest

    return change


@pytest.mark.parametrize("factor", [0.5, 1.5])
@pytest.mark.parametrize("sources", ["an executor", "local"])
def test_wrong_bounds_are_refused(
    sources: str,
    factor: float,
    executors: ExecutorFactory,
    proxy: Proxy,
    checkpoint: Callable[[str], Path],
) -> None:
    """Too small, products would overflow; too large, rows would lose digits, which no check of products
    could notice."""
    provider, source, _ = executors("llama")
    middle = proxy(provider)
    middle.manifest = with_bounds(factor)
    theirs = source if sources == "an executor" else checkpoint("llama")
    refused = pytest.raises((ModelMismatch, WireError), match=r"bounds|groups")  # or they cannot be at all
    with refused, one_time(middle.executor, theirs) as session:
        fixed_result(session.load_model(progress=False), token_ids())


def test_overflow_under_wrong_bounds_is_noticed(executors: ExecutorFactory, proxy: Proxy) -> None:
    """Where nobody knows better, as when all executors claim the same, the check of products does."""
    parties = []
    for executor in executors("llama")[:2]:
        middle = proxy(executor)
        middle.manifest = with_bounds(1e-4)
        parties.append(middle.executor)
    with one_time(*parties) as session:
        model = session.load_model(progress=False)
        with pytest.raises(VerificationError):
            fixed_result(model, token_ids())
