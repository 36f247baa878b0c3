"""Reads a sender's API: one bounded, timed request, and what its answer means."""

import functools
import re
import ssl
import threading
from base64 import b64encode

import msgspec
from urllib3 import BaseHTTPResponse

from receiver import __version__, api, described, reach
from receiver.config import Api
from receiver.destinations import Later, Never, one_line
from receiver.exchange import (
    LOST,
    RETRIED,
    RETRY_AFTER_S_MAX,
    NotSent,
    Route,
    lost_words,
    retry_after_s,
    status_of,
)

#: Bytes of an answer, and of a page of a list; a longer one is given up.
ANSWER_BYTES_MAX, PAGE_BYTES_MAX = 4_194_304, 16_777_216

#: Seconds for a whole request, connecting and the last byte of its answer included.
TIMEOUT_S = 30.0

#: The sender's short word for what went wrong is shown if it looks like one.
_TEN = re.compile(r"[0-9]{10}$", re.ASCII)
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)


class Found(msgspec.Struct, frozen=True):
    """The sender's answer, decoded; `headers` have names in lower case."""

    document: object
    headers: dict[str, str]


class Missing(msgspec.Struct, frozen=True):
    """The sender says that there is no such thing."""

    why: str


class Refused(Later, frozen=True):
    """Nothing can be had until the set-up is corrected."""


class Elsewhere(Later, frozen=True):
    """It is there, but in the other mode than that of the key."""


#: Later: it may be had later, `unreachable` if nothing else can be had now either. Never: not so.
Reply = Found | Missing | Later | Never


class Client:
    """One sender's API, on any thread. Never to be used inside a transaction."""

    def __init__(self, reach_by: Api, livemode: bool | None = None) -> None:
        self.api = reach_by
        self.livemode = livemode
        self._lock = threading.Lock()
        self._route: Route | None = None

    def resource(self, path: str, resource_id: str, *, account: str, now_ms: int) -> Reply:
        """One resource. `path` has {id}, and is the config's: nothing that was sent chooses it."""
        reply = self.ask("GET", api.filled(path, resource_id), account=account, now_ms=now_ms)
        if not isinstance(reply, Found):
            return reply
        sender, document = self.api.sender, reply.document
        found_id = described.value(sender.id, document)
        if sender.id is not None and found_id != resource_id:
            return Never(f"the answer is about another thing than {resource_id}")
        mode = self.mode_of(document)
        if self.livemode is not None and mode is not None and mode is not self.livemode:
            return self.other_mode(mode)
        if described.holds(sender.deleted, document):
            return Missing("it is deleted")
        return reply

    def mode_of(self, document: object) -> bool | None:
        """Whether it is live data; None where it does not say."""
        mode = described.value(self.api.sender.livemode, document)
        return mode if isinstance(mode, bool) else None

    def other_mode(self, mode: bool) -> Refused:
        """What is read with this key is not what the source is about."""
        assert self.livemode is not None, "only where the source has a mode"
        why = f"the answer is {_mode(mode)} data: {_key_of(self.livemode)}"
        return Refused(why, None, True)

    def ask(
        self,
        method: str,
        target: str,
        *,
        account: str = "",
        now_ms: int,
        bytes_max: int | None = None,
    ) -> Reply:
        """One request; `target` is the path behind the base URL, with its query."""
        try:
            route = self._known()
            answer = route.begin(
                method,
                route.target.rstrip("/") + target,
                None,
                self._headers(account),
                TIMEOUT_S,
            )
        except NotSent as error:
            return Later(one_line(str(error)), None, error.unreachable)
        except LOST as error:
            return Later(one_line(f"{self._place}: {lost_words(error, TIMEOUT_S)}"), None)
        return self._judged(answer, now_ms, bytes_max or ANSWER_BYTES_MAX)

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            if self._route is not None:
                self._route.pool.close()

    @functools.cached_property
    def _tls(self) -> ssl.SSLContext:
        return reach.trusting()

    @property
    def _place(self) -> str:
        return self._known().place

    def _known(self) -> Route:
        with self._lock:
            if self._route is None:
                self._route = Route(self.api.base_url, lambda: self._tls)
            return self._route

    def _headers(self, account: str) -> dict[str, str]:
        sender, key = self.api.sender, self.api.key.decode("latin-1")
        # Nothing compressed: what is read is bounded, what it inflates to would not be.
        headers = {"Accept": "application/json", "User-Agent": f"Receiver/{__version__}"}
        headers |= {"Accept-Encoding": "identity", **sender.headers}
        match sender.auth:
            case "bearer":
                headers["Authorization"] = f"Bearer {key}"
            case "basic":
                headers["Authorization"] = f"Basic {b64encode(self.api.key + b':').decode()}"
            case name:
                headers[name] = key
        if account and sender.account is not None:
            headers[sender.account] = account
        if self.api.version is not None and sender.version is not None:
            headers[sender.version] = self.api.version
        return headers

    def _judged(self, answer: BaseHTTPResponse, now_ms: int, bytes_max: int) -> Reply:
        said = f"{self._place} answered {status_of(answer)}"
        try:
            text = _whole(answer, bytes_max)
        except LOST as error:
            return Later(one_line(f"{said}, but {lost_words(error, TIMEOUT_S)}"), None)
        finally:
            answer.close()
        if 200 <= answer.status < 300:
            if text is None:
                return Never(f"{said} with more than {bytes_max} bytes")
            return _decoded(answer, text, said)
        return self._refused(answer, text or b"", said, now_ms)

    def _refused(self, answer: BaseHTTPResponse, text: bytes, said: str, now_ms: int) -> Reply:
        status, document = answer.status, _json(text)
        word = described.value(self.api.sender.says, document)
        if isinstance(word, str) and _WORD.fullmatch(word):
            said += f" ({word})"
        after_s = _wait_s(answer, now_ms)
        if status in RETRIED or 500 <= status < 600 or (status == 403 and after_s is not None):
            asks = "" if after_s is None else f" and asks to wait {after_s:.0f} s"
            # Who asks too much is refused whatever it asks for.
            return Later(said + asks, after_s, unreachable=status in (403, 429))
        if status in (404, 410):
            return self._not_there(document, said)
        # What is wrong is the set-up: no other resource could be read either.
        match status:
            case 401:
                return Refused(f"{said}: the key is refused (correct api.key)", None, True)
            case 403:
                why = "the key may not read this (give it the permission, or use another)"
                return Refused(f"{said}: {why}", None, True)
        if 300 <= status < 400:
            why = "redirects are not followed (put the final address into api.base_url)"
            return Refused(f"{said}: {why}", None, True)
        return Never(said)

    def _not_there(self, document: object, said: str) -> Reply:
        sender = self.api.sender
        if described.holds(sender.misplaced, document):
            other = "" if self.livemode is None else f": {_key_of(self.livemode)}"
            why = f"{said}: it is there in the other mode, not for this key{other}"
            return Elsewhere(why, None)
        if sender.missing is None or described.holds(sender.missing, document):
            return Missing(said)
        why = "but not that this thing is missing (is api.base_url right?)"
        return Later(f"{said}, {why}", None)


def _wait_s(answer: BaseHTTPResponse, now_ms: int) -> float | None:
    """How long the answer asks to wait; docs.github.com has the limit's end in a header."""
    after_s = retry_after_s(answer.headers.get("Retry-After"), now_ms)
    ends = answer.headers.get("X-RateLimit-Reset", "")
    if after_s is None and answer.headers.get("X-RateLimit-Remaining") == "0" and _TEN.match(ends):
        return min(max(int(ends) - now_ms / 1000, 1.0), RETRY_AFTER_S_MAX)
    return after_s


def _whole(answer: BaseHTTPResponse, bytes_max: int) -> bytes | None:
    """The body of an answer, or None if it is too long."""
    text = bytearray()
    while read := answer.read(65_536):
        text += read
        if len(text) > bytes_max:
            return None
    return bytes(text)


def _decoded(answer: BaseHTTPResponse, text: bytes, said: str) -> Reply:
    document = _json(text)
    if document is None and text:
        return Later(f"{said}, but with something else than JSON (is api.base_url right?)", None)
    return Found(document, {name.lower(): value for name, value in answer.headers.items()})


def _json(text: bytes) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None


def _mode(live: bool) -> str:
    return "live" if live else "test"


def _key_of(live: bool) -> str:
    return f"use a key for {_mode(live)} data in api.key"
