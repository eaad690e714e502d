"""What command lines share: options that are the fields of a configuration, also from a file."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from shared.errors import ConfigurationError


def read_options(path: Path, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Options from a TOML file, by their names with underscores.

    Args:
        kinds: of every option the type that TOML has for its values.

    Raises:
        ConfigurationError: no such file, not TOML, a key that is no option, or a value of another type.
    """
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # of tomllib, or of the decoder
        raise ConfigurationError(f"{path} is not TOML: {error}") from error
    for key, value in given.items():
        try:
            if key not in kinds:
                raise msgspec.ValidationError("there is no such option")
            msgspec.convert(value, kinds[key])
        except msgspec.ValidationError as error:
            allowed = ", ".join(sorted(kinds))
            raise ConfigurationError(f"{path}: {key}: {error}; the keys are {allowed}") from error
    return given


def _kind(hint: Any) -> Any:
    """What TOML has for values of an option's type."""
    if get_origin(hint) is Annotated or type(None) in get_args(hint):
        return _kind(get_args(hint)[0])
    if get_origin(hint) is list:
        return list[_kind(get_args(hint)[0])]  # type: ignore[misc]
    return str if hint is Path else hint


def takes(
    configuration: type[Any],
    option: Callable[..., Any],
    declare: Callable[[Any], Any] = lambda annotation: annotation,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose first argument is a dataclass gets the fields of that on its command line.

    All its options can also come from the TOML file that ``--config`` names; those on the command line win.

    Args:
        configuration: the dataclass; its fields are annotated as typer wants it.
        option: ``typer.Option``.
        declare: makes such an annotation of a field's.
    """
    hints = get_type_hints(configuration, include_extras=True)
    fields = dataclasses.fields(configuration)

    def parameter(field: dataclasses.Field[Any]) -> inspect.Parameter:
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(field.name, kind, default=default, annotation=declare(hints[field.name]))

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_options(config: Path | None, **given: Any) -> None:
            chosen = configuration(**{field.name: given.pop(field.name) for field in fields})
            command(chosen, **given)

        def read(context: Any, file: Path | None) -> None:
            if file is not None:
                context.default_map = read_options(file, kinds)

        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        taken = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
        taken += [parameter(field) for field in fields]
        kinds = {each.name: _kind(each.annotation) for each in taken}
        text = "TOML file with options, names with underscores; those given here win."
        file = option(help=text, metavar="FILE", is_eager=True, callback=read)
        taken.append(
            inspect.Parameter(
                "config",
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[Path | None, file],
            )
        )
        with_options.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
        with_options.__annotations__ = {}
        return with_options

    return decorate
