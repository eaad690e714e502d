"""Options that the commands of ``symbiosis-tenant`` share, and the session that they describe."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Optional, TypeVar

import typer

from shared.errors import ConfigurationError
from shared.options import option_names
from shared.options import takes as shared_takes
from tenant_sdk.config import EXPERTS, PRIVACY_MODES, VERIFY_MODES, SessionConfig, for_each
from tenant_sdk.connection.replicas.addresses import Address
from tenant_sdk.connection.urls import is_local, party_name, replicas_of, url_of
from tenant_sdk.profiles import HERE, Secret, merged, names_in, profile_here, read_profile, revealed
from tenant_sdk.trust.operators import SIGNS, SYSTEM, allowed_signs

T = TypeVar("T")

# How errors that name an argument of ``connect`` say it to who types a command.
NAMES = option_names(SessionConfig) | {
    "profile": "--profile",
    "token": "--token-env VAR",
    "mask_sources": "--mask-source",
    "mask_source_token": "--mask-source-token-env VAR",
    "fingerprint_key": "--fingerprint-key-env VAR",
    "client_certificate": "--client-certificate FILE --client-key FILE",
    **{name: "--" + name.replace("_", "-") for name in ("kv", "kv_memory_gib", "kv_folder", "memory_gib")},
}


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


_EXECUTORS, _PRIVACY, _CHECKS = "Executors", "Privacy", "Verification"


@dataclass(frozen=True)
class Target:
    """What `doctor` examines, as the other commands would use it. ``token`` None: none is at hand.

    ``replicas``: URLs of its party, if there are several, of which ``url`` is one; ``address``: of the
    host's the one to examine, if it is not all the same.
    ``wait``: seconds for which somebody may still begin to listen. ``source``: it is a mask source.
    ``names``: how its user calls arguments of ``connect``.
    """

    url: str
    ca: str | Path | None = None
    client_certificate: tuple[Path, Path] | None = None
    token: Secret | None = None
    wire_dtype: str = SessionConfig.wire_dtype
    digest: str | None = None
    timeout: float = 10.0
    wait: float = 0.0
    source: bool = False
    names: Mapping[str, str] = field(default_factory=lambda: NAMES, repr=False)
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
            raise ConfigurationError(f"the token in {self.token} holds white space")
        return token

    def option(self, name: str) -> str:
        """How its user calls the ``provider``, ``ca``, ``token`` or ``client_certificate`` of this party."""
        if self.source and name != "client_certificate":
            name = {"provider": "mask_sources"}.get(name, f"mask_source_{name}")
        return self.names[name]


@dataclass(frozen=True)
class Terms:
    """What a session would put up with, for `doctor`.

    Attributes:
        allowed: signs that parties are one operator which they may have in common.
        operator: all of them were allowed in one word.
        masks: they are one-time masks, which one operator would subtract.
        transcript: executors may record what tenants send.
    """

    allowed: frozenset[str] = frozenset(SIGNS)
    operator: bool = False
    masks: bool = True
    transcript: bool = False

    @property
    def masks_allow(self) -> frozenset[str]:
        """``allowed``; other modes ask nobody who the operators are."""
        return self.allowed if self.masks else frozenset(SIGNS)

    @property
    def allowed_by(self) -> str:
        """Why signs are not held against anybody, in words."""
        if not self.masks:
            return "no one-time masks are asked for"
        return f"allowed by {'allow_same_operator=True' if self.operator else 'allow_same='}"


# Typer reads the annotations at run time, where it wants Optional. None: not given, so that of the profile.
@dataclass(frozen=True, kw_only=True)
class ExecutorOptions:
    """Which executors, and how to reach them."""

    profile: Annotated[
        Optional[str],  # noqa: UP045
        _option(
            _EXECUTORS,
            "TOML file of a session: executors, their authorities, where their tokens are, privacy; a path, "
            "or NAME for ~/.config/symbiosis/NAME.toml. Default without --provider: ./symbiosis.toml, if "
            "you have approved it (`trust`). Options given here win, as do those in the file of --config.",
            metavar="FILE",
        ),
    ] = None
    provider: Annotated[
        Optional[str],  # noqa: UP045
        _option(
            _EXECUTORS,
            "URL of the executor: wss://host:port; on this machine ipc://DIRECTORY. Several, with commas in "
            "between, are replicas: executors of one operator and model, of which one is used at a time; so "
            "are several addresses of a host name. Or they are parts (serve --part k/n), which are all used.",
            metavar="URL",
        ),
    ] = None
    token_env: Annotated[
        Optional[str],  # noqa: UP045
        _option(_EXECUTORS, "Environment variable that holds the token.", metavar="VAR"),
    ] = None
    ca: Annotated[
        Optional[Path],  # noqa: UP045
        _option(_EXECUTORS, "The provider's ca.pem. Default: the authorities of the operating system."),
    ] = None
    mask_source: Annotated[
        Optional[list[str]],  # noqa: UP045
        _option(
            _EXECUTORS,
            "Who computes masks' effects: an executor of another operator (its URL), or local:FOLDER "
            "with the checkpoint. Repeat for several: one that does not collude is enough. URLs with commas "
            "in between are replicas of one.",
        ),
    ] = None
    mask_source_ca: Annotated[
        Optional[list[Path]],  # noqa: UP045
        _option(
            _EXECUTORS,
            "A mask source's own ca.pem, or `system`; for each source one. Default without --ca: system.",
        ),
    ] = None
    mask_source_token_env: Annotated[
        Optional[list[str]],  # noqa: UP045
        _option(
            _EXECUTORS,
            "Variable that holds a mask source's own token; for each source one.",
            metavar="VAR",
        ),
    ] = None
    client_certificate: Annotated[
        Optional[Path],  # noqa: UP045
        _option(_EXECUTORS, "PEM file, for executors that ask for a certificate."),
    ] = None
    client_key: Annotated[Optional[Path], _option(_EXECUTORS, "Its key.")] = None  # noqa: UP045
    wire_dtype: Annotated[
        Optional[str],  # noqa: UP045
        _option(
            _EXECUTORS,
            "float32, or bfloat16 for half the bytes and fewer digits; not with ring numerics.",
            metavar="NAME",
            show_default=SessionConfig.wire_dtype,
        ),
    ] = None
    digest: Annotated[
        Optional[str],  # noqa: UP045
        _option(_EXECUTORS, "Refuse executors with another digest of weights, parameters and files."),
    ] = None
    timeout: Annotated[
        Optional[float],  # noqa: UP045
        _option(
            _EXECUTORS,
            "Seconds without progress after which to give up.",
            metavar="SECONDS",
            show_default="60",
        ),
    ] = None
    allow_same: Annotated[
        Optional[list[str]],  # noqa: UP045
        _option(
            _EXECUTORS,
            f"What provider and mask sources may have in common after all: {', '.join(SIGNS)}. Repeat for "
            "several.",
            metavar="SIGN",
        ),
    ] = None
    allow_same_operator: Annotated[
        bool,
        _option(
            _EXECUTORS,
            "All of that, although masks then hide nothing from whoever runs both: to try it out.",
            "--allow-same-operator",
        ),
    ] = False
    allow_transcript: Annotated[
        bool,
        _option(
            _PRIVACY,
            "Use executors that announce that they record what tenants send, as for an audit.",
            "--allow-transcript",
        ),
    ] = False

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if (self.client_certificate is None) != (self.client_key is None):
            raise ConfigurationError("--client-certificate and --client-key go together")
        allowed_signs(self.allow_same or (), self.allow_same_operator)

    @functools.cached_property
    def names(self) -> dict[str, str]:
        """How errors name arguments of ``connect``; ``arguments`` adds where they come from."""
        return dict(NAMES)

    def arguments(self) -> dict[str, Any]:
        """What ``connect`` would be given: these options, and a profile's where they are silent.

        Raises:
            ConfigurationError: see ``read_profile``.
        """
        given = {
            name: value
            for name, value in self._given().items()
            if value is not None and value is not False and value != []
        }
        profile = self.profile
        if profile is None and "provider" not in given and (found_here := profile_here()):
            profile = str(found_here)
            typer.echo(f"using {HERE} of this folder", err=True)
        arguments = given
        if profile is not None:
            found = read_profile(profile)
            arguments = merged(found, given)
            self.names.update(names_in(profile, found, given))
        self.names.update(
            {name: f"{value.given} {value}" for name, value in given.items() if isinstance(value, Secret)}
        )
        if "provider" not in arguments:
            raise ConfigurationError(
                "which executor? Give --provider URL, or --profile FILE, which names one; "
                "`symbiosis-provider serve MODEL --dev` makes both, to try it out"
            )
        return arguments

    def targets(self, wait: float) -> tuple[list[Target], Terms]:
        """The provider and its mask sources, as `doctor` wants them, and the terms of a session with them.

        Raises:
            ConfigurationError: see ``arguments``.
        """
        arguments = self.arguments()
        sources = arguments.get("mask_sources", ())
        operator = arguments.get("allow_same_operator", False)
        allowed = allowed_signs(arguments.get("allow_same", ()), operator)
        masks = arguments.get("privacy", SessionConfig.privacy) == "one-time"
        names = ("client_certificate", "wire_dtype", "digest", "timeout")
        common = {name: arguments[name] for name in names if name in arguments}
        common |= {"wait": wait, "names": self.names}
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
        return found, Terms(allowed, operator, masks, arguments.get("allow_transcript", False))

    def _given(self) -> dict[str, Any]:
        """The arguments of ``connect`` that the options say; None, False or empty: they do not."""
        tokens = [
            Secret("the mask source's token", name, given="--mask-source-token-env")
            for name in self.mask_source_token_env or ()
        ]
        token = Secret("the token that the provider gave you", self.token_env or "", given="--token-env")
        return {
            "provider": self.provider,
            "token": token if self.token_env else None,
            "ca": self.ca,
            "client_certificate": self.client_certificate and (self.client_certificate, self.client_key),
            "mask_sources": self.mask_source,
            "mask_source_token": _one_or_each(tokens),
            "mask_source_ca": _one_or_each(self.mask_source_ca or ()),
            "allow_same": self.allow_same,
            "allow_same_operator": self.allow_same_operator,
            "allow_transcript": self.allow_transcript,
            "wire_dtype": self.wire_dtype,
            "digest": self.digest,
            "timeout": self.timeout,
        }


@dataclass(frozen=True, kw_only=True)
class SessionOptions(ExecutorOptions):
    """A session: which executors, what they may see, and what is checked."""

    patience: Annotated[
        Optional[float],  # noqa: UP045
        _option(
            _EXECUTORS,
            "Seconds to wait for an executor that went away, to go on then; 0: none. The first connection "
            "is not waited for: the URL may be mistyped.",
            metavar="SECONDS",
            show_default=f"{SessionConfig.patience:g}",
        ),
    ] = None
    privacy: Annotated[
        Optional[str],  # noqa: UP045
        _option(
            _PRIVACY, " or ".join(PRIVACY_MODES) + ".", metavar="MODE", show_default=SessionConfig.privacy
        ),
    ] = None
    mask_budget_mib: Annotated[
        Optional[float],  # noqa: UP045
        _option(
            _PRIVACY,
            "Memory for masks' effects that are fetched ahead, in MiB.",
            metavar="MIB",
            show_default=f"{SessionConfig.mask_budget_mib:g}",
        ),
    ] = None
    pad_rows: Annotated[
        Optional[int],  # noqa: UP045
        _option(
            _PRIVACY,
            "Hide how many rows a request has: round up to a power of two, at least this. 0: do not.",
            metavar="ROWS",
            show_default=str(SessionConfig.pad_rows),
        ),
    ] = None
    experts: Annotated[
        Optional[str],  # noqa: UP045
        _option(
            _PRIVACY,
            f"Where experts of a mixture are multiplied: {' or '.join(EXPERTS)}. Default: local with "
            "one-time masks, else routed.",
            metavar="WHERE",
        ),
    ] = None
    verify: Annotated[
        Optional[str],  # noqa: UP045
        _option(
            _CHECKS,
            f"Check answers: {' or '.join(VERIFY_MODES)}. Default: always with one-time masks or "
            "--fingerprints, else off.",
            metavar="WHEN",
        ),
    ] = None
    verify_rate: Annotated[
        Optional[float],  # noqa: UP045
        _option(
            _CHECKS,
            "With --verify sampled: the fraction of requests that is checked.",
            metavar="RATE",
            show_default=f"{SessionConfig.verify_rate:g}",
        ),
    ] = None
    fingerprints: Annotated[
        Optional[Path],  # noqa: UP045
        _option(_CHECKS, "File of the command fingerprint: check against weights that you trust."),
    ] = None
    fingerprint_key_env: Annotated[
        Optional[str],  # noqa: UP045
        _option(_CHECKS, "Environment variable that holds the file's key.", metavar="VAR"),
    ] = None

    def _given(self) -> dict[str, Any]:
        variable = self.fingerprint_key_env
        return super()._given() | {
            "patience": self.patience,
            "privacy": self.privacy,
            "mask_budget_mib": self.mask_budget_mib,
            "pad_rows": self.pad_rows,
            "experts": self.experts,
            "verify": self.verify,
            "verify_rate": self.verify_rate,
            "fingerprints": self.fingerprints,
            "fingerprint_key": variable
            and Secret("the fingerprints' key", variable, given="--fingerprint-key-env"),
        }

    def session(self) -> SessionConfig:
        """What the options say, checked as far as it can be before anybody is connected to.

        Raises:
            ConfigurationError: a secret is not where it should be; else see ``connect``.
        """
        arguments = self.arguments()
        if "fingerprints" in arguments and "fingerprint_key" not in arguments:
            raise ConfigurationError(
                "--fingerprints needs --fingerprint-key-env VAR: the variable with the key that "
                "`symbiosis-tenant fingerprint` printed"
            )
        if "token" not in arguments and self.profile and self.provider:
            raise ConfigurationError(
                "--token-env VAR is missing: --provider replaces the executor of --profile, and a profile's "
                "token is not sent to another. Name the variable with this provider's own token"
            )
        if "token" not in arguments:
            raise ConfigurationError("--token-env VAR is missing: the variable with the provider's token")
        config = SessionConfig(**revealed(arguments))
        config.credentials  # noqa: B018 - refuses tokens and authorities that parties would share
        return config


takes = functools.partial(shared_takes, option=typer.Option, names=lambda chosen: chosen.names)

Tokenizer = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(help="Folder of a tokenizer that you trust. Default: that of --model, or the executor's."),
]
Model = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="FOLDER|hub:NAME[@REVISION]",
        help="Your own copy of the model, also at a hub: all but its frozen layers is taken from it.",
    ),
]
Base = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="FOLDER|hub:NAME[@REVISION]",
        help="Where the adapter will say that its base is, for use without an executor.",
    ),
]
Seed = Annotated[int, typer.Option(help="Of everything random except masks.")]


def _target(party: Any, *arguments: Any, **more: Any) -> Target:
    """Of a party as ``connect`` takes it."""
    urls = (party,) if is_local(party) else tuple(map(url_of, replicas_of(party)))
    more["replicas"] = urls if len(urls) > 1 else ()
    return Target(urls[0], *arguments, **more)


def _one_or_each(given: Sequence[T]) -> T | Sequence[T] | None:
    """As ``connect`` takes it: None, one for all, or one for each."""
    return given[0] if len(given) == 1 else given or None
