"""Writes docs/reference/options.md: ``python -m tenant_sdk.reference``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby

from shared.options import Field, fields_of, secret_ways, shown_default
from tenant_sdk.config import SessionConfig
from tenant_sdk.profiles import SOURCE_NAMES

_INTRODUCTION = """# Options

`python -m tenant_sdk.reference` writes this page from the fields of the options.

## Of a session

`tenant_sdk.connect` takes these arguments. Every command of `symbiosis-tenant` that opens a session takes
these options, and a profile ([profiles.md](../how-to/profiles.md)) has these keys. A profile has a table
`[[mask_sources]]` for each mask source.

Python takes a secret as it is, or a `Secret` that says where it is. A command line names an environment
variable that holds it. A profile names a variable, a file or a program.
"""


def reference() -> str:
    """The page."""
    lines = [_INTRODUCTION]
    for group, fields in groupby(fields_of(SessionConfig).values(), lambda each: each.option.group):
        lines += [f"### {group}", "", "| Python | command line | profile | default |", "|---|---|---|---|"]
        described = []
        for field in fields:
            lines.append(f"| {' | '.join(_cells(field))} |")
            described.append(f"- `{field.name}`: {_text(field)}")
        lines += ["", *described, ""]
    return "\n".join(lines)


def _cells(field: Field) -> Iterator[str]:
    option = field.option
    yield f"`{field.name}`"
    unit = "VAR" if option.confidential else option.unit
    yield "" if option.python else ", ".join(f"`{f'{flag} {unit}'.strip()}`" for flag in field.flags)
    keys: tuple[str, ...] = (SOURCE_NAMES.get(field.name, field.name),)
    if option.confidential:
        keys = tuple(secret_ways(keys[0]))
    where = " of `mask_sources`" if field.name in SOURCE_NAMES else ""
    yield "" if option.python or field.name == "profile" else ", ".join(f"`{key}`" for key in keys) + where
    yield f"`{shown}`" if (shown := shown_default(field)) else ""


def _text(field: Field) -> str:
    return field.option.text.format_map({name: f"`{name}`" for name in fields_of(SessionConfig)})


if __name__ == "__main__":
    sys.stdout.write(reference())
