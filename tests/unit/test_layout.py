"""The rules of ARCHITECTURE.md that a reader relies on: which package imports which, what policies may do."""

from __future__ import annotations

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("shared", "tenant_sdk", "provider", "security")
OURS_ALLOWED = {
    "shared": {"shared"},
    "tenant_sdk": {"tenant_sdk", "shared"},
    "provider": {"provider", "shared"},
    "security": set(PACKAGES),
}
# Of each package, from below: a subpackage imports those in front of it.
SUBPACKAGES = {
    "shared": [
        "errors",
        "encoded",
        "configuration",
        "launching",
        "ownership",
        "secrets",
        "options",
        "command_line",
        "hosts",
        "forks",
        "fair_threads",
        "kept_groups",
        "latency",
        "listeners",
        "log_rate_limit",
        "memory",
        "devices",
        "imports",
        "time_limit",
        "user_folders",
        "compat",
        "buffers",
        "wire",
        "quantised",
        "recipes",
        "gguf_header",
        "gguf",
        "hub",
        "experts",
        "stored",
        "atomic",
        "checkpoint",
        "ring",
        "transport",
    ],
    "provider": [
        "file_lock",
        "catalog",
        "executor",
        "engine",
        "workers",
        "observe",
        "session",
        "config",
        "planning",
        "serve",
        "inprocess",
        "dev",
        "cli",
        "exit_with_parent",
    ],
    "tenant_sdk": [
        "spinning",
        "terminal",
        "storage",
        "connection",
        "trust",
        "products",
        "model",
        "sequences",
        "session",
        "tuning",
        "drafts",
        "gateway",
        "command_line",
    ],
    "security": [
        "recordings",
        "views",
        "attacks",
        "verdicts",
        "trials",
        "report",
        "deployment",
        "audit",
        "cli",
    ],
}
NO_IO = [
    "shared/wire/protocol.py",
    "shared/wire/frames.py",
    "shared/wire/incoming.py",
    "shared/wire/header.py",
    "shared/wire/messages.py",
    "provider/engine/scheduler.py",
    "provider/engine/fairness.py",
    "provider/engine/latency.py",
    "shared/latency.py",
    "shared/kept_groups.py",
    "shared/log_rate_limit.py",
    "tenant_sdk/gateway/client_fairness.py",
    "tenant_sdk/gateway/reservations.py",
    "tenant_sdk/gateway/unused_copies.py",
    "tenant_sdk/gateway/step_latency.py",
    "provider/workers/planner.py",
    "provider/planning/simulation.py",
    "provider/planning/capacity.py",
    "provider/planning/kept.py",
    "provider/session/quota.py",
    "tenant_sdk/connection/replicas/backoff.py",
    "tenant_sdk/connection/replicas/retrying.py",
    "tenant_sdk/gateway/constraints.py",
    "tenant_sdk/gateway/admission.py",
    "tenant_sdk/gateway/requests.py",
    "tenant_sdk/gateway/request_limits.py",
    "tenant_sdk/gateway/completions.py",
    "tenant_sdk/gateway/chats.py",
    "tenant_sdk/gateway/responses.py",
    "tenant_sdk/connection/replicas/replica_set.py",
    "tenant_sdk/products/answer_bits.py",
    "tenant_sdk/products/forecast.py",
    "tenant_sdk/products/mask_store.py",
    "tenant_sdk/connection/keys.py",
    "tenant_sdk/sequences/planning.py",
    "tenant_sdk/sequences/prefill.py",
]
SHARED_LIBRARIES = {"numpy", "msgspec", "torch", "safetensors", "websockets", "cryptography", "zmq", "triton"}
SHARED_LIBRARIES |= {"huggingface_hub", "transformers", "tokenizers", "gguf"}
NEVER = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}


def imports_of(path: Path, *, for_types: bool = True) -> list[str]:
    """Full names of all that a file imports, wherever in the file.

    Args:
        for_types: also what only a type checker imports.
    """
    tree = ast.parse(path.read_text())
    only_types = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found: list[str] = []
    for node in ast.walk(tree):
        if node in only_types and not for_types:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def packages_of(path: Path) -> set[str]:
    """Top-level names of all modules that a file imports."""
    return {name.partition(".")[0] for name in imports_of(path)}


def sources(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"no source files in {package}"
    return files


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_lies_below_them(package: str) -> None:
    for path in sources(package):
        ours = packages_of(path) & set(PACKAGES)
        assert ours <= OURS_ALLOWED[package], f"{path} imports {ours - OURS_ALLOWED[package]}"


def test_shared_needs_few_libraries() -> None:
    for path in sources("shared"):
        foreign = packages_of(path) - set(sys.stdlib_module_names) - {"shared"}
        assert foreign <= SHARED_LIBRARIES, f"{path} imports {foreign - SHARED_LIBRARIES}"


@pytest.mark.parametrize("package", SUBPACKAGES)
def test_subpackages_import_only_what_lies_below_them(package: str) -> None:
    order = SUBPACKAGES[package]
    for path in sources(package):
        subpackage = path.relative_to(ROOT / package).with_suffix("").parts[0]
        if subpackage == "__init__":
            continue
        below = order[: order.index(subpackage) + 1]
        for module in imports_of(path):
            names = module.split(".")[1:2] if module.split(".")[0] == package else []
            assert set(names) <= set(below), f"{path} imports {names}"


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_and_folders_do_not_import_each_other_in_a_circle(package: str) -> None:
    """A folder counts as one: nothing in it may import a neighbour that imports something in it."""
    files = sources(package)
    imports = {path: imports_of(path, for_types=False) for path in files}
    for folder in {path.parent for path in files}:
        prefix = ".".join(folder.relative_to(ROOT).parts) + "."
        names = {each.stem for each in folder.iterdir()}
        order = TopologicalSorter[str]()
        for path in files:
            if folder in path.parents:
                name = path.relative_to(folder).with_suffix("").parts[0]
                others = {
                    module.removeprefix(prefix).split(".")[0]
                    for module in imports[path]
                    if module.startswith(prefix)
                }
                order.add(name, *others & names - {name})
        order.prepare()  # raises CycleError


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_can_unpickle(package: str) -> None:
    for path in sources(package):
        assert not packages_of(path) & NEVER, path
        calls = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and node.attr == "load"
        ]
        owners = {node.value.id for node in calls if isinstance(node.value, ast.Name)}
        assert "torch" not in owners, f"{path} calls torch.load"


@pytest.mark.parametrize("name", NO_IO)
def test_policy_code_does_no_io(name: str) -> None:
    """Nor has it a clock or chances of its own; and who decides holds no tensors."""
    imported = packages_of(ROOT / name)
    assert not imported & {"socket", "ssl", "select", "asyncio", "time", "random", "os"}
    assert not imported & {"subprocess", "secrets", "datetime", "tempfile", "shutil"}
    assert "torch" not in imported or name.startswith("shared/wire")
