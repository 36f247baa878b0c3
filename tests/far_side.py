"""The other side of a send: servers that fail on command, and certificates they show."""

import contextlib
import datetime
import ipaddress
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from receiver.destinations import Later, Never, Owed, Result, Sent, Unknown
from tests.conftest import NOW_MS

KEY = "op_" + "0123456789abcdef" * 2 + "01234567"
JOIN_S = 30


def owed(body: dict[str, Any], attempt: int = 1) -> Owed:
    return Owed(
        operation_key=KEY,
        correlation_id="event-7",
        attempt=attempt,
        created_ms=NOW_MS,
        body=body,
    )


def said(result: Result) -> str:
    """What a result says; it must be fit for one line of a log."""
    match result:
        case Sent(detail=text) | Later(why=text) | Never(why=text) | Unknown(why=text):
            pass
    assert text.isprintable()
    assert 0 < len(text) <= 500
    return text


class Far:
    """A TCP server that plays one script for each connection, the last one again and again."""

    def __init__(self, scripts: tuple["Script", ...], tls: ssl.SSLContext | None) -> None:
        self.requests: list[bytes] = []
        self.connections = 0
        self.errors: list[OSError] = []
        #: Set at the end: what hangs may stop.
        self.over = threading.Event()
        self._scripts = scripts
        self._tls = tls
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self.over.set()
        # What is blocked in a socket does not see that it is closed.
        for blocked in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(blocked, socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(JOIN_S)
            assert not thread.is_alive()
        self._listener.close()

    def _accept(self) -> None:
        while not self.over.is_set():
            try:
                plain = self._listener.accept()[0]
            except OSError:
                return
            script = self._scripts[min(self.connections, len(self._scripts) - 1)]
            self.connections += 1
            thread = threading.Thread(target=self._play, args=(script, plain))
            self._threads.append(thread)
            thread.start()

    def _play(self, script: "Script", plain: socket.socket) -> None:
        connection = plain
        try:
            if self._tls is not None:
                connection = self._tls.wrap_socket(plain, server_side=True)
            self._open.append(connection)
            script(self, connection)
        # A client that had enough goes away in the middle.
        except OSError as error:
            self.errors.append(error)
        finally:
            connection.close()


Script = Callable[[Far, socket.socket], None]


@contextmanager
def serving(*scripts: Script, tls: ssl.SSLContext | None = None) -> Iterator[Far]:
    far = Far(scripts, tls)
    try:
        yield far
    finally:
        far.close()


def request(connection: socket.socket) -> bytes:
    """One HTTP request with a Content-Length; nothing if the client is gone."""
    text = b""
    while b"\r\n\r\n" not in text:
        more = connection.recv(65_536)
        if not more:
            return b""
        text += more
    head, _, body = text.partition(b"\r\n\r\n")
    (length,) = (
        int(line.partition(b":")[2])
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"content-length:")
    )
    while len(body) < length:
        body += connection.recv(65_536)
    return head + b"\r\n\r\n" + body


def answering(answer: bytes, then: Script | None = None) -> Script:
    """Answers every request on a connection, or the first one and then plays another script."""

    def play(far: Far, connection: socket.socket) -> None:
        while text := request(connection):
            far.requests.append(text)
            connection.sendall(answer)
            if then is not None:
                then(far, connection)
                return

    return play


def hang(far: Far, connection: socket.socket) -> None:
    far.over.wait(JOIN_S)


def part(far: Far, connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)


def reset(far: Far, connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def drip(far: Far, connection: socket.socket) -> None:
    """A byte now and then, for ever."""
    while not far.over.wait(0.02):
        connection.sendall(b"a")


def flood(far: Far, connection: socket.socket) -> None:
    """As many bytes as the other side takes."""
    while not far.over.is_set():
        connection.sendall(b"a" * 65_536)


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def silent_port() -> Iterator[int]:
    """A port whose queue of connections is full: it neither takes nor refuses another."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(listener.getsockname())
        yield listener.getsockname()[1]


class Pair(NamedTuple):
    certificate: Path
    key: Path

    @property
    def tls(self) -> ssl.SSLContext:
        """A server's context that shows the certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return context


def self_signed(folder: Path, name: str = "127.0.0.1", *, days: int = 2) -> Pair:
    """A certificate for an address or a name; with negative `days` it has expired."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    alternative: x509.GeneralName
    try:
        alternative = x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        alternative = x509.DNSName(name)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(end - datetime.timedelta(days=30))
        .not_valid_after(end)
        .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pair = Pair(folder / "cert.pem", folder / "key.pem")
    pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pair.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return pair
