"""The public application on a real file behind a real socket: each answer, and what it costs."""

import asyncio
import gzip
import ipaddress
import json
import logging
import re
import socket
import zlib
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from receiver import app as app_module
from receiver import tally
from receiver.app import App, Refused, client_address, inflate, sender_url
from receiver.config import load
from receiver.http import Gate, Limits
from receiver.logs import ERRORS_A_MINUTE_MAX, FIELD_CHARS_MAX
from receiver.process import Processor
from receiver.server import close_all, listen
from receiver.signing import sign
from store import secrets
from store.database import Store, snapshot
from store.writer import Writer
from tests.conftest import NOW_MS, Clock, Logged, stripe_body
from tests.test_http import Loop, Reply, Wire

BODY_BYTES_MAX = 10_000
SECRETS = {"STRIPE": "whsec_of_the_tests", "GITHUB": "of the hook", "NEW": "of tomorrow"}

CONFIG = f"""
handlers = "handlers.py"

[worker]
run = "off"

[server]
body_bytes_max = {BODY_BYTES_MAX}
trusted_proxies = ["127.0.0.1"]

[sources.stripe]
scheme = "stripe"
secrets = ["env:STRIPE"]

[sources.github]
scheme = "github"
secrets = ["env:GITHUB"]

[sources.zipped]
scheme = "github"
secrets = ["env:GITHUB"]
gzip = true

[sources.fenced]
scheme = "github"
secrets = ["env:GITHUB"]
allow_ips = ["192.0.2.0/24", "2001:db8::/32"]

[[rules]]
operation = "greet"
source = ["github", "zipped", "fenced"]
on = ["push"]
record = {{ kind = "push", data = "{{ref}}" }}

[[rules]]
operation = "break"
source = "github"
on = ["star"]
call = "fail"
"""
HANDLERS = """
def fail(event, tx):
    raise RuntimeError("the handler failed")
"""

Headers = list[tuple[str, str]]


class Edge:
    """The app with its writer and file, reached through a socket."""

    def __init__(self, loop: Loop, folder: Path, clock: Clock) -> None:
        self.loop = loop
        self.folder = folder
        self.clock = clock
        self.path = folder / "receiver.db"
        self.store = Store.create(self.path, clock)
        (folder / "handlers.py").write_text(HANDLERS)
        self.processor = self.load(CONFIG)
        loop.run(self._start())

    def load(self, text: str) -> Processor:
        path = self.folder / "receiver.toml"
        path.write_text(text)
        return Processor.load(load(path, environment=SECRETS))

    async def _start(self) -> None:
        self.writer = Writer(
            self.store, pending_max=1024, due=lambda snapshot, at_ms: [], on_fatal=pytest.fail
        )
        self.app = App(self.processor, self.writer, self.clock)
        self.gate = Gate(Limits(body_bytes_max=BODY_BYTES_MAX))
        await self.writer.submit(self.processor.start)
        bound = socket.socket()
        bound.bind(("127.0.0.1", 0))
        self.address = bound.getsockname()
        self.listeners = await listen(self.gate, self.app, [bound], lambda: None)

    def close(self) -> None:
        self.loop.loop.call_soon_threadsafe(close_all, self.listeners)
        self.loop.call(self.gate.stop)
        self.loop.run(self.app.close())
        self.loop.run(self.writer.close())
        self.store.close()

    def wire(self) -> Wire:
        return Wire(self.address)

    def post(self, path: str, body: bytes = b"", headers: Headers | None = None) -> Reply:
        with self.wire() as wire:
            return wire.ask(request("POST", path, body, headers or []))

    def signed(self, source: str, body: bytes, **of: Any) -> Headers:
        """The headers with which the sender would send this body now."""
        preset = self.processor.settings.sources[source].contract.preset
        known = {"event_id": "d-1", "type": "push"} if preset.name != "stripe" else {}
        secret = SECRETS["STRIPE" if source == "stripe" else "GITHUB"].encode()
        return sign(preset, secret, body, **({"now_ms": self.clock()} | known | of))

    def deliver(self, source: str, body: bytes, **of: Any) -> Reply:
        return self.post(f"/webhooks/{source}", body, self.signed(source, body, **of))

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        with snapshot(self.path) as seen:
            return list(seen.db.execute(statement))

    def count(self) -> int:
        (found,) = self.rows("select count(*) from receiver_events")[0]
        assert isinstance(found, int)
        return found

    def refusals(self) -> list[tuple[Any, ...]]:
        """What is counted, once it is written."""
        self.loop.run(self.app.close())
        return self.rows("select source, reason, count from receiver_rejections order by 1, 2")


def request(method: str, path: str, body: bytes, headers: Headers) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: hooks.test"]
    if not any(name.lower() == "transfer-encoding" for name, _ in headers):
        lines.append(f"Content-Length: {len(body)}")
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def chunked(body: bytes, size: int = 1_000) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in pieces) + b"0\r\n\r\n"


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    running = Loop()
    yield running
    running.stop()


@pytest.fixture
def edge(loop: Loop, tmp_path: Path, clock: Clock) -> Iterator[Edge]:
    made = Edge(loop, tmp_path, clock)
    yield made
    made.close()


PUSH = b'{"ref": "refs/heads/main"}'


# Answers


def test_a_genuine_delivery_is_in_the_file_when_it_is_answered(edge: Edge) -> None:
    answer = edge.deliver("github", PUSH)

    assert (answer.status, answer.body) == (200, b"done\n")
    assert answer.headers["content-type"] == "text/plain"
    assert edge.rows("select event_id, state from receiver_events") == [("d-1", "done")]


def test_a_redelivery_is_a_duplicate(edge: Edge) -> None:
    edge.deliver("github", PUSH)

    assert edge.deliver("github", PUSH).body == b"duplicate\n"
    assert edge.count() == 1


def test_a_slash_at_the_end_changes_nothing_and_nothing_redirects(edge: Edge) -> None:
    headers = edge.signed("github", PUSH)

    answers = [edge.post(path, PUSH, headers) for path in ("/webhooks/github/", "/webhooks/github")]

    assert [(each.status, each.body) for each in answers] == [
        (200, b"done\n"),
        (200, b"duplicate\n"),
    ]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/webhooks/nobody", 404),
        ("POST", "/webhooks/github/more", 404),
        ("POST", "/webhooks/", 404),
        ("POST", "/webhooks", 404),
        ("POST", "//webhooks/github", 404),
        ("GET", "/", 404),
        ("GET", "/docs", 404),
        ("POST", "/healthz", 404),
        ("GET", "/webhooks/github", 405),
        ("HEAD", "/webhooks/github", 405),
        ("PUT", "/webhooks/github/", 405),
    ],
)
def test_other_places_and_methods_are_refused(
    edge: Edge, method: str, path: str, status: int
) -> None:
    with edge.wire() as wire:
        wire.send(request(method, path, b"", []))
        answer = wire.answer(method)

    assert answer.status == status
    assert answer.headers.get("allow") == ("POST" if status == 405 else None)
    assert "location" not in answer.headers


def test_every_answer_has_a_request_id_of_its_own(edge: Edge) -> None:
    answers = [
        edge.deliver("github", PUSH),
        edge.deliver("github", PUSH),
        edge.post("/webhooks/github", PUSH),
        edge.post("/webhooks/nobody", PUSH),
        edge.post("/elsewhere"),
        edge.post("/webhooks/github", b"x" * (BODY_BYTES_MAX + 1)),
    ]

    ids = [each.headers["x-request-id"] for each in answers]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"([0-9a-f]{11}-)?[0-9a-f]{8}-[0-9a-f]+", each) for each in ids)
    # By which the event is found in the file.
    [(received_ms,)] = edge.rows("select received_ms from receiver_events")
    assert ids[0].startswith(f"{received_ms:x}-")
    assert edge.rows("select request_id from receiver_events") == [(ids[0],)]


def test_a_failed_handler_without_a_worker_asks_the_sender_to_try_again(edge: Edge) -> None:
    answer = edge.deliver("github", PUSH, type="star")

    assert (answer.status, answer.body, answer.headers["retry-after"]) == (503, b"pending\n", "5")
    assert edge.rows("select state from receiver_events") == [("pending",)]


def test_what_can_t_be_written_is_never_a_2xx(edge: Edge) -> None:
    edge.loop.run(edge.writer.close())

    answer = edge.deliver("github", PUSH)

    assert (answer.status, answer.body) == (503, b"unavailable\n")
    assert answer.headers["retry-after"] == "5"
    assert edge.count() == 0


def test_an_unforeseen_error_is_a_503_that_tells_the_sender_nothing(
    edge: Edge, caplog: pytest.LogCaptureFixture
) -> None:
    db = apsw.Connection(str(edge.path))
    db.execute("pragma foreign_keys = off; drop table receiver_events")
    db.close()

    answers = [edge.deliver("github", b'{"ref": "secret words"}') for _ in range(30)]

    assert {(each.status, each.body) for each in answers} == {(503, b"unavailable\n")}
    lines = [line for line in caplog.messages if line.startswith("unexpected")]
    assert len(lines) == ERRORS_A_MINUTE_MAX
    assert answers[0].headers["x-request-id"] in lines[0]
    assert "secret words" not in caplog.text


def test_a_delivery_is_judged_by_the_config_of_its_time(edge: Edge) -> None:
    headers = edge.signed("github", PUSH)
    assert edge.post("/webhooks/github", PUSH, headers).status == 200

    edge.app.processor = edge.load(CONFIG.replace('"env:GITHUB"', '"env:NEW"'))

    assert edge.post("/webhooks/github", PUSH, headers).status == 401


# Size


@pytest.mark.parametrize("length", [b"50000000", b"0" * 5_000 + b"2"])
def test_an_announced_length_over_the_limit_gets_413_before_the_body_comes(
    edge: Edge, length: bytes
) -> None:
    with edge.wire() as wire:
        wire.send(b"POST /webhooks/github HTTP/1.1\r\ncontent-length: " + length + b"\r\n\r\n")

        assert wire.answer().status == 413


@pytest.mark.parametrize(("size", "status"), [(BODY_BYTES_MAX, 401), (BODY_BYTES_MAX + 1, 413)])
def test_the_limit_is_exact_for_plain_and_chunked_bodies(
    edge: Edge, size: int, status: int
) -> None:
    body = b"x" * size

    plain = edge.post("/webhooks/github", body)
    in_chunks = edge.post("/webhooks/github", chunked(body), [("Transfer-Encoding", "chunked")])

    assert (plain.status, in_chunks.status) == (status, status)


def test_a_sender_of_a_much_too_large_body_sees_the_413(edge: Edge) -> None:
    body = chunked(b"x" * (15 * BODY_BYTES_MAX))
    with edge.wire() as wire:
        wire.send(request("POST", "/webhooks/github", body, [("Transfer-Encoding", "chunked")]))

        assert wire.answer().status == 413
        assert wire.ask(request("GET", "/", b"", [])).status == 404


def test_a_body_in_chunks_is_verified_as_a_whole(edge: Edge) -> None:
    headers = [*edge.signed("github", PUSH), ("Transfer-Encoding", "chunked")]

    assert edge.post("/webhooks/github", chunked(PUSH, 5), headers).status == 200


def test_a_sender_that_leaves_in_the_body_writes_nothing(edge: Edge) -> None:
    text = request("POST", "/webhooks/github", PUSH, edge.signed("github", PUSH))
    with edge.wire() as wire:
        wire.send(text[:-1])

    edge.loop.until(lambda: edge.gate.bytes_received > 0 and not edge.gate.open)
    assert edge.count() == 0
    assert edge.refusals() == []


# Encoding


@pytest.mark.parametrize(
    ("source", "encoding", "status"),
    [
        ("github", "identity", 200),
        ("github", "", 200),
        ("github", "gzip", 415),
        ("github", "br", 415),
        ("zipped", "br", 415),
        ("zipped", "gzip, gzip", 415),
        ("zipped", "deflate", 415),
        ("zipped", "identity", 200),
    ],
)
def test_only_encodings_that_the_source_allows_are_taken(
    edge: Edge, source: str, encoding: str, status: int
) -> None:
    headers = [*edge.signed(source, PUSH), ("Content-Encoding", encoding)]

    assert edge.post(f"/webhooks/{source}", PUSH, headers).status == status


def test_two_encoding_headers_are_refused(edge: Edge) -> None:
    twice = [("Content-Encoding", "gzip")] * 2

    assert edge.post("/webhooks/zipped", gzip.compress(PUSH), twice).status == 415


@pytest.mark.parametrize("signed", ["packed", "unpacked"])
@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "x-gzip"])
def test_a_gzip_body_is_verified_in_either_form_and_kept_unpacked(
    edge: Edge, signed: str, encoding: str
) -> None:
    packed = gzip.compress(PUSH)
    headers = edge.signed("zipped", packed if signed == "packed" else PUSH)

    answer = edge.post("/webhooks/zipped", packed, [*headers, ("Content-Encoding", encoding)])

    assert answer.body == b"done\n"
    assert edge.rows("select data from receiver_records") == [('"refs/heads/main"',)]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (gzip.compress(b"x" * BODY_BYTES_MAX), 401),
        (gzip.compress(b"x" * (BODY_BYTES_MAX + 1)), 413),
        (gzip.compress(b"x" * 9_000_000), 413),
        (gzip.compress(b"x" * 6_000) * 2, 413),
        (gzip.compress(PUSH)[:-1], 415),
        (gzip.compress(PUSH) + b"trailing", 415),
        (b"not gzip", 415),
        (zlib.compress(PUSH), 415),
        (b"", 415),
    ],
    ids=[
        "at the limit",
        "over",
        "bomb",
        "over in two",
        "cut",
        "trailing",
        "plain",
        "zlib",
        "empty",
    ],
)
def test_gzip_is_unpacked_within_the_limit_and_as_a_whole(
    edge: Edge, body: bytes, status: int
) -> None:
    answer = edge.post("/webhooks/zipped", body, [("Content-Encoding", "gzip")])

    assert answer.status == status
    assert edge.count() == 0


def test_gzip_members_are_joined_but_not_without_end() -> None:
    members = [gzip.compress(bytes([each])) for each in range(17)]

    assert inflate(b"".join(members[:16]), 100) == bytes(range(16))
    with pytest.raises(Refused):
        inflate(b"".join(members), 100)


# Addresses


@pytest.mark.parametrize(
    ("forwarded", "status"),
    [
        ([], 403),
        (["192.0.2.7"], 401),
        (["2001:db8::1"], 401),
        (["203.0.113.9, 192.0.2.7"], 401),
        (["192.0.2.7, 203.0.113.9"], 403),
        (["203.0.113.9", "192.0.2.7"], 401),
        (["192.0.2.7, 127.0.0.1"], 401),
        (["192.0.2.7, garbage"], 403),
        (["192.0.2.7, unix"], 403),
        (["192.0.2.7,"], 403),
    ],
)
def test_the_allow_list_judges_what_the_trusted_proxy_saw(
    edge: Edge, forwarded: list[str], status: int
) -> None:
    headers = [("X-Forwarded-For", each) for each in forwarded]

    assert edge.post("/webhooks/fenced", PUSH, headers).status == status


@pytest.mark.parametrize(
    ("peer", "header", "trusted", "found"),
    [
        ("203.0.113.9", "192.0.2.7", ["10.0.0.0/8"], "203.0.113.9"),
        ("::ffff:10.0.0.1", "192.0.2.7", ["10.0.0.0/8"], "192.0.2.7"),
        ("10.0.0.1", "192.0.2.7:4711", ["10.0.0.0/8"], "192.0.2.7"),
        ("10.0.0.1", "[2001:db8::1]:4711", ["10.0.0.0/8"], "2001:db8::1"),
        ("10.0.0.1", "10.0.0.3, 10.0.0.2", ["10.0.0.0/8"], "10.0.0.3"),
        ("10.0.0.1", "", ["10.0.0.0/8"], ""),
        ("unix", "192.0.2.7", ["unix"], "192.0.2.7"),
        ("unix", "192.0.2.7", ["127.0.0.1/32"], "unix"),
    ],
)
def test_the_client_is_the_nearest_address_that_is_no_trusted_proxy(
    peer: str, header: str, trusted: list[str], found: str
) -> None:
    networks = [each if each == "unix" else ipaddress.ip_network(each) for each in trusted]

    address = client_address((peer, 1), [(b"x-forwarded-for", header.encode())], networks)

    assert str(address) == found


# The URL that the sender sees


@pytest.mark.parametrize(
    ("public_url", "expected"),
    [
        (None, "http://hooks.test/webhooks/gith%75b?a=1&b=%20"),
        ("https://pub.test/api", "https://pub.test/api/webhooks/gith%75b?a=1&b=%20"),
    ],
)
def test_the_url_is_the_configured_one_and_never_what_a_header_says(
    edge: Edge, public_url: str | None, expected: str
) -> None:
    text = CONFIG if public_url is None else f'public_url = "{public_url}"\n{CONFIG}'
    source = edge.load(text).settings.sources["github"]
    scope = {
        "scheme": "http",
        "raw_path": b"/webhooks/gith%75b",
        "query_string": b"a=1&b=%20",
        "headers": [(b"x-forwarded-proto", b"https"), (b"x-forwarded-host", b"evil.test")],
    }

    assert sender_url(scope, source, b"hooks.test") == expected


# Refusals


@pytest.mark.parametrize(
    "signature",
    ["", "sha256=", "sha256=\xe9", "sha256=" + "0" * 64, "v1,!!!a", "\xff" * 64, "=" * 5000],
)
@pytest.mark.parametrize("body", [b"", b"{}", b"\xff\xfe{}", PUSH])
def test_what_is_not_genuine_gets_401_and_no_event(edge: Edge, signature: str, body: bytes) -> None:
    answer = edge.post("/webhooks/github", body, [("X-Hub-Signature-256", signature)])

    assert (answer.status, answer.body) == (401, b"rejected\n")
    assert edge.count() == 0


def test_refusals_reach_the_file_within_about_a_second_counted(edge: Edge) -> None:
    for _ in range(7):
        edge.post("/webhooks/github", PUSH)
    last = edge.post("/webhooks/github", PUSH).headers["x-request-id"]

    edge.loop.until(lambda: edge.rows("select count(*) from receiver_rejections") == [(1,)])

    assert edge.rows("select source, reason, count, request_id from receiver_rejections") == [
        ("github", "bad-signature", 8, last)
    ]


TOKEN = "t0ken-of-sixteen-or-more"
PATHS = '[sources.gumroad]\nscheme = "gumroad"\nsecrets = ["env:TOKEN"]\n'


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"/webhooks/gumroad/{TOKEN}", 200),
        (f"/webhooks/gumroad/{TOKEN}/", 200),
        (f"/webhooks/gumroad/{TOKEN}?a={TOKEN}", 200),
        ("/webhooks/gumroad", 401),
        ("/webhooks/gumroad/", 401),
        (f"/webhooks/gumroad/{TOKEN}x", 401),
        (f"/webhooks/gumroad?{TOKEN}", 401),
        ("/webhooks/gumroad/gumroad", 401),
        (f"/webhooks/gumroad/a/{TOKEN}", 404),
        (f"/webhooks/gumroad/{TOKEN}//", 404),
        (f"/webhooks/stripe/{TOKEN}", 404),
        (f"/webhooks/gumrod/{TOKEN}", 404),
        (f"/api/webhooks/gumroad/{TOKEN}", 404),
    ],
)
def test_a_secret_in_the_path_is_judged_and_never_told(
    edge: Edge, logged: Logged, monkeypatch: pytest.MonkeyPatch, path: str, status: int
) -> None:
    monkeypatch.setitem(SECRETS, "TOKEN", TOKEN)
    edge.app.processor = edge.load(CONFIG + PATHS)

    answer = edge.post(path, b"sale_id=1&resource_name=sale")

    assert answer.status == status
    kept = edge.rows("select detail from receiver_rejections") + edge.rows(
        "select * from receiver_rejected"
    )
    assert "t0ken" not in f"{edge.refusals()}{kept}{logged.text}{answer}"


def test_each_way_to_be_refused_has_its_own_count(edge: Edge) -> None:
    edge.post("/webhooks/github", PUSH)
    edge.post("/webhooks/github", b"x" * (BODY_BYTES_MAX + 1))
    edge.post("/webhooks/github", PUSH, [("Content-Encoding", "br")])
    edge.post("/webhooks/fenced", PUSH)
    edge.post("/webhooks/" + "n" * 500)
    edge.post("/elsewhere")
    edge.deliver("stripe", stripe_body("evt_1", "a.b"), now_ms=NOW_MS - 301_000)

    assert edge.refusals() == [
        ("", "unknown", 2),
        ("fenced", "address", 1),
        ("github", "bad-signature", 1),
        ("github", "encoding", 1),
        ("github", "too-large", 1),
        ("stripe", "expired", 1),
    ]
    details = edge.rows("select max(length(detail)) from receiver_rejections")
    assert details[0][0] <= FIELD_CHARS_MAX


def test_counts_that_could_not_be_written_are_written_later(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.writer.WAIT_S_MAX", 0.05)
    app = edge.app
    other = apsw.Connection(str(edge.path))
    other.execute("begin immediate")
    edge.post("/webhooks/github", PUSH)
    written = edge.loop.call(app.tally.flush)
    edge.post("/webhooks/github", PUSH)
    edge.loop.until(written.done)
    other.execute("rollback")
    other.close()

    assert edge.refusals() == [("github", "bad-signature", 2)]


def test_a_genuine_but_stale_delivery_is_kept_for_the_operator(edge: Edge) -> None:
    body = stripe_body("evt_1", "a.b")

    answer = edge.deliver("stripe", body, now_ms=NOW_MS - 301_000)

    assert (answer.status, answer.body) == (401, b"rejected\n")
    assert edge.count() == 0
    edge.refusals()
    ((headers, kept, skew_s),) = edge.rows("select headers, body, skew_s from receiver_rejected")
    assert kept == body
    assert abs(skew_s) == 301
    assert "stripe-signature" in dict(json.loads(headers))


def test_three_stale_deliveries_in_ten_minutes_raise_an_alarm_about_the_clock(
    edge: Edge, caplog: pytest.LogCaptureFixture
) -> None:
    for minutes in (0, 11, 12):
        edge.clock.now_ms = NOW_MS + minutes * 60_000
        edge.deliver("stripe", stripe_body("evt_1", "a.b"), now_ms=edge.clock() - 400_000)
    assert not any(line.startswith("clock ") for line in caplog.messages)

    edge.clock.now_ms += 1
    edge.deliver("stripe", stripe_body("evt_1", "a.b"), now_ms=edge.clock() - 400_000)

    (alarm,) = [each for each in caplog.records if each.getMessage().startswith("clock ")]
    assert alarm.levelno == logging.ERROR
    assert "source=stripe" in alarm.getMessage()
    assert re.search(r"skew_s=-?400\b", alarm.getMessage())


def test_a_flood_of_stale_deliveries_raises_one_alarm_in_ten_minutes(
    edge: Edge, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        for _ in range(12):
            edge.deliver("stripe", stripe_body("evt_1", "a.b"), now_ms=edge.clock() - 400_000)
        edge.clock.now_ms += 600_001

    assert len([line for line in caplog.messages if line.startswith("clock ")]) == 2


def test_stale_deliveries_kept_between_two_writes_are_bounded(edge: Edge) -> None:
    for count in range(tally.EXPIRED_MAX + 5):
        body = stripe_body(f"evt_{count}", "a.b")
        edge.deliver("stripe", body, now_ms=NOW_MS - 301_000)

    assert edge.refusals() == [("stripe", "expired", tally.EXPIRED_MAX + 5)]
    assert edge.rows("select count(*) from receiver_rejected") == [(tally.EXPIRED_MAX,)]


def test_a_stale_delivery_replayed_in_a_flood_keeps_no_other_from_being_kept(edge: Edge) -> None:
    replayed, genuine = stripe_body("evt_1", "a.b"), stripe_body("evt_2", "a.b")

    for _ in range(tally.EXPIRED_MAX + 5):
        edge.deliver("stripe", replayed, now_ms=NOW_MS - 301_000)
    edge.deliver("stripe", genuine, now_ms=NOW_MS - 301_000)
    # The same facts under another time and signature.
    edge.deliver("stripe", replayed, now_ms=NOW_MS - 302_000)

    edge.refusals()
    kept = edge.rows("select body, content_sha256 from receiver_rejected")
    assert [body for body, _ in kept].count(genuine) == 1
    assert len({content for _, content in kept}) == 2


def test_of_refused_requests_the_names_of_headers_are_kept_and_no_value(edge: Edge) -> None:
    headers = [("X-Hub-Signature-256", "sha256=00"), ("X-Forwarded-For", "192.0.2.7")]

    answer = edge.post("/webhooks/github", PUSH, headers)

    edge.refusals()
    ((names, *rest),) = edge.rows(
        "select header_names, method, address, body_bytes, request_id, url, headers, body "
        "from receiver_rejected"
    )
    assert "x-hub-signature-256" in json.loads(names)
    assert rest == ["POST", "192.0.2.7", len(PUSH), answer.headers["x-request-id"], *[None] * 3]
    assert "sha256=00" not in str(edge.rows("select * from receiver_rejected"))


def test_bodies_of_what_is_not_genuine_are_kept_where_the_config_asks_for_it(edge: Edge) -> None:
    asked = CONFIG.replace("[sources.github]", "[sources.github]\nkeep_rejected = true")
    edge.app.processor = edge.load(asked)

    edge.post("/webhooks/github", PUSH, [("X-Hub-Signature-256", "sha256=00"), ("Cookie", "me")])
    edge.post("/webhooks/zipped", PUSH)

    edge.refusals()
    (github, zipped) = edge.rows("select headers, body, url from receiver_rejected order by source")
    assert github[1] == PUSH
    assert ["x-hub-signature-256", "sha256=00"] in json.loads(github[0])
    assert "cookie" not in github[0]
    assert github[2].endswith("/webhooks/github")
    assert zipped == (None, None, None)


def test_a_flood_of_garbage_keeps_a_few_requests_and_one_count(edge: Edge) -> None:
    for _ in range(20):
        edge.post("/webhooks/github", PUSH)

    assert edge.refusals() == [("github", "bad-signature", 20)]
    assert edge.rows("select count(*) from receiver_rejected") == [(tally.KEPT_MAX,)]


def test_requests_kept_between_two_writes_are_bounded_whatever_the_source(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tally, "KEPT_IN_ALL_MAX", 2)
    for path in ("/webhooks/github", "/webhooks/zipped", "/webhooks/stripe", "/elsewhere"):
        edge.post(path, PUSH)

    assert len(edge.refusals()) == 4
    assert edge.rows("select count(*) from receiver_rejected") == [(2,)]


def test_uses_that_could_not_be_written_are_written_later(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge.deliver("stripe", stripe_body("evt_1", "a.b"))
    monkeypatch.setattr("store.writer.WAIT_S_MAX", 0.05)
    other = apsw.Connection(str(edge.path))
    other.execute("begin immediate")
    written = edge.loop.call(edge.app.tally.flush)
    edge.loop.until(written.done)
    other.execute("rollback")
    other.close()
    edge.deliver("stripe", stripe_body("evt_2", "a.b"))

    edge.refusals()

    assert edge.rows("select reference, count from receiver_secrets") == [("env:STRIPE", 2)]


def test_each_secret_tells_in_the_file_when_it_last_proved_a_delivery(edge: Edge) -> None:
    both = CONFIG.replace('secrets = ["env:STRIPE"]', 'secrets = ["env:NEW", "env:STRIPE"]')
    edge.app.processor = edge.load(both)
    edge.deliver("stripe", stripe_body("evt_1", "a.b"))
    edge.clock.now_ms += 1000
    edge.deliver("stripe", stripe_body("evt_2", "a.b"))

    edge.refusals()

    with snapshot(edge.path) as seen:
        assert secrets.last_used(seen) == [
            secrets.SecretUse("stripe", "env:STRIPE", NOW_MS + 1000, 2)
        ]


# What is logged


def test_a_delivery_is_one_line_without_its_payload(edge: Edge, logged: Logged) -> None:
    body = stripe_body("evt 1 outcome=forged", "a.b", secret="words of the payload")

    answer = edge.deliver("stripe", body)

    (line,) = logged.of("delivery")
    assert 'source=stripe id="evt 1 outcome=forged" type=a.b ' in line
    assert f" request={answer.headers['x-request-id']} ms=" in line
    assert "words of the payload" not in logged.text
    assert SECRETS["STRIPE"] not in logged.text


def test_the_line_of_a_delivery_names_what_was_done_and_what_ties_it_to_its_messages(
    edge: Edge, logged: Logged
) -> None:
    edge.deliver("github", PUSH)
    edge.deliver("github", PUSH)

    first, again = logged.of("delivery")
    digest = sha256(PUSH).hexdigest()
    assert f" correlation=event-1 keys=greet:sha256:{digest} outcome=done " in first
    assert " correlation=event-1 outcome=duplicate " in again


# Fuzz


@given(body=st.binary(max_size=300), type=st.sampled_from(["push", "star", "ping", "x"]))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_signed_garbage_is_kept_and_never_breaks_anything(
    edge: Edge, body: bytes, type: str
) -> None:
    answer = edge.deliver("zipped", body, event_id=f"d-{zlib.crc32(body)}", type=type)

    assert answer.status == 200
    assert answer.body.strip() in {b"done", b"ignored", b"quarantined", b"duplicate", b"conflict"}


@given(
    names=st.lists(
        st.sampled_from(
            ["X-Hub-Signature-256", "X-GitHub-Event", "Content-Encoding", "X-Forwarded-For", "X"]
        ),
        max_size=5,
    ),
    value=st.text(st.characters(min_codepoint=33, max_codepoint=255), max_size=60),
    body=st.binary(max_size=100),
)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_unsigned_garbage_is_refused_whatever_it_is(
    edge: Edge, names: list[str], value: str, body: bytes
) -> None:
    headers = [(name, value) for name in names]

    answer = edge.post("/webhooks/fenced", body, headers)

    assert answer.status in {400, 401, 403, 415}


# The admin application


@pytest.mark.parametrize(
    ("method", "path", "ready", "status"),
    [
        ("GET", "/healthz", False, 200),
        ("HEAD", "/healthz", True, 200),
        ("GET", "/readyz", True, 200),
        ("GET", "/readyz", False, 503),
        ("GET", "/metrics", False, 200),
        ("POST", "/metrics", True, 405),
        ("POST", "/healthz", True, 405),
        ("GET", "/webhooks/github", True, 404),
    ],
)
def test_the_admin_application_tells_life_and_readiness_apart(
    method: str, path: str, ready: bool, status: int
) -> None:
    sent: list[Any] = []

    async def scrape() -> bytes:
        return b"receiver_info 1\n"

    async def send(message: Any) -> None:
        sent.append(message)

    admin: Any = app_module.Admin(lambda: ready, scrape)
    asyncio.run(admin({"method": method, "path": path}, None, send))

    assert sent[0]["status"] == status
