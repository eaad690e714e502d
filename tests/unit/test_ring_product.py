"""Products modulo 2^32 against int64: every kernel, every shape, every subset, every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import CheckpointError
from shared.ring import product as ring_product
from shared.ring.fixed_point import LARGEST, quantize_weight
from shared.ring.product import (
    KERNELS,
    Kernel,
    PlaneProducts,
    digits,
    float64_kernel,
    group_planes,
    is_exact,
)
from shared.wire.header import Direction, member_indices
from shared.wire.messages import GroupInfo, Member

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
LOW, HIGH = -(2**31), 2**31 - 1
ALL_LOW = 0x7F7F7F80  # whose four digits are -128
HALVES_LOW = 0x7FFF8000  # whose halves are -32768
SEEDS = st.integers(0, 2**32 - 1)
EXACT_COLUMNS = ring_product._EXACT_COLUMNS
ENDS = {torch.int8: (-128, 127), torch.int16: (-LARGEST, LARGEST)}
DTYPES = pytest.mark.parametrize("dtype", ENDS, ids=str)

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
NATIVE = ["amx", "avx512-vnni", "avx512", "avx2", "neon"]
WHERE = [
    pytest.param("cpu", "int8", id="int8"),
    pytest.param("cpu", "float64", id="float64"),
    *(
        pytest.param(
            "cpu",
            name,
            id=name,
            marks=pytest.mark.skipif(name not in KERNELS, reason="no native code, or not this processor's"),
        )
        for name in NATIVE
    ),
    *(pytest.param("cuda", name, id=f"cuda-{name}", marks=NO_CUDA) for name in ("int8", "float64", "triton")),
]
ON_CPU = [each for each in WHERE if each.values[0] == "cpu"]
ON_CUDA = [each for each in WHERE if each.values[0] == "cuda"]


def expected(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of the product in int64, which has room for 2^31 times 2^15 times 2^17."""
    return (rows.long() @ weight.long()).to(torch.int32)


def some_rows(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Uniform int32, some of them at the ends."""
    rows = torch.randint(LOW, HIGH + 1, shape, generator=generator, dtype=torch.int32)
    extreme = torch.tensor([LOW, HIGH, ALL_LOW, HALVES_LOW, 0, 1, -1, 0x80, -0x81], dtype=torch.int32)
    chosen = torch.randint(0, 3 * len(extreme), shape, generator=generator)
    return torch.where(chosen < len(extreme), extreme[chosen % len(extreme)], rows)


def some_weight(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    """Uniform integers as planes have them, some of them at the ends."""
    least, most = ENDS[dtype]
    weight = torch.randint(least, most + 1, shape, generator=generator, dtype=dtype)
    chosen = torch.randint(0, 6, shape, generator=generator)
    return torch.where(chosen == 0, least, torch.where(chosen == 1, most, weight)).to(dtype)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def run(kernel: Kernel, device: str, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The kernel's product, written into the middle of a larger tensor whose rest must stay."""
    around = torch.full((len(rows) + 2, weight.shape[1] + 7), 77, dtype=torch.int32, device=device)
    out = around[1:-1, 3:-4]
    before = rows.clone(), weight.clone()
    kernel(rows.to(device), weight.to(device), out)
    assert torch.equal(rows, before[0])
    assert torch.equal(weight, before[1])
    got = out.cpu().clone()
    out.fill_(77)
    assert (around == 77).all()
    return got


# -- digits ----------------------------------------------------------------------------------------


@given(st.lists(st.integers(LOW, HIGH) | st.sampled_from([LOW, HIGH, ALL_LOW, 0x80, -0x80]), min_size=1))
def test_digits_are_the_number(values: list[int]) -> None:
    found = digits(torch.tensor([values], dtype=torch.int32))
    assert (found.dtype, found.shape) == (torch.int8, (4, 1, len(values)))
    for column, value in enumerate(values):
        parts = [int(found[i, 0, column]) for i in range(4)]
        assert (sum(256**i * part for i, part in enumerate(parts)) - value) % 2**32 == 0


def test_digits_of_the_lowest() -> None:
    assert digits(torch.tensor([[ALL_LOW]], dtype=torch.int32)).flatten().tolist() == [-128] * 4


# -- kernels ---------------------------------------------------------------------------------------

SHAPES = [
    (1, 1, 1), (1, 64, 64), (1, 257, 129), (1, 1, 300), (1, 300, 1), (2, 3, 5), (17, 16, 8), (16, 24, 24),
    (7, 1, 7), (23, 31, 33), (24, 31, 33), (25, 32, 32), (24, 1, 1), (33, 4, 1), (40, 5, 31), (96, 63, 65),
    (255, 9, 7), (256, 9, 7), (257, 9, 7), (511, 5, 3), (513, 5, 3), (100, 130, 520), (10_000, 8, 3),
    (10_000, 3, 17), (30, 3000, 40), (300, 700, 35), (15, 65, 66), (16, 129, 67), (17, 129, 67),
    (800, 3000, 2), (99, 40_000, 2), (24, 9001, 70),
]  # fmt: skip
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda w: w,
    "columns": lambda w: w.T.contiguous().T,
    "part of rows": lambda w: torch.nn.functional.pad(w, (2, 3, 1, 1), value=99)[1:-1, 2:-3],
    "strides of 1": lambda w: w.T.reshape(-1).as_strided(w.shape, (1, len(w))),
    "part of columns": lambda w: torch.nn.functional.pad(w.T, (1, 5, 2, 1), value=99)[2:-1, 1:-5].T,
}


@pytest.mark.parametrize(("device", "name"), WHERE)
@pytest.mark.parametrize("layout", LAYOUTS)
@DTYPES
def test_every_shape(device: str, name: str, layout: str, dtype: torch.dtype) -> None:
    """Multiples of nothing, single rows and columns, the borders of tiles, all layouts of the weight."""
    generator = seeded()
    for count, inner, columns in SHAPES:
        rows, weight = some_rows(generator, count, inner), some_weight(generator, inner, columns, dtype=dtype)
        got = run(KERNELS[name], device, rows, LAYOUTS[layout](weight))
        assert torch.equal(got, expected(rows, weight)), (count, inner, columns)


@pytest.mark.parametrize(("device", "name"), WHERE)
@DTYPES
def test_any_shape(device: str, name: str, dtype: torch.dtype) -> None:
    @given(
        seed=SEEDS,
        count=st.integers(1, 40),
        inner=st.integers(1, 70),
        columns=st.integers(1, 70),
        layout=st.sampled_from(list(LAYOUTS)),
    )
    def check(seed: int, count: int, inner: int, columns: int, layout: str) -> None:
        generator = seeded(seed)
        rows, weight = (
            some_rows(generator, count, inner + 2),
            some_weight(generator, inner, columns, dtype=dtype),
        )
        part = rows[:, 1:-1]  # as the members' parts of a backward request are
        got = run(KERNELS[name], device, part, LAYOUTS[layout](weight))
        assert torch.equal(got, expected(part, weight))

    check()


@pytest.mark.parametrize(("device", "name"), WHERE)
@pytest.mark.parametrize("inner", [1, 4, 1000, 2**14 - 1, 2**14, 2**14 + 1, 2**15 + 3, 140_001])
@DTYPES
def test_extremes(device: str, name: str, inner: int, dtype: torch.dtype) -> None:
    """Sums of products that all have one sign: over 2^15 a saturating pair shows, over 2^31 a sum of digit
    products, over 2^53 a float64.
    """
    for value in (LOW, HIGH, ALL_LOW, HALVES_LOW, -1):
        for element in ENDS[dtype]:
            rows = torch.full((18, inner), value, dtype=torch.int32)
            weight = torch.full((inner, 3), element, dtype=dtype)
            total = (inner * value * element + 2**31) % 2**32 - 2**31
            assert (run(KERNELS[name], device, rows, weight) == total).all()
            assert (run(KERNELS[name], device, rows[:1], weight.T.contiguous().T) == total).all()


@DTYPES
@pytest.mark.parametrize(("device", "name"), ON_CPU)
def test_threads_share_a_product(device: str, name: str, dtype: torch.dtype) -> None:
    """Also where there are products enough that threads are woken."""
    generator, threads = seeded(), torch.get_num_threads()
    try:
        for count, inner, columns in (
            (1, 300, 600),
            (16, 300, 600),
            (17, 300, 600),
            (97, 200, 333),
            (3, 1100, 601),
            (100, 601, 50),
            (5, 7, 3),
        ):
            rows = some_rows(generator, count, inner)
            weight = some_weight(generator, inner, columns, dtype=dtype)
            for number in (1, 2, 3):
                torch.set_num_threads(number)
                for layout in ("rows", "columns"):
                    got = run(KERNELS[name], device, rows, LAYOUTS[layout](weight))
                    assert torch.equal(got, expected(rows, weight))
    finally:
        torch.set_num_threads(threads)


def test_float64_is_exact_as_far_as_it_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of columns, each of which fits."""
    monkeypatch.setattr(ring_product, "_EXACT_COLUMNS", 100)
    inner = 3 * ring_product._EXACT_COLUMNS + 1
    rows = torch.full((2, inner), HALVES_LOW, dtype=torch.int32)
    rows[:, ::2] -= 1
    weight = torch.full((inner, 2), -LARGEST, dtype=torch.int16)
    assert torch.equal(run(float64_kernel, "cpu", rows, weight), expected(rows, weight))
    assert EXACT_COLUMNS << 15 + 15 <= 2**53


@pytest.mark.parametrize(("device", "name"), ON_CUDA)
def test_a_gpu_gives_the_same_bits(device: str, name: str) -> None:
    generator = seeded(3)
    for count, inner, columns in [*SHAPES, (1, 768, 2304), (129, 768, 770), (2048, 515, 1030)]:
        for dtype in ENDS:
            rows = some_rows(generator, count, inner)
            weight = some_weight(generator, columns, inner, dtype=dtype).T
            there = run(KERNELS[name], device, rows, weight)
            assert torch.equal(there, run(KERNELS["int8"], "cpu", rows, weight)), (count, inner, columns)


# -- products of groups ----------------------------------------------------------------------------


@pytest.fixture(params=[pytest.param(p.values, id=p.id, marks=p.marks) for p in WHERE])
def make(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[torch.Tensor, list[int]], Any]:
    """``make(planes, widths)`` is a function of direction, members and rows on the CPU."""
    device, name = request.param
    monkeypatch.setattr(ring_product, "fastest_kernel", lambda _device: KERNELS[name])

    def of(planes: torch.Tensor, widths: list[int]) -> Any:
        products = PlaneProducts(planes.to(device), widths)

        def product(direction: int, members: int, rows: torch.Tensor) -> torch.Tensor:
            columns = planes.shape[2]
            if direction == FORWARD:
                columns = sum(widths[i] for i in member_indices(members))
            out = torch.full((len(rows), len(planes) * columns), 77, dtype=torch.int32, device=device)
            products.matmul(direction, members, rows.to(device), out)
            return out.cpu()

        return product

    return of


def reference(
    planes: torch.Tensor, widths: list[int], direction: int, members: int, rows: torch.Tensor
) -> torch.Tensor:
    """The planes' products beside each other, by rows of the selected members."""
    starts = [sum(widths[:i]) for i in range(len(widths))]
    chosen = [j for i in member_indices(members) for j in range(starts[i], starts[i] + widths[i])]
    parts = [plane[chosen] for plane in planes]
    return torch.cat([expected(rows, part.T if direction == FORWARD else part) for part in parts], 1)


def some_planes(generator: torch.Generator, one: bool, outputs: int, inputs: int) -> torch.Tensor:
    """Of either numerics."""
    if one:
        return some_weight(generator, 1, outputs, inputs, dtype=torch.int16)
    return some_weight(generator, 2, outputs, inputs)


def check_group(make: Any, seed: int, inputs: int, widths: list[int], members: int, count: int) -> None:
    for one in (True, False):
        check_planes(make, seed, some_planes(seeded(seed), one, sum(widths), inputs), widths, members, count)


def check_planes(
    make: Any, seed: int, planes: torch.Tensor, widths: list[int], members: int, count: int
) -> None:
    generator, inputs = seeded(seed + 1), planes.shape[2]
    before = planes.clone()
    product = make(planes, widths)
    outputs = sum(widths[i] for i in member_indices(members))
    for direction, columns in ((FORWARD, inputs), (BACKWARD, outputs)):
        rows = some_rows(generator, count, columns)
        got = product(direction, members, rows)
        assert torch.equal(got, reference(planes, widths, direction, members, rows))
    assert torch.equal(planes, before)


def test_every_subset_of_members(make: Any) -> None:
    """With gaps, without the first, neighbours joined, all of them."""
    for members in range(1, 32):
        check_group(make, members, 21, [5, 1, 8, 3, 16], members, 26)
        check_group(make, members, 21, [5, 1, 8, 3, 16], members, 1)


def test_any_group(make: Any) -> None:
    @given(
        seed=SEEDS,
        inputs=st.integers(1, 40),
        widths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
        members=st.integers(1, 63),
        count=st.integers(1, 40),
    )
    def check(seed: int, inputs: int, widths: list[int], members: int, count: int) -> None:
        members &= (1 << len(widths)) - 1
        check_group(make, seed, inputs, widths, members or 1, count)

    check()


def test_64_members(make: Any) -> None:
    widths = [1 + i % 3 for i in range(64)]
    for members in (1 << 63, 1 << 63 | 1, 0x5555555555555555, 2**64 - 1):
        check_group(make, 7, 9, widths, members, 30)


@pytest.mark.parametrize("count", [1, 23, 24, 255, 256, 257, 10_000])
def test_many_rows_of_a_group(make: Any, count: int) -> None:
    check_group(make, count, 13, [4, 3, 2], 0b101, count)
    check_group(make, count, 13, [4, 3, 2], 0b111, count)


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("members", [0b111, 0b101])
@pytest.mark.parametrize("one", [True, False])
def test_an_answer_does_not_depend_on_the_rows_beside_it(
    make: Any, direction: int, members: int, one: bool
) -> None:
    """Alone, beside others, split over several products, in another order: the same bits."""
    generator, widths = seeded(1), [40, 8, 24]
    product = make(some_planes(generator, one, 72, 48), widths)
    columns = 48 if direction == FORWARD else sum(widths[i] for i in member_indices(members))
    rows = some_rows(generator, 300, columns)
    together = product(direction, members, rows)
    for at in (0, 23, 24, 255, 256, 299):
        assert torch.equal(product(direction, members, rows[at : at + 1]), together[at : at + 1])
    for size in (1, 7, 24, 100, 257):
        if size == 1:
            parts, whole = rows[:30].split(1), together[:30]
        else:
            parts, whole = rows.split(size), together
        assert torch.equal(torch.cat([product(direction, members, part) for part in parts]), whole)
    order = torch.randperm(300, generator=generator)
    assert torch.equal(product(direction, members, rows[order]), together[order])


@pytest.mark.parametrize("one", [True, False])
def test_products_are_linear_modulo_2_to_the_32(make: Any, one: bool) -> None:
    """So a mask's effect comes off: this is what all masking rests on."""
    generator = seeded(2)
    product = make(some_planes(generator, one, 12, 30), [7, 5])
    for direction, columns in ((FORWARD, 30), (BACKWARD, 12)):
        x, mask = some_rows(generator, 25, columns), some_rows(generator, 25, columns)
        masked = product(direction, 0b11, x + mask)
        assert torch.equal(masked - product(direction, 0b11, mask), product(direction, 0b11, x))


class Stored:
    """What ``group_planes`` wants of a checkpoint."""

    def __init__(self, **weights: torch.Tensor) -> None:
        self._weights = weights

    def member_weight(self, member: Member) -> torch.Tensor:
        weight = self._weights[member.tensor]
        return weight.T if member.transposed else weight


def test_planes_of_a_group_are_those_of_its_members() -> None:
    generator = seeded(4)
    q, k = torch.randn((6, 5), generator=generator), torch.randn((5, 3), generator=generator).bfloat16()
    info = GroupInfo(5, (Member("q", 6, "q"), Member("k", 3, "k", transposed=True)))
    for count in (1, 2):
        planes, scales = group_planes(Stored(q=q, k=k), info, count)  # type: ignore[arg-type]
        assert (planes.shape, scales.shape) == ((count, 9, 5), (9,))
        assert planes.is_contiguous()
        for part, weight in ((slice(6), q), (slice(6, 9), k.T)):
            alone = quantize_weight(weight, count)
            assert planes.dtype == alone.planes.dtype
            assert torch.equal(planes[:, part], alone.planes)
            assert torch.equal(scales[part], alone.scales)


def test_a_weight_that_is_not_finite_is_named() -> None:
    weight = torch.ones((3, 5))
    weight[2, 4] = float("nan")
    info = GroupInfo(5, (Member("q", 3, "a.q.weight"), Member("k", 3, "a.k.weight")))
    with pytest.raises(CheckpointError, match=r"a\.k\.weight: .*NaN, infinity"):
        group_planes(Stored(**{"a.q.weight": torch.ones((3, 5)), "a.k.weight": weight}), info, 1)  # type: ignore[arg-type]


# -- kernels are what they say ---------------------------------------------------------------------


@pytest.mark.parametrize(("device", "name"), WHERE)
def test_good_kernels_are_exact(device: str, name: str) -> None:
    assert is_exact(KERNELS[name], device)
