"""Turns requests into deliveries, and outcomes into answers; only here is a status chosen."""

import functools
import ipaddress
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

import msgspec
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from receiver import logs
from receiver.captures import Captures, reference
from receiver.certificate_book import Book
from receiver.coded import CertificateMissing
from receiver.config import Network, Settings, Source
from receiver.counters import Counters
from receiver.handshakes import Handshake
from receiver.http import RETRY_AFTER_S, request_ids
from receiver.logs import FIELD_CHARS_MAX, Delivered, Errors, log
from receiver.presets import PATH_SECRET_CHARS_MIN, Preset
from receiver.process import Outcome, Processor, correlation_of, words_of_keys
from receiver.replies import ACCEPTED, Reply
from receiver.tally import Pairs, Seen, Tally
from receiver.verify import BAD_SIGNATURE, Delivery, Event, Rejected, verify
from store import captured
from store.errors import Unavailable
from store.writer import Writer

#: What the name of a source follows.
PATH = "/webhooks/"
#: Digits of an announced length.
LENGTH_DIGITS_MAX = 20
#: Members of one gzip body: each costs memory and time to begin.
GZIP_MEMBERS_MAX = 16
#: Milliseconds in which the handshakes of one source have one line.
HANDSHAKE_LINE_MS = 1_000

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Answer(msgspec.Struct, frozen=True):
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
# Each word of an outcome with its two answers; any other word is a mistake of ours.
DONE = {word: answer(200, word) for word in ACCEPTED}
AGAIN = {word: answer(503, word, _RETRY) for word in ACCEPTED}
# Another handshake was first.
NOT_ARMED = (BAD_SIGNATURE, "it brings a secret, and the source is not armed any more")
REJECTED = answer(401, "rejected")
FORBIDDEN = answer(403, "forbidden")
UNKNOWN = answer(404, "unknown")
METHOD = answer(405, "method", (b"allow", b"POST"))
TOO_LARGE = answer(413, "too-large")
ENCODING = answer(415, "encoding")
READ_ONLY = answer(405, "method", (b"allow", b"GET, HEAD"))
OK = answer(200, "ok")
READY = answer(200, "ready")
#: https://prometheus.io/docs/instrumenting/exposition_formats/
METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
UNAVAILABLE = answer(503, "unavailable", _RETRY)


def sized(status: int, body: bytes, headers: Iterable[tuple[str, str]]) -> Answer:
    """An answer whose headers are the sender's wish; RFC 9110 forbids a 204 any length."""
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers]
    if status != 204:
        pairs.append((b"content-length", b"%d" % len(body)))
    return Answer(status, tuple(pairs), body)


def outcome_answer(preset: Preset, outcome: Outcome) -> Answer:
    if outcome.retry:
        return AGAIN[outcome.word]
    if preset.statuses is None:
        return DONE[outcome.word]
    return wished(preset, outcome.word, DONE[outcome.word])


def wished(preset: Preset, word: str, usual: Answer) -> Answer:
    """The answer that the sender wants for a word, or the usual one."""
    if preset.statuses is None:
        return usual
    return _wishes(preset.statuses).get(word, usual)


@functools.lru_cache(maxsize=256)
def _wishes(statuses: tuple[tuple[str, Reply], ...]) -> dict[str, Answer]:
    return {
        word: _wish(reply.status, word + "\n" if reply.body is None else reply.body)
        for word, reply in statuses
    }


def _wish(status: int, body: str) -> Answer:
    return sized(status, body.encode(), [("content-type", "text/plain")])


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

    def __init__(
        self,
        processor: Processor,
        writer: Writer,
        clock: Callable[[], int],
        captures: Captures | None = None,
        certificates: Book | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.certificates = certificates or Book(clock)
        self.processor = processor
        self.writer = writer
        self.clock = clock
        self.captures = captures or Captures()
        self.tally = Tally(writer, counters or Counters())
        self.greetings = Greetings()
        self.errors = Errors(clock)
        self.request_ids = request_ids()
        self.deliveries = Deliveries(self)
        self.router = Router(
            [
                Route(f"{PATH}{{source}}", self.deliveries),
                # The same, never a redirect: senders do not follow one with a POST. Of a sender
                # that can show its secret nowhere else, the secret follows.
                Route(f"{PATH}{{source}}/{{rest:path}}", self.deliveries),
            ],
            redirect_slashes=False,
            default=self._elsewhere,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path"].removeprefix(PATH)
        if name in self.processor.settings.sources:
            # Nearly all: no pattern needs to be matched.
            scope["path_params"] = {"source": name}
            await self.deliveries(scope, receive, send)
        else:
            await self.router(scope, receive, send)

    async def close(self) -> None:
        """Write the counts that are still in memory. The writer must be open."""
        await self.tally.close()

    async def _elsewhere(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Every path that is no source's: 404, whatever the method."""
        request_id = next(self.request_ids)
        seen = seen_in(scope, self.processor.settings)
        self.tally.refuse("", "unknown", request_id, masked(scope["path"]), self.clock(), seen)
        await respond(send, UNKNOWN, request_id)


class Admin:
    """The admin application: whether the process lives, can take deliveries, and its metrics."""

    def __init__(
        self, is_ready: Callable[[], bool], metrics: Callable[[], Awaitable[bytes]]
    ) -> None:
        self._is_ready = is_ready
        self._metrics = metrics
        self._request_ids = request_ids()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = await self._answer(scope["method"], scope["path"])
        await respond(send, reply, next(self._request_ids))

    async def _answer(self, method: str, path: str) -> Answer:
        if path not in ("/healthz", "/readyz", "/metrics"):
            return UNKNOWN
        if method not in ("GET", "HEAD"):
            return READ_ONLY
        if path == "/healthz":
            return OK
        if path == "/readyz":
            return READY if self._is_ready() else UNAVAILABLE
        text = await self._metrics()
        length = (b"content-length", str(len(text)).encode())
        return Answer(200, ((b"content-type", METRICS_TYPE), length), text)


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
        delivery = await read_delivery(scope, receive, source, settings, received_ms)
        contract = source.contract
        if contract.preset.captures:
            contract = app.captures.contract(contract, received_ms)
        try:
            judged = verify(contract, delivery, app.certificates)
        except CertificateMissing as missing:
            asker = str(seen_in(scope, settings).address())
            app.certificates.want(missing.url, source.certificates_url, asker)
            raise Refused(UNAVAILABLE, "certificate", str(missing)) from None
        except Rejected as rejected:
            seen = seen_in(scope, settings)
            app.tally.reject(source, rejected, delivery, request_id, seen)
            return wished(contract.preset, "rejected", REJECTED)
        if isinstance(judged, Handshake):
            return await self._greet(scope, source, delivery, judged, request_id)
        if not judged:
            # An empty batch, by which a sender asks whether we live.
            app.greetings.tell(source.name, "an empty batch", request_id, received_ms)
            return outcome_answer(contract.preset, Outcome("ignored"))
        outcome = await app.writer.submit(
            functools.partial(processor.receive, events=judged, request_id=request_id),
            functools.partial(processor.keep, events=judged, request_id=request_id),
            hurried=True,
        )
        app.tally.deliver(source.name, outcome.word, judged[0].secret, received_ms)
        log_delivery(judged, outcome, request_id, started)
        return outcome_answer(contract.preset, outcome)

    async def _greet(
        self, scope: Scope, source: Source, delivery: Delivery, given: Handshake, request_id: str
    ) -> Answer:
        """Answer a handshake; a secret that it brings is durable before that."""
        app, at_ms, secret = self.app, delivery.received_ms, given.captured
        if secret is not None:
            seen = seen_in(scope, app.processor.settings)
            address = str(seen.address())
            number = await app.writer.submit(
                lambda tx: captured.keep(tx, source.name, secret, address, request_id)
            )
            if number is None:
                app.captures.disarm(source.name)
                app.tally.reject(source, Rejected(*NOT_ARMED), delivery, request_id, seen)
                return wished(source.contract.preset, "rejected", REJECTED)
            app.captures.add(source.name, number, secret)
            log.warning(
                "captured",
                source=source.name,
                secret=reference(number),
                address=address,
                request=request_id,
                hint="not armed any more; if that was not your sender, `receiver sources forget`",
            )
        app.greetings.tell(source.name, f"answered {given.status}", request_id, at_ms)
        return sized(given.status, given.body, given.all_headers)


async def respond(send: Send, reply: Answer, request_id: str) -> None:
    headers = [*reply.headers, (b"x-request-id", request_id.encode())]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


# Limits, in the order in which they are applied; none of them needs the database.


def find_source(settings: Settings, scope: Scope, name: str) -> Source:
    method, source = scope["method"], settings.sources.get(name)
    if method != "POST" and (source is None or method not in source.contract.preset.methods):
        raise Refused(METHOD)
    rest: str = scope["path_params"].get("rest", "")
    if source is None or (rest and not (source.contract.preset.in_path and is_step(rest))):
        raise Refused(UNKNOWN, "unknown", masked(scope["path"]))
    return source


def is_step(rest: str) -> bool:
    return "/" not in rest.removesuffix("/")


def masked(path: str) -> str:
    """The path without what may be the secret of one."""
    return "/".join(
        "..." if len(step) >= PATH_SECRET_CHARS_MIN else step for step in path.split("/")
    )


async def read_delivery(
    scope: Scope, receive: Receive, source: Source, settings: Settings, received_ms: int
) -> Delivery:
    """The delivery, once its head and its body keep the limits. Raises Refused."""
    headers: Pairs = scope["headers"]
    length_max = settings.server.body_bytes_max
    compressed, host = check_headers(headers, source, length_max)
    if source.allow_ips:
        check_address(scope, headers, source, settings.server.trusted_proxies)
    body = await read_body(receive, length_max)
    return Delivery(
        method=scope["method"],
        url=sender_url(scope, source, host),
        headers=headers,
        body=body,
        received_ms=received_ms,
        inflated=inflate(body, length_max) if compressed else None,
    )


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
    reply = wished(source.contract.preset, "forbidden", FORBIDDEN)
    raise Refused(reply, "address", f"{address} is not in sources.{source.name}.allow_ips")


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
    event = events[outcome.event]
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


class Greetings:
    """Tells of handshakes, which anybody may send: one line a second for each source."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[int, int]] = {}

    def tell(self, source: str, what: str, request_id: str, at_ms: int) -> None:
        told_ms, untold = self._told.get(source, (0, 0))
        if 0 <= at_ms - told_ms < HANDSHAKE_LINE_MS:
            self._told[source] = told_ms, untold + 1
            return
        self._told[source] = at_ms, 0
        more = {"more": untold} if untold else {}
        log.info("handshake", source=source, request=request_id, what=what, **more)
