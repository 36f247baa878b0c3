"""Sends one HTTP request within its time limit, and tells what left from what did not."""

import http.client
import logging
import re
import ssl
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from io import BufferedReader
from typing import Any
from urllib.parse import unquote, urlsplit

from urllib3 import BaseHTTPResponse, HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ClosedPoolError, HTTPError
from urllib3.exceptions import TimeoutError as TimedOut

from receiver import reach
from receiver.reach import Deadline, Socket, TlsSocket

#: Seconds that a connection stays usable after an answer. Short: servers close idle ones, and a
#: request that crosses the close has an unknown outcome.
IDLE_S_MAX = 2.0

#: Idle connections to one place: no fewer than there are threads.
IDLE_CONNECTIONS_MAX = 32

#: Seconds that Retry-After may ask for.
RETRY_AFTER_S_MAX = 86_400

#: Statuses that ask for another attempt, besides 5xx.
RETRIED = frozenset({408, 425, 429})

#: What the library raises once a request has begun. Chunk sizes below zero or beyond a machine
#: word get past its checks.
LOST = (HTTPError, OSError, ValueError, OverflowError)

# Its warnings name whole URLs, and a URL may be a secret.
logging.getLogger("urllib3").setLevel(logging.CRITICAL)


class Route:
    """What a URL says, and the pool of connections to it. Raises ValueError for no http URL."""

    def __init__(self, url: str, tls: Callable[[], ssl.SSLContext]) -> None:
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
            self.pool = _TlsPool(host, port, maxsize=IDLE_CONNECTIONS_MAX, ssl_context=tls())
        else:
            self.pool = _Pool(host, port, maxsize=IDLE_CONNECTIONS_MAX)

    def begin(
        self,
        method: str,
        target: str,
        body: bytes | None,
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> BaseHTTPResponse:
        """Send a request and read the head of its answer; its body is left to the caller.

        The limit is for all of it, the last byte of the body included. Raises NotSent, or one
        of LOST once something may have left.
        """
        attempt = _Attempt(timeout_s)
        _attempt.set(attempt)
        try:
            return self.pool.urlopen(
                method,
                target,
                body,
                headers,
                retries=False,
                redirect=False,
                timeout=timeout_s,
                preload_content=False,
                decode_content=False,
            )
        except _NotConnected as error:
            raise NotSent(reach.words(error.__cause__, self.place)) from error
        except ClosedPoolError as error:
            why = "nothing was sent: the worker is stopping, or the url has changed"
            raise NotSent(why, unreachable=False) from error
        except LOST as error:
            if attempt.begun:
                raise
            # Without the library's words, which may repeat a password.
            raise NotSent("url names no host that can be reached (correct it)") from error


class NotSent(Exception):
    """Nothing has left; the message says why. `unreachable`: no other request would go either."""

    def __init__(self, why: str, *, unreachable: bool = True) -> None:
        super().__init__(why)
        self.unreachable = unreachable


def status_of(answer: BaseHTTPResponse) -> str:
    """The status, with its usual phrase."""
    # The server's own phrase could say anything.
    try:
        return f"{answer.status} {HTTPStatus(answer.status).phrase}"
    except ValueError:
        return str(answer.status)


def retry_after_s(value: str | None, now_ms: int) -> float | None:
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


def lost_words(error: Exception, timeout_s: float) -> str:
    """Why there is no whole answer."""
    if any(isinstance(one, TimedOut | TimeoutError) for one in (error, *error.args)):
        return f"there was no whole answer within {timeout_s:g} s"
    if any(type(one) is http.client.BadStatusLine for one in error.args):
        return "what came back is not HTTP"
    return "the connection broke off before the answer was whole"


# Connections


class _Attempt:
    """The request of this thread: when it must have ended, and whether it has begun."""

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


_attempt: ContextVar[_Attempt] = ContextVar("attempt")
_SECONDS = re.compile(r"[0-9]{1,12}", re.ASCII)
