"""Fuzz readers of foreign bytes: `PYTHONPATH=.:tests python -m fuzzing [TARGET...] --seconds N [--keep]`.

With Atheris (`pip install atheris`) it is guided by coverage. `out/fuzzing/TARGET` has the corpus, with which
a later run begins, and the findings. For each target it prints how many inputs it tried, and how many lines
of the target's modules the inputs reach.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fuzzing.oracle import CORPUS, PACKAGES, ROOT, Target

_OUT = ROOT / "out" / "fuzzing"
_RESTARTS = 20  # of a target whose library ends the process


def in_child(work: Callable[[], None], log: Path) -> int:
    """Do it in a forked process, whose output goes to a file; its status. Imports take long."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    status = 1
    try:
        work()
        status = 0
    except Exception:
        logging.getLogger(__name__).critical("failed", exc_info=True)
    finally:
        os._exit(status)


def fuzz(target: Target, seconds: int, atheris: Any) -> dict[str, Any]:
    """Run one target: how many inputs in how many seconds, and findings by their places."""
    from fuzzing.campaign import Search, at_random, guided

    folder = _OUT / target.name
    done, corpora = folder / "done.json", [folder / "corpus"]
    corpora[0].mkdir(parents=True, exist_ok=True)
    for at, seed in enumerate(target.seeds()):
        (corpora[0] / f"seed-{at}").write_bytes(seed)
    corpora += [CORPUS / target.name] if (CORPUS / target.name).is_dir() else []
    total: dict[str, Any] = {"count": 0, "found": {}}
    begun = time.monotonic()
    for _ in range(_RESTARTS):
        if (left := round(begun + seconds - time.monotonic())) <= 0:
            break
        done.unlink(missing_ok=True)
        search = Search(target, folder)
        if atheris is None:
            work = partial(at_random, search, left, corpora)
        else:
            work = partial(guided, atheris, search, left, corpora)
        status = in_child(work, folder / "log")
        told = json.loads(done.read_text()) if done.exists() else {"count": 0, "found": {}}
        total["count"] += told["count"]
        total["found"] |= told["found"]
        if status:
            total["found"][f"status {status}"] = f"the process ended with {status}: see the log and findings"
    return total | {"seconds": time.monotonic() - begun}


def replayed(target: Target, *, keep: bool) -> str:
    """How many lines of how many are reached."""
    from fuzzing.replay import keep as keep_inputs
    from fuzzing.replay import report

    folder = _OUT / target.name

    def work() -> None:
        if keep:
            keep_inputs(target, [folder / "corpus"])
        (folder / "lines.json").write_text(json.dumps(report(target, [folder / "corpus"])))

    if in_child(work, folder / "log"):
        return "?"
    reached, possible = json.loads((folder / "lines.json").read_text())
    return f"{reached} of {possible}"


def imported() -> tuple[dict[str, Target], Any]:
    """All targets, and Atheris, if it is installed."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        import atheris
    except ImportError:
        print("Atheris is not installed: inputs are changed at random", file=sys.stderr)
        from fuzzing.targets import TARGETS

        return TARGETS, None
    with atheris.instrument_imports(include=[*PACKAGES], enable_loader_override=False):
        from fuzzing.targets import TARGETS
    return TARGETS, atheris


def main() -> int:
    """See above; 1: there are findings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--seconds", type=int, default=600, help="for all targets together; default: 600")
    parser.add_argument("--keep", action="store_true", help="keep small inputs that reach new lines")
    given = parser.parse_args()
    targets, atheris = imported()
    if unknown := set(given.targets) - targets.keys():
        parser.error(f"there is no {min(unknown)}; there are {', '.join(targets)}")
    names, findings = given.targets or [*targets], 0
    print(f"{'target':24}{'inputs':>12}{'a second':>10}{'lines':>14}  findings", flush=True)
    for at, name in enumerate(names, 1):
        print(f"{at} of {len(names)}: {name}", end="\r", file=sys.stderr, flush=True)
        done = fuzz(targets[name], max(1, given.seconds // len(names)), atheris)
        covered = replayed(targets[name], keep=given.keep)
        rate = done["count"] / max(done["seconds"], 1e-3)
        print(f"{name:24}{done['count']:12,}{rate:10,.0f}{covered:>14}  {len(done['found'])}", flush=True)
        for said in done["found"].values():
            print(f"    {said}", flush=True)
        findings += len(done["found"])
    print(f"{findings} findings; inputs, corpora and logs are in {_OUT.relative_to(ROOT)}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
