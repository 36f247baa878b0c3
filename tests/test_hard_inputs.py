"""Inputs that broke other receivers; each is one instance of a kind, by its number in our list.

Proved elsewhere:
  A20  test_references.test_white_space_around_a_secret_is_stripped_with_a_warning
  A21  test_config.test_a_bad_secret_is_refused_without_being_shown
  C2, C8, F3, F4, F5, D1 in bulk  test_must_hold
  C10  test_shared_file.test_the_app_grants_while_the_webhook_for_it_arrives
  C13  test_crash.test_a_kill_between_the_effect_and_the_commit_leaves_neither
  F15  test_hostile.test_large_unsigned_bodies_in_chunks_are_answered_and_never_reach_the_file
Of later work: A7, B8, C7, D4 to D7, D9 to D11, E4, E11, E12, F7 to F10, F12 to F14, and of C18 the
warning about a double subscription.
"""

import gzip
import hmac
import itertools
import json
import re
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

import pytest

from tests.conftest import World
from tests.service import (
    SECRETS,
    Crowd,
    Service,
    by_github,
    by_shopify,
    by_standard_webhooks,
    by_stripe,
    checkout,
    delivery,
    event,
    held_lock,
    invoice,
    services,
    stripe_mac,
    stripe_request,
    until,
    word,
)
from tests.test_app import Headers, request
from tests.test_http import Reply

CONFIG = """
[sources.stripe]
scheme = "stripe"
secrets = [
  "env:STRIPE",
  "env:STRIPE_TWO",
  { secret = "env:STRIPE_THREE", livemode = false },
]

[sources.github]
scheme = "github"
secrets = ["env:GITHUB"]

[sources.zipped]
scheme = "github"
secrets = ["env:GITHUB"]
gzip = true

[sources.shopify]
scheme = "shopify"
secrets = ["env:SHOPIFY"]
account = "one.myshopify.com"

[sources.standard]
scheme = "standard-webhooks"
secrets = ["env:STANDARD"]

# A sender that signs the URL it posts to, and is reached through a proxy that ends TLS.
[sources.url]
public_url = "https://pub.example.com/api"
secrets = ["env:GITHUB"]
scheme.sig = "header:X-Signature"
scheme.algo = "sha256"
scheme.enc = "hex"
scheme.signed = "{url}{body}"
scheme.event_id = "json:/id"

# A sender without ids that makes a new time for each attempt, and lists them.
[sources.counting]
secrets = ["env:GITHUB"]
scheme.sig = "header:X-Signature"
scheme.algo = "sha256"
scheme.enc = "hex"
scheme.signed = "{body}"
scheme.event_id = "json:/order/number"
scheme.event_type = "json:/type"
scheme.volatile = ["createdAt", "attempts[*].at"]

[[rules]]
operation = "link-customer"
source = "stripe"
on = ["checkout.session.completed"]
link = { customer = "data.object.customer", workspace = "data.object.client_reference_id" }

[[rules]]
operation = "initial-credit-grant"
source = "stripe"
on = ["invoice.paid", "invoice.payment_succeeded"]
subject = "data.object.id"
customer = "data.object.customer"
grant = { unit = "credits", amount = 100 }

[[rules]]
operation = "one-time-grant"
source = "stripe"
on = ["payment_intent.succeeded"]
subject = "data.object.id"
customer = "data.object.metadata.user"
grant = { unit = "credits", amount = 5 }

[[rules]]
operation = "count-push"
source = ["github", "zipped"]
on = ["push"]
record = { kind = "push", data = "{head_commit.message}" }

[[rules]]
operation = "count-order"
source = "shopify"
on = ["orders/*"]
subject = "id"
record = { kind = "order", data = "{note}" }

[[rules]]
operation = "sign-up"
source = "standard"
on = ["user.*"]
subject = "data.id"
record = { kind = "user", data = "{data}" }

[[rules]]
operation = "order"
source = "counting"
on = ["*"]
subject = "order.number"
record = { kind = "order", data = "{order}" }
"""


_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with services(tmp_path_factory.mktemp("hard")) as start:
        running = start(CONFIG)
        running.deliver(checkout("evt_link"))
        yield running
        assert running.stop() == 0
        for never in ("Traceback", "unexpected", "locked", "CRITICAL"):
            assert never not in running.log
        running.assert_books_balance()


@pytest.fixture
def new() -> str:
    """A part of names that no other test has."""
    return f"n{next(_numbers)}x"


def said(answer: Reply) -> tuple[int, str]:
    return answer.status, word(answer)


def state(service: Service, event_id: str) -> tuple[str, str | None]:
    """The stored event's state and reason."""
    ((found, reason),) = service.rows(
        "select state, reason from receiver_events where event_id = ?", event_id
    )
    return found, reason


def granted(service: Service, subject: str) -> list[tuple[str, str, int]]:
    """Account, workspace and amount of every entry for a subject."""
    return service.rows(
        "select account, workspace, amount from receiver_ledger where subject = ? order by 1",
        subject,
    )


def records(service: Service, event_id: str) -> list[object]:
    """The data of every record that an event made."""
    rows = service.rows(
        """
        select data from receiver_records
        join receiver_operations using (source, account, subject, operation)
        join receiver_events on receiver_events.id = receiver_operations.event
        where event_id = ?
        """,
        event_id,
    )
    return [json.loads(data) for (data,) in rows]


# A: raw body, encoding, header parsing

# NAME becomes one that no other test has.
BODIES = {
    "A1 spacing": b'{"b":1, "a":2 ,\t"id":"NAME", "type":"user.new",\n "data" : {"id":"NAME"}}\n',
    "A1 numbers": b'{"id":"NAME","type":"user.new","data":{"id":"NAME","a":1.50,"b":1e2,"c":-0}}',
    "A1 same key twice": b'{"id":"x","id":"NAME","type":"user.new","data":{"id":"NAME"}}',
    "A2 slashes": rb'{"id":"NAME","type":"user.new","u":"https:\/\/x","data":{"id":"NAME"}}',
    "A2 escapes": rb'{"id":"NAME","type":"user.new","u":"\u00e9\ud83d\ude00","data":{"id":"NAME"}}',
    "A3 escaped": rb'{"id":"NAME","type":"user.new","n":"a\u2028b\u2029","data":{"id":"NAME"}}',
    "A3 raw": '{"id":"NAME","type":"user.new","n":"a\u2028\u2029", "data":{"id":"NAME"}}'.encode(),
    "A4": '{"id":"NAME","type":"user.new","t":"💖 \u2013 \u2019", "data":{"id":"NAME"}}'.encode(),
    "A6": '{"id":"NAME","type":"user.new","message":"🚢 it", "data":{"id":"NAME"}}'.encode(),
    "A8": b'{"id":"NAME","type":"user.new","data":{"id":"NAME"}}\r\n',
    "A8 before": b'\r\n {"id":"NAME","type":"user.new","data":{"id":"NAME"}}',
    "byte order mark": b'\xef\xbb\xbf{"id":"NAME","type":"user.new","data":{"id":"NAME"}}',
}


def signed_by(source: str, body: bytes, name: str) -> Headers:
    return {
        "stripe": lambda: by_stripe(body),
        "github": lambda: by_github(body, name),
        "shopify": lambda: by_shopify(body, name),
        "standard": lambda: by_standard_webhooks(body, name),
    }[source]()


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("source", ["stripe", "github", "shopify", "standard"])
def test_a1_to_a8_the_bytes_on_the_wire_are_verified_and_stored(
    service: Service, source: str, kind: str, new: str
) -> None:
    body = BODIES[kind].replace(b"NAME", new.encode())
    headers = signed_by(source, body, new)
    text = body.decode("utf-8-sig")
    others = [
        json.dumps(json.loads(text)).encode(),
        json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":")).encode(),
        text.strip().encode(),
        body + b"\n",
    ]

    refused = [service.post(source, other, headers) for other in others if other != body]
    taken = service.post(source, body, headers)

    assert {each.status for each in refused} == {401}
    assert said(taken) == (200, "ignored" if source == "stripe" else "done")
    assert service.rows(
        """
        select body from receiver_payloads join receiver_events on id = event
        where event_id in (?, ?)
        """,
        new,
        f"{new}:orders/paid",
    ) == [(body,)]


def form(payload: str, *more: tuple[str, str]) -> bytes:
    return urlencode([("payload", payload), *more]).encode()


@pytest.mark.parametrize("message", ["plain", "🚢 & more = 100% + ü", "a\u2028b"])
def test_a10_to_a12_a_form_of_github_is_signed_as_it_is_sent_and_unwrapped(
    service: Service, message: str, new: str
) -> None:
    document = json.dumps({"head_commit": {"message": message}, "n": new}, ensure_ascii=False)
    body = form(document)
    kind = [("Content-Type", "application/x-www-form-urlencoded")]

    as_json = service.post("github", body, by_github(document.encode(), f"{new}-json") + kind)
    answer = service.post("github", body, by_github(body, new) + kind)

    assert as_json.status == 401
    assert said(answer) == (200, "done")
    assert records(service, new) == [message]


@pytest.mark.parametrize(
    "body", [form("{not json"), form(""), b"zen=1&hook=2", b"payload=%7B%22a%22", b"payload"]
)
def test_a11_a_form_that_can_not_be_read_is_never_a_success(
    service: Service, body: bytes, new: str
) -> None:
    answer = service.post("github", body, by_github(body, new))

    assert said(answer) == (200, "quarantined")
    found, reason = state(service, new)
    assert found == "quarantined"
    assert reason is not None
    assert reason.startswith("body is not JSON")


def test_a14_gzip_is_refused_in_words_or_inflated_within_a_bound(
    service: Service, new: str
) -> None:
    body = json.dumps({"head_commit": {"message": new}}).encode()
    packed = gzip.compress(body)
    coding = [("Content-Encoding", "gzip")]

    refused = service.post("github", packed, by_github(packed, new) + coding)
    over_packed = service.post("zipped", packed, by_github(packed, f"{new}-p") + coding)
    over_plain = service.post("zipped", packed, by_github(body, new) + coding)
    bomb = gzip.compress(bytes(2_000_000))
    too_large = service.post("zipped", bomb, by_github(bomb, f"{new}-b") + coding)

    assert said(refused) == (415, "encoding")
    assert [said(over_packed), said(over_plain)] == [(200, "done"), (200, "done")]
    # The same body under another id that nobody signed: recorded once.
    assert records(service, f"{new}-p") == [new]
    assert too_large.status == 413


@pytest.mark.parametrize("chunked", [False, True])
def test_a15_a_body_that_comes_byte_by_byte_is_read_once(
    service: Service, chunked: bool, new: str
) -> None:
    body = invoice(f"evt_{new}", f"in_{new}")
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    lines = ["POST /webhooks/stripe HTTP/1.1", "Host: h", length]
    lines += [f"{name}: {value}" for name, value in by_stripe(body)]
    with service.wire() as wire:
        wire.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire.send("\r\n".join(lines).encode() + b"\r\n\r\n")
        for byte in body:
            wire.send(b"1\r\n%c\r\n" % byte if chunked else b"%c" % byte)
        if chunked:
            wire.send(b"0\r\n\r\n")

        assert said(wire.answer()) == (200, "done")


@pytest.mark.parametrize(
    ("source", "name", "value"),
    [
        ("github", "X-Hub-Signature-256", "sha256=\xe9"),
        ("github", "X-Hub-Signature-256", "\xe9\xff"),
        ("stripe", "Stripe-Signature", "t=\xb2,v1=\xe9"),
        ("shopify", "X-Shopify-Hmac-Sha256", "\xe9" * 44),
        ("standard", "webhook-signature", "v1,\xe9"),
        ("standard", "webhook-timestamp", "\xb2"),
        ("standard", "webhook-id", "\xe9"),
    ],
)
def test_a16_bytes_that_are_not_ascii_are_refused(
    service: Service, source: str, name: str, value: str, new: str
) -> None:
    body = b'{"type":"user.new"}'
    headers = [pair for pair in signed_by(source, body, new) if pair[0] != name]

    assert service.post(source, body, [*headers, (name, value)]).status == 401


@pytest.mark.parametrize(
    ("items", "status"),
    [
        ("v1", 401),
        ("v1,a,b", 401),
        ("v1,!!!a", 401),
        ("v1,", 401),
        (",", 401),
        ("GOOD", 401),
        ("v2,GOOD", 401),
        ("v0,GOOD v2,GOOD", 401),
        # A space too many says nothing, and the good one counts (B4 and B5 beside it).
        ("v1,AAAA  v1,GOOD", 200),
        ("v1,BAD v1,GOOD v2,BAD", 200),
        ("v1,GOOD", 200),
        ("v1a,BAD v1,GOOD", 200),
    ],
)
def test_a17_b4_b5_a_list_of_signatures(
    service: Service, items: str, status: int, new: str
) -> None:
    body = json.dumps({"type": "other", "n": new}).encode()

    answer = service.post("standard", body, by_standard_webhooks(body, new, items))

    assert answer.status == status


@pytest.mark.parametrize(
    "body", [b"\xff\xfe{}", b"\x00", b"{", b"\xef\xbb\xbf", b"[" * 5_000, b"1e9999"]
)
@pytest.mark.parametrize("source", ["stripe", "github", "shopify", "standard"])
def test_a17_bodies_that_are_not_text_are_refused_unsigned_and_kept_aside_signed(
    service: Service, source: str, body: bytes, new: str
) -> None:
    # Stripe's event id is in the body, so there the same body is the same event.
    words = ("quarantined",) if source != "stripe" else ("quarantined", "duplicate")
    tampered = body + b" "

    unsigned = service.post(source, tampered, signed_by(source, body, new))
    answer = service.post(source, body, signed_by(source, body, new))

    assert unsigned.status == 401
    assert answer.status == 200
    assert word(answer) in words


@pytest.mark.parametrize(
    "stamp", ["{}abc", "+{}", " {}", "{}.0", "{}e0", "0x{}", "{}\xa0", "", "-1"]
)
def test_a19_a_timestamp_is_digits_and_nothing_else(service: Service, stamp: str, new: str) -> None:
    body = invoice(f"evt_{new}", f"in_{new}")
    at = stamp.format(int(time.time()))
    mac = hmac.digest(
        SECRETS["STRIPE"].encode(), at.encode("latin-1") + b"." + body, "sha256"
    ).hex()

    answer = service.post("stripe", body, [("Stripe-Signature", f"t={at},v1={mac}")])

    assert said(answer) == (401, "rejected")


@pytest.mark.parametrize("source", ["stripe", "github", "shopify", "standard"])
def test_a22_the_expected_signature_is_nowhere_to_be_found(
    service: Service, source: str, new: str
) -> None:
    body = invoice(f"evt_{new}", f"in_{new}")
    headers = signed_by(source, body, new)
    expected = headers[-1][1].split("v1=")[-1].removeprefix("v1,").removeprefix("sha256=")
    wrong = [(name, text.replace(expected, "0" * 64)) for name, text in headers]

    answer = service.post(source, body, wrong)

    until(lambda: answer.headers["x-request-id"] in service.log)
    details = str(service.rows("select detail from receiver_rejections"))
    for text in (str(answer), service.log, details):
        assert expected not in text
        assert not any(secret in text for secret in SECRETS.values())
    assert new not in str(answer)


@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("https://pub.example.com/api/webhooks/url", 200),
        ("https://pub.example.com/webhooks/url", 401),
        ("http://pub.example.com/api/webhooks/url", 401),
        ("http://hooks.test/webhooks/url", 401),
        ("https://forged.example.com/webhooks/url", 401),
    ],
)
def test_a23_the_url_is_the_configured_one_whatever_a_proxy_says(
    service: Service, url: str, status: int, new: str
) -> None:
    body = json.dumps({"id": new}).encode()
    mac = hmac.digest(SECRETS["GITHUB"].encode(), url.encode() + body, "sha256").hex()
    headers = [
        ("X-Signature", mac),
        ("X-Forwarded-Proto", "https"),
        ("X-Forwarded-Host", "forged.example.com"),
        ("Forwarded", "proto=https;host=forged.example.com"),
    ]

    assert service.post("url", body, headers).status == status


# B: signature lists, rotation, clocks


@pytest.mark.parametrize(
    ("items", "status"),
    [
        ("t=T,v1=BAD,v1=GOOD", 200),
        ("t=T,v1=GOOD,v1=BAD", 200),
        ("v1=BAD,v0=BAD,v1=GOOD,t=T", 200),
        ("t=T,v0=GOOD", 401),
        ("t=T,v1=BAD,v0=GOOD", 401),
        ("t=T,v2=GOOD", 401),
        ("t=T,v1=BAD", 401),
        ("v1=GOOD", 401),
    ],
)
def test_b1_b3_any_current_signature_counts_and_no_old_scheme(
    service: Service, items: str, status: int, new: str
) -> None:
    body = invoice(f"evt_{new}", f"in_{new}")
    at = str(int(time.time()))
    filled = items.replace("GOOD", stripe_mac(body, at)).replace("BAD", "0" * 64)

    answer = service.post("stripe", body, [("Stripe-Signature", filled.replace("t=T", f"t={at}"))])

    assert answer.status == status
    assert len(granted(service, f"in_{new}")) == (status == 200)


@pytest.mark.parametrize("secret", ["STRIPE", "STRIPE_TWO", "STRIPE_THREE"])
def test_b6_the_secret_that_matched_is_recorded(service: Service, secret: str, new: str) -> None:
    body = invoice(f"evt_{new}", f"in_{new}")

    answer = service.post("stripe", body, by_stripe(body, secret=secret))

    assert said(answer) == (200, "done")
    assert service.rows("select secret from receiver_events where event_id = ?", f"evt_{new}") == [
        (f"env:{secret}",)
    ]


def test_b7_a_secret_of_test_mode_signs_no_live_event(service: Service, new: str) -> None:
    body = invoice(f"evt_{new}", f"in_{new}", envelope={"livemode": True})

    answer = service.post("stripe", body, by_stripe(body, secret="STRIPE_THREE"))

    assert said(answer) == (200, "quarantined")
    assert state(service, f"evt_{new}")[1] == (
        "secret env:STRIPE_THREE is for test events, this is a live one"
    )
    assert granted(service, f"in_{new}") == []


def test_b9_a_stale_delivery_is_refused_and_the_clock_is_named(service: Service, new: str) -> None:
    now_s = int(time.time())
    for number in range(3):
        body = invoice(f"evt_{new}_{number}", f"in_{new}")
        late = service.post("stripe", body, by_stripe(body, at_s=now_s - 310))
        assert said(late) == (401, "rejected")

    assert granted(service, f"in_{new}") == []
    kept = "select count(*) from receiver_rejected where skew_s is not null"
    until(lambda: service.value(kept) >= 3)
    assert 310 <= service.value("select max(skew_s) from receiver_rejected") < 330
    until(lambda: re.search(r"clock source=stripe skew_s=3[12]\d", service.log) is not None)


@pytest.mark.parametrize("offset_s", [-290, -2, 2, 290])
def test_b9_b13_a_clock_that_drifts_is_no_problem_in_either_direction(
    service: Service, offset_s: int, new: str
) -> None:
    body = invoice(f"evt_{new}", f"in_{new}")

    answer = service.post("stripe", body, by_stripe(body, at_s=int(time.time()) + offset_s))

    assert said(answer) == (200, "done")


def test_b11_the_tolerance_is_measured_at_receipt_not_when_it_is_written(world: World) -> None:
    world.link()
    body = event("evt_1", "invoice.paid", id="in_1", customer="cus_1", status="paid", amount_paid=1)
    events = world.sign("stripe", body)
    world.clock.now_ms += 3_600_000

    outcome = world.store.write(partial(world.processor.receive, events=events, request_id="r"))

    assert outcome.word == "done"
    assert world.balance() == 100


# C: duplicates, races, atomicity


def test_c1_c4_c11_a_paid_invoice_that_comes_twice_grants_once(service: Service, new: str) -> None:
    body = invoice(f"evt_{new}", f"in_{new}")

    assert [service.deliver(body) for _ in range(3)] == ["done", "duplicate", "duplicate"]
    assert granted(service, f"in_{new}") == [("", "acme", 100)]


def test_c6_three_events_for_one_invoice_at_once_are_all_taken_and_grant_once(
    service: Service, new: str
) -> None:
    with Crowd(service, 3) as crowd:
        for number in range(30):
            subject = f"in_{new}_{number}"
            of = {"id": subject, "customer": "cus_1"}
            bodies = [
                event(f"evt_{new}_{number}_a", "invoice.paid", **of),
                event(f"evt_{new}_{number}_b", "invoice.payment_succeeded", **of),
                event(f"evt_{new}_{number}_c", "invoice.paid", **of),
            ]

            answers = crowd.ask([stripe_request(body) for body in bodies])

            assert [said(each) for each in answers] == [(200, "done")] * 3
            assert len(granted(service, subject)) == 1


def test_c9_d8_many_events_of_one_new_customer_at_once_never_block_each_other(
    service: Service, new: str
) -> None:
    """The first subscription of a customer: all of its objects at once, in any order."""
    customer = f"cus_{new}"
    bodies = [invoice(f"evt_{new}_{number}", f"in_{new}_{number}", customer) for number in range(8)]
    bodies += [
        event(f"evt_{new}_{kind}", kind, id=f"x_{new}", customer=customer)
        for kind in ("customer.created", "charge.succeeded", "customer.subscription.created")
    ]
    bodies += [checkout(f"evt_{new}_link_{number}", customer, new) for number in range(9)]

    with Crowd(service, len(bodies)) as crowd:
        answers = crowd.ask([stripe_request(body) for body in bodies])

    assert {each.status for each in answers} == {200}
    balance = "select sum(balance) from receiver_balances where workspace = ?"
    until(lambda: service.value(balance, new) == 800)


C12_CONFIG = """
handlers = "handlers.py"

[worker]
run = "off"

[sources.stripe]
scheme = "stripe"
secrets = ["env:STRIPE"]

[[rules]]
operation = "welcome"
source = "stripe"
on = ["invoice.paid"]
subject = "data.object.id"
call = "welcome"
"""
C12_HANDLERS = """
import os

def welcome(event, tx):
    tx.grant("credits", 7, workspace="acme")
    if not os.path.exists("repaired"):
        raise KeyError("not yet")
"""


def test_c12_a_handler_that_failed_never_marks_its_event_done(tmp_path: Path) -> None:
    with services(tmp_path) as start:
        service = start(C12_CONFIG, C12_HANDLERS)
        body = invoice("evt_1", "in_1")

        failed = [service.post("stripe", body, by_stripe(body)) for _ in range(2)]

        assert [said(each) for each in failed] == [(503, "pending")] * 2
        assert failed[0].headers["retry-after"].isdigit()
        assert state(service, "evt_1") == ("pending", None)
        assert granted(service, "in_1") == []
        (tmp_path / "repaired").touch()
        assert [service.deliver(body), service.deliver(body)] == ["done", "duplicate"]
        assert granted(service, "in_1") == [("", "acme", 7)]


def test_c16_identical_order_webhooks_in_the_same_instant_have_one_effect(
    service: Service, new: str
) -> None:
    body = json.dumps({"id": new, "note": "once"}).encode()
    requests = [
        delivery("shopify", body, by_shopify(body, f"e-{new}", webhook_id=f"w-{number}"))
        for number in range(10)
    ]

    with Crowd(service, 10) as crowd:
        answers = crowd.ask(requests)

    assert sorted(said(each) for each in answers) == [(200, "done")] + [(200, "duplicate")] * 9
    assert records(service, f"e-{new}:orders/paid") == ["once"]


def test_c18_one_fact_under_two_message_ids_has_one_effect(service: Service, new: str) -> None:
    body = json.dumps({"type": "user.created", "data": {"id": new}}).encode()

    first = service.post("standard", body, by_standard_webhooks(body, f"msg_{new}_1"))
    second = service.post("standard", body, by_standard_webhooks(body, f"msg_{new}_2"))

    assert [said(first), said(second)] == [(200, "done"), (200, "done")]
    assert records(service, f"msg_{new}_1") == [{"id": new}]
    assert records(service, f"msg_{new}_2") == []


def test_c20_a_redelivery_that_differs_is_a_conflict_until_the_field_is_volatile(
    service: Service, new: str
) -> None:
    first, again, other = (
        event(f"evt_{new}", "price.created", envelope={"pending_webhooks": pending, "try": number})
        for number, pending in ((1, 3), (1, 2), (2, 2))
    )

    words = [service.deliver(body) for body in (first, again, other, first)]

    assert words == ["ignored", "duplicate", "conflict", "duplicate"]
    ran = service.command("conflicts", "list", "--json")
    assert f"evt_{new}" in ran.stdout


def by_counting(body: bytes) -> Headers:
    return [("X-Signature", hmac.digest(SECRETS["GITHUB"].encode(), body, "sha256").hex())]


def test_c20_c21_a_sender_without_ids_is_deduplicated_by_a_key_and_a_mask(
    service: Service, new: str
) -> None:
    def body(created: int, tries: int, total: int = 5) -> bytes:
        attempts = [{"at": created + number} for number in range(tries)]
        order = {"number": new, "total": total}
        whole = {"type": "sold", "createdAt": created, "attempts": attempts, "order": order}
        return json.dumps(whole).encode()

    bodies = [body(1, 1), body(2, 1), body(3, 1), body(4, 1, total=6)]
    words = [word(service.post("counting", each, by_counting(each))) for each in bodies]

    assert words == ["done", "duplicate", "duplicate", "conflict"]
    assert records(service, new) == [{"number": new, "total": 5}]


def test_c21_a_body_without_the_key_is_kept_aside(service: Service, new: str) -> None:
    body = json.dumps({"type": "sold", "n": new}).encode()

    assert said(service.post("counting", body, by_counting(body))) == (200, "quarantined")


@pytest.mark.parametrize(
    "of", [{"metadata": {}}, {"metadata": None}, {}, {"metadata": {"user": None}}]
)
def test_c23_a_payment_of_nobody_is_parked_and_attributed_with_one_command(
    service: Service, of: dict[str, object], new: str
) -> None:
    body = event(f"evt_{new}", "payment_intent.succeeded", id=f"pi_{new}", **of)
    assert [service.deliver(body), service.deliver(body)] == ["parked", "parked"]

    ran = service.command("parked", "attribute", f"evt_{new}", "--workspace", f"w_{new}")

    assert ran.returncode == 0, ran.stderr
    assert granted(service, f"pi_{new}") == [("", f"w_{new}", 5)]
    assert service.deliver(body) == "duplicate"


# D: order, missing mapping


def test_d1_an_invoice_before_its_checkout_is_applied_by_it(service: Service, new: str) -> None:
    customer = f"cus_{new}"
    body = invoice(f"evt_{new}", f"in_{new}", customer)
    assert service.deliver(body) == "parked"

    assert service.deliver(checkout(f"evt_{new}_link", customer, f"w_{new}")) == "done"

    until(lambda: state(service, f"evt_{new}") == ("done", None))
    assert service.deliver(body) == "duplicate"
    assert granted(service, f"in_{new}") == [("", f"w_{new}", 100)]


# E: accounts, modes, versions, event kinds


@pytest.mark.parametrize("by", ["checkout", "command"])
@pytest.mark.parametrize("field", ["account", "context"])
def test_e1_e2_a_connected_account_is_part_of_every_key(
    service: Service, field: str, by: str, new: str
) -> None:
    """All ids are equal, the account is not: no link and no grant crosses over."""
    account, customer = f"acct_{new}", f"cus_{new}"
    of = {"id": f"in_{new}", "customer": customer, "client_reference_id": "theirs"}
    ours = invoice(f"evt_{new}", f"in_{new}", customer)
    theirs = event(f"evt_{new}", "invoice.paid", envelope={field: account}, **of)
    link = event(f"evt_{new}_link", "checkout.session.completed", envelope={field: account}, **of)

    assert [service.deliver(ours), service.deliver(theirs)] == ["parked", "parked"]
    if by == "checkout":
        assert service.deliver(link) == "done"
    else:
        ran = service.command("links", "add", "stripe", customer, "theirs", "--account", account)
        assert ran.returncode == 0, ran.stderr
    until(lambda: granted(service, f"in_{new}") == [(account, "theirs", 100)])
    assert service.deliver(theirs) == "duplicate"
    assert service.deliver(ours) == "parked"
    assert service.deliver(checkout(f"evt_{new}_link", customer, "ours")) == "done"

    until(lambda: len(granted(service, f"in_{new}")) == 2)
    assert granted(service, f"in_{new}") == [("", "ours", 100), (account, "theirs", 100)]


@pytest.mark.parametrize(
    "of",
    [
        {"related_object": {"id": "acct_1", "type": "v2.core.account", "url": "/v2/core"}},
        {"related_object": None, "context": None, "reason": None},
        {"context": "acct_1/acct_2"},
        {},
    ],
)
def test_e5_a_thin_event_is_stored(service: Service, of: dict[str, object], new: str) -> None:
    thin = {
        "id": f"evt_{new}",
        "object": "v2.core.event",
        "type": "v2.core.account[requirements].updated",
        "livemode": False,
    }
    assert service.deliver(json.dumps(thin | of).encode()) == "ignored"
    assert state(service, f"evt_{new}")[0] == "ignored"


@pytest.mark.parametrize(
    "document",
    [
        {"data": {"object": {"id": "in_e8"}}},
        {"data": {"object": {"customer": "cus_1"}}},
        {"data": {"object": {"id": None, "customer": None}}},
        {"data": {"object": {"id": {}, "customer": []}}},
        {"data": {"object": None}},
        {"data": {"object": []}},
        {"data": []},
        {"data": "text"},
        {"data": None},
        {},
        {"created": None, "api_version": None, "request": None},
        {"livemode": None},
        {"account": ""},
        {"account": 7},
        {"account": {}},
        {"pending_webhooks": {"deep": []}},
    ],
    ids=str,
)
def test_e8_an_event_with_parts_missing_is_no_error_of_ours(
    service: Service, document: dict[str, object], new: str
) -> None:
    body = json.dumps({"id": f"evt_{new}", "type": "invoice.paid"} | document).encode()

    assert service.deliver(body) in ("parked", "quarantined")
    assert service.value("select count(*) from receiver_events where event_id = ?", f"evt_{new}")


@pytest.mark.parametrize("type", ["foo.bar", "invoice.paid.more", "INVOICE.PAID", "*", "💖"])
def test_e9_a_type_that_nobody_wants_is_taken_and_says_so(
    service: Service, type: str, new: str
) -> None:
    assert service.deliver(event(f"evt_{new}", type)) == "ignored"
    assert state(service, f"evt_{new}") == ("ignored", f"no rule for {type}")


def test_e10_the_first_delivery_of_github_is_taken(service: Service, new: str) -> None:
    body = b'{"zen":"Keep it logically awesome.","hook_id":1,"hook":{"type":"Repository"}}'
    as_form = form(body.decode())

    ping = service.post("github", body, by_github(body, new, "ping"))
    form_ping = service.post("github", as_form, by_github(as_form, f"{new}-form", "ping"))

    assert [said(ping), said(form_ping)] == [(200, "ignored"), (200, "ignored")]


# F: transport and storage


@pytest.mark.parametrize("path", ["/webhooks/stripe", "/webhooks/stripe/", "/webhooks/stripe?a=1"])
def test_f1_a_slash_or_a_query_changes_nothing(service: Service, path: str, new: str) -> None:
    body = invoice(f"evt_{new}", f"in_{new}")
    with service.wire() as wire:
        answer = wire.ask(request("POST", path, body, by_stripe(body)))

    assert said(answer) == (200, "done")


@pytest.mark.parametrize(
    "path",
    [
        "/webhook/stripe",
        "/hooks/stripe/",
        "/webhooks//stripe",
        "//webhooks/stripe",
        "/webhooks/stripe//",
        "/webhooks/STRIPE",
        "/webhooks/../webhooks/stripe",
        "/",
    ],
)
def test_f1_another_path_is_unknown_and_never_a_redirect(
    service: Service, path: str, new: str
) -> None:
    body = invoice(f"evt_{new}", f"in_{new}")
    with service.wire() as wire:
        answer = wire.ask(request("POST", path, body, by_stripe(body)))

    assert said(answer) == (404, "unknown")
    assert "location" not in answer.headers
    assert granted(service, f"in_{new}") == []


def test_f3_a_burst_of_one_checkout_locks_nothing(service: Service, new: str) -> None:
    """What `stripe trigger checkout.session.completed` sends, all at once, many times."""
    kinds = ("product.created", "price.created", "payment_intent.created", "charge.succeeded")
    with Crowd(service, 8) as crowd:
        for number in range(20):
            name = f"{new}_{number}"
            bodies = [event(f"evt_{name}_{kind}", kind, id=name) for kind in kinds]
            bodies += [invoice(f"evt_{name}_{nth}", f"in_{name}", f"cus_{name}") for nth in (1, 2)]
            bodies.append(checkout(f"evt_{name}_link", f"cus_{name}", f"w_{name}"))

            answers = crowd.ask([stripe_request(body) for body in bodies])

            assert {each.status for each in answers} == {200}
            until(lambda name=name: len(granted(service, f"in_{name}")) == 1)  # type: ignore[misc]


def test_f15_unsigned_traffic_never_waits_for_the_database(service: Service, new: str) -> None:
    """While another process holds the lock nothing can be written, and garbage is refused still."""
    body = invoice(f"evt_{new}", f"in_{new}")
    with held_lock(service.database), service.wire() as genuine:
        genuine.send(stripe_request(body))
        with service.wire() as wire:
            started = time.monotonic()
            for _ in range(200):
                assert said(wire.ask(delivery("stripe", body, []))) == (401, "rejected")
            took_s = time.monotonic() - started
        stored = service.rows("select 1 from receiver_events where event_id = ?", f"evt_{new}")

    assert took_s < 4.0
    assert stored == []
