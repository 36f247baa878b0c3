"""Signs as the senders do, for samples and tests: the other side of verify."""

import base64
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import urlencode

from receiver import adyen, paypal, twilio
from receiver.extract import Locator, Reading, look_up
from receiver.presets import CODED, PUBLIC_KEYS, Key, Preset, Scheme, SecretError, keys
from receiver.verify import Delivery, expected_signature, signed_content, single

#: The address that a sample of PayPal's names; nobody asks there, as the certificate is pinned.
SAMPLE_CERTIFICATE = "https://api.paypal.com/v1/notifications/certs/CERT-SAMPLE"

#: A decoded body, changed in place.
Document = Any


class Signer(NamedTuple):
    """One scheme of a sender, and how its signature is made of what it covers, in bytes."""

    scheme: Scheme
    key: Key
    make: Callable[[bytes], bytes]


def signer(preset: Preset, secret: bytes, private_key: bytes | None = None) -> Signer:
    """The first scheme that can be signed with the secret, or with a private key in PEM.

    Raises ValueError where only the sender can sign, or no key can be made.
    """
    problem: ValueError = ValueError(
        "only the sender can sign, as its private key is nowhere else; to try it out, make a key "
        "pair, set the source's secret to the public key, and name the other by --private-key"
    )
    for scheme in preset.schemes:
        try:
            found = _signer(scheme, secret, private_key)
        except SecretError as error:
            problem = error
        else:
            if found is not None:
                return found
    raise problem


def _signer(scheme: Scheme, secret: bytes, private_key: bytes | None) -> Signer | None:
    if scheme.algo == "none":
        return Signer(scheme, Key(), lambda content: b"")
    if scheme.algo == "paypal" or scheme.algo in PUBLIC_KEYS:
        if private_key is None:
            return None
        return _private(scheme, keys(scheme, secret), private_key)
    key = keys(scheme, secret)[0]
    return Signer(scheme, key, lambda content: expected_signature(scheme, key, content))


def seal(document: Document, preset: Preset, by: Signer, *, now_ms: int, token: str) -> None:
    """Put into a body what stands there of its time and signature; `token` is random text."""
    scheme = by.scheme
    if scheme.algo == "adyen":
        adyen.sign(by.key.value, document)
    for part in scheme.signed:
        if part.at is not None and not has(document, part.at):
            place(document, part.at, token)
    if scheme.ts is not None:
        place(document, scheme.ts, _stamp(scheme, now_ms))
    if scheme.sig is not None and scheme.sig.kind in ("json", "form"):
        reading = Reading((), encode(preset, document), preset.payload, preset.forms)
        delivery = Delivery("POST", "", (), reading.body, now_ms)
        values = {"body": reading.body, "ts": _timestamp(scheme, now_ms), "id": b""}
        content = signed_content(scheme, reading, delivery, values)
        place(document, scheme.sig, by.make(content).decode())


def sign(
    preset: Preset,
    secret: bytes,
    body: bytes,
    *,
    now_ms: int,
    event_id: str = "",
    type: str = "",
    account: str = "",
    url: str = "",
    method: str = "POST",
    private_key: bytes | None = None,
) -> list[tuple[str, str]]:
    """The headers that make a valid delivery of a body.

    Id, type and account go into headers where the sender has them there; elsewhere the body has
    to hold them already, as it has its signature where that stands in it (see `seal`). Raises
    ValueError as `signer` does.
    """
    by = signer(preset, secret, private_key)
    scheme = by.scheme
    if scheme.id is not None and not event_id:
        raise ValueError(f"an event id is needed: it is signed, at {scheme.id.text}")
    reading = Reading((), body, preset.payload, preset.forms, url)
    form = reading.document.content_type == "form"
    headers = {"Content-Type": f"application/{'x-www-form-urlencoded' if form else 'json'}"}
    stamp = _timestamp(scheme, now_ms)
    for locator, value in (
        *_spread(preset.ids(scheme), event_id),
        *_spread(preset.event_type, type),
        *_spread(preset.account, account),
        *_spread(_one(scheme.ts), stamp.decode()),
    ):
        if locator.kind == "header" and value:
            headers[_name(locator)] = value
    if scheme.algo in CODED:
        return [*headers.items(), *_coded(by, body, url, event_id, now_ms)]
    reading.headers = [(n.lower().encode(), v.encode()) for n, v in headers.items()]
    if scheme.ts is not None and scheme.ts.kind != "header":
        stamp = single(reading, scheme.ts)
    if scheme.sig is not None and scheme.sig.kind == "header":
        delivery = Delivery(method, url, reading.headers, body, now_ms)
        values = {"body": body, "ts": stamp, "id": event_id.encode()}
        content = signed_content(scheme, reading, delivery, values)
        headers[_name(scheme.sig)] = _written(by, content, stamp).decode()
    return list(headers.items())


def url_with_secret(preset: Preset, secret: bytes, url: str) -> str:
    """The URL that the sender posts to: where it can show its secret nowhere else, it ends so."""
    return f"{url}/{secret.decode(errors='replace')}" if preset.in_path else url


def form_field(preset: Preset) -> Locator | None:
    """The place that says that a sender posts forms: the first of those that say id and type."""
    first = (*preset.event_id[:1], *preset.event_type[:1])
    places = (place for locator in first for place in locator.places)
    return next((place for place in places if place.kind == "form"), None)


def encode(preset: Preset, document: Document) -> bytes:
    """A body as the sender writes it: JSON, a form with JSON in one field, or a plain form."""
    text = json.dumps(document, ensure_ascii=False)
    field = form_field(preset)
    if field is None:
        return text.encode()
    if field.pointer is not None:
        return urlencode({field.name: text}).encode()
    return urlencode({name: str(value) for name, value in document.items()}).encode()


def place(document: Document, locator: Locator, value: object) -> None:
    """Set what stands at a place of the body, made where it is missing."""
    if locator.kind == "form" and locator.pointer is None:
        document[locator.name.decode()] = value
    elif locator.kind == "key":
        _set(document, (*(locator.pointer or ()), str(value)), {})
    elif locator.pointer:
        _set(document, locator.pointer, value)


def spread(locators: Sequence[Locator], text: str) -> list[tuple[Locator, str]]:
    """The first of the places with the text, a joined one cut up into its own places."""
    return list(_spread(locators, text))


def _spread(locators: Sequence[Locator], text: str) -> Iterator[tuple[Locator, str]]:
    if not locators:
        return
    yield from cut(locators[0], text) or [(locators[0].places[0], text)]


def cut(locator: Locator, text: str) -> list[tuple[Locator, str]] | None:
    """The pieces of a text for each place of a joined locator; None if it is not joined so."""
    if locator.kind != "joined":
        return [(locator, text)]
    pattern = "".join(re.escape(p) if isinstance(p, str) else "(.+?)" for p in locator.parts)
    found = re.fullmatch(pattern, text, re.DOTALL)
    return None if found is None else list(zip(locator.places, found.groups(), strict=True))


def has(document: Document, locator: Locator) -> bool:
    """Whether something stands at a place of the body."""
    if locator.kind == "form" and locator.pointer is None:
        return isinstance(document, dict) and locator.name.decode() in document
    return bool(locator.pointer) and look_up(document, locator.pointer or ()) is not None


def raw(by: Signer, content: bytes) -> bytes:
    """A signature of a private key that is written in base64, in bytes."""
    return base64.b64decode(by.make(content))


def _set(document: Document, pointer: Sequence[str], value: object) -> None:
    node = document
    for step, following in itertools.pairwise(pointer):
        node = _child(node, step, [] if following.isdecimal() else {})
    _child(node, pointer[-1], value, replace=True)


def _child(node: Document, step: str, otherwise: object, *, replace: bool = False) -> Document:
    """What stands at one step; `otherwise`, put there, where nothing fitting does."""
    if isinstance(node, list):
        number = int(step)
        node.extend({} for _ in range(number + 1 - len(node)))
        if replace or not isinstance(node[number], dict | list):
            node[number] = otherwise
        return node[number]
    if replace or not isinstance(node.get(step), dict | list):
        node[step] = otherwise
    return node[step]


def _one(locator: Locator | None) -> tuple[Locator, ...]:
    return () if locator is None else (locator,)


def _name(locator: Locator) -> str:
    return locator.text.removeprefix("header:").replace("*", "1")


def _stamp(scheme: Scheme, now_ms: int) -> int | str:
    text = _timestamp(scheme, now_ms).decode()
    # A number in the body where the sender counts, as Linear does; a form has texts only.
    return int(text) if text.isdecimal() else text


def _timestamp(scheme: Scheme, now_ms: int) -> bytes:
    if scheme.ts_unit == "iso":
        when = datetime.fromtimestamp(now_ms / 1000, UTC)
        return when.isoformat(timespec="milliseconds").replace("+00:00", "Z").encode()
    return b"%d" % (now_ms // 1000 if scheme.ts_unit == "s" else now_ms)


def _written(by: Signer, content: bytes, stamp: bytes) -> bytes:
    scheme, signature = by.scheme, by.make(content)
    if scheme.kv_sep is None or scheme.sig_key is None:
        return signature
    items = [scheme.sig_key + scheme.kv_sep + signature]
    if scheme.ts_key is not None:
        items.insert(0, scheme.ts_key + scheme.kv_sep + stamp)
    return (scheme.item_sep or b",").join(items)


def _coded(
    by: Signer, body: bytes, url: str, event_id: str, now_ms: int
) -> Iterator[tuple[str, str]]:
    if by.scheme.algo == "twilio":
        yield twilio.sign(by.key.value, url, body)
    if by.scheme.algo == "paypal":
        moment = datetime.fromtimestamp(now_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        transmission = re.sub(r"[^A-Za-z0-9-]", "-", event_id)[:64] or "sample"
        content = paypal.content(transmission.encode(), moment.encode(), by.key.value, body)
        yield paypal.ID, transmission
        yield paypal.TIME, moment
        yield paypal.SIGNATURE, by.make(content).decode()
        yield paypal.CERTIFICATE, SAMPLE_CERTIFICATE
        yield paypal.ALGORITHM, "SHA256withRSA"


# Private keys


def _private(scheme: Scheme, public: Sequence[Key], pem: bytes) -> Signer:
    """A signer with a private key, which must be that of one of the public keys."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        private = load_pem_private_key(pem, None)
    except (ValueError, TypeError) as error:
        raise SecretError("the private key is none in PEM form without a passphrase") from error
    raw = _raw_signature(scheme.algo, private)
    key = next((one for one in public if one.verify is None or one.verify(raw(b""), b"")), None)
    if key is None:
        raise SecretError("the private key is not that of the public key in the source's secret")

    def make(content: bytes) -> bytes:
        signature = raw(content)
        return signature.hex().encode() if _is_hex(scheme) else base64.b64encode(signature)

    return Signer(scheme, key, make)


def _is_hex(scheme: Scheme) -> bool:
    return scheme.enc == "hex" and scheme.algo in PUBLIC_KEYS


def _raw_signature(algo: str, private: object) -> Callable[[bytes], bytes]:
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
    from cryptography.hazmat.primitives.hashes import SHA256

    if algo == "ed25519" and isinstance(private, ed25519.Ed25519PrivateKey):
        return private.sign
    if algo == "ecdsa-p256-sha256" and isinstance(private, ec.EllipticCurvePrivateKey):
        return lambda content: private.sign(content, ec.ECDSA(SHA256()))
    if algo == "paypal" and isinstance(private, rsa.RSAPrivateKey):
        return lambda content: private.sign(content, padding.PKCS1v15(), SHA256())
    raise SecretError(f"the private key is of another kind than {algo} signs with")
