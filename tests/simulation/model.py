"""Weights of small groups, and what their products must be."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from provider.catalog.catalog import Catalog
from provider.catalog.discovery import Discovery
from provider.executor.loading import NUMERICS
from provider.executor.products import GroupExecutor
from shared.checkpoint import Checkpoint
from shared.ring.product import group_planes
from shared.ring.rows import quantize_and_mask, unmask_and_dequantize, write_products
from shared.wire.header import EXACT, RINGS, Direction, member_indices
from shared.wire.messages import GroupInfo, Limits, Manifest, Member
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.products.ring_group import RingGroup

WIDTHS = ((16, (16, 8, 8)), (24, (40,)), (16, (16,)))  # inputs and outputs of the groups' members
MAX_ROWS = 64


class Served(NamedTuple):
    """What an executor serves; see ``provider.session.tenant.Served``."""

    catalog: Catalog
    products: GroupExecutor

    @property
    def manifest(self) -> Manifest:
        """The catalog's."""
        return self.catalog.manifest


class Model:
    """A checkpoint of random weights in some numerics, and its products computed by numpy.

    Attributes:
        served: what every executor of it has.
    """

    def __init__(self, numerics: str) -> None:
        draw = torch.Generator().manual_seed(1)
        self._folder = tempfile.TemporaryDirectory(prefix="simulation-")
        folder, tensors, groups = Path(self._folder.name) / "simulated", {}, []  # the manifest has its name
        folder.mkdir()
        for number, (inputs, outputs) in enumerate(WIDTHS):
            members = tuple(
                Member(f"{number}.{i}", out, f"{number}.{i}.weight") for i, out in enumerate(outputs)
            )
            groups.append(GroupInfo(inputs, members))
            tensors |= {m.tensor: torch.randn(m.outputs, inputs, generator=draw) for m in members}
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"model_type": "simulated"}))
        checkpoint = Checkpoint(folder)
        load = NUMERICS[numerics].load
        loaded = {i: load(checkpoint, info, torch.device("cpu")) for i, info in enumerate(groups)}
        catalog = Catalog(
            checkpoint,
            Discovery("Simulated", "model", tuple(groups), (), ()),
            numerics=numerics,
            groups=[each.info for each in loaded.values()],
            scales={i: each.scales for i, each in loaded.items() if each.scales is not None},
            limits=Limits(max_message_bytes=1 << 16, max_rows=MAX_ROWS, max_in_flight=4),
        )
        self.served = Served(catalog, GroupExecutor(loaded, numerics, torch.device("cpu")))
        self._planes = [
            group_planes(checkpoint, info, RINGS[numerics])[0].numpy().astype(np.int64) for info in groups
        ]
        self._groups = [
            RingGroup(each.info, each.scales) for each in loaded.values() if each.scales is not None
        ]

    def widths(self, key: ProductKey) -> tuple[list[int], list[int]]:
        """Of a request's tensors, and of its answer's."""
        inputs, outputs = WIDTHS[key.group]
        chosen = [outputs[i] for i in member_indices(key.member_bits)]
        return ([inputs], chosen) if key.direction == Direction.FORWARD else (chosen, [inputs])

    def product(self, key: ProductKey, rows: np.ndarray) -> np.ndarray:
        """What an honest executor answers: int32 [T, C] to [T, P N], modulo 2^32."""
        outputs = WIDTHS[key.group][1]
        ends = np.cumsum([0, *outputs])
        chosen = np.concatenate([np.arange(ends[i], ends[i + 1]) for i in member_indices(key.member_bits)])
        parts = []
        for plane in self._planes[key.group]:
            weight = plane[chosen]
            parts.append(rows.astype(np.int64) @ (weight.T if key.direction == Direction.FORWARD else weight))
        return np.concatenate(parts, 1).astype(np.int32)

    def expected(self, key: ProductKey, tensors: list[torch.Tensor], sources: int) -> list[torch.Tensor]:
        """What a tenant must get for its rows; of half answers what it would get without their rounding."""
        group, forward = self._groups[key.group], key.direction == Direction.FORWARD
        scales = group.scales_of(key.member_bits)
        units = max(1, sources) << EXACT - key.answer_bits if key.answer_bits < EXACT else 0
        inputs, outputs = self.widths(key)
        integers = torch.zeros((len(tensors[0]), sum(inputs)), dtype=torch.int32)
        norm = group.max_norm(key.direction, units)
        hidden = quantize_and_mask(tensors, None if forward else scales, norm, integers, None)
        assert hidden is not None
        answers = torch.from_numpy(self.product(key, integers.numpy()))
        results = [torch.empty((len(integers), width)) for width in outputs]
        unmask_and_dequantize(answers, [], hidden[0], scales if forward else None, results, None, None)
        return results

    def unit(self, key: ProductKey, tensors: list[torch.Tensor], sources: int) -> torch.Tensor:
        """Of half answers, what one unit of each number of the result is: [T, N]."""
        group, forward = self._groups[key.group], key.direction == Direction.FORWARD
        scales = group.scales_of(key.member_bits)
        inputs, outputs = self.widths(key)
        norm = group.max_norm(key.direction, max(1, sources) << EXACT - key.answer_bits)
        zeros = torch.zeros((len(tensors[0]), sum(inputs)), dtype=torch.int32)
        hidden = quantize_and_mask(tensors, None if forward else scales, norm, zeros, None)
        assert hidden is not None
        ones = torch.full((len(zeros), sum(outputs)), float(1 << EXACT - key.answer_bits))
        result = torch.empty_like(ones)
        write_products(ones, hidden[0], scales if forward else None, [result])
        return result


@cache
def model(numerics: str) -> Model:
    """The model that every run with these numerics serves; made once."""
    return Model(numerics)
