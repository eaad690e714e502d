"""Sockets that listen, and to which nobody can connect."""

from __future__ import annotations

import socket
import subprocess
import sys

from commands import ENVIRONMENT, ROOT, SECONDS
from raw_peers import ESTABLISHED, SYN_SENT, connecting

from shared.listeners import drop_all_packets

GROUP = """
import os, socket, sys, tempfile
import torch.distributed as distributed
from shared.listeners import groups_without_listeners

with tempfile.TemporaryDirectory() as folder:
    mine = socket.create_server(("127.0.0.1", 0))
    with groups_without_listeners():
        distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
        distributed.new_group([0], backend="gloo")
    print("{}:{}".format(*mine.getsockname()), flush=True)
    ports = []
    for name in os.listdir("/proc/self/fd"):
        try:
            each = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        if each.family == socket.AF_INET and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            ports.append(each.getsockname()[:2])
    ports.remove(mine.getsockname())
    print(*(f"{host}:{port}" for host, port in ports), flush=True)
    sys.stdin.read()
    distributed.barrier()
    print("alive")
"""


def test_nobody_can_connect() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert connecting(listener.getsockname()) == ESTABLISHED
        drop_all_packets(listener)
        assert connecting(listener.getsockname()) == SYN_SENT


def test_the_sockets_of_a_process_group() -> None:
    """Those of vLLM's worker, which would end with SIGABRT when strangers have taken all its descriptors."""
    process = subprocess.Popen(
        [sys.executable, "-c", GROUP],
        env=ENVIRONMENT,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        host, _, port = process.stdout.readline().strip().rpartition(":")
        assert connecting((host, int(port))) == ESTABLISHED  # one that was there before
        found = process.stdout.readline().split()
        assert found
        for each in found:
            host, _, port = each.rpartition(":")
            assert connecting((host, int(port))) == SYN_SENT
        out, _ = process.communicate("", timeout=SECONDS)
    finally:
        process.kill()
        process.wait()
    assert out == "alive\n"
