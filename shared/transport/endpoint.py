"""An executor in the tenant's own process, which ``tenant_sdk.connect`` takes in place of a URL.

For tests and notebooks. Messages are those of ``shared/PROTOCOL.md``, header by header, but nothing carries
them: a request is a call, and its answer another one, before the first returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

OnAnswer = Callable[
    [bytes, "torch.Tensor"], None
]  # a header's 32 bytes, and the payload, which is the taker's


class EndpointSession(Protocol):
    """One open session; one thread at a time."""

    def request(self, header: bytes, payload: torch.Tensor) -> None:
        """Answer a request, by a call of the ``on_answer`` that ``open`` was given.

        Args:
            header: 32 bytes.
            payload: contiguous, with as many bytes as the header says, of whatever shape; not changed.

        Raises:
            OSError: the session or the executor has ended.
        """
        ...

    def close(self) -> None:
        """End it."""
        ...


@runtime_checkable
class Endpoint(Protocol):
    """Opens sessions; any thread may.

    Attributes:
        url: what to call it in messages.
    """

    url: str

    def open(self, token: str, on_answer: OnAnswer) -> EndpointSession:
        """A session for the tenant that holds this token.

        Raises:
            ConnectError: it is closed.
            AuthenticationError: it asks for a token, and this is none of those.
        """
        ...
