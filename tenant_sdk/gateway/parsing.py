"""Reads large requests in a process beside the server: their JSON can take a second of a processor."""

from __future__ import annotations

import msgspec

from tenant_sdk.gateway.admission import Refusal
from tenant_sdk.gateway.helper_process import HelperProcess, answer
from tenant_sdk.gateway.requests import ParsedRequest, parse_request

_Request = tuple[str, bytes, int]
_Answer = tuple[ParsedRequest | None, Refusal | None]


class RequestParser(HelperProcess):
    """``requests.parse_request`` elsewhere, one call at a time."""

    def __init__(self) -> None:
        super().__init__("tenant_sdk.gateway.parsing")

    async def __call__(self, client: str, path: str, body: bytes, context: int) -> ParsedRequest | Refusal:
        """See ``requests.parse_request``."""
        encoded = await self.ask(client, msgspec.msgpack.encode((path, body, context)))
        if encoded is None:
            return Refusal(503, "overloaded", "the request could not be read; try again", 1)
        parsed, refusal = msgspec.msgpack.decode(encoded, type=_Answer)
        return parsed or refusal or Refusal(500, "server_error", "")


def _read(message: bytes) -> bytes:
    parsed = parse_request(*msgspec.msgpack.decode(message, type=_Request))
    pair = (None, parsed) if isinstance(parsed, Refusal) else (parsed, None)
    return msgspec.msgpack.encode(pair)


if __name__ == "__main__":
    answer(_read)
