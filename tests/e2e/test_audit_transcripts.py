"""``symbiosis-audit attack``: a verdict for each session, and what it stands on."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audits import MODEL
from recordings import Recording, activations, masked
from typer.testing import CliRunner, Result

from security.attacks.tokens import Averaging, KnownMaskSubtraction
from security.cli import app, console
from security.recordings.transcript import TranscriptError, read_transcript
from security.views import adversaries
from shared.errors import ConfigurationError
from shared.ring.mask_stream import MaskStream
from shared.time_limit import TimeLimitExceeded
from shared.wire.header import Operation


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "width", 200)  # whatever the terminal is


def attack(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["attack", *map(str, arguments), "--model", str(MODEL)])


def verdict(done: Result, session: str) -> str:
    """The line about a session, below all tables."""
    (line,) = [line for line in done.output.splitlines() if line.startswith(f"{session} (")]
    return line


def test_a_plain_session_among_masked_ones(tmp_path: Path) -> None:
    """Short beside what is masked, and still found and read without further options."""
    recording, rows = Recording(tmp_path), activations()
    for sent in (masked(rows.repeat(20, 1)), masked(rows.repeat(20, 1)), rows, masked(rows)):
        recording.send(recording.writer.opened("alice"), sent)
    recording.writer.close()
    done = attack(recording.path)
    assert done.exit_code == 1, done.output
    for session in ("session 1", "session 2", "session 4"):
        assert "rows look uniform, and nothing did better than on random rows" in verdict(done, session)
    told = verdict(done, "session 3")
    assert "these rows are NOT uniform: they are not under one-time masks" in told
    assert "reads ' Rory Maclean." in told or "Wound healed, stitches buried" in told
    assert "no mask of one serves in another" in verdict(done, "sessions 1, 2, 4 together")


def test_floats_and_what_attacks_do_on_uniform_rows(tmp_path: Path) -> None:
    """Above its own attack on uniform rows stands each: subspace projection as well."""
    recording = Recording(tmp_path, "float32")
    recording.send(recording.writer.opened("alice"), activations("float32").repeat(4, 1))
    recording.writer.close()
    done = attack(recording.path)
    assert done.exit_code == 1
    assert "they are floats" in verdict(done, "session 1")
    levels = set()
    for name in ("vocabulary matching", "subspace projection"):
        found = re.search(rf"{name} +│ [0-9]+ +│ ([0-9.]+) +│ ([0-9.]+)", done.output)
        assert found is not None
        assert float(found[1]) > float(found[2]) + 0.3
        levels.add(found[2])
    assert len(levels) > 1  # each attack has a level of its own


def test_a_mask_that_serves_in_two_sessions(tmp_path: Path) -> None:
    """Each of them looks uniform by itself."""
    recording, rows = Recording(tmp_path), activations()
    for sent in (masked(rows, bytes(32)), masked(rows.flip(0), bytes(32))):
        recording.send(recording.writer.opened("alice"), sent)
    recording.writer.close()
    done = attack(recording.path)
    assert done.exit_code == 1
    assert "NOT uniform" not in verdict(done, "session 1") + verdict(done, "session 2")
    assert "runs of top bytes come again" in verdict(done, "sessions 1, 2 together")


def test_what_doctor_measures_is_no_session(tmp_path: Path) -> None:
    """Its rows are sent as masks are; subtracting them would be an attack on nothing."""
    recording, rows = Recording(tmp_path), activations()
    recording.send(recording.writer.opened("alice"), torch.ones_like(rows), Operation.EFFECT)
    recording.send(recording.writer.opened("alice"), masked(rows))
    recording.writer.close()
    done = attack(recording.path)
    assert done.exit_code == 0, done.output
    assert "known-mask subtraction" not in done.output
    assert "session 1 (tenant alice) is left out: 1 effects and nothing else" in done.output


def test_masks_that_the_provider_multiplied_are_subtracted(tmp_path: Path) -> None:
    recording, rows = Recording(tmp_path), activations()
    bank = masked(torch.zeros(4, rows.shape[1], dtype=torch.int32))
    session = recording.writer.opened("alice")
    recording.send(session, bank, Operation.EFFECT)
    recording.send(session, rows + bank[torch.arange(len(rows)) % 4])
    recording.writer.close()
    done = attack(recording.path)
    assert done.exit_code == 1
    assert "known-mask subtraction reads" in verdict(done, "session 1")


def test_a_few_numbers_tell_nothing(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    recording.send(recording.writer.opened("alice"), masked(activations()[:1]))
    recording.writer.close()
    done = attack(recording.path)
    assert done.exit_code == 0
    assert "256 numbers are too few to tell" in verdict(done, "session 1")


def out_of_time() -> None:
    raise TimeLimitExceeded


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (out_of_time, "attacks on this tenant's sessions took 60 minutes of a processor"),
        (lambda: torch.linalg.cholesky(-torch.eye(2)), "an attack on it failed: _LinAlgError: "),
        (lambda: torch.empty(3 << 30, dtype=torch.uint8), "attacks on it need more memory than 1.60 GiB"),
        (lambda: np.empty(3 << 30, np.uint8), "attacks on it need more memory than 1.60 GiB"),
    ],
)
@pytest.mark.parametrize("leaks", [False, True])
def test_a_session_that_no_attack_bears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[], object], why: str, leaks: bool
) -> None:
    """All others have their tables and verdicts, in the order of sessions."""
    recording, rows = Recording(tmp_path), activations()
    for tenant, sent in (
        ("alice", masked(rows)),
        ("mallory", masked(rows[:5])),
        ("alice", rows if leaks else masked(rows)),
    ):
        recording.send(recording.writer.opened(tenant), sent)
    recording.writer.close()
    monkeypatch.setattr("security.deployment.available_memory", lambda: (2.0**31, "this machine"))
    unhurt = Averaging.attack
    monkeypatch.setattr(
        Averaging,
        "attack",
        lambda self, view, rng: fault() if view.requests[0].count == 5 else unhurt(self, view, rng),
    )
    done = attack(recording.path)
    assert done.exit_code == (1 if leaks else 2), done.output
    assert f"no verdict, for {why}" in verdict(done, "session 2")
    assert "rows look uniform" in verdict(done, "session 1")
    assert ("they are not under one-time" if leaks else "rows look uniform") in verdict(done, "session 3")
    tables = [done.output.index(f"session {number} (tenant alice), as provider sees it") for number in (1, 3)]
    assert tables[0] < done.output.index("✓ attacks on session 2") < tables[1]  # as soon as they are there
    if not leaks:
        assert "no mask of one serves in another" in verdict(done, "sessions 1, 3 together")


def test_a_tenant_without_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have any number of sessions, and those of others are attacked all the same."""
    recording, rows = Recording(tmp_path), activations()
    for tenant in ("mallory", "mallory", "alice"):
        recording.send(recording.writer.opened(tenant), masked(rows))
    recording.writer.close()
    attacked, unhurt = list[int](), Averaging.attack

    def counted(self: Averaging, view: Any, rng: Any) -> Any:
        attacked.append(len(attacked))
        return unhurt(self, view, rng) if attacked[1:] else out_of_time()

    monkeypatch.setattr(Averaging, "attack", counted)
    done = attack(recording.path)
    assert done.exit_code == 2, done.output
    for session in ("session 1", "session 2"):
        assert "no verdict, for attacks on this tenant's sessions took" in verdict(done, session)
    assert "rows look uniform" in verdict(done, "session 3")


def test_floats_of_two_widths_in_one_session(tmp_path: Path) -> None:
    recording, rows = Recording(tmp_path, "float32"), activations("float32")
    recording.send(recording.writer.opened("alice"), rows)
    session = recording.writer.opened("mallory")
    recording.send(session, rows)
    recording.send(session, rows.bfloat16())
    recording.writer.close()
    done = attack(recording.path)
    assert done.exit_code == 1, done.output
    for session in (1, 2):
        assert "these rows are NOT uniform: they are not under one-time masks (they are floats)" in verdict(
            done, f"session {session}"
        )


def test_seeds_for_more_masks_than_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many of each seed, and the table and the verdict say so."""
    recording, rows = Recording(tmp_path), activations()
    session = recording.writer.opened("mallory")
    recording.send(session, masked(rows))
    for _ in range(10):
        recording.seed(session, 1000, rows.shape[1])
    recording.send(recording.writer.opened("alice"), masked(rows))
    session = recording.writer.opened("bob")
    seeds = [recording.seed(session, 40, rows.shape[1]) for _ in range(3)]
    recording.send(session, masked(rows, seeds[2]))
    recording.writer.close()
    monkeypatch.setattr(adversaries, "MASK_BYTES", 400 * 4 * rows.shape[1])
    drawn: list[int] = []
    unhurt = KnownMaskSubtraction.attack

    def watched(self: KnownMaskSubtraction, view: adversaries.View, rng: object) -> object:
        drawn.append(sum(map(len, view.masks.values())))
        return unhurt(self, view, rng)  # type: ignore[arg-type]

    monkeypatch.setattr(KnownMaskSubtraction, "attack", watched)
    done = attack(recording.path)
    assert done.exit_code == 1, done.output
    assert set(drawn) == {400, 120}
    assert "nothing did better than on random rows; of 10,000 masks 400 were tried" in verdict(
        done, "session 1"
    )
    assert "masks" not in verdict(done, "session 2")
    assert "known-mask subtraction reads" in verdict(done, "session 3")
    assert "were tried" not in verdict(done, "session 3")


def test_seeds(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    recording.writer.opened("alice")
    recording.writer.opened("bob")
    for seed in (None, bytes(32)):  # alice's are fresh, and bob's are always the same
        for _ in range(80):
            recording.seed(1 if seed is None else 2, 4, 256, seed)
    recording.writer.close()
    done = attack(recording.path, "--view", "mask-source")
    assert done.exit_code == 1
    assert "tenant alice: nothing was found in 80 seeds" in done.output
    assert "tenant bob: these seeds are NOT fresh and random" in done.output


def test_provider_and_mask_source_together(tmp_path: Path) -> None:
    """The control of a one-time deployment: from seeds and rows the text."""
    provider, source, rows = Recording(tmp_path / "provider"), Recording(tmp_path / "source"), activations()
    for _ in range(2):
        seeds = source.writer.opened("alice-at-the-source")
        unused = source.seed(seeds, 16, rows.shape[1])  # fetched ahead, and never asked for
        seed = source.seed(seeds, len(rows), rows.shape[1])
        assert unused != seed
        provider.send(provider.writer.opened("alice"), masked(rows, seed))
    assert attack("--cut", provider.path).exit_code == 0
    provider.send(provider.writer.opened("alice"), rows)  # without a mask, beside those with
    provider.writer.close()
    source.writer.close()
    done = attack(provider.path, "--with", source.path)
    assert done.exit_code == 1, done.output
    for session in ("session 1", "session 2", "session 3"):
        assert "Rory Maclean" in verdict(done, session) or "stitches buried" in verdict(done, session)


def test_a_tenant_of_the_mask_source_that_asks_for_many_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not expanded to read what others sent, also where rows are under masks of two seeds."""
    provider, source, rows = Recording(tmp_path / "provider"), Recording(tmp_path / "source"), activations()
    mallory, alice = (source.writer.opened(name) for name in ("mallory", "alice"))
    flood = source.seed(mallory, 20_000, rows.shape[1])
    counts = (len(rows) - 7, 17)
    seeds = [source.seed(alice, count, rows.shape[1]) for count in counts]
    source.seed(mallory, 20_000, rows.shape[1], flood)
    masks = torch.cat(
        [masked(torch.zeros(n, 256).int(), seed) for n, seed in zip(counts, seeds, strict=True)]
    )
    provider.send(provider.writer.opened("alice"), rows + masks[3 : len(rows) + 3])
    for recording in (provider, source):
        recording.writer.close()
    drawn: list[bytes] = []
    monkeypatch.setattr(
        adversaries, "MaskStream", lambda seed, skip: drawn.append(seed) or MaskStream(seed, skip)
    )
    done = attack(provider.path, "--with", source.path)
    assert done.exit_code == 1, done.output
    assert set(drawn) == set(seeds)
    assert "Rory Maclean" in verdict(done, "session 1") or "stitches buried" in verdict(done, "session 1")


def test_a_cut_transcript_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording(tmp_path)
    recording.send(recording.writer.opened("alice"), masked(activations()))
    for name in ("security.deployment", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it is an error
    done = attack(recording.path)
    assert isinstance(done.exception, TranscriptError)
    assert "cut after 1 requests" in str(done.exception)
    wrong_view = attack(recording.path, "--view", "nobody")
    assert wrong_view.exit_code == 2
    assert "mask-source" in wrong_view.output
    assert attack(tmp_path / "nothing").exit_code == 2


def test_another_model_is_named_with_its_digest(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    recording = Recording(tmp_path)
    recording.writer.close()
    other = str(checkpoint("llama"))
    done = CliRunner().invoke(app, ["attack", str(recording.path), "--model", other])
    assert isinstance(done.exception, TranscriptError)
    assert "of another model" in str(done.exception)
    assert other in str(done.exception)


def test_a_report_that_cannot_be_written_is_known_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "security.audit", None)  # importing it is an error
    (tmp_path / "file").touch()
    for folder in (Path("/proc/x"), tmp_path / "file"):
        done = CliRunner().invoke(app, ["run", "--report", str(folder), "--quick"])
        assert isinstance(done.exception, ConfigurationError)
        assert f"cannot write the report into {folder}" in str(done.exception)


def test_some_rows_of_a_request_are_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask source's tenant may send many rows, of which each could be the mask of another request."""
    recording, rows = Recording(tmp_path), activations()
    recording.send(recording.writer.opened("alice"), rows, Operation.EFFECT)
    recording.writer.close()
    (request,) = read_transcript(recording.path).requests
    read, pread = list[int](), os.pread

    def counted(descriptor: int, size: int, at: int) -> bytes:
        read.append(size)
        return pread(descriptor, size, at)

    monkeypatch.setattr(os, "pread", counted)
    assert torch.equal(request.some_rows(2, 3), rows[2:5])
    assert sum(read) == 3 * rows[0].nbytes
    assert torch.equal(request.rows, rows)
