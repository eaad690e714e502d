"""The check of half answers: honest rows pass, and how wrong an answer may be that passes."""

from __future__ import annotations

import math

import pytest
import torch
from memory_sources import Entropy

from shared.ring.upper_bits import subtract_upper_bits, take_upper_bits
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.products.half_checks import (
    CHALLENGES,
    FACTOR,
    HalfFingerprint,
    draw_normal,
    expected_sums,
    limit_of,
    make_half_fingerprint,
    wrong_rows,
)

INPUTS, OUTPUTS = 96, 160


def rounded(sources: int = 1, *, rows: int = 200) -> tuple[HalfFingerprint, torch.Tensor, torch.Tensor]:
    """A fingerprint, revealed products in units, and the sums that the check expects of them."""
    generator = torch.Generator().manual_seed(0)

    def integers(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(-most, most + 1, shape, generator=generator)

    weight, x = integers(30_000, OUTPUTS, INPUTS), integers(4_000, rows, INPUTS)

    def product(_: ProductKey, given: torch.Tensor) -> torch.Tensor:
        return (given.long() @ weight).to(torch.int32)

    fingerprint = make_half_fingerprint(
        ProductKey(0, 1, 1, 16),  # type: ignore[arg-type]
        product,
        planes=1,
        width=OUTPUTS,
        bound=int((weight**2).sum(0).max()),
        sources=sources,
        entropy=Entropy(0),
    )
    answer, effects = x @ weight.T, []
    for _ in range(sources):
        mask = integers(2**31 - 1, rows, OUTPUTS)
        answer = answer + mask
        effects.append(take_upper_bits(mask.to(torch.int32), 16))
    wrapped = ((answer + 2**31) % 2**32 - 2**31).to(torch.int32)
    return (
        fingerprint,
        subtract_upper_bits(take_upper_bits(wrapped, 16), effects, 16),
        expected_sums(fingerprint, x.float()),
    )


@pytest.mark.parametrize("sources", [0, 1, 2, 3])
def test_honest_rows_pass_with_room(sources: int) -> None:
    fingerprint, products, expected = rounded(sources, rows=2_000)
    assert wrong_rows(fingerprint, products, expected) == 0
    sums = products @ fingerprint.challenges - expected
    assert sums.square().sum(1).max() < 0.7 * fingerprint.limit


@pytest.mark.parametrize("how", ["one", "two equal", "two that cancel", "all equal", "all random"])
def test_errors_of_the_factor_are_found_in_any_shape(how: str) -> None:
    fingerprint, products, expected = rounded()
    size = FACTOR * 0.5 * math.sqrt(OUTPUTS)
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


def test_a_doubt_does_not_depend_on_the_callers_precision() -> None:
    """In bfloat16, rows with large products would seem wrong, and executors would see which."""
    fingerprint, products, expected = rounded()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rounded()[2], expected)
        assert wrong_rows(fingerprint, products, expected) == 0


def test_what_is_no_number_is_wrong() -> None:
    fingerprint, products, expected = rounded()
    products[:3, 0] = torch.tensor([math.nan, math.inf, 1e38])
    assert wrong_rows(fingerprint, products, expected) == 3


def chi_squared_below(value: float) -> float:
    """P(chi squared <= value) with ``CHALLENGES`` degrees of freedom, by its series."""
    half, x = CHALLENGES / 2, value / 2
    term = total = 1 / half
    for n in range(1, 500):
        term *= x / (half + n)
        total += term
    return math.exp(half * math.log(x) - x - math.lgamma(half)) * total


def test_the_factor_of_the_documents() -> None:
    """The J sums are normal with the error's length, so that the sum of their squares is chi squared."""
    width = 1 << 14
    limit = limit_of(draw_normal(Entropy(3), width, CHALLENGES, 256), 1) / 256**2
    assert chi_squared_below(limit / (FACTOR**2 * width / 4)) < 2**-32
    assert chi_squared_below(limit / ((FACTOR - 1) ** 2 * width / 4)) > 2**-32  # nor is it idle


@pytest.mark.parametrize("error", [(1,), (1, 1), (1, -1), (3, 2, 1), (1,) * 6])
def test_rounded_normal_numbers_find_small_errors_as_normal_ones_do(error: tuple[int, ...]) -> None:
    """That ``e . z`` is near zero, for its length, as rarely as if z were normal, is what the proof needs."""
    drawn = draw_normal(Entropy(5), len(error), 200_000, 256).double() / 256
    sums = (torch.tensor(error).double() @ drawn) / math.sqrt(sum(e * e for e in error))
    for near in (0.05, 0.2, 0.5):
        share = float((sums.abs() < near).double().mean())
        assert abs(share - math.erf(near / math.sqrt(2))) < 0.01


def test_challenges_are_normal_and_differ() -> None:
    drawn = draw_normal(Entropy(0), CHALLENGES, 5_000, 256).double()
    assert abs(drawn.mean()) < 3
    assert abs(drawn.std() - 256) < 2
    assert abs((drawn / 256).pow(4).mean() - 3) < 0.1
    assert len({tuple(row) for row in drawn.tolist()}) == CHALLENGES
    assert not torch.equal(drawn, draw_normal(Entropy(1), CHALLENGES, 5_000, 256).double())


def test_challenges_of_heavy_columns_are_smaller() -> None:
    """So that their products stay within the ring: here by a column whose squares add up to 2^50."""
    made = make_half_fingerprint(
        ProductKey(0, 1, 1, 16),  # type: ignore[arg-type]
        lambda _, rows: torch.zeros((len(rows), 4), dtype=torch.int32),
        planes=1,
        width=1_000,
        bound=1 << 50,
        sources=1,
        entropy=Entropy(0),
    )
    assert abs(made.challenges.std() - 8) < 0.5


def test_what_privacy_says_of_guesses_of_whole_rows() -> None:
    """An executor that knows a row knows its rounding errors, and can add to them. Wrong guesses do not."""
    rows, width, share = 2_000, 2_048, 0.15
    challenges = draw_normal(Entropy(0), width, CHALLENGES, 256).float()
    generator = torch.Generator().manual_seed(0)
    below = torch.rand(rows, width, generator=generator)
    errors = (torch.rand(rows, width, generator=generator) < below).float() - below
    largest = errors.abs().topk(round(share * width), 1).indices
    added = torch.zeros_like(errors).scatter(1, largest, errors.gather(1, largest).sign())

    def doubted(lie: torch.Tensor) -> float:
        sums = (errors + lie) @ challenges
        return float((sums.square().sum(1) > limit_of(challenges, 1)).float().mean())

    assert 0.2 < doubted(added) < 0.3
    assert doubted(added.roll(1, 0)) < 0.003
    assert doubted(torch.zeros_like(added)) == 0
