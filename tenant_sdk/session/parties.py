"""The parties of a session, provider and mask sources: their addresses, and their operators."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from shared.errors import (
    AuthenticationError,
    ConnectError,
    ConnectionRefused,
    Metavar,
    OptionReference,
    OptionText,
    TlsError,
)
from shared.wire.header import DTYPE_NAMES
from tenant_sdk.connection.channel import Channel
from tenant_sdk.connection.clock import CLOCK, Clock
from tenant_sdk.connection.handshake import client_context, why_untrusted
from tenant_sdk.connection.remote import RemoteExecutor
from tenant_sdk.connection.replicas.addresses import Address, Resolver
from tenant_sdk.connection.replicas.reconnecting import ConnectionOptions, OpenChannel
from tenant_sdk.connection.stats import Stats
from tenant_sdk.connection.transports import OnConnect, open_channel, probe_executor
from tenant_sdk.connection.urls import Party, replicas_of, url_of
from tenant_sdk.session.options import SessionConfig
from tenant_sdk.trust.operators import Operators

# For a step of opening a connection, where another replica can be asked instead.
OPENING_SECONDS = 10.0
AT_ONCE = 8  # replicas that are looked at


class PartyConnector:
    """Connects a session to one party: an executor, or its replicas.

    Args:
        config: the session's.
        party: one that the session names.
        token, ca: for all of its replicas.
        operators: told who is there, at every connection; what one replica shows holds for the party.
        option_prefix: in front of the names of this party's options; empty for the provider.
        clock: how time passes.

    Raises:
        ConfigurationError: see ``client_context``.
    """

    def __init__(
        self,
        config: SessionConfig,
        party: Party,
        token: str,
        ca: str | Path | None,
        operators: Operators,
        option_prefix: str = "",
        clock: Clock = CLOCK,
    ) -> None:
        self._config, self._token, self._ca, self._operators = config, token, ca, operators
        self._option_prefix, self._is_mask_source = option_prefix, bool(option_prefix)
        self._targets, self._clock = replicas_of(party), clock
        self._resolver = Resolver(self._targets, clock)
        self._context = client_context(ca, config.client_certificate, f"{option_prefix}ca")
        self._party = object()  # so that a mask source with the provider's own URL is noticed

    def open(self, stats: Stats) -> RemoteExecutor:
        """Connect to one of them.

        Raises:
            ConfigurationError, ConnectError: none can be used, with the reason of each.
        """
        config = self._config
        # In this process it would not come back.
        retry_seconds = config.patience if any(isinstance(target, str) for target in self._targets) else 0.0
        dtype = DTYPE_NAMES[config.wire_dtype]
        # Of mask sources, all of the manifest is compared with the provider's.
        digest = "" if self._is_mask_source else config.digest or ""
        party = url_of(self._targets[0])
        options = ConnectionOptions(stats, retry_seconds, party, digest, self._clock)
        return RemoteExecutor(self._find, dtype, options)

    def probe_replicas(self) -> None:
        """Look at every replica, and send it nothing: one that shows another party's operator ends it here.

        What cannot be reached now is compared when it is connected to.

        Raises:
            ConfigurationError: a replica and another party have something in common.
        """
        addresses = self._resolver.resolve()
        if len(addresses) > 1:
            with ThreadPoolExecutor(min(len(addresses), AT_ONCE)) as pool:
                list(pool.map(self._probe, addresses))

    def _probe(self, address: Address) -> None:
        seconds = min(self._config.timeout, OPENING_SECONDS)
        try:
            probe_executor(address, self._context, seconds, self._on_connect(address))
        except ConnectError:
            self._operators.check_named(url_of(address.target), self._party)

    def _on_connect(self, address: Address) -> OnConnect:
        """Whom ``open_channel`` tells who is there."""
        return lambda sock: self._operators.check_distinct(url_of(address.target), sock, self._party)

    def _find(self) -> Mapping[str, OpenChannel]:
        """See ``ReconnectingConnection``."""
        addresses = self._resolver.resolve()
        seconds = OPENING_SECONDS if len(addresses) > 1 else self._config.timeout
        channels: dict[str, OpenChannel] = {}
        for address in addresses:  # executors in this process may all have one name
            name = str(address) if str(address) not in channels else f"{address} ({len(channels) + 1})"
            channels[name] = partial(self._open, address, min(seconds, self._config.timeout))
        return channels

    def _open(self, address: Address, opening: float) -> Channel:
        try:
            timeout, on_connect = self._config.timeout, self._on_connect(address)
            return open_channel(
                address, self._token, self._context, timeout, on_connect, opening, self._clock
            )
        except ConnectError as error:
            self._explain(error, address)
            raise

    def _explain(self, error: ConnectError, address: Address) -> None:
        """Add to an error what the session's user can do about it."""
        if isinstance(error, TlsError) and error.untrusted:
            error.structured_message += why_untrusted(self._ca, f"{self._option_prefix}ca")
        elif isinstance(error, AuthenticationError) and not isinstance(error.__cause__, OSError):
            argument = OptionReference(f"{self._option_prefix}token", Metavar("TOKEN"))
            error.structured_message += OptionText(". This one was given with {}", argument)
        elif isinstance(error, ConnectionRefused):
            error.structured_message += " `symbiosis-tenant doctor --wait SECONDS` waits for it"
        if self._is_mask_source:
            named = error.message.startswith(url_of(address.target))
            error.structured_message = OptionText(
                "mask source {}{}", "" if named else f"{address}: ", error.structured_message
            )
