"""The wire: what slow, large and broken requests get, and what they can't do to others."""

import asyncio
import contextlib
import functools
import json
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from receiver.http import BODY, DRAIN_BODIES, PIPELINE_MAX, Gate, Limits
from receiver.server import close_all, listen
from tests import canary

#: Seconds after which a test gives up; nothing waits for it to pass.
PATIENCE_S = 10.0
#: Seconds between two bytes of a slow sender.
DRIP_S = 0.02
#: For the tests of deadlines.
SHORT_S = 0.2
SWEEP_S = 0.01
KIB = 1024

REQUEST = b"POST /x HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\nok"


@dataclass
class Reply:
    """One answer as a client reads it."""

    status: int
    headers: dict[str, str]
    body: bytes


class Wire:
    """A client that writes and reads bytes."""

    def __init__(self, address: Any) -> None:
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(address)
        self.unread = b""

    def send(self, text: bytes) -> None:
        self.socket.sendall(text)

    def answer(self, method: str = "POST") -> Reply:
        """The next answer, whole."""
        while b"\r\n\r\n" not in self.unread:
            self._more()
        head, _, self.unread = self.unread.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in map(_split, lines)}
        length = 0 if method == "HEAD" else int(headers.get("content-length", "0"))
        while len(self.unread) < length:
            self._more()
        body, self.unread = self.unread[:length], self.unread[length:]
        assert canary.found_in(head.decode("latin-1") + body.decode("latin-1")) == []
        return Reply(int(first.split()[1]), headers, body)

    def ask(self, text: bytes) -> Reply:
        self.send(text)
        return self.answer()

    def rest(self) -> bytes:
        """All bytes until the server closes."""
        while chunk := self._chunk():
            self.unread += chunk
        return self.unread

    def drip(self, text: Iterator[bytes]) -> bytes:
        """Send piece by piece, always in time for a server that looks at gaps; what came back."""
        for piece in text:
            with contextlib.suppress(OSError):
                self.send(piece)
            if is_readable(self.socket, DRIP_S):
                return self.rest()
        raise AssertionError("the server let it all through")

    def _more(self) -> None:
        chunk = self._chunk()
        assert chunk, f"closed after {self.unread!r}"
        self.unread += chunk

    def _chunk(self) -> bytes:
        try:
            return self.socket.recv(65_536)
        except ConnectionResetError:
            return b""

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def is_readable(made: socket.socket, wait_s: float = 0.0) -> bool:
    """Whether something came, or the other side has closed."""
    # select() knows no descriptor beyond 1023.
    poll = select.poll()
    poll.register(made, select.POLLIN)
    return bool(poll.poll(wait_s * 1000))


def _split(line: str) -> tuple[str, str, str]:
    return line.partition(":")


class Loop:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, coroutine: Any) -> Any:
        """Its result, computed over there."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def call(self, function: Callable[[], Any]) -> Any:
        async def calling() -> Any:
            return function()

        return self.run(calling())

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition over there."""

        async def waiting() -> None:
            while not condition():  # noqa: ASYNC110  nothing announces it
                await asyncio.sleep(0.002)

        self.run(asyncio.wait_for(waiting(), PATIENCE_S))

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.close()


@dataclass
class Echo:
    """An app that answers with what it was given; `/held` is answered when `release` is set."""

    seen: list[bytes] = field(default_factory=list)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    gone: list[bytes] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path: str = scope["path"]
        body = b""
        if path != "/early":
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.gone.append(body)
                    return
                body += message["body"]
                more = message["more_body"]
        self.seen.append(body)
        if path == "/held":
            await self.release.wait()
        if path == "/mute":
            return
        names = [name.decode() for name, _ in scope["headers"]]
        text = json.dumps({"path": path, "names": names, "length": len(body)}).encode()
        headers = [(b"content-length", str(len(text)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text})


class Rig:
    """A gate with its listener, and the app behind it."""

    def __init__(self, loop: Loop, limits: Limits, tls: ssl.SSLContext | None = None) -> None:
        self.loop = loop
        self.echo = Echo()
        self.gate = Gate(limits)
        bound = socket.socket()
        bound.bind(("127.0.0.1", 0))
        self.address = bound.getsockname()
        self.listeners = loop.run(listen(self.gate, self.echo, [bound], lambda: tls))

    def wire(self) -> Wire:
        return Wire(self.address)

    def received(self, count: int) -> bool:
        return self.gate.bytes_received >= count

    def saw(self, count: int) -> bool:
        return len(self.echo.seen) >= count

    def close(self) -> None:
        self.loop.loop.call_soon_threadsafe(close_all, self.listeners)
        self.loop.call(self.gate.drain)
        self.loop.call(self.gate.stop)
        self.loop.until(lambda: not self.gate.open)


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    running = Loop()
    yield running
    running.stop()


@pytest.fixture
def rig(loop: Loop) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**of: Any) -> Rig:
        rigs.append(Rig(loop, Limits(**({"sweep_s": SWEEP_S} | of))))
        return rigs[-1]

    yield make
    for each in rigs:
        each.close()


Make = Callable[..., Rig]


# Deadlines


def test_a_connection_that_never_sends_a_byte_is_closed_without_an_answer(rig: Make) -> None:
    with rig(head_s=SHORT_S).wire() as wire:
        assert wire.rest() == b""


def test_headers_that_drip_get_408_although_no_gap_is_long(rig: Make) -> None:
    started = time.monotonic()

    with rig(head_s=SHORT_S).wire() as wire:
        wire.send(b"POST /x HTTP/1.1\r\nx-slow: ")
        answer = wire.drip(iter(lambda: b"a", b""))

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert answer.endswith(b"\r\n\r\ntimeout\n")
    assert time.monotonic() - started < PATIENCE_S / 2


def test_a_first_byte_sent_late_wins_no_time(rig: Make) -> None:
    head_s = 1.0
    with rig(head_s=head_s).wire() as wire:
        started = time.monotonic()
        assert not select.select([wire.socket], [], [], 0.7 * head_s)[0]
        wire.send(b"POST ")

        assert wire.rest().startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - started < 1.6 * head_s


def test_the_headers_of_a_later_request_have_a_deadline_too(rig: Make) -> None:
    with rig(head_s=SHORT_S).wire() as wire:
        assert wire.ask(REQUEST).status == 200
        wire.send(b"POST /x HT")

        assert wire.rest().startswith(b"HTTP/1.1 408 ")


def test_a_body_that_drips_gets_408_and_the_app_sees_a_sender_that_left(rig: Make) -> None:
    made = rig(body_s=SHORT_S)

    with made.wire() as wire:
        wire.send(b"POST /x HTTP/1.1\r\ncontent-length: 100000\r\n\r\n")
        answer = wire.drip(iter(lambda: b"a", b""))

    assert answer.startswith(b"HTTP/1.1 408 ")
    made.loop.until(lambda: len(made.echo.gone) == 1)
    assert made.echo.seen == []


def test_chunks_that_drip_get_408(rig: Make) -> None:
    with rig(body_s=SHORT_S).wire() as wire:
        wire.send(b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        answer = wire.drip(iter(lambda: b"1\r\na\r\n", b""))

    assert answer.startswith(b"HTTP/1.1 408 ")


def test_an_idle_connection_is_closed_whatever_empty_lines_it_sends(rig: Make) -> None:
    with rig(idle_s=SHORT_S).wire() as wire:
        assert wire.ask(REQUEST).status == 200

        assert wire.drip(iter(lambda: b"\r\n", b"")) == b""


def test_a_request_that_we_are_slow_with_has_no_deadline(rig: Make) -> None:
    made = rig(head_s=0.05, body_s=0.05, idle_s=0.05)
    with made.wire() as wire:
        wire.send(REQUEST.replace(b"/x", b"/held"))
        with made.wire() as other:
            assert other.rest() == b""  # the deadlines of all stages have passed

        made.loop.call(made.echo.release.set)

        assert wire.answer().status == 200


# The head


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"x-a: b\r\n" * 101, 431),
        (b"x-a: " + b"b" * (33 * KIB) + b"\r\n", 431),
        (b"x-a: " + b"b" * (200 * KIB), 431),
        (b"x" * (200 * KIB), 431),
        ((b"x-a: " + b"b" * KIB + b"\r\n") * 33, 431),
    ],
    ids=["many", "long", "unfinished", "long name", "many long"],
)
def test_a_large_head_gets_431(rig: Make, head: bytes, status: int) -> None:
    made = rig()

    with made.wire() as wire:
        answer = wire.ask(b"POST /x HTTP/1.1\r\n" + head + b"\r\n")

    assert (answer.status, answer.headers["connection"]) == (status, "close")
    assert made.echo.seen == []


def test_every_refusal_carries_a_request_id_of_its_own(rig: Make) -> None:
    made = rig(head_s=SHORT_S)
    refused = {
        400: b"\x16\x03\x01\x02\x00",
        408: b"POST /x HTTP/1.1\r\nx-slow: ",
        414: b"POST /" + b"x" * (40 * KIB) + b" HTTP/1.1\r\n\r\n",
        431: b"POST /x HTTP/1.1\r\n" + b"x-a: b\r\n" * 102,
        503: REQUEST.replace(b"/x", b"/mute"),
    }
    ids = set()
    for status, text in refused.items():
        with made.wire() as wire:
            answer = wire.ask(text)
            assert answer.status == status
            ids.add(answer.headers["x-request-id"])

    assert len(ids) == len(refused)


def test_a_long_url_gets_414(rig: Make) -> None:
    with rig().wire() as wire:
        assert wire.ask(b"POST /" + b"x" * (40 * KIB) + b" HTTP/1.1\r\n\r\n").status == 414


def test_a_hundred_headers_are_fine(rig: Make) -> None:
    with rig().wire() as wire:
        answer = wire.ask(b"GET /x HTTP/1.1\r\n" + b"x-a: b\r\n" * 100 + b"\r\n")

    assert len(json.loads(answer.body)["names"]) == 100


def test_a_head_in_small_pieces_over_the_limit_gets_431(rig: Make) -> None:
    with rig().wire() as wire:
        wire.send(b"POST /x HTTP/1.1\r\nx-a: ")
        answer = wire.drip(iter(lambda: b"b" * 4096, b""))

    assert answer.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST /\xff\xfe HTTP/1.1\r\n\r\n",
        b"POST /x HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /x HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"POST /x HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /x HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST /x HTTP/1.1\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"POST /x HTTP/1.1\r\ntransfer-encoding: gzip\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"CONNECT example.com:443 HTTP/1.1\r\n\r\n",
        b"CONNECT /x HTTP/1.1\r\n\r\n",
        b"GET /x HTTP/1.1\r\nx-a: b\x00c\r\n\r\n",
    ],
)
def test_a_broken_request_gets_400_in_one_word(rig: Make, request_bytes: bytes) -> None:
    made = rig()

    with made.wire() as wire:
        wire.send(request_bytes)
        answer = wire.rest()

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.endswith(b"\r\n\r\nrejected\n")
    assert b"uvicorn" not in answer.lower()
    assert made.echo.seen == []


@given(st.binary(min_size=1, max_size=200))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_garbage_never_gets_a_5xx_and_never_reaches_the_app(rig: Make, garbage: bytes) -> None:
    made = rig()

    with made.wire() as wire:
        wire.send(garbage)
        with contextlib.suppress(OSError):
            wire.socket.shutdown(socket.SHUT_WR)
        answer = wire.rest()

    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert made.echo.seen == []


# The body


def test_a_trailer_is_no_header(rig: Make) -> None:
    with rig().wire() as wire:
        answer = wire.ask(
            b"POST /x HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"
            b"2\r\nok\r\n0\r\nx-signature: forged\r\n\r\n"
        )

    assert json.loads(answer.body)["names"] == ["host", "transfer-encoding"]


@pytest.mark.parametrize(
    "start", [b"2\r\nok\r\n0\r\nx-a: ", b"2;name="], ids=["trailer", "extension"]
)
def test_an_endless_trailer_or_chunk_extension_is_cut_off(rig: Make, start: bytes) -> None:
    with rig().wire() as wire:
        wire.send(b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + start)
        answer = wire.drip(iter(lambda: b"b" * 4096, b""))

    assert answer.startswith(b"HTTP/1.1 431 ")


def test_a_body_answered_early_is_read_so_that_the_connection_can_be_used_again(rig: Make) -> None:
    size = 4 * 65_536
    with rig(body_bytes_max=65_536).wire() as wire:
        wire.send(b"POST /early HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % size)

        assert wire.answer().status == 200
        wire.send(b"x" * size)
        assert wire.ask(REQUEST).status == 200


def test_a_sender_that_closes_after_a_large_body_still_sees_the_early_answer(rig: Make) -> None:
    size = 10 * 65_536
    with rig(body_bytes_max=65_536).wire() as wire:
        head = b"POST /early HTTP/1.1\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % size
        wire.send(head + b"x" * size)

        assert wire.answer().headers["connection"] == "close"
        assert wire.rest() == b""


def test_no_more_than_sixteen_bodies_are_read_after_an_early_answer(rig: Make) -> None:
    made = rig(body_bytes_max=KIB, drain_s=10 * PATIENCE_S)
    with made.wire() as wire:
        wire.send(b"POST /early HTTP/1.1\r\ncontent-length: 100000000\r\n\r\n")
        assert wire.answer().status == 200

        wire.send(b"x" * (DRAIN_BODIES * KIB + 1))

        assert wire.rest() == b""


def test_a_body_answered_early_is_read_for_a_limited_time(rig: Make) -> None:
    with rig(drain_s=SHORT_S).wire() as wire:
        wire.send(b"POST /early HTTP/1.1\r\ncontent-length: 100\r\n\r\n")
        assert wire.answer().status == 200

        assert wire.drip(iter(lambda: b"a", b"")) == b""


@pytest.mark.parametrize("path", [b"/x", b"/early"])
def test_a_body_in_tiny_pieces_is_cut_off(rig: Make, path: bytes) -> None:
    made = rig()
    with made.wire() as wire:
        head = b"POST " + path + b" HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
        wire.send(head + b"1\r\nx\r\n" * 1_100 + b"0\r\n\r\n")
        answers = wire.rest()

    assert answers.count(b"HTTP/1.1 ") == 1
    assert answers.startswith(b"HTTP/1.1 413 " if path == b"/x" else b"HTTP/1.1 ")


def test_small_bodies_in_tiny_pieces_and_large_ones_in_small_pieces_are_fine(rig: Make) -> None:
    head = b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
    with rig().wire() as wire:
        for piece, count in ((b"1\r\nx\r\n", 1_000), (b"40\r\n" + b"x" * 64 + b"\r\n", 10_000)):
            assert wire.ask(head + piece * count + b"0\r\n\r\n").status == 200


def test_a_sender_that_asks_first_is_told_to_go_on(rig: Make) -> None:
    head = b"POST /x HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
    with rig().wire() as wire:
        assert wire.ask(head).status == 100
        assert json.loads(wire.ask(b"ok").body)["length"] == 2


def test_a_sender_that_asks_first_and_is_refused_gets_a_close(rig: Make) -> None:
    head = b"POST /early HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
    with rig().wire() as wire:
        assert wire.ask(head).headers["connection"] == "close"


# What others can't be kept from


def test_idle_connections_make_room_the_oldest_first(rig: Make) -> None:
    made = rig(connections_max=3)
    idle = [made.wire() for _ in range(3)]
    for each in idle:
        assert each.ask(REQUEST).status == 200

    with made.wire() as wire:
        assert wire.ask(REQUEST).status == 200

    assert idle[0].rest() == b""
    assert idle[1].ask(REQUEST).status == 200
    for each in idle:
        each.socket.close()


@pytest.mark.parametrize(
    "start",
    [b"", b"POST /x HTTP/1.1\r\nx-a:", b"POST /x HTTP/1.1\r\ncontent-length: 9\r\n\r\nab"],
    ids=["silent", "in the head", "in the body"],
)
def test_slow_connections_make_room(rig: Make, start: bytes) -> None:
    made = rig(connections_max=3)
    slow = [made.wire() for _ in range(3)]
    for each in slow:
        each.send(start)
    made.loop.until(lambda: len(made.gate.open) == 3)

    for _ in range(20):
        with made.wire() as wire:
            assert wire.ask(REQUEST).status == 200

    assert slow[0].rest()[:12] in (b"", b"HTTP/1.1 503")
    for each in slow:
        each.socket.close()


def test_newcomers_close_the_stallers_and_not_each_other(rig: Make) -> None:
    made = rig(connections_max=10)
    with contextlib.ExitStack() as kept:
        stallers = [kept.enter_context(made.wire()) for _ in range(10)]
        for each in stallers:
            each.send(b"POST /x HTTP/1.1\r\ncontent-length: 9\r\n\r\n")
        made.loop.until(lambda: [each.stage for each in made.gate.open] == [BODY] * 10)

        newcomers = [kept.enter_context(made.wire()) for _ in range(9)]
        last = newcomers[-1].socket.getsockname()
        made.loop.until(lambda: last in [each.client for each in made.gate.open])

        assert [each.ask(REQUEST).status for each in newcomers] == [200] * 9
        assert stallers[0].answer().status == 503


def test_requests_that_are_worked_on_are_never_closed_to_make_room(rig: Make) -> None:
    made = rig(connections_max=2)
    busy = [made.wire() for _ in range(2)]
    for each in busy:
        each.send(REQUEST.replace(b"/x", b"/held"))
    made.loop.until(lambda: len(made.echo.seen) == 2)

    with made.wire() as wire:
        answer = wire.answer()
    made.loop.call(made.echo.release.set)

    assert (answer.status, answer.headers["retry-after"], answer.body) == (
        503,
        "5",
        b"unavailable\n",
    )
    assert [each.answer().status for each in busy] == [200, 200]
    for each in busy:
        each.socket.close()


def test_all_bodies_together_are_bounded_and_the_slowest_gives_way(rig: Make) -> None:
    made = rig(body_bytes_max=100_000, bodies_bytes_max=400_000)
    slow = [made.wire() for _ in range(20)]
    for each in slow:
        before = made.gate.bytes_received
        each.send(b"POST /x HTTP/1.1\r\ncontent-length: 100000\r\n\r\n" + b"x" * 90_000)
        arrived = before + 90_000
        made.loop.until(functools.partial(made.received, arrived))

    assert slow[0].rest().startswith(b"HTTP/1.1 503 ")
    assert made.gate.bytes_held_peak <= 400_000
    slow[-1].send(b"x" * 10_000)
    assert slow[-1].answer().status == 200
    for each in slow:
        each.socket.close()
    made.loop.until(lambda: made.gate.bytes_held == 0)


def test_all_bodies_together_are_bounded_whoever_else_waits(rig: Make) -> None:
    made = rig(body_bytes_max=100_000, bodies_bytes_max=400_000)
    head = b"POST /x HTTP/1.1\r\ncontent-length: 100000\r\n\r\n"
    with contextlib.ExitStack() as kept:
        patient = [kept.enter_context(made.wire()) for _ in range(20)]
        for each in patient:
            each.send(head)
        made.loop.until(lambda: [each.stage for each in made.gate.open] == [BODY] * 20)

        for number in range(1, 11):
            kept.enter_context(made.wire()).send(head + b"x" * 90_000)
            made.loop.until(functools.partial(made.received, number * 90_000))

        assert made.gate.bytes_held_peak <= 400_000
        patient[0].send(b"x" * 100_000)
        assert patient[0].answer().status == 200


def test_requests_sent_ahead_are_answered_in_order(rig: Make) -> None:
    with rig().wire() as wire:
        wire.send(b"".join(REQUEST.replace(b"/x", b"/%d" % n) for n in range(PIPELINE_MAX)))

        paths = [json.loads(wire.answer().body)["path"] for _ in range(PIPELINE_MAX)]

    assert paths == [f"/{n}" for n in range(PIPELINE_MAX)]


def test_too_many_requests_sent_ahead_are_refused(rig: Make) -> None:
    with rig().wire() as wire:
        wire.send(REQUEST * (PIPELINE_MAX * 4))

        assert b"HTTP/1.1 400 " in wire.rest()


@pytest.mark.parametrize(
    ("broken", "status"),
    [
        (b"\x16\x03\x01\x02\x00", 400),
        (b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\nzz\r\n", 400),
        (b"POST /" + b"x" * (40 * KIB), 414),
        (b"POST /x HTTP/1.1\r\n" + b"x: y\r\n" * 102, 431),
    ],
    ids=["garbage", "a broken body", "a long URL", "many headers"],
)
def test_what_came_before_a_broken_request_is_answered_first(
    rig: Make, broken: bytes, status: int
) -> None:
    made = rig()
    with made.wire() as wire:
        wire.send(REQUEST + REQUEST + broken)

        answers = [wire.answer() for _ in range(3)]

        assert [each.status for each in answers] == [200, 200, status]
        assert wire.rest() == b""
    made.loop.until(lambda: made.gate.bytes_held == 0)


def test_a_body_that_breaks_after_its_answer_gets_no_second_one(rig: Make) -> None:
    with rig().wire() as wire:
        wire.send(b"POST /early HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n")
        assert wire.answer().status == 200

        wire.send(b"zz\r\n")

        assert wire.rest() == b""


def test_a_peer_that_takes_no_answers_is_not_read_from(rig: Make) -> None:
    made = rig()
    large = REQUEST.replace(b"/x", b"/" + b"x" * 20_000)
    with made.wire() as wire:
        assert wire.ask(REQUEST).status == 200
        (connection,) = made.gate.open
        sent = 1
        while not connection.flow.write_paused:
            wire.send(large)
            sent += 1
            made.loop.until(functools.partial(made.saw, sent))

        wire.send(large * 2)
        with made.wire() as other:
            assert other.ask(REQUEST).status == 200

        assert len(made.echo.seen) == sent + 1
        assert connection.transport.get_write_buffer_size() < 200_000


# Other ways to speak


def test_a_wish_for_another_protocol_is_ignored(rig: Make) -> None:
    wish = b"\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\n\r\n"
    with rig().wire() as wire:
        for head, body in ((b"", b"ok"), (b"ok", b"")):
            wire.send(REQUEST.removesuffix(b"\r\n\r\nok") + wish + head)
            answer = wire.ask(body)

            assert json.loads(answer.body)["length"] == 2
            assert json.loads(answer.body)["names"] == ["host", "content-length", "connection"]
        assert wire.ask(REQUEST).status == 200


def test_a_sender_that_half_closes_gets_its_answer(rig: Make) -> None:
    made = rig()
    with made.wire() as wire:
        wire.send(REQUEST.replace(b"/x", b"/held"))
        made.loop.until(lambda: len(made.echo.seen) == 1)
        wire.socket.shutdown(socket.SHUT_WR)
        # The end of the stream is read before the next connection's request.
        with made.wire() as other:
            assert other.ask(REQUEST).status == 200

        made.loop.call(made.echo.release.set)

        assert wire.answer().status == 200
        assert wire.rest() == b""


def test_a_sender_that_half_closes_gets_all_its_answers(rig: Make) -> None:
    with rig().wire() as wire:
        wire.send(REQUEST * 10)
        wire.socket.shutdown(socket.SHUT_WR)

        assert [wire.answer().status for _ in range(10)] == [200] * 10
        assert wire.rest() == b""


def test_a_sender_that_leaves_in_the_body_is_a_disconnect_for_the_app(rig: Make) -> None:
    made = rig()
    with made.wire() as wire:
        wire.send(b"POST /x HTTP/1.1\r\ncontent-length: 10\r\n\r\nabc")

    made.loop.until(lambda: made.echo.gone == [b"abc"])
    assert made.echo.seen == []


def test_an_app_that_does_not_answer_leaves_a_503(rig: Make) -> None:
    with rig().wire() as wire:
        assert wire.ask(REQUEST.replace(b"/x", b"/mute")).status == 503


def test_http_1_0_is_answered_and_closed(rig: Make) -> None:
    with rig().wire() as wire:
        assert wire.ask(REQUEST.replace(b"1.1", b"1.0")).headers["connection"] == "close"
        assert wire.rest() == b""


def test_a_head_request_gets_no_body(rig: Make) -> None:
    with rig().wire() as wire:
        wire.send(b"HEAD /x HTTP/1.1\r\n\r\n")
        assert int(wire.answer("HEAD").headers["content-length"]) > 0
        assert wire.ask(REQUEST).status == 200


# Stopping


def test_a_stopping_gate_answers_what_still_comes_and_closes(rig: Make) -> None:
    made = rig()
    with made.wire() as idle, made.wire() as busy:
        assert idle.ask(REQUEST).status == 200
        busy.send(REQUEST.replace(b"/x", b"/held"))
        made.loop.until(lambda: len(made.echo.seen) == 2)

        made.loop.call(made.gate.drain)
        made.loop.call(made.echo.release.set)

        assert idle.ask(REQUEST).headers["connection"] == "close"
        assert busy.answer().headers["connection"] == "close"
        assert idle.rest() == busy.rest() == b""
    made.loop.run(asyncio.wait_for(made.gate.emptied.wait(), PATIENCE_S))
