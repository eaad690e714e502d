"""A second tenant, written from the documents alone, and the product get the same bits from one executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import independent_tenant as independent
import numpy as np
import pytest
import torch
from conftest import Executor
from independent_tenant import BACKWARD, EXACT, FORWARD, HALF, Connection, Request, Tenant, Wrong
from ring_sessions import Executors, captured_requests, one_time, products, seeds
from safetensors.numpy import load_file
from vectors import check_vectors as wire

from shared.ring.rows import unmask_and_dequantize
from shared.ring.upper_bits import subtract_upper_bits, take_upper_bits
from shared.wire.header import Direction
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.products.half_checks import HalfFingerprint, expected_sums, limit_of, wrong_rows

QKV, OUTPUT, DOWN = 0, 1, 3  # groups of the first block
REQUESTS = 4  # of each kind of session
Ask = Callable[[int], Tenant]


@pytest.fixture(scope="module", params=wire.RINGS)
def executors(
    request: pytest.FixtureRequest, serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> Executors:
    """A provider and two mask sources; q, k and v are one group of the model, and they have biases."""
    first, second, third = (serve(checkpoint("qwen2"), numerics=request.param) for _ in range(3))
    return first, second, third


@pytest.fixture(scope="module")
def ask(executors: Executors) -> Iterator[Ask]:
    """An independent tenant with so many sources: ``ask(2)``."""
    with ExitStack() as stack:
        opened = [Connection(each.url, each.token, each.ca) for each in executors]
        for connection in opened:
            stack.callback(connection.close)
        yield lambda count: Tenant(opened[0], opened[1 : 1 + count])


@pytest.fixture(scope="module")
def weights(checkpoint: Callable[[str], Path]) -> dict[str, np.ndarray]:
    return load_file(checkpoint("qwen2") / "model.safetensors")


def rows_of(rng: np.random.Generator, count: int, columns: int) -> np.ndarray:
    """Rows of every size and kind; multiples of 1/32 are often half way between two integers."""
    kinds = [
        lambda: rng.standard_normal(columns) * 2.0 ** rng.integers(-100, 60),
        lambda: rng.integers(-64, 64, columns) / 32 * 2.0 ** rng.integers(-20, 20),
        lambda: np.eye(columns)[rng.integers(columns)] * 2.0 ** rng.integers(-20, 20),
        lambda: np.full(columns, rng.standard_normal()),
        lambda: np.zeros(columns),
        lambda: rng.standard_normal(columns) ** 9,
    ]
    return np.array([kinds[rng.integers(len(kinds))]() for _ in range(count)], np.float32)


def some_request(rng: np.random.Generator, manifest: dict) -> Request:
    group = int(rng.choice([QKV, OUTPUT, DOWN]))
    members = int(rng.integers(1, 2 ** len(manifest["groups"][group]["members"])))
    return Request.of(manifest, group, int(rng.integers(1, 3)), members, int(rng.integers(1, 5)))


def planes_of(weights: dict[str, np.ndarray], manifest: dict, request: Request) -> np.ndarray:
    """What a row is multiplied with, [C, P A], made from the checkpoint by the reader of the vectors."""
    members = manifest["groups"][request.group]["members"]
    make = wire.one_plane_of if manifest["numerics"] == "ring" else wire.planes_of
    made = [
        np.array(make(weights[member["tensor"]].tolist())[0])
        for i, member in enumerate(members)
        if request.members >> i & 1
    ]
    planes = np.concatenate(made, axis=1)  # [P, O, D]
    if request.direction == FORWARD:
        planes = planes.transpose(0, 2, 1)
    return np.concatenate(list(planes), axis=1)


@pytest.mark.parametrize("sources", [1, 2])
@pytest.mark.parametrize("answers", ["exact", "half"])
def test_both_send_and_reveal_the_same_bits(
    executors: Executors, ask: Ask, answers: str, sources: int
) -> None:
    """Under the masks of the seeds that the product drew."""
    tenant, rng = ask(sources), np.random.default_rng(sources)
    bits = EXACT if answers == "exact" else HALF[tenant.manifest["numerics"]]
    options: dict[str, Any] = {"answers": answers, "mask_budget_mib": 0, "repeat_rate": 0.0}
    with one_time(*executors[: 1 + sources], **options) as session, captured_requests() as sent:
        for _ in range(REQUESTS):
            request = some_request(rng, tenant.manifest)
            x = rows_of(rng, request.rows, request.columns)
            group = tenant.manifest["groups"][request.group]
            widths = [m["outputs"] for i, m in enumerate(group["members"]) if request.members >> i & 1]
            blocks = [x] if request.direction == FORWARD else np.split(x, np.cumsum(widths)[:-1], axis=1)
            kind = (request.group, Direction(request.direction), request.members)
            theirs = session.products.submit(*kind, [torch.tensor(block) for block in blocks]).result()
            drawn, hidden = seeds(sent)[-sources:], products(sent)[-1]

            scaled = x if request.direction == FORWARD else x * tenant.provider.scales(request)
            limit = independent.product_limit(bits, sources)
            integers, _ = independent.quantise(scaled, request.bound(tenant.manifest), limit)
            assert independent.hide(integers, drawn) == hidden
            mine = tenant.multiply(request, x, bits, seeds=drawn)
            assert mine.tobytes() == torch.cat(theirs, 1).numpy().tobytes()

            verifier = session.products._verifier
            known = verifier._fingerprints.get(ProductKey(*kind), None)
            z = known.challenge.numpy().astype(np.int64)
            assert np.array_equal(tenant.times_planes(request, z[None])[0], known.projection.numpy())


@pytest.mark.parametrize("sources", [0, 1, 2])
def test_what_comes_is_the_product_on_the_ring(
    ask: Ask, weights: dict[str, np.ndarray], sources: int
) -> None:
    """Answers, effects and what is left of them, against integers computed here."""
    tenant, rng = ask(sources), np.random.default_rng(7 + sources)
    for bits in (EXACT, HALF[tenant.manifest["numerics"]]):
        for _ in range(REQUESTS):
            request = some_request(rng, tenant.manifest)
            x = rows_of(rng, request.rows, request.columns)
            rows, _ = independent.quantise(
                x, request.bound(tenant.manifest), independent.product_limit(bits, sources)
            )
            planes = planes_of(weights, tenant.manifest, request)
            product = rows @ planes
            assert abs(product).max() <= independent.product_limit(bits, sources)
            drawn = [rng.bytes(wire.SEED) for _ in range(sources)]
            masks = [independent.mask_of(seed, *rows.shape) for seed in drawn]
            answer, effects = tenant.ask(request, rows, bits, drawn)
            under = independent.signed(product + sum(mask @ planes for mask in masks), EXACT)
            assert np.array_equal(answer, under >> (EXACT - bits))
            for mask, effect in zip(masks, effects, strict=True):
                assert np.array_equal(effect, independent.signed(mask @ planes, EXACT) >> (EXACT - bits))
            revealed = independent.unmask(answer, effects, bits)
            if bits == EXACT:
                assert np.array_equal(revealed, product)
            else:
                error = independent.units(revealed, bits, sources) - product / 2.0 ** (EXACT - bits)
                assert abs(error).max() <= 1 + max(0, sources - 1) / 2


def test_grouped_layers_and_their_biases(
    executors: Executors, ask: Ask, weights: dict[str, np.ndarray]
) -> None:
    """Against the layers of a model, whose exact results no mask changes, and near the product of floats."""
    tenant, rng = ask(2), np.random.default_rng(3)
    names = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    request = Request.of(tenant.manifest, QKV, FORWARD, 0b111, 3)
    x = rng.standard_normal((request.rows, request.columns)).astype(np.float32)
    bias = np.concatenate([tenant.provider.bias(f"{name}.bias") for name in names])
    mine = tenant.multiply(request, x, EXACT, bias)
    with executors[0].connect() as session, torch.no_grad():
        model = session.load_model(progress=False)
        theirs = [model.get_submodule(name)(torch.tensor(x)) for name in names]
    assert mine.tobytes() == torch.cat(theirs, 1).numpy().tobytes()
    near = np.concatenate([x @ weights[f"{n}.weight"].T + weights[f"{n}.bias"] for n in names], axis=1)
    assert np.linalg.norm(mine - near) < 1e-3 * np.linalg.norm(near)
    half = tenant.multiply(request, x, HALF[tenant.manifest["numerics"]], bias)
    assert np.linalg.norm(half - near) < 1e-3 * np.linalg.norm(near)


# -- lies ------------------------------------------------------------------------------------------


class Lying(Connection):
    """An executor one number of whose answers is wrong: in answers of these bits."""

    lies: tuple[int, ...] = ()

    def product(self, request: Request, operation: int, payload: bytes, bits: int) -> np.ndarray:
        numbers = super().product(request, operation, payload, bits)
        if bits in self.lies:
            numbers[-1, -1] += 1 << (bits - 8)
        return numbers


@pytest.fixture
def liar(executors: Executors) -> Iterator[Lying]:
    made = Lying(executors[0].url, executors[0].token, executors[0].ca)
    yield made
    made.close()


@pytest.mark.parametrize("source", [False, True], ids=["the provider", "a source"])
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_a_lie_of_an_executor_is_found(ask: Ask, liar: Lying, source: bool, direction: int) -> None:
    """In an exact answer; in a rounded one; and in both, which then agree."""
    honest = ask(1)
    tenant = Tenant(honest.provider, [liar]) if source else Tenant(liar, honest.sources)
    half = HALF[tenant.manifest["numerics"]]
    request = Request.of(tenant.manifest, QKV, direction, 0b111, 2)
    x = np.random.default_rng(5).standard_normal((request.rows, request.columns)).astype(np.float32)
    assert np.isfinite(tenant.multiply(request, x, half)).all()
    for bits, lies, why in [
        (EXACT, (EXACT,), "an exact answer"),
        (half, (half,), "a half answer"),
        (half, (half, EXACT), "an exact answer"),
    ]:
        liar.lies = lies
        with pytest.raises(Wrong, match=why):
            tenant.multiply(request, x, bits)


def some_product(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Integer rows [T, C] and a plane [C, A] of int16, whose products are far below 2^31."""
    rows, inputs, outputs = rng.integers(1, 6), rng.integers(1, 40), rng.integers(1, 90)
    plane = rng.integers(-3000, 3000, (inputs, outputs))
    return rng.integers(-9000, 9000, (rows, inputs)), plane


def test_both_refuse_every_wrong_exact_answer() -> None:
    """Changes of single bits, of many numbers, and places that are exchanged."""
    rng = np.random.default_rng(11)
    for number in range(300):
        rows, plane = some_product(rng)
        mask = rng.integers(-(2**31), 2**31, rows.shape)
        z = rng.integers(-(2**31), 2**31, plane.shape[1])
        fingerprint = (plane.astype(np.uint64) @ z.astype(np.uint64)).astype(np.int64)
        answer = independent.signed((rows + mask) @ plane, EXACT)
        effect = independent.signed(mask @ plane, EXACT)
        wrong = answer.copy()
        at = tuple(rng.integers(n) for n in wrong.shape)
        if number % 3 == 0:
            wrong[at] ^= 1 << int(rng.integers(31))
        elif number % 3 == 1:
            wrong += rng.integers(-9, 9, wrong.shape)
        else:
            wrong = np.roll(wrong, 1, axis=1)
        for numbers in (answer, wrong):
            mine = independent.is_exact(independent.unmask(numbers, [effect], EXACT), rows, z, fingerprint)
            expected = (rows.astype(np.uint64) @ fingerprint.astype(np.uint64)).astype(np.int64)
            failed = unmask_and_dequantize(
                torch.tensor(independent.signed(numbers, EXACT), dtype=torch.int32),
                [torch.tensor(effect, dtype=torch.int32)],
                torch.zeros(len(rows), dtype=torch.int32),
                None,
                [torch.empty(numbers.shape)],
                torch.tensor(z, dtype=torch.int32),
                torch.tensor(expected),
            )
            assert mine == (failed == 0) == np.array_equal(numbers, answer)


@pytest.mark.parametrize("bits", HALF.values())
def test_both_decide_alike_about_half_answers(bits: int) -> None:
    """Given the same challenges, for errors on both sides of the limit."""
    rng, seen = np.random.default_rng(bits), set[bool]()
    unit, dtype = 2 ** (EXACT - bits), torch.float32 if bits == 16 else torch.float64
    for _ in range(300):
        rows, plane = some_product(rng)
        sources = int(rng.integers(1, 3))
        masks = [rng.integers(-(2**31), 2**31, rows.shape) for _ in range(sources)]
        numbers = [independent.signed((rows + sum(masks)) @ plane, EXACT)]
        numbers += [independent.signed(mask @ plane, EXACT) for mask in masks]
        z = np.rint(256 * rng.standard_normal((independent.CHALLENGES, plane.shape[1]))).astype(np.int64)
        numbers[0] += np.rint(rng.uniform(0, 4) * unit * rng.standard_normal(numbers[0].shape)).astype(int)
        upper = [independent.signed(each, EXACT) >> (EXACT - bits) for each in numbers]
        mine = independent.doubted(
            independent.unmask(upper[0], upper[1:], bits), rows, z, z @ plane.T, bits, sources
        )

        challenges = torch.tensor(z.T).to(dtype).contiguous()
        factors = (torch.tensor(plane @ z.T).double() / unit).to(dtype)
        fingerprint = HalfFingerprint(challenges, factors, limit_of(challenges, sources))
        assert fingerprint.limit == pytest.approx(independent.half_limit(z, sources), rel=1e-9)
        packed = [
            take_upper_bits(torch.tensor(independent.signed(each, EXACT)).int(), bits) for each in numbers
        ]
        revealed = subtract_upper_bits(packed[0], packed[1:], bits)
        for at, (row, doubt) in enumerate(zip(rows, mine, strict=True)):
            sums = expected_sums(fingerprint, torch.tensor(row[None]).float())
            assert wrong_rows(fingerprint, revealed[at : at + 1], sums) == doubt
            seen.add(bool(doubt))
    assert seen == {False, True}
