"""Process 1 of a process id namespace opens a session and forks process 1 of another.

Run by ``test_forks.py``: URL, authority and checkpoint are arguments; the token is in the environment.
"""

from __future__ import annotations

import ctypes
import os
import ssl
import sys

import torch

import tenant_sdk
from shared.wire.header import Direction
from tenant_sdk.connection.handshake import client_context
from tenant_sdk.connection.keys import ProductKey

CLONE_NEWPID = 0x20000000


def check(condition: bool, what: str) -> None:
    if not condition:
        print("not", what, flush=True)
        os._exit(1)


def in_child(session: tenant_sdk.Session, told: int) -> None:
    masks = session.products._masks  # type: ignore[attr-defined]
    for what, action in {
        "take": lambda: masks.take(ProductKey(0, Direction.FORWARD, 1), 1),
        "ping": lambda: session.executor.connection.channel.ping(),
        "product": lambda: session.groups[0].plain_product(Direction.FORWARD, 1, (torch.ones(1, 64),)),
    }.items():
        try:
            action()
        except tenant_sdk.ConnectionLost:
            continue
        check(False, f"{what} refused")
    session.close()
    os.write(told, ssl.RAND_bytes(8))
    client_context(None)
    os.write(told, ssl.RAND_bytes(8))
    print("child", os.getpid(), "ok", flush=True)


def main() -> None:
    url, ca, folder = sys.argv[1:]
    session = tenant_sdk.connect(
        url, token=os.environ["TOKEN"], ca=ca, mask_sources=[f"local:{folder}"], mask_budget_mib=0
    )
    layer, rows = session.groups[0], torch.ones(1, 64)
    before = layer.plain_product(Direction.FORWARD, 1, (rows,))[0]
    read, write = os.pipe()
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/pid", os.O_RDONLY)
    check(libc.unshare(CLONE_NEWPID) == 0, "allowed to make a namespace")
    child = os.fork()
    if child == 0:
        in_child(session, write)
        sys.exit(0)  # with all that an interpreter does at its end
    check(libc.setns(home, 0) == 0, "back")  # or no thread could be started
    check(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "a child that ended well")
    own = ssl.RAND_bytes(8), ssl.RAND_bytes(8)
    random = os.read(read, 16)
    check(random[8:] not in own, "random bytes of its own for TLS")
    check(
        torch.equal(layer.plain_product(Direction.FORWARD, 1, (rows,))[0], before),
        "the same product afterwards",
    )
    session.close()
    print("parent", os.getpid(), "ok", flush=True)


main()
