"""The options of a session, in one object that is checked when it is made."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import ConfigurationError
from tenant_sdk.connection.urls import (
    is_local,
    over_tls,
    party_name,
    replicas_of,
    split_url,
    url_of,
)
from tenant_sdk.trust.operators import allowed_signs, own_authorities, own_tokens

if TYPE_CHECKING:
    from tenant_sdk.connection.urls import Party
    from tenant_sdk.products.noise_bank import NoiseBankOptions

PRIVACY_MODES = ("one-time", "noise-bank", "plain")
VERIFY_MODES = ("always", "sampled", "off")
WIRE_DTYPES = ("float32", "bfloat16")
EXPERTS = ("local", "padded", "routed")
_CHOICES = (
    "Name one that another operator runs, mask_sources=['wss://...'], or the checkpoint itself, "
    "mask_sources=['local:FOLDER'], which computes the masks' effects here. Weaker modes must be "
    "asked for: privacy='noise-bank' or privacy='plain'; SECURITY.md says what they are worth"
)


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """The options of ``tenant_sdk.connect``, which says what each of them is.

    Raises:
        ConfigurationError: one is wrong, or does not fit the others.
    """

    provider: Party = ""
    token: str = field(default="", repr=False)
    ca: str | Path | None = None
    client_certificate: tuple[str | Path, str | Path] | None = None
    privacy: str = "one-time"
    mask_sources: Sequence[Party] = ()
    mask_source_token: str | Sequence[str] | None = field(default=None, repr=False)
    mask_source_ca: str | Path | Sequence[str | Path] | None = None
    allow_same: Collection[str] = ()
    allow_same_operator: bool = False
    allow_transcript: bool = False
    mask_budget_mib: float = 256.0
    fill_masks: bool = False
    pad_rows: int = 0
    experts: str | None = None
    verify: str | None = None
    verify_rate: float = 0.05
    fingerprints: str | Path | None = None
    fingerprint_key: str | None = field(default=None, repr=False)
    wire_dtype: str = "float32"
    noise_bank: NoiseBankOptions | None = None
    digest: str | None = None
    timeout: float = 60.0
    patience: float = 600.0

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if not self.provider:
            raise ConfigurationError("which executor? Give provider=URL, or profile=FILE, which names one")
        self._check_urls()
        self._check_privacy()
        self._check_numbers()
        if self.fingerprint_key and self.fingerprints is None:
            raise ConfigurationError("fingerprint_key=KEY is of no use without fingerprints=FILE")
        if self.when_verified not in VERIFY_MODES:
            raise ConfigurationError(f"verify={self.verify!r} is none of {', '.join(VERIFY_MODES)}")
        self._check_certificates()
        allowed_signs(self.allow_same, self.allow_same_operator)

    @property
    def when_verified(self) -> str:
        """One of ``VERIFY_MODES``: what ``verify`` says, or else the privacy mode's own."""
        one = self.privacy == "one-time" or self.fingerprints is not None
        return self.verify or ("always" if one else "off")

    @property
    def where_experts(self) -> str:
        """One of ``EXPERTS``: what ``experts`` says, or else what the privacy mode promises allow."""
        return self.experts or ("local" if self.privacy == "one-time" else "routed")

    @property
    def allowed(self) -> frozenset[str]:
        """Signs that provider and mask sources are one operator which are not held against them."""
        return allowed_signs(self.allow_same, self.allow_same_operator)

    @functools.cached_property
    def credentials(self) -> list[tuple[str, str | Path | None]]:
        """Token and authority of each mask source; of those that need none, empty.

        Raises:
            ConfigurationError: one is missing or unreadable, or shared without being ``allowed``.
        """
        sources, allowed = self.mask_sources, self.allowed
        tokens: list[Any] = for_each(self.mask_source_token, sources, "mask_source_token")
        authorities = for_each(self.mask_source_ca, sources, "mask_source_ca")
        known = [
            at
            for at, each in enumerate(sources)
            if not is_local(each) and any(isinstance(one, str) for one in replicas_of(each))
        ]
        own = own_tokens(self.token, [tokens[at] for at in known], allowed)
        for at, token in zip(known, own, strict=True):
            tokens[at] = token
        if "token" in allowed:
            tokens = [each or self.token for each in tokens]  # also in this process, where none is needed
        tls = [at for at in known if any(map(over_tls, replicas_of(sources[at])))]
        files = own_authorities(self.ca, [authorities[at] for at in tls], allowed)
        for at, file in zip(tls, files, strict=True):
            authorities[at] = file
        return [(each or "", ca) for each, ca in zip(tokens, authorities, strict=True)]

    def _check_urls(self) -> None:
        if isinstance(self.mask_sources, str):
            raise ConfigurationError(f"mask_sources is a list: write [{self.mask_sources!r}]")
        if not replicas_of(self.provider):
            raise ConfigurationError("provider=[] names no executor")
        for party in (self.provider, *self.mask_sources):
            replicas = replicas_of(party)
            if is_local(party) and party != self.provider:
                continue
            for where in replicas:
                if over_tls(where):
                    split_url(url_of(where))
            if len(set(map(url_of, replicas))) < len(replicas):
                raise ConfigurationError(f"{party_name(party)}: a replica is named twice")

    def _check_privacy(self) -> None:
        sources = self.mask_sources
        if self.privacy not in PRIVACY_MODES:
            raise ConfigurationError(f"privacy={self.privacy!r} is none of {', '.join(PRIVACY_MODES)}")
        if self.wire_dtype not in WIRE_DTYPES:
            raise ConfigurationError(f"wire_dtype={self.wire_dtype!r} is none of {', '.join(WIRE_DTYPES)}")
        if self.where_experts not in EXPERTS:
            raise ConfigurationError(f"experts={self.experts!r} is none of {', '.join(EXPERTS)}")
        if self.experts == "padded" and self.privacy != "one-time":
            raise ConfigurationError(
                f"experts='padded' adds rows of zeros, which privacy={self.privacy!r} would show: use it "
                "with one-time masks, or give experts='routed'"
            )
        if sources and self.privacy == "plain":
            raise ConfigurationError(
                f"privacy='plain' uses no masks: leave out mask_sources=[{party_name(sources[0])}]"
            )
        if len(sources) > 1 and self.privacy == "noise-bank":
            raise ConfigurationError("privacy='noise-bank' takes one mask source")
        if not sources and self.privacy == "one-time":
            raise ConfigurationError(f"privacy='one-time' needs a mask source. {_CHOICES}")
        if len(set(map(replicas_of, sources))) < len(sources):
            raise ConfigurationError("a mask source is named twice, which hides nothing more than once")

    def _check_numbers(self) -> None:
        if not 0 < self.timeout < math.inf:
            raise ConfigurationError(f"timeout={self.timeout} cannot be: it is in seconds and more than 0")
        if not 0 <= self.patience < math.inf:
            raise ConfigurationError(f"patience={self.patience} cannot be: it is in seconds and not negative")
        if not 0 <= self.mask_budget_mib < math.inf:
            raise ConfigurationError(
                f"mask_budget_mib={self.mask_budget_mib} cannot be: it is in MiB and not negative"
            )
        if not 0 <= self.pad_rows <= 1 << 16:
            raise ConfigurationError(
                f"pad_rows={self.pad_rows} cannot be: it is a number of rows from 0 to 65536"
            )
        if self.pad_rows and self.privacy != "one-time":
            raise ConfigurationError(
                f"pad_rows={self.pad_rows} adds rows of zeros, which privacy={self.privacy!r} would show: "
                "they would give away its masks, or that they are zeros. Use it with one-time masks"
            )
        if not 0 < self.verify_rate <= 1:
            raise ConfigurationError(
                f"verify_rate={self.verify_rate} cannot be: it is more than 0 and at most 1"
            )

    def _check_certificates(self) -> None:
        """Refuse options of TLS that nothing would use: whoever gives them expects TLS."""
        own = replicas_of(self.provider)
        executors = [one for each in self.mask_sources if not is_local(each) for one in replicas_of(each)]
        for option, given, users in (
            ("ca", self.ca, own),
            ("mask_source_ca", self.mask_source_ca, executors),
            ("client_certificate", self.client_certificate, [*own, *executors]),
        ):
            if given is not None and users and not any(map(over_tls, users)):
                raise ConfigurationError(
                    f"{option}=FILE is for TLS, and {url_of(users[0])} is reached without it, on this "
                    "machine; leave it out. (The authority of mask sources is mask_source_ca=FILE.)"
                )


def for_each(given: Any, sources: Sequence[Party], option: str) -> list[Any]:
    """One value for each mask source, from one for all or one for each.

    Raises:
        ConfigurationError: neither.
    """
    if isinstance(given, str) or not isinstance(given, Sequence):
        return [given] * len(sources)
    if len(given) != len(sources):
        raise ConfigurationError(
            f"{option}=: give one for all mask sources, or one for each ({len(sources)}), not {len(given)}"
        )
    return list(given)
