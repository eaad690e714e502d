"""Which kernel is used: the fastest of those that compute the right integers on this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from test_ring_product import HIGH, LOW, expected

from shared.errors import ConfigurationError
from shared.ring import product as ring_product
from shared.ring.product import KERNELS, Kernel, digits, fastest_kernel, is_exact

# -- kernels as they can be wrong ------------------------------------------------------------------


def combined(parts: list[torch.Tensor], out: torch.Tensor) -> None:
    """``sum 256^i parts[i]``, wrapping."""
    out.copy_(sum(part.to(torch.int32) << 8 * i for i, part in enumerate(parts)))


def saturating_pairs(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """What processors without VNNI do: pairs of unsigned times signed bytes are added with saturation."""
    pad = len(weight) % 2
    w = torch.nn.functional.pad(weight.int(), (0, 0, 0, pad)).view(-1, 2, weight.shape[1])
    parts = []
    for digit in digits(rows):
        u = torch.nn.functional.pad(digit.int() + 128, (0, pad)).view(len(rows), -1, 2)
        pairs = (u[:, :, :, None] * w).sum(2).clamp(-(2**15), 2**15 - 1)
        parts.append(pairs.sum(1) - 128 * weight.int().sum(0))
    combined(parts, out)


def saturating_signed_pairs(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """The same with signed bytes: only two times -128 times -128 is one too much."""
    pad = len(weight) % 2
    w = torch.nn.functional.pad(weight.int(), (0, 0, 0, pad)).view(-1, 2, weight.shape[1])
    parts = []
    for digit in digits(rows):
        u = torch.nn.functional.pad(digit.int(), (0, pad)).view(len(rows), -1, 2)
        parts.append((u[:, :, :, None] * w).sum(2).clamp(-(2**15), 2**15 - 1).sum(1))
    combined(parts, out)


def without_carries(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Bytes taken as signed digits, as if that were all."""
    combined([(rows >> 8 * i).to(torch.int8).int() @ weight.int() for i in range(4)], out)


def three_digits(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    combined([digit.int() @ weight.int() for digit in digits(rows)[:3]], out)


def saturating_sums(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """The whole product, but it stops at the ends of int32 instead of wrapping around."""
    out.copy_((rows.long() @ weight.long()).clamp(LOW, HIGH))


def in_float32(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_((rows.float() @ weight.float()).double().long().to(torch.int32))


def digits_in_float16(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Sums of digit products in fewer bits than they have."""
    combined([(digit.half() @ weight.half()).long() for digit in digits(rows)], out)


def one_layout(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Strides are not looked at."""
    data = weight.T.contiguous().view(weight.shape) if weight.stride(0) == 1 else weight
    out.copy_(rows.long() @ data.long())


def multiples_of_8(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """What does not fill a vector is forgotten."""
    inner = max(8, len(weight) // 8 * 8)
    out.copy_(rows[:, :inner].long() @ weight[:inner].long())


def all_but_the_last_tile(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    out.zero_()
    whole = max(len(rows) // 64 * 64, 1)
    out[:whole] = expected(rows[:whole], weight)


BROKEN = [
    saturating_pairs,
    saturating_signed_pairs,
    without_carries,
    three_digits,
    saturating_sums,
    in_float32,
    digits_in_float16,
    one_layout,
    multiples_of_8,
    all_but_the_last_tile,
]


@pytest.mark.parametrize("kernel", BROKEN)
def test_a_broken_kernel_is_found_out(kernel: Kernel) -> None:
    assert not is_exact(kernel)


# -- the choice ------------------------------------------------------------------------------------


def right(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """A kernel of no faults."""
    out.copy_(rows.long() @ weight.long())


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Kernel]:
    """``choose(name=(kernel, seconds), ...)``: who is chosen, where each call takes so long."""
    now = 0.0
    monkeypatch.setattr(ring_product, "time", SimpleNamespace(perf_counter=lambda: now))

    def timed(kernel: Kernel, seconds: float) -> Kernel:
        def call(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
            nonlocal now
            kernel(rows, weight, out)
            now += seconds

        return call

    def choice(**kernels: tuple[Kernel, float]) -> Kernel:
        monkeypatch.setattr(ring_product, "KERNELS", {name: timed(*each) for name, each in kernels.items()})
        return fastest_kernel.__wrapped__("cpu")

    return choice


def test_the_fastest_kernel_is_chosen_and_logged(
    choose: Callable[..., Kernel], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "shared"):
        for fast in ("one", "two", "three"):
            seconds = {name: 0.002 if name == fast else 0.005 for name in ("one", "two", "three")}
            chosen = choose(**{name: (right, each) for name, each in seconds.items()})
            assert chosen is ring_product.KERNELS[fast]
            assert f"ring kernel: {fast} " in caplog.text
            assert f"{fast} 2.0 ms" in caplog.text
            assert [record.levelname for record in caplog.records] == ["INFO"]
            caplog.clear()


def test_a_kernel_that_is_not_exact_is_not_chosen_however_fast(
    choose: Callable[..., Kernel], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "shared"):
        chosen = choose(wrong=(without_carries, 0.001), good=(right, 1.0), bad=(in_float32, 0.001))
    assert chosen is ring_product.KERNELS["good"]
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [message.split()[3] for message in warned] == ["wrong", "bad"]
    assert "ring kernel: good" in caplog.text


def test_without_an_exact_kernel_nothing_is_served(choose: Callable[..., Kernel]) -> None:
    with pytest.raises(ConfigurationError, match="ring numerics"):
        choose(wrong=(without_carries, 0.001), bad=(in_float32, 0.001))


def test_this_machine_has_a_kernel() -> None:
    assert fastest_kernel() in KERNELS.values()
    assert fastest_kernel() is fastest_kernel()


def test_a_device_with_a_number_has_the_kernels_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """``cuda:0`` is a GPU, whose fallbacks are there, and where no code for processors runs."""
    tried: list[str] = []

    def refusing(name: str) -> Kernel:
        def call(*_: torch.Tensor) -> None:
            tried.append(name)
            raise RuntimeError("not on this machine")

        return call

    names = ("int8", "avx2", "triton")
    monkeypatch.setattr(ring_product, "KERNELS", {name: refusing(name) for name in names})
    monkeypatch.setattr(ring_product, "ONLY", {"triton": "cuda", "avx2": "cpu"})
    monkeypatch.setattr(ring_product, "is_exact", lambda kernel, device: kernel())
    for device, wanted in (("meta:0", ["int8"]), ("cpu", ["int8", "avx2"])):
        tried.clear()
        with pytest.raises(ConfigurationError):
            fastest_kernel.__wrapped__(device)
        assert tried == wanted
