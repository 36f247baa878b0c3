"""The books: what was paid for at the sender against what was granted and taken back here."""

from collections.abc import Iterator
from typing import Any

import pytest

from receiver.books import Asked, Comparison, Line
from receiver.listing import DAY_MS
from receiver.operate import By, grant
from receiver.pages import Stopped
from store.operations import Key
from tests.conftest import NOW_MS, World
from tests.sender_api import error
from tests.sender_lists import NOW_S, SenderLists, sender_lists
from tests.test_fetching import configured
from tests.test_reconcile import CONFIG as RECONCILED
from tests.test_reconcile import EVENTS, Told, means, outage
from tests.test_reconcile import run as reconciled

INVOICES, CREDIT_NOTES = "/v1/invoices", "/v1/credit_notes"

CONFIG = """
[sources.stripe]
scheme = "stripe"
secrets = ["env:STRIPE"]
livemode = false
api = { key = "env:API", base_url = "URL" }

[[rules]]
operation = "initial-credit-grant"
source = "stripe"
on = ["invoice.paid", "invoice.payment_succeeded"]
when = { "data.object.amount_paid" = { gt = 0 } }
expect = { "data.object.currency" = ["usd", "eur"] }
subject = "data.object.id"
customer = "data.object.customer"
grant.unit = "credits"
grant.by = "data.object.plan"
grant.amounts.basic = 100
grant.amounts.pro = 500
send = [{ to = "team" }]

[[rules]]
operation = "refund-credit-grant"
source = "stripe"
on = ["credit_note.created"]
subject = "data.object.id"
reverse = { operation = "initial-credit-grant", subject = "data.object.invoice" }

[destinations.team]
kind = "http"
url = "http://127.0.0.1:1/"
"""

GRANT, REFUND = "initial-credit-grant", "refund-credit-grant"


@pytest.fixture
def far() -> Iterator[SenderLists]:
    with sender_lists() as lists:
        lists.add(INVOICES)
        lists.add(CREDIT_NOTES)
        yield lists


@pytest.fixture
def kept(world: World, far: SenderLists) -> World:
    configured(world, CONFIG.replace("URL", far.url))
    for number, workspace in ((1, "acme"), (2, "bolt")):
        world.link(f"cus_{number}", workspace)
    return world


def bill(far: SenderLists, number: int, customer: str = "cus_1", **of: Any) -> dict[str, Any]:
    """A paid invoice at the sender."""
    made_s = NOW_S - 5 * 86_400 + number
    paid = {
        "id": f"in_{number}",
        "object": "invoice",
        "livemode": False,
        "created": made_s,
        "customer": customer,
        "status": "paid",
        "status_transitions": {"paid_at": made_s + 60},
        "currency": "usd",
        "amount_paid": 500,
        "plan": "basic",
    } | of
    far.add(INVOICES, paid)
    far.objects[f"{INVOICES}/{paid['id']}"] = paid
    return paid


def note(far: SenderLists, number: int, invoice: str) -> dict[str, Any]:
    made = {
        "id": f"cn_{number}",
        "object": "credit_note",
        "livemode": False,
        "created": NOW_S - 86_400 + number,
        "invoice": invoice,
        "status": "issued",
    }
    far.add(CREDIT_NOTES, made)
    far.objects[f"{CREDIT_NOTES}/cn_{number}"] = made
    return made


def tell(world: World, thing: dict[str, Any], type: str = "invoice.paid") -> str:
    return world.stripe(f"evt_{thing['id']}_{type}", type, **thing)


def compare(world: World, **asked: Any) -> tuple[Comparison, int, Told]:
    told = Told()
    period: dict[str, Any] = {"since_ms": NOW_MS - 30 * DAY_MS, "until_ms": NOW_MS + 1}
    what = Asked(**{"accounts": ("",)} | period | asked)
    source = world.processor.settings.sources["stripe"]
    comparison = Comparison(source, what, means(world, told), told)
    return comparison, comparison.run(), told


def total(comparison: Comparison, operation: str = GRANT) -> Line:
    (sheet,) = [one for one in comparison.sheets if one.operation == operation]
    return sheet.total


def by_hand(world: World, subject: str, amount: int = 100, workspace: str = "acme") -> None:
    key, by = Key("stripe", "", subject, GRANT), By("root", "by hand")
    world.store.write(lambda tx: grant(tx, key, workspace, "credits", amount, by))


def whats(told: Told) -> list[tuple[str, str]]:
    return [(one.what, one.id) for one in told.differences]


def test_books_that_agree_say_so_for_each_workspace(kept: World, far: SenderLists) -> None:
    for number in range(12):
        tell(kept, bill(far, number, "cus_1" if number % 3 else "cus_2"))
    tell(kept, note(far, 1, "in_1"), "credit_note.created")

    comparison, gap, told = compare(kept)

    assert (gap, told.differences) == (0, [])
    assert total(comparison) == Line(objects=12, here=12)
    assert total(comparison, REFUND) == Line(objects=1, here=1)
    assert comparison.sheets[0].workspaces == {
        "acme": Line(objects=8, here=8),
        "bolt": Line(objects=4, here=4),
    }


def test_after_an_outage_was_reconciled_the_books_agree(world: World, far: SenderLists) -> None:
    configured(world, RECONCILED.replace("URL", far.url))
    world.link()
    far.add(EVENTS)
    events = outage(world, far)
    far.add(INVOICES, *[_invoice_of(one) for one in events])
    comparison, gap, _ = compare(world)
    assert (gap, total(comparison)) == (150, Line(objects=500, here=350, missing=150))

    reconciled(world, apply=True)

    comparison, gap, told = compare(world)
    assert (gap, total(comparison)) == (0, Line(objects=500, here=500))
    assert told.differences == []


def _invoice_of(event: dict[str, Any]) -> dict[str, Any]:
    paid = {"status": "paid", "livemode": False, "created": event["created"]}
    return paid | dict(event["data"]["object"])


def test_every_difference_is_caught(kept: World, far: SenderLists) -> None:
    tell(kept, bill(far, 1))
    bill(far, 2)
    by_hand(kept, bill(far, 3)["id"], 90)
    by_hand(kept, "in_gone")
    tell(kept, bill(far, 4))
    note(far, 1, "in_4")
    owed = kept.query("select count(*) from receiver_outbox")
    message = "No such invoice; a similar object exists in live mode, but a test mode key was used"
    misplaced = error(404, code="resource_missing", message=message)
    far.instead = lambda path: misplaced if path.endswith("in_live") else None
    by_hand(kept, "in_live")
    by_hand(kept, bill(far, 5, status="void")["id"])

    comparison, gap, told = compare(kept)

    assert sorted(whats(told)) == [
        ("another amount", "in_3"),
        ("extra", "in_5"),
        ("extra", "in_gone"),
        ("extra", "in_live"),
        ("missing", "cn_1"),
        ("missing", "in_2"),
    ]
    why = {one.id: one.detail for one in told.differences}
    assert why["in_2"] == "100 credits"
    assert "was done as grant of 90 credits" in why["in_3"]
    assert "this event would do grant of 100 credits" in why["in_3"]
    assert why["in_live"] == "is an object of the other mode"
    assert why["in_5"] == "is no paid invoice at the sender"
    assert why["in_gone"].startswith("is not at the sender: ")
    assert total(comparison) == Line(objects=4, here=6, missing=1, extra=3, other=1)
    assert total(comparison, REFUND) == Line(objects=1, here=0, missing=1)
    assert gap == 6
    # Nothing of what was tried is kept.
    assert kept.balance() == 100 + 90 + 100 + 100 + 100 + 100
    assert kept.query("select count(*) from receiver_outbox") == owed
    assert kept.query("select count(*) from receiver_events where origin = 'reconcile'") == [(0,)]


def test_apply_grants_what_is_missing_under_the_webhooks_own_key(
    kept: World, far: SenderLists
) -> None:
    first, second = bill(far, 1), bill(far, 2, plan="pro")
    note(far, 1, "in_1")
    tell(kept, first)

    comparison, gap, _ = compare(kept, apply=True)

    assert gap == 0
    assert total(comparison) == Line(objects=2, here=2, missing=1, mended=1)
    assert kept.balance() == 100 + 500 - 100
    assert kept.query("select count(*) from receiver_outbox") == [(2,)]
    # The webhooks come after all.
    assert tell(kept, second) == tell(kept, second, "invoice.payment_succeeded") == "done"
    assert kept.balance() == 500
    assert compare(kept)[1] == 0
    assert kept.event("reconcile:invoice.paid:in_2").origin == "reconcile"


def test_what_can_not_be_granted_is_told_with_its_reason_and_granted_once_it_can(
    kept: World, far: SenderLists
) -> None:
    bill(far, 1, "cus_9")
    bill(far, 2, currency="gbp")
    bill(far, 3, plan="other")
    bill(far, 4, amount_paid=0)

    comparison, gap, told = compare(kept, apply=True)

    assert (gap, total(comparison)) == (3, Line(objects=3, here=0, missing=3))
    why = {one.id: one.detail for one in told.differences}
    assert why["in_1"] == "customer cus_9 is not linked to a workspace yet"
    assert "data.object.currency is 'gbp'" in why["in_2"]
    assert "add it to grant.amounts" in why["in_3"]
    kept.link("cus_9", "late")
    assert compare(kept)[1] == 2
    configured(
        kept, CONFIG.replace("URL", far.url).replace('"usd", "eur"]', '"usd", "eur", "gbp"]')
    )
    assert compare(kept, apply=True)[1] == 1
    assert (kept.balance("late"), kept.balance()) == (100, 100)


def test_an_event_that_was_put_through_under_other_rules_is_judged_anew(
    kept: World, far: SenderLists
) -> None:
    text = CONFIG.replace("URL", far.url)
    bill(far, 1)
    other = text.replace(GRANT, "an-other-grant", 1).replace(
        f'reverse = {{ operation = "{GRANT}"', 'reverse = { operation = "an-other-grant"'
    )
    configured(kept, other)
    assert compare(kept, apply=True)[1] == 0

    configured(kept, text)

    assert compare(kept)[1] == 1
    assert compare(kept, apply=True)[1] == 0
    assert kept.balance() == 200


def test_an_invoice_counts_by_the_time_it_was_paid(kept: World, far: SenderLists) -> None:
    since_ms = NOW_MS - 5 * DAY_MS
    made_before = {"paid_at": NOW_S - 3_600}
    bill(far, 1, created=NOW_S - 30 * 86_400, status_transitions=made_before)
    paid_before = {"paid_at": NOW_S - 6 * 86_400}
    # Paid in the last period, granted in this one: looked at by itself, and no difference.
    tell(kept, bill(far, 2, created=NOW_S - 7 * 86_400, status_transitions=paid_before))

    comparison, gap, told = compare(kept, since_ms=since_ms)

    assert whats(told) == [("missing", "in_1")]
    assert total(comparison) == Line(objects=2, here=1, missing=1)
    assert gap == 1


def test_a_reversal_of_another_amount_is_caught(kept: World, far: SenderLists) -> None:
    text = CONFIG.replace("URL", far.url).replace(
        'subject = "data.object.invoice" }',
        'subject = "data.object.invoice", amount = "data.object.credits" }',
    )
    configured(kept, text)
    tell(kept, bill(far, 1))
    made = note(far, 1, "in_1") | {"credits": 40}
    tell(kept, made, "credit_note.created")
    far.lists[CREDIT_NOTES, ""][0]["credits"] = 60

    _, gap, told = compare(kept)

    assert gap == 1
    assert whats(told) == [("another amount", "cn_1")]
    assert told.differences[0].detail == "was done as -40 credits; this would take back 60"


def test_several_objects_of_one_subject_are_one_grant(kept: World, far: SenderLists) -> None:
    text = CONFIG.replace("URL", far.url)
    configured(
        kept, text.replace('subject = "data.object.id"', 'subject = "data.object.customer"', 1)
    )
    for number in range(3):
        bill(far, number)

    comparison, gap, _ = compare(kept)
    assert (gap, total(comparison)) == (1, Line(objects=3, here=0, missing=1))
    comparison, gap, _ = compare(kept, apply=True)

    assert (gap, total(comparison)) == (0, Line(objects=3, here=1, missing=1, mended=1))
    assert kept.balance() == 100


def test_a_rule_without_a_subject_can_not_be_compared_and_that_is_said(
    kept: World, far: SenderLists
) -> None:
    configured(kept, CONFIG.replace("URL", far.url).replace('subject = "data.object.id"\n', "", 1))
    bill(far, 1)

    comparison, gap, told = compare(kept)

    assert gap == 0
    assert [one.operation for one in comparison.sheets] == [REFUND]
    assert "without a subject" in told.notes[0]


def test_books_that_can_not_be_read_say_why_and_can_be_compared_again(
    kept: World, far: SenderLists
) -> None:
    for number in range(150):
        bill(far, number)
    far.instead = lambda path: error(403) if "starting_after" in path else None
    with pytest.raises(Stopped, match="the key may not read this"):
        compare(kept, apply=True)
    assert kept.balance() == 100 * 100

    far.instead = lambda path: None
    once = [error(400, code="resource_missing", param="starting_after")]
    far.instead = lambda path: once.pop() if "starting_after" in path and once else None
    comparison, gap, _ = compare(kept, apply=True)

    assert gap == 0
    assert total(comparison) == Line(objects=150, here=150, missing=50, mended=50)
    assert kept.balance() == 150 * 100


def test_a_list_of_the_other_mode_is_no_book(kept: World, far: SenderLists) -> None:
    bill(far, 1, livemode=True)

    with pytest.raises(Stopped, match="the answer is live data: use a key for test data"):
        compare(kept)
