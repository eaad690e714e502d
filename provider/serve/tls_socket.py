"""TLS of a tenant's connection, which decrypts few records at a time.

If OpenSSL reads a socket itself, it goes on until a record has data. A peer that sends only key updates, of
27 bytes each, would keep the thread for as long as it sends. Here OpenSSL reads from memory, and gets a few
records at a time. So the caller can turn to other connections, and ends one that sends nothing else.
"""

from __future__ import annotations

import socket
import ssl
import time
from types import TracebackType

RECORDS = 32  # that OpenSSL gets at once; as many in a row without data end the connection
CHUNK = 1 << 16  # bytes that are read, or encrypted, at once
MAX_UNSENT = 4 * CHUNK  # encrypted bytes; OpenSSL answers each key update that asks for one
_NOTHING = memoryview(b"")  # in place of an empty slice, which would keep its chunk in memory
_HEADER = 5  # bytes of a record's header; the last two are the length of the rest


class BoundedTlsSocket:
    """The server's side of a TLS connection, with the methods of ``ssl.SSLSocket`` that are used here.

    Args:
        sock: connected; this takes its descriptor, and closes it.
        context: of a server.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self._sock = socket.socket(fileno=sock.detach())
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=True)
        self._read = _NOTHING  # what OpenSSL has not got yet
        self._begun = 0  # bytes that are missing of the record that OpenSSL has got in part
        self._idle = 0  # records in a row without data
        self._unsent = _NOTHING
        self._deadline: float | None = None  # None: the socket does not block

    def __enter__(self) -> BoundedTlsSocket:
        """Close the socket at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the socket."""
        self.close()

    @property
    def unsent(self) -> int:
        """Encrypted bytes that the socket has not taken yet."""
        return len(self._unsent)

    def do_handshake(self, deadline: float) -> None:
        """Do the TLS handshake; the socket blocks.

        Args:
            deadline: a time of ``time.monotonic``.

        Raises:
            OSError: it failed; the peer was notified.
            TimeoutError: it is too late.
        """
        self._deadline = deadline
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._send_all()
                self._check_idle()
                if not self._feed():
                    raise ConnectionResetError("the peer has gone") from None
            except ssl.SSLError:
                self._send_all()  # the alert
                raise
            else:
                self._send_all()
                return

    def recv_into(self, buffer: memoryview) -> int:
        """Decrypt into a buffer. Returns the number of bytes, or 0 if the peer has ended.

        Raises:
            ssl.SSLWantReadError: nothing more has arrived, on a socket that does not block.
            OSError: the peer broke TLS, or sends records without data.
        """
        while True:
            try:
                if not (self._in.pending or self._tls.pending()) and not self._feed():
                    return 0  # cut off, which frames show where it matters
                count: int = self._tls.read(len(buffer), buffer)  # type: ignore[assignment]
            except ssl.SSLWantReadError:
                self._answer()
                self._check_idle()
            except BlockingIOError:
                raise ssl.SSLWantReadError(ssl.SSL_ERROR_WANT_READ, "nothing more has arrived") from None
            except ssl.SSLError:
                self._answer()  # the alert
                raise
            else:
                self._idle = 0
                return count

    def recv(self, size: int) -> bytes:
        """See ``recv_into``."""
        buffer = bytearray(size)
        return bytes(buffer[: self.recv_into(memoryview(buffer))])

    def discard(self) -> int:
        """Throw away what has arrived, undecrypted. Returns the number of bytes, or 0 if the peer has gone.

        Nothing can be read after this.

        Raises:
            BlockingIOError, TimeoutError: nothing has arrived.
        """
        self._read = _NOTHING
        self._wait_until_deadline()
        return len(self._sock.recv(CHUNK))

    def pending(self) -> int:
        """Returns how many decrypted bytes were not returned yet."""
        return self._tls.pending()

    @property
    def unread(self) -> int:
        """Bytes that are not decrypted yet, and of which the socket does not tell any more."""
        return len(self._read) + self._in.pending

    def send(self, data: bytes | memoryview) -> int:
        """Encrypt some of the data, and send what the socket takes. Returns the number of bytes of data.

        Raises:
            ssl.SSLWantWriteError: the socket has not taken what was encrypted before; ``flush`` goes on.
        """
        self.flush()
        count = self._tls.write(memoryview(data)[:CHUNK])
        self._take_encrypted()
        try:
            self.flush()
        except ssl.SSLWantWriteError:
            pass  # the data was taken
        return count

    def flush(self) -> int:
        """Send what is encrypted. Returns the number of bytes.

        Raises:
            ssl.SSLWantWriteError: the socket takes no more.
        """
        sent = 0
        while len(self._unsent):
            self._wait_until_deadline()
            try:
                count = self._sock.send(self._unsent)
            except BlockingIOError:
                raise ssl.SSLWantWriteError(ssl.SSL_ERROR_WANT_WRITE, "the socket takes no more") from None
            self._unsent = self._unsent[count:] or _NOTHING
            sent += count
        return sent

    def sendall(self, data: bytes) -> None:
        """Encrypt and send all, on a socket that may block."""
        left = memoryview(data)
        while len(left):
            left = left[self.send(left) :]
        self.flush()

    def unwrap(self) -> None:
        """Send TLS's own end. The peer's is not waited for."""
        try:
            self._tls.unwrap()
        except ssl.SSLError:
            pass  # said, and not yet heard
        self._take_encrypted()
        self.flush()

    def shutdown(self, how: int) -> None:
        """See ``socket.socket``."""
        self._sock.shutdown(how)

    def settimeout(self, seconds: float) -> None:
        """Let the socket block, for so long in all, until this is called again."""
        self._deadline = time.monotonic() + seconds

    def setblocking(self, flag: bool) -> None:
        """Let nothing block from now on; ``flag`` must be False. For the opposite, see ``settimeout``."""
        if flag:
            raise ValueError("a deadline is needed: call settimeout")
        self._deadline = None
        self._sock.setblocking(False)

    def fileno(self) -> int:
        """See ``socket.socket``."""
        return self._sock.fileno()

    def close(self) -> None:
        """See ``socket.socket``."""
        self._sock.close()

    def _feed(self) -> bool:
        """Give OpenSSL a few more records, or the part of one that has arrived. False: there is none.

        Raises:
            BlockingIOError, TimeoutError: the socket has none.
        """
        while len(self._read) < (1 if self._begun else _HEADER):
            self._wait_until_deadline()
            data = self._sock.recv(CHUNK)
            if not data:
                return False
            self._read = memoryview(bytes(self._read) + data if self._read else data)
        end = self._begun
        for _ in range(RECORDS):
            if end + _HEADER > len(self._read):
                break
            end += _HEADER + int.from_bytes(self._read[end + _HEADER - 2 : end + _HEADER], "big")
            self._idle += 1
        count = min(end, len(self._read))
        self._begun = end - count
        self._in.write(self._read[:count])
        self._read = self._read[count:] or _NOTHING
        return True

    def _wait_until_deadline(self) -> None:
        """Let the socket's next call wait no longer: bytes that come one by one must not stretch it."""
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._sock.settimeout(left)

    def _check_idle(self) -> None:
        if self._idle >= RECORDS:
            raise ssl.SSLError(ssl.SSL_ERROR_SSL, "too many records without data")

    def _take_encrypted(self) -> None:
        if self._out.pending:
            data = self._out.read()
            self._unsent = memoryview(bytes(self._unsent) + data if self._unsent else data)
            if len(self._unsent) > MAX_UNSENT:
                raise ConnectionAbortedError("the peer does not read")

    def _answer(self) -> None:
        """Send what TLS itself has to say, if the socket takes it now; else the next ``flush`` does."""
        self._take_encrypted()
        try:
            self.flush()
        except ssl.SSLWantWriteError:
            pass

    def _send_all(self) -> None:
        self._take_encrypted()
        self.flush()
