"""Signs as each sender does, from its preset alone, with keys of the tests' own."""

import base64
import binascii
import hmac
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote_from_bytes

import msgspec
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.hashes import SHA256

from receiver.extract import Locator, form_values
from receiver.presets import Preset, Scheme
from receiver.verify import Delivery

URL = "https://hooks.example.com/webhooks/x"
RAW = b"MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
ED25519 = ed25519.Ed25519PrivateKey.from_private_bytes(RAW)
ECDSA = ec.derive_private_key(int.from_bytes(RAW[:31], "big"), ec.SECP256R1())


class Unsignable(ValueError):
    """The signature belongs into the body, and the body can't hold one."""


def secret_of(scheme: Scheme) -> bytes:
    """A secret as that sender shows it."""
    way = scheme.secret[0]
    if way.kind == "utf8":
        return RAW if scheme.algo != "basic" else b"user:" + RAW
    raw = RAW
    if scheme.algo == "ed25519":
        raw = ED25519.public_key().public_bytes_raw()
    elif scheme.algo == "ecdsa-p256-sha256":
        raw = ECDSA.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    text = binascii.hexlify(raw) if way.kind == "hex" else base64.b64encode(raw)
    return way.prefix + text


def deliver(
    preset: Preset,
    body: bytes,
    *,
    scheme: Scheme | None = None,
    at_ms: int,
    event_id: str = "evt_1",
    type: str = "thing.done",
    account: str = "",
) -> Delivery:
    """A genuine delivery of the body, in which time and signature are put where they belong.

    Id, type and account are put into headers only; raises Unsignable.
    """
    scheme = scheme or preset.schemes[0]
    headers: dict[str, bytes] = {}
    for places, text in (
        (preset.event_id, event_id),
        (preset.event_type, type),
        (preset.account, account),
    ):
        headers |= {name: text.encode() for name in _headers(places) if text}
    stamp = _stamp(scheme, at_ms)
    values = {"ts": stamp, "id": event_id.encode(), "method": b"POST", "url": URL.encode()}
    inside = {at: b"token" for part in scheme.signed if (at := part.at) is not None}
    for place, value in ((scheme.ts, stamp), (scheme.id, event_id.encode())):
        if place is not None and place.kind == "header":
            headers[_name(place)] = value
        elif place is not None:
            inside[place] = value
    for place, value in inside.items():
        body = put(body, place, value)
    content = b"".join(
        part.text
        or (inside[part.at] if part.at is not None else b"")
        or _value(part.kind, preset, body, values)
        for part in scheme.signed
    )
    return _placed(scheme, headers, body, _signature(scheme, content), stamp, at_ms)


def put(body: bytes, place: Locator, value: bytes) -> bytes:
    """The body with a value at a place within it."""
    if place.kind == "form" and place.pointer is None:
        return body + b"&" + place.name + b"=" + quote_from_bytes(value).encode()
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Unsignable from error
    if not isinstance(document, dict):
        raise Unsignable
    node: Any = document
    assert place.pointer
    for step in place.pointer[:-1]:
        if not isinstance(node.get(step), dict):
            node[step] = {}
        node = node[step]
    text = value.decode()
    node[place.pointer[-1]] = int(text) if text.isdecimal() and len(text) < 19 else text
    changed = json.dumps(document).encode()
    if place.kind == "form":
        return place.name + b"=" + quote_from_bytes(changed).encode()
    return changed


def _placed(
    scheme: Scheme,
    headers: dict[str, bytes],
    body: bytes,
    signature: bytes,
    stamp: bytes,
    at_ms: int,
) -> Delivery:
    url, place = URL, scheme.sig
    assert place is not None
    if scheme.kv_sep is not None:
        assert scheme.sig_key is not None
        signature = scheme.sig_key + scheme.kv_sep + signature
        if scheme.ts_key is not None:
            stamped = scheme.ts_key + scheme.kv_sep + stamp
            signature = stamped + (scheme.item_sep or b",") + signature
    if place.kind == "header":
        headers[_name(place)] = signature
    elif place.kind == "path":
        url += "/" + signature.decode()
    else:
        body = put(body, place, signature)
    pairs = tuple((name.encode(), value) for name, value in headers.items())
    return Delivery("POST", url, pairs, body, at_ms)


def _headers(places: Sequence[Locator]) -> list[str]:
    return [_name(at) for place in places for at in place.places if at.kind == "header"]


def _name(place: Locator) -> str:
    return place.name.decode().replace("*", "1")


def _stamp(scheme: Scheme, at_ms: int) -> bytes:
    if scheme.ts_unit == "iso":
        return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat().encode()
    return b"%d" % (at_ms if scheme.ts_unit == "ms" else at_ms // 1000)


def _value(kind: str, preset: Preset, body: bytes, values: dict[str, bytes]) -> bytes:
    if kind == "body":
        return body
    if kind == "payload":
        name = preset.payload or b""
        return next(iter(form_values(body, name)), body) if body.startswith(name + b"=") else body
    return values.get(kind, b"")


def _signature(scheme: Scheme, content: bytes) -> bytes:
    if scheme.algo == "token":
        return secret_of(scheme)
    if scheme.algo == "basic":
        return b"Basic " + base64.b64encode(secret_of(scheme))
    if scheme.algo == "ed25519":
        raw = ED25519.sign(content)
    elif scheme.algo == "ecdsa-p256-sha256":
        raw = ECDSA.sign(content, ec.ECDSA(SHA256()))
    else:
        key = RAW
        raw = hmac.digest(key, content, scheme.algo)
    return binascii.hexlify(raw) if scheme.enc == "hex" else base64.b64encode(raw)
