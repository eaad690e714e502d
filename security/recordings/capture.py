"""Run tenants in every privacy mode, and keep each party's recording beside a record of the real events."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tenant_sdk
from security.recordings.executors import ExecutorProcess
from security.recordings.transcript import RecordedRequest
from security.recordings.workload import GroundTruth, WorkloadSize, run_workload
from shared.wire.header import Direction
from shared.wire.messages import ErrorInfo
from tenant_sdk import NoiseBankOptions

PLAIN, SAME, ELSEWHERE, RING_BANK, ONE_TIME = (
    "plain",
    "noise-bank, same executor",
    "noise-bank, masks elsewhere",
    "noise-bank on the ring, masks elsewhere",
    "one-time",
)
MODES = (PLAIN, SAME, ELSEWHERE, RING_BANK, ONE_TIME)

RING_MASKS = 4  # so few that 64 messages show all of them, but once in 10^7 runs


def bank_name(label: str) -> str:
    """A bank of masks, by its mode or by ``K masks`` on floats, as reports call it."""
    named = {
        RING_BANK: f"on the ring, K = {RING_MASKS}",
        ELSEWHERE: f"on floats, K = {NoiseBankOptions().masks}",
    }
    return named.get(label) or f"on floats, K = {label.removesuffix(' masks')}"


@dataclass(frozen=True)
class Parties:
    """Who runs what: a float executor, and two of the ring from operators that do not collude."""

    floats: ExecutorProcess
    ring: ExecutorProcess
    source: ExecutorProcess
    model: Path
    tokens: list[str] = field(default_factory=list)  # all that were given out
    answers: str = "exact"  # of tenants with one-time masks

    def connect(self, mode: str, tenant: str, **options: Any) -> tenant_sdk.Session:
        """A session in one of MODES, under a tenant's name of its own, so that transcripts tell it apart."""
        provider = self.floats if mode in (PLAIN, SAME, ELSEWHERE) else self.ring
        arguments: dict[str, Any] = {
            "privacy": "noise-bank" if "bank" in mode else mode,
            "allow_transcript": True,
            # What is lost is not sent again: a copy would look like a mask that serves twice.
            "patience": 0.0,
        }
        if mode in (ELSEWHERE, RING_BANK):
            arguments["mask_sources"] = [f"local:{self.model}"]
        if mode == RING_BANK:
            arguments["noise_bank"] = NoiseBankOptions(masks=RING_MASKS)
        if mode == ONE_TIME:
            arguments |= {
                "mask_sources": [self.source.url],
                "mask_source_token": self.source.token(tenant),
                "mask_source_ca": self.source.ca,
                "allow_same": ["all"],  # both are on this machine, with certificates of their own
                "answers": self.answers,
            }
        if mode == ONE_TIME and self.answers != "exact":
            arguments["repeat_rate"] = 0.0  # as above: what is repeated is a copy
        arguments |= {"provider": provider.url, "token": provider.token(tenant), "ca": provider.ca}
        self.tokens.extend(
            str(arguments[name]) for name in ("token", "mask_source_token") if name in arguments
        )
        return tenant_sdk.connect(**(arguments | options))

    def all(self) -> list[ExecutorProcess]:
        """The three."""
        return [self.floats, self.ring, self.source]


@dataclass
class CapturedSession:
    """One session's record: what the provider and the mask source saw, and the truth."""

    mode: str
    truth: GroundTruth
    provider: list[RecordedRequest] = field(default_factory=list)
    source: list[RecordedRequest] = field(default_factory=list)


@dataclass
class Game:
    """Rows of two inputs, chosen by the adversary, as the provider saw them: [N, C], and which was sent."""

    rows: torch.Tensor
    answer: torch.Tensor


def workload(
    parties: Parties, mode: str, text: list[str], size: WorkloadSize, seed: int, planted: str
) -> tuple[GroundTruth, str]:
    """A tenant's work in one mode, and how the session's objects print, a planted secret among them."""
    truth = GroundTruth()
    with parties.connect(mode, tenant_of(mode)) as session:
        run_workload(session, text, size, truth, seed)
        session.products.planted = ErrorInfo("planted", planted)  # type: ignore[attr-defined]
        return truth, printed(session)


def tenant_of(mode: str) -> str:
    """The tenant's name of a mode's session."""
    return f"{MODES.index(mode)}-{mode.split(',')[0].replace(' ', '-')}"


def play(session: tenant_sdk.Session, group: int, rows: int, rng: np.random.Generator) -> torch.Tensor:
    """Send rows of one of two inputs, drawn for each: zeros, or large numbers that are all equal."""
    width = session.manifest.groups[group].inputs
    member_bits = (1 << len(session.manifest.groups[group].members)) - 1
    drawn = torch.from_numpy(rng.integers(0, 2, rows).astype(bool))
    for part in drawn.split(2048):
        tensor = part[:, None].float().expand(-1, width).contiguous() * 3.0
        session.products.submit(group, Direction.FORWARD, member_bits, [tensor]).result()
    return drawn


def game_of(requests: list[RecordedRequest], answer: torch.Tensor) -> Game:
    """The rows of a game among a session's products: the last ones, behind those for fingerprints."""
    rows = [request.rows for request in requests if request.header.columns == requests[-1].header.columns]
    return Game(torch.cat(rows)[-len(answer) :], answer)


class LogCapture(logging.Handler):
    """Keeps everything that is logged in this process, of every level, while it is open."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(logging.Formatter("%(name)s %(message)s"))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Of logging.Handler."""
        self.lines.append(self.format(record))

    @property
    def text(self) -> str:
        """All of it."""
        return "\n".join(self.lines)


@contextmanager
def everything_logged() -> Iterator[LogCapture]:
    """The tenant's packages log at their finest into a book, and nowhere else."""
    book = LogCapture()
    loggers = [logging.getLogger(name) for name in ("tenant_sdk", "shared", "symbiosis")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(book)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
    try:
        yield book
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(book)
            logger.setLevel(level)
            logger.propagate = True


def metrics_page(executor: ExecutorProcess) -> str:
    """What the executor's admin port shows."""
    with urllib.request.urlopen(f"{executor.admin_url}/metrics", timeout=10) as answer:  # noqa: S310
        return str(answer.read().decode())


def printed(root: Any) -> str:
    """``repr`` of an object and of those of this project that it leads to, of the first 2,000 objects."""
    seen: dict[int, Any] = {}
    lines: list[str] = []
    waiting = [root]
    while waiting and len(seen) < 2000:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        if isinstance(thing, (list, tuple, set, frozenset)) or type(thing).__name__ == "deque":
            waiting.extend(list(thing)[:50])
        elif isinstance(thing, dict):
            waiting.extend(list(thing.values())[:50])
        elif type(thing).__module__.split(".")[0] in ("tenant_sdk", "shared"):
            lines.append(repr(thing))
            waiting.extend(vars(thing).values() if hasattr(thing, "__dict__") else [])
    return "\n".join(lines)
