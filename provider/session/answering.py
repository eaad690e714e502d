"""What every session does with a message, whether it multiplies itself or passes on. No sockets here."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable

import torch

from shared.errors import SymbiosisError, WireError
from shared.wire.header import Header, Operation
from shared.wire.messages import ErrorInfo, Hello, Manifest, decode, encode
from shared.wire.protocol import ExecutorProtocol
from shared.wire.websocket import Incoming, new_payload, tensor_bytes

log = logging.getLogger(__name__)

Send = Callable[[Header, "list[torch.Tensor] | bytes"], None]


class Session(abc.ABC):
    """Answers one tenant's requests, one at a time: what a connection needs to know of it.

    Args:
        tenant: for the log.
        manifest: of the executor.
        send: writes an answer; blocks until the carrier has taken it.
    """

    def __init__(self, tenant: str, manifest: Manifest, send: Send) -> None:
        self._tenant, self._send, self._manifest = tenant, send, manifest
        self._protocol = ExecutorProtocol(manifest)

    @abc.abstractmethod
    def accept(self, header: Header) -> None:
        """Check a request's header; nothing has been allocated yet.

        Raises:
            WireError: what is wrong, or ``overloaded``.
        """

    def allocate(self, header: Header) -> torch.Tensor:
        """Where the payload of an accepted request goes."""
        return new_payload(header)

    def answer(self, message: Incoming) -> None:
        """Answer one complete message, which may be an error.

        Raises:
            OSError, EOFError: the carrier broke.
            WireError: fatal.
        """
        header = message.header
        try:
            if message.error is not None:
                raise message.error
            if message.payload is None:
                raise WireError("payload_length", "the message has no payload")
            if header.operation == Operation.HELLO:
                hello = decode(tensor_bytes(message.payload), Hello)
                log.info("tenant %s connected with %.40r", self._tenant, hello.client)
                welcome = encode(self._manifest)
                self._send(
                    Header(Operation.WELCOME, request_id=header.request_id, rows=1, columns=len(welcome)),
                    welcome,
                )
            else:
                self._serve(header, message.payload)
        except WireError as error:
            if error.fatal:
                raise
            self.refuse(header.request_id, error)
        except (OSError, EOFError):
            raise  # the connection, not the request
        except Exception:
            # One request's failure is that request's alone; the peer learns nothing of its cause.
            log.exception("request of tenant %s failed", self._tenant)
            self.refuse(
                header.request_id, WireError("internal", "the executor failed on this request; report it")
            )
        finally:
            self._done(header)

    def refuse(self, request_id: int, error: SymbiosisError) -> None:
        """Answer with an error; request id 0 is for the whole session.

        Raises:
            OSError: the carrier broke.
        """
        self._count_refusal(error.code)
        data = encode(ErrorInfo(error.code, error.message, error.retry_after))
        self._send(Header(Operation.ERROR, request_id=request_id, rows=1, columns=len(data)), data)

    @abc.abstractmethod
    def close(self) -> None:
        """The tenant left, or its carrier broke, perhaps in the middle of a message."""

    @abc.abstractmethod
    def _serve(self, header: Header, payload: torch.Tensor) -> None:
        """Answer a product, effect or fetch."""

    @abc.abstractmethod
    def _done(self, header: Header) -> None:
        """A request was answered, or never will be."""

    @abc.abstractmethod
    def _count_refusal(self, code: str) -> None:
        """For the metrics."""
