"""Groups that a tenant keeps: the best choice within a budget, and products that are those of the weights."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from shared.errors import ModelMismatch
from shared.kept_groups import Candidate, choose_groups
from shared.wire.header import Direction, RequestClass
from shared.wire.messages import GroupInfo, Member
from tenant_sdk.connection.remote import LazyResult
from tenant_sdk.products.kept_groups import KeptProducts, group_weights


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_saves_more(seed: int) -> None:
    draw = random.Random(seed)
    groups = [Candidate(draw.randrange(1, 100), draw.uniform(-1, 5)) for _ in range(10)]
    budget = draw.randrange(1, 400)
    chosen = choose_groups(groups, budget)
    assert sum(groups[at].size for at in chosen) <= budget

    def saved(places: Any) -> float:
        return sum(groups[at].saving for at in places)

    choices = itertools.chain.from_iterable(itertools.combinations(range(10), count) for count in range(11))
    best = max(saved(each) for each in choices if sum(groups[at].size for at in each) <= budget)
    assert saved(chosen) == pytest.approx(best)


def test_the_first_of_equal_groups_are_kept() -> None:
    assert choose_groups([Candidate(10, 1.0)] * 6, 35) == [0, 1, 2]


def test_what_saves_nothing_is_not_kept() -> None:
    assert choose_groups([Candidate(10, 0.0), Candidate(10, -1.0), Candidate(10, 1.0)], 1000) == [2]
    assert choose_groups([Candidate(10, 1.0)], 0) == []
    assert choose_groups([], 10) == []


def test_groups_that_fill_a_budget_are_all_kept() -> None:
    """Sizes of a model: multiples of a large number, so nothing is lost by rounding."""
    groups = [Candidate(4 * 576 * width, 1.0) for width in (576, 960, 3072, 1536) * 30]
    total = sum(group.size for group in groups)
    assert choose_groups(groups, total) == list(range(120))
    assert len(choose_groups(groups, total - 1)) == 119


def test_large_budgets_are_never_exceeded() -> None:
    """Sizes are rounded up to parts of the budget; what is lost by that is a thousandth here."""
    draw = random.Random(0)
    groups = [Candidate(draw.randrange(1 << 20, 1 << 26), 1.0 + draw.random()) for _ in range(200)]
    budget = 3 << 30
    size = sum(groups[at].size for at in choose_groups(groups, budget))
    assert 0.98 * budget < size <= budget


class Asked:
    """Products that note what is asked for."""

    rows_ahead = 7

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.closed = False

    def submit(
        self, group: int, direction: Direction, members: int, rows: Any, request_class: RequestClass
    ) -> LazyResult:
        self.asked.append(group)
        return LazyResult(lambda: rows)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_products_of_kept_groups_ask_nobody(dtype: torch.dtype, tolerance: float) -> None:
    """In the dtype of the weights: bfloat16 has eight bits."""
    torch.manual_seed(0)
    inner, weights = Asked(), [torch.randn(6, 4) / 2, torch.randn(3, 4) / 2]
    products = KeptProducts(inner, {1: [weight.to(dtype) for weight in weights]})
    x = torch.randn(5, 4)
    both = products.submit(1, Direction.FORWARD, 3, [x]).result()
    (second,) = products.submit(1, Direction.FORWARD, 2, [x]).result()
    for answer, weight in zip([*both, second], [*weights, weights[1]], strict=True):
        assert answer.dtype == torch.float32
        torch.testing.assert_close(answer, x @ weight.T, atol=tolerance, rtol=tolerance)
    gradients = [torch.randn(5, 6), torch.randn(5, 3)]
    (backward,) = products.submit(1, Direction.BACKWARD, 3, gradients).result()
    right = gradients[0] @ weights[0] + gradients[1] @ weights[1]
    torch.testing.assert_close(backward, right, atol=4 * tolerance, rtol=tolerance)
    assert not inner.asked
    products.submit(0, Direction.FORWARD, 1, [x], RequestClass.DECODE).result()
    products.close()
    assert (inner.asked, inner.closed, products.rows_ahead) == ([0], True, 7)


def test_weights_are_products_with_unit_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenant_sdk.products.kept_groups.ROWS_BYTES", 4 * 6 * 3)  # in pieces
    torch.manual_seed(0)
    info = GroupInfo(6, (Member("a", 4, "a.weight"), Member("b", 5, "b.weight")))
    weights = [torch.randn(4, 6), torch.randn(5, 6)]
    asked: list[int] = []

    def product(members: int, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        asked.append(members)
        return [rows[0] @ weights[members.bit_length() - 1].T]

    assert torch.equal(group_weights(product, info, 1, torch.float32), weights[1].T)
    assert asked == [2, 2]
    weights[0][2, 3] = torch.inf
    with pytest.raises(ModelMismatch, match="weight of a has no finite numbers"):
        group_weights(product, info, 0, torch.float32)
