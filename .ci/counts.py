"""How large the project is, and how it is arranged: `make counts`; of a commit: `make counts ARGS=COMMIT`."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
SOURCE = ("tenant_sdk", "provider", "shared", "security")
OTHERS = ("tests", "benchmarks", "examples")
LINES, PARAMETERS = 80, 8


def main() -> None:
    """Print the tables of the working tree, or of a commit."""
    if len(sys.argv) < 2:
        show(ROOT, "working tree")
        return
    command = ["git", "archive", "--end-of-options", sys.argv[1]]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)  # noqa: S603
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
        show(Path(folder), sys.argv[1])


def show(root: Path, title: str) -> None:
    """Print sizes, and below them each long function, wide signature and circle."""
    table = Table("", "lines", "files", "loose files", f"functions over {LINES}", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    sums = [0, 0, 0, 0]
    remarks = []
    trees = {
        path: ast.parse(path.read_text()) for name in SOURCE for path in sorted((root / name).rglob("*.py"))
    }
    for name in (*SOURCE, *OTHERS):
        paths = sorted((root / name).rglob("*.py"))
        loose = sum(path.parent == root / name and path.name != "__init__.py" for path in paths)
        lines = sum(len(path.read_text().splitlines()) for path in paths)
        found = [
            each
            for path in paths
            if path in trees
            for each in remarks_on(path.relative_to(root), trees[path])
        ]
        remarks += found
        figures = [lines, len(paths), loose, sum("lines" in each for each in found)]
        if name in SOURCE:
            sums = [a + b for a, b in zip(sums, figures, strict=True)]
        table.add_row(name, *(f"{each:,}" for each in figures))
        if name == SOURCE[-1]:
            table.add_row("source", *(f"{each:,}" for each in sums), style="bold", end_section=True)
    documents = [path for path in root.rglob("*.md") if not {".venv", ".venv-gateway", "out"} & {*path.parts}]
    words = sum(len(path.read_text().split()) for path in documents)
    console = Console()
    console.print(table)
    console.print(f"documents: {words:,} words in {len(documents)} files")
    console.print(f"more than {PARAMETERS} parameters: {sum('parameters' in each for each in remarks)}")
    circles = circles_of({path.relative_to(root): tree for path, tree in trees.items()})
    console.print(f"circles of imports: {len(circles)}")
    for each in (*remarks, *("circle: " + ", ".join(circle) for circle in circles)):
        console.print(f"  {each}", highlight=False)


def remarks_on(path: Path, tree: ast.AST) -> list[str]:
    """Each function that is long, or takes many parameters besides typed ``**options``."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        where = f"{path}:{node.lineno} {node.name}"
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > LINES:
            found.append(f"{where}: {lines} lines")
        given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        number = sum(each.arg not in ("self", "cls") for each in given)
        if number > PARAMETERS:
            found.append(f"{where}: {number} parameters")
    return found


def circles_of(trees: dict[Path, ast.Module]) -> list[list[str]]:
    """The sets of modules that import each other, by any way around; imports for types alone do not count."""
    names = {
        ".".join(path.with_suffix("").parts).removesuffix(".__init__"): tree for path, tree in trees.items()
    }
    edges = {
        name: {each for each in imports(tree) if each in names and each != name}
        for name, tree in names.items()
    }
    found: list[list[str]] = []
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> None:  # Tarjan's strongly connected components
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in edges[name]:
            if other not in order:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == order[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for name in edges:
        if name not in order:
            visit(name)
    return found


def imports(node: ast.AST) -> set[str]:
    """Modules that are imported when a module is, or later by one of its functions."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return set()
    if isinstance(node, ast.Import):
        return {each.name for each in node.names}
    if isinstance(node, ast.ImportFrom):
        return {node.module or "", *(f"{node.module}.{each.name}" for each in node.names)}
    return {each for child in ast.iter_child_nodes(node) for each in imports(child)}


if __name__ == "__main__":
    main()
