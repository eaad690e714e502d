"""How much of each answer is asked for."""

from __future__ import annotations

import pytest

from shared.wire.header import EXACT, RequestClass
from tenant_sdk.products.answer_bits import FAST_LINK, AnswerBits

BULK = (RequestClass.PREFILL, RequestClass.FINETUNING)
OTHERS = (RequestClass.UNDECLARED, RequestClass.DECODE)


@pytest.mark.parametrize(("numerics", "half"), [("ring", 16), ("ring-fine", 24)])
def test_exact_and_half_are_the_same_for_every_request(numerics: str, half: int) -> None:
    for request_class in RequestClass:
        assert AnswerBits("exact", numerics).choose(request_class) == EXACT
        assert AnswerBits("half", numerics).choose(request_class) == half


def test_auto_is_exact_until_a_slow_link_is_seen() -> None:
    chosen = AnswerBits("auto", "ring")
    assert {chosen.choose(each) for each in RequestClass} == {EXACT}
    chosen.record(RequestClass.FINETUNING, 1_000_000, 1_000_000 / (FAST_LINK / 2), is_over_network=True)
    assert {chosen.choose(each) for each in BULK} == {16}
    assert {chosen.choose(each) for each in OTHERS} == {EXACT}


def test_a_link_is_as_fast_as_its_fastest_answer() -> None:
    """Others waited for the executor."""
    chosen = AnswerBits("auto", "ring")
    for rate in (FAST_LINK / 10, 2 * FAST_LINK, FAST_LINK / 10):
        chosen.record(RequestClass.PREFILL, 1_000_000, 1_000_000 / rate, is_over_network=True)
    assert chosen.choose(RequestClass.PREFILL) == EXACT


@pytest.mark.parametrize(
    ("request_class", "is_over_network", "seconds"),
    [
        (RequestClass.FINETUNING, False, 1.0),
        (RequestClass.DECODE, True, 1.0),
        (RequestClass.PREFILL, True, 0.0),
    ],
)
def test_what_says_nothing_of_the_link(
    request_class: RequestClass, is_over_network: bool, seconds: float
) -> None:
    chosen = AnswerBits("auto", "ring")
    chosen.record(request_class, 1_000, seconds, is_over_network=is_over_network)
    assert chosen.choose(RequestClass.FINETUNING) == EXACT
