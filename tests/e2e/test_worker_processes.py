"""`serve --workers`: tenants get the answers of one process, whatever happens to workers meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from commands import BASE_MODEL, ROOT
from conftest import RING, Executor, executor_processes
from raw_peers import SECONDS, eventually
from transformers import AutoModelForCausalLM

import tenant_sdk
from provider import serve_in_process
from provider.workers.link import ASSIGNMENT, REFUSED, Assignment
from provider.workers.pool import place_groups
from provider.workers.process import Process
from shared.errors import ConnectionLost
from shared.wire.header import Direction

Kind = tuple[int, Direction]  # of a product: its group
BOTH = (Direction.FORWARD, Direction.BACKWARD)


def page(executor: Executor, path: str) -> str:
    with urllib.request.urlopen(executor.admin_url + path, timeout=SECONDS) as answer:
        return answer.read().decode()  # type: ignore[no-any-return]


def workers(executor: Executor) -> list[dict[str, Any]]:
    return json.loads(page(executor, "/status.json"))["workers"]  # type: ignore[no-any-return]


def ready(executor: Executor) -> str:
    """What the probe says with 503; empty: it is ready."""
    try:
        assert page(executor, "/readyz") == "ready\n"
        return ""
    except urllib.error.HTTPError as error:
        return error.read().decode() if error.code == 503 else ""


@dataclass
class Sharded:
    """An executor with two workers, and what one process answers."""

    executor: Executor
    folder: Path
    masks: str
    lane_of: list[int]
    rows: dict[Kind, list[torch.Tensor]] = field(default_factory=dict)
    expected: dict[Kind, list[torch.Tensor]] = field(default_factory=dict)

    def session(self, **options: Any) -> tenant_sdk.Session:
        options = {"patience": SECONDS, **options}
        return self.executor.connect(privacy="one-time", mask_sources=[self.masks], **options)

    def ask(self, session: tenant_sdk.Session, kind: Kind) -> list[torch.Tensor]:
        group, direction = kind
        members = (1 << len(session.manifest.groups[group].members)) - 1
        return session.products.submit(group, direction, members, self.rows[kind]).result()

    def with_worker(self, number: int) -> list[Kind]:
        return [kind for kind in self.rows if self.lane_of[kind[0]] == number]


@pytest.fixture(scope="module")
def sharded(
    tls_dir: Path,
    token_file: tuple[Path, str],
    tmp_path_factory: pytest.TempPathFactory,
    checkpoint: Callable[[str], Path],
) -> Iterator[Sharded]:
    work = tmp_path_factory.mktemp("sharded")
    folder = shutil.copytree(checkpoint("llama"), work / "model")
    with executor_processes(tls_dir, token_file, work) as start, serve_in_process(folder) as alone:
        executor = start(folder, "--numerics", RING, "--devices", "cpu,cpu")
        masks = f"local:{checkpoint('llama')}"  # which stays where it is
        with tenant_sdk.connect(alone, privacy="one-time", mask_sources=[masks]) as session:
            groups = session.manifest.groups
            made = Sharded(executor, folder, masks, place_groups(groups, ["cpu"] * 2, 1, RING).lane_of)
            generator = torch.Generator().manual_seed(0)
            for group, info in enumerate(groups):
                outputs = [member.outputs for member in info.members]
                for direction, widths in zip(BOTH, ([info.inputs], outputs), strict=True):
                    rows = [torch.randn(5, width, generator=generator) for width in widths]
                    made.rows[group, direction] = rows
                    made.expected[group, direction] = made.ask(session, (group, direction))
        yield made


@pytest.fixture(autouse=True)
def all_ready(sharded: Sharded) -> None:
    eventually(lambda: not ready(sharded.executor))


class Asker(threading.Thread):
    """A tenant that asks for products, one after the other, until it is stopped."""

    def __init__(self, sharded: Sharded, kinds: list[Kind], session: tenant_sdk.Session) -> None:
        super().__init__()
        self._sharded, self._kinds, self._session = sharded, kinds, session
        self.stopped = threading.Event()
        self.answered, self.wrong = 0, list[Kind]()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stopped.is_set():
                for kind in self._kinds:
                    answer = self._sharded.ask(self._session, kind)
                    if not all(map(torch.equal, answer, self._sharded.expected[kind])):
                        self.wrong.append(kind)
                    self.answered += 1
        except BaseException as error:
            self.error = error
            raise


@contextmanager
def asking(sharded: Sharded, *each: list[Kind]) -> Iterator[list[Asker]]:
    """Tenants at work, one for each list of products; in the end all of them have right answers alone."""
    with ExitStack() as opened:
        sessions = [opened.enter_context(sharded.session()) for _ in each]
        askers = [Asker(sharded, *one) for one in zip(each, sessions, strict=True)]
        for asker in askers:
            asker.start()
        try:
            eventually(lambda: all(asker.answered > 2 for asker in askers))
            yield askers
        finally:
            for asker in askers:
                asker.stopped.set()
            for asker in askers:
                asker.join(SECONDS)
    assert [asker.error for asker in askers] == [None] * len(askers)
    assert [asker.wrong for asker in askers] == [[]] * len(askers)


def goes_on(askers: list[Asker], products: int = 20) -> bool:
    """Whether each of them gets so many further answers, in its own time."""
    before = [asker.answered for asker in askers]
    eventually(lambda: all(a.answered >= b + products for a, b in zip(askers, before, strict=True)))
    return True


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_is_lost_under_load(sharded: Sharded, fault: signal.Signals, lost: int) -> None:
    """Also what the kernel does to one that takes too much memory: it ends it with SIGKILL."""
    executor, kinds = sharded.executor, list(sharded.rows)
    spared = sharded.with_worker(1 - lost)
    before = workers(executor)
    with asking(sharded, kinds, kinds[::-1], spared, spared[::-1]) as askers:
        os.kill(before[lost]["pid"], fault)
        eventually(lambda: f"worker {lost} is being started again" in ready(executor))
        assert goes_on(askers[2:])
        assert ready(executor), "the others' products are no sign unless the worker is still away"
        eventually(lambda: not ready(executor))
        assert goes_on(askers)
    after = workers(executor)
    assert after[lost]["pid"] != before[lost]["pid"]
    assert after[1 - lost]["pid"] == before[1 - lost]["pid"]
    assert after[lost]["restarts"] == before[lost]["restarts"] + 1
    assert after[1 - lost]["restarts"] == before[1 - lost]["restarts"]
    assert all(b["products"] > a["products"] for a, b in zip(before, after, strict=True))


def test_a_worker_whose_checkpoint_is_not_there(sharded: Sharded) -> None:
    """It is told why, and tried again and again; what the other one holds is served meanwhile."""
    executor, lost = sharded.executor, workers(sharded.executor)[0]
    elsewhere, kind = sharded.folder.with_name("moved"), sharded.with_worker(0)[0]
    with asking(sharded, sharded.with_worker(1)) as askers, sharded.session() as session:
        sharded.folder.rename(elsewhere)
        try:
            os.kill(lost["pid"], signal.SIGKILL)
            eventually(lambda: "cannot load its share: " in ready(executor))
            assert f"{sharded.folder} is not a checkpoint folder" in ready(executor)
            metrics = page(executor, "/metrics")
            assert 'symbiosis_worker_up{worker="0"} 0.0' in metrics
            assert 'symbiosis_worker_up{worker="1"} 1.0' in metrics
            eventually(lambda: workers(executor)[0]["restarts"] > lost["restarts"] + 1)
            assert goes_on(askers)
            with (
                sharded.session(patience=2) as hasty,
                pytest.raises(ConnectionLost, match=r"starting a worker .* to wait longer, give patience="),
            ):
                sharded.ask(hasty, kind)
        finally:
            elsewhere.rename(sharded.folder)
        assert all(map(torch.equal, sharded.ask(session, kind), sharded.expected[kind]))
    assert executor.log is not None
    assert "worker 0 cannot load its share" in executor.log.read_text()


def test_a_checkpoint_that_was_replaced_is_not_loaded(sharded: Sharded, tmp_path: Path) -> None:
    """A worker that comes back with other weights would give wrong answers."""
    weights, kept = sharded.folder / "model.safetensors", tmp_path / "kept"
    lost = workers(sharded.executor)[0]
    weights.rename(kept)
    try:
        data = bytearray(kept.read_bytes())
        half = len(data) // 2
        data[half:] = bytes(len(data) - half)
        weights.write_bytes(data)
        os.kill(lost["pid"], signal.SIGKILL)
        eventually(lambda: "other weights than before" in ready(sharded.executor))
    finally:
        kept.rename(weights)
    kind = sharded.with_worker(0)[0]
    with sharded.session() as session:
        assert all(map(torch.equal, sharded.ask(session, kind), sharded.expected[kind]))


def test_a_whole_model_while_a_worker_is_killed(sharded: Sharded) -> None:
    with (
        serve_in_process(sharded.folder) as alone,
        tenant_sdk.connect(alone, privacy="one-time", mask_sources=[sharded.masks]) as session,
    ):
        expected = logits(session, range(4))
    with sharded.session() as session:
        got = logits(session, range(2))
        os.kill(workers(sharded.executor)[0]["pid"], signal.SIGKILL)
        got += logits(session, range(2, 4))
        assert session.stats.verified_rows
    assert all(map(torch.equal, expected, got))


def logits(session: tenant_sdk.Session, passes: range) -> list[torch.Tensor]:
    model = session.load_model(progress=False)
    with torch.no_grad():
        return [model(torch.arange(40).view(1, -1) + at).logits for at in passes]


def test_shards_that_are_gathered(serve_process: Callable[..., Executor]) -> None:
    """`--fsdp`: logits of up to ten or so; each layer's sums are float32's, in another order than torch's."""
    executor = serve_process(BASE_MODEL, "--workers", "2", "--fsdp")
    assert len(workers(executor)) == 2
    with executor.connect() as session:
        (got,) = logits(session, range(1))
    local = AutoModelForCausalLM.from_pretrained(BASE_MODEL, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(got, local(torch.arange(40).view(1, -1)).logits, atol=1e-3, rtol=1e-3)


def test_nothing_of_the_current_folder_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint's folder, or one that others may write to, may hold a module of any name."""
    (tmp_path / "msgspec.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made = Process(threading.Event())
    try:
        made.link.send(ASSIGNMENT, msgspec.msgpack.encode(Assignment(str(tmp_path), RING, "cpu", 1, {})))
        assert made.link.receive(SECONDS)[0] == REFUSED  # there is no checkpoint
    finally:
        made.link.close()
        made.end()
    assert not (tmp_path / "ran").exists()
