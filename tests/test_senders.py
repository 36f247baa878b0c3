"""Each sender's genuine deliveries, what may be made of them, and garbage that it signed."""

import hmac
import json
import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from receiver import presets
from receiver.extract import Headers, form_values
from receiver.handshakes import Handshake
from receiver.presets import BEARERS, PUBLIC_KEYS, Preset, Scheme
from receiver.verify import Contract, Delivery, Event, Rejected, Secret, canonical, reread, verify
from tests.senders import Unsignable, deliver, secret_of

NOW_MS = 1_760_000_000_000
FUZZ = settings(derandomize=True, deadline=None, max_examples=10, database=None)
# Signed by code, whose tests are its own.
IN_CODE = {"adyen", "paypal", "twilio"}
EACH = [
    # Of a batch what is said of one element; tests/test_batch.py has the rest.
    pytest.param(
        replace(presets.get(name), batch=None, handshakes=()), number, id=f"{name}-{number}"
    )
    for name in presets.names()
    if name not in IN_CODE
    for number in range(len(presets.get(name).schemes))
]
each_scheme = pytest.mark.parametrize(("preset", "number"), EACH)


def contract_of(preset: Preset, scheme: Scheme, **changes: Any) -> Contract:
    secret = Secret("env:SECRET", secret_of(scheme))
    return Contract(preset.name, preset.name, preset, (secret,), **changes)


def sample(preset: Preset) -> bytes:
    """A body of the kind that the sender posts, which any signature fits into."""
    if any(at.kind == "form" and at.pointer is None for at in preset.event_id):
        return b"id=tr_1&sale_id=1&resource_name=sale&Message-Id=m&trigger_id=1"
    return json.dumps({"id": "evt_1", "event": {"id": 1}, "data": {"id": 2}, "text": "é"}).encode()


def genuine(preset: Preset, scheme: Scheme, body: bytes | None = None, **values: Any) -> Delivery:
    body = sample(preset) if body is None else body
    if scheme.sig is not None and scheme.sig.kind == "form" and scheme.sig.pointer is not None:
        body = body if body.startswith(b"{") else b'{"message_id":"1"}'
    elif scheme.sig is not None and scheme.sig.kind == "json" and not body.startswith(b"{"):
        body = b'{"event-data":{"id":"1"}}'
    return deliver(preset, body, scheme=scheme, at_ms=NOW_MS, **values)


def outcome(contract: Contract, delivery: Delivery) -> tuple[Event, ...] | Rejected | Handshake:
    """One of those that are declared; anything else is raised."""
    try:
        return verify(contract, delivery)
    except Rejected as rejected:
        return rejected


def check(contract: Contract, event: Event, delivery: Delivery) -> None:
    """What holds for every event, whatever its sender signed."""
    assert event.event_id
    assert not re.search("[\x00-\x1f\x7f]", event.key_id + event.type + event.account)
    signed = [delivery.body]
    if all(scheme.has("payload") for scheme in contract.preset.schemes):
        # The field alone, where there is one.
        signed += form_values(delivery.body, contract.preset.payload or b"")
    assert event.body in signed or contract.preset.batch is not None
    assert event.body_sha256 == sha256(event.body).digest()
    digest = canonical(event.body, event.content_type, contract.preset.volatile)
    assert digest is None or len(digest) == 32
    again = reread(
        contract,
        body=event.body,
        content_type=event.content_type,
        event_id=event.key_id,
        type=event.type,
        account=event.account,
        received_ms=event.received_ms,
        secret=event.secret,
        id_signed=event.id_signed,
        claimed_account=event.claimed_account,
    )
    # What was wrong with a header is not known again; all else is.
    assert replace(again, defect=event.defect) == event


@each_scheme
def test_a_genuine_delivery_is_an_event(preset: Preset, number: int) -> None:
    scheme = preset.schemes[number]
    contract = contract_of(preset, scheme)
    delivery = genuine(preset, scheme)

    events = outcome(contract, delivery)

    assert isinstance(events, tuple), events
    assert preset.batch is not None or len(events) == 1
    for event in events:
        assert event.secret == "env:SECRET"
        check(contract, event, delivery)


@each_scheme
def test_another_secret_and_another_body_are_refused(preset: Preset, number: int) -> None:
    scheme = preset.schemes[number]
    contract, delivery = contract_of(preset, scheme), genuine(preset, scheme)
    other = Contract("x", "x", preset, (Secret("env:OTHER", b"another secret of 32 characters."),))

    assert isinstance(outcome(other, delivery), Rejected)
    if scheme.algo not in BEARERS and scheme.has("body", "payload"):
        for body in (delivery.body + b" ", b" " + delivery.body, b"", b"{}"):
            assert isinstance(outcome(contract, replace(delivery, body=body)), Rejected)


@each_scheme
def test_a_delivery_out_of_its_time_is_refused_as_such(preset: Preset, number: int) -> None:
    scheme = preset.schemes[number]
    if scheme.tolerance_s is None:
        return
    contract, delivery = contract_of(preset, scheme), genuine(preset, scheme)
    allowed_ms = int(scheme.tolerance_s * 1000)

    for late_ms in (allowed_ms, -allowed_ms):
        found = outcome(contract, replace(delivery, received_ms=NOW_MS + late_ms))
        assert not isinstance(found, Rejected)
    for late_ms in (allowed_ms + 1000, -allowed_ms - 1000):
        refused = outcome(contract, replace(delivery, received_ms=NOW_MS + late_ms))
        assert isinstance(refused, Rejected)
        assert refused.reason == "expired"


@each_scheme
def test_a_stronger_signature_that_is_there_but_wrong_is_never_passed_over(
    preset: Preset, number: int
) -> None:
    scheme = preset.schemes[number]
    if scheme.only_if_absent is None or scheme.only_if_absent.kind != "header":
        return
    delivery = genuine(preset, scheme)
    stronger = (scheme.only_if_absent.name, b"")

    refused = outcome(
        contract_of(preset, scheme), replace(delivery, headers=[*delivery.headers, stronger])
    )

    assert isinstance(refused, Rejected)


@each_scheme
def test_secrets_are_compared_as_bytes_in_constant_time(
    monkeypatch: pytest.MonkeyPatch, preset: Preset, number: int
) -> None:
    scheme = preset.schemes[number]
    contract, delivery = contract_of(preset, scheme), genuine(preset, scheme)
    compared = []
    compare = hmac.compare_digest

    def spy(one: bytes, other: bytes) -> bool:
        assert type(one) is type(other) is bytes
        compared.append(one)
        return compare(one, other)

    monkeypatch.setattr("receiver.verify.hmac.compare_digest", spy)
    outcome(contract, delivery)

    assert compared or scheme.algo in PUBLIC_KEYS


GARBAGE = st.binary(max_size=40) | st.sampled_from(
    [b"", b"=", b",", b"t=", b"v1=", b"sha256=", b"v1,", b"\xff\xfe", b"\0", b"1" * 400, b"t=1,t=2"]
)


def mangled(headers: Headers, draw: Any) -> list[tuple[bytes, bytes]]:
    """The headers after a few things have happened to them."""
    pairs = list(headers)
    for _ in range(draw(st.integers(0, 3)) if pairs else 0):
        name, value = pairs.pop(place := draw(st.integers(0, len(pairs) - 1)))
        match draw(st.sampled_from(["drop", "double", "cut", "replace", "case"])):
            case "double":
                pairs[place:place] = [(name, draw(GARBAGE)), (name, value)]
            case "cut":
                pairs.insert(place, (name, value[: draw(st.integers(0, len(value)))]))
            case "replace":
                pairs.insert(place, (name, draw(GARBAGE)))
            case "case":
                pairs.insert(place, (name, value.swapcase()))
        if not pairs:
            break
    return pairs


@each_scheme
@FUZZ
@given(data=st.data())
def test_what_is_made_of_a_genuine_delivery_is_an_event_or_refused(
    data: st.DataObject, preset: Preset, number: int
) -> None:
    scheme = preset.schemes[number]
    contract, delivery = contract_of(preset, scheme), genuine(preset, scheme)
    headers = mangled(delivery.headers, data.draw)
    start = data.draw(st.integers(0, len(delivery.body)))
    body = data.draw(st.sampled_from([delivery.body, delivery.body[:start], b"", b"[" * 3000]))
    changed = replace(
        delivery,
        headers=headers,
        body=body,
        url=data.draw(st.sampled_from([delivery.url, "", "https://h/\ud800", delivery.url + "/x"])),
        received_ms=data.draw(st.sampled_from([NOW_MS, 0, 10**18, -(10**15)])),
        inflated=data.draw(st.none() | st.binary(max_size=20)),
    )

    found = outcome(contract, changed)

    if isinstance(found, tuple) and scheme.algo not in BEARERS and scheme.has("body", "payload"):
        # A good signature over other bytes than these can't be found by chance.
        assert body == delivery.body


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["id", "type", "event", "data", "account", "payload", "entry", "events"]
            ),
            inner,
        )
    ),
    max_leaves=8,
).map(lambda value: json.dumps(value).encode())
BODIES = (
    st.binary(max_size=80)
    | VALUES
    | VALUES.map(lambda body: b"payload=" + quote(body).encode())
    | st.sampled_from([b"[" * 5000, b'{"id":' + b"9" * 4000 + b"}", b"payload=%ZZ", b"payload="])
)
WORDS = st.text(st.characters(codec="utf-8"), max_size=8)


def shaped(preset: Preset, draw: Any) -> bytes:
    """A JSON body with something of any kind wherever the preset looks."""
    root: dict[str, Any] = {}
    kinds: st.SearchStrategy[Any] = st.sampled_from(
        ["", "x", "a\nb", 0, -1, 1.5, True, None, [], {}, "x" * 600, 10**600]
    )
    places = (*preset.event_id, *preset.event_type, *preset.account, *preset.event_time)
    for at in (at for place in places for at in place.places):
        node: Any = root
        for step in (at.pointer or ())[:-1]:
            node = node.setdefault(step, {}) if isinstance(node, dict) else None
        if isinstance(node, dict) and at.pointer and at.kind == "json":
            node[at.pointer[-1]] = draw(kinds)
    return json.dumps(lists_of(root)).encode()


def lists_of(node: Any) -> Any:
    """The same with a list wherever the only name is an index."""
    if not isinstance(node, dict):
        return node
    if node.keys() == {"0"}:
        return [lists_of(node["0"])]
    return {name: lists_of(value) for name, value in node.items()}


@each_scheme
@FUZZ
@given(data=st.data())
def test_garbage_that_the_sender_signed_is_an_event_with_a_usable_key(
    data: st.DataObject, preset: Preset, number: int
) -> None:
    scheme = preset.schemes[number]
    body = shaped(preset, data.draw) if data.draw(st.booleans()) else data.draw(BODIES)
    event_id = data.draw(WORDS).replace(".", "") or "x"
    try:
        delivery = deliver(
            preset,
            body,
            scheme=scheme,
            at_ms=NOW_MS,
            event_id=event_id,
            type=data.draw(WORDS),
            account=data.draw(WORDS),
        )
    except Unsignable:
        return
    contract = contract_of(
        preset, scheme, account=data.draw(st.sampled_from([None, "acct_1"])), livemode=True
    )

    found = outcome(contract, delivery)

    # A time or a token that the garbage lacks is refused where it is part of the body.
    if isinstance(found, Rejected):
        assert scheme.sig is not None
        assert scheme.sig.kind != "header" or scheme.ts is not None
    elif not isinstance(found, Handshake):
        for event in found:
            check(contract, event, delivery)


def test_a_text_within_json_never_stands_in_for_what_was_signed() -> None:
    preset = presets.get("gitea")
    contract = contract_of(preset, preset.schemes[0])
    good = genuine(preset, preset.schemes[0], b"payload=%7B%22ref%22%3A%22main%22%7D")
    forged = b'{"ref":"evil","x":"&payload=%7B%22ref%22%3A%22main%22%7D&"}'

    assert isinstance(outcome(contract, good), tuple)
    assert isinstance(outcome(contract, replace(good, body=forged)), Rejected)


def event_of(
    name: str, body: Mapping[str, Any] | bytes, at_ms: int = NOW_MS, **values: Any
) -> Event:
    preset = presets.get(name)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    delivery = deliver(preset, content, at_ms=at_ms, **values)
    found = outcome(contract_of(preset, preset.schemes[0]), delivery)
    assert isinstance(found, tuple), found
    (event,) = found
    return event


ORDER = {
    "meta": {"event_name": "subscription_updated", "test_mode": False},
    "data": {
        "type": "subscriptions",
        "id": "1",
        "attributes": {"updated_at": "2026-01-01T10:00:00.000000Z", "urls": {"portal": "a?e=1"}},
    },
}


def test_events_without_an_id_are_told_apart_by_what_the_sender_says_of_them() -> None:
    later = json.loads(json.dumps(ORDER).replace("10:00:00", "10:00:09"))
    renewed = json.loads(json.dumps(ORDER).replace("a?e=1", "a?e=2"))

    first = event_of("lemon-squeezy", ORDER)

    assert first.event_id == ("subscription_updated:subscriptions:1:2026-01-01T10:00:00.000000Z")
    assert first.id_signed
    assert event_of("lemon-squeezy", later).event_id != first.event_id
    again = event_of("lemon-squeezy", renewed)
    volatile = presets.get("lemon-squeezy").volatile
    assert again.event_id == first.event_id
    assert canonical(again.body, "json", volatile) == canonical(first.body, "json", volatile)


@pytest.mark.parametrize(
    ("name", "body", "event_id", "type_"),
    [
        (
            "zoom",
            {"event": "meeting.started", "event_ts": 17, "payload": {"object": {"uuid": "u=="}}},
            "meeting.started:17:u==",
            "meeting.started",
        ),
        (
            "calendly",
            {
                "event": "invitee.created",
                "created_at": "2026-01-01T00:00:00.000000Z",
                "payload": {"uri": "https://api.calendly.com/x"},
            },
            "invitee.created:https://api.calendly.com/x:2026-01-01T00:00:00.000000Z",
            "invitee.created",
        ),
        (
            "cal-com",
            {"triggerEvent": "BOOKING_PAID", "createdAt": "2026", "payload": {"uid": "u"}},
            "BOOKING_PAID:u:2026",
            "BOOKING_PAID",
        ),
        (
            "postmark",
            {"RecordType": "Open", "MessageID": "m", "ReceivedAt": "2026"},
            "Open:m:2026",
            "Open",
        ),
        ("sentry", {"action": "created"}, "evt_1", "thing.done.created"),
        (
            "customerio",
            {"event_id": "1", "object_type": "email", "metric": "sent"},
            "1",
            "email.sent",
        ),
        ("telegram", {"update_id": 7, "callback_query": {}}, "7", "callback_query"),
        ("slack", b"command=%2Fgo&trigger_id=13.7&team_id=T1", "13.7", "/go"),
        ("mollie-classic", b"id=tr_1", f"tr_1:{NOW_MS}", ""),
    ],
)
def test_ids_and_types_are_found_where_the_sender_has_them(
    name: str, body: Any, event_id: str, type_: str
) -> None:
    found = event_of(name, body)

    assert (found.event_id, found.type) == (event_id, type_)


def test_a_sender_that_says_the_same_each_time_is_heard_each_time() -> None:
    first = event_of("mollie-classic", b"id=tr_1")
    second = event_of("mollie-classic", b"id=tr_1", at_ms=NOW_MS + 1)

    assert first.event_id != second.event_id
    assert not first.id_signed


def test_a_body_is_its_events_id_where_nothing_else_is() -> None:
    found = event_of("paystack", {"event": "invoice.update", "data": {"domain": "live"}})

    assert found.event_id == f"sha256:{found.body_sha256.hex()}"
    assert found.id_signed
    assert found.defect is None
