"""Audits for tests: executors in this process, so that what a test breaks is broken on both sides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from provider.engine.engine import Engine
from provider.executor.base import BaseExecutor
from provider.observe.metrics import Metrics
from provider.observe.transcript import TranscriptWriter
from provider.serve.server import Server, server_context
from provider.serve.tokens import TokenFile
from provider.session.tenant import Service
from security.audit import Audit
from security.recordings import capture
from security.recordings.capture import ONE_TIME, Parties
from security.recordings.executors import ExecutorProcess
from security.recordings.workload import WorkloadSize
from security.trials.passive import Evidence, PassiveAttacks
from security.verdicts.claims import judge
from security.verdicts.plan import QUICK_PLAN, AuditPlan, AuditResult

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MODEL = EXAMPLES / "base_model"
TEXT = EXAMPLES / "data" / "clinic_notes_train.txt"
PLAN = replace(
    QUICK_PLAN,
    size=WorkloadSize(prompts=16, new_tokens=1, repeated=1, repeats=4, steps=2, tokens=512),
    game_rows=4096,
    deep_places=1,
    lies=4,
    resolution=1.0,
    modes=(ONE_TIME,),
)
SHORT_PLAN = replace(
    PLAN, size=WorkloadSize(prompts=4, new_tokens=1, repeated=1, repeats=1, steps=1, tokens=128), game_rows=64
)


@cache
def loaded(model: Path, numerics: str) -> BaseExecutor:
    """It has no state, so all audits may have the same."""
    return BaseExecutor(model, numerics=numerics, recorded=True)


class CrashingEngine(Engine):
    """May stop answering."""

    paused = False

    def submit(self, *request: Any) -> None:
        """See Engine."""
        if not self.paused:
            super().submit(*request)


class Here(ExecutorProcess):
    """An executor in this process, so that a change for a test reaches it too."""

    server: Server | None = None

    def launch(self, port: int = 0) -> None:
        """See Executor."""
        base = loaded(self.model, self.numerics)
        self.recording = TranscriptWriter(self.folder / "transcripts", base.manifest)
        # Named after the second and the process, of which this one has several in a second.
        name = f"{len(self._recordings())}.transcript"
        self.recording.path = self.recording.path.rename(self.recording.path.with_name(name))
        self.engine = CrashingEngine.of(base)
        self.server = Server(
            Service(base, self.engine, Metrics(), transcript=self.recording),
            context=server_context(self.folder / "tls"),
            tokens=TokenFile(self.folder / "tokens.json"),
            port=port,
        )
        self.url = self.server.url
        self.log.touch()

    def await_ready(self) -> None:
        """It is."""

    def pause(self) -> None:
        """See Executor."""
        self.engine.paused = True

    def stop(self, number: int = 0) -> None:
        """See Executor."""
        if self.server is not None:
            if self.engine.paused:  # it dies with requests in flight
                self.engine.loop.call_soon_threadsafe(self._break)
            self.server.drain(2.0)
            self.recording.close()
            self.server = None

    def _break(self) -> None:
        assert self.server is not None
        for session in list(self.server.connections._open):
            session._broke(ConnectionResetError())  # type: ignore[attr-defined]


@contextmanager
def silent(what: str) -> Iterator[None]:
    yield


def lines() -> list[str]:
    return [line for line in TEXT.read_text().splitlines() if len(line.split()) > 8]


class Short(Audit):
    """One session with one-time, executors in this process, and what was recorded; a crash if wanted."""

    def __init__(self, plan: AuditPlan = SHORT_PLAN, *, crash: bool = False, answers: str = "exact") -> None:
        super().__init__(MODEL, lines(), plan, silent, answers=answers)
        self.lengths, self.crash = {}, crash

    @contextmanager
    def executors(self, folder: Path) -> Iterator[Parties]:
        """See Audit."""
        made = [
            Here(folder / name, MODEL, numerics)
            for name, numerics in (("floats", "float32"), ("ring", "ring"), ("source", "ring"))
        ]
        try:
            for executor in made:
                executor.token("nobody")
                executor.launch()
            yield Parties(made[0], made[1], made[2], MODEL, answers=self.answers)
        finally:
            for executor in made:
                executor.stop()

    def texts(self, parties: Parties) -> dict[str, str]:
        """Without the metrics of processes."""
        return {"the tenant's log": self.book.text, "the tenant's objects, printed": self.printed}

    def _crash(self, parties: Parties) -> None:
        if self.crash:
            super()._crash(parties)

    def _traffic(self, parties: Parties) -> None:
        pass

    def passive(self, folder: Path) -> PassiveAttacks:
        """The session's record, ready to be attacked; what was written has been searched."""
        with self.executors(folder) as parties:
            with capture.everything_logged() as self.book:
                self._plant(parties)
                self.work(parties)
            texts = self.texts(parties)
        found = PassiveAttacks(
            self.collect(parties), self.plan, self.result, self.rng, self.confidence, silent
        )
        found.search(texts, parties.tokens, self.planted)
        return found

    def refuted(self) -> set[str]:
        """Of all claims those that what was measured so far refutes."""
        self.result.about |= {"confidence_of_one_interval": self.confidence, "resolution": 1.0}
        return {
            verdict.identity
            for verdict in judge(self.result)
            if not verdict.holds and not verdict.figure.startswith(("not measured", "relative error"))
        } - {"control-reuse"}


def structure(folder: Path, *, crash: bool = False) -> tuple[Evidence, AuditResult, set[str]]:
    """A short session, what is found without attacks on its rows, and the claims that this refutes."""
    audit = Short(crash=crash)
    passive = audit.passive(folder)
    passive.structure()
    return passive.evidence, audit.result, audit.refuted()


def lied_to(folder: Path, answers: str = "exact") -> tuple[AuditResult, set[str]]:
    """Sessions that are lied to, and the claims that are refuted."""
    audit = Short(answers=answers)
    with audit.executors(folder) as parties:
        audit._lies(parties)
    return audit.result, audit.refuted() & {"verified", "verified-effects", "control-unverified"}
