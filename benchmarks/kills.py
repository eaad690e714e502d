"""Kills the parties of a training at random moments, and compares the adapters with an undisturbed one.

    python benchmarks/kills.py --kills 100

A tenant trains an adapter under one-time masks, through a provider with two workers and a mask source with
an authority and a token of its own. All are real processes over TLS. A seed draws victims and moments. The
victim gets SIGKILL, and starts again, or SIGSTOP for some seconds. A new training begins until there were
enough kills.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from common import ExecutorProcess, arguments, save
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
MODEL, TEXT = ROOT / "examples" / "base_model", ROOT / "examples" / "data" / "clinic_notes_train.txt"
STEPS, SAVE_STEPS = 30, 4
STOP_SECONDS = (5.0, 5.0, 5.0, 90.0)  # the last is longer than a session waits for an answer
RETRY_SECONDS = 120  # seconds for which a tenant waits for a party that is started again
VICTIMS = ("provider", "worker", "mask source", "tenant", "stopped provider", "stopped mask source")
NONE_YET, AWAY = "there is nothing to resume", "cannot connect"  # which a new session does not wait for
console = Console(width=None if sys.stdout.isatty() else 120)


class Training:
    """A training in a process of its own, which is resumed after each kill."""

    def __init__(self, work: Path, profile: Path) -> None:
        self._work, self._profile, self._resume = work, profile, False
        work.mkdir()
        self.log, self.adapter = work / "log", work / "adapter"
        self.start()

    def start(self) -> None:
        """Begin, or go on."""
        command = [
            sys.executable,
            "-m",
            "tenant_sdk.command_line.main",
            "finetune",
            "--profile",
            self._profile,
        ]
        command += ["--data", TEXT, "--output", self.adapter, "--steps", STEPS, "--save-steps", SAVE_STEPS]
        command += ["--batch-size", 2, "--sequence-length", 16, "--rank", 4, *["--resume"] * self._resume]
        with self.log.open("ab") as output:
            words = [*map(str, command)]
            self.process = subprocess.Popen(words, stdout=output, stderr=output)

    def kill(self) -> None:
        """End it at once, and go on from its last checkpoint."""
        self.process.kill()
        self.process.wait()
        self._resume = True
        self.start()

    def ended(self) -> bool:
        """Whether it is complete; one that had kept nothing, or found a party away, begins again.

        Raises:
            SystemExit: it failed.
        """
        status = self.process.poll()
        if not status:
            return status == 0
        said = self.log.read_text().rpartition("loading torch")[2]
        if NONE_YET not in said and AWAY not in said:
            raise SystemExit(f"the training failed with status {status}:\n{said}")
        self._resume = NONE_YET not in said and self._resume
        self.start()
        return False

    def digest(self) -> str:
        """Of the adapter's weights."""
        return hashlib.sha256((self.adapter / "adapter_model.safetensors").read_bytes()).hexdigest()


def hit(victim: str, parties: dict[str, ExecutorProcess], training: Training, draw: random.Random) -> None:
    """Kill or stop one of them."""
    if victim == "tenant":
        training.kill()
    elif victim == "worker":
        parties["provider"].kill_worker(draw.randrange(2))
    elif victim.startswith("stopped "):
        program = parties[victim.removeprefix("stopped ")].program
        program.process.send_signal(signal.SIGSTOP)
        time.sleep(draw.choice(STOP_SECONDS))
        program.process.send_signal(signal.SIGCONT)
    else:
        parties[victim].restart()


def write_profile(folder: Path, parties: dict[str, ExecutorProcess]) -> Path:
    """Options of a session with these parties."""
    served, source = (parties[name].executor for name in ("provider", "mask source"))
    for name, party in (("provider", served), ("source", source)):
        (folder / f"{name}.token").write_text(party.token)
        (folder / f"{name}.token").chmod(0o600)
    lines = [
        f'provider = "{served.url}"',
        f'ca = "{served.ca}"',
        f'token_file = "{folder}/provider.token"',
        'allow_same = ["all"]',
        f"patience = {RETRY_SECONDS}",
        "[[mask_sources]]",
        f'url = "{source.url}"',
        f'ca = "{source.ca}"',
        f'token_file = "{folder}/source.token"',
    ]
    path = folder / "profile.toml"
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o600)
    return path


def main() -> None:
    """Train undisturbed, then kill; print a table, write kills.json."""
    parser = arguments(__doc__, output="out/kills.json")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    draw, hits, adapters = random.Random(options.seed), Counter[str](), []
    with tempfile.TemporaryDirectory() as name, ExitStack() as ends:
        work = Path(name)
        parties = {
            "provider": ExecutorProcess(MODEL, work / "provider", "--workers", "2"),
            "mask source": ExecutorProcess(MODEL, work / "source"),
        }
        for party in parties.values():
            ends.callback(lambda party=party: party.program.stop())
        profile = write_profile(work, parties)
        training, began = Training(work / "undisturbed", profile), time.monotonic()
        while not training.ended():
            time.sleep(0.05)
        usual, right = time.monotonic() - began, training.digest()
        console.print(f"undisturbed: {usual:.0f} s")
        while hits.total() < options.kills:
            training = Training(work / f"training-{len(adapters)}", profile)
            ends.callback(training.process.kill)
            while not training.ended():
                # Some come before the first step, and some while a checkpoint or the adapter is written.
                pause = time.monotonic() + draw.uniform(0.05, usual / 2)
                while time.monotonic() < pause and not training.ended():
                    time.sleep(0.01)
                if hits.total() < options.kills and not training.ended():
                    victim = draw.choice(VICTIMS)
                    hit(victim, parties, training, draw)
                    hits[victim] += 1
                    console.print(f"{hits.total()} of {options.kills}: {victim}")
            adapters.append(training.digest())
    table = Table(title=f"{hits.total()} kills and stops in {len(adapters)} trainings")
    for victim in VICTIMS:
        table.add_column(victim, justify="right")
    table.add_row(*(str(hits[victim]) for victim in VICTIMS))
    console.print(table)
    equal = sum(each == right for each in adapters)
    console.print(f"{equal} of {len(adapters)} adapters equal the undisturbed one, bit for bit")
    save(options.output, {"hits": hits, "adapters": len(adapters), "equal": equal})
    sys.exit(equal != len(adapters))


if __name__ == "__main__":
    main()
