"""Samples are what the senders send: they verify, are new each time, and can be changed."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from receiver import samples
from receiver.bodies import TELLING
from receiver.commands.setup import first_to_send
from receiver.config import Settings, load
from receiver.handshakes import Handshake
from receiver.samples import Sample, Wish, change, make, parse_change
from receiver.select import Scope
from receiver.verify import Delivery, Event, verify
from tests import conftest
from tests.conftest import NOW_MS, World

URL = "https://hooks.example.com/webhooks/x"
CONFIG = """
[sources.stripe]
scheme = "stripe"
secrets = ["env:SECRET"]
livemode = false

[sources.live]
scheme = "stripe"
secrets = ["env:SECRET"]
livemode = true
account = "acct_1"

[sources.github]
scheme = "github"
secrets = ["env:SECRET"]

[sources.shopify]
scheme = "shopify"
secrets = ["env:SECRET"]
account = "one.myshopify.com"

[sources.standard]
scheme = "standard-webhooks"
secrets = ["env:SECRET"]

[sources.own]
secrets = ["env:SECRET"]
[sources.own.scheme]
sig = "header:X-Own-Signature"
algo = "sha512"
enc = "base64"
signed = "{url}|{body}"
event_id = "json:/meta/id"
event_type = "json:/meta/kind"
"""
STRIPE_TYPES = (
    "checkout.session.completed",
    "invoice.paid",
    "invoice.payment_succeeded",
    "invoice.payment_failed",
    "credit_note.created",
    "customer.created",
    "customer.subscription.updated",
    "customer.subscription.deleted",
    "charge.refunded",
    "ping",
)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    path = tmp_path / "receiver.toml"
    path.write_text(CONFIG)
    return load(path, environment={"SECRET": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"})


@pytest.fixture
def event(settings: Settings) -> Callable[..., Event]:
    """The event that the receiver makes of a sample."""

    def of(source: str, type: str, **wish: Any) -> Event:
        asked: dict[str, Any] = {"token": "0123456789abcdef", "now_ms": NOW_MS} | wish
        sample = make(settings.sources[source], Wish(type=type, **asked), URL)
        headers = tuple((n.lower().encode(), v.encode()) for n, v in sample.headers)
        delivery = Delivery("POST", URL, headers, sample.body, NOW_MS)
        judged = verify(settings.sources[source].contract, delivery)
        assert isinstance(judged, tuple)
        (found,) = judged
        assert found.event_id == sample.event_id
        assert found.document == sample.document
        return found

    return of


@pytest.mark.parametrize(("sender", "type"), TELLING)
def test_the_field_that_check_advises_is_in_a_body_of_that_type_and_in_no_other(
    tmp_path: Path, event: Callable[..., Event], sender: str, type: str
) -> None:
    rule = f'[[rules]]\noperation = "o"\nsource = "{sender}"\non = ["{type}"]\n'
    effect = 'record = { kind = "k", data = "d" }\n'
    path = tmp_path / "receiver.toml"
    path.write_text(CONFIG + rule + effect)
    environment = {"SECRET": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"}
    advised = re.compile(r"rules\[0\]\.when: .*, as in (\{ .* \}) \(operation")
    (when,) = filter(None, map(advised.match, load(path, environment=environment).warnings))

    path.write_text(f"{CONFIG}{rule}{effect}when = {when[1]}\n")
    taken = load(path, environment=environment)

    assert not any(".when" in one for one in taken.warnings)
    condition = taken.rules[0].when
    assert condition is not None
    types = {
        "github": ("push", "release", "star"),
        "shopify": ("orders/paid", "orders/create", "products/update"),
    }
    for one in types[sender]:
        document = event(sender, one).document
        assert condition.holds(Scope(document, {})) is (one == type)


@pytest.mark.parametrize(
    ("source", "type"),
    [
        *(("stripe", type) for type in STRIPE_TYPES),
        ("live", "invoice.paid"),
        *(("github", type) for type in ("push", "release", "star")),
        *(("shopify", type) for type in ("orders/create", "orders/paid", "app/uninstalled")),
        ("standard", "contact.created"),
        ("own", "thing.done"),
    ],
)
def test_a_sample_is_genuine_and_says_what_was_asked_for(
    event: Callable[..., Event], source: str, type: str
) -> None:
    found = event(source, type)

    assert found.type == type
    assert found.defect is None
    assert not found.test


def test_a_sample_of_a_ping_is_answered_as_one(settings: Settings) -> None:
    source = settings.sources["github"]
    sample = make(source, Wish(type="ping", token="0123456789abcdef", now_ms=NOW_MS), URL)
    headers = tuple((n.lower().encode(), v.encode()) for n, v in sample.headers)

    judged = verify(source.contract, Delivery("POST", URL, headers, sample.body, NOW_MS))

    assert isinstance(judged, Handshake)


def test_a_sample_of_a_batch_is_a_batch_of_one(tmp_path: Path) -> None:
    path = tmp_path / "receiver.toml"
    path.write_text('[sources.meta]\nscheme = "meta"\nsecrets = ["env:S"]\naccount = "88"\n')
    source = load(path, environment={"S": "of the app"}).sources["meta"]
    sample = make(source, Wish(type="messages", token="0123456789abcdef", now_ms=NOW_MS), URL)
    headers = tuple((n.lower().encode(), v.encode()) for n, v in sample.headers)

    judged = verify(source.contract, Delivery("POST", URL, headers, sample.body, NOW_MS))

    assert isinstance(judged, tuple)
    assert [(one.type, one.account, one.defect) for one in judged] == [("messages", "88", None)]
    assert [one.event_id for one in judged] == [sample.event_id]


def test_the_mode_and_account_are_those_of_the_source(event: Callable[..., Event]) -> None:
    live: Any = event("live", "invoice.paid").document
    test: Any = event("stripe", "invoice.paid").document

    assert (live["livemode"], live["data"]["object"]["livemode"]) == (True, True)
    assert (test["livemode"], test["data"]["object"]["livemode"]) == (False, False)
    assert event("live", "invoice.paid").account == "acct_1"
    assert event("shopify", "orders/paid").account == "one.myshopify.com"


def test_samples_of_two_tokens_share_no_id(event: Callable[..., Event]) -> None:
    for source, type in (("stripe", "invoice.paid"), ("github", "push"), ("shopify", "orders/x")):
        one, other = (event(source, type, token=token) for token in ("a" * 16, "b" * 16))

        assert one.event_id != other.event_id
        assert one.body_sha256 != other.body_sha256


def test_invoices_have_the_fields_that_the_shipped_rules_read(
    event: Callable[..., Event],
) -> None:
    def invoice(type: str) -> Any:
        document: Any = event("stripe", type).document
        return document["data"]["object"]

    paid, failed = invoice("invoice.paid"), invoice("invoice.payment_failed")
    line = paid["lines"]["data"][0]

    assert (paid["status"], paid["amount_paid"], paid["currency"]) == ("paid", 2000, "usd")
    assert (failed["status"], failed["amount_paid"]) == ("open", 0)
    assert line["pricing"]["price_details"]["price"] == "price_basic"


def test_the_customer_of_its_own_event_is_the_object_itself(event: Callable[..., Event]) -> None:
    made: Any = event("stripe", "customer.created", customer="cus_9").document
    has: Any = event("stripe", "customer.subscription.updated", customer="cus_9").document

    assert made["data"]["object"]["id"] == "cus_9"
    assert has["data"]["object"]["customer"] == "cus_9"


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("stripe", ("data", "object", "customer")),
        ("shopify", ("customer", "id")),
        ("standard", ("data", "customer")),
        ("own", ("customer",)),
    ],
)
def test_the_customer_stands_where_that_sender_has_it(
    event: Callable[..., Event], source: str, place: tuple[str, ...]
) -> None:
    value: Any = event(source, "orders/paid", customer="cus_9").document

    for step in place:
        value = value[step]

    assert value == "cus_9"


def test_an_id_that_was_asked_for_is_sent(event: Callable[..., Event]) -> None:
    for source in ("stripe", "github", "shopify", "standard", "own"):
        assert event(source, "push", event_id="id-1").event_id == "id-1"


def test_a_body_of_ones_own_gets_a_fresh_id_and_keeps_the_rest(
    event: Callable[..., Event],
) -> None:
    body = json.dumps({"id": "evt_old", "data": {"object": {"id": "in_7"}}, "more": [1]}).encode()

    document: Any = event("stripe", "invoice.paid", body=body).document

    assert document["id"] == "evt_0123456789abcdef"
    assert (document["data"]["object"]["id"], document["more"]) == ("in_7", [1])


def test_an_exact_body_is_sent_byte_for_byte(event: Callable[..., Event]) -> None:
    body = b'{ "id":"evt_7", "type" : "a.b","livemode":false}\r\n'

    assert event("stripe", "a.b", body=body, exact=True).body == body


def test_a_body_that_is_no_object_cannot_be_stamped(event: Callable[..., Event]) -> None:
    with pytest.raises(ValueError, match="--exact"):
        event("stripe", "a.b", body=b"[]")


# Changes


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a", {"a": 9, "l": [{"x": 1}]}),
        ("a.b", {"a": {"b": 9, "c": 2}, "l": [{"x": 1}]}),
        ("new.deep.path", {"a": {"c": 2}, "l": [{"x": 1}], "new": {"deep": {"path": 9}}}),
        ("l[0].x", {"a": {"c": 2}, "l": [{"x": 9}]}),
        ("l[1]", {"a": {"c": 2}, "l": [{"x": 1}, 9]}),
        ("m[0].y", {"a": {"c": 2}, "l": [{"x": 1}], "m": [{"y": 9}]}),
    ],
)
def test_a_change_is_made_where_its_path_points(path: str, expected: dict[str, Any]) -> None:
    document: dict[str, Any] = {"a": {"c": 2}, "l": [{"x": 1}]}

    change(document, path, 9)

    assert document == expected


@pytest.mark.parametrize("path", ["a.b.c", "l.x", "l[5]", "a[0]", "", ".", "a[x]", "x" * 501])
def test_a_path_that_leads_nowhere_is_refused_in_words(path: str) -> None:
    with pytest.raises(ValueError, match=r"path|object|no \["):
        change({"a": {"b": 1}, "l": [1]}, path, 9)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1),
        ('a="1"', "1"),
        ("a=in_1", "in_1"),
        ("a=null", None),
        ("a=", ""),
        ("a=b=c", "b=c"),
    ],
)
def test_a_value_is_json_where_it_can_be(text: str, value: object) -> None:
    assert parse_change(text) == ("a", value)


@pytest.mark.parametrize("depth", [1_000, 100_000])
def test_a_value_that_is_nested_too_deeply_is_refused_in_words(depth: int) -> None:
    with pytest.raises(ValueError, match="the value of a is nested too deeply"):
        parse_change("a=" + "[" * depth + "]" * depth)


def test_the_first_thing_to_send_is_a_link(tmp_path: Path) -> None:
    path = tmp_path / "receiver.toml"
    rule = '[[rules]]\noperation = "{}"\nsource = "stripe"\non = {}\n{}\n'
    record = 'record = { kind = "k", data = "d" }'
    link = 'link = { customer = "c", workspace = "w" }'
    rules = [
        rule.format("any", '["*"]', record),
        rule.format("one", '["a.b"]', record),
        rule.format("two", '["x.*", "x.y"]', link),
    ]

    def first(count: int) -> tuple[str, str] | None:
        path.write_text(CONFIG + "\n".join(rules[:count]))
        return first_to_send(load(path, secrets=False))

    assert [first(count) for count in range(4)] == [
        None,
        None,
        ("stripe", "a.b"),
        ("stripe", "x.y"),
    ]


def test_a_test_event_on_a_live_source_is_told_as_such(settings: Settings) -> None:
    wish = Wish("invoice.paid", "01" * 8, NOW_MS, body=b'{"livemode": false}', exact=True)
    sample = make(settings.sources["live"], wish, URL)

    words = samples.advice(settings, "live", sample, 200, "ignored")

    assert words.startswith("a test event on a live source is ignored")


# What to try next


ADVISED = """
[sources.slow]
scheme = "stripe"
secrets = ["env:STRIPE"]
mode = "queued"

[[rules]]
operation = "tell"
source = "stripe"
on = ["told"]
send = [{ to = "app" }]

[destinations.app]
kind = "http"
url = "http://127.0.0.1:1/"
"""


@pytest.mark.parametrize(
    ("run", "source", "event_type", "word", "advised"),
    [
        ("inside", "slow", "any", "pending", "the worker applies it: `receiver events show e`"),
        ("separate", "slow", "any", "pending", "`receiver work` applies it, if it is running"),
        ("inside", "stripe", "told", "pending", "a handler failed: `receiver events show e`"),
        ("inside", "stripe", "told", "done", "`receiver outbox list`"),
        ("inside", "stripe", "feedback.created", "done", "`receiver records`"),
        ("inside", "stripe", "told", "duplicate", "nothing new was done, this event was here"),
        ("inside", "stripe", "told", "[accepted]", "`receiver events show e`"),
    ],
)
def test_what_is_advised_after_an_answer_fits_it(
    world: World, run: str, source: str, event_type: str, word: str, advised: str
) -> None:
    world.configure(conftest.CONFIG.replace('run = "off"', f'run = "{run}"') + ADVISED)
    sample = Sample("e", event_type, [], b"{}", {})

    words = samples.advice(world.processor.settings, source, sample, 200, word)

    assert words.startswith(advised)
