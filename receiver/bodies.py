"""Sample bodies, as the senders write them."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import msgspec

CUSTOMER = "cus_sample"
WORKSPACE = "acme"

Json = dict[str, Any]


class Wish(msgspec.Struct, frozen=True):
    """What a sample shall be; `token` is random text that makes its ids new.

    With an `event_id` the other ids and the times follow from it: the same again is a duplicate.
    """

    type: str
    token: str
    now_ms: int
    event_id: str | None = None
    customer: str | None = None
    #: (path, value) pairs, see `change`.
    changes: Sequence[tuple[str, object]] = ()
    #: In place of the sample's body.
    body: bytes | None = None
    #: Send `body` as it is.
    exact: bool = False


# docs.stripe.com/api/events/object; the objects as of version 2025-09-30.clover, where prices
# stand in `pricing.price_details` and periods on the items of a subscription.
def _stripe(wish: Wish) -> Json:
    made = next((make for prefix, make in _STRIPE if wish.type.startswith(prefix)), _stripe_object)
    data: Json = {"object": made(wish)}
    if wish.type.endswith(".updated"):
        data["previous_attributes"] = {}
    return {
        "id": "",
        "object": "event",
        "api_version": "2025-09-30.clover",
        "created": wish.now_ms // 1000,
        "data": data,
        "livemode": False,
        "pending_webhooks": 1,
        "request": {"id": None, "idempotency_key": None},
        "type": wish.type,
    }


def _stripe_object(wish: Wish) -> Json:
    noun = wish.type.rpartition(".")[0] or wish.type
    return {"id": f"obj_{wish.token}", "object": noun, "customer": CUSTOMER, "metadata": {}}


def _checkout(wish: Wish) -> Json:
    return {
        "id": f"cs_test_{wish.token}",
        "object": "checkout.session",
        "amount_total": 2000,
        "client_reference_id": WORKSPACE,
        "created": wish.now_ms // 1000,
        "currency": "usd",
        "customer": CUSTOMER,
        "customer_details": {"email": "customer@example.com", "name": "Sample Customer"},
        "invoice": f"in_{wish.token}",
        "metadata": {},
        "mode": "subscription",
        "payment_status": "unpaid" if wish.type.endswith(".expired") else "paid",
        "status": "expired" if wish.type.endswith(".expired") else "complete",
        "subscription": f"sub_{wish.token}",
    }


def _invoice(wish: Wish) -> Json:
    action = wish.type.removeprefix("invoice.")
    paid = action in ("paid", "payment_succeeded")
    status = "paid" if paid else {"voided": "void", "created": "draft"}.get(action, "open")
    details = {"subscription": f"sub_{wish.token}", "metadata": {}}
    return {
        "id": f"in_{wish.token}",
        "object": "invoice",
        "amount_due": 2000,
        "amount_paid": 2000 if paid else 0,
        "amount_remaining": 0 if paid else 2000,
        "billing_reason": "subscription_create",
        "collection_method": "charge_automatically",
        "created": wish.now_ms // 1000,
        "currency": "usd",
        "customer": CUSTOMER,
        "customer_email": "customer@example.com",
        "lines": {"object": "list", "data": [_line(wish)], "has_more": False},
        "metadata": {},
        "number": f"SAMPLE-{wish.token[:8].upper()}",
        "parent": {"type": "subscription_details", "subscription_details": details},
        "status": status,
        "total": 2000,
    }


def _line(wish: Wish) -> Json:
    return {
        "id": f"il_{wish.token}",
        "object": "line_item",
        "amount": 2000,
        "currency": "usd",
        "description": "1 × Basic (at $20.00 / month)",  # noqa: RUF001  as Stripe writes it
        "parent": {
            "type": "subscription_item_details",
            "subscription_item_details": {
                "proration": False,
                "subscription": f"sub_{wish.token}",
                "subscription_item": f"si_{wish.token}",
            },
        },
        "period": {"start": wish.now_ms // 1000, "end": wish.now_ms // 1000 + 2_592_000},
        "pricing": {
            "type": "price_details",
            "price_details": {"price": "price_basic", "product": "prod_basic"},
            "unit_amount_decimal": "2000",
        },
        "quantity": 1,
    }


def _credit_note(wish: Wish) -> Json:
    return {
        "id": f"cn_{wish.token}",
        "object": "credit_note",
        "amount": 2000,
        "created": wish.now_ms // 1000,
        "currency": "usd",
        "customer": CUSTOMER,
        "invoice": f"in_{wish.token}",
        "metadata": {},
        "reason": "order_change",
        "status": "void" if wish.type.endswith(".voided") else "issued",
        "total": 2000,
        "type": "post_payment",
    }


def _subscription(wish: Wish) -> Json:
    started = wish.now_ms // 1000
    price = {
        "id": "price_basic",
        "object": "price",
        "currency": "usd",
        "lookup_key": "basic",
        "product": "prod_basic",
        "recurring": {"interval": "month", "interval_count": 1},
        "type": "recurring",
        "unit_amount": 2000,
    }
    item = {
        "id": f"si_{wish.token}",
        "object": "subscription_item",
        "current_period_start": started,
        "current_period_end": started + 2_592_000,
        "price": price,
        "quantity": 1,
        "subscription": f"sub_{wish.token}",
    }
    deleted = wish.type.endswith(".deleted")
    return {
        "id": f"sub_{wish.token}",
        "object": "subscription",
        "cancel_at_period_end": False,
        "canceled_at": started if deleted else None,
        "created": started,
        "currency": "usd",
        "customer": CUSTOMER,
        "items": {"object": "list", "data": [item], "has_more": False},
        "latest_invoice": f"in_{wish.token}",
        "metadata": {},
        "status": "canceled" if deleted else "active",
    }


def _customer_object(wish: Wish) -> Json:
    return {
        "id": CUSTOMER,
        "object": "customer",
        "created": wish.now_ms // 1000,
        "email": "customer@example.com",
        "metadata": {},
        "name": "Sample Customer",
    }


# docs.github.com, "Webhook events and payloads".
def _github(wish: Wish) -> Json:
    user = {"login": "octocat", "id": 583231, "type": "User"}
    repository = {
        "id": 1296269,
        "name": "hello-world",
        "full_name": "octocat/hello-world",
        "private": False,
        "owner": user,
        "html_url": "https://github.com/octocat/hello-world",
        "default_branch": "main",
    }
    made = _GITHUB.get(wish.type, _github_action)
    return made(wish) | {"repository": repository, "sender": user}


def _github_action(wish: Wish) -> Json:
    return {"action": "created"}


def _ping(wish: Wish) -> Json:
    return {
        "zen": "Keep it logically awesome.",
        "hook_id": 1,
        "hook": {"type": "Repository", "id": 1, "name": "web", "active": True, "events": ["*"]},
    }


def _push(wish: Wish) -> Json:
    after = uuid.uuid5(uuid.NAMESPACE_URL, wish.token).hex + "00000000"
    commit = {
        "id": after,
        "message": "Try the receiver out",
        "timestamp": iso(wish.now_ms),
        "author": {"name": "Octocat", "email": "octocat@example.com", "username": "octocat"},
        "added": [],
        "removed": [],
        "modified": ["README.md"],
    }
    return {
        "ref": "refs/heads/main",
        "before": "0" * 40,
        "after": after,
        "created": False,
        "deleted": False,
        "forced": False,
        "commits": [commit],
        "head_commit": commit,
        "pusher": {"name": "octocat", "email": "octocat@example.com"},
    }


def _release(wish: Wish) -> Json:
    number = _number(wish.token)
    release = {
        "id": number,
        "tag_name": "v1.0.0",
        "name": "1.0.0",
        "draft": False,
        "prerelease": False,
        "published_at": iso(wish.now_ms),
        "html_url": "https://github.com/octocat/hello-world/releases/tag/v1.0.0",
    }
    return {"action": "published", "release": release}


# shopify.dev, "Webhooks", topics orders/*: money is text, ids are numbers.
def _shopify(wish: Wish) -> Json:
    number, at = _number(wish.token), iso(wish.now_ms)
    if not wish.type.startswith("orders/"):
        return {"id": number, "created_at": at, "updated_at": at}
    return {
        "id": number,
        "admin_graphql_api_id": f"gid://shopify/Order/{number}",
        "created_at": at,
        "updated_at": at,
        "currency": "USD",
        "customer": {"id": 115310627314723954, "email": "customer@example.com"},
        "email": "customer@example.com",
        "financial_status": "paid" if wish.type == "orders/paid" else "pending",
        "line_items": [{"id": number, "title": "Sample", "quantity": 1, "price": "20.00"}],
        "name": "#1001",
        "order_number": 1001,
        "test": True,
        "total_price": "20.00",
    }


# github.com/standard-webhooks/standard-webhooks, "Payload structure".
def _standard(wish: Wish) -> Json:
    data = {"id": wish.token, "customer": CUSTOMER}
    return {"type": wish.type, "timestamp": iso(wish.now_ms), "data": data}


# www.twilio.com/docs/messaging/guides/track-outbound-message-status, and docs/voice/twiml.
def _twilio(wish: Wish) -> Json:
    shared = {"AccountSid": "AC00000000000000000000000000000000", "ApiVersion": "2010-04-01"}
    shared |= {"From": "+15005550006", "To": "+15005550009"}
    if wish.type in _CALL_STATUSES:
        call = {"CallSid": "", "CallStatus": wish.type, "SequenceNumber": "0"}
        return shared | call | {"Direction": "outbound-api"}
    return shared | {"MessageSid": "", "MessageStatus": wish.type}


# docs.adyen.com/development-resources/webhooks/webhook-types; one item of a notification.
def _adyen(wish: Wish) -> Json:
    item = {
        "amount": {"currency": "EUR", "value": 2000},
        "eventCode": wish.type,
        "eventDate": iso(wish.now_ms),
        "merchantAccountCode": "SampleMerchant",
        "merchantReference": "sample-order",
        "paymentMethod": "visa",
        "pspReference": "",
        "success": "true",
    }
    return {"NotificationRequestItem": item}


# developer.paypal.com/api/rest/webhooks/event-names.
def _paypal(wish: Wish) -> Json:
    return {
        "id": "",
        "event_version": "1.0",
        "create_time": iso(wish.now_ms),
        "resource_type": wish.type.split(".")[-2].lower() if "." in wish.type else "capture",
        "event_type": wish.type,
        "resource": {
            "id": wish.token[:17].upper(),
            "amount": {"currency_code": "USD", "value": "20.00"},
            "custom_id": CUSTOMER,
            "status": "COMPLETED",
        },
    }


def _number(token: str) -> int:
    return 10**12 + int.from_bytes(token.encode()[-4:], "big")


def iso(now_ms: int) -> str:
    """A moment as most senders write it."""
    return datetime.fromtimestamp(now_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


_Maker = Callable[[Wish], Json]
#: By preset. All others get a body with what their locators ask for.
SENDERS: Mapping[str, _Maker] = MappingProxyType(
    {
        "stripe": _stripe,
        "github": _github,
        "shopify": _shopify,
        "standard-webhooks": _standard,
        "twilio": _twilio,
        "adyen": _adyen,
        "paypal": _paypal,
    }
)
#: What only a type's bodies have, as a line of `when`, where no signature covers the type itself.
TELLING: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        # Not `ref`, which those who create and delete branches can have signed as well.
        ("github", "push"): '"pusher" = { exists = true }',
        ("github", "release"): '"release" = { exists = true }',
        ("shopify", "orders/paid"): '"financial_status" = "paid"',
    }
)
#: Where a sender's body says whose it is.
CUSTOMERS: Mapping[str, str] = MappingProxyType(
    {
        "stripe": "data.object.customer",
        "shopify": "customer.id",
        "standard-webhooks": "data.customer",
        "paypal": "resource.custom_id",
    }
)


def customer_at(scheme: str, type: str) -> str:
    """Where a body of that type says whose it is, as a path."""
    # The customer itself, unlike what it has: customer.subscription.updated.
    if scheme == "stripe" and type.startswith("customer.") and type.count(".") == 1:
        return "data.object.id"
    return CUSTOMERS.get(scheme, "customer")


_STRIPE: tuple[tuple[str, _Maker], ...] = (
    ("checkout.session.", _checkout),
    ("invoice.", _invoice),
    ("credit_note.", _credit_note),
    ("customer.subscription.", _subscription),
    ("customer.", _customer_object),
)
_GITHUB: dict[str, _Maker] = {"ping": _ping, "push": _push, "release": _release}
_CALL_STATUSES = frozenset(
    {"initiated", "ringing", "in-progress", "completed", "busy", "no-answer"}
)
