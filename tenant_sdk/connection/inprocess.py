"""A channel to an executor in this process."""

from __future__ import annotations

import torch

from shared.errors import ConnectionLost
from shared.forks import register_for_fork
from shared.transport.endpoint import Endpoint
from shared.wire.header import Header, parse_header
from shared.wire.incoming import Incoming
from tenant_sdk.connection.channel import Channel, ResponseFuture


class InprocessChannel(Channel):
    """See Channel. The leader computes the answers itself, so there is always progress.

    Args:
        endpoint: the executor.
        token: if it asks for one.
        timeout: see Channel.

    Raises:
        ConnectError: it is closed, or refuses the token.
    """

    def __init__(self, endpoint: Endpoint, token: str, timeout: float) -> None:
        super().__init__(endpoint.url, timeout)
        self._session = endpoint.open(token, self._answered)
        register_for_fork(self)

    def _message(self, header: Header, tensors: list[torch.Tensor] | bytes) -> tuple[bytes, torch.Tensor]:
        if isinstance(tensors, bytes):
            payload = torch.frombuffer(bytearray(tensors), dtype=torch.uint8)
        elif len(tensors) == 1:
            payload = tensors[0].detach()
        else:
            payload = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        return header.pack(), payload

    def _ping_message(self) -> None:
        return None

    def _send(self) -> None:
        """Send nothing: between the two there is no buffer that could take it."""

    def _lead(self, pending: ResponseFuture) -> None:
        while not pending.done:
            with self._lock:
                if not self._outbox:
                    raise ConnectionLost(f"{self.peer} did not answer")
                message = self._outbox.popleft()
                pong = self._pongs.popleft() if message is None else None
            if pong is not None:
                pong.finish(None, None)
            else:
                self._session.request(*message)

    def _answered(self, head: bytes, payload: torch.Tensor) -> None:
        header = parse_header(head)
        self._protocol.accept(header)
        self._handle(Incoming(header, payload))

    def _wake_leader(self) -> None:
        """Do nothing: the leader never sleeps."""

    def _send_close(self) -> None:
        """Do nothing: the executor waits for no such message."""

    def _shut(self) -> None:
        self._session.close()
