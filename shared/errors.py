"""Every error that this project raises on purpose.

::

    SymbiosisError
    ├── ConfigurationError          an option or a file of our own user is wrong
    │   ├── CheckpointError         a model folder cannot be served or read
    │   ├── ModelMismatch           a tenant's model is not the one the executor serves
    │   └── StorageError            a file cannot be written: disk full, not writable
    ├── WireError                   a peer broke the protocol or asked for what cannot be (has a code)
    ├── RequestRefused              the executor answered with a typed error (has its code)
    ├── ConnectError                no session could be opened
    │   ├── NobodyListens           no executor there, or not yet
    │   ├── TlsError                certificate, host name or TLS version
    │   ├── AuthenticationError     token or client certificate
    │   └── ProtocolVersionError    the two sides speak different versions
    ├── ConnectionLost              an open session broke
    ├── RequestTimeout              no answer within the timeout
    ├── VerificationError           an executor's answer is not the product it must be
    ├── NonFiniteError              NaN or infinity would have been sent
    └── RemoteWeightUnavailable     something read the values of a weight that stays with the provider

Errors carry a stable ``code`` and say what to do. They name an option as Python does, with its value or a
word for that: ``ca=FILE``, ``privacy='plain'``. Command lines show it as theirs
(``shared.options.in_options``). What a peer is told is made of
``code`` and ``message`` alone: no paths, no traces.
"""

from __future__ import annotations

import math

MOST_MESSAGE = 2000  # characters: a message may quote lists that a peer made


class SymbiosisError(Exception):
    """Root of the tree. ``code`` is stable; ``retry_after`` is in seconds, None for "do not retry"."""

    code: str = "error"

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        # One line that a terminal can show: it may quote what a peer wrote, and lines of a log are entries.
        if len(message) > MOST_MESSAGE:
            message = message[: MOST_MESSAGE - 3] + "..."
        message = peer_text(message.replace("\n", " "), MOST_MESSAGE)
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after


def peer_text(text: str, limit: int = 500) -> str:
    """What a peer wrote, fit for a terminal and a log: printable characters only, and not many."""
    return "".join(c if c.isprintable() else "?" for c in text[:limit])


def peer_seconds(seconds: float | None) -> float | None:
    """How long a peer asks to wait, an hour at most; None if it does not say, or says what no time can be."""
    return min(seconds, 3600.0) if seconds is not None and 0 <= seconds < math.inf else None


class ConfigurationError(SymbiosisError):
    """An option, a file or a folder that the user of this side gave is wrong."""

    code = "configuration"


class CheckpointError(ConfigurationError):
    """A model folder is missing, unreadable, or has nothing to serve."""

    code = "checkpoint"


class ModelMismatch(ConfigurationError):
    """The tenant's model does not have the layers, shapes or weights of the executor's."""

    code = "model_mismatch"


class StorageError(ConfigurationError):
    """A file or folder cannot be written: no space left, a quota, no permission."""

    code = "storage"


class _CodedError(SymbiosisError):
    """An error whose code is chosen where it is raised, out of the table in ``shared/PROTOCOL.md``."""

    def __init__(self, code: str, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message, retry_after=retry_after)
        self.code = code

    def __str__(self) -> str:
        return f"[{peer_text(self.code, 80)}] {self.message}"

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.code, self.message), self.__dict__)


class WireError(_CodedError):
    """The peer's bytes are not a valid message, or ask for something that does not exist.

    ``fatal`` means that the position in the byte stream is lost, so the connection must close;
    otherwise only the one request fails.
    """

    def __init__(
        self, code: str, message: str, *, fatal: bool = False, retry_after: float | None = None
    ) -> None:
        super().__init__(code, message, retry_after=retry_after)
        self.fatal = fatal


class RequestRefused(_CodedError):
    """The executor refused one request; the session goes on."""


class ConnectError(SymbiosisError):
    """A session could not be opened: name, port, network."""

    code = "connect"


class NobodyListens(ConnectError):
    """Nobody listens there: the executor does not run, or not yet, or the port is wrong."""


class TlsError(ConnectError):
    """The TLS handshake failed: untrusted, expired or wrong-host certificate, or an old TLS version.

    ``untrusted``: no authority that was given, or that the system knows, signed the certificate.
    """

    code = "tls"

    def __init__(self, message: str, *, untrusted: bool = False, retry_after: float | None = None) -> None:
        super().__init__(message, retry_after=retry_after)
        self.untrusted = untrusted


class AuthenticationError(ConnectError):
    """The executor did not accept the token or the client certificate."""

    code = "unauthorized"


class ProtocolVersionError(ConnectError):
    """The executor does not speak this version of the protocol."""

    code = "protocol_version"


class ConnectionLost(SymbiosisError):
    """The connection ended while the session was open; nothing was half applied, open a new session."""

    code = "connection_lost"


class RequestTimeout(SymbiosisError):
    """No progress on a request within its timeout."""

    code = "timeout"


class VerificationError(SymbiosisError):
    """An answer is wrong: the executor, a mask source or the fingerprints are not to be trusted."""

    code = "verification"


class NonFiniteError(SymbiosisError):
    """A tensor that would have been sent holds NaN or infinity.

    ``adapters``: whose rows they are, of several that are trained together; or nothing.
    """

    code = "non_finite"

    def __init__(
        self, message: str, *, adapters: tuple[str, ...] = (), retry_after: float | None = None
    ) -> None:
        super().__init__(message, retry_after=retry_after)
        self.adapters = adapters


class RemoteWeightUnavailable(SymbiosisError):
    """The values of a frozen weight were read, but they stay with the provider."""

    code = "remote_weight"
