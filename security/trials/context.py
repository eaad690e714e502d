"""The context of attacks: the parties, a plan, random numbers, and executors that lie when told to."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from provider.executor.base import BaseExecutor
from provider.observe.metrics import Metrics
from provider.observe.transcript import TranscriptWriter
from provider.serve.server import Server, server_context
from provider.serve.tokens import TokenFile
from provider.session.tenant import Service
from security.attacks.active import LyingProvider
from security.recordings.capture import Parties
from security.recordings.executors import ExecutorProcess
from security.recordings.transcript import RecordedRequest, read_transcript
from security.verdicts.findings import Finding, HostileFinding, finding_of
from security.verdicts.plan import MALICIOUS, AuditPlan, AuditResult, Stage
from security.verdicts.statistics import rate
from security.views.adversaries import requests_of
from shared.wire.messages import Limits, Manifest, digest_of
from tenant_sdk.session.session import Session

PROMPT, PHRASE = 24, 4  # tokens: of a prompt, of what it repeats


@dataclass(frozen=True)
class HostedExecutor:
    """An executor in this process that lies when told to; what it recorded is read once it ended."""

    url: str
    liar: LyingProvider
    manifest: Manifest
    recording: Path
    folder: Path  # of what it serves

    def sessions(self, tenant: str) -> int:
        """How many one tenant opened with it."""
        return list(read_transcript(self.recording).tenants.values()).count(tenant)

    def requests(self, tenant: str) -> list[RecordedRequest]:
        """What one tenant asked for."""
        return requests_of([read_transcript(self.recording)], tenant)


@dataclass
class Trials:
    """What all attacks of an audit share.

    Attributes:
        parties: the executors, and how a tenant connects to them.
        folder: for checkpoints, recordings and logs.
        plan: how much.
        text: lines of the tenants.
        rng: of everything random but masks.
        confidence: of each interval.
    """

    parties: Parties
    folder: Path
    plan: AuditPlan
    text: list[str]
    rng: np.random.Generator
    confidence: float
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1), repr=False)

    def perform(
        self, attacks: dict[str, Callable[[], list[HostileFinding]]], result: AuditResult, stage: Stage
    ) -> None:
        """Run attacks, each under its stage's name, and add what they found."""
        for what, attack in attacks.items():
            with stage(what):
                for finding in attack():
                    result.hostile.append(finding)
                    result.findings += [finding.defended, finding.control]

    @contextmanager
    def hosted(
        self,
        like: ExecutorProcess,
        model: Path | None = None,
        files: Mapping[str, bytes | None] | None = None,
        tls: Path | None = None,
    ) -> Iterator[HostedExecutor]:
        """Another executor with the certificates and tokens of one of the parties.

        Args:
            like: that party.
            model: checkpoint folder; default: the parties' own.
            files: what it serves in place of the checkpoint's files, by name; None leaves one out.
            tls: folder of other certificates.
        """
        number = next(self._numbers)
        folder = model or self.parties.model
        if files is not None:
            folder = Path(shutil.copytree(folder, self.folder / f"served-{number}"))
        base = BaseExecutor(
            folder,
            numerics=like.numerics,
            recorded=True,
            limits=Limits(64 << 20, 65536),
        )
        if files is not None:
            _serve_instead(base, files)
        recording = TranscriptWriter(self.folder / f"hostile-{number}", base.manifest)
        liar = LyingProvider.of(base)
        server = Server(
            Service(base, liar, Metrics(), transcript=recording),
            context=server_context(tls or like.folder / "tls"),
            tokens=TokenFile(like.folder / "tokens.json"),
            port=0,
        )
        try:
            yield HostedExecutor(server.url, liar, base.manifest, recording.path, folder)
        finally:
            server.drain(1.0)
            recording.close()

    def score_guesses(
        self, attack: Any, mode: str, guesses: torch.Tensor, secrets: list[int], sees: str = MALICIOUS
    ) -> Finding:
        """Of guesses at the last secrets, of which there are two and as many of each."""
        right = int((guesses == torch.tensor(secrets[-len(guesses) :]).bool()).sum())
        return finding_of(attack, mode, sees, rate(right, len(guesses), self.confidence), 0.5)

    def repeating(self, session: Session, secrets: list[int]) -> list[list[int]]:
        """Prompts of PROMPT tokens of the tenant's text, which repeat a phrase where the secret is 1."""
        stream, chosen = self.tokens(session), []
        for i, secret in enumerate(secrets):
            distinct = list(dict.fromkeys(stream[i * PROMPT :]))[: PROMPT - 1]  # each once
            chosen.append([0, *(distinct if not secret else (distinct[:PHRASE] * PROMPT)[: PROMPT - 1])])
        return chosen

    def tokens(self, session: Session) -> list[int]:
        """Of all lines, as the session's tokenizer makes them."""
        tokenizer = session.load_tokenizer()
        return [t for line in self.text for t in tokenizer(line, add_special_tokens=False)["input_ids"]]


def _serve_instead(base: BaseExecutor, files: Mapping[str, bytes | None]) -> None:
    """Have an executor serve other files than it loaded; its manifest lists them truly."""
    checkpoint = base.catalog.checkpoint
    for name, data in files.items():
        path = checkpoint.folder / name  # from which an attack's control loads
        path.unlink(missing_ok=True)
        checkpoint.files.pop(name, None)
        if data is not None:
            path.write_bytes(data)
            checkpoint.files[name] = data
    listed = msgspec.structs.replace(base.manifest, files=base.catalog.checkpoint.tenant_files())
    base.catalog.manifest = msgspec.structs.replace(listed, digest=digest_of(listed))


def sequences(seen: set[tuple[int, ...]]) -> str:
    """How many there are, in words."""
    return f"{len(seen)} different sequences" if len(seen) > 1 else "one and the same sequence"
