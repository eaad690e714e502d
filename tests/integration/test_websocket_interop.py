"""Both ends against the ``websockets`` library, over real TLS."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from conftest import RING, Executor
from raw_peers import (
    BACKWARD,
    EFFECT,
    FETCH,
    FORWARD,
    HELLO,
    PRODUCT,
    REPLY,
    SECONDS,
    WELCOME,
    Fields,
    header,
    product,
)
from test_protocol import MANIFEST
from their_peers import Peer, dialled, serving
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, InvalidStatus
from websockets.protocol import Protocol

from shared.checkpoint import Checkpoint
from shared.errors import ConnectionLost
from shared.ring.mask_stream import MaskStream
from shared.wire.header import RINGS, Direction, Operation
from shared.wire.messages import encode
from tenant_sdk.connection.channel import Channel
from tenant_sdk.connection.handshake import client_context, open_connection
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.connection.remote import RemoteExecutor
from tenant_sdk.connection.replicas.reconnecting import single_replica
from tenant_sdk.connection.websocket_channel import WebsocketChannel

pytest_plugins = ("wire_fixtures",)

SEED_EFFECT = 8

# -- their client, our executor --------------------------------------------------------------------


def dial(executor: Executor, token: str | None = None) -> AbstractContextManager[Peer]:
    """A connection by the library's client, which offers compression as it does by default."""
    return dialled(executor.url, executor.ca, f"Bearer {token or executor.token}")


def receive(websocket: Peer) -> tuple[Fields, bytes]:
    """One message."""
    data = websocket.recv()
    assert isinstance(data, bytes)
    return Fields(*struct.unpack_from("<BBBBIIIIHHQ", data)), data[32:]


def control(operation: int, body: object) -> bytes:
    """A control message."""
    data = json.dumps(body).encode()
    return header(operation, rows=1, columns=len(data)) + data


def rows_of(count: int, columns: int = 64, seed: int = 0) -> torch.Tensor:
    """Random rows."""
    return torch.randn((count, columns), generator=torch.Generator().manual_seed(seed))


def check_product(data: bytes, rows: torch.Tensor, weight: torch.Tensor) -> None:
    """``data`` is the product of the rows."""
    got = torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(len(rows), -1)
    torch.testing.assert_close(got, rows @ weight.T)


def test_their_client_gets_products(llama: Executor, weight: torch.Tensor) -> None:
    with dial(llama) as websocket:
        assert websocket.library.subprotocol == "symbiosis.v4"
        assert websocket.library.protocol.extensions == []
        websocket.send(control(HELLO, {"client": "websockets"}))
        fields, body = receive(websocket)
        assert (fields.operation, fields.request_id) == (WELCOME, 1)
        manifest = json.loads(body)
        assert manifest["groups"][0]["members"][0]["outputs"] == 64
        for count in (1, 2, 400):  # below and above one TLS record
            rows = rows_of(count)
            websocket.send(product(count, 64) + rows.numpy().tobytes())
            fields, body = receive(websocket)
            assert fields[1:] == (REPLY, FORWARD, 1, 0, 7, count, 64, 0, 0, 1)
            check_product(body, rows, weight)
        websocket.send(control(FETCH, {"kind": "file", "name": "config.json", "start": 0, "stop": 20}))
        assert receive(websocket)[1][:1] == b"{"
    assert (websocket.library.close_code, websocket.library.close_reason) == (1000, "")


def test_backward_takes_blocks_member_by_member(llama: Executor, checkpoint: Callable[[str], Path]) -> None:
    read = Checkpoint(checkpoint("llama")).read
    q, v = (read(f"model.layers.0.self_attn.{name}_proj.weight") for name in "qv")
    gradients = [rows_of(5, 64), rows_of(5, 32, seed=1)]
    with dial(llama) as websocket:
        websocket.send(control(HELLO, {"client": "websockets"}))
        receive(websocket)
        head = product(5, 96, direction=BACKWARD, members=0b101)
        websocket.send(head + b"".join(tensor.numpy().tobytes() for tensor in gradients))
        fields, body = receive(websocket)
        assert (fields.rows, fields.columns, fields.members) == (5, 64, 0b101)
        got = torch.frombuffer(bytearray(body), dtype=torch.float32).reshape(5, 64)
        torch.testing.assert_close(got, gradients[0] @ q + gradients[1] @ v)


def test_their_client_gets_integers(
    serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    """On the ring a seed's effect is that of its mask, and a product of masked rows is what is left."""
    x = torch.arange(-160, 160, dtype=torch.int32).view(5, 64)
    mask = MaskStream(bytes(range(32))).draw(5, 64)
    fields = {"direction": FORWARD, "dtype": 6, "members": 0b11, "rows": 5, "columns": 64, "request_id": 7}
    with dial(serve(checkpoint("llama"), numerics=RING)) as websocket:
        websocket.send(control(HELLO, {"client": "websockets"}))
        manifest = json.loads(receive(websocket)[1])
        assert (manifest["numerics"], manifest["wire_dtypes"]) == (RING, ["int32"])
        assert all(len(group["bounds"]) == 2 for group in manifest["groups"])
        answers = []
        for operation, payload in (
            (SEED_EFFECT, bytes(range(32))),
            (EFFECT, mask),
            (PRODUCT, x + mask),
            (PRODUCT, x),
        ):
            sent = payload if isinstance(payload, bytes) else payload.numpy().tobytes()
            websocket.send(header(operation, **fields) + sent)
            head, body = receive(websocket)
            assert head[1:] == (REPLY, FORWARD, 6, 0, 7, 5, RINGS[RING] * (64 + 32), 0, 32, 0b11)
            answers.append(torch.frombuffer(bytearray(body), dtype=torch.int32))
        seeded, effect, masked, plain = answers
        assert torch.equal(seeded, effect)
        assert torch.equal(masked - effect, plain)


@pytest.mark.parametrize("piece", [1, 33, 5000])
def test_their_fragments(llama: Executor, weight: torch.Tensor, piece: int) -> None:
    rows = rows_of(20 if piece > 1 else 1)
    data = product(len(rows), 64) + rows.numpy().tobytes()
    with dial(llama) as websocket:
        websocket.send(control(HELLO, {"client": "websockets"}))
        receive(websocket)
        websocket.send([data[at : at + piece] for at in range(0, len(data), piece)])
        check_product(receive(websocket)[1], rows, weight)


def test_pings_are_answered_also_inside_a_message(llama: Executor, weight: torch.Tensor) -> None:
    rows = rows_of(3)
    data = product(3, 64) + rows.numpy().tobytes()
    with dial(llama) as websocket:
        websocket.ping(b"before")
        websocket.send(control(HELLO, {"client": "websockets"}))
        receive(websocket)

        def inside(protocol: Protocol) -> None:  # where the library sends none
            protocol.send_binary(data[:50], fin=False)
            protocol.send_ping(b"inside")
            protocol.send_continuation(data[50:], fin=True)

        websocket.write(inside)
        check_product(receive(websocket)[1], rows, weight)
        websocket.ping(b"after")


def test_close_codes_say_why(llama: Executor) -> None:
    def code_after(send: Callable[[Peer], None]) -> tuple[str, int, str]:
        with dial(llama) as websocket:
            websocket.send(control(HELLO, {"client": "websockets"}))
            receive(websocket)
            send(websocket)
            fields, body = receive(websocket)
            assert fields.request_id == 0
            with pytest.raises(ConnectionClosedError) as caught:
                receive(websocket)
        assert caught.value.rcvd is not None
        return json.loads(body)["code"], caught.value.rcvd.code, caught.value.rcvd.reason

    def oversized(websocket: Peer) -> None:
        websocket.write_raw(struct.pack("!BBQ", 0x82, 0xFF, 1 << 40) + os.urandom(4))

    assert code_after(lambda w: w.send("text")) == ("text", 1002, "text")
    assert code_after(lambda w: w.send(b"short")) == ("header", 1002, "header")
    assert code_after(lambda w: w.send(b"\1" + bytes(31))) == ("protocol_version", 1002, "protocol_version")
    assert code_after(oversized) == ("too_large", 1009, "too_large")


def test_draining_closes_with_1001(serve: Callable[..., Executor], checkpoint: Callable[[str], Path]) -> None:
    executor = serve(checkpoint("llama"))
    assert executor.server is not None
    with dial(executor) as websocket:
        assert executor.server.drain(SECONDS)
        with pytest.raises(ConnectionClosed) as caught:
            websocket.recv()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1001


def test_their_client_is_told_what_the_handshake_lacks(llama: Executor) -> None:
    with pytest.raises(InvalidStatus) as caught:
        dial(llama, token="wrong").__enter__()
    assert caught.value.response.status_code == 401
    assert json.loads(caught.value.response.body or b"")["code"] == "unauthorized"


# -- our tenant, their server ----------------------------------------------------------------------


@contextmanager
def their_server(tls_dir: Path, handler: Callable[[Peer], None]) -> Iterator[str]:
    """A websocket server by the library; yields its URL. What the handler raises is raised at the end."""
    failures: list[BaseException] = []

    def run(websocket: Peer) -> None:
        try:
            handler(websocket)
        except ConnectionClosed:
            pass
        except BaseException as error:
            failures.append(error)

    with serving(run, tls_dir) as url:
        yield url
    if failures:
        raise failures[0]


def open_channel(url: str, tls_dir: Path) -> Channel:
    """The tenant's connection."""
    sock = open_connection(url, "token", client_context(tls_dir / "ca.pem"), SECONDS)
    return WebsocketChannel(sock, url, timeout=SECONDS, entropy=os.urandom)


def welcome(websocket: Peer) -> None:
    """Answer HELLO."""
    fields, body = receive(websocket)
    assert fields.operation == HELLO
    assert set(json.loads(body)) == {"client"}
    manifest = encode(MANIFEST)
    websocket.send(header(WELCOME, rows=1, columns=len(manifest)) + manifest)


def ask(remote: RemoteExecutor, rows: torch.Tensor) -> torch.Tensor:
    """The product of group 1, whose only member has 6 outputs."""
    (result,) = remote.submit(Operation.PRODUCT, ProductKey(1, Direction.FORWARD, 1), [rows]).result()
    return result


def reply(fields: Fields, body: bytes) -> bytes:
    """Six columns of the request's first column."""
    rows = torch.frombuffer(bytearray(body), dtype=torch.float32).reshape(fields.rows, 16)
    head = struct.pack("<BBBBIIIIHHQ", *fields._replace(operation=REPLY, columns=6))
    return head + rows[:, :1].expand(-1, 6).contiguous().numpy().tobytes()


@pytest.mark.parametrize("count", [1, 99])
def test_their_server_gets_what_it_can_read(tls_dir: Path, count: int) -> None:
    requests: list[Fields] = []

    def handler(websocket: Peer) -> None:
        welcome(websocket)
        while True:
            fields, body = receive(websocket)
            requests.append(fields)
            websocket.send(reply(fields, body))

    with their_server(tls_dir, handler) as url:
        channel = open_channel(url, tls_dir)
        remote = RemoteExecutor(single_replica(lambda: channel))
        rows = rows_of(count, 16)
        assert torch.equal(ask(remote, rows), rows[:, :1].expand(-1, 6))
        channel.ping()
        remote.close()
    assert [f[1:] for f in requests] == [(PRODUCT, FORWARD, 1, 1, 2, count, 16, 0, 0, 1)]


@pytest.mark.parametrize("piece", [1, 33, 5000])
def test_their_fragments_and_pings_reach_the_tenant(tls_dir: Path, piece: int) -> None:
    def handler(websocket: Peer) -> None:
        welcome(websocket)
        fields, body = receive(websocket)
        websocket.ping(b"are you there")
        data = reply(fields, body)
        parts = [data[at : at + piece] for at in range(0, len(data), piece)]

        def answer(protocol: Protocol) -> None:
            for at, part in enumerate(parts):
                (protocol.send_continuation if at else protocol.send_binary)(part, fin=False)
                protocol.send_ping(str(at).encode())
            protocol.send_continuation(b"", fin=True)

        websocket.write(answer)
        receive(websocket)  # until the tenant leaves

    with their_server(tls_dir, handler) as url:
        remote = RemoteExecutor(single_replica(lambda: open_channel(url, tls_dir)))
        rows = rows_of(1 if piece == 1 else 99, 16)
        assert torch.equal(ask(remote, rows), rows[:, :1].expand(-1, 6))
        remote.close()


@pytest.mark.parametrize(("code", "words"), [(1001, "shutting down"), (1011, "code 1011")])
def test_their_close_code_is_in_the_error(tls_dir: Path, code: int, words: str) -> None:
    def handler(websocket: Peer) -> None:
        welcome(websocket)
        receive(websocket)
        websocket.close(code)

    with their_server(tls_dir, handler) as url:
        remote = RemoteExecutor(single_replica(lambda: open_channel(url, tls_dir)))
        with pytest.raises(ConnectionLost, match=words) as caught:
            ask(remote, rows_of(1, 16))
        assert caught.value.retry_after is not None
        with pytest.raises(ConnectionLost, match=words):
            ask(remote, rows_of(1, 16))
        remote.close()


def test_our_close_is_a_normal_one(tls_dir: Path) -> None:
    codes: list[int | None] = []

    def handler(websocket: Peer) -> None:
        welcome(websocket)
        with pytest.raises(ConnectionClosed) as caught:
            receive(websocket)
        codes.append(caught.value.rcvd.code if caught.value.rcvd else None)

    with their_server(tls_dir, handler) as url:
        RemoteExecutor(single_replica(lambda: open_channel(url, tls_dir))).close()
    assert codes == [1000]
