"""What a worker gets of tenants: rows as the provider received them, and what to multiply them with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec
import peft
import pytest
import torch
from audits import MODEL
from conftest import RING, TENANT

import tenant_sdk
from provider.config import ServeConfig
from provider.serve.provider import Provider
from provider.workers.batch import BatchLayout, WorkerBatch
from provider.workers.link import ASSIGNMENT, BATCH, FORGET, MEMORY, Assignment, LocalLink, Rows, WorkerLink
from provider.workers.memory import Segment
from security.recordings.transcript import read_transcript
from security.views.adversaries import provider_view, requests_of
from security.views.public_model import PublicModel
from shared.wire.protocol import GroupShape

Counted = Counter[tuple[int, int, int, bytes]]  # by group, direction and members


class Crossing:
    """All that is sent to workers: messages, and a batch's memory when it is given away."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.messages: list[tuple[WorkerLink, int, bytes]] = []
        self.batches: list[tuple[WorkerLink, WorkerBatch, torch.Tensor]] = []
        self.memory: list[bytes] = []
        self.beside_rows = 0  # bytes that are not 0 in memory that nobody had used before
        self._assignments: dict[WorkerLink, Assignment] = {}
        self._used: set[tuple[WorkerLink, int]] = set()
        send, lend, crossing = LocalLink.send, LocalLink.lend, self

        def sent(link: LocalLink, kind: int, content: bytes = b"", rows: Rows | None = None) -> None:
            crossing.messages.append((link, kind, content))
            if kind == ASSIGNMENT:
                crossing._assignments[link] = msgspec.msgpack.decode(content, type=Assignment)
            if rows is not None:
                crossing._batch(link, msgspec.msgpack.decode(content, type=WorkerBatch), rows)
            send(link, kind, content, rows)

        def lent(link: LocalLink, segment: Segment) -> None:
            crossing.messages.append((link, MEMORY, b""))
            lend(link, segment)

        patch.setattr(LocalLink, "send", sent)
        patch.setattr(LocalLink, "lend", lent)

    def _batch(self, link: WorkerLink, batch: WorkerBatch, rows: Rows) -> None:
        assignment = self._assignments[link]
        shape = GroupShape.of(assignment.groups[batch.group], assignment.numerics)
        layout = BatchLayout(batch.requests, batch.dtype, shape.widths(batch.direction, batch.members))
        whole = rows.memory.whole.copy()
        self.memory.append(whole.tobytes())
        (tensor,) = layout.requests(rows.memory)
        self.batches.append((link, batch, tensor.clone()))
        if (link, batch.memory) not in self._used:
            self._used.add((link, batch.memory))
            self.beside_rows += int(whole[layout.sent :].any())

    def rows(self, link: WorkerLink) -> Counted:
        """All that one worker was given to multiply."""
        found = Counted()
        for whose, batch, rows in self.batches:
            if whose is link:
                found += counted((batch.group, batch.direction, batch.members), rows)
        return found


def counted(kind: tuple[int, int, int], rows: Iterable[torch.Tensor]) -> Counted:
    return Counted((*kind, row.numpy().tobytes()) for row in rows)


def work(session: tenant_sdk.Session) -> None:
    """Some tokens, and a step of training."""
    model = session.load_model(progress=False)
    ids = torch.arange(3, 15).view(1, -1)
    model.generate(input_ids=ids, max_new_tokens=3, do_sample=False)
    lora = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    learner = peft.get_peft_model(model, lora)
    learner(input_ids=ids, labels=ids).loss.backward()


def test_a_worker_gets_its_rows_as_the_provider_received_them_and_nothing_else(
    tls_dir: Path, token_file: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages and memory are captured on their way, and compared with the provider's own recording."""
    crossing = Crossing(monkeypatch)
    tokens, token = token_file
    config = ServeConfig(
        model_dir=MODEL,
        tls_dir=tls_dir,
        token_file=tokens,
        port=0,
        admin_port=0,
        numerics=RING,
        workers=2,
        transcript=tmp_path,
    )
    with Provider(config) as provider:
        assert provider._pool is not None
        crew = [worker for lane in provider._pool.lanes for worker in lane.workers]
        links = [worker.link for worker in crew]
        with tenant_sdk.connect(
            provider.url,
            token=token,
            ca=tls_dir / "ca.pem",
            privacy="one-time",
            mask_sources=[f"local:{MODEL}"],
            allow_transcript=True,
        ) as session:
            work(session)
        for worker in crew:
            check_process(worker.pid, [token_file[0], tls_dir])
    recorded = read_transcript(tmp_path)
    public = PublicModel(MODEL, recorded.manifest)
    requests = requests_of([recorded], TENANT)
    assert len(requests) > 100
    for worker, link in zip(crew, links, strict=True):
        assert link is not None
        share = [request for request in requests if request.header.group in worker.assignment.groups]
        received = Counted()
        for seen in provider_view(public, share).requests:
            received += counted((seen.group, seen.direction, seen.members), seen.raw)
        assert received
        assert crossing.rows(link) == received
    assert crossing.beside_rows == 0
    check_messages(crossing, token, len(crew))


def check_messages(crossing: Crossing, token: str, workers: int) -> None:
    """Few kinds, each of which says what it must, and nobody's name or secret anywhere."""
    kinds = Counter(kind for _, kind, _ in crossing.messages)
    assert {ASSIGNMENT, MEMORY, BATCH} <= kinds.keys() <= {ASSIGNMENT, MEMORY, FORGET, BATCH}
    assert kinds[ASSIGNMENT] == workers
    for _, kind, content in crossing.messages:
        if kind == ASSIGNMENT:
            assert msgspec.msgpack.encode(msgspec.msgpack.decode(content, type=Assignment)) == content
        elif kind == BATCH:  # which has no field for who asks, nor how urgent it is
            assert msgspec.msgpack.encode(msgspec.msgpack.decode(content, type=WorkerBatch)) == content
    everything = [content for _, _, content in crossing.messages] + crossing.memory
    for secret in (token, TENANT, "symbiosis-tenant", "127.0.0.1"):
        assert not any(secret.encode() in each for each in everything), secret


def check_process(pid: int, secrets: list[Path]) -> None:
    """A worker inherits one socket, its link, and opens no file but the program's and the checkpoint's."""
    opened = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        opened.append(str(descriptor.readlink()))
    assert sum(each.startswith("socket:") for each in opened) == 1, opened
    command = Path(f"/proc/{pid}/cmdline").read_text()
    for secret in secrets:
        assert not any(each.startswith(str(secret)) for each in opened)
        assert str(secret) not in command
