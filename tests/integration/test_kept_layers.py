"""Sessions that keep layers within a budget: numbers, gradients, and which groups are asked for.

Kept weights are products with unit rows, so errors are those of the ring (docs/explanation/numerics.md): some
1e-4 of a layer, relative L2. bfloat16 has eight bits.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from conftest import RING, Executor, relative_error
from parity import load_local
from peft import LoraConfig, get_peft_model
from raw_peers import eventually
from ring_sessions import one_time, other_layers

from provider.executor import base as base_module
from shared.errors import ConfigurationError, VerificationError
from shared.wire.header import Direction
from tenant_sdk.products.fingerprints import write_fingerprints
from tenant_sdk.session import keeping

pytest_plugins = ("ring_fixtures",)

TOKENS = torch.arange(24).reshape(2, 12)
ALL, SOME = 1.0, 100_000 / 2**30  # GiB; two blocks of four groups take 200 KB


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where kept weights are written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "symbiosis" / "kept"


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group saves as much, whatever this machine is busy with."""

    def measured(_: Any, infos: Any, *__: Any, **___: Any) -> Any:
        return {keeping._shape(info): (2.0, 1.0) for info in infos.values()}

    monkeypatch.setattr(keeping, "_measured", measured)


@pytest.fixture(scope="module")
def pair(serve: Callable[..., Executor], checkpoint: Callable[[str], Path]) -> tuple[Executor, Executor]:
    return serve(checkpoint("llama"), numerics=RING), serve(checkpoint("llama"), numerics=RING)


def test_a_session_that_does_not_open_leaves_no_thread(
    pair: tuple[Executor, Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise ConfigurationError("no room")

    monkeypatch.setattr("tenant_sdk.session.opening.keep_groups", fails)
    before = set(threading.enumerate())
    with pytest.raises(ConfigurationError, match="no room"):
        one_time(*pair, keep_gib=ALL)
    ours = [each for each in threading.enumerate() if each.name == "symbiosis-masks" and each not in before]
    eventually(lambda: not any(each.is_alive() for each in ours))


@pytest.mark.usefixtures("alike")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("budget", [ALL, SOME])
def test_logits_and_gradients_are_those_of_a_local_model(
    budget: float, dtype: str, tolerance: float, pair: tuple[Executor, Executor], checkpoint: Any
) -> None:
    models = [load_local(checkpoint("llama"))]
    with one_time(*pair, keep_gib=budget, keep_dtype=dtype) as session:
        assert session.stats.verified_rows > 0  # weights are answers like others
        models.append(session.load_model(progress=False))
        results = []
        for model in models:
            torch.manual_seed(0)
            adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"]))
            output = adapted(TOKENS, labels=TOKENS)
            output.loss.backward()
            gradients = [p.grad.flatten() for p in adapted.parameters() if p.requires_grad]
            results.append((output.logits.detach(), torch.cat(gradients)))
    (logits, gradient), (got, got_gradient) = results
    assert relative_error(got, logits) < tolerance
    assert relative_error(got_gradient, gradient) < 2 * tolerance


@pytest.mark.usefixtures("alike")
def test_only_the_other_groups_are_asked_for(pair: tuple[Executor, Executor]) -> None:
    with one_time(*pair, keep_gib=SOME) as session:
        model, kept = session.load_model(progress=False), session.kept
        assert kept is not None
        assert 0 < len(kept.groups) < len(session.groups)
        assert kept.size <= SOME * 2**30
        with torch.no_grad():
            model(TOKENS)  # which also asks for fingerprints
            requests = session.stats.requests
            model(TOKENS)
        assert session.stats.requests - requests == kept.requests[0]
        assert kept.requests == (kept.requests[1] - len(kept.groups), len(session.groups))
        assert session.token_bytes() == kept.bytes[0]
        assert sum(kept.bytes[0]) < sum(kept.bytes[1])
        assert f"{kept.requests[0]} requests a pass in place of {kept.requests[1]}" in str(kept)
    with one_time(*pair, keep_gib=ALL, keep_for="training") as session:
        assert session.kept is not None
        assert session.kept.requests == (0, 2 * (len(session.groups)))
        requests = session.stats.requests
        with torch.no_grad():
            session.load_model(progress=False)(TOKENS)
        assert session.stats.requests == requests


def test_a_session_measures(pair: tuple[Executor, Executor]) -> None:
    """The products of this machine and of the executors, in both directions."""
    for work in ("generation", "training"):
        with one_time(*pair, keep_gib=ALL, keep_for=work) as session:
            assert session.kept is not None
            with_kept, without = session.kept.seconds
            assert min(with_kept, without) > 0
            assert with_kept <= without or work == "training"  # which is chosen by bytes


def test_a_budget_that_nothing_fits_into(
    pair: tuple[Executor, Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anything of the kind made to be measured."""
    monkeypatch.setattr(torch, "full", None)
    with one_time(*pair, keep_gib=1e-9) as session:
        assert session.kept is not None
        assert not session.kept.groups
        assert "keeps no layers here" in str(session.kept)
        (answer,) = session.groups[0].product(Direction.FORWARD, 1, [torch.ones(1, 64)])
        assert answer.isfinite().all()


@pytest.mark.usefixtures("alike")
def test_the_next_session_reads_weights_from_the_disk(pair: tuple[Executor, Executor], cache: Path) -> None:
    outputs = []
    for fresh in (True, False):
        with one_time(*pair, keep_gib=ALL) as session:
            assert (session.stats.requests > 0) == fresh
            with torch.no_grad():
                outputs.append(session.load_model(progress=False)(TOKENS).logits)
    assert torch.equal(*outputs)
    assert len(list(cache.rglob("*.safetensors"))) == 8
    with one_time(*pair[::-1], keep_gib=ALL) as session:  # others may have lied
        assert session.stats.requests > 0
    with one_time(*pair, keep_gib=ALL, verify="off") as session:  # nobody would have checked them
        assert session.stats.requests > 0
    assert len(list(cache.iterdir())) == 2


@pytest.mark.usefixtures("alike")
def test_half_answers_are_no_weights(pair: tuple[Executor, Executor]) -> None:
    """What is kept does not depend on how exact the session's other answers are."""
    outputs = []
    for answers in ("exact", "half"):
        with one_time(*pair, keep_gib=ALL, answers=answers) as session, torch.no_grad():
            outputs.append(session.load_model(progress=False)(TOKENS).logits)
    assert torch.equal(*outputs)


@pytest.mark.usefixtures("alike")
@pytest.mark.parametrize("verify", [{}, {"verify": "sampled", "verify_rate": 1e-9}])
def test_a_wrong_answer_becomes_no_weight(
    pair: tuple[Executor, Executor], proxy: Callable[[Executor], Any], cache: Path, verify: dict[str, Any]
) -> None:
    """The session is not opened, and the disk keeps what was right, if anything."""
    middle = proxy(pair[0])

    def change(message: Any, body: bytes) -> bytes:
        rows = message.fields.rows
        return body[:-1] + bytes([body[-1] ^ 1]) if message.fields.group == 1 and rows > 1 else body

    middle.changes.append(change)
    with pytest.raises(VerificationError), one_time(middle.executor, pair[1], keep_gib=ALL, **verify):
        pass
    assert len(list(cache.rglob("*.safetensors"))) == 1


@pytest.mark.usefixtures("alike")
def test_executors_may_order_their_groups_otherwise_the_next_time(
    serve: Callable[..., Executor], checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their digest stays the same."""
    folder = checkpoint("llama")
    right = load_local(folder)(TOKENS).logits.detach()
    first = [serve(folder, numerics=RING) for _ in range(2)]
    with one_time(first[0], first[1], keep_gib=ALL) as session:
        before = session.manifest
    discover = base_module.discover

    def reordered(*args: Any, **options: Any) -> Any:
        found = discover(*args, **options)
        return dataclasses.replace(found, groups=found.groups[4:] + found.groups[:4])

    monkeypatch.setattr(base_module, "discover", reordered)
    second = []
    for executor in first:
        assert executor.server is not None
        executor.server.drain(1.0)
        second.append(serve(folder, numerics=RING, port=urlsplit(executor.url).port))
    with one_time(second[0], second[1], keep_gib=ALL) as session, torch.no_grad():
        assert (session.manifest.digest, session.stats.requests) == (before.digest, 0)
        assert session.manifest.groups != before.groups
        logits = session.load_model(progress=False)(TOKENS).logits
    assert relative_error(logits, right) < 1e-3


@pytest.mark.usefixtures("alike")
def test_weights_of_ones_own_checkpoint_are_not_asked_for(
    pair: tuple[Executor, Executor], checkpoint: Callable[[str], Path], cache: Path
) -> None:
    """They are as exact as the checkpoint: floats are summed in another order, no more."""
    folder = checkpoint("llama")
    with one_time(pair[0], folder, keep_gib=ALL) as session, torch.no_grad():
        assert session.stats.requests == 0
        logits = session.load_model(progress=False)(TOKENS).logits
        assert relative_error(logits, load_local(folder)(TOKENS).logits) < 1e-5
    assert not cache.exists()


@pytest.mark.usefixtures("alike")
def test_weights_of_weaker_checks_are_not_used(
    serve: Callable[..., Executor],
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """All executors multiply with the same wrong weights, which only a file of fingerprints shows."""
    folder, wrong = checkpoint("llama"), tmp_path / "wrong"
    other_layers(wrong)
    claimed = serve(folder, numerics=RING).server.service.executor  # type: ignore[union-attr]
    liars = [serve(wrong, numerics=RING) for _ in range(2)]
    for liar in liars:
        catalog = liar.server.service.executor.catalog  # type: ignore[union-attr]
        monkeypatch.setattr(catalog, "manifest", claimed.manifest)
        monkeypatch.setattr(catalog, "_scales", claimed.catalog._scales)
    key = write_fingerprints(folder, tmp_path / "fingerprints")
    with one_time(liars[0], liars[1], keep_gib=ALL):
        pass
    checked = {"fingerprints": tmp_path / "fingerprints", "fingerprint_key": key}
    with pytest.raises(VerificationError), one_time(liars[0], liars[1], keep_gib=ALL, **checked):
        pass


@pytest.mark.usefixtures("alike")
def test_another_authority_at_the_same_address(pair: tuple[Executor, Executor], tmp_path: Path) -> None:
    """What was at an address in a trial may be another's executor later."""
    with one_time(*pair, keep_gib=ALL):
        pass
    other = tmp_path / "ca.pem"
    other.write_bytes(pair[0].ca.read_bytes() + b"\n")
    with one_time(*pair, keep_gib=ALL, ca=other) as session:
        assert session.stats.requests > 0
