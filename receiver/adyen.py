"""Adyen's scheme for payments: each item of a notification is signed inside itself."""

import base64
import hmac
from collections.abc import Iterator, Mapping
from typing import Any

from receiver.coded import Coded, Request, Test, Unproved
from receiver.extract import Locator

#: Items of one notification.
ITEMS_MAX = 1_000

ITEM = "NotificationRequestItem"
# docs.adyen.com, "Verify HMAC signatures", and Adyen's libraries (Python 16.0.0): in this order,
# joined by colons without any escape. Nothing else in an item is signed.
SIGNED = (
    *(("pspReference",), ("originalReference",), ("merchantAccountCode",)),
    *(("merchantReference",), ("amount", "value"), ("amount", "currency")),
    *(("eventCode",), ("success",)),
)
# The one field that the merchant fills: with colons only here, the joined text can be cut up in
# one way alone.
_FREE = ("merchantReference",)
_INTEGER_MAX = 2**63


def judge(request: Request) -> Test:
    """The test of an HMAC key, which has to prove every item."""
    signed = [(_content(item), _signature(item)) for item in _items(request)]

    def is_by(key: bytes) -> bool:
        return all([hmac.compare_digest(_sign(key, text), given) for text, given in signed])

    return is_by


def sign(key: bytes, entry: Mapping[str, Any]) -> None:
    """Put the signature of one entry of a notification into it."""
    item = entry[ITEM]
    made = _sign(key, _content(item)).decode()
    item["additionalData"] = {**item.get("additionalData", {}), "hmacSignature": made}


def vouches_for(locator: Locator) -> bool:
    """Only what is signed of an item is proved: neither its date nor `live` is."""
    pointer = locator.pointer or ()
    if locator.kind != "json" or ITEM not in pointer:
        return False
    return pointer[pointer.index(ITEM) + 1 :] in SIGNED


SCHEME = Coded(
    "sha256 over eight fields of each item, base64 in its additionalData.hmacSignature",
    judge,
    vouches_for,
)


def _items(request: Request) -> Iterator[Mapping[str, Any]]:
    document = request.reading.document
    if document.problem is not None:
        raise Unproved(document.problem)
    entries = document.value.get("notificationItems") if isinstance(document.value, dict) else None
    if not isinstance(entries, list) or not 0 < len(entries) <= ITEMS_MAX:
        raise Unproved(f"json:/notificationItems is no list of 1 to {ITEMS_MAX} items")
    for entry in entries:
        item = entry.get(ITEM) if isinstance(entry, dict) else None
        if not isinstance(item, dict):
            raise Unproved(f"an item has no {ITEM}")
        yield item


def _signature(item: Mapping[str, Any]) -> bytes:
    extra = item.get("additionalData")
    signature = extra.get("hmacSignature") if isinstance(extra, dict) else None
    if not isinstance(signature, str) or not signature:
        raise Unproved("additionalData.hmacSignature of an item is missing")
    return signature.encode()


def _content(item: Mapping[str, Any]) -> bytes:
    return b":".join(_field(item, path) for path in SIGNED)


def _field(item: Mapping[str, Any], path: tuple[str, ...]) -> bytes:
    """A field as it is signed: b'' when it is not there."""
    value: Any = item
    for step in path:
        value = value.get(step) if isinstance(value, dict) else None
    if type(value) is int and abs(value) < _INTEGER_MAX:
        return b"%d" % value
    if value is not None and not isinstance(value, str):
        raise Unproved(f"{'.'.join(path)} of an item is neither a text nor a whole number")
    text = (value or "").encode()
    if b":" in text and path != _FREE:
        raise Unproved(f"{'.'.join(path)} of an item holds a colon, which ends it")
    return text


def _sign(key: bytes, content: bytes) -> bytes:
    return base64.b64encode(hmac.digest(key, content, "sha256"))
