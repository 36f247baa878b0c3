"""Turn an untrusted delivery into a verified event, or refuse it; pure, and driven by presets."""

import base64
import binascii
import functools
import hmac
import itertools
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from typing import Literal

import msgspec

from receiver import batch, handshakes, paypal
from receiver.batch import Element, NotSplit
from receiver.coded import (
    NO_CERTIFICATES,
    Certificate,
    CertificateMissing,
    Certificates,
    Request,
    Unproved,
)
from receiver.extract import Found, Headers, Locator, Reading, body_id, find, form_values, id_text
from receiver.extract import canonical as canonical  # belongs to what verify offers
from receiver.handshakes import Handshake, Unanswerable
from receiver.presets import (
    CODED,
    CryptographyMissing,
    Key,
    Part,
    Preset,
    Scheme,
    SecretError,
    certificate,
    keys,
)

# Items of a signature header that are looked at, all its repetitions together.
SIGNATURE_ITEMS_MAX = 32
# A timestamp in seconds or milliseconds: digits.
TIMESTAMP_DIGITS_MAX = 16

BAD_SIGNATURE = "bad-signature"
EXPIRED = "expired"
# What is wrong with an event, where that decides what to do about it.
LIVE_ON_TEST = "a live event on a test source"

_RFC_3339 = rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Delivery(msgspec.Struct, frozen=True):
    """One HTTP request as it arrived: untrusted. Header names are lower-case, their order kept."""

    method: str
    # Absolute, as the sender sees it.
    url: str
    headers: Headers
    # As on the wire.
    body: bytes
    received_ms: int
    # The body inflated, when it came as gzip and the source allows that.
    inflated: bytes | None = None


class Secret(msgspec.Struct, frozen=True):
    """One secret of a source; only `reference` may be shown or stored."""

    reference: str
    value: bytes
    # An event of another account, or of the other mode, signed with it is quarantined.
    account: str | None = None
    livemode: bool | None = None
    # A named secret is for handshakes and templates, never a key of signatures.
    name: str | None = None

    def __repr__(self) -> str:
        return f"Secret({self.reference!r})"


class Proof(msgspec.Struct, frozen=True):
    """What a good delivery proves: the accounts and ids that it signs, and those it only names."""

    accounts: tuple[Locator, ...]
    claimed_accounts: tuple[Locator, ...]
    # Where its id is, and which of these places are signed.
    places: tuple[Locator, ...]
    ids: tuple[Locator, ...]
    # Of a form, only the field that holds the JSON is signed.
    payload_alone: bool


class Check(msgspec.Struct, frozen=True):
    """A scheme with the keys of its source."""

    scheme: Scheme
    keys: tuple[tuple[Key, Secret], ...]
    proof: Proof


class Contract(msgspec.Struct, frozen=True, dict=True):
    """What one source demands of its deliveries.

    Making one raises presets.CryptographyMissing when a secret is a public key that can't be
    used, and SecretError for a named certificate that is none; a secret that fits no scheme (see
    presets.secret_problem) only never matches.
    """

    source: str
    identity: str
    preset: Preset
    secrets: tuple[Secret, ...]
    account: str | None = None
    livemode: bool | None = None
    # In place of the schemes' own, in both directions; seconds.
    tolerance_s: float | None = None
    # The preset's included.
    volatile: tuple[str, ...] = ()
    # The operator awaits a handshake that brings a secret: see `receiver sources arm`.
    armed: bool = False

    def __post_init__(self) -> None:
        assert isinstance(self.checks, tuple), "the keys are made when the config is loaded"
        assert isinstance(self.certificate, Certificate | None), "and the certificate"

    @functools.cached_property
    def checks(self) -> tuple[Check, ...]:
        """The schemes that can be checked, with their keys."""
        return tuple(_checks(self.preset, self.signing))

    @functools.cached_property
    def proof(self) -> Proof:
        """What every one of the schemes proves."""
        return _proof(self.preset, self.preset.schemes)

    @functools.cached_property
    def certificate(self) -> Certificate | None:
        """The one that the operator named; then no other counts, and none is fetched."""
        named = (one.value for one in self.secrets if one.name == paypal.PINNED and one.value)
        found = next(named, None)
        return None if found is None else certificate(found)

    @property
    def signing(self) -> tuple[Secret, ...]:
        names = (None, paypal.WEBHOOK) if self.preset.by_certificate else (None,)
        return tuple(secret for secret in self.secrets if secret.name in names)


class Event(msgspec.Struct, frozen=True):
    """A verified fact from a source."""

    source: str
    identity: str
    # Pinned, or from what is signed; '' when neither says one.
    account: str
    # The sender's id; 'sha256:<hex of the body>' when it sends none.
    event_id: str
    # What tells this event from others of the account: the id, with the type where senders
    # use one id for several types.
    key_id: str
    # '' when missing.
    type: str
    received_ms: int
    # The verified bytes, inflated.
    body: bytes
    content_type: str
    # The decoded body; None when `defect` says that it is not JSON.
    document: object
    # 32 bytes over `body`.
    body_sha256: bytes
    # The reference of the secret that matched; '' when the scheme has none.
    secret: str
    # False when a header that is not signed decides which id it is.
    id_signed: bool
    # What such a header says of the account.
    claimed_account: str | None
    # Why it is genuine but can't be processed.
    defect: str | None
    # A test event on a live source.
    test: bool
    # `reconcile`: nothing signed it; it was read from the sender's own API.
    origin: Literal["delivery", "reconcile"] = "delivery"


class Rejected(Exception):
    """The delivery is not proved; `detail` is for the operator and holds nothing secret.

    `reason` is 'bad-signature' or 'expired'; then the signature is good, `skew_s` says by how
    much the delivery is late (above 0) or early, and `content_sha256` is over what is signed but
    the time: the same whenever it is sent again.
    """

    def __init__(
        self,
        reason: str,
        detail: str,
        skew_s: int | None = None,
        content_sha256: bytes | None = None,
    ) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.skew_s = skew_s
        self.content_sha256 = content_sha256


def verify(
    contract: Contract, delivery: Delivery, certificates: Certificates = NO_CERTIFICATES
) -> tuple[Event, ...] | Handshake:
    """Prove a delivery and read its events; raise Rejected if it fails.

    Where a sender signs with a certificate that is not among `certificates`, it raises
    CertificateMissing; else nothing. What is genuine but can't be processed is an event with a
    `defect`. A batch may have no events at all. A handshake is to be answered, once what it
    `captured` is durable.
    """
    preset = contract.preset
    reading = _reading(preset, delivery)
    if preset.handshakes:
        greeting = _greeted(contract, delivery, reading)
        if greeting is not None:
            return greeting
    if preset.batch is not None and preset.batch.each_signed:
        return _each_proved(contract, delivery, reading)
    proof, secret = _authenticate(contract, delivery, reading, certificates)
    reading = _proved(reading, proof)
    if preset.handshakes:
        greeting = _greeted(contract, delivery, reading, secret, verified=True)
        if greeting is not None:
            return greeting
    if preset.batch is not None:
        return _split(contract, delivery, reading, proof, secret)
    return (_read(contract, delivery, reading, proof, secret),)


class Verdict(msgspec.Struct, frozen=True):
    """A judgement for people; `account` is what the delivery claims, proved or not.

    `status`, `response` and `headers` are a handshake's answer. Of a batch `events` has the
    verdict on each element, and the rest is the first one's.
    """

    verdict: Literal["valid", "handshake", "bad-signature", "expired", "unverified"]
    event_id: str | None = None
    event_type: str | None = None
    account: str | None = None
    reason: str | None = None
    status: int | None = None
    response: str | None = None
    headers: tuple[tuple[str, str], ...] | None = None
    events: tuple["Verdict", ...] | None = None


def verdict(
    contract: Contract, delivery: Delivery, certificates: Certificates = NO_CERTIFICATES
) -> Verdict:
    """Judge one delivery without storing it, a handshake as if the source were armed.

    'unverified' where nothing could prove it.
    """
    contract = msgspec.structs.replace(contract, armed=True)
    unsigned = all(scheme.algo == "none" for scheme in contract.preset.schemes)
    try:
        if unsigned or not contract.signing:
            why = "the sender does not sign" if unsigned else "the source has no secret"
            return _verdict_unverified(contract, delivery, why)
        judged = verify(contract, delivery, certificates)
    except CertificateMissing as missing:
        return _verdict_unverified(contract, delivery, str(missing))
    except Rejected as rejected:
        return Verdict(
            "expired" if rejected.reason == EXPIRED else "bad-signature", reason=rejected.detail
        )
    if isinstance(judged, Handshake):
        return _verdict_greeting(judged)
    return _verdict("valid", judged, None)


def _verdict_unverified(contract: Contract, delivery: Delivery, why: str) -> Verdict:
    reading = _reading(contract.preset, delivery)
    greeting = _greeted(contract, delivery, reading)
    if greeting is not None:
        return _verdict_greeting(greeting)
    reading = _proved(reading, contract.proof)
    if contract.preset.batch is not None:
        return _verdict(
            "unverified", _split(contract, delivery, reading, contract.proof, None), why
        )
    return _verdict("unverified", (_read(contract, delivery, reading, contract.proof, None),), why)


def _verdict_greeting(greeting: Handshake) -> Verdict:
    return Verdict(
        "handshake",
        reason="it brings a secret, kept while the source is armed" if greeting.captured else None,
        status=greeting.status,
        response=greeting.body.decode(),
        headers=greeting.all_headers,
    )


def _verdict(
    word: Literal["valid", "unverified"], events: Sequence[Event], why: str | None
) -> Verdict:
    if not events:
        return Verdict(word, reason=why or "an empty batch, which is answered and not stored")
    verdicts = [
        Verdict(
            word,
            event.event_id,
            event.type,
            event.claimed_account or event.account or None,
            event.defect or why,
        )
        for event in events
    ]
    if len(verdicts) == 1:
        return verdicts[0]
    return msgspec.structs.replace(verdicts[0], events=tuple(verdicts))


def _reading(preset: Preset, delivery: Delivery) -> Reading:
    body = delivery.body if delivery.inflated is None else delivery.inflated
    return Reading(
        delivery.headers, body, preset.payload, preset.forms, delivery.url, delivery.received_ms
    )


# Is it a handshake?


def _greeted(
    contract: Contract,
    delivery: Delivery,
    reading: Reading,
    secret: Secret | None = None,
    *,
    verified: bool = False,
) -> Handshake | None:
    """The answer to a handshake of that stage, or None; raises Rejected for one not answered."""
    preset = contract.preset
    request = handshakes.Request(delivery, reading, contract.secrets)
    rule = handshakes.asked(preset.handshakes, request, verified=verified)
    if rule is None:
        if delivery.method != "POST" and delivery.method in preset.methods:
            raise _bad(f"this {delivery.method} is no handshake that the source expects")
        return None
    try:
        return handshakes.answer(rule, request, secret, armed=contract.armed)
    except Unanswerable as error:
        if rule.capture_secret is not None and not contract.armed:
            # It may still be a delivery that is signed.
            return None
        raise _bad(f"a handshake that is not answered: {error}") from error


def _unarmed(contract: Contract, delivery: Delivery, reading: Reading) -> list[str]:
    """Why a handshake that brings a secret was judged like any delivery."""
    if contract.armed or not contract.preset.captures:
        return []
    request = handshakes.Request(delivery, reading, contract.secrets)
    rule = handshakes.asked(contract.preset.handshakes, request, verified=False)
    if rule is None or rule.capture_secret is None:
        return []
    return [f"it brings a secret; `receiver sources arm {contract.source}` to keep the next one"]


# Is it genuine?


def _checks(preset: Preset, secrets: Sequence[Secret]) -> list[Check]:
    checks = []
    for scheme in preset.schemes:
        found = [(key, secret) for secret in secrets for key in _keys(scheme, secret)]
        if found or scheme.algo == "none":
            checks.append(Check(scheme, tuple(found), _proof(preset, (scheme,))))
    return checks


def _proof(preset: Preset, schemes: Sequence[Scheme]) -> Proof:
    def proved(locators: Sequence[Locator]) -> tuple[Locator, ...]:
        return tuple(at for at in locators if all(s.vouches_for(at) for s in schemes))

    accounts = proved(preset.account)
    claimed = tuple(at for at in preset.account if at not in accounts)
    places = preset.ids(schemes[0]) if len(schemes) == 1 else preset.event_id
    alone = all(scheme.has("payload") and not scheme.has("body") for scheme in schemes)
    return Proof(accounts, claimed, places, proved(places), alone)


def _proved(reading: Reading, proof: Proof) -> Reading:
    """What of the body is signed.

    How the rest of a form is written, and what else it holds, is up to whoever sends it.
    """
    payload = reading.payload
    if not proof.payload_alone or not payload or not reading.body.startswith(payload + b"="):
        return reading
    signed = form_values(reading.body, payload)[0]
    return Reading(
        reading.headers, signed, payload, reading.forms, reading.url, reading.received_ms
    )


def _keys(scheme: Scheme, secret: Secret) -> tuple[Key, ...]:
    try:
        return keys(scheme, secret.value)
    except CryptographyMissing:
        raise
    except SecretError:
        return ()


def _authenticate(
    contract: Contract,
    delivery: Delivery,
    reading: Reading,
    certificates: Certificates = NO_CERTIFICATES,
) -> tuple[Proof, Secret | None]:
    # Not the exceptions: with its traceback each would hold this frame, which would hold it, and a
    # cycle keeps the body until the garbage collector looks for cycles.
    refused: list[tuple[str, str, int | None, bytes | None]] = []
    for check in contract.checks:
        try:
            if check.scheme.algo in CODED:
                return check.proof, _prove_coded(contract, check, delivery, reading, certificates)
            return check.proof, _prove(contract, check, delivery, reading)
        except Rejected as rejected:
            refused.append(
                (rejected.reason, rejected.detail, rejected.skew_s, rejected.content_sha256)
            )
    for reason, detail, skew_s, content_sha256 in refused:
        if reason == EXPIRED:
            raise Rejected(reason, detail, skew_s, content_sha256)
    details = dict.fromkeys(detail for _, detail, _, _ in refused)
    details |= dict.fromkeys(_unarmed(contract, delivery, reading))
    raise Rejected(BAD_SIGNATURE, "; ".join(details) or "no secret fits the scheme of the source")


def _prove(contract: Contract, check: Check, delivery: Delivery, reading: Reading) -> Secret | None:
    """The secret that the delivery is signed with; None where the sender does not sign."""
    scheme = check.scheme
    # Leaving out the value alone must not open the weaker scheme.
    if scheme.only_if_absent is not None and reading.has(scheme.only_if_absent):
        raise _bad(f"{scheme.only_if_absent.text} is there, so that signature alone counts")
    if scheme.sig is None:
        return None
    signatures, ts = _items(scheme, scheme.sig, reading)
    ts, sent_ms = _time_before(scheme, reading, ts)
    id_ = b"" if scheme.id is None else _signed_id(scheme, scheme.id, reading)
    for body in (delivery.body, delivery.inflated):
        if body is None or _takes_of_time(scheme, body):
            continue
        values = {"body": body, "ts": ts, "id": id_}
        content = signed_content(scheme, reading, delivery, values)
        for key, secret in check.keys:
            if _matches(scheme, key, content, signatures):
                sent_ms = _time_after(scheme, reading, sent_ms)
                _check_time(
                    contract,
                    scheme,
                    sent_ms,
                    delivery.received_ms,
                    functools.partial(_timeless_sha256, scheme, reading, delivery, values),
                )
                return secret
    raise _bad(f"no signature in {scheme.sig.text} matches ({_tried(check)})")


def _prove_coded(
    contract: Contract,
    check: Check,
    delivery: Delivery,
    reading: Reading,
    certificates: Certificates,
) -> Secret:
    request = Request(reading, delivery.received_ms, certificates, contract.certificate)
    try:
        is_by = CODED[check.scheme.algo].judge(request)
    except Unproved as unproved:
        raise _bad(str(unproved)) from unproved
    for key, secret in check.keys:
        if is_by(key.value):
            return secret
    raise _bad(f"the signature does not match ({_tried(check)})")


def _tried(check: Check) -> str:
    return "1 key tried" if len(check.keys) == 1 else f"{len(check.keys)} keys tried"


def _bad(detail: str) -> Rejected:
    return Rejected(BAD_SIGNATURE, detail)


def _items(scheme: Scheme, sig: Locator, reading: Reading) -> tuple[list[bytes], bytes]:
    """The candidate signatures, and the timestamp that stands among them (b'' if none does).

    Empty items, as two separators in a row make them, say nothing and are skipped; one that is
    not a key and a value makes the whole signature invalid.
    """
    values = reading.raw(sig)
    if not values:
        raise _bad(f"{sig.text} is missing")
    items = values
    if scheme.item_sep is not None:
        split = (value.split(scheme.item_sep, SIGNATURE_ITEMS_MAX) for value in values)
        items = [item for part in split for item in part if item]
    if len(items) > SIGNATURE_ITEMS_MAX:
        raise _bad(f"{sig.text} has more than {SIGNATURE_ITEMS_MAX} items")
    signatures, stamps = (items, []) if scheme.kv_sep is None else _keyed(scheme, sig, items)
    if not signatures:
        raise _bad(f"{sig.text} has no signature of the scheme")
    if scheme.ts_key is not None and len(stamps) != 1:
        raise _bad(f"{sig.text} has {len(stamps)} timestamps, not one")
    if scheme.hex_any_case:
        signatures = [signature.lower() for signature in signatures]
    return signatures, stamps[0] if stamps else b""


def _keyed(scheme: Scheme, sig: Locator, items: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    assert scheme.kv_sep is not None, "only called where items have keys"
    signatures, stamps = [], []
    for item in items:
        key, separator, value = item.partition(scheme.kv_sep)
        if not separator:
            raise _bad(f"{sig.text} has an item without {scheme.kv_sep.decode()!r}")
        if key == scheme.sig_key:
            signatures.append(value)
        elif key == scheme.ts_key:
            stamps.append(value)
    return signatures, stamps


def single(reading: Reading, locator: Locator) -> bytes:
    """The one value that stands there. Raises Rejected."""
    values = reading.raw(locator)
    if len(values) != 1:
        raise _bad(f"{locator.text} is {'there twice' if values else 'missing'}")
    return values[0]


def _signed_id(scheme: Scheme, locator: Locator, reading: Reading) -> bytes:
    """The id; one that holds what ends it in the signed text could be cut at another place.

    standard-webhooks.md, "Signature scheme", warns its senders of a `.` in ids.
    """
    id_ = single(reading, locator)
    for part, following in itertools.pairwise(scheme.signed):
        if part.kind == "id" and following.text and following.text in id_:
            raise _bad(f"{locator.text} holds {following.text.decode()!r}, which ends it")
    return id_


def _takes_of_time(scheme: Scheme, body: bytes) -> bool:
    """Whether the body may begin with digits of the time that is signed right before it."""
    if scheme.ts_unit == "iso" or not body[:1].isdigit():
        return False
    kinds = [(one.kind, following.kind) for one, following in itertools.pairwise(scheme.signed)]
    return ("ts", "body") in kinds or ("ts", "payload") in kinds


def signed_content(
    scheme: Scheme, reading: Reading, delivery: Delivery, values: dict[str, bytes]
) -> bytes:
    """The bytes that the signature covers; `values` has those of {body}, {ts} and {id}."""
    return b"".join(
        [
            values[part.kind] if part.kind in values else _part(part, reading, delivery, values)
            for part in scheme.signed
        ]
    )


def _timeless_sha256(
    scheme: Scheme, reading: Reading, delivery: Delivery, values: dict[str, bytes]
) -> bytes:
    """Over what the signature covers but the time; over the body too where that is not signed."""
    content = signed_content(scheme, reading, delivery, {**values, "ts": b""})
    return sha256(content if scheme.has("body", "payload") else content + values["body"]).digest()


def _part(part: Part, reading: Reading, delivery: Delivery, values: dict[str, bytes]) -> bytes:
    if part.kind == "text":
        return part.text
    if part.at is not None:
        return single(reading, part.at)
    if part.kind == "url":
        return delivery.url.encode(errors="replace")
    if part.kind == "method":
        return delivery.method.encode(errors="replace")
    body = values["body"]
    # Of a form only, as it is decoded: a text within JSON must not stand in for all of it.
    if part.kind == "payload" and reading.payload and body.startswith(reading.payload + b"="):
        return form_values(body, reading.payload)[0]
    return body


def _matches(scheme: Scheme, key: Key, content: bytes, signatures: Sequence[bytes]) -> bool:
    if key.verify is not None:
        return any(key.verify(_decoded(scheme.enc, s), content) for s in signatures)
    expected = expected_signature(scheme, key, content)
    # The text is compared, so that only the one canonical spelling of a signature counts.
    return any([hmac.compare_digest(expected, signature) for signature in signatures])


def expected_signature(scheme: Scheme, key: Key, content: bytes) -> bytes:
    """The signature, as it is written, that a key of an HMAC or a bearer makes of the content."""
    if scheme.algo == "token":
        return key.value
    if scheme.algo == "basic":
        return b"Basic " + base64.b64encode(key.value)
    digest = hmac.digest(key.value, content, scheme.algo)
    return binascii.hexlify(digest) if scheme.enc == "hex" else base64.b64encode(digest)


def _decoded(enc: str, signature: bytes) -> bytes:
    """The signature's bytes; b'', which is never a signature, for a spelling not canonical."""
    try:
        if enc == "hex":
            raw = binascii.unhexlify(signature)
            return raw if binascii.hexlify(raw) == signature else b""
        raw = base64.b64decode(signature, validate=True)
        return raw if base64.b64encode(raw) == signature else b""
    except ValueError:
        return b""


def _sent_ms(scheme: Scheme, ts: bytes) -> int | None:
    """When the delivery says it was sent; None where it says nothing."""
    if scheme.ts is None and scheme.ts_key is None:
        return None
    if scheme.ts_unit == "iso":
        return _iso_ms(ts)
    if not ts.isdigit() or len(ts) > TIMESTAMP_DIGITS_MAX:
        raise _bad("the timestamp is not a whole number")
    return int(ts) * (1000 if scheme.ts_unit == "s" else 1)


def _iso_ms(ts: bytes) -> int:
    match = re.fullmatch(_RFC_3339, ts)
    if match is None:
        raise _bad("the timestamp is not an RFC 3339 time")
    seconds, fraction, offset = match.groups()
    try:
        since = datetime.fromisoformat((seconds + offset).decode()) - _EPOCH
    except (ValueError, OverflowError) as error:
        raise _bad("the timestamp is not a time") from error
    return int(since.total_seconds()) * 1000 + int((fraction or b"0").ljust(3, b"0")[:3])


def _time_before(scheme: Scheme, reading: Reading, ts: bytes) -> tuple[bytes, int | None]:
    """The timestamp as it is signed, and its time, before anything is proved.

    One that only stands in a body that is signed is left for `_time_after`: to take a large body
    apart is for those who can sign.
    """
    if scheme.ts is not None:
        if not scheme.has("ts"):
            return b"", None
        ts = single(reading, scheme.ts)
    return ts, _sent_ms(scheme, ts)


def _time_after(scheme: Scheme, reading: Reading, sent_ms: int | None) -> int | None:
    if sent_ms is not None or scheme.ts is None:
        return sent_ms
    return _sent_ms(scheme, single(reading, scheme.ts))


def _check_time(
    contract: Contract,
    scheme: Scheme,
    sent_ms: int | None,
    received_ms: int,
    content_sha256: Callable[[], bytes],
) -> None:
    if sent_ms is None:
        return
    if scheme.ts_unit == "s":
        # A sender that counts whole seconds cut the fraction off; so do we.
        received_ms -= received_ms % 1000
    late_ms = received_ms - sent_ms
    allowed_s = scheme.tolerance_s if late_ms > 0 else scheme.future_s
    if contract.tolerance_s is not None:
        allowed_s = contract.tolerance_s
    if allowed_s is None or abs(late_ms) <= allowed_s * 1000:
        return
    off_s = -(-abs(late_ms) // 1000)
    word = "late" if late_ms > 0 else "early"
    raise Rejected(
        EXPIRED,
        f"clock or delivery is {off_s} s {word}; tolerance {allowed_s:g} s",
        off_s if late_ms > 0 else -off_s,
        content_sha256(),
    )


# What does it say?


class _Facts(msgspec.Struct, frozen=True):
    """What an event says of itself, before it is held against the contract."""

    id: str
    id_signed: bool
    type: str
    account: str
    # Every account that is named, wherever it stands.
    accounts: tuple[str, ...]
    claimed_account: str | None
    problems: tuple[str | None, ...]


def _split(
    contract: Contract,
    delivery: Delivery,
    reading: Reading,
    proof: Proof,
    secret: Secret | None,
) -> tuple[Event, ...]:
    """Each element as an event; what can't be split is one event, with its defect."""
    elements = _elements(contract.preset, reading)
    if isinstance(elements, str):
        whole = _read(contract, delivery, reading, proof, secret)
        return (msgspec.structs.replace(whole, defect=elements),)
    return tuple(
        [
            _read(contract, delivery, _element_reading(reading, one), proof, secret, one.account)
            for one in elements
        ]
    )


def _each_proved(contract: Contract, delivery: Delivery, reading: Reading) -> tuple[Event, ...]:
    """Each element as an event, signed by itself; if one of them is not proved, none is."""
    elements = _elements(contract.preset, reading)
    if isinstance(elements, str):
        raise _bad(elements)
    if not elements:
        raise _bad("an empty batch, in which nothing is signed")
    events = []
    for one in elements:
        own = _element_reading(reading, one)
        alone = msgspec.structs.replace(delivery, body=one.body, inflated=None)
        proof, secret = _authenticate(contract, alone, own)
        events.append(_read(contract, alone, own, proof, secret, one.account))
    return tuple(events)


def _elements(preset: Preset, reading: Reading) -> list[Element] | str:
    """The elements of a batch, or why there are none to be had."""
    assert preset.batch is not None, "only called for a sender of batches"
    if reading.document.problem is not None:
        return reading.document.problem
    try:
        return batch.split(preset.batch, reading.body)
    except NotSplit as error:
        return str(error)


def _element_reading(reading: Reading, element: Element) -> Reading:
    return Reading(reading.headers, element.body, url=reading.url)


def _read(
    contract: Contract,
    delivery: Delivery,
    reading: Reading,
    proof: Proof,
    secret: Secret | None,
    outer_account: object = None,
) -> Event:
    """`outer_account` is what the batch says of this element's account, which is proved."""
    preset = contract.preset
    id_ = _found(find(reading, proof.places, "id"), proof.places, "id")
    type_ = _found(find(reading, preset.event_type, "type"), preset.event_type, "type")
    account = find(reading, proof.accounts, "account")
    if outer_account is not None and account.locator is None:
        text, problem = id_text(outer_account)
        account = Found(text, problem=problem and f"account of the batch {problem}")
    claimed = find(reading, proof.claimed_accounts, "account")
    facts = _Facts(
        id=id_.text,
        id_signed=_id_signed(proof, id_.locator if id_.text else None),
        type=type_.text,
        account=contract.account or account.text,
        accounts=(account.text, claimed.text),
        claimed_account=claimed.text or None,
        problems=(id_.problem, type_.problem, account.problem, claimed.problem),
    )
    return _event(contract, reading, facts, secret, delivery.received_ms)


def reread(
    contract: Contract,
    *,
    body: bytes,
    content_type: str,
    event_id: str,
    type: str,
    account: str,
    received_ms: int,
    secret: str,
    id_signed: bool,
    claimed_account: str | None = None,
) -> Event:
    """The event of a stored body again, judged under the contract as it is now.

    `event_id` is the stored key (Event.key_id) and `secret` a reference; what these say, and
    whether the id was signed, stays as it is stored, since it is part of keys. A missing type is
    looked for again. Signature and time are not judged.
    """
    preset = contract.preset
    reading = Reading((), body, preset.payload, preset.forms or content_type == "form")
    id_ = event_id.removesuffix(f":{type}") if preset.keyed_by_type else event_id
    found = _found(find(reading, preset.event_id, "id"), preset.event_id, "id")
    problem = found.problem if id_ == body_id(sha256(body).digest()) else None
    type_ = Found(type)
    if not type:
        type_ = _found(find(reading, preset.event_type, "type"), preset.event_type, "type")
    said = find(reading, contract.proof.accounts, "account")
    facts = _Facts(
        id=id_,
        id_signed=id_signed,
        type=type_.text,
        account=account,
        accounts=(account, said.text, claimed_account or ""),
        claimed_account=claimed_account,
        problems=(problem, type_.problem, said.problem),
    )
    bound = next((s for s in contract.secrets if s.reference == secret), None)
    return _event(contract, reading, facts, bound or Secret(secret, b""), received_ms)


def _found(found: Found, locators: Sequence[Locator], what: str) -> Found:
    """The same, with the problem that nothing was found; a sender that has none owes none."""
    if found.text or found.problem or not locators:
        return found
    places = " or ".join(locator.text for locator in locators)
    return Found(problem=f"{what} missing at {places}")


def _id_signed(proof: Proof, locator: Locator | None) -> bool:
    """Whether nobody but the sender could make it another id.

    A header that is not signed can be added or left out as well as changed, so every place that
    is looked at before counts too; all of them where nothing was found.
    """
    end = len(proof.places) if locator is None else proof.places.index(locator) + 1
    return all(at in proof.ids for at in proof.places[:end])


def _event(
    contract: Contract, reading: Reading, facts: _Facts, secret: Secret | None, received_ms: int
) -> Event:
    document = reading.document
    body_sha256 = sha256(reading.body).digest()
    event_id = facts.id or body_id(body_sha256)
    mode_problems, test = _judge_mode(contract, reading, secret)
    problems = (*facts.problems, *_account_problems(contract, facts, secret), *mode_problems)
    return Event(
        source=contract.source,
        identity=contract.identity,
        account=facts.account,
        event_id=event_id,
        key_id=f"{event_id}:{facts.type}" if contract.preset.keyed_by_type else event_id,
        type=facts.type,
        received_ms=received_ms,
        body=reading.body,
        content_type=document.content_type,
        document=document.value,
        body_sha256=body_sha256,
        secret="" if secret is None else secret.reference,
        id_signed=facts.id_signed,
        claimed_account=facts.claimed_account,
        # Of a body that can't be read, all the rest is missing too.
        defect=document.problem or "; ".join(filter(None, problems)) or None,
        test=test,
    )


def _account_problems(contract: Contract, facts: _Facts, secret: Secret | None) -> list[str]:
    pinned, bound = contract.account, None if secret is None else secret.account
    if pinned is None and bound is None:
        return []
    problems = []
    for said in dict.fromkeys(filter(None, facts.accounts)):
        if pinned and said != pinned:
            problems.append(f"account {pinned} is pinned, delivery says {said}")
    for said in dict.fromkeys(filter(None, (facts.account, *facts.accounts))):
        if secret and bound and said != bound:
            problems.append(f"secret {secret.reference} is for account {bound}, event has {said}")
    return problems


def _judge_mode(
    contract: Contract, reading: Reading, secret: Secret | None
) -> tuple[list[str], bool]:
    """What is wrong with the event's mode, and whether it is a test event on a live source."""
    mode, wanted = contract.preset.livemode, contract.livemode
    bound = None if secret is None else secret.livemode
    if mode is None or (wanted is None and bound is None):
        return [], False
    said = reading.value(mode.at)
    said = said.decode(errors="replace") if isinstance(said, bytes) else said
    if said is None or type(said) is not type(mode.live) or said not in (mode.live, mode.test):
        what = (
            "not a boolean"
            if mode.live in (True, False)
            else f"neither {mode.live} nor {mode.test}"
        )
        return [f"livemode is {'missing' if said is None else what} at {mode.at.text}"], False
    live = said == mode.live
    problems = []
    if secret is not None and bound is not None and live != bound:
        kind, other = ("live", "test") if bound else ("test", "live")
        problems.append(f"secret {secret.reference} is for {kind} events, this is a {other} one")
    if live and wanted is False:
        problems.append(LIVE_ON_TEST)
    return problems, wanted is True and not live
