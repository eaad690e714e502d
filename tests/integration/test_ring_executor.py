"""An executor with ring numerics, over real TLS, against int64."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conftest import RING, Executor
from raw_peers import (
    BACKWARD,
    EFFECT,
    ERROR,
    FETCH,
    FLOAT32,
    FORWARD,
    PRODUCT,
    REPLY,
    Peer,
    header,
    open_raw,
)

from provider.executor.base import BaseExecutor
from shared.checkpoint import Checkpoint
from shared.errors import ConfigurationError, WireError
from shared.ring.fixed_point import bounds, quantize_weight
from shared.ring.mask_stream import MaskStream
from shared.wire.header import RINGS, Direction, Header, Operation, member_indices
from shared.wire.messages import Fetch, GroupInfo, Limits

pytest_plugins = ("wire_fixtures",)

SEED_EFFECT, INT32 = 8, 6
SEED = hashlib.sha256(b"a seed").digest()


@pytest.fixture(scope="module")
def ring(serve: Callable[..., Executor], checkpoint: Callable[[str], Path]) -> Callable[[str], Executor]:
    """A ring executor of a tiny model, the output head too: ``ring("llama")``; made once."""
    made: dict[str, Executor] = {}

    def get(architecture: str) -> Executor:
        if architecture not in made:
            made[architecture] = serve(checkpoint(architecture), numerics=RING, serve_head=True)
        return made[architecture]

    return get


def base_of(executor: Executor) -> BaseExecutor:
    assert executor.server is not None
    return executor.server.service.executor


def integers(seed: int, *shape: int) -> torch.Tensor:
    """Uniform int32; the first row at one end."""
    rows = MaskStream(bytes([seed]) * 32).draw(*shape)
    rows[0] = 2**31 - 1
    return rows


class Reference:
    """The integers of one group, from the checkpoint, and products with them in int64."""

    def __init__(self, folder: Path, info: GroupInfo) -> None:
        made = [
            quantize_weight(Checkpoint(folder).member_weight(member), RINGS[RING]) for member in info.members
        ]
        self.planes = [each.planes for each in made]
        self.scales = torch.cat([each.scales for each in made])

    def product(self, direction: int, members: int, rows: torch.Tensor) -> torch.Tensor:
        """The planes' products beside each other."""
        weight = torch.cat([self.planes[i] for i in member_indices(members)], 1).long()
        weight = weight.transpose(1, 2) if direction == FORWARD else weight
        return torch.cat(list(rows.long() @ weight), 1).to(torch.int32)


def ask(
    peer: Peer,
    group: int,
    direction: int,
    members: int,
    rows: torch.Tensor,
    operation: int = PRODUCT,
    seed: bytes | None = None,
) -> torch.Tensor:
    """One product: int32 rows [T, C] to answers [T, P N]; with a seed, only their size is sent."""
    fields = {"direction": direction, "dtype": INT32, "group": group, "members": members, "request_id": 9}
    count, columns = rows.shape
    payload = rows.numpy().tobytes() if seed is None else seed
    peer.message(header(operation, **fields, rows=count, columns=columns), payload)
    got, body = peer.receive()
    assert got.operation == REPLY, body
    assert (got.direction, got.dtype, got.group, got.request_id) == (direction, INT32, group, 9)
    assert (got.rows, got.members, got.request_class, got.answer_bits) == (count, members, 0, 32)
    return torch.frombuffer(bytearray(body), dtype=torch.int32).view(count, got.columns)


def fetch(peer: Peer, name: Any, start: int, stop: int) -> tuple[Any, bytes]:
    """A FETCH of scales."""
    peer.control(FETCH, {"kind": "scales", "name": name, "start": start, "stop": stop}, request_id=5)
    return peer.receive()


# -- products --------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt", "mixtral"])
def test_products_are_those_of_int64(
    ring: Callable[[str], Executor], checkpoint: Callable[[str], Path], architecture: str
) -> None:
    """Every group and member, the head, and weights that are stored transposed (GPT-2)."""
    executor = ring(architecture)
    groups = base_of(executor).manifest.groups
    assert groups[-1].head
    assert any(m.transposed for g in groups for m in g.members) == (architecture == "gpt2")
    with open_raw(executor) as peer:
        peer.hello()
        for group, info in enumerate(groups):
            reference = Reference(checkpoint(architecture), info)
            whole = (1 << len(info.members)) - 1
            for members in {1, whole, whole & ~2 or 1, whole & ~1 or 1}:
                outputs = sum(info.members[i].outputs for i in member_indices(members))
                for direction, columns in ((FORWARD, info.inputs), (BACKWARD, outputs)):
                    for count in (1, 30):
                        rows = integers(group, count, columns)
                        got = ask(peer, group, direction, members, rows)
                        assert torch.equal(got, reference.product(direction, members, rows))


def test_a_seed_stands_for_its_mask(ring: Callable[[str], Executor]) -> None:
    """The same answer as to an EFFECT of the mask, or a PRODUCT; and what a masked product is short of."""
    with open_raw(ring("llama")) as peer:
        peer.hello()
        for direction, members, columns in (
            (FORWARD, 0b111, 64),
            (BACKWARD, 0b101, 96),
            (BACKWARD, 0b10, 32),
        ):
            for count in (1, 70):
                mask, rows = MaskStream(SEED).draw(count, columns), integers(1, count, columns)
                effect = ask(peer, 0, direction, members, mask, SEED_EFFECT, SEED)
                assert torch.equal(effect, ask(peer, 0, direction, members, mask, EFFECT))
                assert torch.equal(effect, ask(peer, 0, direction, members, mask))
                masked = ask(peer, 0, direction, members, rows + mask)
                assert torch.equal(masked - effect, ask(peer, 0, direction, members, rows))


def test_what_the_tenant_sent_stays_as_it_is(ring: Callable[[str], Executor]) -> None:
    request = Header(Operation.PRODUCT, Direction.FORWARD, INT32, 0, 1, 20, 64, 1, answer_bits=32)
    rows = integers(3, 20, 64)
    before = rows.clone()
    base = base_of(ring("llama"))
    (out,) = base.compute(0, Direction.FORWARD, 1, base.tensors(request, rows))
    assert torch.equal(rows, before)
    assert (out.dtype, out.shape) == (torch.int32, (20, RINGS[RING] * 64))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpu_serves_the_same_bits(
    serve: Callable[..., Executor], ring: Callable[[str], Executor], checkpoint: Callable[[str], Path]
) -> None:
    there = serve(checkpoint("llama"), numerics=RING, serve_head=True, device="cuda")
    assert base_of(there).manifest == base_of(ring("llama")).manifest
    with open_raw(ring("llama")) as here, open_raw(there) as peer:
        here.hello()
        peer.hello()
        for count in (1, 3, 17, 300):
            for direction, members, columns in ((FORWARD, 0b111, 64), (BACKWARD, 0b101, 96)):
                rows = integers(4, count, columns)
                expected = ask(here, 0, direction, members, rows)
                assert torch.equal(ask(peer, 0, direction, members, rows), expected)
                seeded = ask(here, 0, direction, members, rows, SEED_EFFECT, SEED)
                assert torch.equal(ask(peer, 0, direction, members, rows, SEED_EFFECT, SEED), seeded)


# -- memory ----------------------------------------------------------------------------------------


def storages(root: object) -> dict[int, int]:
    """Address and bytes of everything that tensors keep, wherever below an object they are."""
    found: dict[int, int] = {}
    seen: set[int] = set()

    def visit(each: object) -> None:
        if id(each) in seen:
            return
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            if each.is_meta:  # of the model on the meta device
                return
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(each, dict):
            visit_all(each.values())
        elif isinstance(each, (list, tuple, set)):
            visit_all(each)
        elif hasattr(each, "__dict__") and not isinstance(each, type):
            visit_all(vars(each).values())

    def visit_all(many: Iterable[object]) -> None:
        for one in many:
            visit(one)

    visit(root)
    return found


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_planes_are_the_only_copy_of_the_weights(ring: Callable[[str], Executor], architecture: str) -> None:
    """Two bytes a weight, for both directions, and a scale for each output; products leave nothing behind."""
    executor = ring(architecture)
    base = base_of(executor)
    members = [(info.inputs, member.outputs) for info in base.manifest.groups for member in info.members]
    planes = sum(2 * inputs * outputs for inputs, outputs in members)
    with open_raw(executor) as peer:
        peer.hello()
        width = base.manifest.groups[0].inputs
        for count in (1, 40):
            ask(peer, 0, FORWARD, 1, integers(5, count, width))
            outputs = base.manifest.groups[0].members[0].outputs
            ask(peer, 0, BACKWARD, 1, integers(5, count, outputs))
    assert sum(storages(base._weights).values()) == planes
    assert sum(storages(vars(base)).values()) == planes + sum(4 * outputs for _, outputs in members)


# -- what a tenant learns --------------------------------------------------------------------------


def test_the_manifest_says_ring(ring: Callable[[str], Executor], checkpoint: Callable[[str], Path]) -> None:
    """It is that of a float executor of the same weights, but for numerics, wire dtypes and bounds."""
    with open_raw(ring("llama")) as peer:
        told = peer.hello()
    floats = BaseExecutor(checkpoint("llama"), numerics="float32", serve_head=True).manifest
    assert (told["numerics"], told["wire_dtypes"]) == (RING, ["int32"])
    for told_group, info in zip(told["groups"], floats.groups, strict=True):
        assert info.bounds is None
        planes = torch.cat(Reference(checkpoint("llama"), info).planes, 1)
        assert told_group["bounds"] == list(bounds(planes))
        rows, columns = planes.long().square().sum(2), planes.long().square().sum(1)
        assert told_group["bounds"] == [int(rows.max()), int(columns.max())]
    same = json.loads(msgspec.json.encode(floats))
    for group in told["groups"]:
        group["bounds"] = None
    assert told == same | {"numerics": RING, "wire_dtypes": ["int32"]}


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_scales_of_every_group(
    ring: Callable[[str], Executor], checkpoint: Callable[[str], Path], architecture: str
) -> None:
    executor = ring(architecture)
    with open_raw(executor) as peer:
        peer.hello()
        for group, info in enumerate(base_of(executor).manifest.groups):
            scales = Reference(checkpoint(architecture), info).scales
            size = len(scales)
            for start, stop in ((0, size), (0, 1), (size - 1, size), (size // 3, size // 2)):
                fields, body = fetch(peer, str(group), start, stop)
                assert fields[1:] == (REPLY, 0, FLOAT32, 0, 5, stop - start, 1, 0, 0, 0)
                got = torch.frombuffer(bytearray(body), dtype=torch.float32)
                assert torch.equal(got, scales[start:stop])
            for start, stop in ((0, 0), (0, size + 1), (-1, 1), (size, size + 1), (2, 1), (0, 10**30)):
                assert fetch(peer, str(group), start, stop)[0].operation == ERROR


NO_NAMES = [
    "", "-1", "-0", "+1", "00", "01", "01x", "1x", "x", "1 ", " 1", "1\n", "1.0", "1e0", "0x1", "1_0",
    "0" * 9, "9" * 30, "9" * 5000, str(2**64), "\u0663", "\u00b3", "\uff11", "\u0967", "True", "None",
    "../0", "0\x00", "q", "model.layers.0.self_attn.q_proj.weight", "config.json",
]  # fmt: skip


def test_names_that_no_scales_have(ring: Callable[[str], Executor]) -> None:
    """Signs, zeros in front, digits of other scripts, groups that there are not, and what else has a name."""
    executor = ring("llama")
    names = [*NO_NAMES, str(len(base_of(executor).manifest.groups))]
    with open_raw(executor) as peer:
        peer.hello()
        for name in names:
            fields, body = fetch(peer, name, 0, 1)
            assert (fields.operation, json.loads(body)["code"]) == (ERROR, "fetch"), name
        for name in (0, None, 1.0, ["0"], {"0": 0}):
            fields, body = fetch(peer, name, 0, 1)
            assert (fields.operation, json.loads(body)["code"]) == (ERROR, "control_message"), name
        assert fetch(peer, "0", 0, 1)[0].operation == REPLY


def test_floats_have_no_scales(llama: Executor) -> None:
    with open_raw(llama) as peer:
        peer.hello()
        assert json.loads(fetch(peer, "0", 0, 1)[1])["code"] == "fetch"


def test_scales_over_the_limit(checkpoint: Callable[[str], Path]) -> None:
    base = BaseExecutor(checkpoint("llama"), numerics=RING, limits=Limits(max_message_bytes=8, max_rows=1))
    assert base.catalog.fetch(Fetch("scales", "0", 3, 5), 1)[0].rows == 2
    with pytest.raises(WireError, match="fewer rows") as caught:
        base.catalog.fetch(Fetch("scales", "0", 3, 6), 1)
    assert caught.value.code == "too_large"


@pytest.mark.parametrize("operation", [PRODUCT, EFFECT, SEED_EFFECT])
def test_floats_are_refused_by_a_ring_and_integers_by_floats(
    ring: Callable[[str], Executor], llama: Executor, operation: int
) -> None:
    for executor, dtype in ((ring("llama"), FLOAT32), (ring("llama"), 2), (llama, INT32)):
        with open_raw(executor) as peer:
            peer.hello()
            size = 32 if operation == SEED_EFFECT else 64 * (2 if dtype == 2 else 4)
            fields = {"direction": FORWARD, "dtype": dtype, "members": 1, "rows": 1, "columns": 64}
            peer.message(header(operation, **fields, request_id=4), bytes(size))
            code = "operation" if executor is llama and operation == SEED_EFFECT else "dtype"
            assert peer.receive_error() == (4, code)


# -- starting --------------------------------------------------------------------------------------


def test_a_device_that_is_not_there(checkpoint: Callable[[str], Path]) -> None:
    for name in ("cuda:99", "nonsense"):
        with pytest.raises(ConfigurationError, match=f"no device '{name}'"):
            BaseExecutor(checkpoint("llama"), numerics=RING, device=name)
