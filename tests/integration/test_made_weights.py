"""Weights that are made of what a checkpoint holds are served, hidden, checked and given back as others are.

One model is quantised; of the other, three layers are pieces of one tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from conftest import RING, Executor
from lanes import submitted
from parity import fixed_result, load_local, token_ids, virtual_layers
from quantised import needs_rules, quantise
from ring_sessions import MASKINGS, Executors, session_in
from safetensors.torch import save_file
from stored_models import TABLE, build
from test_fingerprints import Trusted
from test_ring_parity import Results, assert_equal, assert_near, results
from test_workers import SECONDS, requests

from provider.executor.base import BaseExecutor
from provider.workers.pool import Sharding, WorkerPool
from security.recordings.transcript import check_served
from security.views.public_model import PublicModel
from shared.errors import ModelMismatch
from shared.wire.messages import Manifest, digest_of
from tenant_sdk.trust.attestation import open_checkpoint


class Made(NamedTuple):
    """Folders: as it is served, and with dense weights of the model's own names."""

    served: Path
    dense: Path


KINDS = [pytest.param("fp8", marks=needs_rules), pytest.param("gptq", marks=needs_rules), "pieces"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    made: dict[str, Made] = {}

    def get(kind: str) -> Made:
        if kind not in made:
            served, dense = (tmp_path_factory.mktemp(f"{kind}-{name}") for name in Made._fields)
            if kind == "pieces":
                build(*TABLE["nomic_bert"], served)
                made[kind] = Made(served, served)
                return made[kind]
            for each in (served, dense):
                build(*TABLE["mistral"], each)
            save_file(quantise(served, kind), dense / "model.safetensors", {"format": "pt"})
            made[kind] = Made(served, dense)
        return made[kind]

    return get


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, folders: Callable[[str], Made]) -> Made:
    return folders(request.param)


@pytest.fixture(scope="module")
def executors(made: Made, serve: Callable[..., Executor]) -> Executors:
    provider, first, second = (serve(made.served, numerics=RING) for _ in range(3))
    return provider, first, second


@pytest.fixture(scope="module")
def plain(made: Made, executors: Executors) -> Results:
    with session_in("plain", executors, made.served) as session:
        assert any(member.made for group in session.manifest.groups for member in group.members)
        return results(session.load_model(progress=False))


def test_it_is_the_local_model(made: Made, plain: Results) -> None:
    assert_near(plain, results(load_local(made.dense)))


@pytest.mark.parametrize("masking", MASKINGS[1:])
def test_masks_and_their_effects_are_of_the_same_weights(
    made: Made, executors: Executors, plain: Results, masking: str
) -> None:
    with session_in(masking, executors, made.served) as session:
        assert_equal(results(session.load_model(progress=False)), plain)


def test_answers_are_checked_with_fingerprints(made: Made, executors: Executors, tmp_path: Path) -> None:
    with executors[0].connect(**Trusted(made.served, tmp_path / "file").options) as session:
        fixed_result(session.load_model(progress=False), token_ids())
        assert session.stats.verified_rows == session.stats.rows > 0


@pytest.mark.parametrize(
    ("kind", "numerics", "options"),
    [
        pytest.param("pieces", RING, {"stripes": 2}, id="stripes"),
        pytest.param("fp8", "float32", {"fsdp": True}, id="gathered", marks=needs_rules),
    ],
)
def test_workers_make_their_own(
    kind: str, numerics: str, options: dict[str, Any], folders: Callable[[str], Made]
) -> None:
    served = folders(kind).served
    executor = BaseExecutor(served, numerics=numerics)
    pool = WorkerPool(served, Sharding(["cpu"] * 2, threads=1, **options), numerics=numerics)
    assert pool.manifest.digest == executor.manifest.digest
    engine = pool.engine()
    try:
        for header, payload in requests(executor, 3):
            (got,) = submitted(engine, "a", 1, header, payload).result(SECONDS).tensors[:1]
            tensors = executor.tensors(header, payload)
            (expected,) = executor.compute(header.group, header.direction, header.members, tensors)[:1]
            if expected.dtype == torch.int32:
                assert torch.equal(got, expected)
            else:  # in another order of additions
                assert torch.allclose(got, expected, atol=1e-5)
    finally:
        engine.close()


def test_detaching_gives_the_weights_back(made: Made, executors: Executors) -> None:
    local = load_local(made.dense)
    with executors[0].connect() as session:
        model = session.load_model(progress=False)
        assert virtual_layers(model)
        session.detach(model, made.served)
    state = local.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(fixed_result(model, token_ids()), fixed_result(local, token_ids()))


def test_an_auditor_has_the_weights_too(
    made: Made, executors: Executors, request: pytest.FixtureRequest
) -> None:
    with executors[0].connect() as session:
        manifest = session.manifest
    check_served(SimpleNamespace(manifest=manifest), made.served)  # type: ignore[arg-type]
    if "fp8" not in request.node.name:  # which transformers alone can load, and is a decoder
        return
    public = PublicModel(made.served, manifest)
    served, state = BaseExecutor(made.served, numerics="float32"), load_local(made.dense).state_dict()
    for number, group in enumerate(served.manifest.groups):
        weights = torch.cat([state[f"model.{member.name}.weight"] for member in group.members])
        assert torch.equal(public.weight(number), weights)


@pytest.mark.parametrize(
    "lie", [{"made": False}, {"expert": 0}, {"transposed": True}, {"tensor": "lm_head.weight"}], ids=str
)
def test_a_layer_that_is_said_to_be_made_otherwise_is_refused(made: Made, lie: dict[str, Any]) -> None:
    honest = BaseExecutor(made.served, numerics="float32").manifest
    assert open_checkpoint(made.served, honest).holds(honest)

    def changed(manifest: Manifest) -> Manifest:
        first, *others = manifest.groups
        member = msgspec.structs.replace(first.members[0], **lie)
        group = msgspec.structs.replace(first, members=(member, *first.members[1:]))
        new = msgspec.structs.replace(manifest, groups=(group, *others))
        return msgspec.structs.replace(new, digest=digest_of(new))

    with pytest.raises(ModelMismatch, match=f"the executor says that {honest.groups[0].members[0].name}"):
        open_checkpoint(made.served, changed(honest))
