"""Prints docs/reference/options.md: ``python tests/option_reference.py``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import groupby

from provider.config import ServeConfig
from provider.planning.options import PlanOptions
from shared.options import Field, fields_of, secret_reference_keys, shown_default
from tenant_sdk.command_line.context_options import AnswerOptions, ContextOptions, PromptOptions
from tenant_sdk.drafts.options import DraftOptions
from tenant_sdk.gateway.options import GatewayOptions
from tenant_sdk.session.profiles import FIELDS, SOURCE_NAMES
from tenant_sdk.tuning.options import EvaluationOptions, ModelOptions, TrainingOptions
from tenant_sdk.tuning.sampling import Sampling

_INTRODUCTION = """# Options

`python tests/option_reference.py` prints this page from the fields of the options.
Commands that are not on this page print their options with `--help`.

## Of a session

`tenant_sdk.connect` takes these arguments. Every command of `symbiosis-tenant` that opens a session takes
these options, and a profile ([profiles.md](../how-to/profiles.md)) has these keys. A profile has a table
`[[mask_sources]]` for each mask source.

In Python, `provider` may also be the result of `provider.serve_in_process`. The default of
`patience` is 10 in `symbiosis-tenant serve`.

In Python, give a secret as text, or its place as a `Secret`. On a command line, name an environment
variable. A profile names a variable, a file or a program.
"""
_OTHERS = {
    "Of `symbiosis-tenant finetune`": (TrainingOptions, ModelOptions),
    "Of `symbiosis-tenant generate`": (PromptOptions, Sampling, ContextOptions, ModelOptions),
    "Of `symbiosis-tenant chat`": (AnswerOptions, Sampling, ContextOptions, ModelOptions),
    "Of `symbiosis-tenant evaluate`": (EvaluationOptions, ModelOptions),
    "Of `symbiosis-tenant draft`": (DraftOptions, ModelOptions),
    "Of `symbiosis-tenant serve`": (GatewayOptions,),
    "Of `symbiosis-provider serve`": (ServeConfig,),
    "Of `symbiosis-provider plan`": (PlanOptions,),
}


def reference() -> str:
    """The page."""
    lines = [_INTRODUCTION]
    for group, fields in _grouped():
        lines += [f"### {group}", "", "| Python | command line | profile | default |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(_cells(field))} |" for field in fields]
        names = {name: name for name in FIELDS}
        lines += ["", *(f"- `{field.name}`: {_text(field, names)}" for field in fields), ""]
    for title, configurations in _OTHERS.items():
        lines += [f"## {title}", "", "| option | default | meaning |", "|---|---|---|"]
        for configuration in configurations:
            names = {name: field.flags[0] for name, field in fields_of(configuration).items()}
            for field in fields_of(configuration).values():
                cells = (_flags(field), _default(field), _text(field, names))
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _grouped() -> Iterator[tuple[str, list[Field]]]:
    for group, fields in groupby(FIELDS.values(), lambda each: each.option.group):
        yield group, list(fields)


def _cells(field: Field) -> Iterator[str]:
    option = field.option
    yield f"`{field.name}`"
    yield "" if option.python else _flags(field)
    keys: tuple[str, ...] = (SOURCE_NAMES.get(field.name, field.name),)
    if option.confidential:
        keys = tuple(secret_reference_keys(keys[0]))
    where = " of `mask_sources`" if field.name in SOURCE_NAMES else ""
    yield "" if option.python or field.name == "profile" else ", ".join(f"`{key}`" for key in keys) + where
    yield _default(field)


def _flags(field: Field) -> str:
    if field.option.argument:
        return f"`{field.option.unit or field.name.upper()}`"
    unit = "VAR" if field.option.confidential else field.option.unit.replace("|", " or ")
    return ", ".join(f"`{f'{flag} {unit}'.strip()}`" for flag in field.flags)


def _default(field: Field) -> str:
    return f"`{shown}`" if (shown := shown_default(field)) else ""


def _text(field: Field, names: Mapping[str, str]) -> str:
    return field.option.text.format_map({name: f"`{spelled}`" for name, spelled in names.items()})


if __name__ == "__main__":
    sys.stdout.write(reference())
