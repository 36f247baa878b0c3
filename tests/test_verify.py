import base64
import gzip
import hmac
import json
import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, get_args

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.hashes import SHA256
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from receiver import presets
from receiver.presets import Preset, Table, parse
from receiver.signing import sign
from receiver.verify import (
    SIGNATURE_ITEMS_MAX,
    Contract,
    Delivery,
    Event,
    Rejected,
    Secret,
    Verdict,
    canonical,
    reread,
    verdict,
    verify,
)

NOW_MS = 1_760_000_000_000
KEY = b"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
FUZZ = settings(derandomize=True, deadline=None, max_examples=300, database=None)
NAMES = ("github", "shopify", "standard-webhooks", "stripe")
STRIPE = presets.get("stripe")
GITHUB = presets.get("github")
SHOPIFY = presets.get("shopify")
STANDARD = presets.get("standard-webhooks")


def contract_of(preset: Preset, *secrets: bytes | Secret, **changes: Any) -> Contract:
    found = [
        s if isinstance(s, Secret) else Secret(f"env:SECRET_{i}", s)
        for i, s in enumerate(secrets or (KEY,))
    ]
    return Contract(preset.name, preset.name, preset, tuple(found), **changes)


def delivery_of(
    body: bytes, headers: Sequence[tuple[str, str | bytes]], at_ms: int = NOW_MS, **changes: Any
) -> Delivery:
    pairs = tuple((n.lower().encode(), v.encode() if isinstance(v, str) else v) for n, v in headers)
    return Delivery("POST", "https://hooks.example.com/webhooks/x", pairs, body, at_ms, **changes)


def signed(preset: Preset, body: bytes, at_ms: int = NOW_MS, **values: Any) -> Delivery:
    """A delivery as the sender makes it."""
    secret = values.pop("secret", KEY)
    values = {"event_id": "evt_1", "type": "thing.done", **values}
    url = "https://hooks.example.com/webhooks/x"
    headers = sign(preset, secret, body, now_ms=NOW_MS, url=url, **values)
    return delivery_of(body, headers, at_ms)


def event_of(contract: Contract, delivery: Delivery) -> Event:
    judged = verify(contract, delivery)
    assert isinstance(judged, tuple)
    (event,) = judged
    return event


def refusal(contract: Contract, delivery: Delivery) -> Rejected:
    with pytest.raises(Rejected) as caught:
        verify(contract, delivery)
    return caught.value


def stripe_body(**fields: object) -> bytes:
    return json.dumps({"id": "evt_1", "type": "invoice.paid", "livemode": True, **fields}).encode()


# Signatures.


@pytest.mark.parametrize(
    "body",
    [
        b'{"b":1, "a":2}\n',
        b'{"u":"a\\/b \\u00e9","id":"1"}',
        b'{"note":"\\u2028 and \xe2\x80\xa8"}',
        '{"t":"💖"}'.encode(),
        b'[{"event":"open"}]\r\n',
        b"",
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_of_the_wire_are_what_is_signed(name: str, body: bytes) -> None:
    preset = presets.get(name)
    good = signed(preset, body)

    assert event_of(contract_of(preset), good).body == body
    trimmed = delivery_of(body.strip() + b" ", [(n.decode(), v) for n, v in good.headers])
    assert refusal(contract_of(preset), trimmed).reason == "bad-signature"


TWO_FAMILIES = parse(
    {
        "event_id": ["header:a-id", "header:b-id"],
        "schemes": [
            {
                "sig": f"header:{name}-sig",
                "algo": "sha256",
                "enc": "hex",
                "signed": "{id}.{body}",
                "id": f"header:{name}-id",
                **({"only_if_absent": "header:a-sig"} if name == "b" else {}),
            }
            for name in "ab"
        ],
    }
)


def test_the_id_that_a_scheme_signs_is_the_events_whatever_other_headers_say() -> None:
    mac = hmac.digest(KEY, b"right.{}", "sha256").hex()
    headers = [("b-id", "right"), ("b-sig", mac), ("a-id", "forged")]

    event = event_of(contract_of(TWO_FAMILIES), delivery_of(b"{}", headers))

    assert (event.event_id, event.id_signed) == ("right", True)


def test_a_scheme_with_an_empty_signature_is_not_passed_over() -> None:
    mac = hmac.digest(KEY, b"right.{}", "sha256").hex()
    headers = [("b-id", "right"), ("b-sig", mac), ("a-sig", "")]

    assert (
        "a-sig is there" in refusal(contract_of(TWO_FAMILIES), delivery_of(b"{}", headers)).detail
    )


def test_a_secret_in_the_path_proves_the_body() -> None:
    preset = parse({"sig": "path", "algo": "token", "event_id": "form:id"})
    delivery = Delivery("POST", "https://h/webhooks/x/t0ken?a", (), b"id=tr_1", NOW_MS)

    event = event_of(contract_of(preset, b"other", b"t0ken"), delivery)

    assert (event.event_id, event.id_signed, event.secret) == ("tr_1", True, "env:SECRET_1")
    assert refusal(contract_of(preset), delivery).reason == "bad-signature"


@pytest.mark.parametrize(
    ("said", "defect", "test"),
    [
        ('"live"', None, False),
        ('"test"', None, True),
        ('"LIVE"', "livemode is neither live nor test at json:/mode", False),
        ("true", "livemode is neither live nor test at json:/mode", False),
        ("null", "livemode is missing at json:/mode", False),
    ],
)
def test_a_mode_may_be_a_word(said: str, defect: str | None, test: bool) -> None:
    mode = {"at": "json:/mode", "live": "live", "test": "test"}
    preset = parse({**SHAPES["bare hex sha1"], "event_id": "json:/id", "livemode": mode})
    body = f'{{"id":"1","mode":{said}}}'.encode()

    event = event_of(contract_of(preset, livemode=True), signed(preset, body))

    assert (event.defect, event.test) == (defect, test)


def test_any_of_several_secrets_and_signatures_matches_and_the_secret_is_recorded() -> None:
    contract = contract_of(STRIPE, b"first", b"second", b"third")
    good = dict(sign(STRIPE, b"second", stripe_body(), now_ms=NOW_MS))["Stripe-Signature"]
    stamp, signature = good.split(",")
    header = f"{stamp},v0=00,v1={'0' * 64},{signature}"

    event = event_of(contract, delivery_of(stripe_body(), [("Stripe-Signature", header)]))

    assert event.secret == "env:SECRET_1"


def test_repeated_headers_are_all_read_and_names_have_no_case() -> None:
    good = dict(sign(GITHUB, KEY, b"{}", now_ms=NOW_MS))["X-Hub-Signature-256"]
    headers = [("x-hub-signature-256", "sha256=00"), ("X-HUB-SIGNATURE-256", good)]

    assert event_of(contract_of(GITHUB), delivery_of(b"{}", headers)).secret == "env:SECRET_0"


def standard(items: str) -> Delivery:
    good = dict(sign(STANDARD, KEY, b"{}", now_ms=NOW_MS, event_id="msg_1"))
    good["webhook-signature"] = items.replace("GOOD", good["webhook-signature"])
    return delivery_of(b"{}", list(good.items()))


@pytest.mark.parametrize(
    "items", ["GOOD", "v1,BAD GOOD v2,BAD", "v1,AAAA  GOOD", " GOOD ", "v1a,AAAA GOOD"]
)
def test_a_good_item_counts_among_others_and_among_empty_ones(items: str) -> None:
    assert event_of(contract_of(STANDARD), standard(items)).event_id == "msg_1"


@pytest.mark.parametrize(
    "items", ["v1", "v1,a,b", "v1,!!!a", "v1,", "", "garbage GOOD", "GOOD,", "GOOD=", "v2GOOD"]
)
def test_items_that_are_no_signatures_are_refused(items: str) -> None:
    assert refusal(contract_of(STANDARD), standard(items)).reason == "bad-signature"


def test_items_beyond_the_limit_are_refused_unread() -> None:
    many = " ".join(["v1,AAAA"] * SIGNATURE_ITEMS_MAX)

    rejected = refusal(contract_of(STANDARD), standard(f"GOOD {many}"))

    assert rejected.detail.startswith("header:webhook-signature has more than 32 items")


@pytest.mark.parametrize(
    "value", [b"sha256=\xe9", b"sha256=\xff\xfe", b"sha256=" + b"\0" * 64, b"sha256", b"=" * 9]
)
def test_strange_bytes_in_a_signature_are_refused_like_any_other(value: bytes) -> None:
    delivery = delivery_of(b"{}", [("X-Hub-Signature-256", value)])

    assert refusal(contract_of(GITHUB), delivery).reason == "bad-signature"


@pytest.mark.parametrize("spelling", ["upper", "unpadded", "spare bits", "line end"])
def test_only_the_canonical_spelling_of_a_signature_counts(spelling: str) -> None:
    good = dict(sign(SHOPIFY, KEY, b"{}", now_ms=NOW_MS))["X-Shopify-Hmac-Sha256"]
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    spare = alphabet[alphabet.index(good[-2]) + 1]
    other = {
        "upper": good.upper(),
        "unpadded": good.rstrip("="),
        "spare bits": f"{good[:-2]}{spare}=",
        "line end": f"{good}\n",
    }[spelling]

    assert (
        refusal(contract_of(SHOPIFY), delivery_of(b"{}", [("X-Shopify-Hmac-Sha256", other)])).reason
        == "bad-signature"
    )


def test_a_named_secret_signs_nothing() -> None:
    named = Secret("env:TOKEN", KEY, name="verify_token")
    contract = contract_of(STRIPE, named, b"other")

    assert refusal(contract, signed(STRIPE, stripe_body())).reason == "bad-signature"
    assert contract_of(STRIPE, named).checks == ()


def test_without_a_secret_nothing_is_accepted() -> None:
    contract = Contract("s", "s", STRIPE, ())

    rejected = refusal(contract, signed(STRIPE, stripe_body()))

    assert rejected.reason == "bad-signature"
    assert rejected.detail == "no secret fits the scheme of the source"
    assert refusal(contract_of(STANDARD, b"!"), signed(STRIPE, b"{}")).reason == "bad-signature"


def test_neither_a_refusal_nor_a_contract_shows_a_secret_or_a_signature() -> None:
    contract = contract_of(STRIPE)
    delivery = signed(STRIPE, stripe_body(), secret=b"wrong")
    expected = dict(sign(STRIPE, KEY, stripe_body(), now_ms=NOW_MS))["Stripe-Signature"]

    rejected = refusal(contract, delivery)

    text = f"{rejected} {rejected.detail} {rejected!r} {contract!r} {contract.checks!r}"
    assert KEY.decode() not in text
    assert expected.split("v1=")[1] not in text
    assert delivery.headers[1][1].split(b"v1=")[1].decode() not in text


def test_gzip_may_be_signed_either_way_and_is_stored_inflated() -> None:
    body = stripe_body()
    wire = gzip.compress(body, mtime=0)
    for over in (body, wire):
        headers = sign(STRIPE, KEY, over, now_ms=NOW_MS)

        event = event_of(contract_of(STRIPE), delivery_of(wire, headers, inflated=body))

        assert event.body == body
        assert event.body_sha256 == sha256(body).digest()
        assert event.event_id == "evt_1"
    assert event_of(contract_of(STRIPE), delivery_of(wire, headers)).defect is not None


# Clocks.


@pytest.mark.parametrize("late_s", [-300, -2, 0, 299, 300])
def test_a_clock_within_the_tolerance_is_accepted(late_s: int) -> None:
    delivery = signed(STRIPE, stripe_body(), at_ms=NOW_MS + late_s * 1000 + (late_s > 0) * 999)

    assert event_of(contract_of(STRIPE), delivery).defect is None


@pytest.mark.parametrize(("late_s", "word"), [(301, "late"), (-301, "early"), (10**9, "late")])
def test_a_good_signature_out_of_time_is_expired_and_says_by_how_much(
    late_s: int, word: str
) -> None:
    rejected = refusal(
        contract_of(STRIPE), signed(STRIPE, stripe_body(), at_ms=NOW_MS + late_s * 1000)
    )

    assert rejected.reason == "expired"
    assert rejected.skew_s == late_s
    assert rejected.detail == f"clock or delivery is {abs(late_s)} s {word}; tolerance 300 s"


def test_a_time_in_the_body_is_not_looked_for_until_the_body_is_proved() -> None:
    preset = presets.get("linear")
    unproved = delivery_of(b"{}", [("Linear-Signature", "00")])
    proved = delivery_of(b"{}", [("Linear-Signature", hmac.digest(KEY, b"{}", "sha256").hex())])

    assert "no signature" in refusal(contract_of(preset), unproved).detail
    assert refusal(contract_of(preset), proved).detail == "json:/webhookTimestamp is missing"


def test_a_bad_signature_out_of_time_is_only_bad() -> None:
    delivery = signed(STRIPE, stripe_body(), at_ms=NOW_MS + 10**7, secret=b"wrong")

    rejected = refusal(contract_of(STRIPE), delivery)

    assert (rejected.reason, rejected.skew_s) == ("bad-signature", None)


def test_the_tolerance_of_the_source_replaces_the_schemes() -> None:
    delivery = signed(STRIPE, stripe_body(), at_ms=NOW_MS + 20_000)
    ahead = signed(STRIPE, stripe_body(), at_ms=NOW_MS - 20_000)

    assert refusal(contract_of(STRIPE, tolerance_s=10), delivery).reason == "expired"
    assert refusal(contract_of(STRIPE, tolerance_s=10), ahead).reason == "expired"
    assert event_of(contract_of(STRIPE, tolerance_s=20), delivery)


@pytest.mark.parametrize(
    "stamp",
    [
        "",
        "abc",
        "1760000000abc",
        "+1760000000",
        " 1760000000",
        "1_760",
        "1.5e9",
        "-1",
        "٣",
        "9" * 5000,
    ],
)
def test_a_timestamp_is_decimal_digits_and_nothing_else(stamp: str) -> None:
    body = stripe_body()
    signature = hmac.new(KEY, stamp.encode() + b"." + body, "sha256").hexdigest()
    header = f"t={stamp},v1={signature}"

    rejected = refusal(contract_of(STRIPE), delivery_of(body, [("Stripe-Signature", header)]))

    assert (rejected.reason, rejected.detail) == (
        "bad-signature",
        "the timestamp is not a whole number",
    )


@pytest.mark.parametrize("header", ["t=1,t=1,v1=00", "v1=00", "t=1"])
def test_there_is_exactly_one_timestamp(header: str) -> None:
    body = stripe_body()
    good = dict(sign(STRIPE, KEY, body, now_ms=NOW_MS))["Stripe-Signature"]
    twice = delivery_of(body, [("Stripe-Signature", good), ("Stripe-Signature", good)])

    assert refusal(contract_of(STRIPE), twice).detail.endswith("has 2 timestamps, not one")
    delivery = delivery_of(body, [("Stripe-Signature", header)])
    assert refusal(contract_of(STRIPE), delivery).reason == "bad-signature"


@pytest.mark.parametrize("name", ["webhook-id", "webhook-timestamp", "webhook-signature"])
def test_a_signed_header_that_is_missing_empty_or_there_twice_is_refused(name: str) -> None:
    good = signed(STANDARD, b"{}")
    with_two = [*good.headers, (name.encode(), b"2")]
    without = [(n, v) for n, v in good.headers if n != name.encode()]
    for headers in (with_two, without, [*without, (name.encode(), b"")]):
        delivery = Delivery("POST", good.url, headers, b"{}", NOW_MS)

        assert refusal(contract_of(STANDARD), delivery).reason == "bad-signature"


# Schemes of every declared shape.

SHAPES: dict[str, Table] = {
    "bare hex sha1": {"sig": "header:S", "algo": "sha1", "enc": "hex", "signed": "{body}"},
    "sha512 base64": {"sig": "header:S", "algo": "sha512", "enc": "base64", "signed": "{body}"},
    "any ending": {"sig": "header:S-*", "algo": "sha256", "enc": "hex", "signed": "{body}"},
    "url": {"sig": "header:S", "algo": "sha256", "enc": "hex", "signed": "{method}{url}{body}"},
    "milliseconds": {
        "sig": "header:S",
        "algo": "sha256",
        "enc": "base64",
        "signed": "{ts}:{body}:{header:Extra-Type}",
        "ts": "header:T",
        "ts_unit": "ms",
        "tolerance_s": 1.5,
        "event_type": "header:Extra-Type",
    },
    "iso time": {
        "sig": "header:S",
        "kv_sep": "=",
        "sig_key": "sha256",
        "algo": "sha256",
        "enc": "hex",
        "signed": "{id}{ts}{body}",
        "id": "header:I",
        "ts": "header:T",
        "ts_unit": "iso",
        "tolerance_s": 600,
        "event_id": "header:I",
    },
    "time in the body": {
        "sig": "header:S",
        "algo": "sha256",
        "enc": "hex",
        "signed": "{body}",
        "ts": "json:/at",
        "tolerance_s": 60,
    },
    "parts of the body": {
        "sig": "header:S",
        "algo": "sha256",
        "enc": "hex",
        "signed": "{json:/at}.{json:/id}",
    },
    "semicolons": {
        "sig": "header:S",
        "item_sep": ";",
        "kv_sep": "=",
        "sig_key": "h1",
        "ts_key": "ts",
        "algo": "sha256",
        "enc": "hex",
        "signed": "{ts}:{body}",
        "tolerance_s": 5,
    },
    "token": {"sig": "header:S", "algo": "token"},
    "basic": {"sig": "header:Authorization", "algo": "basic"},
}
SHAPE_BODY = json.dumps({"id": "evt_1", "at": NOW_MS // 1000}).encode()


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_signed_verifies_and_another_secret_does_not(shape: str) -> None:
    preset = parse({"event_id": "json:/id", **SHAPES[shape]})

    event = event_of(contract_of(preset), signed(preset, SHAPE_BODY))

    assert (event.event_id, event.defect) == ("evt_1", None)
    rejected = refusal(contract_of(preset, b"other"), signed(preset, SHAPE_BODY))
    assert rejected.reason == "bad-signature"


def test_a_signed_time_expires_without_a_word_of_the_config_and_not_where_that_says_so() -> None:
    table = {"event_id": "json:/id", **SHAPES["semicolons"]}
    del table["tolerance_s"]
    stale = signed(parse(table), SHAPE_BODY, NOW_MS + 301_000)

    rejected = refusal(contract_of(parse(table)), stale)

    assert rejected.detail == "clock or delivery is 301 s late; tolerance 300 s"
    assert event_of(contract_of(parse({**table, "tolerance_s": False})), stale)


@pytest.mark.parametrize("shape", ["milliseconds", "iso time", "time in the body", "semicolons"])
def test_every_kind_of_timestamp_expires_both_ways(shape: str) -> None:
    preset = parse({"event_id": "json:/id", **SHAPES[shape]})
    for at_ms in (NOW_MS - 10**6, NOW_MS + 10**6):
        assert refusal(contract_of(preset), signed(preset, SHAPE_BODY, at_ms)).reason == "expired"


@pytest.mark.parametrize(
    "stamp",
    ["2025-13-01T00:00:00Z", "2025-10-09T08:53:20", "0001-01-01T00:00:00+23:59", "1760000000", ""],
)
def test_a_time_that_is_none_is_refused(stamp: str) -> None:
    preset = parse(SHAPES["iso time"])
    signature = hmac.new(KEY, f"i{stamp}".encode() + b"{}", "sha256").hexdigest()
    headers = [("I", "i"), ("T", stamp), ("S", f"sha256={signature}")]

    assert isinstance(refusal(contract_of(preset), delivery_of(b"{}", headers)), Rejected)


def test_nanoseconds_are_read() -> None:
    preset = parse(SHAPES["iso time"])
    content = b"i2025-10-09T08:53:20.123456789Z{}"
    signature = hmac.new(KEY, content, "sha256").hexdigest()
    headers = [("I", "i"), ("T", "2025-10-09T08:53:20.123456789Z"), ("S", f"sha256={signature}")]

    assert event_of(contract_of(preset), delivery_of(b"{}", headers)).event_id == "i"


def test_upper_case_hex_counts_only_where_the_scheme_says_so() -> None:
    table = SHAPES["bare hex sha1"]
    headers = [(n, v.upper()) for n, v in sign(parse(table), KEY, b"{}", now_ms=NOW_MS)]

    assert refusal(contract_of(parse(table)), delivery_of(b"{}", headers))
    assert event_of(
        contract_of(parse({**table, "hex_any_case": True})), delivery_of(b"{}", headers)
    )


@pytest.mark.parametrize("value", [b"", b"one", b"two"])
def test_a_weaker_scheme_is_not_used_beside_the_stronger_header(value: bytes) -> None:
    strong = SHAPES["bare hex sha1"]
    weak = {"sig": "header:Token", "algo": "token", "only_if_absent": "header:S"}
    contract = contract_of(parse({"schemes": [strong, weak], "event_id": "json:/id"}))
    token = ("Token", KEY)

    assert event_of(contract, delivery_of(b'{"id":1}', [token])).event_id == "1"
    assert refusal(contract, delivery_of(b'{"id":1}', [token, ("S", value)]))


def test_a_weaker_scheme_is_not_used_beside_any_of_several_stronger_headers() -> None:
    strong = {**SHAPES["bare hex sha1"], "sig": "header:S-*"}
    weak = {"sig": "header:Token", "algo": "token", "only_if_absent": "header:S-*"}
    contract = contract_of(parse({"schemes": [strong, weak], "event_id": "json:/id"}))

    assert event_of(contract, delivery_of(b'{"id":1}', [("Token", KEY)])).event_id == "1"
    assert refusal(contract, delivery_of(b'{"id":1}', [("Token", KEY), ("S-2", b"wrong")]))


@pytest.mark.parametrize("algo", ["ed25519", "ecdsa-p256-sha256"])
@pytest.mark.parametrize("enc", ["hex", "base64"])
def test_public_keys_verify_what_only_the_sender_can_sign(algo: str, enc: str) -> None:
    preset = parse(
        {
            "sig": "header:S",
            "algo": algo,
            "enc": enc,
            "signed": "{body}",
            "secret": "base64",
            "event_id": "json:/id",
        }
    )
    public, signature = public_key_and_signature(algo, SHAPE_BODY)
    text = signature.hex() if enc == "hex" else base64.b64encode(signature).decode()
    contract = contract_of(preset, public)

    assert event_of(contract, delivery_of(SHAPE_BODY, [("S", text)])).event_id == "evt_1"
    for wrong in (text[:-4], text + "00", text.swapcase(), "", "é", "\0"):
        assert refusal(contract, delivery_of(SHAPE_BODY, [("S", wrong)]))
    if text.endswith("=="):
        spare = f"{text[:-3]}{chr(ord(text[-3]) + 1)}=="
        assert base64.b64decode(spare) == signature
        assert refusal(contract, delivery_of(SHAPE_BODY, [("S", spare)]))
    assert refusal(contract, delivery_of(SHAPE_BODY + b" ", [("S", text)]))
    with pytest.raises(ValueError, match="only the sender can sign"):
        sign(preset, public, SHAPE_BODY, now_ms=NOW_MS)


def public_key_and_signature(algo: str, content: bytes) -> tuple[bytes, bytes]:
    if algo == "ed25519":
        private = ed25519.Ed25519PrivateKey.generate()
        return base64.b64encode(private.public_key().public_bytes_raw()), private.sign(content)
    key = ec.generate_private_key(ec.SECP256R1())
    spki = serialization.PublicFormat.SubjectPublicKeyInfo
    public = key.public_key().public_bytes(serialization.Encoding.DER, spki)
    return base64.b64encode(public), key.sign(content, ec.ECDSA(SHA256()))


def test_a_token_is_compared_whole_and_an_empty_one_never_matches() -> None:
    preset = parse(SHAPES["token"])

    assert refusal(contract_of(preset, b"token"), delivery_of(b"{}", [("S", "tok")]))
    assert refusal(contract_of(preset, b""), delivery_of(b"{}", [("S", "")]))
    assert refusal(contract_of(preset, b"token"), delivery_of(b"{}", [("S", b"tok\xe9n")]))


def test_the_payload_of_a_form_can_be_what_is_signed() -> None:
    preset = parse({**SHAPES["bare hex sha1"], "signed": "{payload}", "payload": "payload"})
    signature = hmac.new(KEY, b'{"a":1}', "sha1").hexdigest()

    form = delivery_of(b"payload=%7B%22a%22%3A1%7D", [("S", signature)])
    plain = delivery_of(b'{"a":1}', [("S", signature)])

    assert event_of(contract_of(preset), form).document == {"a": 1}
    assert event_of(contract_of(preset), plain).document == {"a": 1}


def test_of_a_form_whose_payload_is_signed_nothing_else_counts() -> None:
    places = {"event_id": "body", "event_type": "json:/a", "account": "form:account"}
    table = {**SHAPES["bare hex sha1"], "signed": "{payload}", "payload": "payload"} | places
    contract = contract_of(parse(table))
    signature = ("S", hmac.new(KEY, b'{"a":1}', "sha1").hexdigest())
    bodies = (b'{"a":1}', b"payload=%7B%22a%22%3A1%7D", b"payload=%7b%22a%22:1%7d&account=other")

    events = [event_of(contract, delivery_of(body, [signature])) for body in bodies]

    for event in events:
        assert (event.body, event.account, event.content_type) == (b'{"a":1}', "", "json")
        assert event == events[0]


# What the event says.


def test_a_stripe_event_is_read_from_its_body() -> None:
    body = stripe_body(account="acct_1", context="acct_2")

    event = event_of(contract_of(STRIPE), signed(STRIPE, body))

    assert (event.source, event.identity) == ("stripe", "stripe")
    assert (event.account, event.event_id, event.key_id) == ("acct_1", "evt_1", "evt_1")
    assert (event.type, event.received_ms) == ("invoice.paid", NOW_MS)
    assert (event.content_type, event.document) == ("json", json.loads(body))
    assert (event.secret, event.id_signed, event.claimed_account) == ("env:SECRET_0", True, None)
    assert (event.defect, event.test) == (None, False)


def test_a_thin_event_names_its_account_in_its_context() -> None:
    body = stripe_body(object="v2.core.event", context="acct_1/acct_2")

    assert event_of(contract_of(STRIPE), signed(STRIPE, body)).account == "acct_1/acct_2"
    own = event_of(contract_of(STRIPE), signed(STRIPE, stripe_body(context=None)))
    assert own.account == ""


def test_a_github_form_is_unwrapped_and_its_id_is_known_to_be_unsigned() -> None:
    body = b"payload=%7B%22repository%22%3A%7B%22id%22%3A35129377%7D%7D"

    event = event_of(contract_of(GITHUB), signed(GITHUB, body, event_id="guid", type="push"))

    assert (event.event_id, event.type, event.account) == ("guid", "push", "35129377")
    assert (event.content_type, event.id_signed, event.defect) == ("form", False, None)
    assert event.document == {"repository": {"id": 35129377}}
    assert event.body == body


def test_a_form_content_type_does_not_change_how_a_signed_json_body_is_read() -> None:
    good = signed(GITHUB, b'{"repository":{"id":1}}')
    headers = [
        (n, b"application/x-www-form-urlencoded" if n == b"content-type" else v)
        for n, v in good.headers
    ]

    event = event_of(contract_of(GITHUB), Delivery("POST", "", headers, good.body, NOW_MS))

    assert (event.content_type, event.account) == ("json", "1")


def test_shopify_ids_are_told_apart_by_topic_and_its_shop_is_only_a_claim() -> None:
    keys = []
    for topic in ("orders/create", "orders/paid"):
        delivery = signed(SHOPIFY, b"{}", event_id="e", type=topic, account="a.myshopify.com")

        event = event_of(contract_of(SHOPIFY), delivery)

        keys.append(event.key_id)
        assert (event.event_id, event.account, event.id_signed) == ("e", "", False)
        assert event.claimed_account == "a.myshopify.com"
    assert keys == ["e:orders/create", "e:orders/paid"]


def test_the_signed_id_of_standard_webhooks_counts_as_signed() -> None:
    event = event_of(contract_of(STANDARD), signed(STANDARD, b'{"type":"a"}', event_id="msg_1"))

    assert (event.event_id, event.id_signed, event.defect) == ("msg_1", True, None)


def test_a_signed_message_cut_at_another_place_is_refused() -> None:
    recent = NOW_MS // 1000
    genuine = dict(sign(STANDARD, KEY, b"%d.{}" % recent, now_ms=NOW_MS, event_id="msg_1"))
    stamp = genuine["webhook-timestamp"]

    cut = genuine | {"webhook-id": f"msg_1.{stamp}", "webhook-timestamp": str(recent)}

    assert event_of(contract_of(STANDARD), delivery_of(b"%d.{}" % recent, list(genuine.items())))
    rejected = refusal(contract_of(STANDARD), delivery_of(b"{}", list(cut.items())))
    assert (rejected.reason, rejected.detail) == (
        "bad-signature",
        "header:webhook-id holds '.', which ends it",
    )


def test_a_time_and_a_body_that_are_cut_at_another_place_are_refused() -> None:
    contract = contract_of(
        parse({**SHAPES["bare hex sha1"], "signed": "{ts}{body}", "ts": "header:T"})
    )
    signature = ("S", hmac.new(KEY, b'1760000000{"id":1}', "sha1").hexdigest())

    assert event_of(contract, delivery_of(b'{"id":1}', [signature, ("T", "1760000000")]))
    assert refusal(contract, delivery_of(b'0{"id":1}', [signature, ("T", "176000000")]))
    assert refusal(contract, delivery_of(b'760000000{"id":1}', [signature, ("T", "1")]))


def test_an_id_is_signed_only_if_no_header_could_have_come_before_it() -> None:
    table = SHAPES["bare hex sha1"]
    signed_first = parse({**table, "event_id": ["json:/id", "header:I"]})
    header_first = parse({**table, "event_id": ["header:I", "json:/id"]})
    delivery = delivery_of(SHAPE_BODY, sign(parse(table), KEY, SHAPE_BODY, now_ms=NOW_MS))

    assert event_of(contract_of(signed_first), delivery).id_signed
    assert not event_of(contract_of(header_first), delivery).id_signed
    assert not event_of(contract_of(GITHUB), signed(GITHUB, b"{}", event_id="")).id_signed


def test_an_account_header_that_is_signed_is_an_account() -> None:
    table = {**SHAPES["bare hex sha1"], "signed": "{header:Shop}{body}", "account": "header:shop"}
    preset = parse(table)

    event = event_of(contract_of(preset), signed(preset, b"{}", account="shop-1"))

    assert (event.account, event.claimed_account) == ("shop-1", None)


def test_beside_a_token_the_body_is_believed_and_a_header_is_not() -> None:
    table = {**SHAPES["token"], "event_id": "json:/id", "account": ["header:Shop", "json:/shop"]}
    preset = parse(table)
    body = b'{"id":1,"shop":"one"}'

    event = event_of(contract_of(preset), signed(preset, body, account="two"))

    assert (event.account, event.claimed_account, event.id_signed) == ("one", "two", True)


def defect_of(contract: Contract, delivery: Delivery) -> str:
    defect = event_of(contract, delivery).defect
    assert defect is not None
    return defect


def test_a_body_that_is_not_json_is_a_defect_and_the_id_is_its_hash() -> None:
    for body in (b"\xff\xfe{}", b"", b"[" * 50_000, b'{"id":NaN}'):
        event = event_of(contract_of(STRIPE), signed(STRIPE, body))

        assert event.event_id == event.key_id == f"sha256:{sha256(body).hexdigest()}"
        assert (event.document, event.type, event.id_signed) == (None, "", True)
        assert event.defect is not None
        assert event.defect.startswith("body is not JSON: ")


def test_what_is_missing_or_no_id_is_a_defect_that_names_its_place() -> None:
    missing = signed(STRIPE, b'{"livemode":true,"type":null}')
    assert defect_of(contract_of(STRIPE), missing) == (
        "id missing at json:/id; type missing at json:/type"
    )
    wrong = signed(STRIPE, b'{"id":1.5,"type":"a\\u0000b","account":{}}')
    assert defect_of(contract_of(STRIPE), wrong) == (
        "id at json:/id is a fraction, not a text or a whole number; "
        "type at json:/type has a control character; "
        "account at json:/account is an object, not a text or a whole number"
    )
    no_header = signed(GITHUB, b"{}", event_id="")
    assert defect_of(contract_of(GITHUB), no_header) == "id missing at header:X-GitHub-Delivery"


@pytest.mark.parametrize("body", [b"[]", b"null", b"5", b'"text"', b"[[[]]]", b"{}"])
def test_json_of_another_shape_is_a_defect(body: bytes) -> None:
    defect = defect_of(contract_of(STRIPE, livemode=True), signed(STRIPE, body))

    assert defect.startswith("id missing at json:/id; type missing")
    assert defect.endswith("livemode is missing at json:/livemode")


def test_a_sender_without_ids_owes_none() -> None:
    preset = parse(SHAPES["bare hex sha1"])

    event = event_of(contract_of(preset), signed(preset, b"{}"))

    assert (event.event_id, event.defect) == (f"sha256:{sha256(b'{}').hexdigest()}", None)


# What the contract says of it.


def test_a_pinned_account_is_the_account_and_any_other_is_a_defect() -> None:
    pinned = contract_of(STRIPE, account="acct_1")

    assert event_of(pinned, signed(STRIPE, stripe_body())).account == "acct_1"
    other = event_of(pinned, signed(STRIPE, stripe_body(account="acct_2")))
    assert other.account == "acct_1"
    assert other.defect == "account acct_1 is pinned, delivery says acct_2"


def test_a_pinned_account_is_held_against_an_unsigned_header_too() -> None:
    pinned = contract_of(SHOPIFY, account="a.myshopify.com")

    same = event_of(pinned, signed(SHOPIFY, b"{}", account="a.myshopify.com"))
    other = event_of(pinned, signed(SHOPIFY, b"{}", account="b.myshopify.com"))

    assert (same.account, same.defect) == ("a.myshopify.com", None)
    assert other.account == "a.myshopify.com"
    assert other.defect == "account a.myshopify.com is pinned, delivery says b.myshopify.com"


def test_a_secret_of_one_account_does_not_sign_for_another() -> None:
    contract = contract_of(STRIPE, Secret("env:ONE", KEY, account="acct_1"))

    assert event_of(contract, signed(STRIPE, stripe_body(account="acct_1"))).defect is None
    assert event_of(contract, signed(STRIPE, stripe_body())).defect is None
    assert defect_of(contract, signed(STRIPE, stripe_body(account="acct_2"))) == (
        "secret env:ONE is for account acct_1, event has acct_2"
    )


@pytest.mark.parametrize(
    ("source", "livemode", "test", "defect"),
    [
        (True, True, False, None),
        (True, False, True, None),
        (False, True, False, "a live event on a test source"),
        (False, False, False, None),
        (None, True, False, None),
        (None, None, False, None),
        (True, None, False, "livemode is missing at json:/livemode"),
        (False, None, False, "livemode is missing at json:/livemode"),
        (False, "true", False, "livemode is not a boolean at json:/livemode"),
        (True, 1, False, "livemode is not a boolean at json:/livemode"),
    ],
)
def test_the_mode_of_the_source_judges_the_event(
    source: bool | None, livemode: object, test: bool, defect: str | None
) -> None:
    event = event_of(
        contract_of(STRIPE, livemode=source), signed(STRIPE, stripe_body(livemode=livemode))
    )

    assert (event.test, event.defect) == (test, defect)


def test_a_secret_of_one_mode_does_not_sign_for_the_other() -> None:
    contract = contract_of(STRIPE, Secret("env:TEST", KEY, livemode=False))

    assert event_of(contract, signed(STRIPE, stripe_body(livemode=False))).defect is None
    assert defect_of(contract, signed(STRIPE, stripe_body(livemode=True))) == (
        "secret env:TEST is for test events, this is a live one"
    )
    assert "livemode is missing" in defect_of(contract, signed(STRIPE, stripe_body(livemode=None)))


def test_a_sender_without_modes_is_not_asked_for_one() -> None:
    assert event_of(contract_of(GITHUB, livemode=True), signed(GITHUB, b"{}")).defect is None


# Stored bodies, verdicts, limits of what comes in.


def again(contract: Contract, event: Event, **changes: Any) -> Event:
    stored = {
        "body": event.body,
        "content_type": event.content_type,
        "event_id": event.key_id,
        "type": event.type,
        "account": event.account,
        "received_ms": event.received_ms,
        "secret": event.secret,
        "id_signed": event.id_signed,
        "claimed_account": event.claimed_account,
    }
    return reread(contract, **{**stored, **changes})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "body", [stripe_body(), b"payload=%7B%22a%22%3A1%7D", b"not JSON", b"{}", b'{"id":{}}']
)
def test_a_stored_body_gives_the_same_event_again(name: str, body: bytes) -> None:
    preset = presets.get(name)
    contract = contract_of(preset)

    event = event_of(contract, signed(preset, body, account="shop"))

    assert again(contract, event) == event


def test_a_stored_event_is_judged_under_the_contract_as_it_is_now() -> None:
    event = event_of(contract_of(STRIPE), signed(STRIPE, stripe_body(account="acct_2")))
    bound = Secret("env:SECRET_0", b"rotated", account="acct_1")

    assert again(contract_of(STRIPE, bound), event).defect == (
        "secret env:SECRET_0 is for account acct_1, event has acct_2"
    )
    assert again(contract_of(STRIPE, Secret("env:NEW", KEY, account="acct_1")), event) == event
    assert again(contract_of(STRIPE, livemode=False), event).defect == (
        "a live event on a test source"
    )
    assert again(contract_of(STRIPE, account="acct_1"), event).defect == (
        "account acct_1 is pinned, delivery says acct_2"
    )


def test_the_account_of_a_stored_event_stays_since_it_is_part_of_keys() -> None:
    event = event_of(contract_of(STRIPE), signed(STRIPE, stripe_body()))

    assert again(contract_of(STRIPE, account="acct_1"), event).account == ""


def test_a_claim_that_was_refused_is_refused_again() -> None:
    pinned = contract_of(SHOPIFY, account="a.myshopify.com")
    event = event_of(pinned, signed(SHOPIFY, b"{}", account="b.myshopify.com"))

    assert again(pinned, event).defect == event.defect
    assert event.defect is not None


def test_a_type_that_was_missing_is_looked_for_again_and_the_id_stays() -> None:
    table = {**SHAPES["bare hex sha1"], "event_id": "json:/event", "event_type": "json:/kind"}
    body = b'{"id":"evt_1","type":"done"}'
    event = event_of(contract_of(parse(table)), signed(parse(table), body))
    mended = parse({**table, "event_id": "json:/id", "event_type": "json:/type"})

    assert event.defect == "id missing at json:/event; type missing at json:/kind"
    better = again(contract_of(mended), event)
    assert (better.event_id, better.type, better.defect) == (event.event_id, "done", None)


def test_redeliveries_of_stripe_differ_in_nothing_that_counts() -> None:
    one, two = stripe_body(pending_webhooks=2), stripe_body(pending_webhooks=1)

    assert canonical(one, "json", STRIPE.volatile) == canonical(two, "json", STRIPE.volatile)


def test_a_verdict_is_one_of_its_words_and_says_why() -> None:
    good = signed(STRIPE, stripe_body(account="acct_1"))
    late = signed(STRIPE, stripe_body(), at_ms=NOW_MS + 301_000)

    assert verdict(contract_of(STRIPE), good) == Verdict(
        "valid", "evt_1", "invoice.paid", "acct_1", None
    )
    assert verdict(contract_of(STRIPE), late).verdict == "expired"
    assert verdict(contract_of(STRIPE, b"other"), good).verdict == "bad-signature"
    assert verdict(Contract("s", "s", STRIPE, ()), good) == Verdict(
        "unverified", "evt_1", "invoice.paid", "acct_1", "the source has no secret"
    )
    unsigned = parse({"algo": "none", "event_id": "json:/id"})
    assert verdict(Contract("s", "s", unsigned, ()), good) == Verdict(
        "unverified", "evt_1", "", None, "the sender does not sign"
    )
    assert set(get_args(Verdict.__annotations__["verdict"])) == {
        "valid",
        "handshake",
        "bad-signature",
        "expired",
        "unverified",
    }


HEADER_NAMES = st.sampled_from(
    [
        b"stripe-signature",
        b"x-hub-signature-256",
        b"x-shopify-hmac-sha256",
        b"webhook-id",
        b"webhook-timestamp",
        b"webhook-signature",
        b"content-type",
    ]
)
PIECES = st.sampled_from(
    [b"t=", b"v1=", b"v1,", b"v1a,", b",", b" ", b"=", b"1760000000", b"sha256=", b"\xff", b"\0"]
)
HEADER_VALUES = st.binary(max_size=40) | st.lists(PIECES, max_size=8).map(b"".join)
CONTRACTS = [
    *(contract_of(presets.get(name)) for name in NAMES),
    contract_of(STANDARD, b"whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4="),
    *(contract_of(parse({"event_id": "json:/id", **table})) for table in SHAPES.values()),
    contract_of(parse({"sig": "json:/sig", "algo": "token", "event_id": "form:a#/b"})),
]


@FUZZ
@given(
    st.sampled_from(CONTRACTS),
    st.lists(st.tuples(HEADER_NAMES | st.sampled_from([b"s", b"t", b"i"]), HEADER_VALUES)),
    st.binary(max_size=60) | st.sampled_from([b"[" * 5000, b'{"sig":1e999}', b"a=%FF&a=1"]),
    st.none() | st.binary(max_size=20),
    st.integers(-(10**15), 10**18),
)
def test_garbage_is_refused_and_raises_nothing_else(
    contract: Contract,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
    inflated: bytes | None,
    received_ms: int,
) -> None:
    delivery = Delivery("POST", "https://h/\ud800", headers, body, received_ms, inflated)

    assert isinstance(refusal(contract, delivery), Rejected)


BODIES = (
    st.binary(max_size=80)
    | st.sampled_from([b"[" * 5000, b'{"id":' + b"9" * 4000 + b"}", b"payload=%ZZ", b"payload="])
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["id", "type", "account", "livemode", "context", "repository"]),
                inner,
            )
        ),
        max_leaves=6,
    ).map(lambda value: json.dumps(value).encode())
)
OWN_WORDS = st.text(st.characters(codec="utf-8"), max_size=8)


@FUZZ
@given(
    st.sampled_from(NAMES),
    BODIES,
    OWN_WORDS,
    OWN_WORDS,
    st.sampled_from([None, "acct_1"]),
)
def test_validly_signed_garbage_is_an_event_with_a_usable_key(
    name: str, body: bytes, event_id: str, type_: str, account: str | None
) -> None:
    preset = presets.get(name)
    bound = Secret("env:BOUND", KEY, account="acct_2", livemode=True)
    contract = contract_of(preset, bound, account=account, livemode=True, volatile=("id.n", "a[*]"))
    delivery = signed(
        preset, body, event_id=event_id.replace(".", "") or "x", type=type_, account=type_
    )

    event = event_of(contract, delivery)

    assert event.event_id
    assert not re.search("[\x00-\x1f\x7f]", event.key_id + event.type + event.account)
    assert event.body_sha256 == sha256(body).digest()
    unread = (event.defect or "").startswith("body is not JSON")
    assert event.document is None or not unread
    digest = canonical(body, event.content_type, contract.volatile)
    assert digest is None or len(digest) == 32
    # What was wrong with a header is not known again; all else is.
    reread_event = again(contract, event)
    assert replace(reread_event, defect=event.defect) == event
    assert event.defect is not None or reread_event.defect is None


def test_a_hundred_thousand_items_are_refused_quickly() -> None:
    values: list[bytes] = [b"v1=00," * 100_000, b"," * 100_000, b"v1=" * 100_000, b"t=1," * 100_000]
    for value in values:
        delivery = delivery_of(b"{}", [("Stripe-Signature", value)])

        assert refusal(contract_of(STRIPE), delivery).reason == "bad-signature"
    many = delivery_of(b"{}", [("Stripe-Signature", b"t=1,v1=00")] * 10_000)
    assert refusal(contract_of(STRIPE), many).detail.endswith("more than 32 items")
