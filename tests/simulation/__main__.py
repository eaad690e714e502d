"""Simulates seeds on all processors, and prints what does not hold and how to repeat it.

cd tests
python -m simulation --seeds 100000               # seeds 0 to 99999
python -m simulation --first 5000 --seconds 600   # for as long
python -m simulation --seed 1234 --trace          # one run, line by line
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the product of this checkout
os.environ.setdefault("OMP_NUM_THREADS", "1")

from simulation.world import FAULTS, Result, simulate, simulate_all

AT_ONCE = 20  # seeds that a process is given
REPORT_SECONDS = 10.0


def simulated(first: int, count: int | None, processes: int) -> Iterator[list[Result]]:
    """Results, in any order."""
    last = first + count if count is not None else None
    starts = itertools.count(first, AT_ONCE) if last is None else range(first, last, AT_ONCE)
    parts = (range(start, min(start + AT_ONCE, last or start + AT_ONCE)) for start in starts)
    if processes == 1:
        yield from map(simulate_all, parts)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        # A window: the pool would take all parts at once, of which there may be no end.
        in_flight = [
            pool.apply_async(simulate_all, (part,)) for part in itertools.islice(parts, 2 * processes)
        ]
        while in_flight:
            yield in_flight.pop(0).get()
            in_flight += [pool.apply_async(simulate_all, (part,)) for part in itertools.islice(parts, 1)]


def show(result: Result) -> None:
    """What does not hold in a run."""
    print(f"\nseed {result.seed}, with {', '.join(sorted(result.kinds)) or 'no faults'}:")
    for fault in result.faults[:10]:
        print(f"  {fault[:400]}")
    print(f"  repeat it: python -m simulation --seed {result.seed} --trace\n", flush=True)


def trace(seed: int, *, told: bool, kinds: frozenset[str] | None) -> int:
    """Simulate one seed; the exit status."""
    result = simulate(seed, print if told else None, kinds)
    right = sum(outcome.error is None for outcome in result.outcomes)
    print(
        f"seed {seed}: digest {result.digest:08x}, {result.steps} events, "
        f"{right} of {len(result.outcomes)} requests were answered"
    )
    if result.faults:
        show(result)
    return bool(result.faults)


def main() -> int:
    """Read the options and simulate; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, help="how many; default: until --seconds are over, or for ever")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no seed is begun")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, help="simulate this one alone")
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happens")
    parser.add_argument("--kinds", help=f"with --seed: faults instead of drawn ones, of {','.join(FAULTS)}")
    options = parser.parse_args()
    if options.seed is not None:
        kinds = None if options.kinds is None else frozenset(filter(None, options.kinds.split(",")))
        return trace(options.seed, told=options.trace, kinds=kinds)
    began = said = time.monotonic()
    done, failed = 0, list[int]()
    for results in simulated(options.first, options.seeds, options.processes):
        done += len(results)
        for result in results:
            if result.faults:
                failed.append(result.seed)
                show(result)
        now = time.monotonic()
        if now - said > REPORT_SECONDS:
            said = now
            print(f"{done} seeds, {60 * done / (now - began):.0f} a minute, {len(failed)} failed", flush=True)
        if now - began > options.seconds:
            break
    minutes = (time.monotonic() - began) / 60
    print(f"{done} seeds in {minutes:.1f} minutes, {done / minutes:.0f} a minute; failed: {failed or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
