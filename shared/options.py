"""Options that are fields of a dataclass: their bounds, and their places on a command line and in TOML."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.metadata
import inspect
import io
import math
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

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


@dataclass(frozen=True)
class Option:
    """What a field of a configuration is, as ``field: Annotated[type, Option(...)]``.

    Attributes:
        group: the heading under which it stands.
        text: what it is; ``{name}`` in it is another option, which each reader sees under its own name.
        least, most: bounds of a number, which is never infinite.
        above: it is more than ``least``.
        choices: all that a word may be.
        unit: what stands for a value: ``SECONDS``, ``URL``.
        argument: a command line takes it without a name.
        negative: a command line has ``--no-NAME`` as well.
        single: of several values, the name of the option that gives one of them on a command line.
        confidential: what it is, if nobody else may see it; command lines and files say where it is.
        parts: of a tuple, the name and text of the option that gives each member.
        python: it is an argument in Python alone.
    """

    group: str
    text: str
    least: float | None = None
    most: float = math.inf
    above: bool = False
    choices: tuple[str, ...] = ()
    unit: str = ""
    argument: bool = False
    negative: bool = False
    single: str = ""
    confidential: str = ""
    parts: tuple[tuple[str, str], ...] = ()
    python: bool = False

    def check(self, name: str, value: object) -> None:
        """Refuse a value outside of its bounds or choices; None is no value.

        Raises:
            ConfigurationError: which option, and what it may be.
        """
        if value is None:
            return
        if self.choices and value not in self.choices:
            raise ConfigurationError(f"{name}={value!r} must be one of {', '.join(self.choices)}")
        if self.least is None or not isinstance(value, (int, float)):
            return
        low = self.least < value if self.above else self.least <= value
        if not (low and value <= self.most) or value == math.inf:
            most = "" if self.most == math.inf else f" and at most {self.most:g}"
            least = f"{'more than' if self.above else 'at least'} {self.least:g}"
            raise ConfigurationError(f"{name}={value!r} must be {least}{most}")


@dataclass(frozen=True)
class Field:
    """An option of a configuration, in all its places.

    Attributes:
        name: in Python.
        plain: the type of one value: bool, Path, int, float or str.
        words: its names on a command line, and in the file of ``--config``, with underscores.
        toml: the type of its value in TOML.
        default: ``MISSING`` if it must be given.
    """

    name: str
    option: Option
    plain: type
    words: tuple[str, ...]
    toml: Any
    default: Any

    @property
    def flags(self) -> tuple[str, ...]:
        """Its names on a command line, as they are typed."""
        return tuple(f"--{word.replace('_', '-')}" for word in self.words)

    @property
    def flag(self) -> str:
        """How messages name it on a command line: a secret or a tuple with what stands for the value."""
        if self.option.confidential:
            return f"{self.flags[0]} VAR"
        if self.option.parts:
            return " ".join(f"{flag} {self.option.unit}" for flag in self.flags)
        return self.flags[0]


@functools.cache
def fields_of(configuration: Any) -> dict[str, Field]:
    """The options of a dataclass whose fields are annotated with ``Option``, by name."""
    hints = get_type_hints(configuration, include_extras=True)
    found = {}
    for each in dataclasses.fields(configuration):
        hint, option = get_args(hints[each.name])
        plain, is_path = _plain(hint), Path in _members(hint)
        text: Any = str if is_path else plain
        words = (option.single or each.name,)
        if option.parts:
            words = tuple(name for name, _ in option.parts)
            toml: Any = tuple[(text,) * len(option.parts)]  # type: ignore[misc]
        elif option.single:
            toml = list[text]
        else:
            toml = text | list[text] if _several(hint) else text
        if option.confidential:
            words = (f"{words[0]}_env",)
        found[each.name] = Field(each.name, option, plain, words, toml, each.default)
    return found


def check_fields(configuration: Any) -> None:
    """Refuse an object with a field outside of its bounds or choices.

    Raises:
        ConfigurationError: which option, and what it may be.
    """
    kind: Any = type(configuration)
    for name, field in fields_of(kind).items():
        if not field.option.single:
            field.option.check(name, getattr(configuration, name))


def shown_default(field: Field) -> str:
    """What a reader is told of a default; empty: nothing, its text says what that means."""
    if field.option.single or not isinstance(field.default, str | int | float) or field.default is False:
        return ""
    return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)


def described(configuration: Any, indent: int) -> str:
    """What its options are, for the ``Args:`` of a docstring, so many characters from the left."""
    names = {name: f"``{name}``" for name in fields_of(configuration)}
    wrap = functools.partial(textwrap.fill, width=110, subsequent_indent=" " * (indent + 4))
    texts = [
        f"{name}: {each.option.text.format_map(names)}" for name, each in fields_of(configuration).items()
    ]
    return f"\n{' ' * indent}".join(map(wrap, texts))


def secret_ways(name: str) -> dict[str, Any]:
    """The keys with which a TOML file says where a secret is, and their types."""
    return {f"{name}_env": str, f"{name}_file": str, f"{name}_command": list[str]}


def _members(hint: Any) -> set[Any]:
    """All types in a type."""
    inner = [each for each in get_args(hint) if each is not ...]
    return {hint}.union(*map(_members, inner)) if inner else {hint}


def _plain(hint: Any) -> type:
    members = _members(hint)
    return next((kind for kind in (bool, Path, int, float) if kind in members), str)


def _several(hint: Any) -> bool:
    """Whether one value may be a list."""
    return any(
        isinstance(get_origin(each), type) and issubclass(get_origin(each), Sequence)
        for each in get_args(hint)
    )


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


@dataclass(frozen=True)
class CommandLine:
    """Options as a command-line library takes them.

    Args:
        option, argument: ``typer.Option`` and ``typer.Argument``.
    """

    option: Callable[..., Any]
    argument: Callable[..., Any]

    def parameters(self, configuration: Any, *, defaults: bool = True) -> list[inspect.Parameter]:
        """Of a dataclass with ``Option`` on its fields, those of a command.

        Args:
            defaults: an option that is not given has the default of its field; else it is None, and bounds
                are left to the dataclass.
        """
        names = {name: field.flags[0] for name, field in fields_of(configuration).items()}
        return [
            parameter
            for field in fields_of(configuration).values()
            if not field.option.python
            for parameter in self._of_field(field, names, defaults)
        ]

    def _of_field(self, field: Field, names: Mapping[str, str], defaults: bool) -> list[inspect.Parameter]:
        option = field.option
        kind: Any = str if option.confidential else field.plain
        text = option.text.format_map(names).replace("[", r"\[")  # or it would be markup
        more: dict[str, Any] = {"rich_help_panel": option.group, "metavar": option.unit or None}
        if option.confidential:
            text, more["metavar"] = f"Environment variable that holds {option.confidential}.", "VAR"
        if option.single:
            kind, text = list[kind], f"{text} Repeat for several."
        default = field.default
        if not defaults:
            more["show_default"] = shown_default(field) or False
            default = None
        elif default is MISSING:
            default = inspect.Parameter.empty
        if defaults and option.least is not None and not option.above:
            # Typer's own "<float range>" would leave names too little room.
            most = None if option.most == math.inf else option.most
            more |= {"min": option.least, "max": most, "metavar": option.unit or field.plain.__name__.upper()}
        if default is None:
            kind = Union[kind, None]  # noqa: UP007 - of types that are known at run time only
        made = []
        for word, flag, help_ in zip(
            field.words, field.flags, [text for _, text in option.parts] or [text], strict=True
        ):
            if option.argument:
                declared = self.argument(help=help_)
            else:
                switch = [flag] if field.plain is bool and not option.negative else []
                declared = self.option(*switch, help=help_, **more)
            made.append(
                inspect.Parameter(
                    word,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=Annotated[kind, declared],
                )
            )
        return made

    def takes(self, command: Callable[..., None]) -> Callable[..., None]:
        """A command gets the options of its arguments that are configurations.

        Such an argument's type is a dataclass with ``Option`` on its fields, or has a method ``parameters``
        that returns those of its constructor. If it has ``names``, errors name options so (``in_options``).

        All options of the command can also come from the TOML file that ``--config`` names; those on the
        command line win.
        """
        taken: list[inspect.Parameter] = []
        made: dict[str, tuple[type[Any], list[str]]] = {}
        for each in inspect.signature(command, eval_str=True).parameters.values():
            if hasattr(each.annotation, "parameters"):
                expanded = each.annotation.parameters(self)
            elif dataclasses.is_dataclass(each.annotation):
                expanded = self.parameters(each.annotation)
            else:
                taken.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY))
                continue
            made[each.name] = (each.annotation, [parameter.name for parameter in expanded])
            taken += expanded

        @functools.wraps(command)
        def with_options(config: Path | None, **given: Any) -> None:
            chosen: dict[str, Any] = {}
            try:
                for name, (make, options) in made.items():
                    chosen[name] = make(**{option: given.pop(option) for option in options})
                command(**chosen, **given)
            except SymbiosisError as error:
                for each in chosen.values():
                    rename(error, getattr(each, "names", {}))
                raise

        taken.append(self._config({each.name: _kind(each.annotation) for each in taken}))
        with_options.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
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
            "TOML file with options of this command, names with underscores; those given here win. Relative "
            "paths in it are relative to the working directory, as here."
        )
        file = self.option(help=text, metavar="FILE", is_eager=True, callback=read)
        annotation = Annotated[Path | None, file]
        return inspect.Parameter(
            "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
        )
