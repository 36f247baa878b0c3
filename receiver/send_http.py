"""Posts a message to a URL, and judges what its answer means."""

import functools
import hmac
import http.client
import logging
import re
import ssl
import threading
import time
from base64 import b64encode
from contextvars import ContextVar
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from io import BufferedReader
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
from urllib3 import BaseHTTPResponse, HTTPConnectionPool, HTTPHeaderDict, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ClosedPoolError, HTTPError
from urllib3.exceptions import TimeoutError as TimedOut

from receiver import __version__, reach
from receiver.destinations import Http, Later, Never, Owed, Result, Sent, Unknown, one_line
from receiver.reach import Deadline, Socket, TlsSocket

#: Bytes of an answer that are read; then the connection is closed.
ANSWER_BYTES_MAX = 65_536

#: Seconds that a connection stays usable after an answer. Short: servers close idle ones, and a
#: request that crosses the close has an unknown outcome.
IDLE_S_MAX = 2.0

#: Idle connections to one destination: no fewer than there are threads.
IDLE_CONNECTIONS_MAX = 32

#: Seconds that Retry-After may ask for.
RETRY_AFTER_S_MAX = 86_400

#: Statuses that ask for another attempt, besides 5xx.
RETRIED = frozenset({408, 425, 429})

# Its warnings name whole URLs, and a URL may be a secret.
logging.getLogger("urllib3").setLevel(logging.CRITICAL)


class HttpSender:
    """Sends to URLs, on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._routes: dict[str, _Route] = {}
        self._closed = False

    def send(self, to: Http, owed: Owed, now_ms: int) -> Result:
        """One attempt. What fails before the request is begun has not happened."""
        # An unknown outcome costs the operator's time here: no connection is used twice.
        once = to.policy.ambiguous == "review"
        try:
            route = _Route(to.url, self) if once else self._known(to)
        except ValueError:
            # Without the library's words, which may repeat a password.
            return Later("url is no http or https URL (correct it)", unreachable=True)
        try:
            return _post(route, to, owed, now_ms)
        finally:
            if once:
                route.pool.close()

    def close(self) -> None:
        """Close the idle connections; none is kept open from now on."""
        with self._lock:
            self._closed = True
            for route in self._routes.values():
                route.pool.close()

    @functools.cached_property
    def tls(self) -> ssl.SSLContext:
        # Made once, when it is needed: it reads all that the system trusts.
        return reach.trusting()

    def _known(self, to: Http) -> "_Route":
        """The way to a destination, with the connections that are open."""
        with self._lock:
            known = self._routes.get(to.name)
            if known is None or known.url != to.url:
                if known is not None:
                    known.pool.close()
                known = self._routes[to.name] = _Route(to.url, self)
            if self._closed:
                known.pool.close()
            return known


class _Route:
    """What a URL says, and the pool of connections to it. Raises ValueError for no http URL."""

    def __init__(self, url: str, sender: HttpSender) -> None:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        if parts.scheme not in ("http", "https") or not host:
            raise ValueError("it is no http or https URL")
        self.url = url
        self.place = parts.netloc.rpartition("@")[2]
        self.target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self.authorization: str | None = None
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self.authorization = f"Basic {b64encode(login.encode()).decode()}"
        self.pool: HTTPConnectionPool
        if parts.scheme == "https":
            self.pool = _TlsPool(host, port, maxsize=IDLE_CONNECTIONS_MAX, ssl_context=sender.tls)
        else:
            self.pool = _Pool(host, port, maxsize=IDLE_CONNECTIONS_MAX)


def _post(route: _Route, to: Http, owed: Owed, now_ms: int) -> Result:
    body = msgspec.json.encode(owed.body["json"])
    attempt = _Attempt(to.timeout_s)
    _attempt.set(attempt)
    try:
        answer = route.pool.urlopen(
            to.method,
            route.target,
            body,
            _headers(route, to, owed, body, now_ms),
            retries=False,
            redirect=False,
            timeout=to.timeout_s,
            preload_content=False,
            decode_content=False,
        )
    except _NotConnected as error:
        return Later(one_line(reach.words(error.__cause__, route.place)), unreachable=True)
    except ClosedPoolError:
        return Later("nothing was sent: the worker is stopping, or the url has changed")
    except _LOST as error:
        if not attempt.begun:
            # Without the library's words, which may repeat a password.
            return Later("url names no host that can be reached (correct it)", unreachable=True)
        return Unknown(_lost(error, f"{route.place} was sent the message", to.timeout_s))
    if 200 <= answer.status < 300:
        return _accepted(answer, route.place, to.timeout_s)
    answer.close()
    return _refused(answer, route.place, now_ms)


def _accepted(answer: BaseHTTPResponse, place: str, timeout_s: float) -> Result:
    """Sent, if the answer is whole as far as it is read: one that breaks off may be a crash."""
    said = f"{place} answered {_status(answer)}"
    left = ANSWER_BYTES_MAX
    try:
        while left > 0:
            read = answer.read(left)
            if not read:
                return Sent(said)
            left -= len(read)
    except _LOST as error:
        return Unknown(_lost(error, said, timeout_s))
    answer.close()
    return Sent(said)


def _refused(answer: BaseHTTPResponse, place: str, now_ms: int) -> Result:
    status = answer.status
    why = f"{place} answered {_status(answer)}"
    if status in RETRIED or 500 <= status < 600:
        after_s = _retry_after_s(answer.headers.get("Retry-After"), now_ms)
        asks = "" if after_s is None else f" and asks to wait {after_s:.0f} s"
        return Later(why + asks, retry_after_s=after_s)
    if 300 <= status < 400:
        why += ": redirects are not followed (put the final address into url)"
    elif status < 200:
        why += ", which is no answer to a message"
    return Never(why)


def _status(answer: BaseHTTPResponse) -> str:
    # The server's own phrase could say anything.
    try:
        return f"{answer.status} {HTTPStatus(answer.status).phrase}"
    except ValueError:
        return str(answer.status)


def _retry_after_s(value: str | None, now_ms: int) -> float | None:
    """Seconds to wait, from seconds or an HTTP date (RFC 9110, 10.2.3); None for neither."""
    if value is None:
        return None
    if _SECONDS.fullmatch(value.strip()):
        return float(min(int(value), RETRY_AFTER_S_MAX))
    try:
        when = parsedate_to_datetime(value)
        # A date without a zone is meant to be UTC.
        when = when if when.tzinfo else when.replace(tzinfo=UTC)
        after_s = when.timestamp() - now_ms / 1000
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(after_s, 0.0), RETRY_AFTER_S_MAX)


def _lost(error: Exception, before: str, timeout_s: float) -> str:
    if any(isinstance(one, TimedOut | TimeoutError) for one in (error, *error.args)):
        what = f"there was no whole answer within {timeout_s:g} s"
    elif any(type(one) is http.client.BadStatusLine for one in error.args):
        what = "what came back is not HTTP"
    else:
        what = "the connection broke off before the answer was whole"
    return one_line(f"{before}, but {what}: it may have been acted on")


# What is sent


def _headers(route: _Route, to: Http, owed: Owed, body: bytes, now_ms: int) -> HTTPHeaderDict:
    headers = HTTPHeaderDict(
        {"Content-Type": "application/json", "User-Agent": f"Receiver/{__version__}"}
    )
    if route.authorization is not None:
        headers["Authorization"] = route.authorization
    for name, value in owed.body["headers"].items():
        # Texts beyond Latin-1 go as UTF-8, which the library would refuse to encode.
        headers[name] = value.encode().decode("latin-1")
    headers["Idempotency-Key"] = owed.operation_key
    headers["X-Correlation-Id"] = _token(owed.correlation_id)
    if to.secret is not None:
        headers.update(_signature(to.secret, owed.operation_key, body, now_ms))
    return headers


def _signature(key: bytes, message_id: str, body: bytes, now_ms: int) -> dict[str, str]:
    """Standard Webhooks 1.0.0, the symmetric signature; the time is that of the attempt."""
    timestamp = str(now_ms // 1000)
    digest = hmac.digest(key, f"{message_id}.{timestamp}.".encode() + body, "sha256")
    return {
        "webhook-id": message_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": f"v1,{b64encode(digest).decode()}",
    }


def _token(text: str) -> str:
    return _UNSAFE.sub("_", text)[:_TOKEN_CHARS_MAX]


# Connections


class _Attempt:
    """The send of this thread: when it must have ended, and whether its request has begun."""

    def __init__(self, timeout_s: float) -> None:
        self.deadline = Deadline(timeout_s)
        self.begun = False


class _NotConnected(Exception):
    """There is no connection, so nothing of the request has left. The cause says why.

    No relative of the library's exceptions, which it would take for its own.
    """


class _Lines:
    """Hands on what a file reads, and notes the last line."""

    def __init__(self, file: BufferedReader) -> None:
        self._file = file
        self.close = file.close
        self.last = b""

    def readline(self, limit: int = -1) -> bytes:
        self.last = self._file.readline(limit)
        return self.last


class _Answer(http.client.HTTPResponse):
    def begin(self) -> None:
        self._begin_whole()
        # Interim answers may come before the one that counts (RFC 9110, 15.2).
        while self.status in (102, 103):
            self.headers = None  # type: ignore[assignment]  # as before `begin`
            self._begin_whole()

    def _begin_whole(self) -> None:
        """The library takes headers that break off for whole ones."""
        file = self.fp
        lines = _Lines(file)
        self.fp = lines  # type: ignore[assignment]  # `begin` reads lines only
        try:
            super().begin()
        finally:
            # None: it was closed on the way.
            if self.fp is not None:
                self.fp = file
        if not lines.last:
            raise http.client.IncompleteRead(b"")


class _Connection(HTTPConnection):
    response_class = _Answer
    _answered_s = 0.0

    def _new_conn(self) -> Socket:
        return reach.connect(self.host, self.port, _attempt.get().deadline)

    def connect(self) -> None:
        try:
            super().connect()
        except (OSError, HTTPError, ValueError) as error:
            self.close()
            raise _NotConnected from error

    def request(self, *args: Any, **kwargs: Any) -> None:
        if self.sock is None:
            self.connect()
        assert isinstance(self.sock, Socket | TlsSocket), "`connect` makes these"
        attempt = _attempt.get()
        self.sock.deadline = attempt.deadline
        attempt.begun = True
        super().request(*args, **kwargs)

    def getresponse(self) -> Any:
        response = super().getresponse()
        self._answered_s = time.monotonic()
        return response

    @property
    def is_connected(self) -> bool:
        """Whether the pool may use it again: young, not closed by the other side, and silent."""
        return time.monotonic() - self._answered_s < IDLE_S_MAX and super().is_connected


class _TlsConnection(_Connection, HTTPSConnection):
    pass


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


#: What the library raises once a request has begun. Chunk sizes below zero or beyond a machine
#: word get past its checks.
_LOST = (HTTPError, OSError, ValueError, OverflowError)
_attempt: ContextVar[_Attempt] = ContextVar("attempt")
_TOKEN_CHARS_MAX = 200
_SECONDS = re.compile(r"[0-9]{1,12}", re.ASCII)
_UNSAFE = re.compile(r"[^\x21-\x7e]")
