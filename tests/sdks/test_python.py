"""What we sign, the sender's own Python library takes; what it signs, we take."""

import base64
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

import pytest
import razorpay as razorpay_sdk
import stripe as stripe_sdk
from Adyen.util import (
    generate_notification_sig,
    generate_payload_sig,
    is_valid_hmac_notification,
    is_valid_hmac_payload,
)
from gocardless_pro import webhooks as gocardless_webhooks
from paddle_billing.Notifications import PaddleSignature, Verifier
from paddle_billing.Notifications import Secret as PaddleSecret
from sendgrid.helpers.eventwebhook import EventWebhook, EventWebhookHeader
from slack_sdk.signature import SignatureVerifier
from square.utils.webhooks_helper import verify_signature
from standardwebhooks import Webhook
from svix.webhooks import Webhook as SvixWebhook
from twilio.request_validator import HMAC_SHA256, RequestValidator
from workos.webhooks._verification import verify_header

from receiver import presets, samples
from receiver.config import Source
from receiver.samples import Sample, Wish
from receiver.verify import Contract, Delivery, Rejected, Secret, verify
from tests.keys import Keys, keys_of

URL = "https://hooks.example.com/webhooks/x"
TYPE = "invoice.paid"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def source_of(name: str, keys: Keys) -> Source:
    secrets = (Secret("file:secret", keys.secret),)
    return Source("x", name, Contract("x", "x", presets.get(name), secrets))


def accepts(name: str, keys: Keys, headers: dict[str, str], body: bytes, url: str = URL) -> bool:
    """Whether we take it."""
    pairs = tuple((n.lower().encode(), v.encode()) for n, v in headers.items())
    try:
        verify(source_of(name, keys).contract, Delivery("POST", url, pairs, body, now_ms()))
    except Rejected:
        return False
    return True


class Ours(NamedTuple):
    """A delivery that we signed, as the libraries want it."""

    secret: str
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


def true(call: Callable[[], object]) -> bool:
    """Whether a library that says so by raising takes it; anything but False counts as yes."""
    try:
        return call() is not False
    except Exception:
        return False


# How each library judges a delivery.


def stripe(given: Ours) -> bool:
    header = given.headers["Stripe-Signature"]
    return true(lambda: stripe_sdk.Webhook.construct_event(given.body, header, given.secret))


def standard_webhooks(given: Ours) -> bool:
    return true(lambda: Webhook(given.secret).verify(given.body, lower(given)))


def svix(given: Ours) -> bool:
    return true(lambda: SvixWebhook(given.secret).verify(given.body, lower(given)))


def slack(given: Ours) -> bool:
    stamp = given.headers["X-Slack-Request-Timestamp"]
    signature = given.headers["X-Slack-Signature"]
    return bool(SignatureVerifier(given.secret).is_valid(given.body, stamp, signature))


def twilio(given: Ours) -> bool:
    parameters = dict(parse_qsl(given.text, keep_blank_values=True))
    signature = given.headers["X-Twilio-Signature"]
    return bool(RequestValidator(given.secret).validate(URL, parameters, signature))


def paddle(given: Ours) -> bool:
    return true(lambda: Verifier().verify(given, PaddleSecret(given.secret)))


def square(given: Ours) -> bool:
    found = verify_signature(
        request_body=given.text,
        signature_header=given.headers["x-square-hmacsha256-signature"],
        signature_key=given.secret,
        notification_url=URL,
    )
    return bool(found)


def razorpay(given: Ours) -> bool:
    client = razorpay_sdk.Client(auth=("id", "secret"))
    signature = given.headers["X-Razorpay-Signature"]
    return true(
        lambda: client.utility.verify_webhook_signature(given.text, signature, given.secret)
    )


def sendgrid(given: Ours) -> bool:
    signature = given.headers[EventWebhookHeader.SIGNATURE]
    stamp = given.headers[EventWebhookHeader.TIMESTAMP]
    return bool(EventWebhook(given.secret).verify_signature(given.text, signature, stamp))


def gocardless(given: Ours) -> bool:
    # It parses the events first of all.
    return true(
        lambda: gocardless_webhooks._verify_signature(given.text, given.secret, header(given))
    )


def workos(given: Ours) -> bool:
    return true(
        lambda: verify_header(
            event_body=given.body, event_signature=header(given), secret=given.secret
        )
    )


def adyen(given: Ours) -> bool:
    return bool(is_valid_hmac_notification(json.loads(given.body), given.secret))


def adyen_platform(given: Ours) -> bool:
    return bool(is_valid_hmac_payload(given.headers["HmacSignature"], given.secret, given.body))


def lower(given: Ours) -> dict[str, str]:
    return {name.lower(): value for name, value in given.headers.items()}


def header(given: Ours) -> str:
    """The one header with Signature in its name."""
    (found,) = (value for name, value in given.headers.items() if "signature" in name.lower())
    return found


JUDGES: dict[str, Callable[[Ours], bool]] = {
    "stripe": stripe,
    "standard-webhooks": standard_webhooks,
    "svix": svix,
    "clerk": svix,
    "resend": svix,
    "openai": standard_webhooks,
    "slack": slack,
    "twilio": twilio,
    "paddle": paddle,
    "square": square,
    "razorpay": razorpay,
    "sendgrid": sendgrid,
    "gocardless": gocardless,
    "workos": workos,
    "adyen": adyen,
    "adyen-platform": adyen_platform,
}


def signed_by_us(name: str, keys: Keys) -> Sample:
    wish = Wish(type=TYPE, token="a1" * 12, now_ms=now_ms())
    return samples.make(source_of(name, keys), wish, URL, keys.private)


def changed(name: str, body: bytes) -> bytes:
    """The same with another meaning: a form stays one, and JSON too."""
    if name == "adyen":
        return body.replace(b"2000", b"2001")
    return body.replace(TYPE.encode(), b"void") if name == "twilio" else body + b" "


@pytest.mark.parametrize("name", JUDGES)
def test_the_library_takes_what_we_sign_and_nothing_that_was_changed(name: str) -> None:
    keys = keys_of(presets.get(name))
    other = keys_of(presets.get(name), b"2")
    sample = signed_by_us(name, keys)
    ours = Ours(keys.secret.decode(), dict(sample.headers), sample.body)
    judge = JUDGES[name]

    assert judge(ours)
    assert not judge(ours._replace(body=changed(name, sample.body)))
    assert not judge(ours._replace(secret=other.secret.decode()))


# What the libraries sign.


def by_stripe(secret: str, body: str) -> dict[str, str]:
    return {"Stripe-Signature": stripe_sdk.WebhookSignature.generate_signature_header(body, secret)}


def by_standard_webhooks(secret: str, body: str) -> dict[str, str]:
    at = datetime.now(UTC)
    signature = Webhook(secret).sign("msg_1", at, body)
    stamp = str(int(at.timestamp()))
    return {"webhook-id": "msg_1", "webhook-timestamp": stamp, "webhook-signature": signature}


def by_svix(secret: str, body: str) -> dict[str, str]:
    at = datetime.now(UTC)
    signature = SvixWebhook(secret).sign("msg_1", at, body)
    stamp = str(int(at.timestamp()))
    return {"svix-id": "msg_1", "svix-timestamp": stamp, "svix-signature": signature}


def by_slack(secret: str, body: str) -> dict[str, str]:
    stamp = str(int(time.time()))
    signature = SignatureVerifier(secret).generate_signature(timestamp=stamp, body=body)
    return {"X-Slack-Request-Timestamp": stamp, "X-Slack-Signature": signature or ""}


def by_twilio(secret: str, body: str) -> dict[str, str]:
    parameters = dict(parse_qsl(body, keep_blank_values=True))
    signature = RequestValidator(secret).compute_signature(URL, parameters)
    return {"X-Twilio-Signature": signature}


def by_twilio_shared_key(secret: str, body: str) -> dict[str, str]:
    parameters = dict(parse_qsl(body, keep_blank_values=True))
    signature = RequestValidator(secret).compute_signature(URL, parameters, HMAC_SHA256)
    settings = f"key=webhooks_sharedkey_1,algorithm={HMAC_SHA256}"
    return {
        "X-Twilio-Signature": signature,
        "X-Twilio-Webhooks-Signature-Settings": settings,
    }


def by_paddle(secret: str, body: str) -> dict[str, str]:
    stamp = int(time.time())
    digest = PaddleSignature.calculate_hmac(secret, f"{stamp}:{body}".encode()).hexdigest()
    return {"Paddle-Signature": f"ts={stamp};h1={digest}"}


def by_adyen_platform(secret: str, body: str) -> dict[str, str]:
    return {"HmacSignature": generate_payload_sig(body.encode(), secret).decode()}


JSON_BODY = json.dumps({"id": "evt_1", "type": TYPE, "text": "Zoë 🦄 a/b"}, ensure_ascii=False)
FORM_BODY = urlencode({"MessageSid": "SM1", "MessageStatus": "sent", "Body": "Zoë 🦄", "Empty": ""})
SIGNERS: list[tuple[str, Callable[[str, str], dict[str, str]], str]] = [
    ("stripe", by_stripe, JSON_BODY),
    ("standard-webhooks", by_standard_webhooks, JSON_BODY),
    ("openai", by_standard_webhooks, JSON_BODY),
    ("svix", by_svix, JSON_BODY),
    ("clerk", by_svix, JSON_BODY),
    ("resend", by_svix, JSON_BODY),
    ("slack", by_slack, JSON_BODY),
    ("twilio", by_twilio, FORM_BODY),
    ("twilio", by_twilio_shared_key, FORM_BODY),
    ("paddle", by_paddle, JSON_BODY),
    ("adyen-platform", by_adyen_platform, JSON_BODY),
]


@pytest.mark.parametrize(
    ("name", "sign", "body"), SIGNERS, ids=[f"{name}-{by.__name__}" for name, by, _ in SIGNERS]
)
def test_we_take_what_the_library_signs_and_nothing_that_was_changed(
    name: str, sign: Callable[[str, str], dict[str, str]], body: str
) -> None:
    keys = keys_of(presets.get(name))
    other = keys_of(presets.get(name), b"2")
    headers = sign(keys.secret.decode(), body)

    assert accepts(name, keys, headers, body.encode())
    assert not accepts(name, keys, headers, body.encode().replace(b"Zo", b"Zu"))
    assert not accepts(name, other, headers, body.encode())


def test_we_take_the_items_that_adyens_library_signs() -> None:
    keys = keys_of(presets.get("adyen"))
    item: dict[str, Any] = {
        "amount": {"currency": "EUR", "value": 1130},
        "eventCode": "AUTHORISATION",
        "merchantAccountCode": "TestMerchant",
        "merchantReference": "order:7/é",
        "originalReference": "",
        "pspReference": "7914073381342284",
        "success": "true",
    }
    signature = generate_notification_sig(item, keys.secret.decode()).decode()
    item["additionalData"] = {"hmacSignature": signature}

    def document() -> bytes:
        return json.dumps({"notificationItems": [{"NotificationRequestItem": item}]}).encode()

    assert accepts("adyen", keys, {}, document())
    item["amount"]["value"] = 1131
    assert not accepts("adyen", keys, {}, document())


def test_we_take_twilios_json_whose_hash_stands_in_the_url() -> None:
    keys = keys_of(presets.get("twilio"))
    validator = RequestValidator(keys.secret.decode())
    url = f"{URL}?bodySHA256={validator.compute_hash(JSON_BODY)}"
    headers = {"X-Twilio-Signature": validator.compute_signature(url, {})}

    assert validator.validate(url, JSON_BODY, headers["X-Twilio-Signature"])
    assert accepts("twilio", keys, headers, JSON_BODY.encode(), url)
    assert not accepts("twilio", keys, headers, JSON_BODY.encode() + b" ", url)


def test_base64_is_what_the_secrets_are() -> None:
    # The keys of these tests, not the libraries, would be wrong without it.
    assert base64.b64decode(keys_of(presets.get("svix")).secret.removeprefix(b"whsec_"))
