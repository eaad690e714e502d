"""Round trips over TLS and co-located, side by side: 3 KiB and 3 MiB each way.

    make bench                       # or: python benchmarks/transports.py --rounds 20

An executor in a process of its own whose products cost nothing (it answers with the rows), so what is
measured is two channels, two carriers and one session; requests are interleaved, one over each transport
in turn. "channel" is from submitting a request to having its answer; "session" is through
``RemoteExecutor.submit``, as a virtual layer asks, whose own bookkeeping is the same over every transport.
"in-process" is the same work without a carrier or another process, which no transport gets below; "carriers"
is the ratio of what comes on top of it.
Writes transports.json into --output.
"""

from __future__ import annotations

import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import arguments, save
from echo_executor import echo_service
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import tenant_sdk
from provider.inprocess import InprocessExecutor
from provider.serve.certificates import write_certificates
from provider.serve.tokens import TokenFile
from shared.memory import keep_freed_memory
from shared.wire.header import Direction, Operation, RequestClass
from tenant_sdk.connection.keys import ProductKey

WIDTH, GROUP = 768, 1  # 3 KiB a row; a square layer, so that rows can be answers
SIZES = {"3 KiB": (1, 200, 0.60), "3 MiB": (1024, 10, 0.35)}  # rows, round trips a round, aim
console = Console(width=None if sys.stdout.isatty() else 120)


def trips(session: tenant_sdk.Session, rows: int) -> dict[str, Callable[[], object]]:
    """The two ways to ask."""
    remote, x = session.executor, torch.randn(rows, WIDTH)
    channel, key = remote.connection.channel, ProductKey(GROUP, Direction.FORWARD, 1)

    def through_channel() -> None:
        remote.submit_piece(channel, Operation.EFFECT, key, [x], RequestClass.UNDECLARED).result()

    def through_session() -> None:
        remote.submit(Operation.EFFECT, key, [x]).result()

    return {"channel": through_channel, "session": through_session}


def measure(sessions: dict[str, tenant_sdk.Session], rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of every round trip, by size and way, then transport."""
    results: dict[str, dict[str, Any]] = {}
    for size, (rows, repeats, _) in SIZES.items():
        for way in ("channel", "session"):
            ask = {name: trips(session, rows)[way] for name, session in sessions.items()}
            seconds: dict[str, list[float]] = {name: [] for name in sessions}
            for number in range(rounds + 1):
                for _ in range(repeats):
                    for name, action in ask.items():
                        started = time.perf_counter()
                        action()
                        if number:  # the first round warms up
                            seconds[name].append(time.perf_counter() - started)
            results[f"{size}, {way}"] = seconds
    return results


def main() -> None:
    """Run everything."""
    parser = arguments(__doc__, rounds=10, output="out/bench")
    options, _ = parser.parse_known_args()  # `make bench ARGS=...` is for all of them
    keep_freed_memory()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="symbiosis-bench-") as name:
        work = Path(name)
        shape = {"hidden_size": WIDTH, "intermediate_size": 16, "vocab_size": 64}
        config = LlamaConfig(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, **shape)
        LlamaForCausalLM(config).save_pretrained(work / "model")
        write_certificates(work / "tls", now=datetime.datetime.now(datetime.UTC))
        token = TokenFile(work / "tokens.json").add("bench")
        command = [sys.executable, str(Path(__file__).with_name("echo_executor.py")), work / "model", work]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            while not (work / "ready.json").exists():
                if process.poll() is not None:
                    raise SystemExit("the executor did not start")
                time.sleep(0.05)
            told = json.loads((work / "ready.json").read_text())
            given: dict[str, Any] = {"token": token, "privacy": "plain"}
            with (
                tenant_sdk.connect(told["url"], ca=work / "tls" / "ca.pem", **given) as tls,
                tenant_sdk.connect(told["local_url"], **given) as local,
                tenant_sdk.connect(InprocessExecutor(echo_service(work / "model")), **given) as direct,
            ):
                sessions = {"TLS": tls, "co-located": local, "in-process": direct}
                results = measure(sessions, options.rounds)
            process.communicate()
    table = Table(title="Round trips, us: median (10th to 90th percentile)")
    for column in ("each way", "TLS", "co-located", "in-process", "co-located / TLS", "aim", "carriers"):
        table.add_column(column)
    for what, seconds in results.items():
        cells = []
        for values in seconds.values():
            tenths = statistics.quantiles(values, n=10)
            low, middle, high = (v * 1e6 for v in (tenths[0], statistics.median(values), tenths[-1]))
            cells.append(f"{middle:.0f} ({low:.0f}-{high:.0f})")
        tls_median, local_median, direct = map(statistics.median, seconds.values())
        carriers = (local_median - direct) / (tls_median - direct)
        aim = SIZES[what.partition(",")[0]][2]
        table.add_row(what, *cells, f"{local_median / tls_median:.2f}", f"{aim:.2f}", f"{carriers:.2f}")
    console.print(table)
    save(options.output / "transports.json", results)


if __name__ == "__main__":
    main()
