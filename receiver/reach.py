"""Connects to other machines within a deadline that holds for every byte that follows too.

A time-out of a socket begins again with each byte: a peer that drips would hold a thread for ever.
"""

import socket
import ssl
import time
from typing import Any

#: Seconds to connect, of those for the whole send: what is not there is known soon.
CONNECT_S_MAX = 5.0


class Deadline:
    """A moment by which all must be done."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left_s(self) -> float:
        """Raises TimeoutError when nothing is left."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time limit is reached")
        return left


class Socket(socket.socket):
    """Each read and write has what is left until the deadline."""

    deadline: Deadline | None = None
    #: Bytes that may still be read; None: any number.
    bytes_left: int | None = None
    #: The address it was connected to; the system forgets it when the other side resets.
    peer = ""

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        arm(self)
        return _count(self, super().recv_into(buffer, nbytes, flags))

    def sendall(self, data: Any, flags: int = 0) -> None:
        # The interpreter applies the time-out to the whole of it.
        arm(self)
        super().sendall(data, flags)


class TlsSocket(ssl.SSLSocket):
    """The same, encrypted."""

    deadline: Deadline | None = None
    bytes_left: int | None = None

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        arm(self)
        return _count(self, super().recv_into(buffer, nbytes, flags))

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        try:
            return super().recv(buflen, flags)
        except ConnectionError:
            # Asked once before the handshake: ssl lets go of a connection that was reset by then.
            self.close()
            raise

    def send(self, data: Any, flags: int = 0) -> int:
        # This sendall calls it for each part.
        arm(self)
        return super().send(data, flags)


def connect(host: str, port: int, deadline: Deadline) -> Socket:
    """A connection to the first of the host's addresses that takes one. Raises OSError.

    The addresses share the time; looking them up takes what the resolver takes.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, "no name of a host") from error
    until = Deadline(min(CONNECT_S_MAX, deadline.left_s()))
    last: OSError | None = None
    for i, (family, kind, protocol, _, address) in enumerate(found):
        made = Socket(family, kind, protocol)
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.settimeout(until.left_s() / (len(found) - i))
            made.connect(address)
            made.settimeout(deadline.left_s())
        except OSError as failed:
            made.close()
            last = failed
        else:
            made.deadline, made.peer = deadline, str(address[0])
            return made
    raise last or socket.gaierror(socket.EAI_NONAME, "no address")


def trusting() -> ssl.SSLContext:
    """Trusts what the system trusts (or SSL_CERT_FILE), and checks the host's name."""
    context = ssl.create_default_context()
    context.sslsocket_class = TlsSocket
    return context


def encrypt(plain: Socket, context: ssl.SSLContext, host: str) -> TlsSocket:
    """The same connection with TLS, for the same deadline. Raises OSError."""
    arm(plain)
    deadline, bytes_left = plain.deadline, plain.bytes_left
    encrypted = context.wrap_socket(plain, server_hostname=host)
    assert isinstance(encrypted, TlsSocket), "the contexts are those of `trusting`"
    encrypted.deadline, encrypted.bytes_left = deadline, bytes_left
    return encrypted


def arm(connected: Socket | TlsSocket) -> None:
    """Give the next call what is left of the time. Raises TimeoutError if nothing is."""
    if connected.deadline is not None:
        connected.settimeout(connected.deadline.left_s())


def words(error: BaseException | None, place: str) -> str:
    """Why there is no connection to a place, for who runs this."""
    match error:
        case socket.gaierror():
            return f"the name of {place} can't be resolved (is it spelled right? does DNS work?)"
        case ssl.SSLCertVerificationError():
            return f"TLS with {place} failed: its certificate is refused: {error.verify_message}"
        case ssl.SSLError():
            reason = (error.reason or "it broke off").lower().replace("_", " ")
            return f"TLS with {place} failed: {reason} (does it speak TLS on this port?)"
        case TimeoutError():
            return f"{place} did not take a connection in time (is a firewall between?)"
        case ConnectionRefusedError():
            return f"{place} refused the connection (is it running?)"
        case OSError():
            return f"{place} can't be reached: {error.strerror or 'the connection broke off'}"
        case _:
            return f"{place} can't be reached"


def _count(connected: Socket | TlsSocket, received: int) -> int:
    if connected.bytes_left is not None:
        connected.bytes_left -= received
        if connected.bytes_left < 0:
            raise OSError("the answer is too long")
    return received
