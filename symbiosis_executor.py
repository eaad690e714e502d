"""The project's programs, and a check that its packages are its own: their names are common words."""

import importlib

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


def provider() -> None:
    """Run ``symbiosis-provider``."""
    _run("provider")


def tenant() -> None:
    """Run ``symbiosis-tenant``."""
    _run("tenant_sdk")


def audit() -> None:
    """Run ``symbiosis-audit``."""
    _run("security")


def _run(package: str) -> None:
    try:
        check_package("shared")
        check_package(package)
    except ImportError as error:
        raise SystemExit(f"error: {error}") from error
    importlib.import_module(f"{package}.cli").main()
