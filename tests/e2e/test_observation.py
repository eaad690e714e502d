"""What an executor's process tells its operator of a real session: usage, logs, states, metrics."""

from __future__ import annotations

import csv
import io
import json
import re
import signal
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import peft
import pytest
import torch
from conftest import RING, TENANT, Executor
from raw_peers import SECONDS, eventually
from ring_sessions import one_time

from tenant_sdk import Session

ROOT = Path(__file__).parents[2]
CLASSES = {"decode", "prefill", "finetuning"}


def page(executor: Executor, path: str) -> str:
    return urllib.request.urlopen(executor.admin_url + path, timeout=800).read().decode()  # type: ignore[no-any-return]


def used(text: str, classes: set[str] = CLASSES) -> dict[str, float]:
    """The sums of a usage table's columns over the lines of these request classes."""
    lines = [line for line in csv.DictReader(io.StringIO(text)) if line["request_class"] in classes]
    assert {line["tenant"] for line in lines} <= {TENANT}
    names = ("requests", "rows", "received_bytes", "sent_bytes", "product_seconds")
    return {name: sum(float(line[name]) for line in lines) for name in names}


def learn_and_speak(session: Session) -> None:
    """One training step, and three tokens."""
    lora = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(session.load_model(progress=False), lora)
    ids = torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(1))
    model(input_ids=ids, labels=ids).loss.backward()
    model.eval().generate(input_ids=ids, max_new_tokens=3, do_sample=False)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """What executors tell their supervisor."""
    address = f"/tmp/notify-{tmp_path.name[-20:]}"
    Path(address).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(address)
        sock.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", address)

        def received() -> list[str]:
            found = []
            try:
                while True:
                    found.append(sock.recv(4096).decode())
            except BlockingIOError:
                return found

        yield received
    Path(address).unlink()


def test_usage_is_what_the_tenants_own_session_counted(
    serve_process: Callable[..., Executor],
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    told: Callable[[], list[str]],
) -> None:
    files = [tmp_path / f"usage-{i}.csv" for i in range(2)]
    options = ("--numerics", RING, "--log-format", "json", "--usage-file")
    provider, source = (serve_process(checkpoint("llama"), *options, str(file)) for file in files)
    assert told() == ["READY=1", "READY=1"]
    with one_time(provider, source) as session:
        learn_and_speak(session)
        # What is fetched ahead when a session ends, its source may have counted and the tenant not.
        eventually(lambda: session.products._masks.idle)  # type: ignore[attr-defined]
    stats = session.stats
    expected = stats.bytes_sent, stats.bytes_received
    eventually(lambda: used(page(provider, "/usage.csv"))["requests"] == stats.requests)
    eventually(lambda: used(page(source, "/usage.csv"))["requests"] == stats.effect_requests)
    tables = [page(each, "/usage.csv") for each in (provider, source)]
    products, effects = map(used, tables)
    assert (products["rows"], effects["rows"]) == (stats.rows, stats.effect_rows)
    assert tuple(products[way] + effects[way] for way in ("received_bytes", "sent_bytes")) == expected
    assert 0 < products["product_seconds"] < SECONDS
    decoded = used(tables[0], {"decode"})
    assert 0 < decoded["rows"] < used(tables[0], {"finetuning"})["rows"] < stats.rows
    downloads = used(tables[0], {"download"})
    assert downloads["rows"] == 0
    assert downloads["sent_bytes"] > 128 * 64 * 4  # the embeddings

    for executor, file, table in zip((provider, source), files, tables, strict=True):
        assert executor.process is not None
        executor.process.send_signal(signal.SIGTERM)
        assert executor.process.wait(SECONDS) == 0
        for classes in (CLASSES, {"download"}):
            assert used(file.read_text(), classes) == pytest.approx(used(table, classes), abs=1e-5)
        check_log(executor)
    assert told() == ["STOPPING=1", "STOPPING=1"]


def check_log(executor: Executor) -> None:
    """Of JSON throughout; with the tenant's name and without its token."""
    assert executor.log is not None
    text = executor.log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        assert {"time", "level", "message", "logger"} <= line.keys()
    messages = [line["message"] for line in lines]
    assert any(re.search("^serving .* to 1 tenant at wss://", message) for message in messages)
    assert messages[-2:] == ["draining", "stopped"]
    (left,) = [line for line in lines if " left after " in line["message"]]
    assert (left["tenant"], left["requests"] > 0, left["seconds"] > 0) == (TENANT, True, True)
    assert executor.token not in text


def test_whoever_is_refused_is_in_the_log_with_an_address(
    serve_process: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    executor = serve_process(checkpoint("llama"), "--log-format", "json")
    with pytest.raises(Exception, match="refused the token"):
        executor.connect(token="A" * 43)
    assert executor.log is not None
    log = executor.log
    eventually(lambda: '"peer": "127.0.0.1", "reason": "unauthorized"' in log.read_text())
    assert "A" * 43 not in log.read_text()


def test_what_fails_at_the_start_is_json_as_well(
    checkpoint: Callable[[str], Path], tls_dir: Path, token_file: tuple[Path, str]
) -> None:
    from commands import finish, start

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        where = ("--tls-dir", tls_dir, "--token-file", token_file[0], "--port", port, "--log-format", "json")
        status, out, err = finish(start("provider.cli", "serve", checkpoint("llama"), *where))
    assert (status, out) == (78, "")
    (line,) = map(json.loads, err.splitlines())
    assert line["level"] == "error"
    assert line["message"].startswith(f"cannot listen on 127.0.0.1:{port}: Address already in use")
