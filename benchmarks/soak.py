"""Everything at once, for a long time: do memory, descriptors, threads, files or latency grow?

    make gateway                            # vLLM, in an environment of its own
    python benchmarks/soak.py --minutes 60

A provider with two workers, its replica, a mask source and a gateway are processes of their own. Tenants open
sessions under one-time masks, train a step of LoRA, write some tokens, and close. One of them loses its
connection each time, and another one's token is replaced now and then. Clients of the gateway ask for streams
of the base model and an adapter. Every 20 seconds, one thing happens, in turn: a token is replaced; the
certificate and its authority are replaced; the adapter is replaced; the second worker is killed; the replica
drains and starts again.

This program notes memory, descriptors and threads of each process, and the seconds of a round and of a
stream. It prints slopes with 99 % intervals, without a first third in which caches fill. It exits with
1 if something grows: its interval lies above 0, and it would grow by more than a twentieth in eight hours.

Memory that is free may still belong to a process: an executor keeps up to a gigabyte, and new blocks land in
pages of it that were not touched before. So resident memory grows for thousands of sessions though no memory
is lost. Sessions without work, some hundred a second, are opened and closed first, until that is over. The
tenants are threads of this program, where freed memory stays between other blocks. So of this program,
allocated memory counts, and not resident memory.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import logging
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numpy as np
import openai
import psutil
import torch
from common import ExecutorProcess, arguments, own_mib, provider, save
from gateway import PYTHON, gateway
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils.logging import set_verbosity_error

import tenant_sdk
from shared.errors import AuthenticationError, WireError

MODEL = Path(__file__).resolve().parent.parent / "examples" / "base_model"
NAMES = ("base", "clinic-notes")  # as the gateway's clients know them
# Workers need more than the usual ten seconds to start again beside all this. Few masks are kept, so that
# they are complete before the gateway is judged.
GATEWAY = ("--max-adapters", 4, "--max-sequences", 8, "--patience", 120, "--mask-budget-mib", 64)
FIRST_SESSIONS = 8000  # without work; memory stays the same from some 7000 on
VISITOR = 1  # the tenant whose token is replaced; it knows both replicas
SAMPLE_SECONDS = 2.0
EVENT_SECONDS = 20.0
HOURS = 8
GROWTH = 0.05
BLOCKS = 10
# Student's t for 99 % and nine degrees of freedom. Nineteen lines are judged by their lower ends, so a run in
# which nothing grows fails once in ten times.
STUDENT = 3.25
console = Console(width=None if sys.stdout.isatty() else 120)


class _Allocated(ctypes.Structure):
    """The C library's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks"),
            *("fordblks", "keepcost"),
        )
    ]


def allocated_mib() -> float:
    """Memory of this process that its libraries have allocated and not freed."""
    function = ctypes.CDLL(None).mallinfo2
    function.restype = _Allocated
    found = function()
    return float(found.uordblks + found.hblkhd) / (1 << 20)


class Slope(NamedTuple):
    """Of a series: its mean, and by how much it grows in an hour, with the half width of the interval."""

    mean: float
    hourly: float
    half: float

    def grows(self) -> bool:
        """Whether it does so beyond doubt, and by an amount that matters."""
        return self.hourly - self.half > 0 and HOURS * self.hourly > GROWTH * self.mean


def slope(times: Sequence[float], values: Sequence[float]) -> Slope:
    """By least squares, with an interval of 99 % from blocks, since neighbours are alike."""
    x, y = np.array(times) / 3600, np.array(values)
    hourly = float(np.polyfit(x, y, 1)[0])
    # The spread of the slopes that remain when one of the blocks is left out (jackknife).
    blocks = np.array_split(np.arange(len(x)), BLOCKS)
    without = [np.polyfit(np.delete(x, block), np.delete(y, block), 1)[0] for block in blocks if len(block)]
    spread = float(np.sqrt((len(without) - 1) * np.var(without)))
    return Slope(float(y.mean()), hourly, STUDENT * spread)


class World:
    """The running parties, and what happens to them.

    Attributes:
        rounds: seconds that each tenant's rounds took.
        streams: seconds that each client's streams took.
        refused: sessions that ended because their token was replaced.
    """

    def __init__(self, folder: Path, tenants: int, running: ExitStack) -> None:
        self._folder, self._running = folder, running
        self.provider = self._start("provider", "--workers", 2)
        self.replica = self._start("replica", replica_of=self.provider.executor)
        self.source = self._start("source")
        self._visitor = self.provider.executor.tokens.add("visitor")
        self._authorities = self._write_authorities()
        self._adapters = self._write_adapters()
        served, source = self.provider.executor, self.source.executor
        self._replace_adapter(0)
        self.gateway = running.enter_context(gateway(served, source, folder / "adapters", folder, *GATEWAY))
        children = psutil.Process().children()
        self.gateway_process = next(each for each in children if str(PYTHON) in each.cmdline())
        self.first_worker = self.provider.workers()[0]
        self.rounds = [array("d") for _ in range(tenants)]
        self.streams = [array("d") for _ in NAMES]
        self.refused = 0
        self.ends = threading.Event()

    def _start(self, name: str, *options: object, **more: Any) -> ExecutorProcess:
        process = ExecutorProcess(MODEL, self._folder / name, "--threads", 1, *options, **more)
        self._running.callback(lambda: process.program.stop())
        return process

    def _write_authorities(self) -> tuple[Path, Path]:
        """A second authority; tenants trust both."""
        tls, other = self.provider.executor.ca.parent, self._folder / "other-tls"
        provider("certs", str(other))
        first = self._folder / "first-tls"
        shutil.copytree(tls, first)
        both = (first / "ca.pem").read_bytes() + (other / "ca.pem").read_bytes()
        (tls / "ca.pem").write_bytes(both)
        return first, other

    def _write_adapters(self) -> list[Path]:
        """Two adapters, which take each other's place."""
        base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        folders = [self._folder / f"adapter-{at}" for at in range(2)]
        for at, folder in enumerate(folders):
            torch.manual_seed(at)
            config = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
            get_peft_model(copy.deepcopy(base), config).save_pretrained(folder)
        return folders

    def connect(self, replicas: int = 1, *, visitor: bool = False) -> tenant_sdk.Session:
        """Open a session with one-time masks; a visitor's token is replaced now and then."""
        served, source = self.provider.executor, self.source.executor
        return tenant_sdk.connect(
            [self.replica.executor.url, served.url][-replicas:],
            token=self._visitor if visitor else served.token,
            ca=served.ca,
            mask_sources=[source.url],
            mask_source_token=source.token,
            mask_source_ca=source.ca,
            allow_same={"all"},
        )

    def happen(self, count: int) -> None:
        """One after the other of what can happen."""
        events = (
            self._replace_token,
            self._replace_certificate,
            self._replace_adapter,
            lambda _: self.provider.kill_worker(1),
            lambda _: self.replica.restart(signal.SIGTERM),
        )
        events[count % len(events)](count // len(events) + 1)

    def _replace_token(self, _: int) -> None:
        self._visitor = self.provider.executor.tokens.rotate("visitor", overlap_days=0)

    def _replace_certificate(self, count: int) -> None:
        folder = self.provider.executor.ca.parent
        for name in ("server.pem", "server.key"):
            shutil.copy(self._authorities[count % 2] / name, folder / name)
        for process in (self.provider, self.replica):
            process.program.process.send_signal(signal.SIGHUP)

    def _replace_adapter(self, count: int) -> None:
        folder, new = self._folder / "adapters" / NAMES[1], self._folder / "new"
        shutil.copytree(self._adapters[count % 2], new)
        folder.parent.mkdir(exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)

    def work(self, number: int) -> None:
        """A tenant: sessions, one after the other."""
        words = torch.arange(16)[None] + number
        while not self.ends.is_set():
            began = time.monotonic()
            try:
                with self.connect(1 + number % 2, visitor=number == VISITOR) as session:
                    model = get_peft_model(
                        session.load_model(progress=False), LoraConfig(target_modules=["q_proj"])
                    )
                    model(words, labels=words).loss.backward()
                    model.generate(words[:, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
                    if number == 0:  # and its requests move to a new connection
                        session.executor.connection.channel.close()
                        model(words)
            except (AuthenticationError, WireError) as error:
                if number != VISITOR or error.code != "unauthorized":
                    raise
                self.refused += 1
            gc.collect()  # models are cycles of objects, which Python would free at a time of its own
            self.rounds[number].append(time.monotonic() - began)

    def chat(self, number: int) -> None:
        """A client of the gateway: streams, one after the other."""
        with openai.OpenAI(
            base_url=f"{self.gateway}/v1", api_key="none", max_retries=0, timeout=600
        ) as client:
            while not self.ends.is_set():
                began = time.monotonic()
                prompt = f"And in the beginning, number {len(self.streams[number]) % 100}"
                try:
                    for _ in client.completions.create(
                        model=NAMES[number], prompt=prompt, max_tokens=8, stream=True
                    ):
                        pass
                except openai.NotFoundError:  # while its folder is replaced
                    time.sleep(0.1)
                self.streams[number].append(time.monotonic() - began)

    def sample(self) -> dict[str, float]:
        """Memory, descriptors, threads, files and seconds now."""
        gateways = [
            self.gateway_process.pid,
            *(each.pid for each in self.gateway_process.children(recursive=True)),
        ]
        parties = {
            "tenants": [os.getpid()],
            "provider": [self.provider.executor.pid],
            "worker": [self.first_worker],
            "mask source": [self.source.executor.pid],
            "gateway": gateways,
        }
        seen: dict[str, float] = {"tenants: Python's blocks": sys.getallocatedblocks()}
        for party, pids in parties.items():
            seen[f"{party}: MiB"] = sum(map(own_mib, pids)) if party != "tenants" else allocated_mib()
            for kind, name in (("descriptors", "fd"), ("threads", "task")):
                seen[f"{party}: {kind}"] = sum(
                    len(list(Path(f"/proc/{pid}/{name}").iterdir())) for pid in pids
                )
        for kind, series in (("round", self.rounds), ("stream", self.streams)):
            latest = [done[-1] for done in series if done]
            seen[f"seconds of a {kind}"] = statistics.mean(latest) if latest else float("nan")
        files = sum(len(inside) for _, _, inside in os.walk(tempfile.gettempdir()))
        return seen | {"temporary files": files}

    def watch(self, minutes: float) -> tuple[array[float], dict[str, array[float]]]:
        """Let things happen; returns seconds, and what was seen then: arrays, which add no Python blocks."""
        times: array[float] = array("d")
        seen: dict[str, array[float]] = {}
        began = happened = time.monotonic()
        count = 0
        while time.monotonic() - began < 60 * minutes:
            time.sleep(SAMPLE_SECONDS)
            if time.monotonic() - happened > EVENT_SECONDS:
                happened = time.monotonic()
                self.happen(count)
                count += 1
            times.append(time.monotonic() - began)
            for name, value in self.sample().items():
                seen.setdefault(name, array("d")).append(value)
        return times, seen


def main() -> int:
    """Watch, print slopes, write soak.json; 1 if something grows."""
    parser = arguments(__doc__, output="out/soak.json")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--tenants", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR)  # that all run on one machine is known here
    set_verbosity_error()
    with tempfile.TemporaryDirectory(prefix="symbiosis-soak-") as name, ExitStack() as running:
        tempfile.tempdir = name
        world = World(Path(name), options.tenants, running)
        for _ in track(range(FIRST_SESSIONS), "first sessions", console=console, transient=True):
            world.connect().close()
        parts = [(world.work, at) for at in range(options.tenants)]
        parts += [(world.chat, at) for at in range(len(NAMES))]
        threads = [threading.Thread(target=part, args=(at,), daemon=True) for part, at in parts]
        for thread in threads:
            thread.start()
        times, seen = world.watch(options.minutes)
        alive = all(thread.is_alive() for thread in threads)
        world.ends.set()
        for thread in threads:
            thread.join()
    first = len(times) // 3
    found = {what: slope(times[first:], values[first:]) for what, values in seen.items()}
    sessions, streams = sum(map(len, world.rounds)), sum(map(len, world.streams))
    table = Table(
        title=f"{options.minutes:g} minutes, {sessions} sessions ({world.refused} ended with their token), "
        f"{streams} streams"
    )
    for title in ("", "mean", "an hour more", "interval", ""):
        table.add_column(title, justify="right")
    for what, line in found.items():
        verdict = "grows" if line.grows() else ""
        table.add_row(what, f"{line.mean:.2f}", f"{line.hourly:+.2f}", f"± {line.half:.2f}", verdict)
    console.print(table)
    grows = [what for what, line in found.items() if line.grows()]
    console.print(
        f"grows: {', '.join(grows) or 'nothing'}" + ("" if alive else "; a tenant or a client failed")
    )
    save(options.output, {"times": list(times), "seen": {name: list(each) for name, each in seen.items()}})
    return int(bool(grows) or not alive)


if __name__ == "__main__":
    sys.exit(main())
