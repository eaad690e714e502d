"""Common code of command lines: options of a dataclass, which may also come from a file, and output."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import inspect
import io
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from shared.encoded import check_texts
from shared.errors import CheckpointError, ConfigurationError, SymbiosisError
from shared.options import Field, arguments_of, fields_of, flags_of, read_options, shown_default

_UNITS = {Path: "PATH", str: "TEXT", int: "INT", float: "FLOAT"}  # of options that name none
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"


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
        ConfigurationError: see ``check_texts``.
    """
    check_texts(folder)
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} is not a checkpoint folder: it has no config.json. Give the folder that "
            "`save_pretrained` wrote or that a model hub's download made, or a GGUF file"
        )
    if not any((folder / name).is_file() for name in (WEIGHTS, WEIGHTS_INDEX)):
        raise CheckpointError(
            f"{folder} has no {WEIGHTS} and no {WEIGHTS_INDEX}. Other formats (pickle .bin files) are "
            "never read; convert with `model.save_pretrained(folder)`, which writes safetensors"
        )


def with_usual_help(base: Any) -> Any:
    """A class of commands of typer whose help is in the form of other programs.

    A flag shows no value, and an argument its unit, or its name in capitals (``MODEL``). typer itself would
    show the types of both (``<bool>``, ``<path>``), and braces around the argument.

    Args:
        base: ``TyperCommand`` or ``TyperGroup`` of ``typer.core``.
    """

    class UsualHelp(base):  # type: ignore[misc]
        def get_params(self, context: Any) -> list[Any]:
            found: list[Any] = super().get_params(context)
            for each in found:
                if each.param_type_name == "argument":
                    each.metavar = each.metavar or each.name.upper()
                    each.display_type_rich = lambda ctx: ""  # the column of types
                elif each.is_flag:
                    each.metavar = ""
            return found

        def collect_usage_pieces(self, context: Any) -> list[str]:
            arguments = [each for each in self.get_params(context) if each.param_type_name == "argument"]
            if not arguments:
                return list(super().collect_usage_pieces(context))
            names = [each.metavar if each.required else f"[{each.metavar}]" for each in arguments]
            return [self.options_metavar, *names]

    return UsualHelp


def _kind(hint: Any) -> Any:
    """What TOML has for values of an option's type."""
    if get_origin(hint) is Annotated or type(None) in get_args(hint):
        return _kind(get_args(hint)[0])
    if get_origin(hint) is list:
        return list[_kind(get_args(hint)[0])]  # type: ignore[misc]
    return str if hint is Path else hint


@dataclass(frozen=True)
class CommandLine:
    """Options as a command-line library takes them.

    Args:
        option, argument: ``typer.Option`` and ``typer.Argument``.
    """

    option: Callable[..., Any]
    argument: Callable[..., Any]

    def parameters(
        self, configuration: Any, *, defaults: bool = True, own: Mapping[str, float] = {}
    ) -> list[inspect.Parameter]:
        """Of a dataclass with ``Option`` on its fields, those of a command.

        Args:
            defaults: an option that is not given has the default of its field; else it is None, and bounds
                are left to the dataclass.
            own: defaults of this command to show in place of those of the fields.
        """
        names = {name: field.flags[0] for name, field in fields_of(configuration).items()}
        return [
            parameter
            for field in fields_of(configuration).values()
            if not field.option.python
            for parameter in self._of_field(
                dataclasses.replace(field, default=own.get(field.name, field.default)), names, defaults
            )
        ]

    def _of_field(self, field: Field, names: Mapping[str, str], defaults: bool) -> list[inspect.Parameter]:
        option = field.option
        kind: Any = str if option.confidential else field.scalar_type
        text = option.text.format_map(names).replace("[", r"\[")  # or it would be markup
        unit = option.unit or _UNITS.get(field.scalar_type)
        more: dict[str, Any] = {"rich_help_panel": option.group or None, "metavar": unit}
        if option.confidential:
            text, more["metavar"] = f"Environment variable that holds {option.confidential}.", "VAR"
        if option.cli_singular:
            kind, text = list[kind], f"{text} Repeat for several."
        default = field.default or None if option.confidential else field.default
        if not defaults:
            # Typer would put parentheses around it.
            more["show_default"], shown = False, shown_default(field)
            text += rf" [dim]\[default: {shown}][/dim]" if shown else ""
            default = None
        elif default is MISSING:
            default = inspect.Parameter.empty
        if defaults and option.minimum is not None and not option.exclusive_minimum:
            # Typer's own "<float range>" would leave names too little room.
            maximum = None if option.maximum == math.inf else option.maximum
            more |= {"min": option.minimum, "max": maximum}
        if default is None:
            kind = Union[kind, None]  # noqa: UP007 - of types that are known at run time only
        parameters = []
        for word, flag, help_ in zip(
            field.cli_names, field.flags, [text for _, text in option.parts] or [text], strict=True
        ):
            if option.argument:
                declared = self.argument(help=help_, metavar=option.unit or None)
            else:
                switch = [flag] if field.scalar_type is bool and not option.negative else []
                declared = self.option(*switch, help=help_, **more)
            parameters.append(
                inspect.Parameter(
                    word,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=Annotated[kind, declared],
                )
            )
        return parameters

    def takes(self, command: Callable[..., None]) -> Callable[..., None]:
        """A command gets the options of its arguments that are configurations.

        The type of such an argument is a dataclass with ``Option`` on its fields, or has ``parameters``
        that returns those of its constructor, and ``names`` by which errors name options.

        All options of the command can also come from the TOML file that ``--config`` names; those on the
        command line win.
        """
        parameters: list[inspect.Parameter] = []
        made: dict[str, tuple[type[Any], list[str]]] = {}
        for each in inspect.signature(command, eval_str=True).parameters.values():
            if hasattr(each.annotation, "parameters"):
                expanded = each.annotation.parameters(self)
            elif dataclasses.is_dataclass(each.annotation):
                expanded = self.parameters(each.annotation)
            else:
                parameters.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY))
                continue
            made[each.name] = (each.annotation, [parameter.name for parameter in expanded])
            parameters += expanded

        @functools.wraps(command)
        def with_options(config: Path | None, **values: Any) -> None:
            chosen: dict[str, Any] = {}
            try:
                for name, (make, options) in made.items():
                    words = {option: values.pop(option) for option in options}
                    expands = dataclasses.is_dataclass(make)
                    chosen[name] = make(**(arguments_of(make, words) if expands else words))
                command(**chosen, **values)
            except SymbiosisError as error:
                for name, (make, _) in made.items():
                    if dataclasses.is_dataclass(make):
                        error.show_options(flags_of(make))
                    elif name in chosen:
                        error.show_options(chosen[name].names)
                raise

        parameters.append(self._config({each.name: _kind(each.annotation) for each in parameters}))
        with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {}
        return with_options

    def _config(self, kinds: Mapping[str, Any]) -> inspect.Parameter:
        """The option ``--config``."""

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

        text = (
            "TOML file with options of this command, with underscores in their names. The command line "
            "overrides it. Paths in it are relative to the working directory."
        )
        file = self.option(help=text, metavar="FILE", is_eager=True, callback=read)
        annotation = Annotated[Path | None, file]
        return inspect.Parameter(
            "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
        )
