import hmac
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from receiver import app, presets
from receiver.handshakes import ECHO_CHARS_MAX, UNVERIFIED_BYTES_MAX, Handshake
from receiver.presets import PresetError, parse
from receiver.process import Outcome
from receiver.verify import Contract, Delivery, Rejected, Secret, verdict, verify
from tests.test_verify import FUZZ, NOW_MS

KEY = b"of the sender"
SIGNED: dict[str, Any] = {
    "sig": "header:X-Signature",
    "algo": "sha256",
    "enc": "hex",
    "signed": "{body}",
    "event_id": "json:/id",
    "event_type": "json:/type",
}
ECHO = {"when": {"json:/type": "hello"}, "content_type": "text/plain", "body": "{json:/challenge}"}
SHAKES: dict[str, dict[str, Any]] = {
    "echo": ECHO | {"after_verify": True},
    "get": {
        "when": {
            "method": "GET",
            "query:mode": "subscribe",
            "query:token": {"secret": "verify_token"},
        },
        "content_type": "text/plain",
        "body": "{query:challenge}",
    },
    "proof": {
        "when": {"json:/event": "validate"},
        "after_verify": True,
        "content_type": "application/json",
        "body": '{"plain":"{json:/plain}","proof":"{hmac_hex:json:/plain}"}',
    },
    "capture": {
        "when": {"header:X-Hook-Secret": "*"},
        "headers": {"X-Hook-Secret": "{header:X-Hook-Secret}"},
        "capture_secret": "header:X-Hook-Secret",
    },
    "ping": {
        "when": {"form:webhook_id": "*", "header:X-Signature": {"absent": True}},
    },
    "204": {"when": {"json:/type": 0}, "after_verify": True, "status": 204},
}


def contract_of(*shakes: str, armed: bool = False, secrets: tuple[Secret, ...] = ()) -> Contract:
    preset = parse(SIGNED | {"handshakes": [SHAKES[name] for name in shakes]})
    return Contract("it", "it", preset, (Secret("env:IT", KEY), *secrets), armed=armed)


def posted(body: bytes, headers: Mapping[str, str] | None = None, **changes: Any) -> Delivery:
    pairs = tuple((n.lower().encode(), v.encode()) for n, v in (headers or {}).items())
    given: dict[str, Any] = {"method": "POST", "url": "https://hooks.example.com/webhooks/it"}
    return Delivery(headers=pairs, body=body, received_ms=NOW_MS, **(given | changes))


def got(query: str) -> Delivery:
    return posted(b"", method="GET", url=f"https://hooks.example.com/webhooks/it?{query}")


def signed(document: object) -> Delivery:
    body = json.dumps(document).encode()
    return posted(body, {"X-Signature": hmac.new(KEY, body, "sha256").hexdigest()})


def shaken(contract: Contract, delivery: Delivery) -> Handshake:
    judged = verify(contract, delivery)
    assert isinstance(judged, Handshake)
    return judged


def refusal(contract: Contract, delivery: Delivery) -> str:
    with pytest.raises(Rejected) as caught:
        verify(contract, delivery)
    assert caught.value.reason == "bad-signature"
    return caught.value.detail


def test_a_signed_challenge_is_answered_as_plain_text_that_no_browser_takes_for_a_page() -> None:
    given = shaken(contract_of("echo"), signed({"type": "hello", "challenge": "<b>abc</b>"}))

    assert (given.status, given.body, given.captured) == (200, b"<b>abc</b>", None)
    assert given.all_headers == (
        ("Content-Type", "text/plain"),
        ("X-Content-Type-Options", "nosniff"),
    )


def test_a_challenge_that_has_to_be_signed_is_refused_without_a_signature() -> None:
    delivery = posted(json.dumps({"type": "hello", "challenge": "abc"}).encode())

    assert "X-Signature is missing" in refusal(contract_of("echo"), delivery)


def test_what_is_no_handshake_is_an_event() -> None:
    judged = verify(contract_of("echo"), signed({"id": "1", "type": "paid"}))

    assert isinstance(judged, tuple)
    assert [event.event_id for event in judged] == ["1"]


@pytest.mark.parametrize(
    ("challenge", "why"),
    [
        ("x" * (ECHO_CHARS_MAX + 1), "at most 512 are sent back"),
        ("a\r\nSet-Cookie: b", "is not printable ASCII"),
        ("\u2028", "is not printable ASCII"),
        ("", "is missing"),
        (None, "is missing"),
        ({"a": 1}, "is missing"),
    ],
)
def test_a_challenge_that_is_not_short_plain_text_is_not_sent_back(
    challenge: object, why: str
) -> None:
    assert why in refusal(contract_of("echo"), signed({"type": "hello", "challenge": challenge}))


def test_a_longest_challenge_and_a_number_are_sent_back() -> None:
    for challenge in ("x" * ECHO_CHARS_MAX, 42):
        given = shaken(contract_of("echo"), signed({"type": "hello", "challenge": challenge}))

        assert given.body == str(challenge).encode()


def test_a_get_is_answered_only_with_the_named_secret() -> None:
    contract = contract_of(
        "get", secrets=(Secret("env:TOKEN", b"meaty hamhock", name="verify_token"),)
    )

    given = shaken(contract, got("mode=subscribe&challenge=1158201444&token=meaty+hamhock"))

    assert (given.status, given.body) == (200, b"1158201444")
    for query in (
        "mode=subscribe&challenge=1&token=other",
        "mode=subscribe&challenge=1&token=",
        "mode=subscribe&challenge=1",
        "mode=subscribe&challenge=1&token=meaty+hamhock&token=meaty+hamhock",
        "mode=unsubscribe&challenge=1&token=meaty+hamhock",
        f"mode=subscribe&challenge=1&token={KEY.decode()}",
    ):
        assert "no handshake" in refusal(contract, got(query))
    assert "there twice" in refusal(
        contract, got("mode=subscribe&challenge=1&challenge=2&token=meaty+hamhock")
    )


def test_a_named_secret_that_is_not_there_is_never_met() -> None:
    assert "no handshake" in refusal(contract_of("get"), got("mode=subscribe&challenge=1&token="))


def test_a_get_is_never_an_event() -> None:
    contract = contract_of("get")
    event = signed({"id": "1", "type": "paid"})

    assert "no handshake" in refusal(contract, posted(event.body, method="GET"))


def test_a_proof_is_made_with_the_secret_that_matched() -> None:
    contract = contract_of("proof", secrets=(Secret("env:OLD", b"an older one"),))

    given = shaken(contract, signed({"event": "validate", "plain": 'a"b\\c'}))

    proof = hmac.new(KEY, b'a"b\\c', "sha256").hexdigest()
    assert json.loads(given.body) == {"plain": 'a"b\\c', "proof": proof}


def test_an_unsigned_ping_is_answered_and_a_signed_delivery_is_not_taken_for_one() -> None:
    contract = contract_of("ping")

    assert shaken(contract, posted(b"webhook_id=4")).body == b""
    assert "no signature" in refusal(contract, posted(b"webhook_id=4", {"X-Signature": "ab"}))
    # There and empty is not absent.
    assert "is missing" in refusal(contract, posted(b"webhook_id=4", {"X-Signature": ""}))


def test_a_large_body_is_not_looked_into_before_it_is_verified() -> None:
    body = b"webhook_id=4&x=" + b"x" * UNVERIFIED_BYTES_MAX

    assert "is missing" in refusal(contract_of("ping"), posted(body))


def test_a_secret_is_captured_while_the_source_is_armed() -> None:
    given = shaken(contract_of("capture", armed=True), posted(b"", {"X-Hook-Secret": "b5372"}))

    assert given.captured == b"b5372"
    assert ("X-Hook-Secret", "b5372") in given.all_headers
    assert "b5372" not in repr(given)


def test_an_unarmed_source_captures_nothing_and_says_how_to_arm_it() -> None:
    detail = refusal(contract_of("capture"), posted(b"{}", {"X-Hook-Secret": "b5372"}))

    assert "`receiver sources arm it`" in detail
    assert "b5372" not in detail


def test_a_signed_event_counts_though_it_offers_a_secret_to_an_unarmed_source() -> None:
    event = signed({"id": "1", "type": "paid"})
    offering = posted(
        event.body, {**{n.decode(): v.decode() for n, v in event.headers}, "X-Hook-Secret": "mine"}
    )

    judged = verify(contract_of("capture"), offering)

    assert isinstance(judged, tuple)
    assert judged[0].event_id == "1"


def test_a_secret_that_is_known_already_is_answered_and_not_captured_again() -> None:
    known = (Secret("captured:1", b"b5372"),)

    given = shaken(contract_of("capture", secrets=known), posted(b"", {"X-Hook-Secret": "b5372"}))

    assert (given.status, given.captured) == (200, None)


def test_a_secret_that_is_too_long_is_not_captured() -> None:
    delivery = posted(b"", {"X-Hook-Secret": "x" * 600})

    assert "at most 512" in refusal(contract_of("capture", armed=True), delivery)


def test_a_verdict_tells_of_a_handshake_as_if_armed() -> None:
    judged = verdict(contract_of("capture"), posted(b"", {"X-Hook-Secret": "b5372"}))

    assert (judged.verdict, judged.status, judged.response) == ("handshake", 200, "")
    assert ("X-Hook-Secret", "b5372") in (judged.headers or ())


def test_a_verdict_needs_no_secret_for_a_handshake_that_needs_none() -> None:
    contract = Contract("it", "it", parse(SIGNED | {"handshakes": [SHAKES["ping"]]}), ())

    assert verdict(contract, posted(b"webhook_id=4")).verdict == "handshake"
    assert verdict(contract, signed({"id": "1", "type": "a"})).verdict == "unverified"


@pytest.mark.parametrize(
    ("shake", "problem"),
    [
        ({}, "handshakes[0].when: must be a table"),
        ({"when": {"method": "POST"}}, "handshakes[0].when: must say how"),
        ({"when": {"method": "PUT", "query:a": "*"}}, "method must be one of POST, GET, HEAD"),
        ({"when": {"cookie:a": "*"}}, "'cookie:a' is no place"),
        ({"when": {"json:/a": 1.5}}, "json:/a must be a text, a whole number"),
        ({"when": {"json:/a": {"secret": ""}}}, "json:/a must be a text"),
        ({"when": {"json:/a": "b"}, "status": 302}, "status: must be a status from 200 to 299"),
        ({"when": {"json:/a": "b"}, "status": True}, "status: must be a status"),
        ({"when": {"json:/a": "b"}, "body": "{jsn:/a}"}, "'jsn:/a' is no place"),
        ({"when": {"json:/a": "b"}, "body": "é"}, "body: must be a text of printable ASCII"),
        ({"when": {"json:/a": "b"}, "body": "{hmac_hex:json:/a}"}, "needs after_verify = true"),
        ({"when": {"json:/a": "b"}, "headers": {"a b": "c"}}, "is not the name of a header"),
        ({"when": {"json:/a": "b"}, "headers": {"Content-Length": "1"}}, "is not the name"),
        ({"when": {"json:/a": "b"}, "status": 204, "body": "x"}, "must be empty with status 204"),
        ({"when": {"method": "GET", "query:a": "*"}, "after_verify": True}, "only a POST"),
        (
            {"when": {"json:/a": "b"}, "after_verify": True, "capture_secret": "json:/b"},
            "can't be verified yet",
        ),
        ({"when": {"json:/a": "b"}, "answer": "x"}, "handshakes[0].answer: is not a known key"),
    ],
)
def test_a_handshake_that_can_not_work_is_told_with_its_place(
    shake: dict[str, Any], problem: str
) -> None:
    with pytest.raises(PresetError) as caught:
        parse(SIGNED | {"handshakes": [shake]})

    assert problem in str(caught.value)


@FUZZ
@given(
    body=st.binary(max_size=300) | st.text(max_size=100).map(str.encode),
    query=st.text(max_size=50),
    secret=st.text(max_size=30),
    method=st.sampled_from(["POST", "GET", "HEAD", "PUT"]),
    armed=st.booleans(),
)
def test_whatever_is_sent_is_answered_judged_or_refused(
    body: bytes, query: str, secret: str, method: str, armed: bool
) -> None:
    contract = contract_of(
        *SHAKES, armed=armed, secrets=(Secret("env:T", b"t", name="verify_token"),)
    )
    url = f"https://hooks.example.com/webhooks/it?{query}"
    delivery = posted(body, {"X-Hook-Secret": secret}, method=method, url=url)

    try:
        judged = verify(contract, delivery)
    except Rejected:
        return

    assert isinstance(judged, Handshake)
    assert len(judged.body) <= ECHO_CHARS_MAX


@FUZZ
@given(
    document=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=20),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["type", "challenge", "event", "plain", "id"]), inner, max_size=4
            )
        ),
        max_leaves=8,
    ),
    type_=st.sampled_from(["hello", "validate", 0, "x"]),
)
def test_whatever_is_signed_is_answered_judged_or_refused(document: object, type_: object) -> None:
    if isinstance(document, dict):
        document |= {"type": type_, "event": type_}

    judged: object = ()
    try:
        judged = verify(contract_of(*SHAKES), signed(document))
    except Rejected as rejected:
        judged = rejected.detail

    if isinstance(judged, str):
        assert "a handshake that is not answered" in judged
    elif isinstance(judged, Handshake):
        assert judged.body.isascii()
    else:
        assert isinstance(judged, tuple)
        assert len(judged) == 1


# The senders whose handshakes no vector has


def made(name: str, headers: dict[str, str], document: object, *secrets: Secret) -> Handshake:
    preset = presets.get(name)
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return shaken(Contract(name, name, preset, secrets, armed=True), posted(body, headers))


def test_zoom_gets_the_proof_that_it_asks_for() -> None:
    body = b'{"event":"endpoint.url_validation","payload":{"plainToken":"qgg8vlvZRS6UYooatFL8Aw"}}'
    at = str(NOW_MS // 1000)
    mac = hmac.new(KEY, f"v0:{at}:".encode() + body, "sha256").hexdigest()
    headers = {"x-zm-request-timestamp": at, "x-zm-signature": f"v0={mac}"}

    given = made("zoom", headers, body, Secret("env:ZOOM", KEY))

    # developers.zoom.us/docs/api/webhooks, "Validate your webhook endpoint"
    proof = hmac.new(KEY, b"qgg8vlvZRS6UYooatFL8Aw", "sha256").hexdigest()
    assert json.loads(given.body) == {
        "plainToken": "qgg8vlvZRS6UYooatFL8Aw",
        "encryptedToken": proof,
    }
    assert (given.status, given.content_type) == (200, "application/json")


def test_asana_gets_its_secret_back() -> None:
    given = made("asana", {"X-Hook-Secret": "b537207f"}, b"")

    assert (given.status, given.body, given.captured) == (200, b"", b"b537207f")
    assert ("X-Hook-Secret", "b537207f") in given.all_headers


def test_githubs_ping_is_answered_only_if_the_body_is_one_too() -> None:
    def ping(document: dict[str, object]) -> Delivery:
        body = json.dumps(document).encode()
        mac = hmac.new(KEY, body, "sha256").hexdigest()
        headers = {"X-GitHub-Event": "ping", "X-GitHub-Delivery": "d-1"}
        return posted(body, headers | {"X-Hub-Signature-256": f"sha256={mac}"})

    github = Contract("github", "github", presets.get("github"), (Secret("env:HUB", KEY),))

    assert shaken(github, ping({"zen": "x", "hook_id": 1})).status == 200
    # A push that is sent again as a ping, by whoever saw it, must not vanish.
    assert isinstance(verify(github, ping({"ref": "refs/heads/main"})), tuple)


def test_every_handshake_of_the_senders_is_a_rule_that_can_be_met() -> None:
    talkers = {name for name in presets.names() if presets.get(name).handshakes}

    assert talkers == {
        *("asana", "discord", "dropbox", "github", "intercom", "meta", "notion", "slack"),
        *("twitch", "woocommerce", "zoom"),
    }


@pytest.mark.parametrize(
    ("name", "accepted", "rejected"),
    [
        ("adyen", (200, b"[accepted]"), (401, b"rejected\n")),
        ("discord", (204, b""), (401, b"rejected\n")),
        ("slack", (200, b""), (401, b"rejected\n")),
        ("twilio", (204, b""), (401, b"rejected\n")),
        ("xero", (200, b""), (401, b"")),
        ("stripe", (200, b"done\n"), (401, b"rejected\n")),
    ],
)
def test_each_sender_gets_the_answers_that_it_looks_at(
    name: str, accepted: tuple[int, bytes], rejected: tuple[int, bytes]
) -> None:
    preset = presets.get(name)
    taken = app.outcome_answer(preset, Outcome("done"))
    refused = app.wished(preset, "rejected", app.REJECTED)
    again = app.outcome_answer(preset, Outcome("pending", retry=True))

    assert (taken.status, taken.body) == accepted
    assert (refused.status, refused.body) == rejected
    # What is not stored for certain is never a 2xx, whatever a sender would like.
    assert again.status == 503


def test_an_allow_list_never_ends_postmarks_retries() -> None:
    assert app.wished(presets.get("postmark"), "forbidden", app.FORBIDDEN).status == 401
    assert app.wished(presets.get("stripe"), "forbidden", app.FORBIDDEN).status == 403


def test_an_empty_batch_of_a_sender_that_signs_each_element_proves_nothing() -> None:
    adyen = Contract("adyen", "adyen", presets.get("adyen"), (Secret("env:A", b"ab" * 32),))

    for body in (b'{"live": "false", "notificationItems": []}', b"{}", b"[]", b""):
        assert refusal(adyen, posted(body))
