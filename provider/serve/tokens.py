"""Bearer tokens: 32 random bytes each, of which the file keeps only the SHA-256."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path
from typing import Annotated

import msgspec

from shared.errors import ConfigurationError

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class TokenFile:
    """A JSON file ``{tenant: sha256 of its token}``, readable by its owner only.

    A plain hash is enough because a token is 256 random bits, not a password. The file is read at
    every check, so that adding and removing tenants needs no restart.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def _read(self) -> dict[str, str]:
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=dict[str, _Hash])
        except FileNotFoundError:
            raise ConfigurationError(
                f"{self.path} does not exist; make it with "
                f"`symbiosis-provider token add TENANT --token-file {self.path}`"
            ) from None
        except OSError as error:
            raise ConfigurationError(f"cannot read {self.path}: {error.strerror}") from error
        except msgspec.DecodeError as error:
            raise ConfigurationError(f"{self.path} is not a token file: {error}") from error

    def check_readable(self) -> int:
        """Number of tenants; raises ConfigurationError if the file cannot be used."""
        return len(self._read())

    def add(self, tenant: str) -> str:
        """Make a token for a tenant, replacing an older one, and return it; it is stored nowhere."""
        if not _TENANT.fullmatch(tenant):
            raise ConfigurationError("a tenant's name is 1 to 64 letters, digits, dots, dashes, underscores")
        tokens = self._read() if self.path.exists() else {}
        token = secrets.token_urlsafe(32)
        self._write({**tokens, tenant: _hash(token)})
        return token

    def remove(self, tenant: str) -> None:
        """Forget a tenant: its token opens no further session."""
        tokens = self._read()
        if tenant not in tokens:
            raise ConfigurationError(f"{self.path} has no tenant {tenant!r}")
        self._write({name: stored for name, stored in tokens.items() if name != tenant})

    def _write(self, tokens: dict[str, str]) -> None:
        temporary = self.path.with_name(self.path.name + ".new")
        try:
            temporary.unlink(missing_ok=True)  # a file that exists would keep its mode
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(tokens)))
            temporary.replace(self.path)
        except OSError as error:
            raise ConfigurationError(f"cannot write {self.path}: {error.strerror}") from error

    def tenant_of(self, token: str) -> str | None:
        """The tenant that holds this token, or None. Time does not depend on which or whether."""
        given = _hash(token)
        found = None
        for tenant, stored in self._read().items():
            if hmac.compare_digest(given, stored):
                found = tenant
        return found


def _hash(token: str) -> str:
    # What is no text stands for itself: the token comes from an HTTP header of anyone's.
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()
