"""Options that the commands of ``symbiosis-tenant`` share, and the session that they describe."""

from __future__ import annotations

import functools
import inspect
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from shared.command_line import CommandLine
from shared.errors import ALONE, ConfigurationError, Metavar, Names, OptionReference, OptionText
from shared.options import Flag, arguments_of, flags_of
from shared.secrets import Secret, text_of
from tenant_sdk.connection.replicas.addresses import Address
from tenant_sdk.connection.urls import is_local, party_name, replicas_of, url_of
from tenant_sdk.session.options import SessionConfig, for_each
from tenant_sdk.session.profiles import HERE, merged, names_in, profile_here, read_profile
from tenant_sdk.trust.operators import SIGNS, SYSTEM, allowed_signs

# How errors that name an argument of ``connect`` say it to who types a command.
NAMES: Names = flags_of(SessionConfig)


@dataclass(frozen=True)
class Target:
    """What `doctor` examines, as the other commands would use it. ``token`` None: none is at hand.

    ``replicas``: URLs of its party, if there are several, of which ``url`` is one; ``address``: of the
    host's the one to examine, if it is not all the same.
    ``until``: time on the performance counter until which somebody may still begin to listen. ``source``: it
    is a mask source.
    """

    url: str
    ca: str | Path | None = None
    client_certificate: tuple[Path, Path] | None = None
    token: Secret | None = None
    wire_dtype: str = SessionConfig.wire_dtype
    digest: str | None = None
    timeout: float = 10.0
    until: float = 0.0
    source: bool = False
    replicas: tuple[str, ...] = ()
    address: str = ""

    @property
    def party(self) -> str:
        """What to call all replicas together."""
        return party_name(self.replicas or self.url)

    @property
    def replica(self) -> Address:
        """The one replica that this is."""
        return Address(self.url, self.address)

    @property
    def authority(self) -> str | Path | None:
        """PEM file; None: the operating system's."""
        return None if str(self.ca) == SYSTEM else self.ca

    @functools.cached_property
    def secret(self) -> str:
        """The token, asked for once; empty, if none is at hand.

        Raises:
            ConfigurationError: it is not where it should be, or is none.
        """
        token = self.token.read() if self.token else ""
        if any(c.isspace() or not c.isprintable() for c in token):
            raise ConfigurationError(f"the token in {self.token} holds white space: put only the token there")
        return token

    def option(self, name: str, value: Any = ALONE) -> OptionReference:
        """What gives the ``provider``, ``ca``, ``token`` or ``client_certificate`` of this party."""
        if self.source and name != "client_certificate":
            name = {"provider": "mask_sources"}.get(name, f"mask_source_{name}")
        return OptionReference(name, value)


@dataclass(frozen=True)
class SessionRules:
    """What a session would put up with, for `doctor`.

    Attributes:
        allowed: signs that parties are one operator which they may have in common.
        masks: they are one-time masks, which one operator would subtract.
        transcript: executors may record what tenants send.
    """

    allowed: frozenset[str] = frozenset(SIGNS)
    masks: bool = True
    transcript: bool = False

    @property
    def masks_allow(self) -> frozenset[str]:
        """``allowed``; other modes ask nobody who the operators are."""
        return self.allowed if self.masks else frozenset(SIGNS)

    @property
    def allowed_by(self) -> OptionText:
        """Why signs are not held against anybody, in words."""
        if not self.masks:
            return OptionText("no one-time masks are asked for")
        return OptionText("allowed by {allow_same}")


class SessionOptions:
    """The options of a session on a command line: those that are given, and those of the profile.

    Args:
        options: the words of the command line; None: not given.

    Raises:
        ConfigurationError: of two options that go together there is one.
    """

    def __init__(self, **options: Any) -> None:
        self.given = arguments_of(SessionConfig, options)
        for name in ("mask_source_token", "mask_source_ca"):
            if len(self.given.get(name, ())) == 1:  # for all mask sources
                self.given[name] = self.given[name][0]
        self.profile = self.given.pop("profile", None)
        self.names = {**NAMES}  # of options in messages; ``arguments`` adds where they come from

    @staticmethod
    def parameters(command_line: CommandLine) -> list[inspect.Parameter]:
        """Of a command that takes these options."""
        return command_line.parameters(SessionConfig, defaults=False)

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """What ``connect`` would be given: these options, and a profile's where they are silent.

        Raises:
            ConfigurationError: see ``read_profile``.
        """
        values, profile = self.given, self.profile
        if profile is None and "provider" not in values and (found_here := profile_here()):
            profile = found_here
            typer.echo(f"using {HERE} of this folder", err=True)
        arguments = values
        if profile is not None:
            found = read_profile(profile)
            arguments = merged(found, values)
            self.names.update(names_in(profile, found, values))
        self.names.update(
            {
                name: Flag(f"{value.given} {value}", alone=True)
                for name, value in values.items()
                if isinstance(value, Secret)
            }
        )
        if "provider" not in arguments:
            raise ConfigurationError(
                "which executor? Give {provider}, or {profile}, which names one; `symbiosis-provider "
                "serve MODEL --dev` makes both, to try it out",
                provider=Metavar("URL"),
                profile=Metavar("FILE"),
            )
        return arguments

    def session(self) -> SessionConfig:
        """What the options say, checked as far as it can be before anybody is connected to.

        Raises:
            ConfigurationError: a secret is not where it should be; else see ``connect``.
        """
        arguments = self.arguments
        if "fingerprints" in arguments and "fingerprint_key" not in arguments:
            raise ConfigurationError(
                OptionText(
                    "{fingerprints} needs {fingerprint_key}: the variable with the key that "
                    "`symbiosis-tenant fingerprint` printed"
                )
            )
        if "token" not in arguments and self.profile and "provider" in self.given:
            raise ConfigurationError(
                OptionText(
                    "{token} is missing: {provider} replaces the executor of {profile}, and a profile's "
                    "token is not sent to another. Name the variable with this provider's own token"
                )
            )
        if "token" not in arguments:
            raise ConfigurationError(OptionText("{token} is missing: the variable with the provider's token"))
        for name in ("token", "fingerprint_key"):
            text_of(arguments.get(name))  # now, while nothing has been loaded
        config = SessionConfig(**arguments)
        config.credentials  # noqa: B018 - refuses tokens and authorities that parties would share
        return config

    def command(self, words: Sequence[str], adapter: Path | None) -> str:
        """Another command with the same session and an adapter, if any, to type next."""
        name, *more = words
        profile = [] if self.profile is None else ["--profile", str(self.profile)]
        others = "" if self.profile or "provider" not in self.given else " (and the options of the session)"
        adapted = [] if adapter is None else ["--adapter", str(adapter)]
        return shlex.join(["symbiosis-tenant", name, *profile, *adapted, *more]) + others

    def targets(self, wait: float) -> tuple[list[Target], SessionRules]:
        """The provider and its mask sources, as `doctor` wants them, and the rules of a session with them.

        Args:
            wait: seconds from now for which any of them may still begin to listen.

        Raises:
            ConfigurationError: see ``arguments``.
        """
        arguments = self.arguments
        sources = arguments.get("mask_sources", ())
        allowed = allowed_signs(arguments.get("allow_same", ()))
        masks = arguments.get("privacy", SessionConfig.privacy) == "one-time"
        names = ("client_certificate", "wire_dtype", "digest", "timeout")
        common = {name: arguments[name] for name in names if name in arguments}
        common["until"] = time.perf_counter() + wait
        token, ca = arguments.get("token"), arguments.get("ca")
        tokens = arguments.get("mask_source_token") or (token if "token" in allowed else None)
        authorities = arguments.get("mask_source_ca") or (ca if "authority" in allowed else None)
        found = [_target(arguments["provider"], ca, token=token, **common)]
        for url, its_token, its_ca in zip(
            sources,
            for_each(tokens, sources, "mask_source_token"),
            for_each(authorities, sources, "mask_source_ca"),
            strict=True,
        ):
            found.append(_target(url, its_ca, token=its_token, source=True, **common))
        return found, SessionRules(allowed, masks, arguments.get("allow_transcript", False))


command_line = CommandLine(typer.Option, typer.Argument)

Tokenizer = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(metavar="FOLDER", help="Folder of a tokenizer that you trust. Default: the executor's."),
]


def _target(party: Any, *arguments: Any, **more: Any) -> Target:
    """Of a party as ``connect`` takes it."""
    urls = (party,) if is_local(party) else tuple(map(url_of, replicas_of(party)))
    more["replicas"] = urls if len(urls) > 1 else ()
    return Target(urls[0], *arguments, **more)
