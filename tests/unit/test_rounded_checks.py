"""The check of rounded answers: honest rows pass, and how wrong an answer may be that passes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from memory_sources import Entropy

from shared.ring.upper_bits import cut, less
from tenant_sdk.products.forecast import ProductKey
from tenant_sdk.products.rounded import (
    CHALLENGES,
    RoundedFingerprint,
    draw_signs,
    expected_sums,
    limit_of,
    make_rounded_fingerprint,
    wrong_rows,
)

INPUTS, OUTPUTS = 96, 160


def rounded(
    sources: int = 1, *, rows: int = 200, seed: int = 0
) -> tuple[RoundedFingerprint, torch.Tensor, torch.Tensor]:
    """A fingerprint, revealed products in units, and the sums that the check expects of them."""
    generator = torch.Generator().manual_seed(seed)

    def integers(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(-most, most + 1, shape, generator=generator)

    weight, x = integers(30_000, OUTPUTS, INPUTS), integers(4_000, rows, INPUTS)

    def product(_: ProductKey, given: torch.Tensor) -> torch.Tensor:
        return (given.long() @ weight).to(torch.int32)

    fingerprint = make_rounded_fingerprint(
        ProductKey(0, 1, 1, 16),  # type: ignore[arg-type]
        product,
        planes=1,
        width=OUTPUTS,
        sources=sources,
        entropy=Entropy(seed),
    )
    answer, effects = x @ weight.T, []
    for _ in range(sources):
        mask = integers(2**31 - 1, rows, OUTPUTS)
        answer = answer + mask
        effects.append(cut(mask.to(torch.int32), 16))
    wrapped = ((answer + 2**31) % 2**32 - 2**31).to(torch.int32)
    return fingerprint, less(cut(wrapped, 16), effects, 16), expected_sums(fingerprint, x.float())


@pytest.mark.parametrize("sources", [0, 1, 2, 3])
def test_honest_rows_pass_with_room(sources: int) -> None:
    fingerprint, products, expected = rounded(sources, rows=2_000)
    assert wrong_rows(fingerprint, products, expected) == 0
    sums = products @ fingerprint.challenges - expected
    assert sums.square().sum(1).max() < 0.7 * fingerprint.limit


@pytest.mark.parametrize("how", ["one", "two equal", "two that cancel", "all equal", "all random"])
def test_errors_of_ten_times_the_rounding_bound_are_found(how: str) -> None:
    """In any shape; 9.5 is proven, see the next test."""
    fingerprint, products, expected = rounded()
    size = 10 * 0.5 * math.sqrt(OUTPUTS)
    error = torch.zeros_like(products)
    if how == "one":
        error[:, 3] = size
    elif how.startswith("two"):
        error[:, 3] = size / math.sqrt(2)
        error[:, 9] = error[:, 3] * (-1 if "cancel" in how else 1)
    elif how == "all equal":
        error += size / math.sqrt(OUTPUTS)
    else:
        error += torch.randn(error.shape, generator=torch.Generator().manual_seed(1))
        error *= size / error.norm(dim=1, keepdim=True)
    assert wrong_rows(fingerprint, products + error, expected) == len(products)


def test_the_bound_holds_for_every_small_error() -> None:
    """Every error of six numbers up to 3, and every vector of signs: the transform that the proof bounds.

    With X = (z . e)^2 / |e|^2, E exp(-b X) is at most 2/3 + exp(-3 b) / 3, because E X = 1 and E X^2 <= 3.
    From b = 1 on, two equal numbers have the largest transform.
    """
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=6))).double()
    errors = torch.tensor(
        [e for e in itertools.combinations_with_replacement(range(4), 6) if any(e)]
    ).double()
    squares = (errors @ signs.T).square() / errors.square().sum(1, keepdim=True)
    assert torch.allclose(squares.mean(1), torch.ones(len(errors)).double())
    assert (squares.square().mean(1) <= 3).all()
    for b in (0.5, 1.0, 1.2, 1.5, 2.0):
        transform = torch.exp(-b * squares).mean(1)
        assert (transform <= 2 / 3 + math.exp(-3 * b) / 3).all()
        if b >= 1:
            assert abs(transform.max() - (1 / 2 + math.exp(-2 * b) / 2)) < 1e-12


@pytest.mark.parametrize(("factor", "transform"), [(9.5, "proven"), (4, "of two equal numbers")])
def test_the_factors_of_the_documents(factor: float, transform: str) -> None:
    """Chernoff: P(sum of J squares <= limit) <= exp(b limit / |e|^2) M(b)^J, for an error of |e|^2 =
    factor^2 N / 4, is below 2^-32 for some b."""
    width = 1 << 14
    limit = limit_of(draw_signs(Entropy(3), CHALLENGES, width).T, 1)
    square = factor**2 * width / 4

    def exponent(b: float) -> float:
        of_two = 1 / 2 + math.exp(-2 * b) / 2
        moment = 2 / 3 + math.exp(-3 * b) / 3 if transform == "proven" else of_two
        return (b * limit / square + CHALLENGES * math.log(moment)) / math.log(2)

    assert min(exponent(b / 100) for b in range(100, 400)) < -32


def test_signs_are_signs_and_differ() -> None:
    signs = draw_signs(Entropy(0), CHALLENGES, 500)
    assert set(signs.unique().tolist()) == {-1, 1}
    assert abs(signs.float().mean()) < 0.03
    assert len({tuple(row) for row in signs.tolist()}) == CHALLENGES
    assert not torch.equal(signs, draw_signs(Entropy(1), CHALLENGES, 500))


def test_the_limit_is_that_of_wide_rows_for_wide_rows() -> None:
    """J (1 + 2 sqrt(t / J) + 2 t / J) / 4 for each number, with t = 41 ln 2."""
    width = 1 << 14
    limit = limit_of(draw_signs(Entropy(3), CHALLENGES, width).T, 1)
    assert 1 < limit / (width * 206.2 / 4) < 1.06
