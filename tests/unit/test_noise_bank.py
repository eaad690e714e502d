"""The noise bank: what travels is masked, row by row, with masks that secret bytes chose.

Most tests run it against an executor in memory, with a clock and entropy of their own.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from conftest import relative_error

from shared.errors import ConfigurationError, RequestRefused
from shared.wire.header import Direction, Operation, RequestClass, member_indices
from shared.wire.protocol import GroupShape
from tenant_sdk import NoiseBankOptions
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.connection.remote import LazyResult
from tenant_sdk.connection.stats import Stats
from tenant_sdk.products.noise_bank import NoiseBank

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
INPUTS, WIDTHS = 48, (32, 16)
ALL = 0b11

# The masked row is about twice as large as the row, and every product is rounded to 2^-24.
TOLERANCE = 1e-5


class Entropy:
    """Bytes that look random and are the same in every run."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.drawn: list[int] = []

    def __call__(self, count: int) -> bytes:
        self.drawn.append(count)
        return self._random.randbytes(count)


class MemoryExecutor:
    """An executor and a source of effects in memory; remembers what it was sent."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights = [torch.randn(width, INPUTS, generator=generator) for width in WIDTHS]
        self.shapes = [GroupShape(INPUTS, WIDTHS)]
        self.sent: list[list[torch.Tensor]] = []
        self.effects = 0
        self.gate = threading.Event()  # effects wait for it
        self.gate.set()
        self.refuse_effects = False
        self.stats = Stats()

    def true_product(
        self, direction: Direction, members: int, tensors: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        # In another order of additions for every number of rows, as real kernels have it.
        order = torch.arange(max(INPUTS, *WIDTHS)).roll(len(tensors[0]))
        weights = [self.weights[i] for i in member_indices(members)]
        if direction == FORWARD:
            by_input = order[order < INPUTS]
            return [tensors[0][:, by_input] @ weight.T[by_input] for weight in weights]
        products = []
        for tensor, weight in zip(tensors, weights, strict=True):
            by_output = order[order < len(weight)]
            products.append(tensor[:, by_output] @ weight[by_output])
        return [torch.stack(products).sum(0)]

    def submit(
        self,
        operation: Operation,
        key: ProductKey,
        tensors: list[torch.Tensor],
        request_class: RequestClass,
    ) -> LazyResult:
        assert operation == Operation.PRODUCT
        self.sent.append([tensor.clone() for tensor in tensors])
        return LazyResult(lambda: self.true_product(key.direction, key.member_bits, tensors))

    def effect(self, key: ProductKey, masks: list[torch.Tensor]) -> list[torch.Tensor]:
        assert self.gate.wait(800)
        if self.refuse_effects:
            raise RequestRefused("busy", "come back later")
        self.effects += 1
        return self.true_product(key.direction, key.member_bits, masks)

    def close(self) -> None:
        """Nothing to do."""


def make_bank(
    executor: MemoryExecutor,
    *,
    entropy: Callable[[int], bytes] | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    **options: Any,
) -> NoiseBank:
    return NoiseBank(
        executor,  # type: ignore[arg-type]
        executor,
        NoiseBankOptions(**options),
        entropy=entropy or Entropy(),
        clock=clock,
    )


def bank_of(bank: NoiseBank, direction: Direction) -> Any:
    made, _ = bank._banks._serving[0, direction].current.result(0)
    return made


def tensors_for(direction: Direction, members: int, rows: int = 5, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    widths = [INPUTS] if direction == FORWARD else [WIDTHS[i] for i in member_indices(members)]
    return [torch.randn(rows, width, generator=generator) for width in widths]


# -- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("masks", [1, 2, 16, 256])
@pytest.mark.parametrize("members", [0b01, 0b10, ALL])
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_the_mask_cancels(direction: Direction, members: int, masks: int) -> None:
    executor = MemoryExecutor()
    bank = make_bank(executor, masks=masks)
    tensors = tensors_for(direction, members)
    kept = [tensor.clone() for tensor in tensors]
    got = bank.submit(0, direction, members, tensors).result()
    for result, expected in zip(got, executor.true_product(direction, members, kept), strict=True):
        assert relative_error(result, expected) < TOLERANCE
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, kept, strict=True))
    bank.close()


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_what_is_sent_is_masked(direction: Direction) -> None:
    executor = MemoryExecutor()
    bank = make_bank(executor)
    tensors = tensors_for(direction, ALL, rows=200)
    bank.submit(0, direction, ALL, tensors).result()
    (sent,) = executor.sent
    difference, rows = torch.cat(sent, 1) - torch.cat(tensors, 1), torch.cat(tensors, 1)
    # Every row carries noise at least as strong as itself; 48 normal numbers stray by half at most.
    assert float((difference.norm(dim=1) / rows.norm(dim=1)).min()) > 0.4
    # And looks different from itself: 200 correlations of 48 independent numbers with noise.
    masked = torch.cat(sent, 1)
    correlation = torch.nn.functional.cosine_similarity(masked, rows)
    assert float(correlation.mean()) < 0.8
    bank.close()


@pytest.mark.parametrize(("masks", "rows"), [(1, 4), (4, 64), (256, 512)])
def test_each_rows_mask_is_drawn_from_entropy(masks: int, rows: int) -> None:
    executor = MemoryExecutor()
    drawn = Entropy(5)(rows)
    random_bytes = Entropy()
    # The bank is made first; then one byte a row chooses.
    bank = make_bank(
        executor, masks=masks, entropy=lambda count: drawn if count == rows else random_bytes(count)
    )
    tensors = tensors_for(FORWARD, ALL, rows=rows)
    bank.submit(0, FORWARD, ALL, tensors).result()
    noise = executor.sent[0][0] - tensors[0]
    known = bank_of(bank, FORWARD).masks[0]
    assert len(known) == masks
    for row in range(rows):
        mask = known[drawn[row] % masks]
        scale = float((noise[row] @ mask) / (mask @ mask))
        assert abs(np.log2(scale) - round(np.log2(scale))) < 1e-5  # a power of two
        assert relative_error(noise[row], scale * mask) < 1e-5
    bank.close()


def test_the_same_entropy_sends_the_same_bytes() -> None:
    sent = []
    for seed in (3, 3, 4):
        executor = MemoryExecutor()
        bank = make_bank(executor, entropy=Entropy(seed))
        for step in range(3):
            bank.submit(0, FORWARD, ALL, tensors_for(FORWARD, ALL, seed=step)).result()
        sent.append(torch.cat([tensors[0] for tensors in executor.sent]))
        bank.close()
    assert torch.equal(sent[0], sent[1])
    assert relative_error(sent[2], sent[0]) > 0.1


def test_a_repeated_row_is_sent_differently() -> None:
    executor = MemoryExecutor()
    bank = make_bank(executor, masks=256)
    tensor = tensors_for(FORWARD, ALL, rows=1)[0].expand(64, -1)
    bank.submit(0, FORWARD, ALL, [tensor]).result()
    distinct = {tuple(row.tolist()) for row in executor.sent[0][0]}
    assert len(distinct) > 40  # of 64 draws from 256 about 57 are distinct
    bank.close()


# -- difficult rows -------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_zero_rows_stay_zero_and_are_masked(direction: Direction) -> None:
    executor = MemoryExecutor()
    bank = make_bank(executor)
    tensors = tensors_for(direction, ALL, rows=4)
    for tensor in tensors:
        tensor[1:3] = 0.0
    got = bank.submit(0, direction, ALL, tensors).result()
    for result in got:
        assert not result[1:3].any()
        assert result[0].any()
        assert result[3].any()
    (sent,) = executor.sent
    norms = torch.cat(sent, 1).norm(dim=1)
    assert float(norms[1:3].min()) > 0.2 * float(norms.max())  # they hide among the others
    for rows in (1, 4):
        everything = bank.submit(
            0, direction, ALL, [torch.zeros_like(tensor[:rows]) for tensor in tensors]
        ).result()
        assert not any(result.any() for result in everything)
    assert all(bool((tensor != 0).all()) for tensors in executor.sent for tensor in tensors)
    bank.close()


@pytest.mark.parametrize("factor", [1e4, 1e15, 1e25, 1e-15, 1e-30])
def test_rows_of_any_size(factor: float) -> None:
    """Squares of such numbers leave float32; the mask must not be lost, nor become infinite."""
    executor = MemoryExecutor()
    bank = make_bank(executor)
    tensors = [factor * tensor for tensor in tensors_for(FORWARD, ALL, rows=50)]
    got = bank.submit(0, FORWARD, ALL, tensors).result()
    for result, expected in zip(got, executor.true_product(FORWARD, ALL, tensors), strict=True):
        assert relative_error(result / factor, expected / factor) < TOLERANCE
    noise = (executor.sent[0][0] - tensors[0]) / factor
    assert float(noise.square().mean().sqrt()) > 0.8
    bank.close()


def test_quiet_rows_hide_among_loud_ones() -> None:
    executor = MemoryExecutor()
    bank = make_bank(executor)
    tensor = tensors_for(FORWARD, ALL, rows=40)[0]
    tensor[10:20] *= 1e-4
    bank.submit(0, FORWARD, ALL, [tensor]).result()
    noise = (executor.sent[0][0] - tensor).norm(dim=1)
    # A power of two apart at most, and what 48 normal numbers stray.
    assert float(noise[10:20].min()) > 0.25 * float(noise.mean())
    bank.close()


@pytest.mark.parametrize("outlier", [1e3, 1e8, 1e25])
def test_outlier_rows(outlier: float) -> None:
    executor = MemoryExecutor()
    bank = make_bank(executor)
    tensor = tensors_for(FORWARD, ALL, rows=16)[0]
    tensor[7] *= outlier
    got = bank.submit(0, FORWARD, ALL, [tensor]).result()
    expected = executor.true_product(FORWARD, ALL, [tensor])
    loud = float(tensor[7].double().square().mean().sqrt())
    for result, true in zip(got, expected, strict=True):
        assert relative_error(result[7] / outlier, true[7] / outlier) < TOLERANCE
        # Quiet rows hide among loud ones: their noise is the mean size of all rows, and so is what
        # rounding leaves of it. That is the price, so it is held to that size, not to their own.
        left = (result - true).double().norm(dim=1) / INPUTS**0.5
        assert float(left.max()) < TOLERANCE * loud
    bank.close()


def test_scale_is_the_noise_in_units_of_the_rows() -> None:
    for scale in (0.25, 1.0, 8.0):
        executor = MemoryExecutor()
        bank = make_bank(executor, scale=scale)
        tensor = tensors_for(FORWARD, ALL, rows=400)[0]
        bank.submit(0, FORWARD, ALL, [tensor]).result()
        noise = (executor.sent[0][0] - tensor).square().mean().sqrt()
        assert scale * 0.9 < float(noise) < scale * 2.2  # rounded up to a power of two
        bank.close()


# -- masks ----------------------------------------------------------------------------------------


def test_masks_are_standard_normal_and_independent() -> None:
    """Fixed entropy, so the limits are not for luck: five standard errors of what theory says."""
    executor = MemoryExecutor()
    bank = make_bank(executor, masks=256)
    bank.submit(0, FORWARD, ALL, tensors_for(FORWARD, ALL)).result()
    masks = bank_of(bank, FORWARD).masks[0].double()
    assert masks.shape == (256, INPUTS)
    count = masks.numel()
    assert abs(float(masks.mean())) < 5 / count**0.5
    assert abs(float(masks.var()) - 1) < 5 * (2 / count) ** 0.5
    assert abs(float((masks**3).mean())) < 5 * (15 / count) ** 0.5
    assert abs(float((masks**4).mean()) - 3) < 5 * (96 / count) ** 0.5
    assert float(masks.abs().max()) < 7  # and finite
    # Masks with each other, and columns with each other.
    for matrix in (masks, masks.T):
        correlation = torch.corrcoef(matrix).fill_diagonal_(0.0)
        width = matrix.shape[1]
        assert float(correlation.abs().max()) < 6 / width**0.5
        assert abs(float(correlation.square().mean()) * width - 1) < 0.1
    # The two directions and two banks of one session have nothing in common.
    bank.submit(0, BACKWARD, ALL, tensors_for(BACKWARD, ALL)).result()
    backward = bank_of(bank, BACKWARD).masks
    assert [mask.shape for mask in backward] == [(256, width) for width in WIDTHS]
    for other in backward:
        overlap = min(other.shape[1], INPUTS)
        pairs = torch.corrcoef(
            torch.stack([masks[:, :overlap].flatten(), other[:, :overlap].double().flatten()])
        )
        assert abs(float(pairs[0, 1])) < 5 / (256 * overlap) ** 0.5
    bank.close()


def test_masks_survive_the_smallest_and_largest_bytes() -> None:
    for byte in (b"\x00", b"\xff"):
        bank = make_bank(MemoryExecutor(), entropy=lambda count, byte=byte: byte * count)
        assert all(bool(mask.isfinite().all()) for mask in [bank._normal(32)])
        bank.close()


def test_masks_cost_eight_bytes_of_entropy_each_and_rows_one() -> None:
    entropy = Entropy()
    bank = make_bank(MemoryExecutor(), entropy=entropy, masks=4)
    bank.submit(0, FORWARD, ALL, tensors_for(FORWARD, ALL, rows=9)).result()
    assert entropy.drawn == [8 * 4 * INPUTS, 9]
    bank.close()


@pytest.mark.parametrize(
    "options",
    [
        {"masks": 0},
        {"masks": 3},
        {"masks": 512},
        {"scale": 0.0},
        {"scale": -1.0},
        {"rotate_rows": 0},
        {"rotate_seconds": 0.0},
    ],
)
def test_impossible_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="must be"):
        NoiseBankOptions(**options)


# -- rotation -------------------------------------------------------------------------------------


def masks_now(bank: NoiseBank) -> torch.Tensor:
    return bank_of(bank, FORWARD).masks[0]


def next_bank(bank: NoiseBank) -> Future[Any] | None:
    return bank._banks._serving[0, FORWARD].next


def use(bank: NoiseBank, rows: int) -> None:
    bank.submit(0, FORWARD, ALL, tensors_for(FORWARD, ALL, rows=rows)).result()


def test_rotation_after_rows_in_the_background() -> None:
    executor = MemoryExecutor()
    bank = make_bank(executor, rotate_rows=100)
    use(bank, 60)
    use(bank, 40)
    first = masks_now(bank)
    assert next_bank(bank) is None
    executor.gate.clear()
    use(bank, 1)  # one too many: the next bank is fetched, and nobody waits for it
    coming = next_bank(bank)
    assert coming is not None
    use(bank, 500)
    assert masks_now(bank) is first
    assert next_bank(bank) is coming  # asked for once
    executor.gate.set()
    coming.result(800)
    use(bank, 1)
    assert masks_now(bank) is not first
    assert relative_error(masks_now(bank), first) > 1.0
    assert bank._banks._serving[0, FORWARD].rows == 1
    assert executor.effects == 2
    bank.close()


def test_rotation_after_time() -> None:
    executor, now = MemoryExecutor(), 1000.0
    bank = make_bank(executor, rotate_seconds=60.0, clock=lambda: now)
    use(bank, 1)
    first = masks_now(bank)
    now += 60.0
    use(bank, 1)
    assert next_bank(bank) is None
    now += 1.0
    use(bank, 1)
    next_bank(bank).result(800)
    use(bank, 1)
    assert masks_now(bank) is not first
    now += 60.0
    use(bank, 1)
    assert next_bank(bank) is None  # the new bank is as old as its making
    bank.close()


def test_results_are_right_across_rotations() -> None:
    executor = MemoryExecutor()
    bank = make_bank(executor, rotate_rows=1)
    for step in range(20):
        direction = FORWARD if step % 3 else BACKWARD
        tensors = tensors_for(direction, ALL, seed=step)
        got = bank.submit(0, direction, ALL, tensors).result()
        for result, expected in zip(got, executor.true_product(direction, ALL, tensors), strict=True):
            assert relative_error(result, expected) < TOLERANCE
        waiting = bank._banks._serving[0, direction].next
        if waiting is not None:
            waiting.result(800)
    assert executor.effects > 10
    bank.close()


def test_a_failed_fetch_is_told_once_and_tried_again() -> None:
    executor = MemoryExecutor()
    bank = make_bank(executor, rotate_rows=1)
    use(bank, 1)
    first = masks_now(bank)
    executor.refuse_effects = True
    use(bank, 1)
    with pytest.raises(RequestRefused):
        next_bank(bank).result(800)
    with pytest.raises(RequestRefused, match="come back later"):
        use(bank, 1)
    executor.refuse_effects = False
    use(bank, 1)
    assert masks_now(bank) is first
    next_bank(bank).result(800)
    use(bank, 1)
    assert masks_now(bank) is not first
    bank.close()


def test_threads_share_one_bank() -> None:
    executor = MemoryExecutor()
    bank = make_bank(executor, entropy=np.random.default_rng(0).bytes)
    errors: list[float] = []

    def run(seed: int) -> None:
        tensors = tensors_for(FORWARD, ALL, seed=seed)
        got = bank.submit(0, FORWARD, ALL, tensors).result()
        expected = executor.true_product(FORWARD, ALL, tensors)
        errors.extend(relative_error(g, e) for g, e in zip(got, expected, strict=True))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(800)
    assert len(errors) == 16
    assert max(errors) < TOLERANCE
    assert bank._banks._serving[0, FORWARD].rows == 8 * 5
    bank.close()
