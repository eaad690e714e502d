"""Doctor's results, in this process: what can be wrong, in the order in which it is looked for."""

from __future__ import annotations

import datetime
import math
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import RING, Executor
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from provider.config import ServeConfig
from provider.serve.certificates import write_certificates
from provider.serve.listening import bound, listen
from provider.serve.provider import Provider
from shared.wire.messages import Limits
from tenant_sdk.command_line.checks import CheckResult
from tenant_sdk.command_line.doctor import _check_tls, _layers, diagnose, examine
from tenant_sdk.command_line.options import NAMES, SessionRules, Target
from tenant_sdk.session.profiles import Secret

TLS = ["url", "authority", "dns", "tcp", "tls", "certificate", "key exchange"]
ALL = [*TLS, "token", "protocol", "manifest", "digest"]
TOKEN = Secret("the token", "TENANT_TOKEN")
SPEED = ["layers", "round trip", "bytes a token", "bytes a token, training", "upload", "download"]


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch, token_file: tuple[Path, str]) -> None:
    monkeypatch.setenv("TENANT_TOKEN", token_file[1])


def look(executor: Executor, url: str | None = None, **options: object) -> dict[str, CheckResult]:
    given = {"ca": executor.ca, "token": TOKEN} | options
    results = list(examine(Target(url or executor.url, **given)))  # type: ignore[arg-type]
    assert all(result.ok is not False for result in results[:-1])
    assert all(result.remedy for result in results if not result.ok)
    assert len({result.step for result in results}) == len(results)
    return {result.step: result for result in results}


def failure(executor: Executor, url: str | None = None, **options: object) -> CheckResult:
    last = list(look(executor, url, **options).values())[-1]
    assert last.ok is False
    return last


def test_a_certificate_that_only_openssl_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operator decides what stands in it, and the checks go on."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "odd")])
    features = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.3.6.1.5.5.7.1.24"), b"\xff\xff")
    builder = x509.CertificateBuilder(
        name,
        name,
        key.public_key(),
        1,
        now,
        now + datetime.timedelta(60),
        [x509.Extension(features.oid, False, features)],
    )
    shown = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)
    sock: Any = SimpleNamespace(
        cipher=lambda: None, version=lambda: "TLSv1.3", getpeercert=lambda binary_form: shown
    )
    _, found = _check_tls(sock)
    assert (found.step, found.ok) == ("certificate", None)
    assert "cannot be read" in found.detail
    assert found.remedy


def test_all_is_well(llama: Executor) -> None:
    found = look(llama)
    assert list(found) == [*ALL, *SPEED]
    assert all(result.ok for step, result in found.items() if step != "key exchange")
    assert "for localhost, 127.0.0.1, ::1, by CN=Symbiosis development CA" in found["certificate"].detail
    assert "LlamaForCausalLM" in found["manifest"].detail
    assert "one after the other" in found["round trip"].detail


def test_a_ring_executor(serve: Callable[..., Executor], checkpoint: Callable[[str], Path]) -> None:
    found = look(serve(checkpoint("llama"), numerics=RING))
    assert list(found) == [*ALL, *SPEED]
    assert "ring, takes int32 on the wire" in found["manifest"].detail


def test_a_digest_is_pinned(llama: Executor) -> None:
    with llama.connect() as session:
        digest = session.manifest.digest
    assert look(llama, digest=digest)["digest"].detail == f"{digest}, as pinned"
    wrong = failure(llama, digest="0" * 64)
    assert wrong.step == "digest"
    assert digest in wrong.detail


def test_without_a_token_it_checks_what_it_can(llama: Executor) -> None:
    found = look(llama, token=None)
    assert list(found) == [*TLS, "protocol", "token"]
    assert found["protocol"].ok
    assert found["token"].ok is None
    assert "--token-env" in found["token"].remedy.shown(NAMES)


def test_small_limits_are_kept(serve: Callable[..., Executor], checkpoint: Callable[[str], Path]) -> None:
    limits = Limits(max_message_bytes=1 << 16, max_rows=7)
    assert list(look(serve(checkpoint("llama"), limits=limits))) == [*ALL, *SPEED]


@pytest.mark.parametrize(
    ("options", "step", "wrong", "remedy"),
    [
        ({"url": "ws://localhost:1"}, "url", "in the clear", "--provider"),
        ({"url": "wss://localhost:x"}, "url", "Port could not be cast", "--provider"),
        ({"ca": Path("missing.pem")}, "authority", "missing.pem", "--ca"),
        ({"url": "wss://a..b:1"}, "dns", "cannot resolve", "typing error"),
        ({"ca": None}, "tls", "The server shows: CN=Symbiosis server", "ca.pem that belongs to this server"),
        ({"ca": None}, "tls", "ca=FILE was not given", "and give --ca FILE"),
        ({"wire_dtype": "float16"}, "manifest", "float16", "options"),
    ],
)
def test_what_can_be_wrong(
    llama: Executor, options: dict[str, object], step: str, wrong: str, remedy: str
) -> None:
    found = failure(llama, **options)  # type: ignore[arg-type]
    assert found.step == step
    assert wrong in found.detail
    assert remedy in found.remedy.shown(NAMES)


def test_a_token_with_white_space(llama: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENANT_TOKEN", "two words")
    found = failure(llama)
    assert (found.step, found.detail) == (
        "token",
        "the token in TENANT_TOKEN holds white space: put only the token there",
    )


def test_a_token_file_that_others_can_read(llama: Executor, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("t0k3n")
    file.chmod(0o644)
    found = failure(llama, token=Secret("the token", file=file))
    assert "others can read" in found.detail
    assert "readable for you alone" in found.remedy
    assert "ask its operator" not in found.remedy


def test_a_token_in_the_place_of_its_variable_is_not_shown(llama: Executor) -> None:
    pasted = Secret("the token", "x" * 43, given="--token-env")
    found = failure(llama, token=pasted)
    assert "--token-env takes the name of an environment variable" in found.detail
    assert "x" * 43 not in found.detail + found.remedy + str(pasted)


def test_an_executor_that_is_full(llama: Executor) -> None:
    """It closes the connection before TLS."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def turn_away() -> None:
            for _ in range(2):
                connection, _address = listener.accept()
                connection.recv(1 << 16)
                connection.close()

        thread = threading.Thread(target=turn_away, daemon=True)
        thread.start()
        found = failure(llama, f"wss://127.0.0.1:{listener.getsockname()[1]}")
        thread.join(800)
    assert "closed the connection before TLS began, as an executor does that is full" in found.detail
    assert "try again" in found.remedy


def test_another_protocol_version(llama: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenant_sdk.connection.handshake.SUBPROTOCOL", "symbiosis.v99")
    for options in ({}, {"token": None}):
        found = failure(llama, **options)  # type: ignore[arg-type]
        assert found.step == "protocol"
        assert "install the version" in found.remedy


@pytest.fixture
def with_certificates(
    tmp_path: Path, checkpoint: Callable[[str], Path], token_file: tuple[Path, str]
) -> Iterator[Callable[..., Executor]]:
    """An executor whose certificates are made to order: ``start(hosts, now, days, client_ca)``."""
    with ExitStack() as providers:

        def start(
            hosts: tuple[str, ...] = ("127.0.0.1",),
            now: datetime.datetime | None = None,
            days: int = 365,
            client_ca: bool = False,
        ) -> Executor:
            write_certificates(tmp_path, hosts, now=now or datetime.datetime.now(datetime.UTC), days=days)
            config = ServeConfig(
                model_dir=checkpoint("llama"),
                tls_dir=tmp_path,
                token_file=token_file[0],
                client_ca=tmp_path / "ca.pem" if client_ca else None,
                port=0,
                drain_seconds=1.0,
            )
            provider = providers.enter_context(Provider(config))
            return Executor(provider.url, token_file[1], tmp_path / "ca.pem")

        yield start


def test_a_certificate_for_another_host(with_certificates: Callable[..., Executor]) -> None:
    found = failure(with_certificates(("executor.example",)))
    assert found.step == "tls"
    assert "it is for another host than '127.0.0.1'" in found.detail
    assert "for executor.example, by CN=Symbiosis development CA" in found.detail
    assert "use a name that the certificate has" in found.remedy
    assert "ca.pem" not in found.remedy


@pytest.mark.parametrize(
    ("days", "wrong", "remedy"),
    [
        (-30, "it has expired", "ask its operator to renew it"),
        (30, "not valid yet", "compare this machine's clock"),
    ],
)
def test_a_certificate_of_another_time(
    with_certificates: Callable[..., Executor], days: int, wrong: str, remedy: str
) -> None:
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    found = failure(with_certificates(now=now, days=7))
    assert (found.step, found.remedy) == ("tls", remedy)
    assert wrong in found.detail


def test_a_certificate_that_expires_soon(with_certificates: Callable[..., Executor]) -> None:
    found = look(with_certificates(days=5))
    assert found["certificate"].ok is None
    assert "only 4 days left" in found["certificate"].detail
    assert found["download"].ok


def test_a_client_certificate_that_is_asked_for(
    with_certificates: Callable[..., Executor], tmp_path: Path
) -> None:
    executor = with_certificates(client_ca=True)
    found = failure(executor)
    assert found.step == "client cert"
    assert "give --client-certificate FILE --client-key FILE" in found.remedy.shown(NAMES)
    assert "token" not in found.remedy
    pair = (tmp_path / "client.pem", tmp_path / "client.key")
    assert list(look(executor, client_certificate=pair)) == [*ALL, *SPEED]


def test_a_port_of_something_else(llama: Executor) -> None:
    def answer(listener: socket.socket) -> None:
        for _ in range(2):  # doctor comes back to look at the certificate
            connection, _address = listener.accept()
            with connection:
                connection.sendall(b"220 mail.example ESMTP\r\n")
                connection.recv(1 << 16)

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=answer, args=(listener,), daemon=True)
        thread.start()
        found = failure(llama, f"wss://127.0.0.1:{listener.getsockname()[1]}")
        thread.join(800)
    assert found.step == "tls"
    assert found.remedy == "is this the executor's port?"


def test_a_port_that_keeps_silent(llama: Executor) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        found = failure(llama, f"wss://127.0.0.1:{listener.getsockname()[1]}", timeout=0.3)
    assert found.step == "tls"
    assert "timed out" in found.detail


@pytest.fixture
def only_waiting_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor's clock begins at 0, and passes while it sleeps."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(perf_counter=lambda: now[0], sleep=sleep)
    monkeypatch.setattr("tenant_sdk.command_line.doctor.time", clock)


@pytest.mark.usefixtures("only_waiting_takes_time")
def test_it_waits_until_somebody_listens(llama: Executor) -> None:
    with closing(bound("127.0.0.1", 0)) as sock:
        url = f"wss://127.0.0.1:{sock.getsockname()[1]}"
        found = list(examine(Target(url, llama.ca, until=0.3)))
        assert [result.step for result in found[-2:]] == ["waiting", "tcp"]
        assert "nobody listens at wss://127.0.0.1:" in found[-2].detail
        assert " s (--wait)" in found[-2].detail
        assert "compare --provider" in found[-1].remedy.shown(NAMES)
        steps = []
        with closing(examine(Target(url, llama.ca, until=math.inf))) as results:  # type: ignore[type-var]
            for result in results:
                steps.append(result.step)
                if result.step == "waiting":
                    listen(sock)
                if result.step == "tcp":
                    break
        assert result.ok
        assert steps[-2:] == ["waiting", "tcp"]


@pytest.mark.usefixtures("only_waiting_takes_time")
def test_it_waits_for_all_executors_together() -> None:
    with closing(bound("127.0.0.1", 0)) as one, closing(bound("127.0.0.1", 0)) as other:
        targets = [
            Target(f"wss://127.0.0.1:{sock.getsockname()[1]}", until=0.3, source=sock is other)
            for sock in (one, other)
        ]
        found = diagnose(targets, SessionRules())
        steps = [result.step for _, results in found for result in results]
    assert (steps.count("waiting"), steps.count("tcp")) == (1, 2)


def test_a_mask_source_is_called_one(llama: Executor) -> None:
    """In every remedy: the options are those of mask sources."""
    there = Target("wss://127.0.0.1:1", llama.ca, source=True)
    for target, remedy in (
        (there, "compare --mask-source with"),
        (replace(there, url="wss://x:y"), "`symbiosis-provider serve` printed with --mask-source"),
        (replace(there, ca="no.pem"), "its ca.pem with --mask-source-ca"),
        (replace(there, url=llama.url, token=Secret("it", "UNSET")), "`export UNSET=...` with the token"),
        (replace(there, url=llama.url), "give --mask-source-token-env VAR to check"),
    ):
        assert remedy in list(examine(target))[-1].remedy.shown(NAMES)


def test_rows_of_noise_are_few_at_a_time() -> None:
    """How many groups there are, and how wide, the executor says; nothing has been compared yet."""
    in_flight = most = 0

    def submit(*_: object) -> SimpleNamespace:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        return SimpleNamespace(result=result)

    def result() -> None:
        nonlocal in_flight
        in_flight -= 1

    shapes = [SimpleNamespace(inputs=4, outputs=(4,))] * 1000
    remote = SimpleNamespace(shapes=shapes, manifest=SimpleNamespace(serves=lambda _: True), submit=submit)
    assert "1000 groups" in str(_layers(remote))  # type: ignore[arg-type]
    assert (in_flight, most) == (0, 16)
