"""The project's programs, and a check that its packages are its own: their names are common words."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

NAME = "symbiosis-executor"


def check_package(name: str) -> None:
    """Refuse a package of this name that another project has installed.

    Raises:
        ImportError: the package that Python finds is not this project's.
    """
    try:
        found = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(f"{NAME} has a package `{name}`, which is missing; install {NAME} again") from error
    if getattr(found, "DISTRIBUTION", None) != NAME:
        raise ImportError(
            f"the package `{name}` in {found.__file__} is not that of {NAME}: another "
            f"project has one of this name. Install {NAME} into an environment of its own, or start "
            "Python where no such folder lies"
        )


def published(package: str, modules: dict[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package (PEP 562), which import a name when it is first used.

    Modules that need torch and transformers take seconds to import.

    Args:
        package: its name.
        modules: of each name.
    """

    def look_up(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return look_up, lambda: sorted({*vars(sys.modules[package]), *modules})


def provider() -> None:
    """Run ``symbiosis-provider``."""
    _run("provider", "provider.cli")


def tenant() -> None:
    """Run ``symbiosis-tenant``."""
    _run("tenant_sdk", "tenant_sdk.command_line.main")


def audit() -> None:
    """Run ``symbiosis-audit``."""
    _run("security", "security.cli")


def _run(package: str, module: str) -> None:
    try:
        check_package("shared")
        check_package(package)
    except ImportError as error:
        raise SystemExit(f"error: {error}") from error
    importlib.import_module(module).main()
