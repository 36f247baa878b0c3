"""The same with the senders' JavaScript libraries."""

import time

import pytest

from receiver import presets
from tests.keys import keys_of
from tests.sdks.node import Node
from tests.sdks.test_python import JSON_BODY, TYPE, accepts, lower, signed_by_us
from tests.sdks.test_python import Ours as Ours


def ours(name: str) -> tuple[str, dict[str, str], str, str]:
    """A secret, headers and a body that we signed, and the body changed."""
    keys = keys_of(presets.get(name))
    sample = signed_by_us(name, keys)
    body = sample.body.decode()
    changed = body.replace("{", "{ ", 1)
    return keys.secret.decode(), dict(sample.headers), body, changed


def test_octokit_takes_what_we_sign(node: Node) -> None:
    secret, headers, body, changed = ours("github")
    signature = headers["X-Hub-Signature-256"]

    assert node("octokitVerify", secret=secret, body=body, signature=signature) is True
    assert node("octokitVerify", secret=secret, body=changed, signature=signature) is False


def test_we_take_what_octokit_signs(node: Node) -> None:
    keys = keys_of(presets.get("github"))
    signature = node("octokitSign", secret=keys.secret.decode(), body=JSON_BODY)
    headers = {
        "X-Hub-Signature-256": signature,
        "X-GitHub-Delivery": "d-1",
        "X-GitHub-Event": "push",
    }

    assert accepts("github", keys, headers, JSON_BODY.encode())
    assert not accepts("github", keys, headers, JSON_BODY.encode() + b" ")


@pytest.mark.parametrize("family", ["X-Shopify-", "shopify-"])
def test_shopify_takes_what_we_sign(node: Node, family: str) -> None:
    secret, headers, body, changed = ours("shopify")
    known = {
        f"{family}Hmac-Sha256": headers["X-Shopify-Hmac-Sha256"],
        f"{family}Topic": "orders/paid",
        f"{family}Shop-Domain": "example.myshopify.com",
        f"{family}API-Version": "2025-07",
        f"{family}Webhook-Id": "w-1",
        f"{family}Event-Id": "e-1",
        f"{family}Handle": "h",
        f"{family}Action": "create",
        f"{family}Resource-Id": "1",
    }

    assert node("shopifyVerify", secret=secret, body=body, headers=known) is True
    assert node("shopifyVerify", secret=secret, body=changed, headers=known) is False


def test_discord_takes_what_we_sign(node: Node) -> None:
    public, headers, body, changed = ours("discord")
    known = {
        "publicKey": public,
        "signature": headers["X-Signature-Ed25519"],
        "timestamp": headers["X-Signature-Timestamp"],
    }

    assert node("discordVerify", body=body, **known) is True
    assert node("discordVerify", body=changed, **known) is False


def test_standard_webhooks_takes_what_we_sign(node: Node) -> None:
    secret, headers, body, changed = ours("standard-webhooks")
    named = lower(Ours(secret, headers, body.encode()))

    assert node("standardVerify", secret=secret, body=body, headers=named) is True
    assert node("standardVerify", secret=secret, body=changed, headers=named) is False


def test_we_take_what_standard_webhooks_signs(node: Node) -> None:
    keys = keys_of(presets.get("standard-webhooks"))
    secret, at_s = keys.secret.decode(), int(time.time())
    signature = node("standardSign", secret=secret, body=JSON_BODY, id="msg_1", timestamp=at_s)
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(at_s),
        "webhook-signature": signature,
    }

    assert TYPE in JSON_BODY
    assert accepts("standard-webhooks", keys, headers, JSON_BODY.encode())
    assert not accepts("standard-webhooks", keys, headers, JSON_BODY.encode() + b" ")
