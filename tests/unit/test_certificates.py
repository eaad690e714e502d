"""The development certificates: who they vouch for, and for how long."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import logging
import os
import ssl
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Executor
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from raw_peers import tls
from typer.testing import CliRunner

from provider.cli import app
from provider.serve.certificates import (
    DEFAULT_HOSTS,
    CertificateInUse,
    certificate_of,
    check_dates,
    own_certificate,
    write_certificates,
)
from provider.serve.server import server_context
from shared.errors import ConfigurationError
from tenant_sdk.connection.handshake import client_context

NOW = datetime.datetime(2030, 5, 1, 12, tzinfo=datetime.UTC)
FILES = {"ca.pem", "server.pem", "server.key", "client.pem", "client.key"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Certificates for two hosts, made at NOW for 30 days."""
    write_certificates(tmp_path / "tls", ("executor.example", "10.1.2.3", "::1"), now=NOW, days=30)
    return tmp_path / "tls"


def load(folder: Path, name: str) -> x509.Certificate:
    """One certificate."""
    return x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes())


def policy(folder: Path, when: datetime.datetime = NOW) -> PolicyBuilder:
    """Trust in the folder's authority."""
    return PolicyBuilder().store(Store([load(folder, "ca")])).time(when)


@pytest.mark.parametrize(
    "host",
    [
        x509.DNSName("executor.example"),
        x509.IPAddress(ipaddress.ip_address("10.1.2.3")),
        x509.IPAddress(ipaddress.ip_address("::1")),
    ],
)
def test_the_server_is_who_it_says(folder: Path, host: x509.DNSName | x509.IPAddress) -> None:
    chain = policy(folder).build_server_verifier(host).verify(load(folder, "server"), [])
    assert chain[-1] == load(folder, "ca")


@pytest.mark.parametrize(("role", "accepted"), [("client", True), ("server", False)])
def test_the_client_is_a_client(tls_dir: Path, role: str, accepted: bool) -> None:
    """A handshake in memory; both sides strict, as Python 3.13 is."""
    server = server_context(tls_dir, tls_dir / "ca.pem")
    client = client_context(tls_dir / "ca.pem", (tls_dir / f"{role}.pem", tls_dir / f"{role}.key"))
    for context in (server, client):
        context.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname="localhost"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]

    def talk() -> None:
        for end in (*ends, *ends):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()

    if accepted:
        talk()
        assert ends[1].getpeercert()
    else:
        with pytest.raises(ssl.SSLCertVerificationError):
            talk()


def test_nobody_else_is(folder: Path, tmp_path: Path) -> None:
    executor = x509.DNSName("executor.example")
    verify = policy(folder).build_server_verifier
    with pytest.raises(VerificationError):
        verify(x509.DNSName("elsewhere.example")).verify(load(folder, "server"), [])
    with pytest.raises(VerificationError):
        verify(executor).verify(load(folder, "client"), [])
    with pytest.raises(VerificationError):
        policy(folder).build_client_verifier().verify(load(folder, "server"), [])
    write_certificates(tmp_path / "other", ("executor.example",), now=NOW, days=30)
    with pytest.raises(VerificationError):
        verify(executor).verify(load(tmp_path / "other", "server"), [])


@pytest.mark.parametrize(
    ("days", "hours", "valid"), [(0, -2, False), (0, 0, True), (29, 0, True), (31, 0, False)]
)
def test_they_expire(folder: Path, days: int, hours: int, valid: bool) -> None:
    when = NOW + datetime.timedelta(days=days, hours=hours)
    verifier = policy(folder, when).build_server_verifier(x509.DNSName("executor.example"))
    if valid:
        verifier.verify(load(folder, "server"), [])
    else:
        with pytest.raises(VerificationError):
            verifier.verify(load(folder, "server"), [])


def test_the_dates_are_those_that_were_asked_for(folder: Path) -> None:
    for name in ("ca", "server", "client"):
        certificate = load(folder, name)
        assert certificate.not_valid_before_utc == NOW - datetime.timedelta(hours=1)
        assert certificate.not_valid_after_utc == NOW + datetime.timedelta(days=30)


def test_extensions(folder: Path) -> None:
    """RFC 5280 §4.2 and what Python 3.13 insists on."""
    ca = load(folder, "ca").extensions
    authority = ca.get_extension_for_class(x509.BasicConstraints)
    assert (authority.critical, authority.value.ca, authority.value.path_length) == (True, True, 0)
    usage = ca.get_extension_for_class(x509.KeyUsage)
    assert usage.critical
    assert usage.value.key_cert_sign
    identifier = ca.get_extension_for_class(x509.SubjectKeyIdentifier).value
    purposes = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}
    for name, purpose in purposes.items():
        leaf = load(folder, name).extensions
        assert not leaf.get_extension_for_class(x509.BasicConstraints).value.ca
        assert leaf.get_extension_for_class(x509.KeyUsage).value.digital_signature
        assert not leaf.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
        assert list(leaf.get_extension_for_class(x509.ExtendedKeyUsage).value) == [purpose]
        issuer = leaf.get_extension_for_class(x509.AuthorityKeyIdentifier).value
        assert issuer.key_identifier == identifier.digest
        assert leaf.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
    names = load(folder, "server").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["executor.example"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["10.1.2.3", "::1"]


def test_python_takes_them_when_it_is_strict(llama: Executor) -> None:
    """Python 3.13 sets this flag by default."""
    context = ssl.create_default_context(cafile=str(llama.ca))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    with tls(llama, context) as sock:
        assert sock.version() == "TLSv1.3"


@pytest.mark.parametrize(
    ("openssl", "groups"),
    [
        ((3, 0, 0, 19, 0), "X25519:P-256:P-384"),
        ((3, 4, 0, 2, 0), "X25519:P-256:P-384"),
        ((3, 5, 0, 0, 0), "?X25519MLKEM768:X25519:P-256:P-384"),
        ((4, 0, 0, 0, 0), "?X25519MLKEM768:X25519:P-256:P-384"),
    ],
)
def test_groups_are_named_where_python_can(
    tls_dir: Path, monkeypatch: pytest.MonkeyPatch, openssl: tuple[int, ...], groups: str
) -> None:
    named: list[str] = []

    def set_groups(_: ssl.SSLContext, groups: str) -> None:
        named.append(groups)

    monkeypatch.setattr(ssl.SSLContext, "set_groups", set_groups, raising=False)
    monkeypatch.setattr(ssl, "OPENSSL_VERSION_INFO", openssl)
    server_context(tls_dir)
    assert named == [groups]


def test_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        (tmp_path / "server.key").write_text("an old key that all may read")
        write_certificates(tmp_path, now=NOW)
    finally:
        os.umask(before)
    for role in ("server", "client"):
        path = tmp_path / f"{role}.key"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        key = load_pem_private_key(path.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        assert key.public_key() == load(tmp_path, role).public_key()


def test_the_authority_can_sign_nothing_more(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == FILES
    assert b"PRIVATE" not in (folder / "ca.pem").read_bytes()


def test_the_command_writes_them_for_this_machine(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["certs", str(tmp_path / "tls")])
    assert result.exit_code == 0
    assert {path.name for path in (tmp_path / "tls").iterdir()} == FILES
    names = load(tmp_path / "tls", "server").extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert {str(name.value) for name in names.value} == set(DEFAULT_HOSTS)


@pytest.mark.parametrize(("options", "days"), [([], 90), (["--days", "7"], 7)])
def test_the_command_makes_them_for_a_while(tmp_path: Path, options: list[str], days: int) -> None:
    result = CliRunner().invoke(app, ["certs", str(tmp_path), *options])
    assert result.exit_code == 0
    certificate = load(tmp_path, "server")
    valid = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    assert valid == datetime.timedelta(days=days, hours=1)
    assert f"{certificate.not_valid_after_utc:%Y-%m-%d}" in result.stdout


@pytest.mark.parametrize("days", ["0", "-1", "x", "100000"])
def test_a_time_that_is_none(tmp_path: Path, days: str) -> None:
    assert CliRunner().invoke(app, ["certs", str(tmp_path / "tls"), "--days", days]).exit_code == 2
    assert not (tmp_path / "tls").exists()


def test_the_command_replaces_nothing_unless_told_to(tmp_path: Path) -> None:
    """Tenants who trust the authority that is there would not trust a new one."""
    runner, folder = CliRunner(), str(tmp_path / "tls")
    assert runner.invoke(app, ["certs", folder]).exit_code == 0
    before = (tmp_path / "tls" / "ca.pem").read_bytes()
    again = runner.invoke(app, ["certs", folder])
    assert "--force" in str(again.exception)
    assert (tmp_path / "tls" / "ca.pem").read_bytes() == before
    assert runner.invoke(app, ["certs", folder, "--force"]).exit_code == 0
    assert (tmp_path / "tls" / "ca.pem").read_bytes() != before


# -- files that cannot be used ---------------------------------------------------------------------


def encrypt(path: Path) -> None:
    key = load_pem_private_key(path.read_bytes(), None)
    path.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"a password"))
    )


def another(path: Path) -> None:
    write_certificates(path.parent / "other", now=NOW)
    path.write_bytes((path.parent / "other" / path.name).read_bytes())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("server.pem", Path.unlink, "server.pem is missing"),
        ("server.key", Path.unlink, "server.key is missing"),
        ("server.pem", lambda path: path.write_text("x"), "server.pem holds no certificate in PEM form"),
        ("server.key", lambda path: path.write_text("x"), "server.key holds no private key in PEM form"),
        ("server.key", another, "server.key is not the key of server.pem"),
        ("server.key", encrypt, "server.key is encrypted; decrypt it with `openssl pkey"),
        (
            "server.key",
            lambda path: path.write_text(path.read_text()[:60] + path.read_text()[80:]),
            "server.key or server.pem is damaged",
        ),
        ("server.key", lambda path: path.chmod(0o604), "server.key, which holds the private key: `chmod 600"),
    ],
)
def test_files_that_cannot_be_used(
    folder: Path, name: str, change: Callable[[Path], object], message: str
) -> None:
    own_certificate(folder)
    (folder / "server.key").chmod(0o640)  # for a group, as Debian's ssl-cert is
    own_certificate(folder)
    change(folder / name)
    with pytest.raises(ConfigurationError) as caught:
        own_certificate(folder)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)


def test_an_authority_that_cannot_be_used(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"client_ca=.*: No such file"):
        own_certificate(folder, tmp_path / "none")
    with pytest.raises(ConfigurationError, match=r"client_ca=.*: it holds no certificate in PEM form"):
        own_certificate(folder, folder / "server.key")


@pytest.mark.parametrize(
    ("days", "message"), [(0, None), (30, "expired at 2030-05-31 12:00"), (-1, "not valid before")]
)
def test_a_certificate_of_another_time(folder: Path, days: int, message: str | None) -> None:
    found, when = certificate_of(folder), NOW + datetime.timedelta(days=days)
    if message is None:
        check_dates(found, when)
        return
    with pytest.raises(ConfigurationError, match=message) as caught:
        check_dates(found, when)
    assert "executor.example, 10.1.2.3, ::1" in str(caught.value)


@pytest.mark.parametrize("host", ["https://a.b:8", "a b", "", "a..b", "-a", "a.b:8", "é", "a/b"])
def test_hosts_that_are_none(tmp_path: Path, host: str) -> None:
    result = CliRunner().invoke(app, ["certs", str(tmp_path / "tls"), "--host", host])
    assert "not a host name" in str(result.exception)
    assert not (tmp_path / "tls").exists()


# -- while it is in use ----------------------------------------------------------------------------


def shown(server: ssl.SSLContext, ca: Path, host: str, own: Path | None = None) -> bytes:
    """The certificate of a handshake in memory, in which the client may show its own."""
    client = ssl.create_default_context(cafile=str(ca))
    if own is not None:
        client.load_cert_chain(own / "client.pem", own / "client.key")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for end in (*ends, *ends):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    certificate = ends[0].getpeercert(binary_form=True)
    assert certificate is not None
    return certificate


def test_a_renewed_certificate_is_shown_and_a_broken_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = datetime.datetime.now(datetime.UTC)
    write_certificates(tmp_path, now=now, days=30)
    context = server_context(tmp_path)
    with caplog.at_level(logging.INFO):
        used = CertificateInUse(context, tmp_path)
        assert "certificate for localhost, 127.0.0.1, ::1, until" in caplog.text
        shown(context, tmp_path / "ca.pem", "localhost")
        write_certificates(tmp_path, ["127.0.0.2"], now=now, days=40)
        assert used.reload()
        for host in ("127.0.0.2", "127.0.0.2"):
            der = shown(context, tmp_path / "ca.pem", host)
            assert x509.load_der_x509_certificate(der) == certificate_of(tmp_path)
        assert used.expires == certificate_of(tmp_path).not_valid_after_utc
        assert "certificate for 127.0.0.2, until" in caplog.text
    caplog.clear()
    authority = (tmp_path / "ca.pem").read_bytes()
    for spoil in (
        lambda: (tmp_path / "server.pem").write_text("x"),
        lambda: write_certificates(tmp_path, now=now - datetime.timedelta(days=9), days=2),
    ):
        spoil()
        assert not used.reload()
    (tmp_path / "ca.pem").write_bytes(authority)
    shown(context, tmp_path / "ca.pem", "127.0.0.2")
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "the certificate in use stays, until" in caplog.text
    assert "expired at" in caplog.text


def test_clients_are_still_asked_for_certificates_after_a_reload(tmp_path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    for name in ("own", "other"):
        write_certificates(tmp_path / name, now=now)
    own, ca = tmp_path / "own", tmp_path / "own" / "ca.pem"
    context = server_context(own, ca)
    used = CertificateInUse(context, own, ca)
    for reloaded in (False, True):
        if reloaded:
            assert used.reload()
        shown(context, ca, "localhost", own)
        for stranger in (None, tmp_path / "other"):
            with pytest.raises(ssl.SSLError, match=r"PEER_DID_NOT_RETURN|CERTIFICATE_VERIFY_FAILED"):
                shown(context, ca, "localhost", stranger)


def test_no_session_is_resumed(tmp_path: Path) -> None:
    """Else a client would come in whose certificate has ended, or whose authority was replaced."""
    write_certificates(tmp_path, now=datetime.datetime.now(datetime.UTC))
    server = server_context(tmp_path, tmp_path / "ca.pem")
    client = client_context(tmp_path / "ca.pem", (tmp_path / "client.pem", tmp_path / "client.key"))
    session = None
    for _ in range(2):
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        own = client.wrap_bio(to_client, to_server, server_hostname="localhost", session=session)
        other = server.wrap_bio(to_server, to_client, server_side=True)
        for end in (own, other, own, other):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
        other.write(b"x")
        assert own.read(1) == b"x"  # tickets come before it
        assert not own.session_reused
        session = own.session


def test_the_command_follows_no_link(tmp_path: Path) -> None:
    """The folder may be another user's, and the command root's."""
    (folder := tmp_path / "tls").mkdir()
    for name in FILES:
        (tmp_path / name).write_text("of somebody else")
        (folder / name).symlink_to(tmp_path / name)
    write_certificates(folder, now=NOW)
    for name in FILES:
        assert (tmp_path / name).read_text() == "of somebody else"
        assert stat.S_IMODE((folder / name).lstat().st_mode) == (0o600 if name.endswith("key") else 0o644)


@pytest.mark.parametrize(
    ("days", "level", "said"), [(15, None, ""), (13, "WARNING", "expires at"), (-1, "ERROR", "expired at")]
)
def test_a_warning_some_days_before(
    folder: Path, caplog: pytest.LogCaptureFixture, days: int, level: str | None, said: str
) -> None:
    clock = NOW + datetime.timedelta(days=30 - days)
    used = CertificateInUse(own_certificate(folder), folder, clock=lambda: clock)
    used.warn()
    assert [record.levelname for record in caplog.records] == ([level] if level else [])
    assert f"executor.example, 10.1.2.3, ::1 {said}" in caplog.text if level else not caplog.text
