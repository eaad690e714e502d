"""Hostile files, a substituted source and forked children: tried on the product as it is, and broken."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from audits import PLAN, Short, lines

from security.attacks import hostile_files
from security.attacks.hostile_files import LoadOutcome, MemoryBomb
from security.attacks.hostile_parties import MaskServedTwice, in_copy
from security.recordings.executors import AuditError
from security.trials.context import Trials
from security.trials.supply_chain import SupplyAttacks
from security.verdicts.claims import CLAIMS
from security.verdicts.findings import HostileFinding
from security.verdicts.plan import AuditResult
from shared import forks
from tenant_sdk.model import configuration
from tenant_sdk.model import loading as model_loading
from tenant_sdk.products import one_time_masks
from tenant_sdk.session import opening, options
from tenant_sdk.trust import operators

RNG = np.random.default_rng(0)
SMALL = replace(PLAN, filler_prompts=2, served_prompts=2)
CLAIMED = {
    "paths": "hostile-tokenizer",
    "filler": "hostile-filler",
    "generation": "hostile-generation",
    "bombs": "hostile-sizes",
    "substituted": "substituted-source",
    "forks": "forked-child",
}


@contextmanager
def supplies(folder: Path) -> Iterator[SupplyAttacks]:
    audit = Short()
    with audit.executors(folder) as parties:
        yield SupplyAttacks(Trials(parties, folder, SMALL, lines(), RNG, audit.confidence))


def judged(hostile: list[HostileFinding]) -> dict[str, bool]:
    """The claims about these attacks, and their controls."""
    result, names = AuditResult(hostile=hostile), {h.attack for h in hostile}
    return {c.identity: c.verdict(result).holds for c in CLAIMS if c.attack in names}


def test_the_product_as_it_is(tmp_path: Path) -> None:
    with supplies(tmp_path) as found:
        for attack, claim in CLAIMED.items():
            assert judged(getattr(found, attack)()) == {claim: True, f"control-{claim}": True}


# -- broken on purpose ------------------------------------------------------------------------------


def downloaded(remote: Any, into: Path) -> Path:
    into.mkdir(exist_ok=True)
    for info in remote.manifest.files:
        (into / info.name).write_bytes(remote.file(info))
    return into


def careless_tokenizer(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """A tokenizer as transformers makes it."""

    def load(remote: Any) -> Any:
        into = folder / remote.url.rpartition(":")[2]
        return transformers.AutoTokenizer.from_pretrained(downloaded(remote, into))

    patch.setattr(model_loading, "load_tokenizer", load)


def unattested(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Provider and mask source may list other files."""
    patch.setattr(opening, "check_agreement", lambda *_: None)


def obeyed_settings(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """All that a provider's generation configuration says."""

    def settings(data: bytes, config: Any) -> Any:
        return transformers.GenerationConfig(**json.loads(data))

    patch.setattr(configuration, "generation_configuration", settings)


def unbounded(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Configuration and rules are believed; of those fewer, or it would end the process."""
    patch.setattr(MemoryBomb, "RULES", MemoryBomb.FEWER_RULES)
    patch.setattr(hostile_files, "load_as_tenant", hostile_files.load_as_transformers)


def one_authority(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """One authority may vouch for two parties."""
    patch.setattr(
        options, "own_authorities", lambda ca, given, _: operators.own_authorities(ca, given, {"authority"})
    )


def children_go_on(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Nobody counts forks."""
    patch.setattr(forks.ForkGuard, "in_child", property(lambda self: False))
    patch.setattr(forks.ForkGuard, "check", lambda self: None)
    patch.setattr(one_time_masks.OneTimeMasks, "forked", lambda self: None)


@pytest.mark.parametrize(
    ("attack", "broken"),
    [
        ("paths", careless_tokenizer),
        ("filler", unattested),
        ("generation", obeyed_settings),
        ("bombs", unbounded),
        ("substituted", one_authority),
        ("forks", children_go_on),
    ],
)
def test_a_product_without_the_defence(
    attack: str,
    broken: Callable[[pytest.MonkeyPatch, Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "patch").mkdir()
    broken(monkeypatch, tmp_path / "patch")
    with supplies(tmp_path) as found:
        holds = judged(getattr(found, attack)())
    claim = CLAIMED[attack]
    assert not holds[claim]
    # Where the SDK loads as transformers does, the control repeats it in a process that has grown already.
    assert holds[f"control-{claim}"] or attack == "bombs"


# -- pieces -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "succeeds"),
    [
        (LoadOutcome("ModelMismatch", typed=True, grown_mib=1.0), False),
        (LoadOutcome("ModelMismatch", typed=True, grown_mib=65.0), True),
        (LoadOutcome("", typed=True, grown_mib=1.0), False),
        (LoadOutcome("MemoryError", typed=False, grown_mib=1.0), True),
    ],
)
def test_which_loads_count(load: LoadOutcome, succeeds: bool) -> None:
    assert MemoryBomb().attack([load], RNG) == [succeeds]


def _takes() -> None:
    kept = torch.ones(48 << 18)
    raise KeyError(len(kept))


def test_a_load_is_measured() -> None:
    """Its error, and what it took; in a process that has not freed any memory before."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        load = processes.submit(hostile_files.measured, _takes, 512 << 20).result()
    assert (load.error, load.typed) == ("KeyError", False)
    assert load.grown_mib > 40


def test_differences_under_one_mask() -> None:
    masks = torch.from_numpy(RNG.integers(-(2**31), 2**31, (3, 4, 64)).astype(np.int32))
    rows = torch.from_numpy(RNG.integers(-(2**20), 2**20, (3, 4, 64)).astype(np.int32))
    sent = [masks[0] + rows[0], masks[1] + rows[1], masks[0].flip(0) + rows[2]]
    (found,) = MaskServedTwice().attack(sent, RNG)
    assert found.equal(rows[0] - rows[2].flip(0))
    assert not MaskServedTwice().attack(sent[:2], RNG)


def test_a_copy_of_the_process() -> None:
    """It has its parent's process id, and says what it ended with; one that does not end well is an error."""
    parent = os.getpid()

    def tells() -> None:
        raise KeyError if os.getpid() == parent else ValueError

    assert in_copy(tells) == "KeyError"
    assert in_copy(lambda: None) == ""
    with pytest.raises(AuditError, match="did not end"):
        in_copy(lambda: os._exit(3))
