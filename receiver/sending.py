"""Posts one delivery to a server, as a sender does."""

import http.client
import socket
import ssl
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import msgspec

from receiver.config import Address, Settings

#: Seconds to connect and to wait for the answer, and its bytes that are read.
TIMEOUT_S = 30.0
ANSWER_BYTES_MAX = 4_096
#: Bytes of a body that is sent; the server's own limit is usually lower.
BODY_BYTES_MAX = 67_108_864


class NotSent(Exception):
    """No answer came; the message says what to do."""


class Answer(msgspec.Struct, frozen=True):
    status: int
    word: str
    request_id: str | None


class Target(msgspec.Struct, frozen=True):
    """Where a server is: an absolute URL, over a unix socket if there is one."""

    url: str
    unix: Path | None = None
    #: The certificate that the server must show, in place of those that everyone trusts.
    certificate: Path | None = None


def target_of(settings: Settings, source: str) -> Target:
    """The address in the configuration. Raises NotSent where it does not say one."""
    listen, tls = settings.server.listen, settings.server.tls
    scheme = "http" if tls is None else "https"
    certificate = None if tls is None else tls.certificate
    path = f"/webhooks/{source}"
    if listen.unix is not None:
        return Target(f"{scheme}://localhost{path}", listen.unix, certificate)
    if listen.port == 0:
        raise NotSent("server.listen has port 0, which may be any; name the address with --url")
    # A server that listens everywhere is reached on this machine's own address.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listen.host, listen.host)  # noqa: S104
    return Target(f"{scheme}://{Address(host, listen.port)}{path}", None, certificate)


def post(target: Target, headers: list[tuple[str, str]], body: bytes) -> Answer:
    """Send a body and return the answer. Raises NotSent, or ValueError for a URL that is none."""
    parts = _parts(target.url)
    connection = _connection(target, parts)
    try:
        connection.request("POST", parts.path or "/", body, dict(headers))
        response = connection.getresponse()
        word = response.read(ANSWER_BYTES_MAX).decode(errors="replace").strip()
    except (ConnectionRefusedError, FileNotFoundError) as error:
        raise NotSent(_nobody(target)) from error
    except (OSError, http.client.HTTPException) as error:
        raise NotSent(
            f"{_place(target)} did not answer: {error or type(error).__name__}"
        ) from error
    finally:
        connection.close()
    return Answer(response.status, word, response.headers.get("X-Request-Id"))


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    except ValueError:
        pass
    raise ValueError(f"{url!r} is no http URL; write http://127.0.0.1:8080/webhooks/stripe")


def _nobody(target: Target) -> str:
    return f"nothing listens at {_place(target)}; start it with `receiver serve`"


def _place(target: Target) -> str:
    return f"unix:{target.unix}" if target.unix is not None else target.url


def _connection(target: Target, parts: SplitResult) -> http.client.HTTPConnection:
    host = parts.hostname or "localhost"
    context = _trusting(target.certificate) if parts.scheme == "https" else None
    if target.unix is not None:
        return _UnixConnection(target.unix, context)
    if context is not None:
        return http.client.HTTPSConnection(host, parts.port, timeout=TIMEOUT_S, context=context)
    return http.client.HTTPConnection(host, parts.port, timeout=TIMEOUT_S)


def _trusting(certificate: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certificate)
    if certificate is not None:
        # The server is ours, asked by an address that its certificate does not name; it must
        # show this very certificate, whoever issued it.
        context.check_hostname = False
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    return context


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, tls: ssl.SSLContext | None) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path
        self._tls = tls

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(str(self._path))
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(self.sock, server_hostname="localhost")
