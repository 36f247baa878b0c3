"""Makes deliveries as the senders make them, to try a set-up out."""

import itertools
import json
import re
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from shlex import quote
from typing import Any

import msgspec

from receiver import batch
from receiver.config import Grant, Link, Record, Reverse, Rule, Settings, Source
from receiver.extract import Locator, Reading, find, look_up
from receiver.presets import Preset
from receiver.rules import why_none_applied
from receiver.select import Scope, Unjudgeable
from receiver.tables import cut
from receiver.verify import sign

#: Characters of a `--set` path.
PATH_CHARS_MAX = 500

#: From when on samples with a given id say that they were made: 2026-01-01, in UTC milliseconds.
MADE_MS = 1_767_225_600_000

CUSTOMER = "cus_sample"
WORKSPACE = "acme"
SHOP = "example.myshopify.com"

Json = dict[str, Any]

_STEP = re.compile(r"([^.\[\]]+)((?:\[\d{1,2}\])*)")


class Sample(msgspec.Struct, frozen=True):
    """One delivery, signed: its headers, its body, and what the receiver reads in them."""

    event_id: str
    type: str
    headers: list[tuple[str, str]]
    body: bytes
    document: object


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


def make(source: Source, wish: Wish, url: str) -> Sample:
    """The delivery, signed with the source's first secret that can sign.

    Raises ValueError in words when the body can't be changed or nobody but the sender can sign.
    """
    preset = source.contract.preset
    event_id = wish.event_id or _event_id(preset, wish.token)
    sent_ms, wish = wish.now_ms, wish if wish.event_id is None else _repeatable(wish, event_id)
    if wish.exact and wish.body is not None:
        _check_exact(preset, wish)
        body = wish.body
    else:
        body = json.dumps(_document(source, wish, event_id), ensure_ascii=False).encode()
    account = source.contract.account or (SHOP if preset.name == "shopify" else "")
    said = body
    if preset.batch is not None and not wish.exact:
        body = batch.wrap(preset.batch, said, account)
    headers = sign(
        preset,
        _key(source),
        body,
        now_ms=sent_ms,
        event_id=event_id,
        type=wish.type,
        account=account,
        url=url,
    )
    return msgspec.structs.replace(_sample(preset, headers, said), body=body)


def _repeatable(wish: Wish, event_id: str) -> Wish:
    digest = sha256(event_id.encode(errors="replace")).digest()
    made_ms = MADE_MS + int.from_bytes(digest[:4], "big")
    return msgspec.structs.replace(wish, token=digest.hex()[:24], now_ms=made_ms)


def _check_exact(preset: Preset, wish: Wish) -> None:
    fixed = any(locator.kind != "header" for locator in preset.event_id)
    given = {"--customer": wish.customer, "--set": wish.changes, "--id": fixed and wish.event_id}
    for option, value in given.items():
        if value:
            raise ValueError(f"--exact sends the file as it is: {option} can't change it")


def _sample(preset: Preset, headers: list[tuple[str, str]], body: bytes) -> Sample:
    """What a body says, of a batch the one element of it."""
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers]
    reading = Reading(pairs, body, preset.payload, preset.forms)
    event_id = find(reading, preset.event_id, "id").text
    # What has no id is stored by its digest.
    event_id = event_id or f"sha256:{sha256(body).hexdigest()}"
    type = find(reading, preset.event_type, "type").text
    return Sample(event_id, type, headers, body, reading.document.value)


def change(document: Json, path: str, value: object) -> None:
    """Set what stands at a path such as `data.object.lines.data[0].amount`, made where missing.

    Raises ValueError in words.
    """
    steps = _steps(path)
    place: Any = document
    for step, following in itertools.pairwise(steps):
        place = _descend(place, step, [] if isinstance(following, int) else {}, path)
    _descend(place, steps[-1], value, path, replace=True)


def parse_change(text: str) -> tuple[str, object]:
    """`path=value` of the command line; the value is JSON where it can be, otherwise text."""
    path, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{cut(text)}: write PATH=VALUE, as in data.object.id=in_1")
    _steps(path)
    try:
        found = json.loads(value)
        json.dumps(found)
    except RecursionError as error:
        raise ValueError(f"the value of {path} is nested too deeply; use --file") from error
    except ValueError:
        return path, value
    return path, found


# What to try next


def first_to_send(settings: Settings) -> tuple[str, str] | None:
    """The source and type that a first try begins with: one that links, if there is one."""
    found = [
        (not isinstance(rule.effect, Link), source, event_type)
        for rule in settings.rules
        for source in rule.sources
        if (event_type := _concrete(rule)) is not None
    ]
    return min(found, key=lambda one: one[0])[1:] if found else None


def advice(settings: Settings, source: str, sample: Sample, word: str) -> str:
    """What to do after a sample was answered with `word`: words with a command in them."""
    rules = settings.rules_for(source, sample.type)
    if word == "done":
        return _after_done(settings, source, rules, sample)
    if word == "parked":
        return _after_parked(settings, source, rules, sample)
    if word == "pending":
        return _after_pending(settings, source, sample)
    if word == "ignored":
        return _after_ignored(settings.sources[source], rules, sample)
    if word == "rejected":
        return "the server has another secret or clock; restart it, or run `receiver check`"
    if word in ("duplicate", "conflict", "quarantined", "pending"):
        return _show(sample)
    return "the server's log says more"


def _after_ignored(source: Source, rules: Sequence[Rule], sample: Sample) -> str:
    mode = source.contract.preset.livemode
    said = None if mode is None else look_up(sample.document, mode.at.pointer or ())
    if source.contract.livemode and mode is not None and said == mode.test:
        return "a test event on a live source is ignored; send it to one with livemode = false"
    why = why_none_applied(rules, sample.type, _scope(sample))
    return f"{why}; compare [[rules]] with {_show(sample)}"


def _after_done(settings: Settings, source: str, rules: Sequence[Rule], sample: Sample) -> str:
    effects = [rule.effect for rule in rules]
    if any(isinstance(effect, Grant | Reverse) for effect in effects):
        return "`receiver balance`"
    if any(isinstance(effect, Record) for effect in effects):
        return "`receiver records`"
    if any(rule.send for rule in rules):
        return "`receiver outbox list`"
    customer = next((_customer(rule, sample) for rule in rules), None)
    for rule in settings.rules:
        event_type = _concrete(rule)
        if source in rule.sources and rule.customer is not None and event_type is not None:
            return _send(source, event_type, customer=customer)
    return _show(sample)


def _after_pending(settings: Settings, source: str, sample: Sample) -> str:
    if settings.sources[source].mode != "queued":
        return f"a handler failed: {_show(sample)} has its error"
    if settings.worker.run == "separate":
        return f"`receiver work` applies it, if it is running: {_show(sample)}"
    return f"the worker applies it: {_show(sample)}"


def _after_parked(settings: Settings, source: str, rules: Sequence[Rule], sample: Sample) -> str:
    for rule in rules:
        if isinstance(rule.effect, Reverse):
            granting = _granting(settings, source, rule.effect.operation)
            subject = _value(rule.effect.subject, sample)
            if granting is not None and subject is not None:
                return f"send what it takes back first: {_send_subject(source, granting, subject)}"
    customer = next(filter(None, (_customer(rule, sample) for rule in rules)), None)
    linking = next((rule for rule in settings.rules if _links(rule, source)), None)
    event_type = None if linking is None else _concrete(linking)
    if customer is None:
        named = f"{quote(sample.event_id)} --workspace {WORKSPACE}"
        return f"it names no customer: `receiver parked attribute {named}`"
    if event_type is None:
        return f"link it: `receiver links add {source} {quote(customer)} {WORKSPACE}`"
    return f"send the link first: {_send(source, event_type, customer=customer)}"


def _send(source: str, event_type: str, *, customer: str | None) -> str:
    option = "" if customer in (None, CUSTOMER) else f" --customer {quote(customer or '')}"
    return f"`receiver send {source} {event_type}{option}`"


def _send_subject(source: str, granting: Rule, subject: str) -> str:
    event_type = _concrete(granting) or "TYPE"
    path = "_event.id" if granting.subject is None else granting.subject.text
    option = f"--id {quote(subject)}"
    if path != "_event.id":
        option = f"--set {quote(f'{path}={subject}')}"
    return f"`receiver send {source} {event_type} {option}`"


def _show(sample: Sample) -> str:
    return f"`receiver events show {quote(sample.event_id)}`"


def _granting(settings: Settings, source: str, operation: str) -> Rule | None:
    for rule in settings.rules:
        if rule.operation == operation and source in rule.sources and _concrete(rule):
            return rule
    return None


def _links(rule: Rule, source: str) -> bool:
    return isinstance(rule.effect, Link) and source in rule.sources and _concrete(rule) is not None


def _concrete(rule: Rule) -> str | None:
    return next((one for one in rule.on if "*" not in one), None)


def _customer(rule: Rule, sample: Sample) -> str | None:
    path = rule.effect.customer if isinstance(rule.effect, Link) else rule.customer
    return None if path is None else _value(path, sample)


def _value(path: Any, sample: Sample) -> str | None:
    try:
        found = path.value(_scope(sample))
    except Unjudgeable:
        return None
    return None if found is None else str(found)


def _scope(sample: Sample) -> Scope:
    return Scope(sample.document, {"_event": {"id": sample.event_id, "type": sample.type}})


# Building a body


def _document(source: Source, wish: Wish, event_id: str) -> Json:
    document = _read(wish.body) if wish.body is not None else _sample_of(source, wish)
    _stamp(document, source, wish, event_id)
    if wish.customer is not None:
        change(document, _CUSTOMERS.get(source.scheme, "customer"), wish.customer)
    for path, value in wish.changes:
        change(document, path, value)
    return document


def _read(body: bytes) -> Json:
    found = _decoded(body)
    if not isinstance(found, dict):
        raise ValueError("the file is not a JSON object; send it unchanged with --exact")
    return found


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _stamp(document: Json, source: Source, wish: Wish, event_id: str) -> None:
    """Say the id, type, mode and account where that sender has them in the body."""
    contract, preset = source.contract, source.contract.preset
    _put(document, preset.event_id, event_id)
    _put(document, preset.event_type, wish.type)
    if preset.livemode is not None:
        livemode, mode = contract.livemode or False, preset.livemode
        _put(document, (mode.at,), mode.live if livemode else mode.test)
        if isinstance(document.get("data"), dict) and isinstance(
            document["data"].get("object"), dict
        ):
            document["data"]["object"]["livemode"] = livemode
    if contract.account is not None and preset.name == "stripe":
        document["account"] = contract.account


def _put(document: Json, locators: Sequence[Locator], value: object) -> None:
    if not locators or locators[0].kind != "json" or not locators[0].pointer:
        return
    place = document
    for step in locators[0].pointer[:-1]:
        place = place.setdefault(step, {})
        if not isinstance(place, dict):
            return
    place[locators[0].pointer[-1]] = value


def _steps(path: str) -> list[str | int]:
    steps: list[str | int] = []
    if len(path) > PATH_CHARS_MAX:
        raise ValueError(f"a path of more than {PATH_CHARS_MAX} characters")
    for part in path.split("."):
        found = _STEP.fullmatch(part)
        if found is None:
            raise ValueError(f"{path!r} is not a path; write names and dots, as in data.object.id")
        steps.append(found[1])
        steps.extend(int(index) for index in re.findall(r"\d+", found[2]))
    return steps


def _descend(
    place: Any, step: str | int, value: object, path: str, *, replace: bool = False
) -> Any:
    if isinstance(step, str):
        if not isinstance(place, dict):
            raise ValueError(f"{path}: {step} would stand in what is not an object")
        if replace or place.get(step) is None:
            place[step] = value
        return place[step]
    if not isinstance(place, list) or step > len(place):
        raise ValueError(f"{path}: there is no [{step}] to set")
    if step == len(place):
        place.append(value)
    elif replace or place[step] is None:
        place[step] = value
    return place[step]


def _key(source: Source) -> bytes:
    secrets = source.contract.signing
    unsigned = all(scheme.algo == "none" for scheme in source.contract.preset.schemes)
    if unsigned:
        return b""
    if not secrets:
        raise ValueError(f"sources.{source.name}.secrets is empty, so nothing can be signed")
    return secrets[0].value


def _event_id(preset: Preset, token: str) -> str:
    if preset.name == "stripe":
        return f"evt_{token}"
    if preset.name in ("github", "shopify"):
        return _uuid(token)
    return f"msg_{token}"


def _uuid(token: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, token))


def _number(token: str) -> int:
    return 10**12 + int.from_bytes(token.encode()[-4:], "big")


def _iso(now_ms: int) -> str:
    return datetime.fromtimestamp(now_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _sample_of(source: Source, wish: Wish) -> Json:
    return _SENDERS.get(source.scheme, _any_event)(wish)


def _any_event(wish: Wish) -> Json:
    return {"customer": wish.customer or CUSTOMER, "created_at": _iso(wish.now_ms)}


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
        "timestamp": _iso(wish.now_ms),
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
        "published_at": _iso(wish.now_ms),
        "html_url": "https://github.com/octocat/hello-world/releases/tag/v1.0.0",
    }
    return {"action": "published", "release": release}


# shopify.dev, "Webhooks", topics orders/*: money is text, ids are numbers.
def _shopify(wish: Wish) -> Json:
    number, at = _number(wish.token), _iso(wish.now_ms)
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
    return {"type": wish.type, "timestamp": _iso(wish.now_ms), "data": data}


_CUSTOMERS = {
    "stripe": "data.object.customer",
    "shopify": "customer.id",
    "standard-webhooks": "data.customer",
}
_Maker = Callable[[Wish], Json]
_SENDERS: dict[str, _Maker] = {
    "stripe": _stripe,
    "github": _github,
    "shopify": _shopify,
    "standard-webhooks": _standard,
}
_STRIPE: tuple[tuple[str, _Maker], ...] = (
    ("checkout.session.", _checkout),
    ("invoice.", _invoice),
    ("credit_note.", _credit_note),
    ("customer.subscription.", _subscription),
    ("customer.", _customer_object),
)
_GITHUB: dict[str, _Maker] = {"ping": _ping, "push": _push, "release": _release}
