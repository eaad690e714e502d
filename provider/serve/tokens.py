"""Bearer tokens: 32 random bytes each, of which the file keeps only the SHA-256, and when they end."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import msgspec

from provider.file_lock import lock_exclusively
from provider.serve.descriptors import none_left
from shared.atomic import write_atomically, write_new
from shared.encoded import UNREADABLE
from shared.errors import AuthenticationError, ConfigurationError
from shared.ownership import check_own, user_name

log = logging.getLogger(__name__)

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Time = Annotated[datetime, msgspec.Meta(tz=True)]

OVERLAP_DAYS = 7  # of an old token and the one that it is rotated to
WARNING_DAYS = 7  # before a tenant's last token ends


class StoredToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the file has of one token; ``made`` is None if it comes from a file without times."""

    sha256: _Hash
    made: _Time | None = None
    expires: _Time | None = None  # None: never

    def ended(self, now: datetime) -> bool:
        """Returns whether the token is valid no more."""
        return self.expires is not None and self.expires <= now


class ExpiredToken(AuthenticationError):
    """A token of ``tenant`` has expired."""

    tenant = ""


_Tokens = dict[str, list[StoredToken]]  # by tenant, oldest first
# Made once: msgspec 0.22 crashes when such a type is resolved again and again.
_stored = msgspec.json.Decoder(dict[str, _Hash | list[StoredToken]])


def shown(time: datetime | None, otherwise: str = "never") -> str:
    """Returns a time in UTC as text for people."""
    return otherwise if time is None else f"{time.astimezone(UTC):%Y-%m-%d %H:%M}"


def _utc() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def check_tenant(name: str) -> str:
    """Returns a tenant's name, if it is fit for one.

    Raises:
        ConfigurationError: what a name may be.
    """
    if not _TENANT.fullmatch(name):
        raise ConfigurationError("a tenant's name is 1 to 64 letters, digits, dots, dashes, underscores")
    return name


class TokenFile:
    """A JSON file ``{tenant: [{sha256, made, expires}]}``, readable by its owner only.

    The form ``{tenant: sha256}`` is also read, and written in the newer form at the next change. A plain hash
    is enough because a token is 256 random bits, not a password. The file is read at every check, so changes
    need no restart. If the file becomes unusable, the tokens that were read last stay valid. So a mistake in
    an editor locks out no tenant.

    Args:
        path: Path of the file.
        clock: Function that returns the present time with its time zone.
    """

    def __init__(self, path: str | Path, clock: Callable[[], datetime] = _utc) -> None:
        self.path, self._clock = Path(path), clock
        self._last: _Tokens | None = None  # what `tenant_of` or `check_readable` could read last
        self._fault = ""  # why there is nothing newer; empty: there is

    def _read(self) -> _Tokens:
        add = f"`symbiosis-provider token add TENANT --token-file {self.path}`"
        try:
            if not (content := self.path.read_bytes()):  # what made it was killed, or a disk was full
                raise ConfigurationError(f"{self.path} is empty; remove it, and make it again with {add}")
            stored = _stored.decode(content)
        except FileNotFoundError:
            raise ConfigurationError(f"{self.path} does not exist; make it with {add}") from None
        except OSError as error:
            raise ConfigurationError(f"cannot read {self.path}: {error.strerror}") from error
        except UNREADABLE as error:
            raise ConfigurationError(f"{self.path} is not a token file: {error}") from error
        return {
            name: [StoredToken(entry)] if isinstance(entry, str) else entry for name, entry in stored.items()
        }

    def _trusted(self) -> _Tokens:
        """Returns the file's tokens, as those whom it lets in: nobody else may have written it."""
        check_own(self.path)
        return self._read()

    def _last_good(self) -> _Tokens:
        """Returns the file's tokens, or the last ones that could be used; logs each change once."""
        try:
            self._last = self._trusted()
        except ConfigurationError as error:
            if self._last is None or none_left(error):  # which is no fault of the file's
                raise
            if str(error) != self._fault:
                log.error("%s; the tokens that were read last are still valid, no others", error)
            self._fault = str(error)
            return self._last
        if self._fault:
            log.info("%s can be used again", self.path)
        self._fault = ""
        return self._last

    def check_readable(self) -> int:
        """Returns the number of tenants that have a valid token.

        Raises:
            ConfigurationError: The file cannot be used.
        """
        self._last = self._trusted()
        return sum(1 for count in self._valid(self._last).values() if count)

    def count_valid(self, tenant: str) -> int:
        """Returns the number of valid tokens of a tenant; 0 if there is no file yet.

        Raises:
            ConfigurationError: The file cannot be used.
        """
        return self._valid(self._read()).get(tenant, 0) if self.path.exists() else 0

    def _valid(self, tokens: _Tokens) -> dict[str, int]:
        now = self._clock()
        return {name: sum(not each.ended(now) for each in stored) for name, stored in tokens.items()}

    def add(self, tenant: str, days: int | None = None) -> str:
        """Make a token that replaces a tenant's older ones, and return it. The file has only its hash.

        Args:
            tenant: Name of the tenant.
            days: Days for which the token is valid. None: it is valid until it is removed.
        """
        check_tenant(tenant)
        self._make()
        with self._exclusive_lock():
            return self._store(self._read(), tenant, [], days)

    def rotate(self, tenant: str, days: int | None = None, overlap_days: int = OVERLAP_DAYS) -> str:
        """Make and return a further token. The newest of the tenant's present tokens ends after the overlap.

        Args:
            tenant: Name of the tenant.
            days: Days for which the new token is valid. None: it is valid until it is removed.
            overlap_days: Days for which the old token stays valid, unless it expires earlier.

        Raises:
            ConfigurationError: The file has no such tenant.
        """
        with self._exclusive_lock():
            tokens, now = self._read(), self._clock()
            if tenant not in tokens:
                raise ConfigurationError(
                    f"{self.path} has no tenant {tenant!r}; `token add` makes a first token"
                )
            last = now + timedelta(days=overlap_days)
            valid = [old for old in tokens[tenant] if not old.ended(now)][-1:] if overlap_days else []
            earlier = [msgspec.structs.replace(old, expires=min(old.expires or last, last)) for old in valid]
            return self._store(tokens, tenant, earlier, days)

    def _store(self, tokens: _Tokens, tenant: str, earlier: list[StoredToken], days: int | None) -> str:
        now, token = self._clock(), secrets.token_urlsafe(32)
        expires = None if days is None else now + timedelta(days=days)
        self._write({**tokens, tenant: [*earlier, StoredToken(sha256_of(token), now, expires)]})
        return token

    def remove(self, tenant: str) -> None:
        """Remove a tenant. Its tokens then open no session, and its open sessions end within seconds."""
        with self._exclusive_lock():
            tokens = self._read()
            if tenant not in tokens:
                raise ConfigurationError(f"{self.path} has no tenant {tenant!r}")
            self._write({name: stored for name, stored in tokens.items() if name != tenant})

    def _make(self) -> None:
        """Make a file without tokens, if there is none, since a change locks the file.

        Anybody who can read the folder could hold a lock on the folder.
        """
        try:
            write_new(self.path, b"{}\n")
        except FileExistsError:
            pass
        except OSError as error:
            raise ConfigurationError(f"cannot write {self.path}: {error.strerror}") from error

    @contextmanager
    def _exclusive_lock(self) -> Iterator[None]:
        """Lock the file for a change, so that no other command is between reading and writing it."""
        while True:
            locked = self._locked()
            try:
                if locked is None or _is_at(locked, self.path):
                    yield
                    return
            finally:
                if locked is not None:
                    os.close(locked)

    def _locked(self) -> int | None:
        """Returns a descriptor of the locked file; None: there is no file, and so nothing to change."""
        try:
            with ExitStack() as opened:
                locked = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
                opened.callback(os.close, locked)
                lock_exclusively(locked)
                opened.pop_all()
                return locked
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigurationError(f"cannot change {self.path}: {error.strerror}") from error

    def _write(self, tokens: _Tokens) -> None:
        try:
            data = msgspec.json.format(msgspec.json.encode(tokens))
            old = self.path.stat()  # its owner, group and mode stay: an executor reads it
            try:
                write_atomically(self.path, data, stat.S_IMODE(old.st_mode) & 0o777, (old.st_uid, old.st_gid))
            except PermissionError:
                if old.st_uid == os.geteuid():
                    raise
                owner = user_name(old.st_uid)
                raise ConfigurationError(
                    f"{self.path} belongs to {owner}; run this as that user: sudo -u {owner} ..."
                ) from None
        except OSError as error:
            raise ConfigurationError(f"cannot write {self.path}: {error.strerror}") from error

    def tenant_of(self, token: str) -> str | None:
        """Returns the tenant that has this token, or None, in a time that does not depend on the token.

        Raises:
            ExpiredToken: The token has expired. The message is for the holder of the token.
        """
        digest = sha256_of(token)
        holder: tuple[str, StoredToken] | None = None
        for tenant, stored in self._last_good().items():
            for each in stored:
                if hmac.compare_digest(digest, each.sha256):
                    holder = tenant, each
        if holder is None:
            return None
        tenant, stored_token = holder
        if stored_token.ended(self._clock()):
            when = shown(stored_token.expires)
            expired = ExpiredToken(f"this token expired at {when} UTC; ask the provider for a new one")
            expired.tenant = tenant
            raise expired
        return tenant

    def ends(self) -> dict[str, float]:
        """Returns the expiry of each tenant's last token, in seconds since the epoch, if it expires.

        Returns an empty dictionary if the file cannot be used. Other methods report such a file.
        """
        try:
            tokens = self._read()
        except ConfigurationError:
            return {}
        times = {name: [each.expires for each in stored] for name, stored in tokens.items()}
        return {
            name: max(time.timestamp() for time in ends if time is not None)
            for name, ends in times.items()
            if ends and None not in ends
        }

    def valid_tokens(self) -> set[tuple[str, str]]:
        """Returns the tenant and the SHA-256 of every valid token."""
        now, tokens = self._clock(), self._last_good()
        return {
            (name, each.sha256) for name, stored in tokens.items() for each in stored if not each.ended(now)
        }

    def listed(self) -> list[tuple[str, StoredToken]]:
        """Returns every token with its tenant, including expired tokens."""
        return [(name, each) for name, stored in sorted(self._read().items()) for each in stored]

    def warn(self) -> None:
        """Log tenants whose last token expires soon, and a file that is unreadable or open to all users."""
        try:
            tokens, now = self._read(), self._clock()
            if self.path.stat().st_mode & stat.S_IROTH:
                log.warning("anybody on this machine can read %s; chmod 640 %s", self.path, self.path)
        except (ConfigurationError, OSError) as error:
            log.error("cannot check tokens: %s", error)
            return
        for tenant, stored in tokens.items():
            ends = [each.expires for each in stored if each.expires is not None]
            if not ends or len(ends) < len(stored):
                continue  # one never does
            days = (max(ends) - now) / timedelta(days=1)
            if 0 < days <= WARNING_DAYS:
                log.warning(
                    "the token of tenant %s expires at %s UTC; make another with `token rotate`",
                    tenant,
                    shown(max(ends)),
                    extra={"tenant": tenant, "seconds": round(days * 86400)},
                )


def sha256_of(token: str) -> str:
    """Returns the SHA-256 of a token, in hex, as the file has it."""
    # What is no text stands for itself: the token comes from an HTTP header of anyone's.
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def _is_at(descriptor: int, path: Path) -> bool:
    """Returns whether the opened file is still the one at its path: a command may have replaced it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
