"""Prints docs/reference/python.md: ``python tests/public_surface.py``."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

PACKAGES = ("tenant_sdk", "provider", "security")
_INTRODUCTION = """# Python

`python tests/public_surface.py` prints this page from the packages. Import these names from `tenant_sdk`,
`provider` and `security`; all others may change in any version. Docstrings give shapes, units and errors.
"""


def page() -> str:
    """Each public name, with its signature, its public methods, and the first sentence of its docstring."""
    lines = [_INTRODUCTION]
    for package in PACKAGES:
        module = importlib.import_module(package)
        lines += [f"## {package}", "", _sentence(module), ""]
        for name in module.__all__:
            lines += _entry(name, getattr(module, name))
        lines.append("")
    return "\n".join(lines)


def _entry(name: str, value: Any) -> Iterator[str]:
    yield f"- `{name}{_signature(value)}`: {_sentence(value)}"
    if not inspect.isclass(value) or issubclass(value, BaseException):
        return
    for own, member in vars(value).items():
        if own.startswith("_"):
            continue
        if isinstance(member, property | functools.cached_property):
            yield f"  - `{own}`: {_sentence(member)}"
        elif callable(getattr(value, own)):
            yield f"  - `{own}{_signature(getattr(value, own))}`: {_sentence(member)}"


class _Shown(str):
    """An annotation without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _signature(value: Any) -> str:
    if inspect.isclass(value) and issubclass(value, BaseException):
        return ""
    signature = inspect.signature(value)
    parameters = [
        each.replace(annotation=_annotation(each.annotation), default=_default(each.default))
        for each in signature.parameters.values()
        if each.name != "self"
    ]
    returned = inspect.Signature.empty if inspect.isclass(value) else _annotation(signature.return_annotation)
    return str(signature.replace(parameters=parameters, return_annotation=returned))


def _annotation(given: Any) -> Any:
    """A type without what ``Annotated`` adds."""
    if not isinstance(given, str):
        return given
    tree = ast.parse(given, mode="eval").body
    if isinstance(tree, ast.Subscript) and ast.unparse(tree.value) == "Annotated":
        assert isinstance(tree.slice, ast.Tuple)
        tree = tree.slice.elts[0]
    return _Shown(ast.unparse(tree))


def _default(given: Any) -> Any:
    """Functions show where they lie in memory."""
    return _Shown("...") if inspect.isfunction(given) else given


def _sentence(value: Any) -> str:
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())


if __name__ == "__main__":
    sys.stdout.write(page())
