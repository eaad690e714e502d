"""Opening a connection: URL, TLS 1.3, websocket handshake, token; every failure as a typed error."""

from __future__ import annotations

import logging
import os
import socket
import ssl
from pathlib import Path

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake
from websockets.http11 import Response
from websockets.uri import parse_uri

from shared.errors import (
    AuthenticationError,
    ConfigurationError,
    ConnectError,
    ConnectionRefused,
    Metavar,
    OptionReference,
    OptionText,
    ProtocolVersionError,
    SymbiosisError,
    TlsError,
    WireError,
)
from shared.ownership import check_own, check_secret
from shared.transport.refusal import session_refused
from shared.wire.header import SUBPROTOCOL
from shared.wire.messages import ErrorInfo, decode
from tenant_sdk.connection.clock import CLOCK, CLOSED_RETRY_SECONDS, Clock
from tenant_sdk.connection.key_exchange import prefer
from tenant_sdk.connection.tls_socket import ClientTlsSocket, reads_end
from tenant_sdk.connection.urls import split_url

# At level DEBUG the library logs all headers, the token's too.
_quiet = logging.getLogger("symbiosis.websockets")
_quiet.setLevel(logging.ERROR)


_HANDSHAKE_SECONDS = 60.0  # if the socket has no timeout
# OpenSSL's X509_V_ERR_*: nobody who is trusted signed it, or only somebody of the same name did.
_UNTRUSTED = {2, 7, 18, 19, 20, 21, 30}


def check_environment() -> None:
    """Refuse an environment in which TLS gives its keys away.

    Raises:
        ConfigurationError: ``SSLKEYLOGFILE`` is set; no file has been made.
    """
    if os.environ.get("SSLKEYLOGFILE"):
        raise ConfigurationError(
            "the environment variable SSLKEYLOGFILE is set: Python, or OpenSSL, would write the keys of all "
            "connections to that file, and whoever reads it could read recorded traffic. Unset it"
        )


def client_context(
    ca: str | Path | None,
    client_certificate: tuple[str | Path, str | Path] | None = None,
    option: str = "ca",
) -> ssl.SSLContext:
    """Makes a TLS 1.3 context that checks host name and certificate.

    Args:
        ca: PEM file of the authority to trust; None trusts the operating system's authorities.
        client_certificate: PEM files of certificate and key, for executors that ask for one.
        option: the name of the option that gives ``ca``.

    Raises:
        ConfigurationError: a file is missing or does not hold what it should, others could change it or read
            the key, or ``check_environment``.
    """
    check_environment()
    if ca is not None:
        check_own(ca)
    try:
        context = ssl.create_default_context(cafile=str(ca) if ca is not None else None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            "cannot use the authority's certificate file {} ({}): {}",
            str(ca),
            OptionReference(option, Metavar("FILE")),
            str(error),
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslsocket_class = ClientTlsSocket
    prefer(context)
    # OpenSSL knows a forked child by its process id alone, which may be its parent's: both would draw the
    # same keys for their next connections.
    ssl.RAND_add(os.urandom(32), 32.0)
    if client_certificate is not None:
        certificate, key = client_certificate
        check_own(certificate)
        try:
            check_secret(key, "the private key", group=True)
            context.load_cert_chain(certificate, key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                f"cannot use the client certificate {certificate} with the key {key}: {error}"
            ) from error
    return context


def open_tcp(host: str, port: int, timeout: float, address: str = "") -> socket.socket:
    """Open a TCP connection, or raise a ConnectError that says what failed.

    Args:
        address: the one of the host's addresses to connect to; empty: any.
    """
    at = f"{host}:{port} ({address})" if address else f"{host}:{port}"
    try:
        sock = socket.create_connection((address or host, port), timeout=timeout)
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a valid name"
        raise ConnectError(f"cannot resolve the host name {host!r}: {reason}") from error
    except TimeoutError as error:
        raise ConnectError(
            f"{at} did not answer within {timeout:.0f} s; is a firewall in between?"
        ) from error
    except OSError as error:
        kind = ConnectionRefused if isinstance(error, ConnectionRefusedError) else ConnectError
        raise kind(
            f"cannot connect to {at}: {error.strerror}; is the executor running and the port right?"
        ) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def start_tls(sock: socket.socket, host: str, context: ssl.SSLContext) -> ssl.SSLSocket:
    """Start TLS on an open connection, or raise a TlsError that says what to do."""
    try:
        return context.wrap_socket(sock, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        untrusted = error.verify_code in _UNTRUSTED
        other = (
            f": it is for another host than {host!r}; use a name that the certificate has, or ask its "
            "operator for one that names this host (`symbiosis-provider certs DIR --host NAME`)"
        )
        why = {
            9: ": it is not valid yet; compare this machine's clock",
            10: ": it has expired; ask its operator to renew it",
            62: other,
            64: other,
        }.get(error.verify_code, "; do not go on unless you know why")
        raise TlsError(
            f"the certificate of {host} was refused ({error.verify_message})" + ("" if untrusted else why),
            untrusted=untrusted,  # then ``why_untrusted``
        ) from error
    except (ssl.SSLEOFError, ConnectionResetError) as error:
        raise TlsError(
            f"{host} closed the connection before TLS began, as an executor does that is full; try again in "
            "a while, and if it stays so, ask its operator whether this is the executor's port",
            retry_after=CLOSED_RETRY_SECONDS,
        ) from error
    except (ssl.SSLError, OSError) as error:
        raise TlsError(
            f"no TLS 1.3 session with {host} ({error}); is this the executor's port?",
            retry_after=CLOSED_RETRY_SECONDS,
        ) from error


def why_untrusted(ca: str | Path | None, option: str) -> OptionText:
    """Returns the message about a certificate that nobody trusted signed.

    Args:
        ca: the authority that was given for this party; None: the operating system's.
        option: the name of the option that gives it.
    """
    if ca is None:
        argument = OptionReference(option, Metavar("FILE"))
        return OptionText(
            ": {} was not given, and no authority that this machine knows signed the certificate; ask its "
            "operator for the ca.pem that belongs to this server, and give {}",
            argument,
            argument,
        )
    return OptionText(
        ": another authority signed the certificate than that in {}; ask its operator for the ca.pem that "
        "belongs to this server",
        OptionReference(option, ca),
    )


def upgrade(sock: ssl.SSLSocket, url: str, token: str, clock: Clock = CLOCK) -> None:
    """Do the websocket handshake with the bearer token.

    Raises:
        AuthenticationError, ProtocolVersionError, ConnectError: the executor refused.
    """
    with reads_end(sock, sock.gettimeout() or _HANDSHAKE_SECONDS):
        _upgrade(sock, url, token, clock)


def _upgrade(sock: ssl.SSLSocket, url: str, token: str, clock: Clock) -> None:
    protocol = ClientProtocol(parse_uri(url), subprotocols=[SUBPROTOCOL], logger=_quiet)  # type: ignore[list-item]
    request = protocol.connect()
    request.headers["Authorization"] = f"Bearer {token}"
    protocol.send_request(request)
    try:
        try:
            for piece in protocol.data_to_send():
                sock.sendall(piece)
        except OSError:
            pass  # an executor that refuses the certificate has said so and left: read what it said
        deadline = clock.now() + (sock.gettimeout() or _HANDSHAKE_SECONDS)
        while True:
            if clock.now() > deadline:  # bytes that come one by one must not stretch it
                raise TimeoutError("the handshake took too long")
            data = sock.recv(4096)
            if data:
                protocol.receive_data(data)
            else:
                protocol.receive_eof()
            events = protocol.events_received()
            response = next((e for e in events if isinstance(e, Response)), None)
            failure = protocol.handshake_exc
            if response is not None and response.status_code != 101:
                raise _refusal(response, url)
            if response is not None and failure is None:
                if protocol.subprotocol != SUBPROTOCOL:
                    raise ProtocolVersionError(
                        f"{url} is a websocket server, but did not agree to {SUBPROTOCOL}; is this an "
                        "executor's port?"
                    )
                return
            if failure is not None or not data:
                raise failure or EOFError("the connection ended")
    except ssl.SSLError as error:
        if "CERTIFICATE_REQUIRED" in str(error) or "alert" in str(error).lower():
            raise AuthenticationError(
                "{} ended the TLS session ({}); it asks for a client certificate that it trusts: give "
                "{client_certificate}",
                url,
                str(error.reason),
                client_certificate=(Metavar("FILE"), Metavar("KEY")),
            ) from error
        raise TlsError(f"{url}: {error}") from error
    except (OSError, EOFError, InvalidHandshake) as error:
        raise ConnectError(f"{url} does not answer as an executor does: {error}") from error


def _refusal(response: Response, url: str) -> SymbiosisError:
    try:
        info = decode(response.body or b"", ErrorInfo)
    except WireError:
        info = None
    if response.status_code == 401:
        return session_refused(url, ErrorInfo("unauthorized", info.message if info else ""))
    if info is not None and info.code:
        return session_refused(url, info)
    return ConnectError(f"{url} answered HTTP {response.status_code}; is this an executor's port?")


def check_token(token: str) -> None:
    """Refuse what no provider printed.

    Raises:
        ConfigurationError: it is empty or holds white space.
    """
    if not token:
        raise ConfigurationError(
            "there is no token: give {token}, as the provider printed it", token=Metavar("TOKEN")
        )
    if any(c.isspace() or not c.isprintable() for c in token):
        raise ConfigurationError("the token holds white space; paste it as the provider printed it")


def open_connection(
    url: str, token: str, context: ssl.SSLContext, timeout: float, address: str = "", clock: Clock = CLOCK
) -> ssl.SSLSocket:
    """Open a connection in all steps. TLS checks the URL's host, whichever ``address`` of it is used."""
    host, port = split_url(url)
    check_token(token)
    sock: socket.socket = open_tcp(host, port, timeout, address)
    try:
        tls = start_tls(sock, host, context)
        sock = tls
        upgrade(tls, url, token, clock)
    except BaseException:
        sock.close()
        raise
    return tls
