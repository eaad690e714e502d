"""The parties of a session, provider and mask sources: how their executors are reached, and who they are."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from shared.errors import (
    Argument,
    AuthenticationError,
    ConnectError,
    Message,
    NobodyListens,
    TlsError,
    Word,
)
from shared.wire.header import DTYPE_NAMES
from tenant_sdk.config import SessionConfig
from tenant_sdk.connection.channel import Channel
from tenant_sdk.connection.handshake import client_context, why_untrusted
from tenant_sdk.connection.lasting import Open
from tenant_sdk.connection.places import Place, Places
from tenant_sdk.connection.remote import RemoteExecutor
from tenant_sdk.connection.stats import Stats
from tenant_sdk.connection.transports import OnConnect, look_at, open_channel
from tenant_sdk.connection.urls import Party, replicas_of, url_of
from tenant_sdk.trust.operators import Operators

# For a step of opening a connection, where another replica can be asked instead.
OPENING_SECONDS = 10.0
AT_ONCE = 8  # replicas that are looked at


class Replicated:
    """An executor, or its replicas, as a session reaches them.

    Args:
        config: the session's.
        party: one that the session names.
        token, ca: for all of its replicas.
        operators: told who is there, at every connection; what one replica shows holds for the party.
        of: in front of the names of this party's options.

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
        of: str = "",
    ) -> None:
        self._config, self._token, self._ca, self._operators, self._of = config, token, ca, operators, of
        self._wheres = replicas_of(party)
        self._places = Places(self._wheres)
        self._context = client_context(ca, config.client_certificate, f"{of}ca")
        self._party = object()  # so that a mask source with the provider's own URL is noticed

    def open(self, stats: Stats) -> RemoteExecutor:
        """Connect to one of them.

        Raises:
            ConfigurationError, ConnectError: none can be used, with the reason of each.
        """
        config = self._config
        # In this process it would not come back.
        patience = config.patience if any(isinstance(where, str) for where in self._wheres) else 0.0
        dtype = DTYPE_NAMES[config.wire_dtype]
        # Of mask sources, all of the manifest is compared with the provider's.
        digest = "" if self._of else config.digest or ""
        return RemoteExecutor(self._find, dtype, stats, patience, url_of(self._wheres[0]), digest)

    def meet_replicas(self) -> None:
        """Look at every replica, and send it nothing: one that shows another party's operator ends it here.

        What cannot be reached now is compared when it is connected to.

        Raises:
            ConfigurationError: a replica and another party have something in common.
        """
        places = self._places.find()
        if len(places) > 1:
            with ThreadPoolExecutor(min(len(places), AT_ONCE)) as pool:
                list(pool.map(self._meet, places))

    def _meet(self, place: Place) -> None:
        seconds = min(self._config.timeout, OPENING_SECONDS)
        try:
            look_at(place, self._context, seconds, self._told(place))
        except ConnectError:
            self._operators.check_named(url_of(place.where), self._party)

    def _told(self, place: Place) -> OnConnect:
        """Whom ``open_channel`` tells who is there."""
        return lambda sock: self._operators.check_distinct(url_of(place.where), sock, self._party)

    def _find(self) -> Mapping[str, Open]:
        """See ``LastingConnection``."""
        places = self._places.find()
        most = OPENING_SECONDS if len(places) > 1 else self._config.timeout
        found: dict[str, Open] = {}
        for place in places:  # executors in this process may all have one name
            name = str(place) if str(place) not in found else f"{place} ({len(found) + 1})"
            found[name] = partial(self._open, place, min(most, self._config.timeout))
        return found

    def _open(self, place: Place, opening: float) -> Channel:
        try:
            timeout = self._config.timeout
            return open_channel(place, self._token, self._context, timeout, self._told(place), opening)
        except ConnectError as error:
            self._explain(error, place)
            raise

    def _explain(self, error: ConnectError, place: Place) -> None:
        """Add to an error what the session's user can do about it."""
        if isinstance(error, TlsError) and error.untrusted:
            error.told += why_untrusted(self._ca, f"{self._of}ca")
        elif isinstance(error, AuthenticationError) and not isinstance(error.__cause__, OSError):
            given = Argument(f"{self._of}token", Word("TOKEN"))
            error.told += Message(". This one was given with {}", given)
        elif isinstance(error, NobodyListens):
            error.told += " `symbiosis-tenant doctor --wait SECONDS` waits for it"
        if self._of:
            named = error.message.startswith(url_of(place.where))
            error.told = Message("mask source {}{}", "" if named else f"{place}: ", error.told)
