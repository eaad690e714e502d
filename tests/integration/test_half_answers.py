"""Answers of which only the upper bits travel: parity, bytes, and what their checks find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import RING, Executor
from intercepting_proxy import Change, InterceptingProxy, Message
from parity import add_lora, fixed_result, gradients, token_ids
from ring_sessions import MASKINGS, ExecutorFactory, captured_requests, one_time, products, session_in

import tenant_sdk
from shared.errors import ConfigurationError, ConnectionLost, VerificationError
from shared.wire.header import RINGS, Direction
from tenant_sdk.products import half_checks, one_time_masks
from tenant_sdk.products.ring_requests import HalfRequest

pytest_plugins = ("ring_fixtures",)

Proxy = Callable[[Executor], InterceptingProxy]
TARGET = 5  # the second block's output projection, which has one member
BITS = 16 if RINGS[RING] == 1 else 24


@pytest.mark.parametrize("masking", MASKINGS)
def test_results_are_near_those_of_exact_answers(
    masking: str, executors: ExecutorFactory, checkpoint: Callable[[str], Path]
) -> None:
    """A layer's rounding is below 2e-3 of its result for layers this narrow, and layers follow each other."""
    folder, results = checkpoint("llama"), {}
    options: dict[str, Any] = {} if masking in ("one source", "two sources", "local") else {"verify": "off"}
    for answers in ("exact", "half"):
        with session_in(masking, executors("llama"), folder, answers=answers, **options) as session:
            model = add_lora(session.load_model(progress=False))
            results[answers] = gradients(model, token_ids())
    for name, exact in results["exact"].items():
        distance = (results["half"][name] - exact).norm() / exact.norm()
        assert 0 < distance < 2e-2, name


def test_answers_and_effects_have_half_the_bytes(executors: ExecutorFactory) -> None:
    received, sent = {}, {}
    for answers in ("exact", "half"):
        options = {"answers": answers, "mask_budget_mib": 0, "verify": "off"}
        with one_time(*executors("llama")[:2], **options) as session:
            fixed_result(session.load_model(progress=False), token_ids())
            received[answers], sent[answers] = session.stats.bytes_received, session.stats.bytes_sent
    assert received["half"] * 32 == received["exact"] * BITS
    assert sent["half"] == sent["exact"]


def test_auto_is_exact_on_this_machine(executors: ExecutorFactory) -> None:
    """No network lies between."""
    results = {}
    for answers in ("exact", "auto"):
        with one_time(*executors("llama")[:2], answers=answers) as session:
            results[answers] = fixed_result(session.load_model(progress=False), token_ids())
    assert torch.equal(results["exact"], results["auto"])


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD])
@pytest.mark.parametrize("masking", ["plain", "one source", "two sources"])
def test_a_row_of_zeros_has_a_product_of_zeros(
    masking: str,
    direction: Direction,
    executors: ExecutorFactory,
    checkpoint: Callable[[str], Path],
) -> None:
    """Rounding adds a unit times the row's step, and such a row has none of its own: padding's gradients."""
    options = {"answers": "half", "verify": "off"} if masking == "plain" else {"answers": "half"}
    with session_in(masking, executors("llama"), checkpoint("llama"), **options) as session:
        rows = torch.zeros((3, 64))
        rows[1] = torch.linspace(-1, 1, 64)
        (got,) = session.products.submit(TARGET, direction, 1, [rows]).result()
    assert got[1].any()
    assert not got[[0, 2]].any()


# -- checks ---------------------------------------------------------------------------------------


def upper(message: Message, body: bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The numbers of an answer, [rows, columns]."""
    raw = np.frombuffer(body, np.uint8).reshape(message.fields.rows, -1, BITS // 8)
    wide = np.zeros((*raw.shape[:2], 4), np.uint8)
    wide[:, :, 4 - BITS // 8 :] = raw
    return wide.view(np.int32)[:, :, 0].astype(np.int64) >> 32 - BITS


def packed(numbers: np.ndarray[Any, np.dtype[np.int64]]) -> bytes:
    wide = np.ascontiguousarray((numbers << 32 - BITS).astype(np.int32)).view(np.uint8)
    return wide.reshape(*numbers.shape, 4)[:, :, 4 - BITS // 8 :].tobytes()


def on_upper(change: Callable[[Any], Any]) -> Change:
    return lambda message, body: packed(change(upper(message, body)))


def plus(amount: int, where: Any = np.s_[:]) -> Change:
    def change(numbers: Any) -> Any:
        numbers[where] += amount
        return numbers

    return on_upper(change)


WRONG: dict[str, Change] = {
    "one number, by a hundred units": plus(100, np.s_[3, 7]),
    "two numbers that cancel": on_upper(
        lambda n: n + 80 * np.eye(1, n.shape[1], 3, int) - 80 * np.eye(1, n.shape[1], 9, int)
    ),
    "every number, by three units": plus(3),
    "one row": on_upper(lambda n: np.concatenate([n[1:2], n[1:]])),
    "rows swapped": on_upper(lambda n: n[::-1]),
    "negated": on_upper(lambda n: -n),
    "zeros": on_upper(lambda n: 0 * n),
}


@pytest.fixture
def step(executors: ExecutorFactory, proxy: Proxy) -> Any:
    """See ``test_tampering``; of half answers."""

    def begin(who: str, **options: Any) -> tuple[tenant_sdk.Session, Any, InterceptingProxy]:
        parties = list(executors("llama")[:2])
        at = ["provider", "source"].index(who)
        middle = proxy(parties[at])
        parties[at] = middle.executor
        chosen = {"mask_budget_mib": 0, "answers": "half", "repeat_rate": 0.0} | options
        session = one_time(*parties, **chosen)
        model = add_lora(session.load_model(progress=False))
        gradients(model, token_ids())
        return session, model, middle

    return begin


def aim(change: Change, middle: InterceptingProxy, direction: Direction) -> None:
    """Change half answers to requests of TARGET in one direction from now on."""

    def changed(message: Message, body: bytes) -> bytes:
        fields = message.fields
        hit = (fields.group, fields.direction, fields.answer_bits) == (TARGET, direction, BITS)
        return change(message, body) if hit else body

    middle.changes.append(changed)


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD])
@pytest.mark.parametrize("who", ["provider", "source"])
@pytest.mark.parametrize("name", WRONG)
def test_errors_beyond_the_bound_are_noticed(name: str, who: str, direction: Direction, step: Any) -> None:
    session, model, middle = step(who)
    with session:
        aim(WRONG[name], middle, direction)
        with pytest.raises(VerificationError, match="o_proj"):
            gradients(model, token_ids())
        middle.changes.clear()
        with pytest.raises(VerificationError, match="wrong answer"):  # one ends the session
            fixed_result(model, token_ids())


@pytest.mark.parametrize("who", ["provider", "source"])
def test_errors_below_the_bound_pass_unless_the_answer_is_asked_for_again(who: str, step: Any) -> None:
    """One unit in one number is as much as the masks' own rounding."""
    session, model, middle = step(who)
    with session:
        aim(plus(1, np.s_[0, 0]), middle, Direction.FORWARD)
        fixed_result(model, token_ids())
    session, model, middle = step(who, repeat_rate=1.0)
    with session:
        aim(plus(1, np.s_[0, 0]), middle, Direction.FORWARD)
        with pytest.raises(VerificationError, match="o_proj"):
            fixed_result(model, token_ids())


@pytest.mark.parametrize("who", ["provider", "source"])
def test_an_answer_that_is_right_only_when_asked_again_is_noticed(who: str, step: Any) -> None:
    """The exact answer is honest, the rounded one before it was not."""
    session, model, middle = step(who, repeat_rate=1.0)
    with session:
        gradients(model, token_ids())
        aim(on_upper(lambda n: n - (n & 1)), middle, Direction.BACKWARD)  # always down
        with pytest.raises(VerificationError, match="o_proj"):
            gradients(model, token_ids())


def cutting(middle: InterceptingProxy) -> Change:
    """Ends the connection in place of an answer that is asked for again with all bits."""

    def cut(message: Message, body: bytes) -> bytes:
        if message.fields.group == TARGET and message.fields.answer_bits == 32:
            middle.cut()
        return body

    return cut


@pytest.mark.parametrize("who", ["provider", "source"])
def test_a_wrong_answer_is_not_forgotten_if_nobody_answers_when_it_is_asked_for_again(
    who: str, step: Any
) -> None:
    session, model, middle = step(who, patience=0)

    with session:
        aim(WRONG["one number, by a hundred units"], middle, Direction.FORWARD)
        middle.changes.append(cutting(middle))
        with pytest.raises(VerificationError, match="o_proj"):
            fixed_result(model, token_ids())


def test_a_doubt_is_not_forgotten_if_the_next_effects_do_not_come(
    executors: ExecutorFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Effects come in parts, one for each batch of seeds: the first is wrong, and the second is withheld."""
    parties, effects = executors("llama")[:2], one_time_masks.OneTimeMask.effects

    def wrong_and_cut(mask: Any) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        for rows, each in effects(mask):
            half = rows.stop // 2
            yield slice(0, half), [effect[:half] + 100 for effect in each]
            raise ConnectionLost("the mask source is unavailable")

    with one_time(*parties, answers="half", repeat_rate=0.0, mask_budget_mib=0) as session:
        model = session.load_model(progress=False)
        fixed_result(model, token_ids())
        with monkeypatch.context() as patch:
            patch.setattr(one_time_masks.OneTimeMask, "effects", wrong_and_cut)
            with pytest.raises(VerificationError, match="could not be confirmed"):
                fixed_result(model, token_ids())
        with pytest.raises(VerificationError, match="could not be confirmed"):
            fixed_result(model, token_ids())


@pytest.mark.parametrize("sources", [1, 2])
def test_honest_rows_beyond_the_limit_are_asked_for_again(
    sources: int, executors: ExecutorFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: what is asked for again tells of rows. Here every row is; else those of weights of low rank."""
    monkeypatch.setattr(half_checks, "limit_of", lambda *_: -1.0)
    parties = executors("llama")[: 1 + sources]
    with one_time(*parties, answers="half", repeat_rate=0.0) as session:
        model = session.load_model(progress=False)
        with captured_requests() as sent:
            fixed_result(model, token_ids())
        bodies = products(sent)
        assert len(bodies) > len(set(bodies))
        with captured_requests() as sent:
            found = fixed_result(model, token_ids())
        bodies = products(sent)
        assert len(bodies) == len(set(bodies))
    with one_time(*parties) as session:
        assert torch.equal(found, fixed_result(session.load_model(progress=False), token_ids()))


@pytest.mark.parametrize("who", ["provider", "source"])
def test_an_answer_that_is_owed_and_does_not_come_ends_the_session(who: str, step: Any) -> None:
    """Else an executor could err within the bound, and withhold what shows it."""
    session, model, middle = step(who, patience=0, repeat_rate=1.0)

    with session:
        fixed_result(model, token_ids())
        aim(plus(1, np.s_[0, 0]), middle, Direction.FORWARD)
        middle.changes.append(cutting(middle))
        with pytest.raises(VerificationError, match=r"could not be confirmed.*o_proj"):
            fixed_result(model, token_ids())
        middle.changes.clear()
        with pytest.raises(VerificationError, match="could not be confirmed"):
            fixed_result(model, token_ids())


def test_a_user_who_interrupts_what_is_owed_ends_the_session(
    step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, model, middle = step("provider")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with session:
        monkeypatch.setattr(HalfRequest, "_recheck_holds", interrupted)
        aim(WRONG["one number, by a hundred units"], middle, Direction.FORWARD)
        with pytest.raises(KeyboardInterrupt):
            fixed_result(model, token_ids())
        middle.changes.clear()
        with pytest.raises(VerificationError, match="could not be confirmed"):
            fixed_result(model, token_ids())


def test_the_same_bytes_are_sent_again(executors: ExecutorFactory) -> None:
    """So the provider sees no second mask of a row."""
    with one_time(*executors("llama")[:2], answers="half", repeat_rate=1.0) as session:
        model = session.load_model(progress=False)
        fixed_result(model, token_ids())
        with captured_requests() as sent:
            fixed_result(model, token_ids())
    bodies = products(sent)
    assert len(bodies) == 2 * len(set(bodies))


def test_plain_rows_cannot_carry_challenges(executors: ExecutorFactory) -> None:
    with pytest.raises(ConfigurationError, match="secret numbers"):
        executors("llama")[0].connect(privacy="plain", answers="half", verify="always")


def test_honest_rows_pass(executors: ExecutorFactory) -> None:
    """Some ten thousand rows; one false alarm would end the session."""
    with one_time(*executors("llama")[:2], answers="half", repeat_rate=0.0) as session:
        model = add_lora(session.load_model(progress=False))
        for seed in range(20):
            gradients(model, token_ids(seed=seed))
        assert session.stats.verified_rows > 5_000
