"""Where secrets are: in a variable, in a file, or with a program that prints them; never among options."""

from __future__ import annotations

import functools
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigurationError
from shared.ownership import check_secret

COMMAND_SECONDS = 60.0  # a person may have to unlock a key ring


@dataclass(frozen=True)
class Secret:
    """The place of a secret. Messages contain ``what``, the name of the secret, and never the secret.

    Give exactly one of ``variable``, ``file`` and ``command``.

    Attributes:
        what: Name of the secret in messages, such as ``the token``.
        variable: Name of the environment variable that holds the secret.
        file: File that holds the secret.
        command: Program that prints the secret, and its arguments. It runs without a shell.
        folder: Folder in which the program runs.
        given: Name of the option or the key that contains this place.
    """

    what: str
    variable: str = ""
    file: Path | None = None
    command: tuple[str, ...] = ()
    folder: Path | None = None
    given: str = "this"

    def __str__(self) -> str:
        if self.file or self.command:
            return str(self.file) if self.file else f"the command {self.command[0]}"
        return self.variable if self.names_variable else "VAR"

    @property
    def names_variable(self) -> bool:
        """Whether ``variable`` can be the name of one. If not, it may be the secret, and messages omit it."""
        return bool(os.environ.get(self.variable)) or (
            len(self.variable) <= 40 and self.variable.isidentifier()
        )

    def read(self) -> str:
        """Returns the secret. A program that prints it runs only at the first call.

        Raises:
            ConfigurationError: The secret is not there, or other users could read or change it.
        """
        if self.command:
            return self._of_command
        return self._of_variable() if self.file is None else self._of_file(self.file)

    def _of_variable(self) -> str:
        variable, what = self.variable, self.what
        value = os.environ.get(variable, "")
        if not self.names_variable:
            raise ConfigurationError(
                f"{self.given} takes the name of an environment variable, such as TOKEN, which holds {what}; "
                f"what it was given is no such name. If that is {what} itself, ask for a new one: it can be "
                "seen in the shell's history, or in the file"
            )
        if not value:
            raise ConfigurationError(
                f"the environment variable {variable} is not set: put {what} there (`export {variable}=...`)"
            )
        return value

    def _of_file(self, file: Path) -> str:
        try:
            check_secret(file, self.what)
            value = file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigurationError(f"cannot read {self.what} from {file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"{file} does not hold {self.what}: it is no text") from error
        if not value:
            raise ConfigurationError(f"{file} is empty: put {self.what} there")
        return value

    @functools.cached_property
    def _of_command(self) -> str:
        try:
            # What it says to standard error is for the person at the terminal.
            done = subprocess.run(  # noqa: S603 - the argument list is the user's own, and no shell sees it
                self.command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                timeout=COMMAND_SECONDS,
                check=False,
            )
            value = done.stdout.decode().strip()
        except subprocess.TimeoutExpired:
            raise ConfigurationError(
                f"{self} did not give {self.what} within {COMMAND_SECONDS:.0f} s"
            ) from None
        except (OSError, ValueError) as error:
            # Without the words of a decoder, which would quote the secret.
            reason = error.strerror if isinstance(error, OSError) else "what it prints is no text"
            raise ConfigurationError(f"{self} cannot give {self.what}: {reason}") from None
        if done.returncode or not value:
            raise ConfigurationError(
                f"{self} did not give {self.what}: exit status {done.returncode}"
                + ("" if value else ", and nothing on standard output")
            )
        return value


def text_of(secret: str | Secret | None) -> str:
    """A secret that is given as it is, or where it is; empty: none is given.

    Raises:
        ConfigurationError: see ``Secret.read``.
    """
    return secret.read() if isinstance(secret, Secret) else secret or ""
