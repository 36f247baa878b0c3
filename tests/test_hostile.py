"""Ten thousand requests that nobody signed: no row each, no traceback, no memory, no 5xx."""

import gzip
import itertools
import random
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from store import rejections
from tests.service import (
    SECRETS,
    Service,
    Start,
    by_github,
    by_shopify,
    by_standard_webhooks,
    by_stripe,
    checkout,
    delivery,
    event,
    invoice,
    services,
    stripe_request,
    until,
    word,
)
from tests.test_app import Headers, chunked, request
from tests.test_http import Wire

REQUESTS = 10_000
WARM_UP = 2_000
#: Connections at a time, and requests on each before it is closed.
CONNECTIONS = 8
ON_EACH = 50
BODY_BYTES_MAX = 20_000
GROWTH_BYTES_MAX = 10_000_000
#: Lines of the log for all of it, and rows for a source.
LINES_MAX = 500
REASONS = ("bad-signature", "expired", "encoding", "too-large", "unknown", "address")
#: Slow connections of each kind, seconds between two bytes of one, and the longest that a good
#: delivery takes beside them.
SLOW = 100
DRIP_S = 0.5
ANSWER_S_MAX = 0.5

CONFIG = f"""
[server]
body_bytes_max = {BODY_BYTES_MAX}

[sources.stripe]
scheme = "stripe"
secrets = ["env:STRIPE", "env:STRIPE_TWO"]
livemode = false

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
allow_ips = ["192.0.2.0/24"]

[sources.shopify]
scheme = "shopify"
secrets = ["env:SHOPIFY"]

[sources.standard]
scheme = "standard-webhooks"
secrets = ["env:STANDARD"]

[[rules]]
operation = "initial-credit-grant"
source = "stripe"
on = ["invoice.paid"]
subject = "data.object.id"
customer = "data.object.customer"
grant = {{ unit = "credits", amount = 100 }}

[[rules]]
operation = "link-customer"
source = "stripe"
on = ["checkout.session.completed"]
link = {{ customer = "data.object.customer", workspace = "data.object.client_reference_id" }}
"""
SOURCES = ("stripe", "github", "zipped", "fenced", "shopify", "standard")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with services(tmp_path) as starting:
        yield starting


# Each kind makes one request: its bytes, and the statuses that are right for it.

Kind = Callable[[random.Random], tuple[bytes, set[int]]]

# 19 KB that would become 18 MB.
BOMB = gzip.compress(bytes(18_000_000))
assert len(BOMB) < BODY_BYTES_MAX
PUSH = b'{"ref": "refs/heads/main"}'


def garbage(chance: random.Random, size_max: int = 2_000) -> bytes:
    return chance.randbytes(chance.randrange(size_max))


def wrong_signature(chance: random.Random) -> tuple[bytes, set[int]]:
    body = invoice(f"evt_{chance.randrange(10**9)}", "in_1")
    headers: list[Headers] = [
        [("Stripe-Signature", f"t={int(time.time())},v1={chance.randbytes(32).hex()}")],
        # Genuine, but of another body, of another source, or cut.
        by_stripe(body + b" "),
        by_stripe(body, secret="GITHUB"),
        [(name, text[:-1]) for name, text in by_stripe(body)],
    ]
    return delivery("stripe", body, chance.choice(headers)), {401}


def tampered(chance: random.Random) -> tuple[bytes, set[int]]:
    name = f"d-{chance.randrange(10**9)}"
    signed = {
        "github": by_github(PUSH, name),
        "zipped": by_github(PUSH, name),
        "shopify": by_shopify(PUSH, name),
        "standard": by_standard_webhooks(PUSH, name),
    }
    source, headers = chance.choice(list(signed.items()))
    return delivery(source, PUSH.replace(b"main", b"evil"), headers), {401}


def no_signature(chance: random.Random) -> tuple[bytes, set[int]]:
    source = chance.choice(SOURCES)
    return delivery(source, garbage(chance), []), {403 if source == "fenced" else 401}


def strange_header_bytes(chance: random.Random) -> tuple[bytes, set[int]]:
    names = ("Stripe-Signature", "X-Hub-Signature-256", "webhook-signature", "webhook-timestamp")
    text = "".join(chr(chance.choice([*range(33, 127), *range(128, 256)])) for _ in range(80))
    headers = [(name, chance.choice(["", "sha256=", "t=1,v1=", "v1,"]) + text) for name in names]
    headers += [("webhook-id", text), ("X-Shopify-Hmac-Sha256", text)]
    source = chance.choice(["stripe", "github", "zipped", "shopify", "standard"])
    return delivery(source, garbage(chance), headers), {401}


def announced_too_large(chance: random.Random) -> tuple[bytes, set[int]]:
    return delivery("stripe", bytes(BODY_BYTES_MAX + chance.randrange(1, 9_000)), []), {413}


def chunks_too_large(chance: random.Random) -> tuple[bytes, set[int]]:
    body = chunked(bytes(BODY_BYTES_MAX + chance.randrange(1, 9_000)))
    headers = [("Transfer-Encoding", "chunked")]
    return request("POST", "/webhooks/github", body, headers), {413}


def gzip_bomb(chance: random.Random) -> tuple[bytes, set[int]]:
    headers = [("Content-Encoding", "gzip"), *by_github(PUSH, "d-1")]
    source = chance.choice(["zipped", "github"])
    return delivery(source, BOMB, headers), {413 if source == "zipped" else 415}


def broken_gzip(chance: random.Random) -> tuple[bytes, set[int]]:
    body = chance.choice([garbage(chance), gzip.compress(PUSH)[:-3], BOMB[:9_000]])
    coding = chance.choice(["gzip", "br", "gzip, gzip", "deflate"])
    # What is cut short may be too large before its end is missed.
    return delivery("zipped", body, [("Content-Encoding", coding)]), {413, 415}


def unknown_path(chance: random.Random) -> tuple[bytes, set[int]]:
    name = "".join(chance.choices("abc/%2e.;?=&~", k=chance.randrange(1, 300)))
    return request("POST", f"/x/{name}", garbage(chance), []), {404}


def unknown_source(chance: random.Random) -> tuple[bytes, set[int]]:
    return delivery(f"source-{chance.randrange(10**9)}", garbage(chance), []), {404}


def wrong_method(chance: random.Random) -> tuple[bytes, set[int]]:
    method = chance.choice(["GET", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
    return request(method, "/webhooks/stripe", b"", []), {405}


def no_http(chance: random.Random) -> tuple[bytes, set[int]]:
    text = chance.choice(
        [b"\x16\x03\x01" + garbage(chance), b"HELO\r\n\r\n", b"GET\0/ HTTP/9\r\n\r\n"]
    )
    return text, {400}


def too_many_headers(chance: random.Random) -> tuple[bytes, set[int]]:
    headers = [(f"X-{number}", "y" * chance.randrange(200)) for number in range(150)]
    return delivery("stripe", b"{}", headers), {431}


KINDS: tuple[Kind, ...] = (
    wrong_signature,
    tampered,
    no_signature,
    strange_header_bytes,
    announced_too_large,
    chunks_too_large,
    gzip_bomb,
    broken_gzip,
    unknown_path,
    unknown_source,
    wrong_method,
    no_http,
    too_many_headers,
)


def throw(service: Service, count: int, seed: int) -> Counter[tuple[str, int]]:
    """So many requests of all kinds over many connections; how each kind was answered."""

    def one_connection(number: int) -> list[tuple[str, int, set[int]]]:
        chance = random.Random(seed + number)
        return list(itertools.islice(asking(service, chance), ON_EACH))

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        batches = list(pool.map(one_connection, range(count // ON_EACH)))
    answers = list(itertools.chain.from_iterable(batches))
    wrong = [(name, status) for name, status, right in answers if status not in right]
    assert wrong == [], f"seed {seed}"
    return Counter((name, status) for name, status, _ in answers)


def asking(service: Service, chance: random.Random) -> Iterator[tuple[str, int, set[int]]]:
    wire = service.wire()
    try:
        while True:
            kind = chance.choice(KINDS)
            text, right = kind(chance)
            answer = wire.ask(text)
            yield kind.__name__, answer.status, right
            if answer.headers.get("connection") == "close":
                wire.socket.close()
                wire = service.wire()
    finally:
        wire.socket.close()


def test_ten_thousand_unauthenticated_requests_cost_nothing_that_grows(
    start: Start, seed: int
) -> None:
    service = start(CONFIG)
    throw(service, WARM_UP, seed + REQUESTS)
    before = service.resident_bytes()

    answers = throw(service, REQUESTS, seed)

    assert sum(answers.values()) == REQUESTS
    assert {name for name, _ in answers} == {kind.__name__ for kind in KINDS}
    assert service.resident_bytes() - before < GROWTH_BYTES_MAX
    assert service.health("/readyz") == 200
    assert service.stop() == 0
    assert_nothing_is_left(service)


def assert_nothing_is_left(service: Service) -> None:
    """No trace of unauthenticated requests but counts, and the newest without their bodies."""
    for table in ("events", "payloads", "operations", "conflicts", "attempts"):
        assert service.value(f"select count(*) from receiver_{table}") == 0, table
    kept = service.rows("select body, headers from receiver_rejected")
    assert len(kept) <= rejections.KEPT_IN_ALL_MAX
    assert {*kept} <= {(None, None)}
    rows = service.rows("select source, reason, length(detail) from receiver_rejections")
    assert {source for source, _, _ in rows} <= {"", *SOURCES}
    assert {reason for _, reason, _ in rows} <= set(REASONS)
    minutes = int(service.value("select count(distinct minute_ms) from receiver_rejections"))
    assert len(rows) <= (len(SOURCES) + 1) * len(REASONS) * minutes
    assert all(length <= 200 for _, _, length in rows)
    log = service.log
    assert "Traceback" not in log
    assert " ERROR " not in log
    assert len(log.splitlines()) < LINES_MAX
    assert not any(secret in log for secret in SECRETS.values())


# Slow ones


class Slow:
    """Connections that send a byte now and then, and never come to an end."""

    def __init__(self, service: Service) -> None:
        head = b"POST /webhooks/stripe HTTP/1.1\r\nHost: h\r\nX-Slow: "
        body = b"POST /webhooks/github HTTP/1.1\r\nHost: h\r\nContent-Length: 9000\r\n\r\n"
        self._stack = ExitStack()
        self.heads = [self._open(service, head) for _ in range(SLOW)]
        self.bodies = [self._open(service, body) for _ in range(SLOW)]
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._drip)

    def _open(self, service: Service, text: bytes) -> Wire:
        wire = self._stack.enter_context(service.wire())
        wire.send(text)
        return wire

    def _drip(self) -> None:
        while not self._enough.wait(DRIP_S):
            for wire in (*self.heads, *self.bodies):
                try:
                    wire.send(b"x")
                except OSError:
                    # The server has cut it off.
                    continue

    def __enter__(self) -> "Slow":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join()
        self._stack.close()


def test_slow_connections_are_cut_off_and_good_deliveries_beside_them_stay_quick(
    start: Start,
) -> None:
    service = start(CONFIG)
    with service.wire() as good, Slow(service) as slow:
        good.ask(stripe_request(checkout("evt_link")))
        cut_off = ThreadPoolExecutor(1)
        ends = cut_off.submit(lambda: [wire.rest() for wire in slow.heads])
        took = deliver_while(good, lambda: not ends.done())
        cut_off.shutdown()

        assert {text.split(b"\r\n")[0] for text in ends.result()} == {
            b"HTTP/1.1 408 Request Timeout"
        }
    assert len(took) > 100
    assert max(took) < ANSWER_S_MAX
    until(lambda: word_of(service, event("evt_last", "price.created")) == "ignored")
    assert service.value("select count(*) from receiver_events") == len(took) + 2
    assert service.stop() == 0
    assert "Traceback" not in service.log


def word_of(service: Service, body: bytes) -> str:
    return word(service.post("stripe", body, by_stripe(body)))


def deliver_while(wire: Wire, condition: Callable[[], bool]) -> list[float]:
    """One grant after the other; how long each answer took, in seconds."""
    took: list[float] = []
    while condition():
        text = stripe_request(invoice(f"evt_{len(took)}", f"in_{len(took)}"))
        started = time.monotonic()
        assert word(wire.ask(text)) == "done"
        took.append(time.monotonic() - started)
    return took


def test_large_unsigned_bodies_in_chunks_are_answered_and_never_reach_the_file(
    start: Start,
) -> None:
    """F15: 50 MB that nobody signed, in chunks, on many connections."""
    # The usual limit, and so a sender has time to see the answer.
    service = start(CONFIG.replace(f"body_bytes_max = {BODY_BYTES_MAX}", ""))
    written = service.value("pragma page_count")

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        first = list(pool.map(lambda _: send_endlessly(service), range(CONNECTIONS)))
        before = service.resident_bytes()
        others = list(pool.map(lambda _: send_endlessly(service), range(4 * CONNECTIONS)))

    assert {*first, *others} == {413}
    assert service.resident_bytes() - before < GROWTH_BYTES_MAX
    assert service.value("pragma page_count") == written
    assert service.stop() == 0
    assert_nothing_is_left(service)


def send_endlessly(service: Service) -> int:
    """Chunks, up to 50 MB of them, until the server answers; its status."""
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    head = b"POST /webhooks/github HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    with service.wire() as wire:
        wire.send(head)
        for _ in range(800):
            if select.select([wire.socket], [], [], 0)[0]:
                return wire.answer().status
            wire.send(chunk)
    raise AssertionError("the server took it all")
