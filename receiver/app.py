"""Turns requests into deliveries, and outcomes into answers; only here is a status chosen."""

import functools
import ipaddress
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from receiver import logs
from receiver.config import Network, Settings, Source
from receiver.http import RETRY_AFTER_S, request_ids
from receiver.logs import FIELD_CHARS_MAX, Delivered, Errors
from receiver.process import Outcome, Processor, correlation_of, words_of_keys
from receiver.tally import Pairs, Seen, Tally
from receiver.verify import Delivery, Event, Rejected, verify
from store.errors import Unavailable
from store.writer import Writer

#: Digits of an announced length.
LENGTH_DIGITS_MAX = 20
#: Members of one gzip body: each costs memory and time to begin.
GZIP_MEMBERS_MAX = 16

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
        self.tally = Tally(writer)
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
        await self.tally.close()

    async def _elsewhere(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Every path that is no source's: 404, whatever the method."""
        request_id = next(self.request_ids)
        seen = seen_in(scope, self.processor.settings)
        self.tally.refuse("", "unknown", request_id, scope["path"], self.clock(), seen)
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
        app, name = self.app, scope["path_params"]["source"]
        received_ms = app.clock()
        request_id = f"{received_ms:x}-{next(app.request_ids)}"
        try:
            reply = await self._deliver(scope, receive, name, request_id, received_ms)
        except Disconnected:
            return
        except Refused as refused:
            reply = refused.reply
            if refused.reason:
                settings = app.processor.settings
                known = name if name in settings.sources else ""
                seen, detail = seen_in(scope, settings), refused.detail
                app.tally.refuse(known, refused.reason, request_id, detail, received_ms, seen)
        except Unavailable as error:
            reply = UNAVAILABLE
            seen = seen_in(scope, app.processor.settings)
            app.tally.refuse(name, "unavailable", request_id, str(error), received_ms, seen)
        except Exception as error:
            # The one place for what nobody foresaw. 503: nothing was promised, and the sender
            # tries again, perhaps after a fix.
            reply = UNAVAILABLE
            app.errors.report(error, source=name, request=request_id)
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
            seen = seen_in(scope, settings)
            app.tally.reject(source, rejected, delivery, request_id, seen)
            return REJECTED
        outcome = await app.writer.submit(
            functools.partial(processor.receive, events=events, request_id=request_id),
            functools.partial(processor.keep, events=events, request_id=request_id),
        )
        app.tally.use(source.name, events[0].secret, received_ms)
        log_delivery(events, outcome, request_id, started)
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


def seen_in(scope: Scope, settings: Settings) -> Seen:
    headers: Pairs = scope["headers"]
    trusted = settings.server.trusted_proxies
    address = functools.partial(client_address, scope["client"], headers, trusted)
    return Seen(scope["method"], headers, address)


def log_delivery(
    events: Sequence[Event], outcome: Outcome, request_id: str, started: float
) -> None:
    event = events[0]
    logs.delivered(
        Delivered(
            at=logs.lines.now(),
            source=event.source,
            account=event.account,
            id=event.key_id,
            type=event.type,
            correlation=correlation_of(outcome.row),
            keys=words_of_keys(outcome.keys),
            outcome=outcome.word,
            request=request_id,
            ms=round((time.perf_counter() - started) * 1000, 1),
            events=len(events),
        )
    )
