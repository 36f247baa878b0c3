"""Takes HTTP requests off the wire, so that slow, large or broken ones cost little."""

import asyncio
import itertools
import secrets
import socket
import urllib.parse
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from typing import Any

import httptools
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

#: A request body, in bytes, unless the configuration says otherwise.
BODY_BYTES_MAX = 1_048_576
#: What is read and thrown away of a body that was answered early: this many bodies.
DRAIN_BODIES = 16
#: All bodies being read or processed at one time, in bytes.
BODIES_BYTES_MAX = 16_777_216
#: The request line and headers together, in bytes; also what may arrive without a body byte.
HEAD_BYTES_MAX = 32_768
HEADERS_MAX = 100
#: Seconds from the connection, its TLS handshake included, or from the first byte of a later
#: request, to the end of the headers.
HEAD_S = 5.0
#: Seconds for a body: a start, and the time that the largest takes at a slow link's speed.
BODY_S = 10.0
BODY_BYTES_PER_S = 65_536
#: Seconds that what is left of a body is read after an early answer.
DRAIN_S = 5.0
#: Seconds between requests. Longer than nginx (60) and Caddy (120) keep a connection, so that
#: it is the proxy that closes it and no request meets a closed one.
IDLE_S = 130.0
#: Connections of one listener; another one closes the oldest that waits for its peer.
CONNECTIONS_MAX = 2048
#: Connections that wait to be accepted; all of them may be at once.
BACKLOG = 2048
#: Requests sent ahead of their answers on one connection.
PIPELINE_MAX = 16
#: What a piece of a body counts as at least, in bytes, and how many bytes its pieces may fall
#: short of that: each costs a call, so a body in chunks of one byte would hold up all others.
PIECE_BYTES_MIN = 64
PIECES_SHORT_BYTES_MAX = 65_536
#: Seconds between two looks at the deadlines.
SWEEP_S = 0.25
#: Bytes of a body held back for the app before reading stops.
BUFFER_BYTES_MAX = 65_536
#: Seconds after which a refused sender is asked to try again.
RETRY_AFTER_S = 5

WORDS = {
    400: "rejected",
    408: "timeout",
    413: "too-large",
    414: "rejected",
    431: "rejected",
    503: "unavailable",
}

# What a connection waits for: its first byte, the rest of the headers, the rest of the body, the
# rest of a body that was answered already, the next request, us. Plain numbers: they are looked
# at several times a request.
NEW, HEAD, BODY, DRAIN, IDLE, BUSY = range(6)

App = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]


class Limits(msgspec.Struct, frozen=True):
    """What one listener's connections may cost; the names say the units."""

    body_bytes_max: int = BODY_BYTES_MAX
    bodies_bytes_max: int = BODIES_BYTES_MAX
    head_bytes_max: int = HEAD_BYTES_MAX
    headers_max: int = HEADERS_MAX
    connections_max: int = CONNECTIONS_MAX
    backlog: int = BACKLOG
    head_s: float = HEAD_S
    body_s: float | None = None
    drain_s: float = DRAIN_S
    idle_s: float = IDLE_S
    sweep_s: float = SWEEP_S

    def seconds(self) -> tuple[float, ...]:
        """How long a connection may stay in each stage."""
        body_s = self.body_s
        if body_s is None:
            body_s = BODY_S + self.body_bytes_max / BODY_BYTES_PER_S
        return (self.head_s, self.head_s, body_s, self.drain_s, self.idle_s, float("inf"))


class _Refused(Exception):
    """A request is over a limit or not for us; `status` is the answer."""

    def __init__(self, status: int) -> None:
        self.status = status


def request_ids() -> Iterator[str]:
    """Unique without asking anyone: a random part, and a count."""
    prefix = secrets.token_hex(4)
    return (f"{prefix}-{number:x}" for number in itertools.count(1))


class Gate:
    """What the connections of one listener share: their limits, their order of age, one timer.

    `waiting` holds those that wait for their peer, the oldest first: a newcomer is last, so that
    it can't be closed for the next one while a staller stays. Idle ones are apart, since closing
    them harms nobody.
    """

    def __init__(self, limits: Limits) -> None:
        self.set_limits(limits)
        self.request_ids = request_ids()
        self.stopping = False
        #: Set once it is stopping and the last connection is gone.
        self.emptied = asyncio.Event()
        self.open: set[Connection] = set()
        self.idle: OrderedDict[Connection, None] = OrderedDict()
        self.waiting: OrderedDict[Connection, None] = OrderedDict()
        #: Those that hold bytes of bodies, the longest first.
        self.holding: OrderedDict[Connection, None] = OrderedDict()
        self.bytes_held = 0
        self.bytes_held_peak = 0
        self.bytes_received = 0
        self._timer: asyncio.TimerHandle | None = None

    def set_limits(self, limits: Limits) -> None:
        """Use other limits from now on; deadlines that were set stay."""
        self.limits = limits
        self.seconds = limits.seconds()
        # Four bodies of the largest kind fit, whatever the configuration says.
        self.bodies_bytes_max = max(limits.bodies_bytes_max, 4 * limits.body_bytes_max)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to enforce deadlines, until `stop`."""
        self._timer = loop.call_later(self.limits.sweep_s, self._sweep, loop)

    def stop(self) -> None:
        """Close what is left, at once."""
        if self._timer is not None:
            self._timer.cancel()
        for connection in list(self.open):
            connection.close()

    def close_waiting(self) -> None:
        """Close the connections that wait for their peer; those we still work on stay."""
        for connection in [each for each in self.open if each.stage != BUSY]:
            connection.close()

    def drain(self) -> None:
        """Answer `Connection: close` from now on, until the peers have finished."""
        self.stopping = True
        if not self.open:
            self.emptied.set()
        for connection in list(self.open):
            connection.shutdown()

    def admit(self, connection: "Connection") -> None:
        """Count a new connection, and close the oldest that waits if it is one too many."""
        self.open.add(connection)
        if len(self.open) > self.limits.connections_max:
            self._evict(connection)

    def hold(self, size: int, connection: "Connection") -> None:
        """Count bytes of a body, and give up the slowest ones if all bodies are too much."""
        self.bytes_received += size
        self.bytes_held += size
        connection.held_bytes += size
        self.holding[connection] = None
        if self.bytes_held > self.bodies_bytes_max:
            self._make_room(connection)
        self.bytes_held_peak = max(self.bytes_held_peak, self.bytes_held)

    def release(self, size: int, connection: "Connection") -> None:
        """Bytes that were held are not any more."""
        self.bytes_held -= size
        connection.held_bytes -= size
        if not connection.held_bytes:
            self.holding.pop(connection, None)

    def forget(self, connection: "Connection") -> None:
        """A connection is gone."""
        self.unlist(connection)
        self.open.discard(connection)
        if self.stopping and not self.open:
            self.emptied.set()

    def unlist(self, connection: "Connection") -> None:
        """A connection is no longer one that could be closed to make room."""
        self.idle.pop(connection, None)
        self.waiting.pop(connection, None)

    # Where all the others are being worked on, it is the newcomer that has to come again.

    def _evict(self, newcomer: "Connection") -> None:
        order = itertools.chain(self.idle, self.waiting)
        victim = next((each for each in order if each is not newcomer), None)
        if victim is None:
            newcomer.refuse(503)
        else:
            victim.give_up(503)

    def _make_room(self, newcomer: "Connection") -> None:
        for each in [each for each in self.holding if each.stage is BODY and each is not newcomer]:
            each.give_up(503)
            if self.bytes_held <= self.bodies_bytes_max:
                return
        newcomer.refuse(503)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection in [each for each in self.open if each.deadline <= now]:
            connection.give_up(408)
        self._timer = loop.call_later(self.limits.sweep_s, self._sweep, loop)


class Exchange(RequestResponseCycle):
    """One request and its answer, as ASGI sees them.

    Answers are sent whole: one start with its headers, one body.
    """

    def __init__(
        self,
        connection: "Connection",
        scope: MutableMapping[str, Any],
        keep_alive: bool,
        expects_continue: bool,
    ) -> None:
        # The parent's own state for streaming is not set up: nothing here streams.
        self.connection = connection
        self.scope = scope  # type: ignore[assignment]
        self.transport = connection.transport
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = expects_continue
        self.disconnected = False
        self.more_body = True
        self.response_started = False
        self.response_complete = False
        self.chunks: list[bytes] = []
        self.chunks_bytes = 0
        self.held_bytes = 0
        self.drained_bytes = 0
        self.short_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._status = 0
        self._headers: Iterable[tuple[bytes, bytes]] = ()

    async def run_asgi(self, app: Any) -> None:
        """Let the app answer; one that does not leaves the sender with a 503."""
        try:
            await app(self.scope, self.receive, self.send)
        finally:
            if not self.response_complete:
                self.connection.refuse(503)

    def take(self, chunk: bytes) -> None:
        """Bytes of the body have arrived."""
        self.chunks.append(chunk)
        self.chunks_bytes += len(chunk)
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def receive(self) -> Any:
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        while self.more_body and not self.chunks and not self._over():
            self.connection.flow.resume_reading()
            self._waiter = self.connection.loop.create_future()
            await self._waiter
            self._waiter = None
        if self._over():
            return {"type": "http.disconnect"}
        body = b"".join(self.chunks)
        self.chunks.clear()
        self.chunks_bytes = 0
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    def _over(self) -> bool:
        return self.disconnected or self.response_complete

    async def send(self, message: Any) -> None:
        if not self.response_started:
            assert message["type"] == "http.response.start", "an answer starts with its start"
            self.response_started = True
            self._status = message["status"]
            self._headers = message["headers"]
            return
        assert not self.response_complete, "a request has one answer"
        assert not message.get("more_body"), "answers are sent whole"
        self.response_complete = True
        if not self.disconnected:
            self._write(message.get("body", b""))
            self.connection.on_answered(self)

    def _write(self, body: bytes) -> None:
        if self.waiting_for_100_continue:
            # The body may or may not follow: only a close makes the next request unambiguous.
            self.keep_alive = False
        parts = [STATUS_LINE[self._status]]
        for name, value in self._headers:
            parts += (name, b": ", value, b"\r\n")
        parts.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        if self.scope["method"] != "HEAD":
            parts.append(body)
        self.transport.write(b"".join(parts))


class Handshake:
    """Stands in for the transport while TLS is agreed on: nothing can be written yet."""

    def __init__(self, task: "asyncio.Task[Any]") -> None:
        self._task = task

    def is_closing(self) -> bool:
        return self._task.cancelling() > 0

    def write(self, text: bytes) -> None:
        pass

    def close(self) -> None:
        self._task.cancel()

    abort = close


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits and deadlines; nothing it refuses reaches the app."""

    cycle: Exchange

    def __init__(
        self,
        gate: Gate,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.gate = gate
        self.stage = NEW
        self.deadline = 0.0
        self.running: Exchange | None = None
        self.in_head = False
        self.head_bytes = 0
        self.blank_bytes = 0
        self.held_bytes = 0
        self.refusal = 0
        self.lingering_bytes = -1

    # The transport's calls.

    def accepted(self, handshake: Handshake | None = None) -> None:
        """Count from now on; a handshake counts like the connection that it becomes."""
        if handshake is not None:
            self.transport = handshake  # type: ignore[assignment]  # as much of it as is used
        self.deadline = self.loop.time() + self.gate.seconds[NEW]
        self.gate.waiting[self] = None
        self.gate.admit(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        counted = self.transport is not None
        super().connection_made(transport)
        peer: socket.socket | None = transport.get_extra_info("socket")
        if peer is not None and peer.family == socket.AF_UNIX:
            self.client = ("unix", 0)
        if not counted:
            self.accepted()

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections.discard(self)
        self.gate.forget(self)
        self._abandon()
        self.parser = None  # type: ignore[assignment]  # breaks the cycle with ourselves

    def eof_received(self) -> bool | None:  # type: ignore[override]
        # A sender that has said all may still listen: answer it before closing.
        if self.stage is not BUSY or self.scheme == "https":
            return None
        self._close_when_answered()
        return True

    def data_received(self, data: bytes) -> None:
        if self.refusal or self.lingering_bytes >= 0:
            self._discard(len(data))
            return
        self.blank_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._reject(cause.status if isinstance(cause, _Refused) else 400)
            return
        if self.blank_bytes > self.gate.limits.head_bytes_max:
            self._reject(431)
            return
        self._settle()

    def pause_writing(self) -> None:
        # A peer that sends without taking the answers is not read from.
        super().pause_writing()
        self.flow.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.flow.resume_reading()

    def shutdown(self) -> None:
        """Answer what is under way with `Connection: close`, and what still comes."""
        self._close_when_answered()

    # The parser's calls.

    def on_message_begin(self) -> None:
        self.in_head = True
        self.head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self.url += url
        self.head_bytes += len(url)
        if self.head_bytes > self.gate.limits.head_bytes_max:
            raise _Refused(414)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Called a dozen times a request, hence in one piece.
        limits = self.gate.limits
        self.head_bytes += len(name) + len(value) + 4
        if self.head_bytes > limits.head_bytes_max or len(self.headers) == limits.headers_max:
            raise _Refused(431)
        if not self.in_head:
            return  # a trailer: nothing that we look at may come after the body
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        elif name == b"transfer-encoding":
            self._check_coding(value)
        self.headers.append((name, value))

    def _check_coding(self, value: bytes) -> None:
        # The parser takes any codings before the last; others may see another body in it.
        if value.lower() != b"chunked" or any(n == b"transfer-encoding" for n, _ in self.headers):
            raise _Refused(400)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise _Refused(400)
            return
        self.in_head = False
        self.blank_bytes = 0
        exchange = Exchange(
            self, self._complete_scope(), self._keeps_alive(), self.expect_100_continue
        )
        self.cycle = exchange
        if self.running is None:
            self._run(exchange)
            return
        if len(self.pipeline) == PIPELINE_MAX:
            raise _Refused(400)
        self.flow.pause_reading()
        self.pipeline.appendleft((exchange, self.app))

    def _ignore_upgrade(self, rest: bytes) -> None:
        # We speak no other protocol, and a server may ignore the wish for one (RFC 9110, 7.8).
        # The parser stops at such a request's headers, so a new one reads it without the wish.
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/1.1\r\n"]
        for name, value in self.headers:
            if name != b"upgrade":
                head += (name, b": ", value, b"\r\n")
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join(head) + b"\r\n" + rest)

    def _keeps_alive(self) -> bool:
        # HTTP/1.0 is never kept open, whatever it asks for.
        return (
            not self.gate.stopping
            and self.scope["http_version"] != "1.0"
            and self.parser.should_keep_alive()
        )

    def _complete_scope(self) -> MutableMapping[str, Any]:
        scope: MutableMapping[str, Any] = self.scope  # type: ignore[assignment]
        scope["http_version"] = self.parser.get_http_version()
        scope["method"] = self.parser.get_method().decode("ascii")
        url = httptools.parse_url(self.url)
        path = (url.path or b"/").decode("ascii")
        scope["raw_path"] = url.path or b"/"
        scope["path"] = urllib.parse.unquote(path) if "%" in path else path
        scope["query_string"] = url.query or b""
        return scope

    def _run(self, exchange: Exchange) -> None:
        self.running = exchange
        # The loop holds tasks weakly; this one is held by what it waits for, which is the
        # exchange or a future of the app's.
        self.loop.create_task(exchange.run_asgi(self.app))

    def on_body(self, body: bytes) -> None:
        self.blank_bytes = 0
        exchange = self.cycle
        size = len(body)
        if size < PIECE_BYTES_MIN:
            exchange.short_bytes += PIECE_BYTES_MIN - size
            if exchange.short_bytes > PIECES_SHORT_BYTES_MAX:
                raise _Refused(413)
            size = PIECE_BYTES_MIN
        if exchange.response_complete:
            exchange.drained_bytes += size
            if exchange.drained_bytes > DRAIN_BODIES * self.gate.limits.body_bytes_max:
                self.close()
            return
        exchange.take(body)
        self._hold(exchange, size)
        if exchange.chunks_bytes > BUFFER_BYTES_MAX:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        if self.in_head:
            return  # of a request that is about to be read again
        self.blank_bytes = 0
        exchange = self.cycle
        exchange.more_body = False
        exchange.wake()
        if exchange is self.running and exchange.response_complete:
            self._finish(exchange)

    # Our own.

    def on_answered(self, exchange: Exchange) -> None:
        """The answer is written: read what is left of the request, then take the next one."""
        self.server_state.total_requests += 1
        self._release(exchange)
        if self.transport.is_closing():
            return
        if not self.flow.write_paused:
            self.flow.resume_reading()
        if not exchange.more_body:
            self._finish(exchange)
        self._settle()

    def close(self) -> None:
        """Close once what was written is sent, or at the next sweep that finds it stuck."""
        self.gate.unlist(self)
        self.deadline = self.loop.time() + self.gate.seconds[DRAIN]
        self.transport.close()

    def refuse(self, status: int, linger: bool = False) -> None:
        """Answer for the app, in one word, and close.

        To linger is to read on for a while: closing with unread bytes would reset the
        connection, and the answer with it.
        """
        if self.transport.is_closing() or self.lingering_bytes >= 0:
            return
        word = WORDS[status]
        retry = f"retry-after: {RETRY_AFTER_S}\r\n" if status == 503 else ""
        head = (
            f"content-type: text/plain\r\ncontent-length: {len(word) + 1}\r\n{retry}"
            f"x-request-id: {next(self.gate.request_ids)}\r\nconnection: close\r\n\r\n{word}\n"
        )
        self.transport.write(STATUS_LINE[status] + head.encode())
        if linger:
            self._linger()
        else:
            self._leave()

    def give_up(self, status: int) -> None:
        """Close a connection whose peer is too slow or in the way, with a word if one is due."""
        if self.transport.is_closing():
            # The peer does not take what was written to it.
            self._abandon()
            self.transport.abort()
        elif self.stage in (HEAD, BODY):
            self.refuse(status)
        else:
            self._leave()

    def stage_now(self) -> int:
        """What the connection waits for, judged from what was parsed and answered."""
        if self.lingering_bytes >= 0:
            return DRAIN
        exchange = self.running
        if exchange is None:
            if self.in_head:
                return HEAD
            return NEW if self.stage is NEW else IDLE
        if not exchange.more_body:
            return BUSY
        return DRAIN if exchange.response_complete else BODY

    def _settle(self) -> None:
        """Set the deadline when the stage changes: bytes alone never move it."""
        before, stage = self.stage, self.stage_now()
        if stage is before or self.transport.is_closing():
            return
        self.stage = stage
        gate = self.gate
        if before is not BUSY:
            gate.unlist(self)
        if stage is IDLE:
            gate.idle[self] = None
        elif stage is not BUSY:
            gate.waiting[self] = None
        if before is not NEW or stage is not HEAD:
            self.deadline = self.loop.time() + gate.seconds[stage]

    def _finish(self, exchange: Exchange) -> None:
        self.running = None
        if not exchange.keep_alive:
            self.close()
        elif self.pipeline:
            following, _ = self.pipeline.pop()
            assert isinstance(following, Exchange), "only exchanges are queued"
            self._run(following)
        elif self.refusal:
            self.refuse(self.refusal, linger=True)

    def _reject(self, status: int) -> None:
        """Nothing can be read on from here: refuse, once what came before is answered."""
        broken = self.cycle
        if self.pipeline and self.pipeline[0][0] is broken and broken.more_body:
            self.pipeline.popleft()
            self._release(broken)
        if self.running is None or (self.running is broken and broken.more_body):
            if broken is not None and broken is self.running and broken.response_complete:
                self._linger()
            else:
                self.refuse(status, linger=True)
            return
        self.refusal = status
        self.flow.pause_reading()
        self._settle()

    def _close_when_answered(self) -> None:
        # The last one: any before it would take the others' answers with it.
        for exchange in self._exchanges()[:1]:
            exchange.keep_alive = False

    def _exchanges(self) -> list[Exchange]:
        """What is not answered yet, the last first."""
        queued = [each for each, _ in self.pipeline if isinstance(each, Exchange)]
        return [*queued, self.running] if self.running is not None else queued

    def _hold(self, exchange: Exchange, size: int) -> None:
        if exchange.held_bytes >= 0:
            exchange.held_bytes += size
            self.gate.hold(size, self)

    def _release(self, exchange: Exchange) -> None:
        if exchange.held_bytes > 0:
            self.gate.release(exchange.held_bytes, self)
        exchange.held_bytes = -1

    def _linger(self) -> None:
        self._abandon()
        self.lingering_bytes = 0
        self._settle()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _discard(self, size: int) -> None:
        self.lingering_bytes += size
        if self.lingering_bytes > DRAIN_BODIES * self.gate.limits.body_bytes_max:
            self.close()

    def _leave(self) -> None:
        self._abandon()
        self.close()

    def _abandon(self) -> None:
        for exchange in self._exchanges():
            exchange.disconnected = True
            exchange.wake()
            self._release(exchange)
        self.pipeline.clear()
        self.running = None
