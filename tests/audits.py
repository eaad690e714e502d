"""Audits for tests: executors in this process, so that what a test breaks is broken on both sides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from provider.executor import BaseExecutor
from provider.metrics import Metrics
from provider.scheduler import OneByOne
from provider.server import Server, server_context
from provider.tokens import TokenFile
from provider.transcript import Transcript
from security.audit import Audit
from security.capture import ONE_TIME, Parties
from security.claims import CLAIMS, judge
from security.executors import Executor
from security.passive import Evidence, PassiveAttacks
from security.plan import QUICK_PLAN, Result
from security.workload import Size

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MODEL = EXAMPLES / "base_model"
TEXT = EXAMPLES / "data" / "clinic_notes_train.txt"
PLAN = replace(
    QUICK_PLAN,
    size=Size(prompts=16, new_tokens=1, repeated=1, repeats=4, steps=2, tokens=512),
    game_rows=4096,
    deep_places=1,
    replies=400,
    lies=1,
    traffic_prompts=2,
    timing_moments=1,
    modes=(ONE_TIME,),
)


class Here(Executor):
    """An executor in this process, so that a change for a test reaches it too."""

    server: Server | None = None
    recording: Transcript | None = None

    def launch(self, port: int = 0) -> None:
        """See Executor."""
        base = BaseExecutor(self.model, numerics=self.numerics, recorded=True)
        self.recording = Transcript(self.folder / "transcripts", base.manifest)
        self.server = Server(
            base,
            OneByOne(base),
            context=server_context(self.folder / "tls"),
            tokens=TokenFile(self.folder / "tokens.json"),
            metrics=Metrics(),
            port=port,
            transcript=self.recording,
        )
        self.url = self.server.url
        self.log.touch()

    def await_ready(self) -> None:
        """It is."""

    def pause(self) -> None:
        """See Executor; a crash is a matter of processes, and of the whole audit."""

    def crash(self) -> None:
        """See Executor."""

    def stop(self, number: int = 0) -> None:
        """See Executor."""
        if self.server is not None and self.recording is not None:
            self.server.drain(2.0)
            self.recording.close()
            self.server = None


class SmallAudit(Audit):
    """One mode, executors in this process."""

    @contextmanager
    def executors(self, folder: Path) -> Iterator[Parties]:
        """See Audit."""
        made = [
            Here(folder / name, MODEL, n)
            for name, n in (("floats", "float32"), ("ring", "ring"), ("source", "ring"))
        ]
        try:
            for executor in made:
                executor.token("nobody")
                executor.launch()
            yield Parties(made[0], made[1], made[2], MODEL)
        finally:
            for executor in made:
                executor.stop()

    def texts(self, parties: Parties) -> dict[str, str]:
        """Without the metrics of processes."""
        return {"the tenant's log": self.book.text, "the tenant's objects, printed": self.printed}


@contextmanager
def silent(what: str) -> Iterator[None]:
    yield


def lines() -> list[str]:
    return [line for line in TEXT.read_text().splitlines() if len(line.split()) > 8]


def refuted(folder: Path) -> set[str]:
    """The claims about one-time that a small audit finds wrong."""
    result = SmallAudit(MODEL, lines(), PLAN, silent).run(folder)
    one_time = {claim.identity for claim in CLAIMS if not claim.identity.startswith("control")}
    return {verdict.identity for verdict in judge(result) if not verdict.holds} & one_time


class Recorded(SmallAudit):
    """Nothing but a tenant's work with one-time, and what was recorded of it: seconds instead of a minute."""

    plan_size = Size(prompts=4, new_tokens=1, repeated=1, repeats=1, steps=1, tokens=128)

    def __init__(self) -> None:
        super().__init__(MODEL, lines(), replace(PLAN, size=self.plan_size, game_rows=64), silent)

    def record(self, folder: Path) -> Evidence:
        self._crash = self._traffic = lambda parties: None  # type: ignore[method-assign]
        self.lengths = {}
        with self.executors(folder) as parties:
            self.work(parties)
        return self.collect(parties)


def structure(folder: Path) -> tuple[Evidence, Result, set[str]]:
    """A short session, what was found about its requests, masks and seeds, and claims that this refutes."""
    audit = Recorded()
    evidence = audit.record(folder)
    passive = PassiveAttacks(evidence, audit.plan, audit.result, audit.rng, audit.confidence, silent)
    passive.structure()
    audit.result.about["confidence_of_one_interval"] = audit.confidence
    wanted = {"one-time-separation", "one-time-mask-source", "one-time-uniform"}
    found = {verdict.identity for verdict in judge(audit.result) if not verdict.holds}
    return evidence, audit.result, found & wanted
