"""A development certificate authority, with a server and a client certificate.

For machines of one's own and for tests; a public deployment brings certificates of its own. The
extensions are those that Python 3.13 and later insist on (RFC 5280).
"""

from __future__ import annotations

import datetime
import ipaddress
import logging
import re
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shared.atomic import write_atomically
from shared.errors import ConfigurationError
from shared.hosts import LOOPBACK
from shared.ownership import check_own, check_secret

log = logging.getLogger(__name__)

DEFAULT_DAYS = 90  # what is renewed this often is renewed by a script, and a lost key is soon worth nothing
DEFAULT_HOSTS = LOOPBACK
WARNING_DAYS = 14  # before a certificate ends
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}$)(\*\.)?{_LABEL}(\.{_LABEL})*")


def write_certificates(
    folder: str | Path,
    hosts: Sequence[str] = DEFAULT_HOSTS,
    *,
    now: datetime.datetime,
    days: int = DEFAULT_DAYS,
) -> None:
    """Write ``ca.pem``, ``server.pem``, ``server.key``, ``client.pem`` and ``client.key``.

    The key of the certificate authority is not stored, so nobody can sign further certificates with it.

    Args:
        folder: Folder for the files. It is made if it does not exist.
        hosts: Names and addresses for which the server certificate is valid.
        now: Present time. The certificates are valid from one hour before it.
        days: Days for which the certificates are valid.
    """
    folder, names = Path(folder), x509.SubjectAlternativeName([_host(host) for host in hosts])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot make the folder {folder}: {error.strerror}") from error
    start, end = now - datetime.timedelta(hours=1), now + datetime.timedelta(days=days)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = _name("Symbiosis development CA")
    ca_identifier = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    ca = (
        _builder(ca_name, ca_name, ca_key.public_key(), start, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(ca_identifier, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    for role, usage in (
        ("server", ExtendedKeyUsageOID.SERVER_AUTH),
        ("client", ExtendedKeyUsageOID.CLIENT_AUTH),
    ):
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            _builder(_name(f"Symbiosis {role}"), ca_name, key.public_key(), start, end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(ca_identifier),
                critical=False,
            )
        )
        if role == "server":
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(ca_key, hashes.SHA256())
        write_atomically(folder / f"{role}.pem", certificate.public_bytes(Encoding.PEM), 0o644)
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        write_atomically(folder / f"{role}.key", private)
    # Last: if it is the old one, ``still_valid`` notices that the others were not written to the end.
    write_atomically(folder / "ca.pem", ca.public_bytes(Encoding.PEM), 0o644)


def own_certificate(tls_dir: str | Path, client_ca: str | Path | None = None) -> ssl.SSLContext:
    """Returns a server's context, with ``server.pem`` and ``server.key`` of the folder.

    Args:
        client_ca: if given, tenants must also show a certificate that this authority signed.

    Raises:
        ConfigurationError: a file is missing or does not fit, or others can read the key or change a file.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # OpenSSL does not look again at the certificate of a client that resumes a session.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    if client_ca is not None:
        check_own(client_ca)
        try:
            context.load_verify_locations(client_ca)
        except ssl.SSLError as error:
            raise ConfigurationError(
                "cannot use {client_ca}: it holds no certificate in PEM form", client_ca=client_ca
            ) from error
        except OSError as error:
            raise ConfigurationError(
                "cannot use {client_ca}: {}", str(error.strerror), client_ca=client_ca
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    _load(context, Path(tls_dir))
    return context


def certificate_of(tls_dir: str | Path) -> x509.Certificate:
    """Returns the first certificate of the folder's ``server.pem``.

    Raises:
        ConfigurationError: it holds none.
    """
    folder = Path(tls_dir)
    try:
        return x509.load_pem_x509_certificate(_read(folder, "server.pem"))
    except ValueError as error:
        raise _unusable(folder, "server.pem holds no certificate in PEM form") from error


def check_dates(certificate: x509.Certificate, now: datetime.datetime) -> None:
    """Refuse a certificate that no tenant would accept at that time.

    Raises:
        ConfigurationError: for whom it is, when it began or ended, and what to do.
    """
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now >= end:
        raise ConfigurationError(
            f"the certificate for {_names(certificate)} expired at {end:%Y-%m-%d %H:%M} UTC; renew "
            "server.pem and server.key (for development: `symbiosis-provider certs FOLDER --force`)"
        )
    if now < begin:
        raise ConfigurationError(
            f"the certificate for {_names(certificate)} is not valid before {begin:%Y-%m-%d %H:%M} UTC, "
            f"and it is {now:%Y-%m-%d %H:%M}; correct this machine's clock, or wait"
        )


class CertificateInUse:
    """The certificate that a context shows to tenants: its hosts and its end; it takes a renewed one.

    Args:
        context: has loaded it, and serves.
        tls_dir: folder of ``server.pem`` and ``server.key``.
        client_ca: as the context has it; read again as well.
        clock: what time it is, with its zone.

    Raises:
        ConfigurationError: it holds no certificate.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        tls_dir: str | Path,
        client_ca: str | Path | None = None,
        clock: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self._context, self._folder, self._client_ca, self._clock = context, Path(tls_dir), client_ca, clock
        self._certificate = certificate_of(tls_dir)
        self._tell()

    @property
    def expires(self) -> datetime.datetime:
        """When the certificate ends."""
        return self._certificate.not_valid_after_utc

    def reload(self) -> bool:
        """Use the files as they are now for new connections. Returns whether they can be used."""
        try:
            certificate = certificate_of(self._folder)
            check_dates(certificate, self._clock())
            fresh = own_certificate(self._folder, self._client_ca)
        except ConfigurationError as error:
            log.error(
                "the certificate in use stays, until %s UTC: %s", f"{self.expires:%Y-%m-%d %H:%M}", error
            )
            return False
        # Loading it into the context that serves would keep an old one of another kind of key beside it.
        self._context.sni_callback = lambda sock, *_: setattr(sock, "context", fresh)
        self._certificate = certificate
        self._tell()
        self.warn()
        return True

    def warn(self) -> None:
        """Log that the certificate ends soon, or has ended."""
        left = (self.expires - self._clock()) / datetime.timedelta(days=1)
        if left <= WARNING_DAYS:
            log.log(
                logging.WARNING if left > 0 else logging.ERROR,
                "the certificate for %s %s at %s UTC; renew it in %s, then send SIGHUP",
                _names(self._certificate),
                "expires" if left > 0 else "expired",
                f"{self.expires:%Y-%m-%d %H:%M}",
                self._folder,
                extra={"seconds": round(left * 86400)},
            )

    def _tell(self) -> None:
        log.info(
            "certificate for %s, until %s UTC", _names(self._certificate), f"{self.expires:%Y-%m-%d %H:%M}"
        )


def _load(context: ssl.SSLContext, folder: Path) -> None:
    """Have a context use the files of a folder."""
    certificate_of(folder)
    key = folder / "server.key"
    if b"PRIVATE KEY-----" not in _read(folder, "server.key"):
        raise _unusable(folder, "server.key holds no private key in PEM form")
    check_own(folder / "server.pem")
    check_secret(key, "the private key", group=True)

    def encrypted() -> str:  # instead of asking on a terminal
        raise _unusable(
            folder, f"server.key is encrypted; decrypt it with `openssl pkey -in {key} -out NEW`, mode 600"
        )

    try:
        context.load_cert_chain(folder / "server.pem", key, password=encrypted)
    except ssl.SSLError as error:
        what = f"server.key or server.pem is damaged ({error.reason})"
        if error.reason == "KEY_VALUES_MISMATCH":
            what = "server.key is not the key of server.pem; put the two there that were made together"
        raise _unusable(folder, what) from error


def _read(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except FileNotFoundError as error:
        raise _unusable(folder, f"{name} is missing") from error
    except OSError as error:
        raise _unusable(folder, f"cannot read {name}: {error.strerror}") from error


def _unusable(folder: Path, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"no usable certificate in {folder}: {what}. For development: `symbiosis-provider certs {folder}`"
    )


def _names(certificate: x509.Certificate) -> str:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return "no name"
    return ", ".join(str(name.value) for name in names)


def still_valid(folder: Path, at: datetime.datetime) -> bool:
    """Returns whether ``write_certificates`` has written to this folder, and its files will be valid then."""
    try:
        own_certificate(folder)
        certificates = [
            x509.load_pem_x509_certificate((folder / name).read_bytes()) for name in ("ca.pem", "server.pem")
        ]
        ca, server = certificates
        server.verify_directly_issued_by(ca)
        return all(each.not_valid_before_utc <= at < each.not_valid_after_utc for each in certificates)
    except (OSError, ValueError, TypeError, InvalidSignature, ConfigurationError):
        return False


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not _HOST.fullmatch(host):
        raise ConfigurationError(
            f"not a host name: {host!r}; give a name or an address alone, without scheme, port or spaces"
        )
    return x509.DNSName(host)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    start: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
