"""Profiles: TOML files with what a session needs. Secrets are not in them, but where to find them."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec

from shared.encoded import UNREADABLE
from shared.errors import ConfigurationError, SymbiosisError
from shared.hub import HUB
from shared.options import check_options, read_options, rename
from shared.ownership import check_own, check_secret
from tenant_sdk.connection.urls import LOCAL, is_local, party_name
from tenant_sdk.storage import disk_errors
from tenant_sdk.trust.operators import SYSTEM

P = ParamSpec("P")
R = TypeVar("R")

HERE = Path("symbiosis.toml")  # what command lines use if they are told nothing else, once it is approved
COMMAND_SECONDS = 60.0  # a person may have to unlock a key ring


@dataclass(frozen=True)
class Secret:
    """Where a secret is. ``what`` it is stands in messages; the secret itself never does.

    One of ``variable`` (of the environment), ``file`` and ``command`` (run without a shell, in ``folder``).
    ``given``: the option or the key that says which.
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
        """Whether ``variable`` can be one's name; else it may be the secret itself, which is not shown."""
        return bool(os.environ.get(self.variable)) or (
            len(self.variable) <= 40 and self.variable.isidentifier()
        )

    def read(self) -> str:
        """The secret.

        Raises:
            ConfigurationError: it is not there, or others could read or change it.
        """
        if self.command:
            return self._of_command()
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


def _secret_kinds(name: str) -> dict[str, Any]:
    return {f"{name}_env": str, f"{name}_file": str, f"{name}_command": list[str]}


SOURCE_KINDS: dict[str, Any] = {"url": str | list[str], "ca": str, **_secret_kinds("token")}
# The arguments of ``connect`` that TOML has values for.
KINDS: dict[str, Any] = {
    "provider": str | list[str],
    "ca": str,
    **_secret_kinds("token"),
    "client_certificate": tuple[str, str],
    "mask_sources": list[dict[str, Any]],
    "privacy": str,
    "allow_same": list[str],
    "allow_same_operator": bool,
    "allow_transcript": bool,
    "mask_budget_mib": float,
    "fill_masks": bool,
    "pad_rows": int,
    "experts": str,
    "verify": str,
    "verify_rate": float,
    "fingerprints": str,
    **_secret_kinds("fingerprint_key"),
    "wire_dtype": str,
    "digest": str,
    "timeout": float,
    "patience": float,
}


def profile_path(name: str | Path) -> Path:
    """Where a profile is: a path has a slash or ends in ``.toml``, else it is a name in the user's folder."""
    text = os.path.expanduser(name)
    if isinstance(name, Path) or "/" in text or text.endswith(".toml"):
        return Path(text)
    return _user_folder() / f"{text}.toml"


def _user_folder() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".config") / "symbiosis"


def profile_here() -> Path | None:
    """``./symbiosis.toml``, if there is one: a file that nobody has named, so its user must have approved it.

    It may have come with an archive. Its author chooses the executors, the programs that run and the secrets
    that are used: there is no key with which it would be harmless.

    Raises:
        ConfigurationError: it was not approved as it is now, or others could change it.
    """
    if not HERE.is_file():
        return None
    path = HERE.resolve()
    check_own(HERE)
    if HERE.is_symlink():  # an archive's, to one that was approved for another folder
        raise ConfigurationError(f"{HERE} is a link to {path}: to use that, name it: profile=FILE")
    approved = _approvals().get(str(path))
    if approved != _digest(path):
        why = "has changed since you approved it" if approved else "was not approved by you"
        raise ConfigurationError(
            f"{path} {why}, and nobody has named it: it chooses the executors, and programs that run for "
            f"tokens. Read it, then `symbiosis-tenant trust {HERE}`; or name another: profile=FILE"
        )
    return path


def approve(path: Path) -> Path:
    """Let command lines that run in its folder use a profile until it changes; its path without links.

    Raises:
        ConfigurationError: see ``read_profile``.
        StorageError: the approval cannot be kept.
    """
    check_own(path)
    path = path.resolve()
    read_profile(path)
    file = _user_folder() / "approved.json"
    approvals = _approvals() | {str(path): _digest(path)}
    with disk_errors(file, "the approval", "Then approve it again."):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as opened:
            opened.write(msgspec.json.format(msgspec.json.encode(approvals)))
        temporary.replace(file)
    return path


def _approvals() -> dict[str, str]:
    """Of profiles, by their paths without links, the SHA-256 of what was approved."""
    file = _user_folder() / "approved.json"
    check_own(file)
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, *UNREADABLE) as error:
        raise ConfigurationError(f"{file} cannot be used: {error}. Remove it, and approve again") from error


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error


def read_profile(name: str | Path) -> dict[str, Any]:
    """The arguments of ``connect`` that a profile has, each ``token`` and key as a ``Secret`` yet to be read.

    Raises:
        ConfigurationError: no such file, an unknown key, a value of another type; or others could change it.
    """
    path = profile_path(name)
    if path != Path(name) and not path.exists() and Path(f"{name}.toml").is_file():
        raise ConfigurationError(
            f"cannot read {path}: No such file or directory; to name the file here: profile='./{name}.toml'"
        )
    given = read_options(path, KINDS)
    folder = path.absolute().parent
    file = path.name
    found = {key: value for key, value in given.items() if not key.startswith(("token_", "fingerprint_key_"))}
    found |= _secret(given, "token", "the provider's token", file, folder)
    found |= _secret(given, "fingerprint_key", "the fingerprints' key", file, folder)
    for key in ("ca", "fingerprints"):
        if key in found:
            found[key] = _beside(folder, found[key])
    if "client_certificate" in found:
        found["client_certificate"] = tuple(_beside(folder, each) for each in found["client_certificate"])
    if "mask_sources" in found:
        found |= _sources(found["mask_sources"], path, folder)
    return found


def _beside(folder: Path, name: str) -> Path:
    """A path of a profile, which is relative to its folder, without detours."""
    path = folder / os.path.expanduser(name)
    return path.resolve() if ".." in path.parts else path


def _checkpoint(folder: Path, name: str) -> Path | str:
    """As ``_beside``, but for a model of a hub."""
    return name if name.startswith(HUB) else _beside(folder, name)


def names_in(profile: str | Path, found: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, str]:
    """How errors name what a session has from a profile, as ``in_options`` wants it: by its key there.

    Args:
        profile: its name or path.
        found: what ``read_profile`` found in it.
        given: what was given besides, and wins.
    """
    file = profile_path(profile).name
    names = dict.fromkeys(merged(found, given).keys() - given.keys(), "")
    # Also what is missing there.
    if "provider" in names:
        names |= dict.fromkeys({"ca", "token", "client_certificate"} - given.keys(), "")
    if "mask_sources" in names:
        names |= dict.fromkeys({"mask_source_ca", "mask_source_token"} - given.keys(), "")
    for name in names:
        if name in ("token", "fingerprint_key"):
            names[name] = found[name].given if name in found else f"`{name}_env` in {file}"
        elif name == "mask_source_token":
            one = [secret.given for secret in found.get(name, ()) if secret]
            names[name] = one[0] if len(one) == 1 else f"`token_env` of the mask source in {file}"
        elif name == "mask_source_ca":
            names[name] = f"`ca` of the mask source in {file}"
        elif name in ("provider", "ca", "client_certificate", "mask_sources", "fingerprints"):
            names[name] = f"`{name}` in {file}"
        else:
            names[name] = f"`{name} = {{}}` in {file}"
    return names


def _sources(tables: list[dict[str, Any]], path: Path, folder: Path) -> dict[str, Any]:
    """Of all mask sources the URLs, the tokens and the authorities, as ``connect`` takes them."""
    urls, tokens, authorities = [], [], []
    for at, table in enumerate(tables, 1):
        where = f"{path}: mask source {at}"
        check_options(table, SOURCE_KINDS, where)
        url, ca = table.get("url"), table.get("ca")
        if not url:
            raise ConfigurationError(f"{where}: it has no url")
        local = is_local(url)
        urls.append(f"{LOCAL}{_checkpoint(folder, url.removeprefix(LOCAL))}" if local else url)
        whose = f"mask source {at} in {path.name}"
        tokens.append(_secret(table, "token", f"the token of {party_name(url)}", whose, folder).get("token"))
        authorities.append(ca if ca in (None, SYSTEM) else _beside(folder, ca))
    found: dict[str, Any] = {"mask_sources": urls}
    if any(tokens):
        found["mask_source_token"] = tokens
    if any(authorities):
        found["mask_source_ca"] = authorities
    return found


def _secret(table: Mapping[str, Any], name: str, what: str, where: str, folder: Path) -> dict[str, Secret]:
    """Under its ``name`` the one secret that a table leads to, if there is any."""
    ways = [key for key in _secret_kinds(name) if key in table]
    if len(ways) > 1:
        raise ConfigurationError(f"{where}: give {what} in one way, not by {' and '.join(ways)}")
    if not ways:
        return {}
    value, given = table[ways[0]], f"`{ways[0]}` {'of' if ' in ' in where else 'in'} {where}"
    if not value:
        raise ConfigurationError(f"{where}: {ways[0]} is empty")
    if ways[0].endswith("_env"):
        return {name: Secret(what, variable=value, given=given)}
    if ways[0].endswith("_file"):
        return {name: Secret(what, file=_beside(folder, value), given=given)}
    return {name: Secret(what, command=tuple(value), folder=folder, given=given)}


def merged(profile: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a profile and those that were given, which win.

    What belongs to a party goes with it: who gives another provider, or other mask sources, gives their
    tokens and authorities too. Else one operator would get what is another's.
    """
    kept = dict(profile)
    if "provider" in given:
        for name in ("provider", "ca", "token", "client_certificate"):
            kept.pop(name, None)
    if "mask_sources" in given or given.get("privacy") == "plain":  # which has no use for any
        for name in ("mask_sources", "mask_source_token", "mask_source_ca"):
            kept.pop(name, None)
    return {**kept, **given}


def revealed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """With every ``Secret`` read.

    Raises:
        ConfigurationError: one is not there.
    """

    def reveal(value: Any) -> Any:
        if isinstance(value, list):
            return [reveal(each) for each in value]
        return value.read() if isinstance(value, Secret) else value

    return {name: reveal(value) for name, value in arguments.items()}


def completed(connect: Callable[P, R]) -> Callable[P, R]:
    """``connect`` with the arguments that it is not given taken from the ``profile``, if that is given."""

    @functools.wraps(connect)
    def with_profile(*provider: P.args, **given: P.kwargs) -> R:
        profile: Any = given.pop("profile", None)
        if profile is None:
            return connect(*provider, **given)
        arguments = {**given, **({"provider": provider[0]} if provider else {})}
        found = read_profile(profile)
        try:
            return connect(**revealed(merged(found, arguments)))  # type: ignore[call-arg]
        except SymbiosisError as error:
            rename(error, names_in(profile, found, arguments))
            raise

    return with_profile
