"""Turns requests into deliveries, and outcomes into answers; only here is a status chosen."""

import asyncio
import functools
import ipaddress
import json
import logging
import re
import time
import traceback
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from receiver.config import Network, Settings, Source
from receiver.http import RETRY_AFTER_S, request_ids
from receiver.process import Processor
from receiver.verify import Delivery, Event, Rejected, verify
from store import rejections
from store.database import Tx
from store.errors import Unavailable
from store.writer import Writer

#: Digits of an announced length.
LENGTH_DIGITS_MAX = 20
#: Members of one gzip body: each costs memory and time to begin.
GZIP_MEMBERS_MAX = 16
#: Characters of one value in a log line, and of a detail kept about a refusal.
FIELD_CHARS_MAX = 200
#: Seconds that refusals are counted in memory before they are written.
FLUSH_S = 1.0
#: Genuine but stale deliveries kept in memory until then.
EXPIRED_MAX = 20
#: This many stale deliveries of one source in so many milliseconds mean that a clock is wrong.
CLOCK_ALARM_COUNT = 3
CLOCK_ALARM_MS = 600_000
#: Lines about unexpected errors in one minute; the rest is only counted.
ERRORS_A_MINUTE_MAX = 10
#: Calls named of the way to an error, the innermost last.
TRAIL_CALLS_MAX = 4

log = logging.getLogger("receiver")

# Printable ASCII but space, quote, equals and backslash.
_PLAIN = re.compile(r"[!#-<>-\[\]-~]+")

Pairs = Sequence[tuple[bytes, bytes]]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes back: a status, and one word as the body."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


def answer(status: int, word: str, *extra: tuple[bytes, bytes]) -> Answer:
    body = word.encode() + b"\n"
    headers = (
        (b"content-type", b"text/plain"),
        (b"content-length", str(len(body)).encode()),
        *extra,
    )
    return Answer(status, headers, body)


_RETRY = (b"retry-after", str(RETRY_AFTER_S).encode())
# Words that an outcome may have, each with its two answers; any other is a mistake of ours.
_WORDS = ("done", "duplicate", "conflict", "ignored", "parked", "quarantined", "pending")
DONE = {word: answer(200, word) for word in _WORDS}
AGAIN = {word: answer(503, word, _RETRY) for word in _WORDS}
REJECTED = answer(401, "rejected")
FORBIDDEN = answer(403, "forbidden")
UNKNOWN = answer(404, "unknown")
METHOD = answer(405, "method", (b"allow", b"POST"))
TOO_LARGE = answer(413, "too-large")
ENCODING = answer(415, "encoding")
READ_ONLY = answer(405, "method", (b"allow", b"GET, HEAD"))
OK = answer(200, "ok")
READY = answer(200, "ready")
UNAVAILABLE = answer(503, "unavailable", _RETRY)


class Refused(Exception):
    """A delivery is over a limit or not allowed; `reason` is counted unless it is empty."""

    def __init__(self, reply: Answer, reason: str = "", detail: str = "") -> None:
        super().__init__(reason)
        self.reply = reply
        self.reason = reason
        self.detail = detail


class Disconnected(Exception):
    """The sender went away before its delivery was complete."""


class App:
    """The public ASGI application.

    `processor` may be replaced at any time; a delivery keeps the one it began with.
    """

    def __init__(self, processor: Processor, writer: Writer, clock: Callable[[], int]) -> None:
        self.processor = processor
        self.writer = writer
        self.clock = clock
        self.refusals = Refusals(writer)
        self.errors = Errors(clock)
        self.request_ids = request_ids()
        deliveries = Deliveries(self)
        self.router = Router(
            [
                Route("/webhooks/{source}", deliveries),
                # The same, never a redirect: senders do not follow one with a POST.
                Route("/webhooks/{source}/", deliveries),
            ],
            redirect_slashes=False,
            default=self._elsewhere,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.router(scope, receive, send)

    async def close(self) -> None:
        """Write the counts that are still in memory. The writer must be open."""
        await self.refusals.close()

    async def _elsewhere(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Every path that is no source's: 404, whatever the method."""
        request_id = next(self.request_ids)
        self.refusals.count("", "unknown", request_id, scope["path"], self.clock())
        await respond(send, UNKNOWN, request_id)


class Admin:
    """The admin application: whether the process lives, and whether it can take deliveries."""

    def __init__(self, is_ready: Callable[[], Awaitable[bool]]) -> None:
        self._is_ready = is_ready
        self._request_ids = request_ids()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = await self._answer(scope["method"], scope["path"])
        await respond(send, reply, next(self._request_ids))

    async def _answer(self, method: str, path: str) -> Answer:
        if path not in ("/healthz", "/readyz"):
            return UNKNOWN
        if method not in ("GET", "HEAD"):
            return READ_ONLY
        if path == "/healthz":
            return OK
        return READY if await self._is_ready() else UNAVAILABLE


class Deliveries:
    """The endpoint of every source."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app, request_id = self.app, next(self.app.request_ids)
        name = scope["path_params"]["source"]
        received_ms = app.clock()
        try:
            reply = await self._deliver(scope, receive, name, request_id, received_ms)
        except Disconnected:
            return
        except Refused as refused:
            reply = refused.reply
            if refused.reason:
                known = name if name in app.processor.settings.sources else ""
                app.refusals.count(known, refused.reason, request_id, refused.detail, received_ms)
        except Unavailable as error:
            reply = UNAVAILABLE
            app.refusals.count(name, "unavailable", request_id, str(error), received_ms)
        except Exception as error:
            # The one place for what nobody foresaw. 503: nothing was promised, and the sender
            # tries again, perhaps after a fix.
            reply = UNAVAILABLE
            app.errors.report(error, name, request_id)
        await respond(send, reply, request_id)

    async def _deliver(
        self, scope: Scope, receive: Receive, name: str, request_id: str, received_ms: int
    ) -> Answer:
        app, processor = self.app, self.app.processor
        settings = processor.settings
        started = time.perf_counter()
        source = find_source(settings, scope, name)
        headers: Pairs = scope["headers"]
        length_max = settings.server.body_bytes_max
        compressed, host = check_headers(headers, source, length_max)
        if source.allow_ips:
            check_address(scope, headers, source, settings.server.trusted_proxies)
        body = await read_body(receive, length_max)
        delivery = Delivery(
            method=scope["method"],
            url=sender_url(scope, source, host),
            headers=headers,
            body=body,
            received_ms=received_ms,
            inflated=inflate(body, length_max) if compressed else None,
        )
        try:
            events = verify(source.contract, delivery)
        except Rejected as rejected:
            app.refusals.reject(source.name, rejected, delivery, request_id)
            return REJECTED
        outcome = await app.writer.submit(
            functools.partial(processor.receive, events=events, request_id=request_id),
            functools.partial(processor.keep, events=events, request_id=request_id),
        )
        if log.isEnabledFor(logging.INFO):
            log_delivery(source.name, events, outcome.word, request_id, started)
        return AGAIN[outcome.word] if outcome.retry else DONE[outcome.word]


async def respond(send: Send, reply: Answer, request_id: str) -> None:
    headers = [*reply.headers, (b"x-request-id", request_id.encode())]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


# Limits, in the order in which they are applied; none of them needs the database.


def find_source(settings: Settings, scope: Scope, name: str) -> Source:
    if scope["method"] != "POST":
        raise Refused(METHOD)
    source = settings.sources.get(name)
    if source is None:
        raise Refused(UNKNOWN, "unknown", scope["path"])
    return source


def check_headers(headers: Pairs, source: Source, length_max: int) -> tuple[bool, bytes]:
    """Whether the body is gzip, and the Host; raises Refused for a length or an encoding."""
    compressed = False
    host = b""
    for name, value in headers:
        if name == b"content-length":
            # The parser has let only digits through, of any number.
            if len(value) > LENGTH_DIGITS_MAX or int(value) > length_max:
                raise Refused(TOO_LARGE, "too-large", f"{value.decode()} bytes were announced")
        elif name == b"content-encoding":
            compressed = check_encoding(value, source, compressed)
        elif name == b"host" and not host:
            host = value
    return compressed, host


def check_encoding(value: bytes, source: Source, compressed: bool) -> bool:
    coding = value.strip().lower()
    if coding in (b"", b"identity"):
        return compressed
    if coding not in (b"gzip", b"x-gzip") or compressed:
        raise Refused(ENCODING, "encoding", f"Content-Encoding {value.decode('latin-1')}")
    if not source.body_gzip:
        raise Refused(
            ENCODING, "encoding", f"gzip: set sources.{source.name}.gzip = true to accept it"
        )
    return True


def check_address(
    scope: Scope, headers: Pairs, source: Source, trusted: Sequence[Network | str]
) -> None:
    address = client_address(scope["client"], headers, trusted)
    if _within(address, source.allow_ips):
        return
    raise Refused(FORBIDDEN, "address", f"{address} is not in sources.{source.name}.allow_ips")


def client_address(
    client: tuple[str, int] | None, headers: Pairs, trusted: Sequence[Network | str]
) -> Address | str:
    """The address a delivery came from, or words for one that can't be told.

    X-Forwarded-For counts only from a trusted proxy, and of it only the right-most address that
    is not a trusted proxy itself: what is left of it was written by whoever sent it.
    """
    networks = [each for each in trusted if not isinstance(each, str)]
    here: Address | str = "an unknown address"
    if client is not None:
        here = "unix" if client[0] == "unix" else parse_address(client[0])
    if not (_within(here, networks) or (here == "unix" and "unix" in trusted)):
        return here
    for hop in forwarded_for(headers):
        here = parse_address(hop)
        if not _within(here, networks):
            break
    return here


def forwarded_for(headers: Pairs) -> Iterator[str]:
    """The hops of X-Forwarded-For, the nearest first."""
    for name, value in reversed(headers):
        if name == b"x-forwarded-for":
            for hop in reversed(value.decode("latin-1").split(",")):
                yield hop.strip()


def parse_address(text: str) -> Address | str:
    """An address with or without a port; the text itself if it is none."""
    bare = text
    if bare.startswith("["):
        bare = bare[1:].partition("]")[0]
    elif bare.count(":") == 1:
        bare = bare.partition(":")[0]
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return text[:FIELD_CHARS_MAX]
    # A socket for both families reports IPv4 peers this way.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _within(address: Address | str, networks: Iterable[Network]) -> bool:
    return not isinstance(address, str) and any(address in network for network in networks)


async def read_body(receive: Receive, length_max: int) -> bytes:
    """The whole body; raises Refused as soon as it is too long, Disconnected if it ends early."""
    chunks: list[bytes] = []
    length = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        chunk: bytes = message["body"]
        length += len(chunk)
        if length > length_max:
            raise Refused(TOO_LARGE, "too-large", f"more than {length_max} bytes")
        chunks.append(chunk)
        if not message["more_body"]:
            return b"".join(chunks)


def inflate(body: bytes, length_max: int) -> bytes:
    """A gzip body unpacked; raises Refused if it is not wholly gzip, or too long unpacked."""
    parts: list[bytes] = []
    left = length_max
    for _ in range(GZIP_MEMBERS_MAX):
        member = zlib.decompressobj(wbits=31)
        try:
            part = member.decompress(body, left + 1)
        except zlib.error:
            raise Refused(ENCODING, "encoding", "the body is not gzip") from None
        left -= len(part)
        if left < 0:
            raise Refused(TOO_LARGE, "too-large", f"more than {length_max} bytes unpacked")
        if not member.eof:
            raise Refused(ENCODING, "encoding", "the gzip body is cut short")
        parts.append(part)
        body = member.unused_data
        if not body:
            return b"".join(parts)
    raise Refused(ENCODING, "encoding", f"more than {GZIP_MEMBERS_MAX} gzip members")


def sender_url(scope: Scope, source: Source, host: bytes) -> str:
    """The URL as the sender sees it: under public_url, or as received.

    What X-Forwarded-Proto and its like say is not looked at: anyone can send them.
    """
    base = source.public_url
    if base is None:
        base = f"{scope['scheme']}://{host.decode('latin-1')}"
    query = scope["query_string"]
    path: str = scope["raw_path"].decode("latin-1")
    return f"{base}{path}?{query.decode('latin-1')}" if query else base + path


# What is told to the operator.


def log_delivery(
    source: str, events: Sequence[Event], word: str, request_id: str, started: float
) -> None:
    event = events[0]
    more = f" events={len(events)}" if len(events) > 1 else ""
    ms = (time.perf_counter() - started) * 1000
    # Whole already: logging would format it more slowly.
    log.info(
        f"delivery source={source} event={field(event.event_id)} type={field(event.type)} "
        f"outcome={word} request={request_id} ms={ms:.1f}{more}"
    )


def field(value: str) -> str:
    """A value for a log line: cut, and quoted with escapes if it is not one plain word."""
    if len(value) > FIELD_CHARS_MAX:
        value = value[:FIELD_CHARS_MAX] + "..."
    return value if _PLAIN.fullmatch(value) else json.dumps(value)


@dataclass(slots=True)
class Count:
    """How often a source refused for one reason; the last one's request id and detail."""

    count: int
    logged: int
    first_ms: int
    last_ms: int
    request_id: str
    detail: str


@dataclass(frozen=True, slots=True)
class Expired:
    """A genuine delivery that came too late or too early."""

    source: str
    request_id: str
    delivery: Delivery
    skew_s: int
    detail: str


class Refusals:
    """Counts what was refused, in memory, and writes it about once a second.

    Bounded by sources and reasons, whatever is sent: garbage costs no row and no line each.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._counts: dict[tuple[str, str], Count] = {}
        self._expired: list[Expired] = []
        self._clock_alarms: dict[str, deque[int]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._written: asyncio.Future[None] | None = None

    def count(self, source: str, reason: str, request_id: str, detail: str, at_ms: int) -> None:
        detail = detail[:FIELD_CHARS_MAX]
        known = self._counts.get((source, reason))
        if known is None:
            self._counts[source, reason] = Count(1, 0, at_ms, at_ms, request_id, detail)
        else:
            known.count += 1
            known.last_ms, known.request_id, known.detail = at_ms, request_id, detail
        self._schedule()

    def reject(self, source: str, rejected: Rejected, delivery: Delivery, request_id: str) -> None:
        """Count a delivery that is not genuine, or keep one that is but is not of now."""
        at_ms = delivery.received_ms
        self.count(source, rejected.reason, request_id, rejected.detail, at_ms)
        if rejected.reason != "expired":
            return
        skew_s = rejected.skew_s or 0
        if len(self._expired) < EXPIRED_MAX:
            detail = rejected.detail[:FIELD_CHARS_MAX]
            self._expired.append(Expired(source, request_id, delivery, skew_s, detail))
        self._watch_clock(source, at_ms, skew_s)

    def flush(self) -> "asyncio.Future[None]":
        """Write and log what was counted; what can't be written now is written later."""
        self._timer = None
        counts, self._counts = self._counts, {}
        expired, self._expired = self._expired, []
        for (source, reason), count in counts.items():
            _log_count(source, reason, count)
        written = self._writer.submit(lambda tx: _write(tx, counts, expired))
        written.add_done_callback(lambda future: self._restore(future, counts, expired))
        self._written = written
        return written

    async def close(self) -> None:
        """Write what is left, as well as it goes."""
        if self._timer is not None:
            self._timer.cancel()
            self.flush()
        if self._written is not None:
            await asyncio.wait([self._written])
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def _restore(
        self,
        written: "asyncio.Future[None]",
        counts: dict[tuple[str, str], Count],
        expired: list[Expired],
    ) -> None:
        if written.cancelled() or written.exception() is None:
            return
        for key, count in counts.items():
            newer = self._counts.get(key)
            if newer is not None:
                newer.count += count.count
                newer.logged += count.logged
                newer.first_ms = count.first_ms
            else:
                self._counts[key] = count
        self._expired = (expired + self._expired)[:EXPIRED_MAX]
        self._schedule()

    def _watch_clock(self, source: str, at_ms: int, skew_s: int) -> None:
        seen = self._clock_alarms.setdefault(source, deque(maxlen=CLOCK_ALARM_COUNT))
        seen.append(at_ms)
        if len(seen) < CLOCK_ALARM_COUNT or at_ms - seen[0] > CLOCK_ALARM_MS:
            return
        seen.clear()
        log.error(
            "clock source=%s skew_s=%d: genuine deliveries are stale or from the future; "
            "set this machine's clock (timedatectl), then `receiver rejections accept`",
            source,
            skew_s,
        )


def _log_count(source: str, reason: str, count: Count) -> None:
    fresh = count.count - count.logged
    if fresh <= 0:
        return
    count.logged = count.count
    log.warning(
        "refused source=%s reason=%s count=%d request=%s detail=%s",
        field(source),
        reason,
        fresh,
        count.request_id,
        field(count.detail),
    )


def _write(tx: Tx, counts: dict[tuple[str, str], Count], expired: Sequence[Expired]) -> None:
    for (source, reason), count in counts.items():
        rejections.add(
            tx,
            source,
            reason,
            count.count,
            count.first_ms,
            count.last_ms,
            count.request_id,
            count.detail,
        )
    for each in expired:
        delivery = each.delivery
        rejections.keep_expired(
            tx,
            each.source,
            each.request_id,
            headers_json(delivery.headers),
            delivery.body,
            delivery.received_ms,
            each.skew_s,
            each.detail,
        )


def headers_json(headers: Pairs) -> str:
    """Pairs of text in order, one character a byte."""
    pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
    return json.dumps(pairs)


class Errors:
    """Reports what should not happen, a bounded number of lines a minute."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._minute = 0
        self._reported = 0

    def report(self, error: Exception, source: str, request_id: str) -> None:
        """One line that says where; the error's own text may hold a payload and is left out."""
        minute = self._clock() // 60_000
        if minute != self._minute:
            self._minute, self._reported = minute, 0
        self._reported += 1
        if self._reported > ERRORS_A_MINUTE_MAX:
            return
        log.error(
            "unexpected source=%s request=%s error=%s at=%s (answered 503; please report it)",
            field(source),
            request_id,
            type(error).__name__,
            trail_of(error),
        )


def trail_of(error: BaseException) -> str:
    """Where an error was raised, innermost last; never its text."""
    calls = traceback.extract_tb(error.__traceback__)[-TRAIL_CALLS_MAX:]
    return ",".join(f"{Path(each.filename).name}:{each.lineno}" for each in calls) or "nowhere"
