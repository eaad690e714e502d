"""Executor and tenant on one machine: hostile tenants."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from raw_colocated import RawTenant, memories, request_session
from raw_colocated import ones_product as product
from raw_peers import (
    FETCH,
    HELLO,
    REPLY,
    eventually,
    header,
)
from raw_peers import (
    product as product_header,
)
from transports import Start, TransportServers

from shared.errors import (
    ConnectError,
    RequestRefused,
)

pytest_plugins = ("transport_fixtures", "wire_fixtures")

ROW = 64 * 4  # bytes


# -- hostile tenants -------------------------------------------------------------------------------

HUGE = 2**64 - 1


@pytest.mark.parametrize(
    ("at", "answer_at"),
    [
        (HUGE, 0),
        (HUGE - ROW + 1, 0),
        (1 << 63, 0),
        (1 << 20, 0),  # the end of the memory
        ((1 << 20) - 64, 0),  # over it
        (1, 0),
        (63, 0),
        (0, HUGE),
        (0, 1 << 20),
        (0, (1 << 20) - 192),
        (0, 4),
    ],
)
def test_places_outside_of_the_memory(one: TransportServers, all_well: None, at: int, answer_at: int) -> None:
    with RawTenant(one.directory, one.token) as raw:
        raw.hello()
        raw.ask(product_header(1, 64), at, answer_at)
        assert raw.hear_error() == (7, "place")
        raw.ask(product_header(1, 64), 0, 0)  # one over the other is the tenant's own affair
        assert raw.read_answer().operation == REPLY


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (product_header(2**32 - 1, 64), "too_large"),
        (product_header(2**32 - 1, 2**32 - 1), "width"),
        (product_header(1, 63), "width"),
        (product_header(0, 64), "zero_rows"),
        (product_header(1 << 14, 64), "place"),  # within the limits, but not within the memory
        (product_header(1, 64, dtype=6), "dtype"),
        (header(99, request_id=7), "operation"),
        (header(REPLY, request_id=7), "operation"),
        (header(HELLO, request_id=7, rows=1, columns=2), "payload_length"),
        (header(FETCH, request_id=7, rows=1, columns=2**32 - 1), "payload_length"),
    ],
)
def test_headers_that_lie(one: TransportServers, all_well: None, head: bytes, code: str) -> None:
    with RawTenant(one.directory, one.token) as raw:
        raw.hello()
        raw.ask(head, 0, 0)
        assert raw.hear_error() == (7, code)
        raw.ask(product_header(1, 64), 0, 0)
        assert raw.read_answer().operation == REPLY


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\1", "header"),
        (b"\1" * 47, "header"),
        (b"\1" * 48, "protocol_version"),
        (b"\0", "header"),
        (b"\0" * 10, "header"),
        (product_header(1, 64) + bytes(16), "unexpected"),
    ],
)
def test_messages_that_are_none(one: TransportServers, all_well: None, data: bytes, code: str) -> None:
    with RawTenant(one.directory, one.token) as raw:
        if code != "unexpected":  # a product before HELLO
            raw.hello()
        raw.socket.send(data)
        assert raw.hear_error() == (0, code)
        assert raw.hear() == b""
        raw.socket.close()


def test_half_a_message_in_the_pipe(one: TransportServers, all_well: None) -> None:
    with RawTenant(one.directory, one.token) as raw:
        raw.hello()
        os.write(raw.requests, product_header(1, 64))
        assert raw.hear_error() == (0, "header")


def test_messages_over_the_limit_end_the_session(one: TransportServers, all_well: None) -> None:
    """ZeroMQ drops such a connection by itself; the pipe says when the tenant has gone."""
    with RawTenant(one.directory, one.token) as raw:
        raw.hello()
        raw.say(header(FETCH, request_id=7, rows=1, columns=1 << 20), bytes(1 << 20))


def test_many_parts_are_many_messages(one: TransportServers, all_well: None) -> None:
    with RawTenant(one.directory, one.token) as raw:
        raw.hello()
        raw.socket.send_multipart([header(99, request_id=7) + bytes(16)] * 3)
        assert [raw.hear_error() for _ in range(3)] == [(7, "operation")] * 3


def test_a_tenant_that_reads_no_answers(one: TransportServers, all_well: None) -> None:
    with RawTenant(one.directory, one.token) as raw:
        raw.hello()
        with contextlib.suppress(BrokenPipeError):
            for _ in range(1 << 16):
                raw.ask(product_header(1, 64), 0, 0)
        eventually(lambda: one.metric("symbiosis_connections") == 1)


def test_nobody_can_cut_the_memory_off(one: TransportServers, all_well: None) -> None:
    with RawTenant(one.directory, one.token) as raw:
        raw.hello()
        for size in (0, 4096, raw.opened["size"] - 1):
            with pytest.raises(PermissionError):
                os.ftruncate(raw.memory, size)
        os.ftruncate(raw.memory, 1 << 30)  # of no use: the executor goes by what it knows
        raw.ask(product_header(1, 64), 1 << 29, 0)
        assert raw.hear_error() == (7, "place")
        with pytest.raises(PermissionError):
            os.ftruncate(raw.memory, raw.opened["size"])


def test_memory_is_bounded_by_the_limits(one: TransportServers, all_well: None) -> None:
    most = 4 * one.service.executor.manifest.limits.max_message_bytes
    with RawTenant(one.directory, one.token) as raw:
        raw.hello()
        assert raw.opened["max_size"] == most
        for asked, given in (
            (0, 1 << 20),
            (HUGE, 1 << 20),
            (most + 1, 1 << 20),
            (1 << 22, 1 << 22),
            (1, 1 << 22),
        ):
            raw.socket.send(struct.pack("<BQ", 0, asked))
            assert struct.unpack("<BQ", raw.hear()) == (0, given)
            assert os.fstat(raw.memory).st_size == given


def test_memory_of_all_is_bounded(everywhere: Start, checkpoint: Callable[[str], Path]) -> None:
    tight = everywhere(checkpoint("llama"), memory_bytes=4 << 20)
    with tight.connect("colocated") as first:
        product(first, 4000)  # grows by 2 MiB
        with tight.connect("colocated", timeout=10.0) as second:
            with pytest.raises(RequestRefused, match="no more shared memory") as caught:
                product(second, 4000)
            assert (caught.value.code, caught.value.retry_after) == ("overloaded", 1.0)
            product(second)
            with pytest.raises(ConnectError, match="no shared memory for another"):
                tight.connect("colocated")
            first.close()
            eventually(lambda: tight.metric("symbiosis_connections") == 1)
            product(second, 4000)


def test_a_tenant_that_is_killed_with_memory_mapped(one: TransportServers, all_well: None) -> None:
    script = (
        "import sys, torch, tenant_sdk\n"
        "from shared.wire.header import Direction, Operation\n"
        "from tenant_sdk.connection.keys import ProductKey\n"
        "session = tenant_sdk.connect(sys.argv[1], token=sys.argv[2], privacy='plain')\n"
        "x, key = torch.ones(20000, 64), ProductKey(0, Direction.FORWARD, 1)\n"
        "session.executor.submit(Operation.PRODUCT, key, [x]).result()\n"
        "print('there', flush=True)\n"
        "while True:\n"
        "    session.executor.submit(Operation.PRODUCT, key, [x]).result()\n"
    )
    command = [sys.executable, "-c", script, one.local.url, one.token]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as tenant:
        try:
            assert tenant.stdout is not None
            assert tenant.stdout.readline() == b"there\n"
            assert memories() == 2
        finally:
            tenant.kill()
    eventually(lambda: memories() == 1)


def test_a_tenant_that_never_comes_in(one: TransportServers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provider.serve.colocated.FIRST_MESSAGE_MILLISECONDS", 20)
    assert request_session(one.directory, b"symbiosis.v4", one.token.encode())[0] == b"opened"
    eventually(lambda: os.listdir(one.directory) == ["door"])


def test_a_tenant_that_leaves_out_the_pipe(one: TransportServers, all_well: None) -> None:
    """Whose death nobody would notice."""
    opened = request_session(one.directory, b"symbiosis.v4", one.token.encode())[1]
    with zmq.Context.instance().socket(zmq.PAIR) as socket:
        socket.linger = 0
        socket.connect(f"ipc://{one.directory}/{opened['session']}")
        socket.send(b"\0" * 9)
        assert socket.poll(60_000)
        eventually(lambda: one.metric("symbiosis_connections") == 1)
