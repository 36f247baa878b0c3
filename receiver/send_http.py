"""Posts a message to a URL, and judges what its answer means."""

import functools
import hmac
import re
import ssl
import threading
from base64 import b64encode

import msgspec
from urllib3 import BaseHTTPResponse, HTTPHeaderDict

from receiver import __version__, reach
from receiver.destinations import Http, Later, Never, Owed, Result, Sent, Unknown, one_line
from receiver.exchange import LOST, RETRIED, NotSent, Route, lost_words, retry_after_s, status_of

#: Bytes of an answer that are read; then the connection is closed.
ANSWER_BYTES_MAX = 65_536


class HttpSender:
    """Sends to URLs, on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._routes: dict[str, Route] = {}
        self._closed = False

    def send(self, to: Http, owed: Owed, now_ms: int) -> Result:
        """One attempt. What fails before the request is begun has not happened."""
        # An unknown outcome costs the operator's time here: no connection is used twice.
        once = to.policy.ambiguous == "review"
        try:
            route = Route(to.url, lambda: self.tls) if once else self._known(to)
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

    def _known(self, to: Http) -> Route:
        """The way to a destination, with the connections that are open."""
        with self._lock:
            known = self._routes.get(to.name)
            if known is None or known.url != to.url:
                if known is not None:
                    known.pool.close()
                known = self._routes[to.name] = Route(to.url, lambda: self.tls)
            if self._closed:
                known.pool.close()
            return known


def _post(route: Route, to: Http, owed: Owed, now_ms: int) -> Result:
    body = msgspec.json.encode(owed.body["json"])
    headers = _headers(route, to, owed, body, now_ms)
    try:
        answer = route.begin(to.method, route.target, body, headers, to.timeout_s)
    except NotSent as error:
        return Later(one_line(str(error)), unreachable=error.unreachable)
    except LOST as error:
        return Unknown(_lost(error, f"{route.place} was sent the message", to.timeout_s))
    if 200 <= answer.status < 300:
        return _accepted(answer, route.place, to.timeout_s)
    answer.close()
    return _refused(answer, route.place, now_ms)


def _accepted(answer: BaseHTTPResponse, place: str, timeout_s: float) -> Result:
    """Sent, if the answer is whole as far as it is read: one that breaks off may be a crash."""
    said = f"{place} answered {status_of(answer)}"
    left = ANSWER_BYTES_MAX
    try:
        while left > 0:
            read = answer.read(left)
            if not read:
                return Sent(said)
            left -= len(read)
    except LOST as error:
        return Unknown(_lost(error, said, timeout_s))
    answer.close()
    return Sent(said)


def _refused(answer: BaseHTTPResponse, place: str, now_ms: int) -> Result:
    status = answer.status
    why = f"{place} answered {status_of(answer)}"
    if status in RETRIED or 500 <= status < 600:
        after_s = retry_after_s(answer.headers.get("Retry-After"), now_ms)
        asks = "" if after_s is None else f" and asks to wait {after_s:.0f} s"
        return Later(why + asks, retry_after_s=after_s)
    if 300 <= status < 400:
        why += ": redirects are not followed (put the final address into url)"
    elif status < 200:
        why += ", which is no answer to a message"
    return Never(why)


def _lost(error: Exception, before: str, timeout_s: float) -> str:
    return one_line(f"{before}, but {lost_words(error, timeout_s)}: it may have been acted on")


# What is sent


def _headers(route: Route, to: Http, owed: Owed, body: bytes, now_ms: int) -> HTTPHeaderDict:
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


_TOKEN_CHARS_MAX = 200
_UNSAFE = re.compile(r"[^\x21-\x7e]")
