"""Changes of inputs: of bytes, and of JSON as a tree. The same seed gives the same change."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from fuzzing.oracle import SEPARATOR, Target

_NUMBERS = (0, 1, 2, 3, 7, 8, 127, 128, 255, 256, 65535, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
_NUMBERS += ((1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e308, 1e-320),
    *("", "x", "0", "\0", "\u2028", "\U0001f600", "\ud800", "../../etc/passwd", "x" * 600, "{}", "[]"),
    *([], {}, [[]], [None], [0], [""], [{}], {"": 0}, {"a": None}),
)
LARGEST = 1 << 16  # bytes of an input


def mutated(target: Target, data: bytes, others: list[bytes], random: Random) -> bytes:
    """An input that differs from this one in a few places.

    Args:
        others: inputs of the target, of which pieces are taken.
    """
    if target.divided:
        parts = data.split(SEPARATOR)
        at = random.randrange(len(parts))
        pieces = [piece for other in others for piece in other.split(SEPARATOR)[at : at + 1]]
        parts[at] = _changed(parts[at], pieces or [b""], target.words, random)
        return SEPARATOR.join(parts)[:LARGEST]
    return _changed(data, others, target.words, random)[:LARGEST]


def _changed(data: bytes, others: list[bytes], words: tuple[bytes, ...], random: Random) -> bytes:
    begin = data[:1]  # of some targets the first byte chooses
    for prefix, text in ((b"", data), (begin, data[1:])):
        if text[:1] in (b"{", b"[") and random.random() < 0.6:
            try:
                tree = json.loads(text)
            except (ValueError, RecursionError):
                continue
            for _ in range(random.choice((1, 1, 1, 2, 4))):
                tree = _tree(tree, words, random)
            return prefix + json.dumps(tree).encode()
    for _ in range(random.choice((1, 1, 2, 4, 8))):
        data = _bytes(data, others, words, random)
    return data


def _tree(tree: Any, words: tuple[bytes, ...], random: Random) -> Any:
    """JSON with one node in another's place, without it, twice, or of another value."""
    places: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        keys = [*node] if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else []
        places += [(node, key) for key in keys]
        waiting += [node[key] for key in keys]
    if not places:
        return _value(words, random)
    node, key = random.choice(places)
    kind, (other, place) = random.randrange(6), random.choice(places)
    if kind == 0:
        del node[key]
    elif kind == 1:
        node[key] = _copy(other[place])
    elif kind == 2 and isinstance(node, dict):
        node[_word(words, random)] = _copy(node[key])
    elif kind == 3 and isinstance(node[key], str):
        node[key] = _bytes(node[key].encode(errors="replace"), [b""], words, random).decode(errors="replace")
    elif kind == 4 and isinstance(node, list):
        node += [_copy(node[key])] * random.choice((1, 2, 100))
    else:
        node[key] = _value(words, random)
    return tree


def _value(words: tuple[bytes, ...], random: Random) -> Any:
    return _copy(random.choice((*_VALUES, *_NUMBERS, _word(words, random))))


def _copy(value: Any) -> Any:
    """Another object, since each may be changed later."""
    return json.loads(json.dumps(value))


def _word(words: tuple[bytes, ...], random: Random) -> str:
    return random.choice(words or (b"x",)).decode(errors="replace")


def _bytes(data: bytes, others: list[bytes], words: tuple[bytes, ...], random: Random) -> bytes:
    """One change."""
    at, kind = random.randrange(len(data) + 1), random.randrange(8)
    end = min(len(data), at + random.choice((1, 1, 2, 4, 8, 32)))
    if kind == 0:
        return data[:at] + bytes([random.randrange(256)]) + data[at + 1 :]
    if kind == 1 and at < len(data):
        return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
    if kind == 2:
        return data[:at] + data[end:]
    if kind == 3:
        return data[:end] + data[at:end] * random.choice((1, 2, 50)) + data[end:]
    if kind == 4:
        size, order = random.choice((1, 2, 4, 8)), random.choice(("little", "big"))
        number = random.choice(_NUMBERS) & (1 << 8 * size) - 1
        return data[:at] + number.to_bytes(size, order) + data[at + size :]  # type: ignore[arg-type]
    if kind == 5 and words:
        return data[:at] + random.choice(words) + data[random.choice((at, end)) :]
    if kind == 6:
        other = random.choice(others)
        begin = random.randrange(len(other) + 1)
        return data[:at] + other[begin : begin + random.choice((1, 8, 64, len(other)))] + data[end:]
    return data[:at] if random.random() < 0.3 else data[:at] + bytes(random.choice((1, 4, 16))) + data[end:]
