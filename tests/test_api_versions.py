"""One fact in the shapes of two versions of Stripe's API is one operation, by the shipped rules.

On 2025-03-31 (basil) an invoice's `subscription` moved to `parent.subscription_details`, and the
price of a line to `pricing.price_details`. A field that can be expanded holds an object instead
of an id.
"""

import itertools
import re
from typing import Any

import pytest

from receiver import starter
from receiver.config import load
from receiver.process import Processor
from tests.conftest import SECRETS, World

PRICED = re.compile(r"^# (grant\..*|  \"data.*|\])$", re.MULTILINE)
ONE_AMOUNT = "grant = { unit"

SUBSCRIPTION = """
[[rules]]
operation = "subscription-state"
source = "stripe"
on = ["customer.subscription.*"]
project.kind = "subscription"
project.id = "data.object.id"
project.object = "data.object"
project.state = "status"
project.fields = { customer = "{customer}" }
project.created = "created"
project.terminal = ["canceled"]

[[rules]]
operation = "note-renewal"
source = "stripe"
on = ["invoice.paid"]
subject = "data.object.id"
resource.kind = "subscription"
resource.id = [
  "data.object.parent.subscription_details.subscription.id",
  "data.object.parent.subscription_details.subscription",
  "data.object.subscription.id",
  "data.object.subscription",
]
when = { "_resource.state" = "active" }
record = { kind = "renewal", data = { subscription = "{_resource.id}" } }
"""


def expanded(of: str, yes: bool) -> Any:
    return {"id": of, "object": of.partition("_")[0]} if yes else of


def invoice(basil: bool, expand: bool) -> dict[str, Any]:
    """A paid invoice as that version has it."""
    price, subscription = expanded("price_pro", expand), expanded("sub_1", expand)
    fields: dict[str, Any] = {
        "id": "in_1",
        "object": "invoice",
        "customer": expanded("cus_1", expand),
        "status": "paid",
        "currency": "usd",
        "amount_paid": 500,
    }
    if basil:
        line: dict[str, Any] = {"pricing": {"price_details": {"price": price, "product": "prod_1"}}}
        details = {"subscription": subscription, "metadata": {}}
        parent = {"type": "subscription_details", "subscription_details": details}
        return fields | {"parent": parent, "lines": {"data": [line]}}
    # A price of a line was always an object.
    line = {"price": {"id": "price_pro", "object": "price"}, "subscription": "sub_1"}
    return fields | {"paid": True, "subscription": subscription, "lines": {"data": [line]}}


SHAPES = list(itertools.product([False, True], [False, True]))
each_shape = pytest.mark.parametrize(("basil", "expand"), SHAPES)


@pytest.fixture
def founder(world: World) -> World:
    """A set-up as `receiver init` writes it, with the amount by price uncommented."""
    text = starter.CONFIG.replace("@LIVEMODE@", "false")
    priced = "\n".join(
        PRICED.sub(r"\1", line) if not line.startswith(ONE_AMOUNT) else ""
        for line in text.splitlines()
    )
    world.folder.joinpath(".env").write_text("")
    path = world.folder / "receiver.toml"
    path.write_text(priced + SUBSCRIPTION)
    secrets = SECRETS | {starter.SECRET_NAME: SECRETS["STRIPE"]}
    world.processor = Processor.load(load(path, environment=secrets))
    world.store.write(world.processor.start)
    return world


def test_the_amount_is_taken_by_price(founder: World) -> None:
    (grant,) = [
        rule.effect
        for rule in founder.processor.settings.rules
        if rule.operation == "initial-credit-grant"
    ]

    assert getattr(grant, "amounts", None) == {"price_basic": 100, "price_pro": 500}


@pytest.mark.parametrize("expand", [False, True])
def test_a_checkout_links_whatever_its_customer_looks_like(founder: World, expand: bool) -> None:
    customer = expanded("cus_1", expand)
    word = founder.stripe(
        "evt_c",
        "checkout.session.completed",
        id="cs_1",
        customer=customer,
        client_reference_id="acme",
    )

    assert word == "done"
    assert founder.query("select customer, workspace from receiver_links") == [("cus_1", "acme")]


@each_shape
def test_an_invoice_grants_by_its_price_in_each_shape(
    founder: World, basil: bool, expand: bool
) -> None:
    founder.link("cus_1")

    assert founder.stripe("evt_1", "invoice.paid", **invoice(basil, expand)) == "parked"
    founder.stripe("evt_s", "customer.subscription.created", id="sub_1", status="active")

    assert founder.state("evt_1") == "done"
    assert founder.balance() == 500
    assert founder.query("select data from receiver_records") == [('{"subscription":"sub_1"}',)]


@pytest.mark.parametrize("first", range(len(SHAPES)))
def test_every_shape_of_one_invoice_is_one_grant(founder: World, first: int) -> None:
    founder.link("cus_1")
    founder.stripe("evt_s", "customer.subscription.created", id="sub_1", status="active")

    for number, (basil, expand) in enumerate(SHAPES[first:] + SHAPES[:first]):
        word = founder.stripe(f"evt_{number}", "invoice.paid", **invoice(basil, expand))
        assert word == "done"

    assert founder.balance() == 500
    assert founder.query("select subject, operation from receiver_ledger") == [
        ("in_1", "initial-credit-grant")
    ]


@each_shape
def test_a_credit_note_takes_back_the_grant_of_its_invoice(
    founder: World, basil: bool, expand: bool
) -> None:
    founder.link("cus_1")
    founder.stripe("evt_s", "customer.subscription.created", id="sub_1", status="active")
    founder.stripe("evt_1", "invoice.paid", **invoice(basil, expand))

    for number, note in enumerate(("in_1", {"id": "in_1", "object": "invoice"})):
        of: dict[str, Any] = {"id": "cn_1", "invoice": note}
        assert founder.stripe(f"evt_n{number}", "credit_note.created", **of) == "done"

    assert founder.balance() == 0
    assert len(founder.query("select * from receiver_ledger")) == 2
