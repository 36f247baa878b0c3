"""Twilio, Adyen and PayPal: the schemes that are code."""

import base64
import contextlib
import hmac
import json
import re
from collections.abc import Mapping
from copy import deepcopy
from datetime import UTC, datetime
from hashlib import sha256
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from receiver import adyen, certificates, paypal, presets, twilio
from receiver.coded import Certificate, CertificateMissing, Unproved
from receiver.extract import parse_locator
from receiver.presets import PresetError, SecretError
from receiver.verify import Contract, Delivery, Event, Rejected, Secret, verdict, verify
from tests import authority

NOW = datetime.fromtimestamp(1_760_000_000, UTC)
NOW_MS = 1_760_000_000_000
FUZZ = settings(derandomize=True, deadline=None, max_examples=300, database=None)
TOKEN = b"12345"
HMAC_KEY = b"44782DEF547AAA06C910C43932B1EB0C71FC68D9D0C057550C48EC2ACF6BA056"
WEBHOOK = b"1JE4291016473214C"
CERTIFICATE_URL = "https://api.paypal.com/v1/notifications/certs/CERT-360caa42-fca2a594-5a29e601"

ROOT = authority.root(NOW)
SIGNER = authority.leaf(ROOT, "messageverificationcerts.paypal.com", NOW)


def contract_of(scheme: str, *secrets: bytes | Secret) -> Contract:
    found = [s if isinstance(s, Secret) else Secret("env:SECRET", s) for s in secrets]
    return Contract(scheme, scheme, presets.get(scheme), tuple(found))


def delivery_of(
    body: bytes, headers: Mapping[str, str], url: str = "https://h.example/webhooks/x"
) -> Delivery:
    pairs = tuple((name.lower().encode(), value.encode()) for name, value in headers.items())
    return Delivery("POST", url, pairs, body, NOW_MS)


def event_of(contract: Contract, delivery: Delivery, **known: Certificate | str) -> Event:
    (event,) = events_of(contract, delivery, **known)
    return event


def events_of(
    contract: Contract, delivery: Delivery, **known: Certificate | str
) -> tuple[Event, ...]:
    certificates = {CERTIFICATE_URL: next(iter(known.values()), "unknown")}
    events = verify(contract, delivery, certificates)
    assert isinstance(events, tuple)
    return events


def refusal(contract: Contract, delivery: Delivery, **known: Certificate | str) -> str:
    with pytest.raises(Rejected) as caught:
        event_of(contract, delivery, **known)
    assert caught.value.reason == "bad-signature"
    return caught.value.detail


def test_a_coded_scheme_takes_a_secret_and_nothing_else() -> None:
    assert presets.parse({"algo": "adyen", "secret": "hex", "event_id": "json:/id"})
    with pytest.raises(PresetError) as caught:
        presets.parse({"algo": "twilio", "sig": "header:X", "signed": "{body}"})
    assert sorted(problem.partition(":")[0] for problem in caught.value.problems) == [
        "sig",
        "signed",
    ]


# Twilio.

URL = "https://h.example/webhooks/twilio?tenant=1"
SMS = {"MessageSid": "SM1", "MessageStatus": "sent", "AccountSid": "AC1", "Body": "Zoë 🦄"}


def message(parameters: Mapping[str, str] = SMS, **headers: str) -> Delivery:
    body = urlencode(parameters).encode()
    name, value = twilio.sign(TOKEN, URL, body)
    return delivery_of(body, {name: value} | headers, URL)


def with_settings(named: str, algorithm: str) -> Delivery:
    body = urlencode(SMS).encode()
    text = URL + "".join(name + value for name, value in sorted(SMS.items()))
    digest = base64.b64encode(hmac.digest(TOKEN, text.encode(), algorithm)).decode()
    return delivery_of(body, {twilio.SIGNATURE: digest, twilio.SETTINGS: named}, URL)


def test_twilio_reports_of_one_message_are_events_of_their_own() -> None:
    sent = event_of(contract_of("twilio", TOKEN), message())
    delivered = event_of(
        contract_of("twilio", TOKEN), message(SMS | {"MessageStatus": "delivered"})
    )

    assert (sent.event_id, sent.type, sent.account) == ("SM1:sent", "sent", "AC1")
    assert (delivered.event_id, delivered.type) == ("SM1:delivered", "delivered")
    assert sent.id_signed
    assert sent.content_type == "form"


@pytest.mark.parametrize("name", ["key=k,algorithm=HMAC_SHA256", "algorithm = hmac_sha256 ,key=k"])
def test_a_shared_key_signs_with_sha256(name: str) -> None:
    assert (
        event_of(contract_of("twilio", TOKEN), with_settings(name, "sha256")).event_id == "SM1:sent"
    )
    assert "does not match" in refusal(contract_of("twilio", TOKEN), with_settings(name, "sha1"))


def test_an_algorithm_of_twilio_that_is_not_known_is_refused() -> None:
    for algorithm in ("HMAC_SHA512", "none", "HMAC_SHA1x"):
        delivery = with_settings(f"key=k,algorithm={algorithm}", "sha1")
        assert "algorithm that is not known" in refusal(contract_of("twilio", TOKEN), delivery)


def test_every_parameter_is_signed_and_one_too_many_is_refused() -> None:
    many = {f"p{i:04}": "1" for i in range(twilio.PARAMETERS_MAX)}

    assert event_of(contract_of("twilio", TOKEN), message(many)).id_signed
    added = message(many)
    body = added.body + b"&AccountSid=AC2"
    headers = {name.decode(): value.decode() for name, value in added.headers}
    assert "parameters" in refusal(contract_of("twilio", TOKEN), delivery_of(body, headers, URL))


def test_a_body_that_is_no_form_is_proved_by_the_hash_in_the_url() -> None:
    body = b'{"id":"1"}'
    url = f"{URL}&bodySHA256={sha256(body).hexdigest()}"
    headers = dict([twilio.sign(TOKEN, url, body)])

    assert event_of(contract_of("twilio", TOKEN), delivery_of(body, headers, url)).body == body
    changed = delivery_of(b'{"id":"2"}', headers, url)
    assert "not the hash" in refusal(contract_of("twilio", TOKEN), changed)


def test_no_body_passes_under_a_signature_over_the_url_alone() -> None:
    headers = dict([twilio.sign(TOKEN, URL, b"")])

    for body in (b'{"id":"1"}', b"a=1", b"a", b"%"):
        assert "match" in refusal(contract_of("twilio", TOKEN), delivery_of(body, headers, URL)), (
            body
        )


def test_a_port_may_stand_in_the_url_that_twilio_signed_or_not() -> None:
    body = urlencode(SMS).encode()
    contract = contract_of("twilio", TOKEN)
    for signed, called in (
        ("https://h.example:443/x", "https://h.example/x"),
        ("https://h.example/x", "https://h.example:8443/x"),
        ("http://h.example:80/x", "http://h.example/x"),
    ):
        headers = dict([twilio.sign(TOKEN, signed, body)])
        assert event_of(contract, delivery_of(body, headers, called)).event_id == "SM1:sent"
    headers = dict([twilio.sign(TOKEN, "https://other.example/x", body)])
    assert "match" in refusal(contract, delivery_of(body, headers, "https://h.example/x"))


def test_a_step_of_a_call_is_told_apart_by_what_is_signed_and_not_by_how_it_is_written() -> None:
    step = {"CallSid": "CA1", "CallStatus": "in-progress", "Digits": "1"}
    once = message(step)
    headers = {name.decode(): value.decode() for name, value in once.headers}
    contract = contract_of("twilio", TOKEN)

    first = event_of(contract, once)
    rewritten = event_of(contract, delivery_of(once.body + b"&Digits=1&", headers, URL))
    other = event_of(contract, message(step | {"Digits": "2"}))

    assert first.event_id == rewritten.event_id != other.event_id
    assert first.type == "in-progress"
    # Someone could put a status into it, but nobody without the token.
    assert first.id_signed


# Adyen.


def item(**fields: Any) -> dict[str, Any]:
    return {
        "NotificationRequestItem": {
            "amount": {"currency": "EUR", "value": 1130},
            "eventCode": "AUTHORISATION",
            "eventDate": "2014-08-06T17:15:34.121+02:00",
            "merchantAccountCode": "TestMerchant",
            "merchantReference": "TestPayment-1407325143704",
            "pspReference": "7914073381342284",
            "success": "true",
            **fields,
        }
    }


def notification(*items: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {"live": "false", "notificationItems": deepcopy(list(items))}
    for entry in document["notificationItems"]:
        adyen.sign(bytes.fromhex(HMAC_KEY.decode()), entry)
    return document


def posted(document: object) -> Delivery:
    return delivery_of(json.dumps(document).encode(), {})


def test_a_payment_and_its_failure_before_are_two_events_of_adyen() -> None:
    contract = contract_of("adyen", HMAC_KEY)

    paid = event_of(contract, posted(notification(item())))
    failed = event_of(contract, posted(notification(item(success="false"))))

    assert paid.event_id == "AUTHORISATION:7914073381342284:true"
    assert failed.event_id == "AUTHORISATION:7914073381342284:false"
    assert (paid.type, paid.account, paid.id_signed) == ("AUTHORISATION", "TestMerchant", True)


def test_each_item_of_adyen_is_an_event_of_its_own() -> None:
    refund = item(eventCode="REFUND", pspReference="2")
    contract = contract_of("adyen", HMAC_KEY)

    paid, refunded = events_of(contract, posted(notification(item(), refund)))

    assert paid.event_id == "AUTHORISATION:7914073381342284:true"
    assert (refunded.event_id, refunded.account) == ("REFUND:2:true", "TestMerchant")


SIGNED_CHANGES: list[dict[str, Any]] = [
    {"pspReference": "1"},
    {"originalReference": "1"},
    {"merchantAccountCode": "Other"},
    {"merchantReference": "x"},
    {"amount": {"currency": "USD", "value": 1130}},
    {"amount": {"currency": "EUR", "value": 1}},
    {"amount": None},
    {"eventCode": "REFUND"},
    {"success": "false"},
    {"success": True},
    {"additionalData": {}},
    {"additionalData": {"hmacSignature": ""}},
]


@pytest.mark.parametrize("change", SIGNED_CHANGES, ids=str)
@pytest.mark.parametrize("place", [0, 1])
def test_a_changed_field_of_any_item_spoils_the_whole_notification(
    change: dict[str, Any], place: int
) -> None:
    document = notification(item(), item(pspReference="2"))
    document["notificationItems"][place]["NotificationRequestItem"] |= change

    assert refusal(contract_of("adyen", HMAC_KEY), posted(document))


def test_the_joined_fields_of_adyen_can_be_cut_in_one_way_only() -> None:
    contract = contract_of("adyen", HMAC_KEY)
    document = notification(item(merchantReference="order:7"))
    assert event_of(contract, posted(document))

    entry = document["notificationItems"][0]["NotificationRequestItem"]
    entry |= {"merchantAccountCode": "TestMerchant:order", "merchantReference": "7"}

    assert "holds a colon" in refusal(contract, posted(document))


@pytest.mark.parametrize(
    "document",
    [
        {},
        [],
        {"notificationItems": []},
        {"notificationItems": {}},
        {"notificationItems": [1]},
        {"notificationItems": [{}]},
        {"notificationItems": [{"NotificationRequestItem": {}}]},
        {"notificationItems": [item()] * 1_001},
    ],
    ids=lambda document: str(document)[:40],
)
def test_what_is_no_notification_of_adyen_is_refused(document: object) -> None:
    assert refusal(contract_of("adyen", HMAC_KEY), posted(document))
    assert refusal(contract_of("adyen", HMAC_KEY), delivery_of(b"{", {}))


def test_nothing_else_of_an_item_of_adyen_is_vouched_for() -> None:
    at = "json:/notificationItems/0/NotificationRequestItem"

    assert adyen.vouches_for(parse_locator(f"{at}/amount/value"))
    for other in (f"{at}/eventDate", f"{at}/amount", "json:/live", "header:X", f"{at}/reason"):
        assert not adyen.vouches_for(parse_locator(other)), other


# PayPal.


def transmission(
    body: bytes = b'{"id":"WH-1","event_type":"PAYMENT.CAPTURE.COMPLETED"}',
    webhook: bytes = WEBHOOK,
    signer: authority.Issued = SIGNER,
    changes: Mapping[str, str | None] = MappingProxyType({}),
) -> Delivery:
    content = paypal.content(b"e068dce0-ba1d", b"2025-10-09T08:53:20Z", webhook, body)
    headers = {
        paypal.ID: "e068dce0-ba1d",
        paypal.TIME: "2025-10-09T08:53:20Z",
        paypal.SIGNATURE: base64.b64encode(signer.sign(content)).decode(),
        paypal.CERTIFICATE: CERTIFICATE_URL,
        paypal.ALGORITHM: "SHA256withRSA",
    }
    changed = {**headers, **changes}
    return delivery_of(body, {name: v for name, v in changed.items() if v is not None})


def known() -> Certificate:
    return certificates.load(SIGNER.pem)


def test_paypal_is_proved_by_a_certificate_that_is_known() -> None:
    event = event_of(contract_of("paypal", WEBHOOK), transmission(), it=known())

    assert (event.event_id, event.type) == ("WH-1", "PAYMENT.CAPTURE.COMPLETED")
    assert (event.secret, event.id_signed) == ("env:SECRET", True)
    other = authority.leaf(ROOT, "messageverificationcerts.paypal.com", NOW)
    assert "match" in refusal(
        contract_of("paypal", WEBHOOK), transmission(signer=other), it=known()
    )
    assert "match" in refusal(contract_of("paypal", b"OTHER"), transmission(), it=known())


def test_paypal_can_t_be_judged_before_its_certificate_is_known() -> None:
    with pytest.raises(CertificateMissing) as caught:
        verify(contract_of("paypal", WEBHOOK), transmission())
    assert caught.value.url == CERTIFICATE_URL

    judged = verdict(contract_of("paypal", WEBHOOK), transmission())
    assert (judged.verdict, judged.event_id) == ("unverified", "WH-1")
    assert CERTIFICATE_URL in (judged.reason or "")


def test_a_certificate_that_can_t_be_the_senders_refuses_what_names_it() -> None:
    detail = refusal(
        contract_of("paypal", WEBHOOK), transmission(), it="no chain to a trusted root"
    )
    assert detail == f"{CERTIFICATE_URL}: no chain to a trusted root"

    expired = certificates.load(authority.leaf(ROOT, "x.example", NOW, days=0).pem)
    late = known()
    for at_ms in (expired.not_after_ms + 1, late.not_before_ms - 1):
        delivery = transmission()
        delivery = Delivery("POST", delivery.url, delivery.headers, delivery.body, at_ms)
        good = expired if at_ms > NOW_MS else late
        assert "not valid at this time" in refusal(
            contract_of("paypal", WEBHOOK), delivery, it=good
        )


@pytest.mark.parametrize(
    "url",
    [
        "https://api.paypal.com.evil.example/v1/notifications/certs/CERT-1",
        "https://evil.example/v1/notifications/certs/CERT-1",
        "https://api.paypal.com@evil.example/v1/notifications/certs/CERT-1",
        "https://api.paypal.com:8443/v1/notifications/certs/CERT-1",
        "http://api.paypal.com/v1/notifications/certs/CERT-1",
        "https://api.paypal.com/v1/notifications/certs/../../oauth2/token",
        "https://api.paypal.com/v1/notifications/certs/",
        "https://api.paypal.com/v1/notifications/certs/CERT-1?x=1",
        "https://api.paypal.com/v1/notifications/certs/CERT-1#x",
        "https://api.paypal.com/v1/notifications/certs/CERT-1/x",
        "https://api.paypal.com/v1/notifications/certs/CERT-1\n",
        "https://api.paypal.com/v1/notifications/certs/" + "C" * 101,
        "https://www.paypal.com/v1/notifications/certs/CERT-1",
        "https://apixpaypal.com/v1/notifications/certs/CERT-1",
        "https://127.0.0.1/v1/notifications/certs/CERT-1",
        "file:///etc/passwd",
    ],
)
def test_a_delivery_leads_to_no_other_address(url: str) -> None:
    delivery = transmission(changes={paypal.CERTIFICATE: url})

    assert "no address of PayPal" in refusal(contract_of("paypal", WEBHOOK), delivery)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (paypal.ID, "e068dce0|2025"),
        (paypal.ID, None),
        (paypal.TIME, "2025-10-09T08:53:20Z|1"),
        (paypal.SIGNATURE, "AAAA"),
        (paypal.SIGNATURE, "A"),
        (paypal.SIGNATURE, None),
        (paypal.ALGORITHM, "SHA1withRSA"),
        (paypal.ALGORITHM, None),
        (paypal.CERTIFICATE, None),
    ],
)
def test_a_transmission_of_another_form_is_refused(name: str, value: str | None) -> None:
    delivery = transmission(changes={name: value})

    assert refusal(contract_of("paypal", WEBHOOK), delivery, it=known())


def test_a_certificate_that_the_operator_names_stands_for_all() -> None:
    pinned = Secret("file:paypal.pem", SIGNER.pem, name="cert_pem")
    contract = contract_of("paypal", WEBHOOK, pinned)

    assert event_of(contract, transmission()).event_id == "WH-1"
    with pytest.raises(SecretError, match="is no certificate in PEM form"):
        contract_of("paypal", WEBHOOK, Secret("file:x", b"nonsense", name="cert_pem"))


# Neither garbage nor what is signed but strange raises anything else.

WORDS = st.text(max_size=12) | st.binary(max_size=12).map(lambda raw: raw.decode("latin-1"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
HEADERS = st.dictionaries(
    st.sampled_from(
        [
            *(twilio.SIGNATURE, twilio.SETTINGS, paypal.ID, paypal.TIME, paypal.SIGNATURE),
            *(paypal.CERTIFICATE, paypal.ALGORITHM),
        ]
    ),
    st.text(st.characters(max_codepoint=255, exclude_characters="\r\n"), max_size=40)
    | st.sampled_from(["SHA256withRSA", CERTIFICATE_URL, "algorithm=HMAC_SHA256", "AAAA"]),
)
CONTRACTS = [
    contract_of("twilio", TOKEN),
    contract_of("adyen", HMAC_KEY),
    contract_of("paypal", WEBHOOK),
]


@FUZZ
@given(st.sampled_from(CONTRACTS), HEADERS, st.binary(max_size=80), WORDS)
def test_garbage_is_refused(
    contract: Contract, headers: dict[str, str], body: bytes, word: str
) -> None:
    delivery = delivery_of(body, headers, f"https://h.example/{word}?bodySHA256=x{word}&{word}")

    with pytest.raises((Rejected, CertificateMissing)):
        verify(contract, delivery)


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        name: VALUES | st.text(max_size=4)
        for name in ("pspReference", "amount", "eventCode", "success", "merchantAccountCode", "x")
    },
)


def accepted(contract: Contract, delivery: Delivery) -> None:
    try:
        events = events_of(contract, delivery)
    except Rejected:
        return
    for event in events:
        assert event.event_id
        assert not re.search("[\x00-\x1f\x7f]", event.key_id + event.type + event.account)


@FUZZ
@given(st.lists(FIELDS, min_size=1, max_size=3))
def test_signed_items_of_any_content_are_events_or_refused(items: list[dict[str, Any]]) -> None:
    document = {"notificationItems": [item(**fields) for fields in items]}
    with contextlib.suppress(Unproved):
        for entry in document["notificationItems"]:
            adyen.sign(bytes.fromhex(HMAC_KEY.decode()), entry)

    accepted(CONTRACTS[1], posted(document))


@FUZZ
@given(st.lists(st.tuples(WORDS, WORDS), max_size=6), st.binary(max_size=30), st.booleans())
def test_signed_forms_of_any_content_are_events(
    pairs: list[tuple[str, str]], raw: bytes, is_form: bool
) -> None:
    body = urlencode(pairs).encode() if is_form else raw
    headers = dict([twilio.sign(TOKEN, URL, body)])

    event = event_of(CONTRACTS[0], delivery_of(body, headers, URL))

    assert event.body == body
    assert event.event_id


@FUZZ
@given(st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_signed_transmissions_of_any_content_are_events(body: bytes) -> None:
    event = event_of(CONTRACTS[2], transmission(body), it=known())

    assert event.body == body
