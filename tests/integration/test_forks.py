"""Forked children: they send nothing and get no masks, whatever their process id; the parent goes on."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from channels import channel_to, error_of, submit
from conftest import RING, Executor
from forking import as_in_a_new_namespace, bytes_sent, fork, in_child, refused
from memory_sources import KEYS, SHAPES, Entropy, MemorySource, product
from parity import load_local
from raw_peers import SECONDS, Peer, eventually
from ring_sessions import (
    MASKINGS,
    ExecutorFactory,
    assert_no_block_repeats,
    captured_requests,
    one_time,
    products,
    seeds,
    session_in,
)
from test_noise_bank import FORWARD, MemoryExecutor, make_bank, tensors_for

from shared.ring.mask_stream import MaskStream
from shared.wire.header import Operation, RequestClass
from tenant_sdk import ConnectionLost, NoiseBankOptions
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.connection.websocket_channel import WebsocketChannel
from tenant_sdk.products.bank_masks import BankMasks
from tenant_sdk.products.masks import MaskGenerator, NoMasks
from tenant_sdk.products.one_time_masks import OneTimeMasks

pytest_plugins = ("ring_fixtures",)

IDS = torch.arange(3, 11).view(1, 8)


class MemoryBank(MemorySource):
    """Effects of masks, too."""

    def effect(self, key: ProductKey, masks: list[torch.Tensor]) -> list[torch.Tensor]:
        return [product(key, masks[0])]


def open_channels() -> list[WebsocketChannel]:
    return [o for o in gc.get_objects() if type(o) is WebsocketChannel and o._sock.fileno() >= 0]


@contextmanager
def locked(*locks: Any) -> Iterator[None]:
    """Another thread holds them, which a child does not have."""
    taken, leave = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in locks:
            lock.acquire()
        taken.set()
        assert leave.wait(SECONDS)
        for lock in locks:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(SECONDS)
    try:
        yield
    finally:
        leave.set()
        thread.join(SECONDS)


@pytest.mark.parametrize("masking", MASKINGS)
def test_a_child_with_its_parents_process_id_sends_nothing(
    masking: str, executors: ExecutorFactory, checkpoint: Callable[[str], Path]
) -> None:
    """And the parent goes on, with right answers under masks that nobody has seen."""
    expected = load_local(checkpoint("llama"))(IDS).logits
    options = {"mask_budget_mib": 0.0}  # or the store is filled meanwhile, which sends seeds
    with (
        captured_requests() as sent,
        session_in(masking, executors("llama"), checkpoint("llama"), **options) as session,
    ):
        model: Any = session.load_model(progress=False)
        torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-3, atol=1e-3)
        linear = model.model.layers[0].self_attn.q_proj
        layer, rows, remote = linear._group, torch.arange(128.0).view(2, 64), session.executor
        key = ProductKey(0, FORWARD, 1)
        in_flight = remote.submit_piece(
            remote.connection.channel, Operation.PRODUCT, key, [rows], RequestClass.UNDECLARED
        )
        remote.submit(Operation.PRODUCT, key, [rows + 128]).result()  # the one before is sent
        channels, requests = open_channels(), session.stats.requests
        before = [bytes_sent(channel._sock) for channel in channels]

        def child() -> None:
            refused(
                lambda: linear(rows),
                lambda: model(IDS),
                lambda: session.products.submit(layer.index, FORWARD, 1, [rows]).result(),
                lambda: remote.scales(0),
                lambda: session.load_model(progress=False),
                in_flight.result,
                *(lambda c=channel: submit(c) for channel in channels),  # type: ignore[misc]
                *(channel.ping for channel in channels),
            )
            for channel in channels:
                channel.close()
                assert channel._sock.fileno() == -1
            session.close()
            gc.collect()

        masks: Any = session.products._masks
        locks = [getattr(masks, name) for name in ("_lock", "_changed") if hasattr(masks, name)]
        with locked(remote.connection._reconnecting, remote.stats.lock, *locks, *(c._lock for c in channels)):
            in_child(child)
        assert [bytes_sent(channel._sock) for channel in channels] == before
        assert session.stats.requests == requests
        assert in_flight.result()[0].any()
        torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-3, atol=1e-3)
        assert session.stats.requests > requests
    if masking in ("one source", "two sources", "local"):
        assert_no_block_repeats(products(sent))
        assert len(set(seeds(sent))) == len(seeds(sent))


def test_a_child_of_a_channel_that_broke_does_not_connect_again(llama: Executor) -> None:
    with llama.connect() as session:
        remote = session.executor
        remote.connection.channel._break(ConnectionLost("broken for the test"))
        in_child(lambda: refused(lambda: remote.connection.channel, lambda: session.load_tokenizer()))


MASKS: dict[str, Callable[[], MaskGenerator]] = {
    "one-time": lambda: OneTimeMasks(SHAPES, [MemorySource()], budget_bytes=1 << 20, entropy=Entropy()),
    "bank": lambda: BankMasks(SHAPES, MemoryBank(), NoiseBankOptions(masks=4), Entropy()),
    "none": lambda: NoMasks(SHAPES),
}


@pytest.mark.parametrize("kind", MASKS)
def test_a_child_gets_no_masks_and_uses_none_of_its_parents(kind: str) -> None:
    """Neither from the store nor a mask, or a key stream, that it has in its hands."""
    masks: Any = MASKS[kind]()
    for _ in range(2):
        masks.take(KEYS[2], 3)
    mask, stream = masks.take(KEYS[2], 3), MaskStream(bytes(32))
    first = stream.draw(1, 4)

    def child() -> None:
        refused(
            lambda: masks.take(KEYS[2], 3),
            lambda: masks.take(KEYS[0], 1),
            mask.take_values,
            lambda: list(mask.effects()),
            lambda: stream.draw(1, 4),
        )
        masks.close()
        assert not hasattr(masks, "_store") or not masks._store.stock
        assert not hasattr(masks, "_banks") or not masks._banks._serving
        assert MaskStream(bytes(32)).draw(1, 4).equal(first)  # one of its own

    parts = [masks, getattr(masks, "_banks", None)]
    locks = [getattr(part, name, None) for part in parts for name in ("_lock", "_changed")]
    with locked(*filter(None, locks)):
        in_child(child)
    assert mask.take_values().shape[0] == 3
    assert list(mask.effects())
    assert not stream.draw(1, 4).equal(first)
    masks.close()


def test_a_child_that_nobody_told_of() -> None:
    """Forked by native code, it has another process id and nothing more to know itself by."""
    masks: Any = MASKS["one-time"]()
    mask = masks.take(KEYS[0], 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 0)
        refused(lambda: masks.take(KEYS[0], 1), mask.take_values)
    masks.close()


def test_a_child_has_no_bank_of_noise() -> None:
    executor = MemoryExecutor()
    bank = make_bank(executor)
    tensors = tensors_for(FORWARD, 1)
    bank.submit(0, FORWARD, 1, tensors).result()

    def child() -> None:
        refused(lambda: bank.submit(0, FORWARD, 1, tensors).result())
        assert not bank._banks._serving
        bank.close()

    with locked(bank._banks._lock):
        in_child(child)
    bank.submit(0, FORWARD, 1, tensors).result()
    bank.close()


def test_a_child_keeps_no_connection_of_its_parent_alive(tls_dir: Path, threads: ThreadPoolExecutor) -> None:
    """The parent closes: who waits is told at once, and the executor sees the end, while a child lives."""
    ended = threading.Event()

    def script(peer: Peer) -> None:
        while not peer.at_end():
            pass
        ended.set()

    read, write = os.pipe()
    with channel_to(tls_dir, script) as channel:
        waiting = threads.submit(channel.wait, submit(channel))
        eventually(lambda: channel._leading)
        with as_in_a_new_namespace():
            child = fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)  # until the parent lets go
            os._exit(0)
        try:
            channel.close()
            assert isinstance(error_of(waiting), ConnectionLost)
            assert ended.wait(SECONDS)
        finally:
            os.close(write)
            os.close(read)
            os.waitpid(child, 0)


def test_a_forked_data_loader(executors: ExecutorFactory, tmp_path: Path) -> None:
    """Workers are children; training in the parent goes on."""
    from test_trainer import adapt, losses, trainer

    provider, source, _ = executors("llama")
    with one_time(provider, source) as session:
        model = session.load_model(progress=False)
        run = trainer(adapt(model), tmp_path, max_steps=4, eval_strategy="no", dataloader_num_workers=2)
        run.train()
        assert len(losses(run)["loss"]) == 4
        assert session.stats.verified_rows > 0


SCRIPT = Path(__file__).parents[1] / "namespaced.py"


def test_a_child_in_a_process_id_namespace_of_its_own(
    serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    """Process 1 of a container forks process 1 of another."""
    unshare = ["unshare", "--pid", "--fork", "--kill-child"]
    try:
        tried = subprocess.run([*unshare, "true"], capture_output=True, text=True, timeout=800)
        problem = tried.stderr
    except FileNotFoundError as error:
        problem = str(error)
    if problem:
        pytest.skip(f"no namespaces here: {problem}")
    executor = serve(checkpoint("llama"), numerics=RING)
    command = [
        *unshare,
        sys.executable,
        str(SCRIPT),
        executor.url,
        str(executor.ca),
        str(checkpoint("llama")),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "TOKEN": executor.token, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["child", "1", "ok", "parent", "1", "ok"]
