"""Lines of the product that inputs reach, and the smallest inputs that reach them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from fuzzing.oracle import CORPUS, ROOT, Finding, Target, check

Line = tuple[str, int]
KEPT_BYTES = 8 << 10  # of a target's corpus


def corpus(name: str) -> dict[str, bytes]:
    """The inputs of a target that are kept, by their names."""
    folder = CORPUS / name
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())} if folder.is_dir() else {}


def reached(target: Target, data: bytes) -> set[Line]:
    """The lines of a target's modules that an input reaches."""
    files, lines = {str(ROOT / module) for module in target.modules}, set[Line]()

    def within(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return within

    def called(frame: FrameType, _: str, __: Any) -> Any:
        return within if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(called)
    try:
        check(target, data)
    except Finding:
        pass
    finally:
        sys.settrace(before)
    return lines


def possible(target: Target) -> set[Line]:
    """The lines of all functions of a target's modules."""
    found = set[Line]()
    for module in target.modules:
        path = str(ROOT / module)
        for code in _functions(compile((ROOT / module).read_text(), path, "exec")):
            found |= {(path, line) for _, _, line in code.co_lines() if line and line > code.co_firstlineno}
    return found


def _functions(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            if each.co_flags & 2:  # not the body of a class, which runs when it is imported
                yield each
            yield from _functions(each)


def keep(target: Target, folders: Iterable[Path]) -> None:
    """Keep the smallest inputs that reach lines which seeds and smaller ones do not, and all of findings."""
    there = CORPUS / target.name
    inputs = {path.read_bytes() for folder in folders if folder.is_dir() for path in folder.iterdir()}
    inputs |= {data for name, data in corpus(target.name).items() if not name.startswith("finding")}
    covered = set[Line]().union(*(reached(target, seed) for seed in target.seeds()))
    for path in there.glob("reached-*"):
        path.unlink()
    there.mkdir(parents=True, exist_ok=True)
    left = KEPT_BYTES
    for data in sorted(inputs, key=lambda each: (len(each), each)):
        lines = reached(target, data) if len(data) <= left else covered
        if not lines <= covered:
            covered |= lines
            left -= len(data)
            (there / f"reached-{len([*there.glob('reached-*')]):02}").write_bytes(data)
    if not [*there.iterdir()]:
        shutil.rmtree(there)


def report(target: Target, folders: Iterable[Path]) -> tuple[int, int]:
    """How many lines of how many the inputs of some folders, the corpus and the seeds reach."""
    inputs = [*target.seeds(), *corpus(target.name).values()]
    inputs += [path.read_bytes() for folder in folders if folder.is_dir() for path in folder.iterdir()]
    lines, whole = set[Line]().union(*(reached(target, data) for data in inputs)), possible(target)
    return len(lines & whole), len(whole)
