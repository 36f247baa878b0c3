"""Makes the deliveries that every contestant gets: signed, distinct Stripe invoices of 3 KB."""

import hashlib
import hmac
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SECRET = "whsec_of_the_benchmark"
CUSTOMER, WORKSPACE = "cus_bench", "acme"
PATH = "/webhooks/stripe"
#: Of ten deliveries in a mix: new ones, redelivered ones, and ones with a wrong signature.
MIX = ("new", "new", "redelivered", "new", "new", "unsigned", "new", "new", "redelivered", "new")

_LINES = [
    {
        "id": f"il_{number:024d}",
        "object": "line_item",
        "amount": 500,
        "currency": "usd",
        "description": "1 x Basic (at $5.00 / month)",
        "period": {"start": 1764547200, "end": 1767225600},
        "price": {"id": "price_basic", "object": "price", "unit_amount": 500, "currency": "usd"},
        "quantity": 1,
    }
    for number in range(9)
]


class Delivery(NamedTuple):
    """What is posted: the value of Stripe-Signature, and the body."""

    signature: str
    body: bytes


def invoice(number: int) -> bytes:
    """The body of a distinct invoice.paid, 3 KB."""
    paid = {
        "id": f"in_{number:024d}",
        "object": "invoice",
        "amount_paid": 500,
        "currency": "usd",
        "customer": CUSTOMER,
        "lines": {"object": "list", "data": _LINES, "has_more": False},
        "status": "paid",
    }
    event = {
        "id": f"evt_{number:024d}",
        "object": "event",
        "api_version": "2025-09-30.clover",
        "created": 1764547200,
        "data": {"object": paid},
        "livemode": False,
        "pending_webhooks": 1,
        "request": {"id": None, "idempotency_key": None},
        "type": "invoice.paid",
    }
    return json.dumps(event).encode()


def signed(body: bytes, at_s: int) -> Delivery:
    content = f"{at_s}.".encode() + body
    digest = hmac.new(SECRET.encode(), content, hashlib.sha256).hexdigest()
    return Delivery(f"t={at_s},v1={digest}", body)


def new(count: int, first: int = 0) -> Iterator[Delivery]:
    """Distinct events, all new."""
    at_s = int(time.time())
    return (signed(invoice(number), at_s) for number in range(first, first + count))


def same(count: int) -> Iterator[Delivery]:
    """One event, again and again."""
    one = signed(invoice(0), int(time.time()))
    return (one for _ in range(count))


def garbage(count: int) -> Iterator[Delivery]:
    """Distinct bodies with a signature of the right form that fits none of them."""
    for delivery in new(count):
        yield Delivery(delivery.signature[:-64] + "0" * 64, delivery.body)


def mixed(count: int) -> Iterator[Delivery]:
    """New, redelivered and wrongly signed ones, as MIX has them."""
    at_s, number = int(time.time()), 0
    for place in range(count):
        kind = MIX[place % len(MIX)]
        number += kind == "new"
        delivery = signed(invoice(number), at_s)
        wrong = kind == "unsigned"
        yield Delivery(delivery.signature[:-64] + "0" * 64, delivery.body) if wrong else delivery


def request(delivery: Delivery) -> bytes:
    """The whole request, as it goes over the wire.

    X-Signature is what adnanh/webhook can verify: the HMAC of the body alone.
    """
    plain = hmac.new(SECRET.encode(), delivery.body, hashlib.sha256).hexdigest()
    return (
        f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Stripe-Signature: {delivery.signature}\r\nX-Signature: sha256={plain}\r\n"
        f"Content-Length: {len(delivery.body)}\r\n\r\n"
    ).encode() + delivery.body


def write_requests(path: Path, deliveries: Iterator[Delivery]) -> Path:
    """A file for replay.lua: of each request its length on a line, then its bytes."""
    with path.open("wb") as file:
        for delivery in deliveries:
            whole = request(delivery)
            file.write(b"%d\n" % len(whole) + whole)
    return path


def write_json(path: Path, deliveries: Iterator[Delivery]) -> Path:
    """The same for k6: a list of [signature, body]."""
    pairs = [[delivery.signature, delivery.body.decode()] for delivery in deliveries]
    path.write_text(json.dumps(pairs))
    return path
