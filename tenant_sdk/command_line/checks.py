"""The findings of `doctor`: results for each step, for executors together, and for replicas of a party."""

from __future__ import annotations

import ssl
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

from shared.errors import ConfigurationError, OptionText, SymbiosisError
from shared.wire.header import DTYPE_NAMES
from shared.wire.messages import Manifest
from tenant_sdk.command_line.options import SessionRules, Target
from tenant_sdk.connection.handshake import client_context
from tenant_sdk.connection.remote import RemoteExecutor
from tenant_sdk.connection.replicas.addresses import Address, Resolver
from tenant_sdk.connection.replicas.reconnecting import single_replica
from tenant_sdk.connection.transports import open_channel, probe_executor
from tenant_sdk.connection.urls import url_of
from tenant_sdk.trust.operators import Operators


@dataclass(frozen=True)
class CheckResult:
    """One step. ``ok`` None: not checked, or it deserves attention. ``remedy``: what to do about it."""

    step: str
    ok: bool | None
    detail: OptionText
    remedy: OptionText

    def __init__(self, step: str, ok: bool | None, detail: str, remedy: str = "") -> None:
        for name, value in (
            ("step", step),
            ("ok", ok),
            ("detail", _as_option_text(detail)),
            ("remedy", _as_option_text(remedy)),
        ):
            object.__setattr__(self, name, value)


def _as_option_text(text: str) -> OptionText:
    return text if isinstance(text, OptionText) else OptionText("{}", text)


class Comparison:
    """What has been learned of several executors, for comparing them.

    Attributes:
        manifests: by ``Target.party``.
        refused: why a session would not take these parties together, in its words.
    """

    def __init__(self, rules: SessionRules) -> None:
        self.rules, self.operators, self.refused = rules, Operators(rules.masks_allow), OptionText()
        self.manifests: dict[str, Manifest] = {}

    def meet(self, url: str, sock: ssl.SSLSocket | None, party: Hashable) -> None:
        """Compare a new executor with those of other parties, as a session does; refusal ends nothing."""
        try:
            self.operators.check_distinct(url, sock, party)
        except ConfigurationError as error:
            self.refused = self.refused or error.structured_message


class ReplicaChecks:
    """Iterated, tells of each replica of a party whether a session could use it; of a lone one nothing.

    Args:
        target: the party.
        comparison: told who is there.
        party: who that is to the comparison.

    Attributes:
        usable: at the end of the iteration, the first replica that can be used; if there is none, the first.
    """

    def __init__(self, target: Target, comparison: Comparison, party: Hashable) -> None:
        self.usable = target
        self._target, self._comparison, self._party = target, comparison, party

    def __iter__(self) -> Iterator[CheckResult]:
        """One result for each."""
        target = self._target
        addresses = Resolver(target.replicas or (target.url,)).resolve()
        if len(addresses) < 2:
            return
        try:
            option = "mask_source_ca" if target.source else "ca"
            self._context = client_context(target.authority, target.client_certificate, option)
            self._token = target.secret
        except ConfigurationError:
            return  # all of them have the same; the steps to come say what is wrong
        served: Manifest | None = None
        for address in addresses:
            try:
                started = time.perf_counter()
                manifest = self._probe(address)
                milliseconds = (time.perf_counter() - started) * 1e3
            except SymbiosisError as error:
                what = OptionText("{} cannot be used: {}", str(address), error.structured_message)
                yield CheckResult("replica", None, what, "sessions use the others; ask its operator")
                continue
            if manifest is not None and served is not None and manifest != served:
                text = "{} serves something else than {}, so sessions refuse it"
                what = OptionText(text, str(address), str(self.usable.replica))
                remedy = "replicas serve the same checkpoint with the same options: ask its operator"
                yield CheckResult("replica", False, what, remedy)
                continue
            if served is None:
                served = manifest
                self.usable = replace(target, url=url_of(address.target), address=address.ip)
            how = "can be used" if self._token else "answers; without a token no more can be said"
            yield CheckResult(
                "replica", True, f"{address} {how} ({milliseconds:.1f} ms to connect and greet)"
            )

    def _probe(self, address: Address) -> Manifest | None:
        """What it serves; None: that takes a token."""
        target, url = self._target, url_of(address.target)

        def meet(sock: ssl.SSLSocket | None) -> None:
            self._comparison.meet(url, sock, self._party)

        if not self._token:
            probe_executor(address, self._context, target.timeout, meet)
            return None
        channel = open_channel(address, self._token, self._context, target.timeout, meet)
        try:
            return RemoteExecutor(
                single_replica(lambda: channel, str(address)), DTYPE_NAMES[target.wire_dtype]
            ).manifest
        finally:
            channel.close()
