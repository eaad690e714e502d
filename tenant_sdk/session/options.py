"""The options of a session, in one object that is checked when it is made."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

from shared.errors import ConfigurationError, Metavar, OptionReference, OptionText
from shared.options import Option, check_fields
from shared.secrets import Secret, text_of
from tenant_sdk.connection.urls import (
    Party,
    is_local,
    over_tls,
    party_name,
    replicas_of,
    split_url,
    url_of,
)
from tenant_sdk.products.bank_options import NoiseBankOptions
from tenant_sdk.products.modes import Privacy
from tenant_sdk.trust.operators import ALL, SIGNS, allowed_signs, own_authorities, own_tokens

VERIFY_MODES = ("always", "sampled", "off")
ANSWERS = ("exact", "half", "auto")
WIRE_DTYPES = ("float32", "bfloat16")
EXPERTS = ("local", "padded", "routed")
GENERATION, TRAINING = "generation", "training"
KEEP_DTYPES = ("float32", "bfloat16")
EXECUTORS, TRUST, MASKS, VERIFICATION, CONNECTION, KEPT = (
    "Executors",
    "Trust",
    "Masks",
    "Verification",
    "Connection",
    "Kept layers",
)
PROVIDER, MASK_SOURCES, NOBODY = "provider", "mask_sources", ""
_FILE = Metavar("FILE")
WEAKER = OptionText(
    "Weaker modes must be selected by name: {} or {}; SECURITY.md describes their limits",
    OptionReference("privacy", "noise-bank"),
    OptionReference("privacy", "plain"),
)


@dataclass(frozen=True, kw_only=True)
class SessionOption(Option):
    """An option of a session that is a party's, a secret, a file or a matter of trust.

    Attributes:
        belongs_to: the option that names its party, ``provider`` or ``mask_sources``, with which it comes and
            goes: no other party may get it; or ``NOBODY``.
        decides_trust: it says who the parties are, or which weights they must have: weights on the disk are
            for sessions with the same alone.
    """

    belongs_to: str
    decides_trust: bool


@dataclass(frozen=True)
class SessionConfig:
    """The options of a session. Command lines, profiles, ``connect`` and the reference derive from it.

    Raises:
        ConfigurationError: one is wrong, or does not fit the others.
    """

    provider: Annotated[
        Party,
        SessionOption(
            EXECUTORS,
            "URL of the provider's server, the executor: wss://host:port, or on this machine "
            "ipc:///path/to/directory (that of serve --local-dir). Several URLs, in a list or separated by "
            "commas, are replicas: executors of one operator and model. The session uses one replica at a "
            "time. If executors serve parts of the model (serve --part k/n), the session uses one executor "
            "of each part. Several addresses of a host name are replicas too.",
            unit="URL",
            belongs_to=PROVIDER,
            decides_trust=True,
        ),
    ] = ""
    _: KW_ONLY
    profile: Annotated[
        str | PathLike[str] | None,
        SessionOption(
            EXECUTORS,
            "TOML file with these options (docs/how-to/profiles.md): a path, or NAME for "
            "~/.config/symbiosis/NAME.toml. Other options override the file. Commands without {provider} "
            "and {profile} use ./symbiosis.toml, if you have approved it (symbiosis-tenant trust).",
            unit="FILE",
            belongs_to=NOBODY,
            decides_trust=False,
        ),
    ] = None
    token: Annotated[
        str | Secret,
        SessionOption(
            EXECUTORS,
            "The token that the provider gave you. An executor in this process needs none.",
            confidential="the provider's token",
            belongs_to=PROVIDER,
            decides_trust=False,
        ),
    ] = field(default="", repr=False)
    ca: Annotated[
        str | Path | None,
        SessionOption(
            EXECUTORS,
            "PEM file of the provider's certificate authority. Default: the authorities of the operating "
            "system. Options for certificates apply to wss:// only.",
            unit="FILE",
            belongs_to=PROVIDER,
            decides_trust=True,
        ),
    ] = None
    client_certificate: Annotated[
        tuple[str | Path, str | Path] | None,
        SessionOption(
            EXECUTORS,
            "PEM files of your certificate and its key, for executors that require one.",
            unit="FILE",
            parts=(
                ("client_certificate", "PEM file of your certificate, for executors that require one."),
                ("client_key", "PEM file of the certificate's key."),
            ),
            belongs_to=PROVIDER,
            decides_trust=False,
        ),
    ] = None
    mask_sources: Annotated[
        Sequence[Party],
        SessionOption(
            EXECUTORS,
            "Party that computes effects, the products of masks with the weights: the URL of an executor "
            "(or its replicas, as above) that another operator runs with the same weights. With "
            "local:FOLDER, local:FILE.gguf or local:hub:NAME[@REVISION], this machine computes the effects "
            "from that checkpoint. With one-time masks, rows stay hidden if one mask source does not "
            "collude with the provider. A noise-bank uses one mask source, by default the provider, which "
            "then sees every mask.",
            unit="URL",
            cli_singular="mask_source",
            belongs_to=MASK_SOURCES,
            decides_trust=True,
        ),
    ] = ()
    mask_source_token: Annotated[
        str | Secret | Sequence[str | Secret | None] | None,
        SessionOption(
            EXECUTORS,
            "The token of the mask source. With several mask sources, give one for each.",
            confidential="the mask source's token",
            cli_singular="mask_source_token",
            belongs_to=MASK_SOURCES,
            decides_trust=False,
        ),
    ] = field(default=None, repr=False)
    mask_source_ca: Annotated[
        str | Path | Sequence[str | Path | None] | None,
        SessionOption(
            EXECUTORS,
            "PEM file of the mask source's certificate authority, or system: the authorities of the "
            "operating system. With several mask sources, give one for each. Required if {ca} is given. "
            "Default without {ca}: system.",
            unit="FILE",
            cli_singular="mask_source_ca",
            belongs_to=MASK_SOURCES,
            decides_trust=True,
        ),
    ] = None
    digest: Annotated[
        str | None,
        SessionOption(
            TRUST,
            "Refuse executors with another digest: a hash of all weights, parameters and files. The digest "
            "covers all downloads. It does not show that products are computed with these weights; "
            "{fingerprints} or a mask source local:... shows this.",
            unit="DIGEST",
            belongs_to=NOBODY,
            decides_trust=False,
        ),
    ] = None
    allow_same: Annotated[
        Collection[str],
        SessionOption(
            TRUST,
            "Accept provider and mask sources that share one of these: host name (host), address, "
            "certificate key (key), machine, certificate authority (authority) or token. Each is a sign that "
            f"one operator runs both. {ALL}: accept all of these, for a trial. One-time masks hide nothing "
            "from an operator that runs both.",
            choices=(*SIGNS, ALL),
            unit="SIGN",
            cli_singular="allow_same",
            belongs_to=NOBODY,
            decides_trust=False,
        ),
    ] = ()
    allow_transcript: Annotated[
        bool,
        SessionOption(
            TRUST,
            "Accept executors that announce that they record tenants' messages, for an audit.",
            belongs_to=NOBODY,
            decides_trust=False,
        ),
    ] = False
    privacy: Annotated[
        str,
        Option(
            MASKS,
            "one-time, noise-bank or plain. With one-time masks, the provider sees uniform random numbers, "
            "unless it colludes with all mask sources. One-time masks need ring numerics. The other modes "
            "protect little or nothing (SECURITY.md).",
            choices=tuple(Privacy),
            unit="MODE",
        ),
    ] = "one-time"
    mask_budget_mib: Annotated[
        float,
        Option(
            MASKS,
            "Memory for effects of masks that are fetched in advance, in MiB. 0: fetch none in advance.",
            minimum=0,
            unit="MIB",
        ),
    ] = 256.0
    fill_masks: Annotated[
        bool,
        Option(
            MASKS,
            "After half a second without a request, fetch effects until they take {mask_budget_mib}, so "
            "that later requests need not wait for them. Default: fetch effects only for the next requests; "
            "for decoding, as many rows as the session has used so far (4 to 64).",
        ),
    ] = False
    pad_rows: Annotated[
        int,
        Option(
            MASKS,
            "Round the number of rows of a request (one for each token) up to a power of two, and to at "
            "least this number. Added rows are zeros under separate masks, and cost as much as other rows. "
            "0: add none.",
            minimum=0,
            maximum=1 << 16,
            unit="ROWS",
        ),
    ] = 0
    experts: Annotated[
        str | None,
        Option(
            MASKS,
            "Place where the experts of mixture-of-experts models are multiplied. local: this machine, with "
            "downloaded weights or those of your model. routed: the provider, which sees the number of "
            "tokens of each expert, and so learns about the text. padded: the provider, which gets equally "
            "many rows for each expert, some of them masked zeros. Default: local with one-time masks, "
            "otherwise routed.",
            choices=EXPERTS,
            unit="WHERE",
        ),
    ] = None
    noise_bank: Annotated[
        NoiseBankOptions | None, Option(MASKS, "Size and lifetime of a noise-bank.", python=True)
    ] = None
    verify: Annotated[
        str | None,
        Option(
            VERIFICATION,
            "Requests whose products are checked: always (all), sampled (a random sample) or off (none). "
            "Checks need ring numerics. Default: always with one-time masks or {fingerprints}, otherwise "
            "off.",
            choices=VERIFY_MODES,
            unit="WHEN",
        ),
    ] = None
    verify_rate: Annotated[
        float,
        Option(
            VERIFICATION,
            "Fraction of requests that are checked if {verify} is sampled. Executors cannot predict which "
            "requests are checked.",
            minimum=0,
            exclusive_minimum=True,
            maximum=1,
            unit="RATE",
        ),
    ] = 0.05
    repeat_rate: Annotated[
        float,
        Option(
            VERIFICATION,
            "With {answers} half: fraction of checked requests that are repeated with all bits. This also "
            "finds errors that are too small for the check. Executors cannot predict which requests are "
            "sent again. 0: none.",
            minimum=0,
            maximum=1,
            unit="RATE",
        ),
    ] = 0.005
    fingerprints: Annotated[
        str | Path | None,
        SessionOption(
            VERIFICATION,
            "File that symbiosis-tenant fingerprint made from weights that you trust. Default: fingerprints "
            "are computed by the mask source local:... if there is one, and otherwise by the executors, "
            "under masks. Fingerprints that executors compute show every answer that does not fit their "
            "first weights, but not whether these weights are right.",
            unit="FILE",
            belongs_to=NOBODY,
            decides_trust=True,
        ),
    ] = None
    fingerprint_key: Annotated[
        str | Secret | None,
        SessionOption(
            VERIFICATION,
            "The key of {fingerprints}, as symbiosis-tenant fingerprint printed it.",
            confidential="the fingerprints' key",
            belongs_to=NOBODY,
            decides_trust=False,
        ),
    ] = field(default=None, repr=False)
    answers: Annotated[
        str,
        Option(
            CONNECTION,
            "Bits that executors send of each number of a product, with ring numerics. exact: all bits. "
            "half (half answers): the upper 16 of 32 bits, which halves the bytes of products and effects; "
            "with ring-fine, the upper 24 bits, which saves a quarter of these bytes. Masks make the "
            "rounding random and unbiased, so two runs differ. Checks then bound errors instead of excluding "
            "them (docs/explanation/numerics.md), and an executor that gives wrong answers can test guesses "
            "of rows. auto: half for training and prompts if the connection is "
            "slower than 4 Gbit/s, otherwise exact.",
            choices=ANSWERS,
            unit="WHICH",
        ),
    ] = "exact"
    wire_dtype: Annotated[
        str,
        Option(
            CONNECTION,
            "Element type of payloads with float numerics: float32, or bfloat16, which halves the bytes but "
            "keeps only two to three significant digits.",
            choices=WIRE_DTYPES,
            unit="NAME",
        ),
    ] = "float32"
    timeout: Annotated[
        float,
        Option(
            CONNECTION,
            "Maximum time without progress, in seconds. Then a connection attempt fails, and a request is "
            "sent again (see {patience}). With {patience} 0, the request fails. This is also the maximum "
            "time for which the session repeats a request to an overloaded executor.",
            minimum=0,
            exclusive_minimum=True,
            unit="SECONDS",
        ),
    ] = 60.0
    patience: Annotated[
        float,
        Option(
            CONNECTION,
            "Seconds to wait for an executor that goes away while the session is open, for example to "
            "restart. The session then repeats lost requests with the same bytes, so with exact answers, "
            "the results are the same. 0: do not wait. This does not apply to the first connection, nor to "
            "an executor in this process.",
            minimum=0,
            unit="SECONDS",
        ),
    ] = 600.0
    keep_gib: Annotated[
        float,
        Option(
            KEPT,
            "GiB of memory for the weights of the executor's layers that this machine multiplies by itself. "
            "When a session begins, it measures its requests and its own products. It chooses the layers "
            "that save most time or bytes, and downloads their weights from the executor. 0: keep none "
            "(docs/how-to/distance.md).",
            minimum=0,
            unit="GIB",
        ),
    ] = 0.0
    keep_dtype: Annotated[
        str,
        Option(
            KEPT,
            "Element type of kept weights and their products. bfloat16 takes half the memory and is less "
            "exact; processors without instructions for it are slow.",
            choices=KEEP_DTYPES,
            unit="NAME",
        ),
    ] = "float32"
    keep_for: Annotated[
        str,
        Option(
            KEPT,
            "Choose kept layers for generation, to save time, or for training, to save bytes. "
            "Default: training for symbiosis-tenant finetune, otherwise generation.",
            choices=("", GENERATION, TRAINING),
            unit="WORK",
        ),
    ] = ""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if not self.provider:
            raise ConfigurationError(
                "which executor? Give {provider}, or {profile}, which names one",
                provider=Metavar("URL"),
                profile=_FILE,
            )
        check_fields(self)
        self._check_urls()
        self._check_privacy()
        if self.fingerprint_key and self.fingerprints is None:
            raise ConfigurationError(
                "{fingerprint_key} is of no use without {fingerprints}",
                fingerprint_key=Metavar("KEY"),
                fingerprints=_FILE,
            )
        self._check_certificates()
        allowed_signs(self.allow_same)

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
        return allowed_signs(self.allow_same)

    @functools.cached_property
    def credentials(self) -> list[tuple[str, str | Path | None]]:
        """Token and authority of each mask source; of those that need none, empty.

        Raises:
            ConfigurationError: one is missing or unreadable, or shared without being ``allowed``.
        """
        sources, allowed = self.mask_sources, self.allowed
        own_token = text_of(self.token)
        tokens: list[Any] = for_each(self.mask_source_token, sources, "mask_source_token")
        tokens = [text_of(each) for each in tokens]
        authorities = for_each(self.mask_source_ca, sources, "mask_source_ca")
        known = [
            at
            for at, each in enumerate(sources)
            if not is_local(each) and any(isinstance(one, str) for one in replicas_of(each))
        ]
        distinct = own_tokens(own_token, [tokens[at] for at in known], allowed)
        for at, token in zip(known, distinct, strict=True):
            tokens[at] = token
        if "token" in allowed:
            tokens = [each or own_token for each in tokens]  # also in this process, where none is needed
        tls = [at for at in known if any(map(over_tls, replicas_of(sources[at])))]
        files = own_authorities(self.ca, [authorities[at] for at in tls], allowed)
        for at, file in zip(tls, files, strict=True):
            authorities[at] = file
        return list(zip(tokens, authorities, strict=True))

    def _check_urls(self) -> None:
        if isinstance(self.mask_sources, str):
            raise ConfigurationError("{mask_sources} must be a list: write [{!r}]", self.mask_sources)
        if not replicas_of(self.provider):
            raise ConfigurationError("{provider} names no executor: give at least one URL", provider=[])
        for party in (self.provider, *self.mask_sources):
            replicas = replicas_of(party)
            if is_local(party) and party != self.provider:
                continue
            for where in replicas:
                if over_tls(where):
                    split_url(url_of(where))
            if len(set(map(url_of, replicas))) < len(replicas):
                raise ConfigurationError(f"{party_name(party)}: a replica is named twice; name it once")

    def _check_privacy(self) -> None:
        sources, hides_zeros = self.mask_sources, Privacy(self.privacy).hides_zeros
        if self.experts == "padded" and not hides_zeros:
            raise ConfigurationError(
                "{experts} adds rows of zeros, which {privacy} would show: use it with one-time masks, "
                "or give {}",
                OptionReference("experts", "routed"),
                experts=self.experts,
                privacy=self.privacy,
            )
        if sources and self.privacy == "plain":
            raise ConfigurationError(
                "{privacy} uses no masks: leave out {mask_sources}",
                privacy=self.privacy,
                mask_sources=[party_name(sources[0])],
            )
        if len(sources) > 1 and self.privacy == "noise-bank":
            raise ConfigurationError(
                "{privacy} takes one mask source: leave out the others", privacy=self.privacy
            )
        if not sources and self.privacy == "one-time":
            raise ConfigurationError(
                "{privacy} needs a mask source. Name one that another operator runs, {}, or the "
                "checkpoint itself, {}, which computes the masks' effects here. {}",
                OptionReference("mask_sources", ["wss://..."]),
                OptionReference("mask_sources", ["local:FOLDER"]),
                WEAKER,
                privacy=self.privacy,
            )
        if len(set(map(replicas_of, sources))) < len(sources):
            raise ConfigurationError("a mask source is named twice, which does not hide more; name it once")
        if self.pad_rows and not hides_zeros:
            raise ConfigurationError(
                "{pad_rows} adds rows of zeros, which {privacy} would show: they would give away its "
                "masks, or that they are zeros. Use it with one-time masks",
                pad_rows=self.pad_rows,
                privacy=self.privacy,
            )

    def _check_certificates(self) -> None:
        """Refuse options of TLS that nothing would use: whoever gives them expects TLS."""
        providers = replicas_of(self.provider)
        executors = [one for each in self.mask_sources if not is_local(each) for one in replicas_of(each)]
        for option, value, users in (
            ("ca", self.ca, providers),
            ("mask_source_ca", self.mask_source_ca, executors),
            ("client_certificate", self.client_certificate, [*providers, *executors]),
        ):
            if value is not None and users and not any(map(over_tls, users)):
                raise ConfigurationError(
                    "{} is for TLS, but the connection to {}, on this machine, does not use TLS: leave out "
                    "the option. (The option for mask sources is {mask_source_ca}.)",
                    OptionReference(option, _FILE),
                    url_of(users[0]),
                    mask_source_ca=_FILE,
                )


def for_each(value: Any, sources: Sequence[Party], option: str) -> list[Any]:
    """One value for each mask source, from one for all or one for each.

    Raises:
        ConfigurationError: neither.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * len(sources)
    if len(value) != len(sources):
        raise ConfigurationError(
            "{}: give one for all mask sources, or one for each ({}), not {}",
            OptionReference(option),
            len(sources),
            len(value),
        )
    return list(value)
