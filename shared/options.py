"""What command lines share: options that are the fields of a configuration, also from a file."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.metadata
import inspect
import io
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from shared.encoded import UNREADABLE
from shared.errors import CheckpointError, ConfigurationError, SymbiosisError
from shared.ownership import check_own

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
# ``name=value`` as errors write it; the value may be a word, a quoted one, or several in brackets.
_ARGUMENT = re.compile(
    r"(?<![^\s(`])([a-z_]+)=(\[[^]]*\]|\{[^}]*\}|\([^)]*\)|'[^']*'|[\w/*~-](?:[^\s,;()`]*[\w/*~-])?|)"
)


def in_options(message: str, options: Mapping[str, str]) -> str:
    """An error's message for who types commands: ``mask_sources=['URL']`` becomes ``--mask-source URL``.

    Args:
        options: of each argument's name the option. One with a space in it stands as it is, without a value
            unless ``{}`` in it says where.
    """

    def spelled(found: re.Match[str]) -> str:
        option, value = options.get(found[1]), found[2]
        if option is None:
            return found[0]
        if "{}" in option:
            toml = f"[{value[1:-1]}]" if value[:1] in ("{", "(") else value
            return option.replace("{}", toml) if value else option.replace(" = {}", "")
        if " " in option or value in ("", "True"):
            return option
        values = value[1:-1].split(",") if value[0] in "[{(" else [value]
        return " ".join(f"{option} {each.strip().strip(_QUOTE)}" for each in values)

    return _ARGUMENT.sub(spelled, message)


_QUOTE = "'"


def rename(error: SymbiosisError, options: Mapping[str, str]) -> None:
    """Let an error name its arguments as ``in_options`` does."""
    error.message = in_options(error.message, options)
    error.args = (error.message,)


def option_names(configuration: type[Any]) -> dict[str, str]:
    """What ``in_options`` wants for the fields of a dataclass: each an option of its own name."""
    return {field.name: f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(configuration)}


def check_text(option: str, text: str) -> None:
    """Refuse text of a command line whose bytes are no UTF-8, which Python keeps as halves of characters.

    Raises:
        ConfigurationError: it is none.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) & 0xFF
        raise ConfigurationError(
            f"{option} is not UTF-8 text: byte {byte:#04x} at character {error.start + 1:,}; set the "
            "terminal to UTF-8"
        ) from error


def escape_output() -> None:
    """From now on, what a terminal's encoding does not have is shown as its number, and is no error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def prints_version(program: str) -> Callable[[bool], None]:
    """The callback of ``program``'s option ``--version``: print it and exit."""

    def callback(wanted: bool) -> None:
        if wanted:
            print(program, version())
            raise SystemExit

    return callback


def version() -> str:
    """What ``--version`` prints."""
    try:
        return importlib.metadata.version("symbiosis-executor")
    except importlib.metadata.PackageNotFoundError:  # run from a folder, without an installation
        return "of a folder that is not installed"


def check_model_folder(folder: Path) -> None:
    """Refuse what is no checkpoint folder, before anything is imported that could read it.

    Raises:
        CheckpointError: it has no ``config.json``, or no safetensors.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} is not a checkpoint folder: it has no config.json. Give the folder that "
            "`save_pretrained` wrote or that a model hub's download made"
        )
    if not any((folder / name).is_file() for name in (WEIGHTS, WEIGHTS_INDEX)):
        raise CheckpointError(
            f"{folder} has no {WEIGHTS} and no {WEIGHTS_INDEX}. Other formats (pickle .bin files) are "
            "never read; convert with `model.save_pretrained(folder)`, which writes safetensors"
        )


def check_options(given: Mapping[str, Any], kinds: Mapping[str, Any], where: str) -> None:
    """Refuse unknown names and values of other types.

    Args:
        kinds: of every option the type that TOML has for its values.
        where: in front of an error's message.

    Raises:
        ConfigurationError: an unknown name with the one that was meant, or else the list of them.
    """
    for key, value in given.items():
        if key not in kinds:
            raise ConfigurationError(f"{where}: {key}: there is no such option; {_meant(key, kinds)}")
        try:
            msgspec.convert(value, kinds[key])
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"{where}: {key}: {error}") from error


def _meant(key: str, kinds: Mapping[str, Any]) -> str:
    secrets = [f"{key}_{way}" for way in ("env", "file", "command") if f"{key}_{way}" in kinds]
    if secrets:
        return f"secrets are not kept here: use {' or '.join(secrets)}"
    return closest(key, kinds) or f"the keys are {', '.join(sorted(kinds))}"


def closest(name: str, known: Iterable[str]) -> str:
    """Which of the known names was meant, as a question; empty: none is like it."""
    found = difflib.get_close_matches(name.replace("-", "_"), list(known), 1)
    return f"did you mean {found[0]}?" if found else ""


def read_options(path: Path, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Options from a TOML file, by their names with underscores.

    Args:
        kinds: of every option the type that TOML has for its values.

    Raises:
        ConfigurationError: no such file, not TOML, a key that is no option, or a value of another type; or
            others could change it.
    """
    check_own(path)
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except UNREADABLE as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from error
    check_options(given, kinds, str(path))
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
    names: Callable[[Any], Mapping[str, str]] = lambda chosen: {},
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose first argument is a dataclass gets the fields of that on its command line.

    All its options can also come from the TOML file that ``--config`` names; those on the command line win.

    Args:
        configuration: the dataclass; its fields are annotated as typer wants it.
        option: ``typer.Option``.
        declare: makes such an annotation of a field's.
        names: of such a dataclass's object, how errors of the command name what it holds (``in_options``).
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
            try:
                command(chosen, **given)
            except SymbiosisError as error:
                rename(error, names(chosen))
                raise

        def read(context: Any, file: Path | None) -> None:
            if file is None:
                return
            context.default_map = read_options(file, kinds)
            for each in context.command.params:
                if each.name in context.default_map:
                    try:
                        each.process_value(context, context.default_map[each.name])
                    except Exception as error:  # typer's: it would name the command line, not the file
                        raise ConfigurationError(f"{file}: {each.name}: {error}") from error

        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        taken = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
        taken += [parameter(field) for field in fields]
        kinds = {each.name: _kind(each.annotation) for each in taken}
        text = (
            "TOML file with options of this command, names with underscores; those given here win. Relative "
            "paths in it are relative to the working directory, as here."
        )
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
