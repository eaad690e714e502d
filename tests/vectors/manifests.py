"""The manifests of ``make_vectors.py``: one model in floats and on both rings."""

from __future__ import annotations

import msgspec
from ring_numbers import PLANES

from shared.ring.fixed_point import bounds
from shared.wire.header import RINGS
from shared.wire.messages import (
    FileInfo,
    GroupInfo,
    Limits,
    Manifest,
    Member,
    ParameterInfo,
    digest_of,
)

MANIFEST = Manifest(
    server="symbiosis/1",
    model="tiny",
    architecture="LlamaForCausalLM",
    base_prefix="model",
    weights="5e" * 32,
    digest="",
    numerics="float32",
    wire_dtypes=("float32", "bfloat16"),
    limits=Limits(max_message_bytes=65_536, max_rows=10),
    groups=(
        GroupInfo(
            4, (Member("layers.0.q", 3, "model.layers.0.q.weight"), Member("layers.0.k", 2, "k", True))
        ),
        GroupInfo(3, (Member("layers.0.down", 4, "model.layers.0.down.weight"),)),
        GroupInfo(2, (Member("wide", 10_000, "model.wide.weight"),), head=True),
    ),
    parameters=(ParameterInfo("model.embed_tokens.weight", (5, 4), "float32", "cd" * 32),),
    unavailable=(),
    files=(FileInfo("config.json", 120, "ab" * 32),),
)

MANIFEST = msgspec.structs.replace(MANIFEST, digest=digest_of(MANIFEST))
MANIFESTS = {
    "float32": MANIFEST,
    **{
        numerics: msgspec.structs.replace(
            MANIFEST,
            numerics=numerics,
            wire_dtypes=("int32",),
            groups=tuple(
                msgspec.structs.replace(group, bounds=given)
                for group, given in zip(
                    MANIFEST.groups,
                    (tuple(bounds(PLANES[numerics].planes)), (3 << 14, 4 << 14), (20_000, 10_000 << 13)),
                    strict=True,
                )
            ),
        )
        for numerics in RINGS
    },
}
