"""Options that are fields of a dataclass: their bounds, and their names on a command line and in TOML."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from shared.encoded import UNREADABLE, read_within
from shared.errors import (
    ALONE,
    ConfigurationError,
    OptionReference,
)
from shared.ownership import check_own
from shared.secrets import Secret


@dataclass(frozen=True)
class Option:
    """What a field of a configuration is, as ``field: Annotated[type, Option(...)]``.

    Attributes:
        group: the heading under which it stands.
        text: what it is; ``{name}`` in it is another option, which each reader sees under its own name.
        minimum, maximum: bounds of a number, which is never infinite.
        exclusive_minimum: it is more than ``minimum``.
        choices: all that a word may be.
        unit: what stands for a value: ``SECONDS``, ``URL``.
        argument: a command line takes it without a name.
        negative: a command line has ``--no-NAME`` as well.
        cli_singular: of several values, the name of the option that gives one of them on a command line.
        confidential: what it is, if nobody else may see it; command lines and files say where it is.
        parts: of a tuple, the name and text of the option that gives each member.
        python: it is an argument in Python alone.
    """

    group: str
    text: str
    minimum: float | None = None
    maximum: float = math.inf
    exclusive_minimum: bool = False
    choices: tuple[str | int, ...] = ()
    unit: str = ""
    argument: bool = False
    negative: bool = False
    cli_singular: str = ""
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
            raise ConfigurationError(
                "{} must be one of {}", OptionReference(name, value), ", ".join(map(str, self.choices))
            )
        if self.minimum is None or not isinstance(value, (int, float)):
            return
        low = self.minimum < value if self.exclusive_minimum else self.minimum <= value
        if not (low and value <= self.maximum) or value == math.inf:
            most = "" if self.maximum == math.inf else f" and at most {self.maximum:g}"
            least = f"{'more than' if self.exclusive_minimum else 'at least'} {self.minimum:g}"
            raise ConfigurationError("{} must be {}{}", OptionReference(name, value), least, most)


@dataclass(frozen=True)
class Flag:
    """Shows an option in a message as a command line has it.

    Attributes:
        name: such as ``--ca``.
        alone: whether its value stays out.
    """

    name: str
    alone: bool = False

    def __call__(self, value: Any) -> str:
        """Returns the option with a value, or without one if it is ``ALONE``."""
        if self.alone or value is ALONE or value is True:
            return self.name
        values = value if isinstance(value, list | tuple) else [value]
        return " ".join(f"{self.name} {each}" for each in values)


@dataclass(frozen=True)
class Field:
    """An option of a configuration, in all its places.

    Attributes:
        name: in Python.
        scalar_type: the type of one value: bool, Path, int, float or str.
        cli_names: its names on a command line, and in the file of ``--config``, with underscores.
        toml: the type of its value in TOML.
        default: ``MISSING`` if it must be given.
    """

    name: str
    option: Option
    scalar_type: type
    cli_names: tuple[str, ...]
    toml: Any
    default: Any

    @property
    def flags(self) -> tuple[str, ...]:
        """Its names on a command line, as they are typed."""
        return tuple(f"--{word.replace('_', '-')}" for word in self.cli_names)

    def value(self, values: Sequence[Any]) -> Any:
        """Returns its value in Python, from the values of its names on a command line.

        Raises:
            ConfigurationError: it has several, and one is missing.
        """
        if self.option.parts:
            if None in values:
                raise ConfigurationError(f"{' and '.join(self.flags)} go together: give both")
            return tuple(values)
        value, secret = values[0], self.option.confidential
        if not secret:
            return value
        variables = value if self.option.cli_singular else [value]
        secrets = [Secret(secret, variable, given=self.flags[0]) for variable in variables]
        return secrets if self.option.cli_singular else secrets[0]

    @property
    def message_flag(self) -> Flag:
        """The flag by which messages name it on a command line."""
        if self.option.confidential:
            return Flag(f"{self.flags[0]} VAR", alone=True)
        if self.option.parts:
            return Flag(" ".join(f"{flag} {self.option.unit}" for flag in self.flags), alone=True)
        return Flag(self.flags[0])


@functools.cache
def fields_of(configuration: Any) -> dict[str, Field]:
    """The options of a dataclass whose fields are annotated with ``Option``, by name."""
    hints = get_type_hints(configuration, include_extras=True)
    fields = {}
    for each in dataclasses.fields(configuration):
        hint, option = get_args(hints[each.name])
        scalar_type, is_path = _scalar_type(hint), Path in _members(hint)
        text: Any = str if is_path else scalar_type
        cli_names = (option.cli_singular or each.name,)
        if option.parts:
            cli_names = tuple(name for name, _ in option.parts)
            toml: Any = tuple[(text,) * len(option.parts)]  # type: ignore[misc]
        elif option.cli_singular:
            toml = list[text]
        else:
            toml = text | list[text] if _several(hint) else text
        if option.confidential:
            cli_names = (f"{cli_names[0]}_env",)
        fields[each.name] = Field(each.name, option, scalar_type, cli_names, toml, each.default)
    return fields


def flags_of(configuration: Any) -> dict[str, Flag]:
    """How messages name the options of a dataclass on a command line."""
    return {name: field.message_flag for name, field in fields_of(configuration).items()}


def arguments_of(configuration: Any, words: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a dataclass that a command line gives; None and an empty list are not given.

    Raises:
        ConfigurationError: of options that go together one is missing.
    """
    arguments = {}
    for name, field in fields_of(configuration).items():
        values = [words.get(word) for word in field.cli_names]
        if any(value is not None and value != [] for value in values):
            arguments[name] = field.value(values)
    return arguments


def check_fields(configuration: Any) -> None:
    """Refuse an object with a field outside of its bounds or choices.

    Raises:
        ConfigurationError: which option, and what it may be.
    """
    kind: Any = type(configuration)
    for name, field in fields_of(kind).items():
        if not field.option.cli_singular:
            field.option.check(name, getattr(configuration, name))


def shown_default(field: Field) -> str:
    """What a reader is told of a default; empty: nothing, its text says what that means."""
    if (
        field.option.cli_singular
        or not isinstance(field.default, str | int | float | Path)
        or field.default is False
    ):
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


def secret_reference_keys(name: str) -> dict[str, Any]:
    """Returns the keys with which a TOML file refers to a secret, and their types."""
    return {f"{name}_env": str, f"{name}_file": str, f"{name}_command": list[str]}


def _members(hint: Any) -> set[Any]:
    """All types in a type."""
    inner = [each for each in get_args(hint) if each is not ...]
    return {hint}.union(*map(_members, inner)) if inner else {hint}


def _scalar_type(hint: Any) -> type:
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
            "{} is not UTF-8 text: byte {:#04x} at character {:,}; set the terminal to UTF-8",
            OptionReference(option),
            byte,
            error.start + 1,
        ) from error


def check_options(options: Mapping[str, Any], kinds: Mapping[str, Any], where: str) -> None:
    """Refuse unknown names and values of other types.

    Args:
        kinds: of every option the type that TOML has for its values.
        where: in front of an error's message.

    Raises:
        ConfigurationError: an unknown name with the one that was meant, or else the list of them.
    """
    for key, value in options.items():
        if key not in kinds:
            raise ConfigurationError(f"{where}: {key}: there is no such option; {_meant(key, kinds)}")
        try:
            msgspec.convert(value, kinds[key])
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"{where}: {key}: {error}") from error
        texts = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]
        if any("\0" in each for each in texts):  # no system call takes such a path
            raise ConfigurationError(f"{where}: {key}: a character of it has the value 0")


def _meant(key: str, kinds: Mapping[str, Any]) -> str:
    secrets = [f"{key}_{way}" for way in ("env", "file", "command") if f"{key}_{way}" in kinds]
    if secrets:
        return f"secrets are not kept here: use {' or '.join(secrets)}"
    return closest(key, kinds) or f"the keys are {', '.join(sorted(kinds))}"


def closest(name: str, known: Iterable[str]) -> str:
    """Which of the known names was meant, as a question; empty: none is like it."""
    matches = difflib.get_close_matches(name.replace("-", "_"), list(known), 1)
    return f"did you mean {matches[0]}?" if matches else ""


MAX_BYTES = 1 << 16  # of a file of options
MAX_DOTS = 100  # of a line: tomllib takes the square of the parts of a key


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
        text = read_within(path, MAX_BYTES, pipes=True).decode()
        for number, line in enumerate(text.splitlines(), 1):
            if line.count(".") > MAX_DOTS:
                raise ConfigurationError(f"{path}: line {number} has more than {MAX_DOTS} dots")
        options = tomllib.loads(text)
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except UNREADABLE as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from error
    check_options(options, kinds, str(path))
    return options
