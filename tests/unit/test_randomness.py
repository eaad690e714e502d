"""Tests of randomness: the standard's own figures, streams that are random, and streams that are not."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import randomness
from randomness import SEQUENCE_BYTES, Battery, p_values

BITS = 10**6
STREAM = 12 * SEQUENCE_BYTES
# Of SP 800-22 Rev. 1a, table 2-4: four digits, which its figures rest on.
TABLE = (0.0882, 0.2092, 0.2483, 0.1933, 0.1208, 0.0675, 0.0727)
# Appendix B, for the first 10^6 bits of these numbers.
PUBLISHED = {
    "e": {
        "frequency": 0.953749,
        "frequency in blocks": 0.211072,
        "cumulative sums": 0.669887,
        "cumulative sums, backward": 0.724266,
        "runs": 0.561917,
        "longest run": 0.718945,
        "spectral": 0.847187,
        "approximate entropy": 0.700073,
        "serial, first": 0.766182,
    },
    "root of 2": {
        "frequency": 0.811881,
        "frequency in blocks": 0.833222,
        "cumulative sums": 0.879009,
        "cumulative sums, backward": 0.957206,
        "runs": 0.313427,
        "longest run": 0.012117,
        "spectral": 0.581909,
        "approximate entropy": 0.884740,
        "serial, first": 0.861925,
    },
}


def e_times(factor: int) -> int:
    """e by its series, whose first 100,000 terms are enough for 10^6 bits."""

    def part(first: int, last: int) -> tuple[int, int]:
        if last - first == 1:
            return 1, last
        middle = (first + last) // 2
        (p, q), (r, s) = part(first, middle), part(middle, last)
        return p * s + r, q * s

    p, q = part(0, 100_000)
    return (p + q) * factor // q


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_figures_of_the_standard(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number = e_times(1 << BITS) if name == "e" else math.isqrt(2 << 2 * BITS)
    monkeypatch.setattr(randomness, "_run_classes", lambda: TABLE)
    data = int(bin(number)[2:][:BITS], 2).to_bytes(BITS // 8, "big")
    found = p_values(data)
    assert {test: found[test] for test in PUBLISHED[name]} == pytest.approx(PUBLISHED[name], abs=2e-6)


def test_the_exact_classes_are_near_the_table() -> None:
    assert randomness._run_classes() == pytest.approx(TABLE, abs=2e-3)
    assert sum(randomness._run_classes()) == pytest.approx(1)


def stream() -> bytearray:
    return bytearray(np.random.default_rng(0).bytes(STREAM))


def test_a_random_stream_passes_in_pieces_of_any_size() -> None:
    data, whole, pieces = bytes(stream()), Battery(), Battery()
    whole.add(data)
    for at in range(0, len(data), 100_003):
        pieces.add(data[at : at + 100_003])
    assert whole.values == pieces.values
    assert whole.sequences == 12
    assert whole.refused() == []


def test_a_short_stream_is_not_tested() -> None:
    battery = Battery()
    battery.add(bytes(SEQUENCE_BYTES - 1))
    with pytest.raises(ValueError, match="not tested"):
        battery.refused()


def biased(data: bytearray) -> bytes:
    """The last bit of one byte of 16 is 1."""
    data[::16] = bytes(byte | 1 for byte in data[::16])
    return bytes(data)


def small_numbers(data: bytearray) -> bytes:
    """Every fourth byte is 0 or 255, as the upper ones of small integers are."""
    data[3::4] = bytes(255 * (byte & 1) for byte in data[3::4])
    return bytes(data)


def repeated(data: bytearray) -> bytes:
    """Everything twice, 16 KiB apart."""
    return b"".join(2 * bytes(data[at : at + 2**14]) for at in range(0, STREAM // 2, 2**14))


def the_same_sequence(data: bytearray) -> bytes:
    """Each sequence passes; together they do not, if there are enough."""
    return 40 * bytes(data[:SEQUENCE_BYTES])


@pytest.mark.parametrize("damage", [biased, small_numbers, repeated, the_same_sequence])
def test_what_is_not_random_is_refused(damage: Callable[[bytearray], bytes]) -> None:
    battery = Battery()
    battery.add(damage(stream()))
    assert battery.refused()
