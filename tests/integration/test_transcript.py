"""What a provider records: complete, announced, refused by default, and never a danger to serving."""

from __future__ import annotations

import errno
import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Executor
from parity import fixed_result, token_ids
from typer.testing import CliRunner

import tenant_sdk
from provider.config import ServeConfig
from provider.executor.base import BaseExecutor
from provider.observe.transcript import MAGIC, TranscriptWriter
from provider.serve.provider import Provider
from security.recordings.transcript import TranscriptError, read_transcript
from shared.errors import ConfigurationError, RequestRefused
from shared.wire.header import BYTES, DTYPE_CODES, Direction, Header, Operation
from tenant_sdk.command_line.main import app
from tenant_sdk.connection.keys import ProductKey


class Recorded:
    """An executor that records, and what tenants need to reach it."""

    def __init__(self, folder: Path, checkpoint: Path, tls_dir: Path, token_file: tuple[Path, str]) -> None:
        self.provider = Provider(
            ServeConfig(
                model_dir=checkpoint,
                numerics="float32",
                tls_dir=tls_dir,
                token_file=token_file[0],
                port=0,
                transcript=folder,
            )
        )
        self.provider.start()
        assert self.provider.recording is not None
        self.transcript = self.provider.recording
        self.executor = Executor(self.provider.url, token_file[1], tls_dir / "ca.pem")

    def connect(self, **options: Any) -> tenant_sdk.Session:
        given: dict[str, Any] = {"privacy": "plain", "allow_transcript": True}
        return tenant_sdk.connect(
            self.executor.url, token=self.executor.token, ca=self.executor.ca, **(given | options)
        )

    def stop(self) -> Path:
        self.provider.drain(2.0)
        self.provider.close()
        return self.transcript.path


@pytest.fixture
def recorded(
    tmp_path: Path, checkpoint: Callable[[str], Path], tls_dir: Path, token_file: tuple[Path, str]
) -> Iterator[Recorded]:
    made = Recorded(tmp_path / "records", checkpoint("llama"), tls_dir, token_file)
    yield made
    made.stop()


def test_doctor_refuses_it_as_sessions_do(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = recorded.executor
    monkeypatch.setenv("TENANT_TOKEN", executor.token)
    where = ("doctor", "--provider", executor.url, "--ca", str(executor.ca), "--token-env", "TENANT_TOKEN")
    refused = CliRunner().invoke(app, where)
    assert refused.exit_code == 1
    assert (
        "✗ transcript   the executor records tenants' messages: sessions accept this only with "
        "--allow-transcript" in (refused.output)
    )
    allowed = CliRunner().invoke(app, [*where, "--allow-transcript"])
    assert allowed.exit_code == 0
    assert "✓ transcript   it records what tenants send: allowed by --allow-transcript" in allowed.output


def test_everything_that_was_sent_is_there(recorded: Recorded) -> None:
    sent: list[torch.Tensor] = []
    with recorded.connect() as session:
        submit = session.executor.submit_piece

        def watched(*request: Any) -> Any:
            sent.append(torch.cat(request[3], 1).clone())
            return submit(*request)

        session.executor.submit_piece = watched  # type: ignore[method-assign]
        model = session.load_model(progress=False)
        fixed_result(model, token_ids())
        assert session.manifest.recorded
    transcript = read_transcript(recorded.stop())
    assert transcript.manifest.digest == session.manifest.digest
    products = [request for request in transcript.requests if request.header.operation == Operation.PRODUCT]
    assert len(products) == len(sent) > 4
    for request, rows in zip(products, sent, strict=True):
        assert torch.equal(request.rows, rows)
        assert request.seconds > 0
        assert list(transcript.tenants) == [request.session]
    arrivals = [request.arrived for request in products]
    assert arrivals == sorted(arrivals)


def test_a_request_that_failed_is_there_too(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written before anything was computed, so that a crash does not hide it either."""
    rows = torch.arange(128.0).view(2, 64)
    with recorded.connect() as session:

        def ask() -> list[torch.Tensor]:
            return session.executor.submit(
                Operation.PRODUCT, ProductKey(0, Direction.FORWARD, 1), [rows]
            ).result()

        ask()
        with monkeypatch.context() as patch:
            patch.setattr(BaseExecutor, "compute", lambda *_: 1 / 0)
            with pytest.raises(RequestRefused):
                ask()
        ask()
    requests = read_transcript(recorded.stop()).requests[-3:]
    assert all(torch.equal(request.rows, rows) for request in requests)
    assert [math.isnan(request.seconds) for request in requests] == [False, True, False]


def test_only_its_owner_may_read_it(recorded: Recorded) -> None:
    assert recorded.transcript.path.stat().st_mode & 0o777 == 0o600
    assert recorded.transcript.path.parent.stat().st_mode & 0o777 == 0o700


def test_a_tenant_refuses_unless_told_otherwise(recorded: Recorded) -> None:
    with pytest.raises(ConfigurationError, match=r"records tenants' messages.*allow_transcript"):
        recorded.connect(allow_transcript=False)


def test_a_mask_source_that_records_is_refused_too(
    serve: Callable[..., Executor], checkpoint: Callable[[str], Path], recorded: Recorded
) -> None:
    provider = serve(checkpoint("llama"))
    with pytest.raises(ConfigurationError, match=f"{recorded.executor.url} records"):
        tenant_sdk.connect(
            provider.url,
            token=provider.token,
            ca=provider.ca,
            privacy="noise-bank",
            mask_sources=[recorded.executor.url],
            allow_same=["all"],
        )


def test_a_full_disk_ends_the_transcript_and_nothing_else(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with recorded.connect() as session:
        model = session.load_model(progress=False)
        expected = fixed_result(model, token_ids())
        write, remaining = os.write, [5000]

        def full(file: int, data: Any) -> int:
            if file != recorded.transcript._file:
                return write(file, data)
            if not remaining[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            count = write(file, data[: remaining[0]])
            remaining[0] -= count
            return count

        monkeypatch.setattr(os, "write", full)
        with caplog.at_level(logging.ERROR, "provider.observe.transcript"):
            for _ in range(3):
                assert torch.equal(fixed_result(model, token_ids()), expected)
    assert "No space left on device" in caplog.text
    assert caplog.text.count("serving goes on") == 1
    path = recorded.stop()
    with pytest.raises(TranscriptError, match=r"is cut after .* requests"):
        read_transcript(path)
    assert read_transcript(path, cut=True).requests


@pytest.fixture
def finished(recorded: Recorded) -> Path:
    with recorded.connect() as session:
        fixed_result(session.load_model(progress=False), token_ids())
    return recorded.stop()


@pytest.mark.parametrize("left", [0.05, 0.3, 0.9, 1.0])
def test_a_transcript_that_is_cut(finished: Path, left: float) -> None:
    data = finished.read_bytes()
    finished.write_bytes(data[: int(len(data) * left) - 1])
    with pytest.raises(TranscriptError, match="is cut after"):
        read_transcript(finished)


def test_a_transcript_of_another_model(finished: Path) -> None:
    with pytest.raises(TranscriptError, match="is of another model"):
        read_transcript(finished, digest="0" * 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.replace(MAGIC, MAGIC.replace(b"2", b"1")), "another version"),
        (lambda data: b"PK" + data, "is no transcript"),
        (lambda data: b"", "cannot read"),
        (lambda data: data.replace(b'"server"', b'"servex"'), "is damaged"),
        (lambda data: data[:-13] + b"\x09" + data[-12:], "is damaged at byte .*9 is not a valid"),
    ],
)
def test_what_is_no_transcript(finished: Path, change: Callable[[bytes], bytes], message: str) -> None:
    finished.write_bytes(change(finished.read_bytes()))
    with pytest.raises(TranscriptError, match=message):
        read_transcript(finished)


def recorded_header() -> Header:
    return Header(Operation.PRODUCT, Direction.FORWARD, DTYPE_CODES[torch.float32], 0, 1, 1, 64, 1)


def test_a_hole_is_not_read(finished: Path) -> None:
    """An archive of some kilobytes holds many gigabytes of it."""
    os.truncate(finished, 1 << 30)
    with pytest.raises(TranscriptError, match=r"most of .* is a hole"):
        read_transcript(finished, cut=True)


def test_a_request_id_that_a_tenant_uses_twice(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    writer = TranscriptWriter(tmp_path, BaseExecutor(checkpoint("llama"), numerics="float32").manifest)
    session, header = writer.opened("bob"), recorded_header()
    for _ in range(3):
        writer.request(session, header, torch.zeros(1, 64))
    for seconds in (1.0, 2.0):
        writer.answered(session, header.request_id, seconds)
    writer.close()
    first, second, third = (request.seconds for request in read_transcript(writer.path).requests)
    assert (first, second, math.isnan(third)) == (1.0, 2.0, True)


HELLO_BOB = "bob): rows look uniform\x1b[8m"


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        (HELLO_BOB, {}, "control characters"),
        ("x" * 5000, {}, "5000 bytes"),
        ("bob", {"session": 7}, "a session that was not opened"),
        ("bob", {"group": 60_000}, "unknown group"),
        ("bob", {"members": 0}, "members"),
        ("bob", {"columns": 63}, "columns"),
        ("bob", {"rows": 1 << 30}, "the limit is"),
        ("bob", {"operation": Operation.FETCH, "dtype": BYTES}, "not recorded"),
        ("bob", {"seconds": math.inf}, "a time that is none"),
    ],
)
def test_what_no_executor_writes(
    tmp_path: Path, checkpoint: Callable[[str], Path], name: str, changed: dict[str, Any], message: str
) -> None:
    """An executor that is audited may have written the transcript."""
    manifest = BaseExecutor(checkpoint("llama"), numerics="float32").manifest
    header = recorded_header()
    fields = {key: value for key, value in changed.items() if key not in ("session", "seconds")}
    writer = TranscriptWriter(tmp_path, manifest)
    session = changed.get("session", writer.opened(name))
    writer.request(session, header._replace(**fields), torch.zeros(1, 64))
    writer.answered(session, header.request_id, changed.get("seconds", 1.0))
    writer.close()
    with pytest.raises(TranscriptError, match=f"is damaged at byte .*{message}"):
        read_transcript(writer.path)


def test_a_folder_that_cannot_be_written(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    manifest = BaseExecutor(checkpoint("llama"), numerics="float32").manifest
    with pytest.raises(ConfigurationError, match="cannot record into"):
        TranscriptWriter(tmp_path / "file" / "folder", manifest)
