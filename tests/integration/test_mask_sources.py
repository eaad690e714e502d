"""Who computes the effects of masks: the provider, another executor, or the tenant's own checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Executor, make_model, relative_error
from parity import add_lora, fixed_result, gradients, load_local, token_ids, worst_error

from shared.checkpoint import Checkpoint
from shared.errors import CheckpointError, ModelMismatch
from shared.wire.header import Direction, Operation, RequestClass
from tenant_sdk import NoiseBankOptions
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.connection.remote import LazyResult, RemoteExecutor
from tenant_sdk.products.mask_sources import ExecutorSource, LocalSource

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def other(serve: Callable[..., Executor], folder: Path) -> Executor:
    """A second executor of the same weights."""
    return serve(folder)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    path = tmp_path_factory.mktemp("stranger")
    make_model("llama", seed=1).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("architecture", "numerics", "tolerance"),
    [
        ("llama", "float32", 1e-5),  # the order of additions
        ("gpt2", "float32", 1e-5),  # weights stored the other way round
        # The executor rounds masks and effects to 8 bits, the local source only the weights.
        ("llama", "bfloat16", 0.01),
    ],
)
def test_local_effects_are_the_executors(
    architecture: str,
    numerics: str,
    tolerance: float,
    serve: Callable[..., Executor],
    checkpoint: Callable[[str], Path],
) -> None:
    executor = serve(checkpoint(architecture), numerics=numerics)
    generator = torch.Generator().manual_seed(0)
    with executor.connect() as session:
        remote: RemoteExecutor = session.executor
        local = LocalSource(checkpoint(architecture), session.manifest)
        theirs = ExecutorSource(remote, owned=False)
        for group, info in enumerate(session.manifest.groups[:4]):
            count = len(info.members)
            for members in {1, 1 << count - 1, (1 << count) - 1}:
                chosen = [info.members[i].outputs for i in range(count) if members >> i & 1]
                for direction, widths in ((FORWARD, [info.inputs]), (BACKWARD, chosen)):
                    masks = [torch.randn(3, width, generator=generator) for width in widths]
                    key = ProductKey(group, direction, members)
                    got, expected = local.effect(key, masks), theirs.effect(key, masks)
                    assert [g.shape for g in got] == [e.shape for e in expected]
                    for mine, other in zip(got, expected, strict=True):
                        assert relative_error(mine, other) < tolerance


def test_local_effects_use_the_weights_as_the_executor_rounds_them(
    serve: Callable[..., Executor], folder: Path
) -> None:
    """Or what is subtracted would not be what was added: 2^-9 of the mask would stay in every output."""
    with serve(folder, numerics="bfloat16").connect() as session:
        manifest = session.manifest
    source = LocalSource(folder, manifest)
    member = manifest.groups[3].members[0]
    rounded = Checkpoint(folder).member_weight(member).to(torch.bfloat16).float()
    masks = torch.randn((3, manifest.groups[3].inputs), generator=torch.Generator().manual_seed(0))
    (got,) = source.effect(ProductKey(3, FORWARD, 1), [masks])
    assert relative_error(got, masks @ rounded.T) < 1e-6  # float32, one product


@pytest.mark.parametrize("source", ["provider", "other", "local"])
def test_training_with_each_source(
    source: str, llama: Executor, other: Executor, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parity, and who is asked for what; float32 noise of the activations' size: 1e-4."""
    sources = {"provider": [], "other": [other.url], "local": [f"local:{folder}"]}[source]
    asked: list[tuple[RemoteExecutor, Operation]] = []
    submit = RemoteExecutor.submit

    def watched(self: RemoteExecutor, operation: Operation, *arguments: Any) -> LazyResult:
        asked.append((self, operation))
        return submit(self, operation, *arguments)

    monkeypatch.setattr(RemoteExecutor, "submit", watched)
    local = load_local(folder)
    expected = fixed_result(local, token_ids())
    with llama.connect(privacy="noise-bank", mask_sources=sources) as session:
        model = session.load_model(progress=False)
        assert relative_error(fixed_result(model, token_ids()), expected) < 1e-4
        got = gradients(add_lora(model), token_ids())
        assert worst_error(got, gradients(add_lora(local), token_ids())) < 1e-4
        provider = session.executor
        # Nothing is trained below the first block's attention, so no gradient is sent there.
        assert session.stats.requests == 8 + 8 + 7
        assert session.stats.seconds_masking > 0
        assert (session.stats.effect_requests > 0) == (source != "local")
    products = [remote for remote, operation in asked if operation == Operation.PRODUCT]
    effects = [remote for remote, operation in asked if operation == Operation.EFFECT]
    assert all(remote is provider for remote in products)
    assert bool(effects) == (source != "local")
    assert all((remote is provider) == (source == "provider") for remote in effects)


def test_rows_on_the_wire_are_masked_in_both_directions(
    llama: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same training step in the clear and masked, seen where it leaves the tenant."""
    sent: dict[str, list[tuple[Direction, torch.Tensor]]] = {"plain": [], "noise-bank": []}
    submit = RemoteExecutor.submit
    for privacy, log in sent.items():

        def watched(
            self: RemoteExecutor,
            operation: Operation,
            key: ProductKey,
            tensors: list[torch.Tensor],
            request_class: RequestClass = RequestClass.UNDECLARED,
            *,
            log: list[tuple[Direction, torch.Tensor]] = log,
        ) -> LazyResult:
            if operation == Operation.PRODUCT:
                log.append((key.direction, torch.cat(tensors, 1)))
            return submit(self, operation, key, tensors, request_class)

        monkeypatch.setattr(RemoteExecutor, "submit", watched)
        with llama.connect(privacy=privacy) as session:
            gradients(add_lora(session.load_model(progress=False)), token_ids())
    assert [direction for direction, _ in sent["plain"]] == [FORWARD] * 8 + [BACKWARD] * 7
    for (direction, clear), (same_direction, masked) in zip(*sent.values(), strict=True):
        assert direction == same_direction
        noise = masked - clear
        # At least as strong as the row in every row; 64 to 288 normal numbers stray by half at most.
        assert float((noise.norm(dim=1) / clear.norm(dim=1)).min()) > 0.4


def test_options_of_the_noise_bank_arrive(llama: Executor) -> None:
    options = NoiseBankOptions(masks=4)
    with llama.connect(privacy="noise-bank", noise_bank=options) as session:
        fixed_result(session.load_model(progress=False), token_ids())
        banks = [serving.current.result(0)[0] for serving in session.products._banks._serving.values()]
        assert len(banks) == 8
        assert all(len(bank.masks[0]) == 4 for bank in banks)


def test_a_local_checkpoint_with_other_weights_is_refused(llama: Executor, stranger: Path) -> None:
    with pytest.raises(ModelMismatch, match="does not hold the weights that the executor serves"):
        llama.connect(privacy="noise-bank", mask_sources=[f"local:{stranger}"])


def test_a_local_checkpoint_of_another_architecture_is_refused(
    llama: Executor, checkpoint: Callable[[str], Path]
) -> None:
    with pytest.raises(ModelMismatch, match="does not hold the weights"):
        llama.connect(privacy="noise-bank", mask_sources=[f"local:{checkpoint('gpt2')}"])


def test_a_missing_local_checkpoint(llama: Executor, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        llama.connect(privacy="noise-bank", mask_sources=[f"local:{tmp_path}"])


@pytest.mark.parametrize("what", ["weights", "numerics"])
def test_a_mask_source_that_serves_something_else_is_refused(
    what: str, llama: Executor, serve: Callable[..., Executor], folder: Path, stranger: Path
) -> None:
    wrong = serve(stranger) if what == "weights" else serve(folder, numerics="bfloat16")
    with pytest.raises(ModelMismatch, match=f"do not serve the same: other {what}"):
        llama.connect(privacy="noise-bank", mask_sources=[wrong.url])
