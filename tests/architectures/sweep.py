"""Every architecture of transformers through a provider and a tenant, and a document of what came of it.

    python tests/architectures/sweep.py            # all; goes on where it was ended
    python tests/architectures/sweep.py --only 'mixtral|whisper' --processes 1

Each architecture has a process of its own, with a limit of time and memory, so that none takes others along.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import re
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from examination import VERSIONS, Result, examine
from report import document, is_met, summary
from tiny import architectures
from tqdm import tqdm

ROOT = Path(__file__).parents[2]
OUT = ROOT / "out" / "architectures"
RESULTS, DOCUMENT = OUT / "results.jsonl", OUT / "architectures.md"
SECONDS = 120.0  # for one architecture, of which most take one or two
MEMORY = 12 << 30  # bytes of addresses: shared libraries alone take several
Architecture = tuple[str, str, str]


def main() -> int:
    """The exit status: 0 if what is promised of architectures is met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="model types to do again")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run has found")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), metavar="N", help="at a time")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--document", type=Path, default=DOCUMENT, metavar="FILE")
    options = parser.parse_args()
    results = {} if options.fresh else read(options.results)
    wanted = [each for each in architectures() if re.fullmatch(options.only or ".*", each[1])]
    if not options.only and len(results) == len(architectures()):
        results = {}  # that run was finished
    todo = [each for each in wanted if options.only or each not in results]
    for file in (options.results, options.document):
        file.parent.mkdir(parents=True, exist_ok=True)
    if not results:
        options.results.unlink(missing_ok=True)
    with options.results.open("a") as file, tqdm(total=len(todo), unit="model", smoothing=0.05) as bar:
        for result in examined(todo, options.processes):
            results[result.key] = result
            file.write(json.dumps(dataclasses.asdict(result)) + "\n")
            file.flush()
            bar.set_postfix_str(f"{sum(each.good for each in results.values())} good, {result.class_name}")
            bar.update()
    found = [results[each] for each in architectures() if each in results]
    print(summary(found))
    if len(found) == len(architectures()):
        options.document.write_text(document(found))
        print(f"written: {options.document}")
    return 0 if is_met(found) else 1


def read(file: Path) -> dict[Architecture, Result]:
    """What an earlier run has found with these versions; of several results of one architecture the last."""
    lines = file.read_text().splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]  # the last may be cut off
    results = [Result(**values) for values in found if values.get("versions") == VERSIONS]
    return {result.key: result for result in results}


@dataclass
class _Running:
    """An architecture in a process of its own, which writes how far it is to ``stage``."""

    architecture: Architecture
    process: Any
    stage: Any
    since: float


def examined(todo: Iterable[Architecture], processes: int) -> Iterator[Result]:
    """Results as they come, each from a process of its own."""
    context = multiprocessing.get_context("fork")  # libraries, which take seconds to load, are there at once
    waiting, running = iter(todo), dict[Connection, _Running]()
    try:
        while True:
            while len(running) < processes and (architecture := next(waiting, None)) is not None:
                ours, theirs = context.Pipe()
                stage = context.RawArray("c", 16)
                stage.value = Result(*architecture).stage.encode()
                process = context.Process(target=_examine, args=(theirs, stage, architecture), daemon=True)
                process.start()
                theirs.close()
                running[ours] = _Running(architecture, process, stage, time.monotonic())
            if not running:
                return
            ready = wait(list(running), timeout=1.0)
            late = [each for each, of in running.items() if time.monotonic() - of.since > SECONDS]
            for connection in {*ready, *late}:
                of = running.pop(connection)
                result = _result(connection, of, late=connection not in ready)
                result.seconds = round(time.monotonic() - of.since, 2)
                yield result
    finally:
        for of in running.values():
            of.process.kill()


def _result(connection: Connection, of: _Running, *, late: bool) -> Result:
    """What a process has to say, or how it ended."""
    try:
        if late:
            raise TimeoutError(f"it took more than {SECONDS:.0f} s")
        result: Result = connection.recv()
    except (EOFError, OSError) as error:
        of.process.join(timeout=0 if late else 10)
        said = str(error) if late else f"its process ended with status {of.process.exitcode}"
        result = Result(*of.architecture, stage=of.stage.value.decode(), said=said)
    finally:
        of.process.kill()
        of.process.join()
        connection.close()
    return result


def _examine(connection: Connection, stage: Any, architecture: Architecture) -> None:
    import torch

    def tell(name: str) -> None:
        stage.value = name.encode()

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    connection.send(examine(*architecture, tell))


if __name__ == "__main__":
    sys.exit(main())
