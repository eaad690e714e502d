"""Which groups a session keeps here: measured, chosen, and their weights asked for."""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from shared.kept_groups import Candidate, choose_groups
from shared.wire.header import DTYPE_NAMES, Direction, RequestClass
from shared.wire.messages import GroupInfo
from shared.wire.protocol import GroupShape
from shared.wire.traffic import TokenBytes
from tenant_sdk.connection.remote import RemoteExecutor
from tenant_sdk.connection.urls import replicas_of
from tenant_sdk.products.kept_groups import KeptProducts, group_weights
from tenant_sdk.products.products import Products
from tenant_sdk.session.options import TRAINING, SessionConfig, SessionOption
from tenant_sdk.session.profiles import FIELDS
from tenant_sdk.session.weight_cache import WeightCache
from tenant_sdk.trust.operators import SYSTEM

TRAINING_ROWS = 256  # of a request that is measured for training
MAX_NUMBERS = 1 << 24  # in such a request; the widths are the executor's words
TRIES = 9  # of which the middle one counts
COLD_BYTES = 64 << 20  # of weights that are multiplied in turn, so that none lies in a processor's cache
MAX_COPIES = TRIES  # of a weight among them

Shape = tuple[int, ...]  # inputs, and outputs of each member
# Products that are asked for weights, or what has the weights of a group's members, [O, D] each.
WeightSource = Products | Callable[[int], list[torch.Tensor]]


@dataclass(frozen=True)
class Kept:
    """What a session keeps here, and what that saves by what was measured.

    Attributes:
        groups: that are kept.
        size: bytes of their weights.
        requests: of a pass, forward and, in training, backward: with kept groups, and without.
        bytes: of a token: with kept groups, and without.
        seconds: of a token in the frozen layers: with kept groups, and without.
        layers: names of kept layers, such as ``o_proj``, and how many groups have them.
    """

    groups: frozenset[int]
    size: int
    requests: tuple[int, int]
    bytes: tuple[TokenBytes, TokenBytes]
    seconds: tuple[float, float]
    layers: Counter[str]

    def __str__(self) -> str:
        """In a sentence."""
        if not self.groups:
            return "keeps no layers here: none fits into the budget and saves time or bytes"
        layers = ", ".join(f"{count} times {name}" for name, count in self.layers.items())
        share = sum(self.bytes[0]) / sum(self.bytes[1])
        return (
            f"keeps {self.size / 2**30:.2f} GiB of weights here ({layers}): {self.requests[0]} requests "
            f"a pass in place of {self.requests[1]}, and {share:.0%} of the bytes; by estimate, a token "
            f"takes {1e3 * self.seconds[0]:,.1f} ms in frozen layers in place of {1e3 * self.seconds[1]:,.1f}"
        )


def keep_groups(
    config: SessionConfig,
    products: Products,
    weight_source: WeightSource,
    executor: RemoteExecutor,
    token_bytes: Callable[[list[GroupShape], tuple[Direction, ...]], TokenBytes],
) -> tuple[Products, Kept]:
    """Measure groups, choose some within the budget, and ask for their weights.

    For generation it keeps those that save most time, and for training those that save most bytes: on most
    networks, bytes decide how long a large request takes.

    Experts are not kept, since a token passes few of them; nor is the output head, which tenants have anyway.

    Args:
        products: of all groups.
        weight_source: asked for the weights: products that are all checked, since a wrong answer would be in
            all later products, or the tenant's own checkpoint.
        executor: that serves them.
        token_bytes: of one token that passes groups of these shapes in these directions.

    Returns:
        Products that ask for the other groups alone; and the choice.

    Raises:
        SymbiosisError: the executor, a mask source, or a wrong answer.
        ConfigurationError: others could have changed the kept weights on the disk.
    """
    training, dtype = config.keep_for == TRAINING, DTYPE_NAMES[config.keep_dtype]
    infos = {
        at: info for at, info in enumerate(executor.manifest.groups) if not info.head and not info.of_expert
    }
    budget = int(config.keep_gib * 2**30)
    measured = _measured(products, infos, dtype, budget, training=training)
    sizes = {at: _size(_shape(info), dtype) for at, info in infos.items()}
    remote, local = ({at: measured[_shape(info)][side] for at, info in infos.items()} for side in (0, 1))
    places = list(infos)
    directions = (Direction.FORWARD, Direction.BACKWARD) if training else (Direction.FORWARD,)
    moved = {at: sum(token_bytes([executor.shapes[at]], directions)) for at in places}
    candidates = [Candidate(sizes[at], moved[at] if training else remote[at] - local[at]) for at in places]
    chosen = [places[at] for at in choose_groups(candidates, budget)]
    left = [at for at in places if at not in chosen]
    passed = [executor.shapes[at] for at in left], [executor.shapes[at] for at in places]
    weights = _weights(
        weight_source, {at: infos[at] for at in chosen}, dtype, _cache(config, executor, dtype)
    )
    return KeptProducts(products, weights), Kept(
        frozenset(chosen),
        sum(sizes[at] for at in chosen),
        (len(directions) * len(left), len(directions) * len(places)),
        (token_bytes(passed[0], directions), token_bytes(passed[1], directions)),
        (sum(remote[at] for at in left) + sum(local[at] for at in chosen), sum(remote.values())),
        Counter("+".join(member.name.rpartition(".")[2] for member in infos[at].members) for at in chosen),
    )


def _cache(config: SessionConfig, executor: RemoteExecutor, dtype: torch.dtype) -> WeightCache | None:
    """Where weights of these executors are kept; None: nobody checks them, or an executor has no address."""
    parties = [config.provider, *config.mask_sources]
    named = all(isinstance(each, str) for party in parties for each in replicas_of(party))
    if config.when_verified == "off" or not named:
        return None
    manifest = executor.manifest
    return WeightCache([manifest.digest, manifest.numerics, dtype, *_trust_options(config)])


def _trust_options(config: SessionConfig) -> Iterator[str]:
    """Values of the options that decide who the parties are, and which weights they must have.

    The same URL may lead to others the next time, and fingerprints show what live checks cannot. Of files
    counts what they hold.
    """
    for name, field in FIELDS.items():
        if isinstance(field.option, SessionOption) and field.option.decides_trust:
            value = getattr(config, name)
            values = value if isinstance(value, list | tuple) else [value]
            yield str([_digest(each) if field.option.unit == "FILE" else str(each) for each in values])


def _digest(path: str | Path | None) -> str:
    if path is None or str(path) == SYSTEM:
        return str(path)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _shape(info: GroupInfo) -> Shape:
    return (info.inputs, *(member.outputs for member in info.members))


def _size(shape: Shape, dtype: torch.dtype) -> int:
    return shape[0] * sum(shape[1:]) * dtype.itemsize


def _measured(
    products: Products, infos: Mapping[int, GroupInfo], dtype: torch.dtype, budget: int, *, training: bool
) -> dict[Shape, tuple[float, float]]:
    """Seconds of a token in groups of each shape, there and here.

    Here, nothing larger than the budget is made: it could not be kept either.
    """
    seconds_of_shape: dict[Shape, tuple[float, float]] = {}
    for at, info in infos.items():
        inputs, *outputs = shape = _shape(info)
        if shape in seconds_of_shape:
            continue
        # The first two or three wait for masks, as in a pass none does; the middle one does not.
        remote, local = _usual_seconds(products, [at], shape, training=training), math.inf
        if (size := _size(shape, dtype)) <= budget:
            cold = {
                copy: [torch.full((width, inputs), 0.01, dtype=dtype) for width in outputs]
                for copy in range(min(max(1, min(COLD_BYTES, budget) // size), MAX_COPIES))
            }
            local = _usual_seconds(KeptProducts(products, cold), cold, shape, training=training)
        seconds_of_shape[shape] = remote, local
    return seconds_of_shape


def _usual_seconds(products: Products, groups: Iterable[int], shape: Shape, *, training: bool) -> float:
    """Seconds of a token: of one row forward, or of many forward and backward.

    Args:
        groups: of this shape, which are asked for in turn.
    """
    request_class = RequestClass.FINETUNING if training else RequestClass.DECODE
    count = max(1, min(TRAINING_ROWS, MAX_NUMBERS // max(shape))) if training else 1
    member_bits = (1 << len(shape) - 1) - 1
    generator = torch.Generator()  # of its own: the program's numbers stay as they are
    forward, *backward = (torch.randn(count, width, generator=generator) for width in shape)
    seconds = []
    for group in itertools.islice(itertools.cycle(groups), TRIES):
        began = time.perf_counter()
        products.submit(group, Direction.FORWARD, member_bits, [forward], request_class).result()
        if training:
            products.submit(group, Direction.BACKWARD, member_bits, backward, request_class).result()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) / count


def _weights(
    weight_source: WeightSource, infos: Mapping[int, GroupInfo], dtype: torch.dtype, cache: WeightCache | None
) -> dict[int, list[torch.Tensor]]:
    """Of each group and member, [O, D]."""
    weights = dict[int, list[torch.Tensor]]()
    for at, info in tqdm(infos.items(), "reading kept weights", unit="group", disable=None):
        if callable(weight_source):
            weights[at] = [weight.to(dtype) for weight in weight_source(at)]
            continue
        cached = cache.read(info, dtype) if cache else None
        if cached is not None:
            weights[at] = cached
            continue
        weights[at] = [
            group_weights(partial(_product, weight_source, at), info, member, dtype).T.contiguous()
            for member in range(len(info.members))
        ]
        if cache:
            cache.write(info, weights[at])
    return weights


def _product(
    products: Products, group: int, member_bits: int, rows: list[torch.Tensor]
) -> list[torch.Tensor]:
    return products.submit(group, Direction.FORWARD, member_bits, rows, RequestClass.FINETUNING).result()
