"""Profiles: TOML files with the options of a session. Secrets are not in them, but where to find them."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec

from shared.atomic import write_atomically
from shared.encoded import UNREADABLE, path_text, read_within
from shared.errors import ALONE, ConfigurationError, Metavar, OptionText, SymbiosisError
from shared.hub import HUB
from shared.options import Flag, check_options, described, fields_of, read_options, secret_reference_keys
from shared.ownership import check_own
from shared.secrets import Secret
from shared.user_folders import configuration_home
from tenant_sdk.connection.urls import LOCAL, is_local, party_name
from tenant_sdk.session.options import MASK_SOURCES, PROVIDER, SessionConfig, SessionOption
from tenant_sdk.storage import disk_errors
from tenant_sdk.trust.operators import SYSTEM

P = ParamSpec("P")
R = TypeVar("R")

MAX_APPROVED = 1 << 20  # bytes of a file that is approved
HERE = Path("symbiosis.toml")  # what command lines use if they are told nothing else, once it is approved
FIELDS = fields_of(SessionConfig)
_FILE = Metavar("FILE")
# Of each party, by the option that names it, its options.
BELONGINGS = {
    party: [
        name
        for name, field in FIELDS.items()
        if isinstance(field.option, SessionOption) and field.option.belongs_to == party
    ]
    for party in (PROVIDER, MASK_SOURCES)
}
# A profile has a table for each mask source, with these keys.
SOURCE_NAMES = {name: name.removeprefix("mask_source_") for name in BELONGINGS[MASK_SOURCES]}
SOURCE_NAMES[MASK_SOURCES] = "url"
SOURCE_KINDS: dict[str, Any] = {"url": str | list[str], "ca": str, **secret_reference_keys("token")}


def _kinds() -> dict[str, Any]:
    """Of each key of a profile the type of its value."""
    kinds: dict[str, Any] = {}
    for name, field in FIELDS.items():
        if field.option.python or name == "profile" or name in SOURCE_NAMES:
            continue
        kinds |= secret_reference_keys(name) if field.option.confidential else {name: field.toml}
    return kinds | {"mask_sources": list[dict[str, Any]]}


KINDS = _kinds()


def profile_path(name: str | os.PathLike[str]) -> Path:
    """Where a profile is: a path has a slash or ends in ``.toml``, else it is a name in the user's folder."""
    text = os.path.expanduser(name)
    if not isinstance(name, str) or "/" in text or text.endswith(".toml"):
        return Path(text)
    return _user_folder() / f"{text}.toml"


def _user_folder() -> Path:
    return configuration_home() / "symbiosis"


def profile_here() -> Path | None:
    """``./symbiosis.toml``, if there is one: a file that nobody has named, so its user must have approved it.

    It may have come with an archive. Its author chooses the executors, the programs that run and the secrets
    that are used: there is no key with which it would be harmless.

    Raises:
        ConfigurationError: it was not approved as it is now, or others could change it.
    """
    if not HERE.is_file():
        return None
    check_approved(
        HERE,
        "it chooses the executors, and programs that run for tokens",
        OptionText("name another: {profile}", profile=_FILE),
    )
    return HERE.resolve()


def check_approved(file: Path, authority: str, instead: str) -> None:
    """Refuse a file of the working directory that nobody has named, unless its user has approved it.

    Args:
        authority: the power of its author, as a clause.
        instead: another way, as an imperative.

    Raises:
        ConfigurationError: it was not approved as it is now, or others could change it.
    """
    path = file.resolve()
    check_own(file)
    if path != Path(os.path.normpath(Path.cwd() / file)):  # an archive's, to one that was approved elsewhere
        raise ConfigurationError(
            "{} is a link to {}, and no option names this file: remove the link, or {}",
            *(str(file), str(path), instead),
        )
    approved = _approvals().get(path_text(path))
    if approved != _digest(path):
        why = "has changed since you approved it" if approved else "was not approved by you"
        raise ConfigurationError(
            "{} {}, and no option names this file: {}. Read it, then `symbiosis-tenant trust {}`; or {}",
            *(str(path), why, authority, str(file), instead),
        )


def approve(path: Path) -> Path:
    """Let commands use a file of the folder that they run in until it changes; its path without links.

    Raises:
        ConfigurationError: others could change it, or it is TOML and no profile: see ``read_profile``.
        StorageError: the approval cannot be kept.
    """
    check_own(path)
    path = path.resolve()
    if path.suffix == HERE.suffix:
        read_profile(path)
    file = _user_folder() / "approved.json"
    approvals = _approvals() | {path_text(path): _digest(path)}
    with disk_errors(file, "the approval", "Then approve it again."):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(file, msgspec.json.format(msgspec.json.encode(approvals)))
    return path


def _approvals() -> dict[str, str]:
    """Of files, by their paths without links, the SHA-256 of the approved content."""
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
        return hashlib.sha256(read_within(path, MAX_APPROVED)).hexdigest()
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error


def read_profile(name: str | os.PathLike[str]) -> dict[str, Any]:
    """The arguments of ``connect`` that a profile has, each ``token`` and key as a ``Secret`` yet to be read.

    Raises:
        ConfigurationError: no such file, an unknown key, a value of another type; or others could change it.
    """
    path = profile_path(name)
    if path != Path(name) and not path.exists() and Path(f"{name}.toml").is_file():
        raise ConfigurationError(
            "cannot read {}: No such file or directory; for the file in this folder, give {profile}",
            str(path),
            profile=f"./{name}.toml",
        )
    tables = read_options(path, KINDS)
    folder = path.absolute().parent
    values: dict[str, Any] = {}
    for key, field in FIELDS.items():
        if secret := field.option.confidential:
            values |= _secret(tables, key, secret, path.name, folder)
        elif key not in tables:
            continue
        elif field.scalar_type is not Path:
            values[key] = tables[key]
        elif field.option.parts:
            values[key] = tuple(_beside(folder, each) for each in tables[key])
        else:
            values[key] = _beside(folder, tables[key])
    if "mask_sources" in values:
        values |= _sources(values["mask_sources"], path, folder)
    return values


def _beside(folder: Path, name: str) -> Path:
    """A path of a profile, which is relative to its folder, without detours."""
    path = folder / os.path.expanduser(name)
    return path.resolve() if ".." in path.parts else path


def _checkpoint(folder: Path, name: str) -> Path | str:
    """As ``_beside``, but for a model of a hub."""
    return name if name.startswith(HUB) else _beside(folder, name)


@dataclass(frozen=True)
class Key:
    """Shows an option in a message by its key in a profile.

    Attributes:
        file: the profile's name.
    """

    name: str
    file: str

    def __call__(self, value: Any) -> str:
        """With a value, or with none if it is ``ALONE``."""
        if value is ALONE:
            return f"`{self.name}` in {self.file}"
        toml = str(value).lower() if isinstance(value, bool) else repr(value)
        return f"`{self.name} = {toml}` in {self.file}"


def names_in(
    profile: str | os.PathLike[str], profile_values: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Callable[[Any], str]]:
    """How messages name what a session has from a profile: by its key there.

    Args:
        profile: its name or path.
        profile_values: what ``read_profile`` found in it.
        arguments: what was given besides, and wins.
    """
    file = profile_path(profile).name
    names = merged(profile_values, arguments).keys() - arguments.keys()
    # Also what is missing there.
    for party in BELONGINGS.keys() & names:
        names |= set(BELONGINGS[party]) - arguments.keys()
    return {name: _name_in(name, profile_values.get(name), file) for name in names}


def _name_in(name: str, value: Any, file: str) -> Callable[[Any], str]:
    secrets = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, Secret)]
    if len(secrets) == 1:
        return Flag(secrets[0].given, alone=True)
    suffix = "_env" if FIELDS[name].option.confidential else ""
    if name in SOURCE_NAMES and name != MASK_SOURCES:
        return Flag(f"`{SOURCE_NAMES[name]}{suffix}` of the mask source in {file}", alone=True)
    if suffix or name in BELONGINGS or FIELDS[name].scalar_type is Path:
        return Flag(f"`{name}{suffix}` in {file}", alone=True)
    return Key(name, file)


def _sources(tables: list[dict[str, Any]], path: Path, folder: Path) -> dict[str, Any]:
    """Of all mask sources the URLs, the tokens and the authorities, as ``connect`` takes them."""
    urls, tokens, authorities = [], [], []
    for at, table in enumerate(tables, 1):
        where = f"{path}: mask source {at}"
        check_options(table, SOURCE_KINDS, where)
        url, ca = table.get("url"), table.get("ca")
        if not url:
            raise ConfigurationError(f"{where}: `url` is missing")
        local = is_local(url)
        urls.append(f"{LOCAL}{_checkpoint(folder, url.removeprefix(LOCAL))}" if local else url)
        whose = f"mask source {at} in {path.name}"
        tokens.append(_secret(table, "token", f"the token of {party_name(url)}", whose, folder).get("token"))
        authorities.append(ca if ca in (None, SYSTEM) else _beside(folder, ca))
    values: dict[str, Any] = {"mask_sources": urls}
    if any(tokens):
        values["mask_source_token"] = tokens
    if any(authorities):
        values["mask_source_ca"] = authorities
    return values


def _secret(table: Mapping[str, Any], name: str, what: str, where: str, folder: Path) -> dict[str, Secret]:
    """Under its ``name`` the one secret that a table leads to, if there is any."""
    references = [key for key in secret_reference_keys(name) if key in table]
    if len(references) > 1:
        raise ConfigurationError(f"{where}: give {what} in one way, not by {' and '.join(references)}")
    if not references:
        return {}
    value, origin = table[references[0]], f"`{references[0]}` {'of' if ' in ' in where else 'in'} {where}"
    if not value:
        raise ConfigurationError(f"{where}: {references[0]} is empty")
    if references[0].endswith("_env"):
        return {name: Secret(what, variable=value, given=origin)}
    if references[0].endswith("_file"):
        return {name: Secret(what, file=_beside(folder, value), given=origin)}
    return {name: Secret(what, command=tuple(value), folder=folder, given=origin)}


def merged(profile: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a profile and those that were given, which win.

    What belongs to a party goes with it: who gives another provider, or other mask sources, gives their
    tokens and authorities too. Else one operator would get what is another's.
    """
    others = BELONGINGS.keys() & arguments.keys()
    if arguments.get("privacy") == "plain":  # which has no use for any
        others.add(MASK_SOURCES)
    dropped = {name for party in others for name in BELONGINGS[party]}
    return {name: value for name, value in profile.items() if name not in dropped} | {**arguments}


def takes_options(
    configuration: Callable[P, SessionConfig],
) -> Callable[[Callable[[SessionConfig], R]], Callable[P, R]]:
    """Make of a function of a ``SessionConfig`` one that takes its fields as arguments.

    Fields that are not given are taken from the ``profile``, if that is given.
    """

    def decorate(opens: Callable[[SessionConfig], R]) -> Callable[P, R]:
        @functools.wraps(opens)
        def with_options(*provider: P.args, **values: P.kwargs) -> R:
            arguments: dict[str, Any] = {**values, **({"provider": provider[0]} if provider else {})}
            profile = arguments.get("profile")
            if profile is None:
                return opens(configuration(*provider, **values))
            profile_values = read_profile(profile)
            try:
                return opens(SessionConfig(**merged(profile_values, arguments)))
            except SymbiosisError as error:
                error.show_options(names_in(profile, profile_values, arguments))
                raise

        signature = inspect.signature(SessionConfig)
        with_options.__signature__ = signature.replace(  # type: ignore[attr-defined]
            return_annotation=inspect.signature(opens).return_annotation
        )
        with_options.__doc__ = (opens.__doc__ or "").replace("OPTIONS", described(SessionConfig, indent=8))
        return with_options

    return decorate
