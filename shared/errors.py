"""The errors that users of this project see.

::

    SymbiosisError
    ├── ConfigurationError          an option or a file of our own user is wrong
    │   ├── CheckpointError         a model folder cannot be served or read
    │   ├── ModelMismatch           a tenant's model is not the one the executor serves
    │   └── StorageError            a file cannot be written: disk full, not writable
    ├── WireError                   a peer broke the protocol or asked for what cannot be (has a code)
    ├── RequestRefused              the executor answered with a typed error (has its code)
    ├── ConnectError                no session could be opened
    │   ├── ConnectionRefused       no executor there, or not yet
    │   ├── TlsError                certificate, host name or TLS version
    │   ├── AuthenticationError     token or client certificate
    │   └── ProtocolVersionError    the two sides speak different versions
    ├── ConnectionLost              an open session broke
    ├── RequestTimeout              no answer within the timeout
    ├── VerificationError           an executor's answer is not the product it must be
    ├── NonFiniteError              NaN or infinity would have been sent
    └── RemoteWeightUnavailable     something read the values of a weight that stays with the provider

Errors carry a stable ``code`` and say what to do. An ``OptionText`` knows which options it names. It shows
them as Python's arguments, and a command line or a profile shows them as its own. What a peer is told is made
of ``code`` and ``message`` alone: no paths, no traces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from string import Formatter
from typing import Any, Final, NamedTuple

MAX_MESSAGE = 2000  # characters: a message may quote lists that a peer made


ALONE: Final = ...  # in place of a value: the option is named without one


class Metavar(str):
    """What stands for an option's value in a message: ``FILE``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class OptionReference(NamedTuple):
    """An option that a message names, by its name in Python, and its value."""

    name: str
    value: Any = ALONE

    def __str__(self) -> str:
        """As Python has it."""
        if self.value is ALONE:
            return self.name
        value = str(self.value) if isinstance(self.value, PurePath) else self.value
        return f"{self.name}={value!r}"


Names = Mapping[str, Callable[[Any], str]]  # of options how they are shown, given a value or ``ALONE``


class OptionText(str):
    """One line of text that names options, made of a message template.

    A template is not one of ``str.format``: ``{name}`` shows the option, not only its value.

    Args:
        template: ``{}`` in it is the next of the values, and ``{name}`` the option of that name, with its
            value if ``options`` have one. Nothing is formatted twice.
        values: text, numbers, an ``OptionReference`` or another message.
        options: values of options.

    Attributes:
        parts: text, and the options between it. The string itself has them as Python's arguments.
    """

    parts: tuple[str | OptionReference, ...]

    def __new__(cls, template: str = "", *values: object, **options: object) -> OptionText:
        """See the class."""
        parts: list[str | OptionReference] = []
        remaining = iter(values)
        for text, name, form, conversion in Formatter().parse(template):
            parts.append(text)
            if name:
                parts.append(OptionReference(name, options.get(name, ALONE)))
            elif name is not None:
                value = next(remaining)
                if isinstance(value, OptionText):
                    parts += value.parts
                elif isinstance(value, OptionReference):
                    parts.append(value)
                else:
                    parts.append(format(repr(value) if conversion == "r" else value, form or ""))
        return cls.of(parts)

    @classmethod
    def of(cls, parts: Iterable[str | OptionReference]) -> OptionText:
        """A message of text and options."""
        whole: list[str | OptionReference] = []
        for part in parts:
            if isinstance(part, str) and whole and isinstance(whole[-1], str):
                whole[-1] += part
            elif part:
                whole.append(part)
        made = str.__new__(cls, _shown(whole, {}))
        made.parts = tuple(whole)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).of, (self.parts,)

    def __add__(self, more: str) -> OptionText:
        return OptionText("{}{}", self, more)

    @classmethod
    def joined(cls, sign: str, texts: Iterable[str]) -> OptionText:
        """All of them, with the sign in between."""
        every = list(texts)
        return cls(sign.join("{}" for _ in every), *every)

    def replaced(self, old: str, new: str) -> OptionText:
        """With other words in its text."""
        return OptionText.of(part.replace(old, new) if isinstance(part, str) else part for part in self.parts)

    def split_once(self, sign: str) -> tuple[OptionText, OptionText]:
        """What is in front of the first such sign in the text, and what is behind it."""
        for at, part in enumerate(self.parts):
            if isinstance(part, str) and sign in part:
                before, _, behind = part.partition(sign)
                return OptionText.of([*self.parts[:at], before]), OptionText.of(
                    [behind, *self.parts[at + 1 :]]
                )
        return self, OptionText()

    def without_prefix(self, beginning: str) -> OptionText:
        """Without this beginning of its text, if it has it."""
        return OptionText.of(
            part.removeprefix(beginning) if at == 0 and isinstance(part, str) else part
            for at, part in enumerate(self.parts)
        )

    def shown(self, names: Names) -> str:
        """With these names of options; others are as in Python."""
        return _shown(self.parts, names)


def _shown(parts: Iterable[str | OptionReference], names: Names) -> str:
    shown = "".join(
        names[part.name](part.value)
        if isinstance(part, OptionReference) and part.name in names
        else str(part)
        for part in parts
    )
    # One line that a terminal can show: it may quote what a peer wrote, and lines of a log are entries.
    if len(shown) > MAX_MESSAGE:
        shown = shown[: MAX_MESSAGE - 3] + "..."
    return peer_text(shown.replace("\n", " "), MAX_MESSAGE)


class SymbiosisError(Exception):
    """Base class of all errors. ``code`` is stable; ``retry_after`` is in seconds, None: do not retry.

    ``structured_message`` is the message as an ``OptionText``. ``message`` is its text with options as Python
    arguments. ``str`` returns its text with the names of options that ``show_options`` has set. If the
    constructor gets values or options, its ``message`` is a template for ``OptionText``, not for
    ``str.format``.
    """

    code: str = "error"

    def __init__(
        self, message: str, *values: object, retry_after: float | None = None, **options: object
    ) -> None:
        super().__init__(OptionText(message, *values, **options) if values or options else message)
        self.retry_after = retry_after
        self._names: Names = {}

    def __str__(self) -> str:
        return self.structured_message.shown(self._names)

    @property
    def structured_message(self) -> OptionText:
        """The message as an ``OptionText``.

        It is made only when it is read, because torch.compile traces the code that makes errors.
        """
        (message,) = self.args
        return message if isinstance(message, OptionText) else OptionText("{}", message)

    @structured_message.setter
    def structured_message(self, message: str) -> None:
        self.args = (message,)

    @property
    def message(self) -> str:
        """The text of the message for a program or a peer."""
        return str(self.structured_message)

    def show_options(self, names: Names) -> None:
        """Let ``str`` use these names of options. Names from earlier calls stay."""
        self._names = {**names, **self._names}


def peer_text(text: str, limit: int = 500) -> str:
    """What a peer wrote, fit for a terminal and a log: printable characters only, and not many."""
    return "".join(c if c.isprintable() else "?" for c in text[:limit])


def counted(count: int, noun: str) -> str:
    """Such as ``1 step`` and ``1,200 steps``."""
    return f"{count:,} {noun}{'s'[: count != 1]}"


def peer_seconds(seconds: float | None) -> float | None:
    """How long a peer asks to wait, an hour at most; None if it does not say, or says what no time can be."""
    return min(seconds, 3600.0) if seconds is not None and 0 <= seconds < math.inf else None


class ConfigurationError(SymbiosisError):
    """An option, a file or a folder that the user of this program gave is wrong."""

    code = "configuration"


class CheckpointError(ConfigurationError):
    """A model folder is missing, unreadable, or has nothing to serve."""

    code = "checkpoint"


class ModelMismatch(ConfigurationError):
    """Layers, shapes or weights of the tenant's model differ from those of the executor's model."""

    code = "model_mismatch"


class StorageError(ConfigurationError):
    """A file or folder cannot be written, for lack of space or permission, or because of a quota."""

    code = "storage"


class _CodedError(SymbiosisError):
    """An error whose code is chosen where it is raised, out of the table in ``shared/PROTOCOL.md``."""

    def __init__(self, code: str, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message, retry_after=retry_after)
        self.code = code

    def __str__(self) -> str:
        return f"[{peer_text(self.code, 80)}] {super().__str__()}"

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.code, self.message), self.__dict__)


class WireError(_CodedError):
    """The peer's bytes are not a valid message, or request something that does not exist.

    If ``fatal`` is true, the position in the byte stream is lost, and the connection must close. Otherwise
    only one request fails.
    """

    def __init__(
        self, code: str, message: str, *, fatal: bool = False, retry_after: float | None = None
    ) -> None:
        super().__init__(code, message, retry_after=retry_after)
        self.fatal = fatal


class RequestRefused(_CodedError):
    """The executor refused one request; the session continues."""


class ConnectError(SymbiosisError):
    """A session could not be opened: the cause is the name, the port or the network."""

    code = "connect"


class ConnectionRefused(ConnectError):
    """Nobody listens there: the executor does not run, or not yet, or the port is wrong."""


class TlsError(ConnectError):
    """The TLS handshake failed: untrusted, expired or wrong-host certificate, or an old TLS version.

    ``untrusted`` is true if neither a given authority nor one of the operating system has signed the
    certificate.
    """

    code = "tls"

    def __init__(self, message: str, *, untrusted: bool = False, retry_after: float | None = None) -> None:
        super().__init__(message, retry_after=retry_after)
        self.untrusted = untrusted


class AuthenticationError(ConnectError):
    """The executor did not accept the token or the client certificate."""

    code = "unauthorized"


class ProtocolVersionError(ConnectError):
    """The executor has another version of the protocol."""

    code = "protocol_version"


class ConnectionLost(SymbiosisError):
    """The connection ended while the session was open. No request was applied in part: open a new session."""

    code = "connection_lost"


class RequestTimeout(SymbiosisError):
    """A request made no progress within its timeout."""

    code = "timeout"


class VerificationError(SymbiosisError):
    """An answer is wrong: the executor, a mask source or the fingerprints cannot be trusted."""

    code = "verification"


class NonFiniteError(SymbiosisError):
    """A tensor that would have been sent holds NaN or infinity.

    If several adapters are trained together, ``adapters`` names those whose rows hold such values. Otherwise
    it is empty.
    """

    code = "non_finite"

    def __init__(
        self, message: str, *, adapters: tuple[str, ...] = (), retry_after: float | None = None
    ) -> None:
        super().__init__(message, retry_after=retry_after)
        self.adapters = adapters


class RemoteWeightUnavailable(SymbiosisError):
    """A program read the values of a frozen weight, which stay with the provider."""

    code = "remote_weight"
