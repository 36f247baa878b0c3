"""Why a delivery was refused: what changed on the way is named, whatever the sender's family."""

import base64
import gzip
import hmac
import json
import urllib.parse
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from receiver import presets, variations
from receiver.explain import Clocks, Finding, explain, explain_unkept
from receiver.signing import sign
from receiver.verify import Contract, Delivery, Rejected, Secret, verify
from tests.conftest import NOW_MS

KEY = base64.b64encode(b"a key of the tests, 32 bytes....").decode()
SECRETS = {
    "stripe": b"whsec_of_the_tests",
    "github": b"of the hook",
    "shopify": b"shpss_of_the_tests",
    "standard-webhooks": f"whsec_{KEY}".encode(),
    "own": b"of the feedback",
    "called": b"of the calls",
}
OWN = {
    "sig": "header:X-Feedback-Signature",
    "algo": "sha256",
    "enc": "base64",
    "signed": "{body}",
    "event_id": "json:/id",
}
CALLED = OWN | {"signed": "{url}{body}"}
FAMILIES = tuple(SECRETS)
URL = "https://hooks.example.com/webhooks/sender"
DOCUMENT = {"id": "evt_1", "type": "a.b", "text": "né </b> & more", "amount": 500, "list": [1, {}]}
PRETTY = json.dumps(DOCUMENT, indent=2, ensure_ascii=False).encode() + b"\n"
COMPACT = json.dumps(DOCUMENT, separators=(",", ":")).encode()


def contract_of(family: str, *secrets: bytes, **more: Any) -> Contract:
    if family in ("own", "called"):
        preset = presets.parse(CALLED if family == "called" else OWN)
    else:
        preset = presets.get(family)
    values = secrets or (SECRETS[family],)
    return Contract(
        source=family,
        identity=family,
        preset=preset,
        secrets=tuple(Secret(f"env:{family.upper()}_{n}", v) for n, v in enumerate(values)),
        **more,
    )


def delivery_of(family: str, body: bytes, *, url: str = URL, at_ms: int = NOW_MS) -> Delivery:
    """What the sender would send."""
    preset = contract_of(family).preset
    headers = sign(
        preset, SECRETS[family], body, now_ms=at_ms, event_id="evt_1", type="a.b", url=url
    )
    pairs = tuple((name.lower().encode(), value.encode()) for name, value in headers)
    return Delivery("POST", url, pairs, body, NOW_MS)


def changed(delivery: Delivery, **fields: Any) -> Delivery:
    return msgspec.structs.replace(delivery, **fields)


def only(found: tuple[Finding, ...]) -> Finding:
    assert len(found) == 1, found
    return found[0]


def rewrite(**options: Any) -> Callable[[bytes], bytes]:
    return lambda body: json.dumps(json.loads(body), **options).encode()


def go_style(body: bytes) -> bytes:
    return COMPACT.replace(b"<", b"\\u003c").replace(b">", b"\\u003e").replace(b"&", b"\\u0026")


CHANGES: list[tuple[bytes, Callable[[bytes], bytes], str]] = [
    (PRETTY, bytes.strip, "trimmed"),
    (COMPACT, lambda body: body + b"\n", "without the newline"),
    (COMPACT, lambda body: b"  " + body, "without the white space"),
    (b"\xef\xbb\xbf" + COMPACT, lambda body: body[3:], "byte order mark"),
    (PRETTY, lambda body: body.replace(b"\n", b"\r\n"), "with LF for its CRLF"),
    (PRETTY.replace(b"\n", b"\r\n"), lambda body: body.replace(b"\r\n", b"\n"), "with CRLF"),
    (COMPACT, rewrite(indent=4), "compact JSON"),
    (PRETTY, rewrite(), "pretty JSON"),
    (COMPACT, rewrite(sort_keys=True, separators=(",", ":")), "unexplained"),
    (json.dumps(DOCUMENT, sort_keys=True).encode(), lambda body: COMPACT, "keys sorted"),
    (go_style(COMPACT), lambda body: COMPACT, "HTML characters escaped"),
    (COMPACT.replace(b"/", b"\\/"), lambda body: COMPACT, "slashes escaped"),
    (COMPACT, gzip.compress, "gunzipped"),
    (gzip.compress(COMPACT, 6, mtime=0), gzip.decompress, "gzipped"),
    (COMPACT, base64.b64encode, "base64"),
    (COMPACT, lambda body: json.dumps(body.decode()).encode(), "JSON string"),
    (COMPACT, lambda body: urllib.parse.quote_plus(body).encode(), "form-decoded"),
    (
        b"payload=" + urllib.parse.quote_plus(COMPACT).encode(),
        lambda body: COMPACT,
        "form-encoded",
    ),
    (PRETTY, lambda body: body.decode().encode("latin-1"), "in utf-8 for latin-1"),
    (b"", lambda body: b"{}", "an empty body"),
    (COMPACT, lambda body: body.replace(b"500", b"900"), "unexplained"),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("sent", "change", "words"), CHANGES)
def test_what_changed_the_body_on_the_way_is_named(
    family: str, sent: bytes, change: Callable[[bytes], bytes], words: str
) -> None:
    delivery = delivery_of(family, sent)
    received = changed(delivery, body=change(sent))

    found = only(explain(contract_of(family), received))

    assert words in (found.words if found.cause == "body-changed" else found.cause)
    with pytest.raises(Rejected):
        verify(contract_of(family), received)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_delivery_that_is_accepted_now_is_said_to_be(family: str) -> None:
    assert only(explain(contract_of(family), delivery_of(family, COMPACT))).cause == "valid"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_signature_header_is_named(family: str) -> None:
    delivery = delivery_of(family, COMPACT)
    telling = ("signature", "hmac")
    headers = [pair for pair in delivery.headers if not any(w in pair[0].decode() for w in telling)]

    found = only(explain(contract_of(family), changed(delivery, headers=headers)))

    assert found.cause == "missing-header"
    assert "is missing" in found.words
    names = [name.decode() for name, _ in headers]
    assert explain_unkept(contract_of(family).preset, names, 9)[0].cause == "missing-header"


def test_headers_of_another_sender_are_recognised() -> None:
    found = only(explain(contract_of("stripe"), delivery_of("github", COMPACT)))

    assert found.cause == "missing-header"
    assert "look like those of github" in found.words


FORMS = [
    ("stripe", lambda value: value + b"\n", "without the white space"),
    ("stripe", lambda value: b'"' + value + b'"', "without the quotes"),
    ("stripe", lambda value: b"v1," + value, "without its v1,"),
    ("stripe", lambda value: value.removeprefix(b"whsec_"), "with whsec_ before it"),
    ("github", base64.b64encode, "decoded from base64"),
    ("github", lambda value: value.hex().encode(), "decoded from hexadecimal"),
    ("shopify", base64.b64encode, "decoded from base64"),
    ("own", lambda value: value + b"\r\n", "without the white space"),
]


@pytest.mark.parametrize(("family", "change", "words"), FORMS)
def test_the_wrong_form_of_a_secret_is_named_and_never_the_secret(
    family: str, change: Callable[[bytes], bytes], words: str
) -> None:
    wrong = change(SECRETS[family])

    found = only(explain(contract_of(family, wrong), delivery_of(family, COMPACT)))

    assert found.cause == "secret-form"
    assert words in found.words
    assert f"env:{family.upper()}_0" in found.words
    assert SECRETS[family].decode() not in found.words


def test_a_sender_that_uses_the_text_of_a_secret_is_told_from_one_that_decodes_it() -> None:
    delivery = delivery_of("standard-webhooks", COMPACT)
    content = b"evt_1.%d.%b" % (NOW_MS // 1000, COMPACT)
    digest = hmac.digest(SECRETS["standard-webhooks"], content, "sha256")
    headers = [
        (name, b"v1," + base64.b64encode(digest) if name == b"webhook-signature" else value)
        for name, value in delivery.headers
    ]

    found = only(explain(contract_of("standard-webhooks"), changed(delivery, headers=headers)))

    assert (found.cause, "used as it is" in found.words) == ("secret-form", True)


def test_the_secret_of_another_source_is_named() -> None:
    here, other = contract_of("own", b"swapped"), contract_of("github", SECRETS["own"])

    found = only(explain(here, delivery_of("own", COMPACT), [other]))

    assert found.cause == "other-secret"
    assert "env:GITHUB_0, a secret of source github" in found.words


def test_a_delivery_that_belongs_to_another_source_is_recognised() -> None:
    sent = delivery_of("github", COMPACT)
    both = changed(sent, headers=[*sent.headers, (b"x-feedback-signature", b"AAAA")])

    found = only(explain(contract_of("own"), both, [contract_of("github")]))

    assert (found.cause, "source github" in found.words) == ("other-source", True)


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/webhooks/shop/%74he-secret-in-the-url", {}),
        ("/webhooks/shop", {"x-original-uri": "/webhooks/shop/the-secret-in-the-url"}),
    ],
)
def test_a_secret_in_a_url_that_was_rewritten_is_never_told(
    path: str, headers: dict[str, str]
) -> None:
    secrets = (Secret("env:SHOP", b"the-secret-in-the-url"),)
    contract = Contract("shop", "shop", presets.get("gumroad"), secrets)
    pairs = tuple((name.encode(), value.encode()) for name, value in headers.items())
    url = f"https://hooks.example.com{path}"

    found = only(explain(contract, Delivery("POST", url, pairs, b"sale_id=1", NOW_MS)))

    assert found.cause == "url-differs"
    assert "secret-in-the-url" not in found.words


@pytest.mark.parametrize(
    ("seen", "headers", "differs"),
    [
        ("http://hooks.example.com/webhooks/sender", {}, "(scheme differ)"),
        ("https://hooks.example.com:8443/webhooks/sender", {}, "(host or port differ)"),
        ("https://hooks.example.com/webhooks/sender/", {}, "(path differ)"),
        ("https://hooks.example.com/webhooks/sender?a=1", {}, "(query differ)"),
        ("http://127.0.0.1:8080/webhooks/sender", {"host": "hooks.example.com"}, "host or port"),
        ("http://10.0.0.2/webhooks/sender", {"x-forwarded-host": "hooks.example.com"}, "scheme"),
        ("https://hooks.example.com/sender", {"x-forwarded-prefix": "/webhooks"}, "(path differ)"),
        ("https://hooks.example.com/x", {"x-original-uri": "/webhooks/sender"}, "(path differ)"),
    ],
)
def test_another_url_behind_the_proxy_is_named(
    seen: str, headers: dict[str, str], differs: str
) -> None:
    sent = delivery_of("called", COMPACT)
    more = [(name.encode(), value.encode()) for name, value in headers.items()]

    found = only(
        explain(contract_of("called"), changed(sent, url=seen, headers=[*sent.headers, *more]))
    )

    assert found.cause == "url-differs"
    assert differs in found.words
    assert URL in found.words
    assert "sources.called.public_url" in found.words


def test_the_wrong_algorithm_or_encoding_of_a_scheme_is_named() -> None:
    content = hmac.new(SECRETS["own"], COMPACT, "sha512").hexdigest().upper()
    headers = [(b"x-feedback-signature", content.encode())]

    found = only(explain(contract_of("own"), Delivery("POST", URL, headers, COMPACT, NOW_MS)))

    assert (found.cause, "sha512 in hex" in found.words) == ("encoding-differs", True)


def test_without_a_secret_that_is_the_reason() -> None:
    bare = msgspec.structs.replace(contract_of("github"), secrets=())

    assert only(explain(bare, delivery_of("github", COMPACT))).cause == "no-secret"


@pytest.mark.parametrize("family", ["stripe", "standard-webhooks"])
@pytest.mark.parametrize(
    ("off_s", "clocks", "cause", "words"),
    [
        (400, {}, "some-clock", "this machine's clock is ahead or the sender's is behind"),
        (-400, {}, "some-clock", "this machine's clock is behind or the sender's is ahead"),
        (400, {"skews": [("HERE", 400), ("other", 420)]}, "our-clock", "deliveries of other"),
        (400, {"accepted": {"HERE": 9}}, "this-delivery", "held up on the way or sent again"),
        (
            400,
            {"accepted": {"other": 9}, "skews": [("HERE", 400), ("HERE", 410), ("HERE", 380)]},
            "their-clock",
            "the sender's clock is behind",
        ),
        (
            400,
            {"accepted": {"other": 9}, "skews": [("HERE", 400), ("other", -400)]},
            "this-delivery",
            "9 of other",
        ),
    ],
)
def test_which_clock_is_off_is_judged_by_what_else_came(
    family: str, off_s: int, clocks: dict[str, Any], cause: str, words: str
) -> None:
    def here(name: str) -> str:
        return family if name == "HERE" else name

    seen = Clocks(
        now_ms=NOW_MS,
        skews=[(here(name), skew_s) for name, skew_s in clocks.get("skews", [])],
        accepted={here(name): count for name, count in clocks.get("accepted", {}).items()},
    )
    delivery = delivery_of(family, COMPACT, at_ms=NOW_MS - off_s * 1000)

    said, which, now = explain(contract_of(family), delivery, clocks=seen)

    assert said.cause == ("late" if off_s > 0 else "early")
    assert "the signature is right" in said.words
    assert "400 s" in said.words
    assert which.cause == cause
    assert words in which.words
    assert "2027-01-15T08:00:00" in now.words


SHAPES = (
    b"a secret of the tests",
    b"whsec_" + KEY.encode(),
    KEY.encode(),
    b"user:word",
    b"ab" * 32,
)
LISTED = json.dumps({"id": "evt_1", "type": "a.b", "data": [{"id": "x"}]}).encode()


def signed_by(name: str) -> tuple[Contract, Delivery] | None:
    """A delivery of a shipped sender; None where only the sender can make one."""
    preset = presets.get(name)
    for secret in SHAPES:
        here = Contract(name, name, preset, (Secret("env:S", secret),))
        try:
            headers = sign(
                preset, secret, LISTED, now_ms=NOW_MS, event_id="evt_1", type="a.b", url=URL
            )
            pairs = tuple((key.lower().encode(), value.encode()) for key, value in headers)
            delivery = Delivery("POST", URL, pairs, LISTED, NOW_MS)
            verify(here, delivery)
        except (ValueError, Rejected):
            continue
        return here, delivery
    return None


SIGNED = {name: pair for name in presets.names() if (pair := signed_by(name)) is not None}


@pytest.mark.parametrize("name", SIGNED)
def test_every_shipped_sender_that_signs_its_body_is_explained(name: str) -> None:
    here, sent = SIGNED[name]
    # Where the secret itself is sent, nothing of the body is proved.
    bearer = any(scheme.algo in presets.BEARERS for scheme in here.preset.schemes)

    added = only(explain(here, changed(sent, body=LISTED + b"\n")))
    forged = only(explain(here, changed(sent, body=LISTED.replace(b"evt_1", b"evt_9"))))
    other = only(
        explain(msgspec.structs.replace(here, secrets=(Secret("env:T", b"ff" * 32),)), sent, [here])
    )

    causes = (added.cause, forged.cause)
    assert causes == ("body-changed", "unexplained") or (bearer and causes == ("valid", "valid"))
    assert other.cause == "other-secret"


def test_a_body_too_large_to_vary_is_not_varied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variations, "BODY_BYTES_MAX", 3)

    assert list(variations.bodies(b"1234")) == []


def test_a_small_body_never_unpacks_into_a_large_one() -> None:
    bomb = gzip.compress(b"0" * (variations.BODY_BYTES_MAX + 1))

    assert all(len(guess) < len(bomb) * 4 for _, guess in variations.bodies(bomb))


def test_a_body_that_was_not_kept_is_judged_by_what_was() -> None:
    preset = contract_of("github").preset
    names = ["x-hub-signature-256"]

    assert explain_unkept(preset, names, 40) == []
    assert [one.cause for one in explain_unkept(preset, names, 0)] == ["body-changed"]


@given(
    family=st.sampled_from(FAMILIES),
    body=st.binary(max_size=60) | st.text(max_size=30).map(str.encode),
    headers=st.lists(
        st.tuples(
            st.sampled_from(
                ["x-hub-signature-256", "stripe-signature", "host", "x-forwarded-host"]
            ),
            st.text(st.characters(max_codepoint=255), max_size=30),
        ),
        max_size=4,
    ),
    url=st.text(max_size=30),
)
def test_whatever_is_refused_has_an_explanation(
    family: str, body: bytes, headers: list[tuple[str, str]], url: str
) -> None:
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers]

    found = explain(contract_of(family), Delivery("POST", url, pairs, body, NOW_MS))

    assert found
    assert all(one.words and SECRETS[family].decode() not in one.words for one in found)
