"""The one transaction of an event: what section 3 of the contract promises, on a real file."""

import json
import random
import re
from functools import partial
from typing import Any

import msgspec
import pytest

from receiver import process, rules
from receiver.config import ConfigError
from receiver.process import NotReplayable
from receiver.select import EVENT_FIELDS
from store import attempts, conflicts, founder, inbox, ledger, links, parked
from store.database import Tx
from store.operations import Key
from store.parked import Fact
from tests.conftest import CONFIG, HANDLERS, World, stripe_body


def add_link(tx: Tx) -> None:
    links.add(tx, "stripe", "", "cus_1", "acme")


def test_event_says_what_the_config_lets_a_path_take(world: World) -> None:
    (event,) = world.sign("stripe", stripe_body("evt_1", "invoice.paid"))

    about = rules.scope_of(event).own["_event"]

    assert isinstance(about, dict)
    assert tuple(about) == EVENT_FIELDS


# Where it failed


def test_a_failure_names_the_operation_and_the_line_of_the_handler(world: World) -> None:
    line = next(n for n, text in enumerate(HANDLERS.splitlines(), 1) if "exec(" in text)
    world.stripe("evt_1", "handler.called", id="o_1", run="raise KeyError('plan')")

    assert world.event("evt_1").last_error == (f"welcome at handlers.py:{line}: KeyError: 'plan'")


def test_a_failure_of_a_statement_names_the_operation(world: World) -> None:
    world.link()
    world.query("drop table plan_history")
    fields = {"id": "sub_1", "customer": "cus_1", "plan": "pro"}
    world.stripe("evt_1", "customer.subscription.updated", **fields)

    assert world.event("evt_1").last_error == ("upgrade-plan: Failed: no such table: plan_history")


# Why nothing applied


def test_an_event_whose_rules_do_not_apply_says_why(world: World) -> None:
    world.invoice("evt_1", "in_1", amount_paid=0)
    world.stripe("evt_2", "nothing.of.ours")

    assert world.event("evt_1").reason == (
        "no rule applied: initial-credit-grant: data.object.amount_paid is 0, expected gt 0"
    )
    assert world.event("evt_2").reason == "no rule for nothing.of.ours"


# Granting once


def test_a_paid_invoice_grants_once_however_often_it_comes(world: World) -> None:
    world.link()

    words = [world.invoice("evt_1", "in_1") for _ in range(5)]

    assert words == ["done", "duplicate", "duplicate", "duplicate", "duplicate"]
    assert world.balance() == 100
    assert world.event("evt_1").duplicates == 4


def test_different_events_for_one_invoice_grant_once(world: World) -> None:
    world.link()

    words = {world.invoice(f"evt_{n}", "in_1") for n in range(50)}

    assert words == {"done"}
    assert world.query("select count(*) from receiver_events") == [(50,)]
    assert world.balance() == 100


def test_two_invoices_of_one_customer_grant_twice_in_either_order(world: World) -> None:
    world.link()

    world.invoice("evt_2", "in_2")
    world.invoice("evt_1", "in_1")

    assert world.balance() == 200


def test_two_sources_of_one_identity_grant_an_invoice_once(world: World) -> None:
    world.link()

    first = world.invoice("evt_1", "in_1")
    second = world.invoice("evt_2", "in_1", source="connect")
    third = world.invoice("evt_1", "in_1", source="connect")

    assert (first, second, third) == ("done", "done", "duplicate")
    assert world.balance() == 100


def test_an_event_is_judged_by_the_source_that_it_came_in_by_whoever_brings_it_again(
    world: World,
) -> None:
    """Else the other source, which has no rule for it, would close what waits for its grant."""
    voided = {"id": "in_1", "customer": "cus_1"}
    world.stripe("evt_1", "invoice.voided", **voided)

    again = world.stripe("evt_1", "invoice.voided", source="connect", **voided)

    assert (again, world.state("evt_1")) == ("parked", "parked")


def test_an_event_whose_source_is_gone_is_judged_by_the_one_that_brings_it_again(
    world: World,
) -> None:
    world.invoice("evt_1", "in_1", source="connect")
    without = CONFIG.replace("[sources.connect]", "[sources.renamed]")
    world.configure(without.replace('"connect"', '"renamed"'))

    world.link()

    assert world.state("evt_1") == "quarantined"
    assert world.invoice("evt_1", "in_1") == "done"


@pytest.fixture
def renamed() -> str:
    """`stripe` under another name, and nobody else of its identity."""
    text = CONFIG.replace('\nidentity = "stripe"', "")
    text = text.replace("[sources.stripe]", '[sources.payments]\nidentity = "stripe"')
    return text.replace('source = "stripe"', 'source = "payments"').replace(
        '["stripe", ', '["payments", '
    )


def test_what_waits_is_applied_when_its_source_was_renamed_and_kept_its_identity(
    world: World, renamed: str
) -> None:
    world.invoice("evt_1", "in_1")
    world.configure(renamed)

    world.link()

    assert (world.state("evt_1"), world.balance()) == ("done", 100)


def test_an_event_whose_source_is_gone_is_not_closed_by_another_that_has_no_rule_for_it(
    world: World, renamed: str
) -> None:
    world.invoice("evt_1", "in_1")
    world.configure(renamed.replace('"invoice.paid", ', ""))

    world.link()

    assert world.state("evt_1") == "quarantined"
    assert 'identity = "stripe"' in str(world.event("evt_1").reason)


def test_a_redelivery_that_ends_the_transaction_is_counted_like_any_other(world: World) -> None:
    run = {"id": "x", "run": "tx.sql('insert into poison values (1)')"}
    world.stripe("evt_1", "handler.called", **run)

    again = world.stripe("evt_1", "handler.called", **run)

    assert again == "pending!"
    known = world.event("evt_1")
    assert (known.attempts, known.duplicates) == (2, 1)
    told = world.query("select answer from receiver_deliveries where event = ?", known.id)
    assert told == [("pending",)]


def test_a_connected_account_never_touches_the_platforms_rows(world: World) -> None:
    world.link("cus_1", "acme")
    world.invoice("evt_1", "in_1")

    word = world.invoice("evt_1", "in_1", envelope={"account": "acct_2"})

    assert word == "parked"
    assert world.state("evt_1", account="acct_2") == "parked"
    world.link("cus_1", "other", account="acct_2")
    assert world.state("evt_1", account="acct_2") == "done"
    assert (world.balance("acme"), world.balance("other")) == (100, 100)


def test_a_rule_whose_when_is_not_met_does_nothing(world: World) -> None:
    world.link()

    assert world.invoice("evt_1", "in_1", amount_paid=0) == "ignored"
    assert world.balance() == 0


def test_an_entitlement_is_looked_up_by_the_first_path_that_is_there(world: World) -> None:
    world.link()

    world.stripe("evt_1", "plan.bought", id="b1", customer="cus_1", price="basic")
    world.stripe("evt_2", "plan.bought", id="b2", customer="cus_1", new_price="pro", price="basic")

    assert world.balance() == 60


@pytest.mark.parametrize("price", ["enterprise", None, 7, ["basic"]])
def test_what_no_table_entitles_to_anything_is_quarantined(world: World, price: object) -> None:
    world.link()

    assert world.stripe("evt_1", "plan.bought", id="b1", customer="cus_1", price=price) == (
        "quarantined"
    )
    assert "data.object.new_price or data.object.price" in str(world.event("evt_1").reason)


def test_an_event_that_no_rule_wants_is_ignored_with_its_payload_and_replays_later(
    world: World,
) -> None:
    world.link()
    assert world.stripe("evt_1", "invoice.marked", id="in_1", customer="cus_1") == "ignored"
    row = world.event("evt_1").id
    rule = """
        [[rules]]
        operation = "late"
        source = "stripe"
        on = ["invoice.marked"]
        subject = "data.object.id"
        customer = "data.object.customer"
        grant = { unit = "credits", amount = 5 }
        """
    world.configure(CONFIG + rule)

    outcome = world.store.write(lambda tx: world.processor.replay(tx, row))

    assert outcome.word == "done"
    assert world.balance() == 5


def test_no_body_is_kept_of_what_no_rule_wants_where_asked(world: World) -> None:
    world.link()
    text = "[sources.stripe]\nretention = { ignored = false }"
    world.configure(CONFIG.replace("[sources.stripe]", text, 1))

    assert world.stripe("evt_1", "invoice.marked", id="in_1") == "ignored"
    assert world.invoice("evt_2", "in_2") == "done"

    assert world.query("select event from receiver_payloads") == [(2,)]
    assert world.stripe("evt_1", "invoice.marked", id="in_1") == "duplicate"


# Waiting for a fact


def test_an_invoice_before_its_link_is_parked_and_applied_once_by_the_checkout(
    world: World,
) -> None:
    assert world.invoice("evt_1", "in_1") == "parked"
    assert world.event("evt_1").settled_ms is None

    checkout = world.stripe(
        "evt_2", "checkout.session.completed", customer="cus_1", client_reference_id="acme"
    )

    assert checkout == "done"
    assert world.state("evt_1") == "done"
    assert world.invoice("evt_1", "in_1") == "duplicate"
    assert world.balance() == 100


def test_a_link_by_hand_applies_what_was_parked_on_it_once(world: World) -> None:
    world.invoice("evt_1", "in_1")

    world.link()

    assert world.state("evt_1") == "done"
    assert world.balance() == 100
    assert world.query("select * from receiver_parked") == []


def test_a_null_or_missing_customer_matches_no_link_and_is_attributed_by_hand(
    world: World,
) -> None:
    world.link("None", "acme")
    assert world.invoice("evt_1", "in_1", customer=None) == "parked"
    row = world.event("evt_1").id
    assert world.store.write(lambda tx: parked.of_event(tx, row)) == Fact(
        "attribution", "stripe", ""
    )

    world.store.write(lambda tx: inbox.attribute(tx, row, "acme"))
    world.drain()

    assert world.state("evt_1") == "done"
    assert world.balance() == 100


@pytest.mark.parametrize("customer", ["", "  ", 1.5, True, ["cus_1"], {"id": "cus_1"}, "a\nb"])
def test_a_customer_of_the_wrong_kind_is_quarantined(world: World, customer: object) -> None:
    assert world.invoice("evt_1", "in_1", customer=customer) == "quarantined"
    assert "data.object.customer" in str(world.event("evt_1").reason)


def test_a_checkout_without_a_workspace_is_parked_until_it_is_attributed(world: World) -> None:
    word = world.stripe("evt_1", "checkout.session.completed", customer="cus_1")
    world.invoice("evt_2", "in_1")
    assert word == "parked"

    row = world.event("evt_1").id
    world.store.write(lambda tx: inbox.attribute(tx, row, "acme"))
    world.drain()

    assert (world.state("evt_1"), world.state("evt_2")) == ("done", "done")
    assert world.balance() == 100


def test_a_link_to_another_workspace_is_quarantined_and_the_first_stays(world: World) -> None:
    world.link("cus_1", "acme")

    word = world.stripe(
        "evt_1", "checkout.session.completed", customer="cus_1", client_reference_id="evil"
    )

    assert word == "quarantined"
    assert "linked to workspace acme" in str(world.event("evt_1").reason)
    world.invoice("evt_2", "in_1")
    assert world.balance("acme") == 100


def test_a_reversal_before_its_grant_waits_for_it(world: World) -> None:
    assert world.stripe("evt_1", "invoice.voided", id="in_1") == "parked"

    world.link()
    world.invoice("evt_2", "in_1")

    assert world.state("evt_1") == "done"
    assert world.balance() == 0


def test_many_events_parked_on_one_customer_are_released_in_short_transactions(
    world: World,
) -> None:
    for n in range(350):
        world.invoice(f"evt_{n}", f"in_{n}")
    world.store.write(add_link)

    batches = []
    while jobs := world.store.look(world.processor.due_jobs):
        batches.append(len(jobs))
        world.store.write_all(jobs)

    assert batches == [100, 100, 100, 50]
    assert world.balance() == 35_000


def test_a_released_event_is_pending_and_due_in_the_same_commit_as_the_fact(world: World) -> None:
    world.invoice("evt_1", "in_1")

    world.store.write(add_link)

    row = world.event("evt_1")
    assert (row.state, row.next_attempt_ms) == ("pending", 0)


def test_a_due_time_far_ahead_is_due_now(world: World) -> None:
    """The clock was set back after the event was released."""
    world.clock.now_ms += 86_400_000
    world.invoice("evt_1", "in_1")
    world.store.write(add_link)

    world.clock.now_ms -= 86_400_000
    world.drain()

    assert world.state("evt_1") == "done"


# The same key again


def test_other_content_under_a_known_key_is_kept_aside_and_changes_nothing(world: World) -> None:
    world.link()
    world.invoice("evt_1", "in_1")

    words = [
        world.invoice("evt_1", "in_2"),
        world.invoice("evt_1", "in_2"),
        world.invoice("evt_1", "in_3"),
    ]

    assert words == ["conflict"] * 3
    row = world.event("evt_1").id
    kept = world.store.write(lambda tx: conflicts.of_event(tx, row))
    assert [conflict.deliveries for conflict in kept] == [2, 1]
    assert world.balance() == 100
    assert world.event("evt_1").duplicates == 0


def reconciled(world: World, event_id: str, **of: Any) -> str:
    """Put an event through as reconcile does, with what the API says of it."""
    (event,) = world.sign("stripe", stripe_body(event_id, "invoice.paid", **of))
    event = msgspec.structs.replace(event, origin="reconcile")
    receive = partial(world.processor.receive, events=(event,), request_id="reconcile-1")
    return world.store.write(receive).word


def test_a_known_event_that_reconcile_meets_is_a_duplicate_and_never_a_conflict(
    world: World,
) -> None:
    world.link()
    paid = {"customer": "cus_1", "status": "paid", "amount_paid": 500}
    assert world.invoice("evt_1", "in_1") == "done"
    assert reconciled(world, "evt_1", id="in_1", expanded=True, **paid) == "duplicate"
    assert reconciled(world, "evt_2", id="in_2", **paid) == "done"

    assert world.invoice("evt_2", "in_2", lines=[1]) == "duplicate"

    assert world.query("select count(*) from receiver_conflicts") == [(0,)]
    assert [world.event(f"evt_{n}").origin for n in (1, 2)] == ["delivery", "reconcile"]
    assert world.balance() == 200


def test_conflicting_contents_of_one_event_are_bounded(world: World) -> None:
    world.link()
    world.invoice("evt_1", "in_1")

    for n in range(conflicts.CONTENTS_MAX + 10):
        assert world.invoice("evt_1", f"in_x{n}") == "conflict"

    row = world.event("evt_1").id
    kept = world.store.write(lambda tx: conflicts.of_event(tx, row))
    assert len(kept) == conflicts.CONTENTS_MAX
    assert sum(conflict.deliveries for conflict in kept) == conflicts.CONTENTS_MAX + 10


@pytest.mark.parametrize("seed", range(5))
def test_volatile_fields_key_order_and_white_space_make_no_conflict(
    world: World, seed: int
) -> None:
    world.link()
    event = json.loads(
        stripe_body(
            "evt_1", "invoice.paid", id="in_1", customer="cus_1", status="paid", amount_paid=5
        )
    )
    assert world.deliver("stripe", json.dumps(event).encode()) == "done"

    random.seed(seed)
    event["pending_webhooks"] = seed + 2
    shuffled = dict(random.sample(list(event.items()), len(event)))
    word = world.deliver("stripe", json.dumps(shuffled, indent=seed).encode())

    assert word == "duplicate"


def test_a_field_declared_volatile_later_ends_the_conflicts(world: World) -> None:
    world.invoice("evt_1", "in_1", attempt=1)
    assert world.invoice("evt_1", "in_1", attempt=2) == "conflict"

    world.configure(
        CONFIG.replace(
            "[sources.stripe]", '[sources.stripe]\nvolatile = ["data.object.attempt"]', 1
        )
    )

    assert world.invoice("evt_1", "in_1", attempt=3) == "parked"


def test_the_same_body_under_another_unsigned_id_has_no_second_effect_and_is_flagged(
    world: World,
) -> None:
    body = b'{"ref": "refs/heads/main", "repository": {"id": 7}}'

    first = world.deliver("github", body, event_id="guid-1", type="push")
    second = world.deliver("github", body, event_id="guid-2", type="push")

    assert (first, second) == ("done", "done")
    assert world.query("select count(*) from receiver_records") == [(1,)]
    original = world.event("guid-1", source="github", account="7")
    assert world.event("guid-2", source="github", account="7").same_body_as == original.id


def test_the_same_shopify_body_under_another_id_has_no_second_effect_even_without_a_subject(
    world: World,
) -> None:
    world.configure(CONFIG.replace('on = ["orders/*"]\nsubject = "id"', 'on = ["orders/*"]'))
    body = b'{"id": 1, "total_price": "9.00"}'

    for event_id in ("e-1", "e-2", "e-3"):
        assert world.deliver("shopify", body, event_id=event_id, type="orders/paid") == "done"

    assert world.query("select count(*) from receiver_records") == [(1,)]
    flagged = "select event_id, same_body_as from receiver_events order by id"
    assert world.query(flagged) == [
        ("e-1:orders/paid", None),
        ("e-2:orders/paid", 1),
        ("e-3:orders/paid", 1),
    ]


def test_one_shopify_event_id_on_two_topics_is_two_events(world: World) -> None:
    created = world.deliver("shopify", b'{"id": 1}', event_id="e-1", type="orders/create")
    paid = world.deliver("shopify", b'{"id": 1}', event_id="e-1", type="orders/paid")
    again = world.deliver("shopify", b'{"id": 1}', event_id="e-1", type="orders/paid")

    assert (created, paid, again) == ("done", "done", "duplicate")
    assert world.query("select count(*) from receiver_events") == [(2,)]


# What can't be applied as it stands


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"amount_paid": "500"}, "data.object.amount_paid"),
        ({"amount_paid": None}, "data.object.amount_paid"),
        ({"amount_paid": True}, "data.object.amount_paid"),
        ({"status": "open"}, "data.object.status is 'open', expected 'paid'"),
        ({"status": None}, "data.object.status"),
        ({"id": None}, "data.object.id"),
        ({"id": ""}, "data.object.id"),
        ({"id": {"a": 1}}, "data.object.id"),
    ],
)
def test_what_is_missing_or_of_the_wrong_type_is_quarantined_by_name(
    world: World, fields: dict[str, Any], words: str
) -> None:
    world.link()
    of: dict[str, Any] = {
        "id": "in_1",
        "customer": "cus_1",
        "status": "paid",
        "amount_paid": 5,
    } | fields

    assert world.stripe("evt_1", "invoice.paid", **of) == "quarantined"

    assert words in str(world.event("evt_1").reason)
    assert world.balance() == 0


@pytest.mark.parametrize("body", [b"", b"not json", b"\xff\xfe{}", b"[1", b'{"a": NaN}', b"null"])
def test_a_genuine_body_that_is_no_event_is_kept(world: World, body: bytes) -> None:
    assert world.deliver("stripe", body) == "quarantined"
    assert world.deliver("stripe", body) == "quarantined"

    assert world.query("select count(*), sum(duplicates) from receiver_events") == [(1, 1)]
    (event_id,) = world.query("select event_id from receiver_events")[0]
    assert event_id.startswith("sha256:")


def test_a_test_event_on_a_live_source_is_ignored(world: World) -> None:
    world.link()

    assert world.invoice("evt_1", "in_1", source="live") == "ignored"
    assert world.balance() == 0


def test_a_live_event_on_a_test_source_is_quarantined(world: World) -> None:
    world.link()

    assert world.invoice("evt_1", "in_1", envelope={"livemode": True}) == "quarantined"
    assert world.invoice("evt_2", "in_2", envelope={"livemode": None}) == "quarantined"
    assert world.balance() == 0


def test_a_quarantined_event_is_judged_again_when_the_sender_resends_it(world: World) -> None:
    world.link()
    assert world.invoice("evt_1", "in_1", status="void") == "quarantined"

    world.configure(CONFIG.replace('expect = { "data.object.status" = "paid" }', ""))

    assert world.invoice("evt_1", "in_1", status="void") == "done"
    assert world.balance() == 100


def test_all_of_an_event_or_nothing(world: World) -> None:
    """The first rule grants, the second quarantines: the grant is undone with it."""
    world.link()
    world.configure(
        CONFIG
        + """
        [[rules]]
        operation = "and-then"
        source = "stripe"
        on = ["invoice.paid"]
        expect = { "data.object.colour" = "blue" }
        subject = "data.object.id"
        record = { kind = "x", data = 1 }
        """
    )

    assert world.invoice("evt_1", "in_1") == "quarantined"
    assert world.balance() == 0
    assert world.query("select * from receiver_operations") == []
    assert world.invoice("evt_2", "in_1", colour="blue") == "done"
    assert world.balance() == 100


# An operation that was done by somebody else, or otherwise


def test_a_grant_by_the_app_under_the_webhooks_key_counts_as_done(world: World) -> None:
    world.link()
    key = Key("stripe", "", "in_1", "initial-credit-grant")
    world.store.write(lambda tx: ledger.enter(tx, key, "acme", "credits", 100))

    assert world.invoice("evt_1", "in_1") == "done"
    assert world.balance() == 100


@pytest.mark.parametrize(("workspace", "amount"), [("acme", 99), ("other", 100)])
def test_a_grant_that_was_made_otherwise_is_quarantined(
    world: World, workspace: str, amount: int
) -> None:
    world.link()
    key = Key("stripe", "", "in_1", "initial-credit-grant")
    world.store.write(lambda tx: ledger.enter(tx, key, workspace, "credits", amount))

    assert world.invoice("evt_1", "in_1") == "quarantined"
    assert f"grant of {amount} credits" in str(world.event("evt_1").reason)


def test_two_credit_notes_never_reverse_more_than_was_granted(world: World) -> None:
    world.link()
    world.invoice("evt_1", "in_1")

    note: dict[str, Any] = {"invoice": "in_1", "credits": 60}
    first = world.stripe("evt_2", "credit_note.created", id="cn_1", **note)
    second = world.stripe("evt_3", "credit_note.created", id="cn_2", **note)
    rest = world.stripe("evt_4", "invoice.voided", id="in_1")
    none_left = world.stripe("evt_5", "credit_note.created", id="cn_4", **note)

    assert (first, second, rest, none_left) == ("done", "quarantined", "done", "quarantined")
    assert world.balance() == 0


def test_a_reversal_comes_once_for_its_subject(world: World) -> None:
    world.link()
    world.invoice("evt_1", "in_1")

    note: dict[str, Any] = {"id": "cn_1", "invoice": "in_1", "credits": 40}
    words = [world.stripe(f"evt_{n}", "credit_note.created", **note) for n in (2, 3, 4)]

    assert words == ["done"] * 3
    assert world.balance() == 60


@pytest.mark.parametrize("amount", [0, -5, 101, "40", 1.5, True, None])
def test_a_reversal_of_no_sensible_amount_is_quarantined(world: World, amount: object) -> None:
    world.link()
    world.invoice("evt_1", "in_1")

    word = world.stripe("evt_2", "credit_note.created", id="cn", invoice="in_1", credits=amount)

    assert word == "quarantined"
    assert world.balance() == 100


# Effects of the founder's own


def test_sql_changes_the_apps_tables_with_the_event_or_not_at_all(world: World) -> None:
    world.link()
    good: dict[str, Any] = {
        "id": "sub_1",
        "customer": "cus_1",
        "plan": "pro'; drop table workspaces; --",
    }
    assert world.stripe("evt_1", "customer.subscription.updated", **good) == "done"
    assert world.query("select plan from workspaces") == [("pro'; drop table workspaces; --",)]

    bad: dict[str, Any] = {"id": "sub_2", "customer": "cus_1", "plan": None}
    assert world.stripe("evt_2", "customer.subscription.updated", **bad) == "pending!"

    assert world.query("select count(*) from plan_history") == [(1,)]
    assert world.query("select plan from workspaces") == [("pro'; drop table workspaces; --",)]
    assert "NOT NULL" in str(world.event("evt_2").last_error)


def test_a_record_keeps_json_types(world: World) -> None:
    world.stripe("evt_1", "feedback.created", text="good {x}", rating=5)

    assert world.query("select kind, data from receiver_records") == [
        ("feedback", '{"text":"good {x}","rating":5}')
    ]


def run(world: World, event_id: str, code: str) -> str:
    return world.stripe(event_id, "handler.called", id=event_id, run=code)


def test_a_subject_that_a_rule_takes_is_one_that_its_handler_may_use(world: World) -> None:
    run = "tx.grant('credits', 5, workspace='acme')"

    assert world.stripe("evt_1", "handler.called", id="Rue\u00a0de\u200bRivoli", run=run) == "done"
    assert world.balance() == 5


def test_a_handler_grants_records_links_and_reads(world: World) -> None:
    code = """
assert tx.link("cus_1", "acme") and tx.workspace("cus_1") == "acme"
assert tx.grant("credits", 30, workspace="acme")
assert tx.record("welcomed", {"by": event.id}, operation="welcomed")
assert tx.sql("select count(*) from receiver_ledger") == [(1,)]
"""

    assert run(world, "evt_1", code) == "done"
    assert world.balance() == 30
    assert world.query("select kind, data from receiver_records") == [
        ("welcomed", '{"by":"evt_1"}')
    ]


@pytest.mark.parametrize(
    "code",
    [
        "raise ValueError('boom')",
        "raise SystemExit(3)",
        "1 / 0",
        "tx.sql('commit')",
        "tx.sql('rollback')",
        "tx.sql('pragma synchronous = off')",
        "tx.sql(\"attach 'x.db' as x\")",
        "tx.sql('delete from receiver_links')",
        "tx.grant('credits', True, workspace='acme')",
        "tx.grant('credits', 5, workspace='')",
        "tx.sql('insert into poison values (1)')",
        "tx.grant('credits', 10, workspace='acme')\ntx.sql('insert into poison values (1)')",
        """
try:
    tx.sql('insert into poison values (1)')
except Exception:
    pass
""",
        # A transaction that was lost must not turn the next statement into one of its own.
        """
for statement in ('insert into poison values (1)', "insert into plan_history values ('x', 'y')"):
    try:
        tx.sql(statement)
    except Exception:
        pass
try:
    tx.grant('credits', 10, workspace='acme')
except Exception:
    pass
""",
        "raise KeyboardInterrupt",
        "raise GeneratorExit",
        "import asyncio; raise asyncio.CancelledError",
        "class Odd(Exception):\n  def __str__(self): raise ValueError\nraise Odd",
        "raise ValueError('\\ud800')",
        "raise Park('x', subject='s', operation='')",
        "raise Park('x', customer=b'cus')",
        """
class Sly(dict):
    def __missing__(self, name):
        tx.sql('select 1')
        return 1
tx.sql("select :a; delete from receiver_links; commit", Sly())
""",
        """
import threading
errors = []
def other():
    try:
        tx.sql("insert into plan_history values ('thread', 'y')")
    except Exception as error:
        errors.append(error)
thread = threading.Thread(target=other)
thread.start()
thread.join()
raise errors[0]
""",
    ],
)
def test_a_handler_that_fails_leaves_none_of_its_writes_and_its_event_pending(
    world: World, code: str
) -> None:
    assert run(world, "evt_1", code) == "pending!"

    row = world.event("evt_1")
    assert (row.state, row.attempts, row.next_attempt_ms) == ("pending", 1, None)
    assert row.last_error
    assert world.query("select * from plan_history") == []
    assert world.query("select * from receiver_operations") == []
    assert world.balance() == 0
    tried = world.store.write(lambda tx: attempts.of_event(tx, row.id))
    assert [(one.attempt, one.outcome) for one in tried] == [(1, "failed")]


def test_a_handler_that_is_a_generator_or_async_is_a_failure_not_a_success(world: World) -> None:
    later = "def welcome(event, tx):\n  yield tx.grant('credits', 1, workspace='acme')\n"
    (world.folder / "handlers.py").write_text(later)
    world.configure(CONFIG)

    assert run(world, "evt_1", "") == "pending!"
    assert "generator" in str(world.event("evt_1").last_error)


def test_statements_of_one_handler_have_one_time_limit(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(founder, "SQL_S_MAX", 0.1)

    assert run(world, "evt_1", "while True: tx.sql('select 1')") == "pending!"
    assert "longer than" in str(world.event("evt_1").last_error)


def test_a_refusal_that_a_handler_swallows_leaves_no_claim_behind(world: World) -> None:
    world.store.write(
        lambda tx: tx.db.execute(
            """
            create trigger not_today before insert on receiver_ledger
            begin select raise(abort, 'not today'); end
            """
        )
    )
    swallow = "\ntry: tx.grant('credits', 1, workspace='acme', operation='bonus')"
    assert run(world, "evt_1", swallow + "\nexcept Exception: pass") == "done"
    world.store.write(lambda tx: tx.db.execute("drop trigger not_today"))

    assert run(world, "evt_2", "tx.grant('credits', 1, workspace='acme', operation='bonus')") == (
        "done"
    )

    claimed = world.query("select subject from receiver_operations where operation = 'bonus'")
    assert claimed == [("evt_2",)]
    assert world.balance() == 1


def test_full_text_search_of_the_app_works_in_an_effect(world: World) -> None:
    world.store.write(lambda tx: tx.db.execute("create virtual table found using fts5 (text)"))
    code = "tx.sql(\"insert into found values ('a paid invoice')\")"

    assert run(world, "evt_1", code) == "done"
    assert world.query("select * from found where found match 'paid'") == [("a paid invoice",)]


def test_a_fork_in_a_handler_never_becomes_a_second_server(world: World) -> None:
    """The child ends where it comes back; the parent goes on."""
    code = "import os\nif os.fork() == 0: raise SystemExit\nos.wait()"

    assert run(world, "evt_1", code) == "done"
    assert world.state("evt_1") == "done"


def test_the_log_of_a_failed_handler_says_where_and_repeats_no_text(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(world, "evt_1", "import json\njson.loads('4242 SECRET')") == "pending!"

    (record,) = caplog.records
    assert re.fullmatch(
        r"failed source=stripe account=\"\" id=evt_1 type=handler\.called correlation=event-1 "
        r"operation=welcome error=JSONDecodeError at=handlers\.py:\d+",
        record.getMessage(),
    )
    assert record.exc_info is None


def test_an_effect_that_takes_long_is_named_in_the_log(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "SLOW_S", 0.0)
    world.link()

    world.invoice("evt_1", "in_1")

    assert "slow effect, and all else waited: a source with mode" in caplog.text
    assert "operation=initial-credit-grant" in caplog.text


def test_a_failed_handler_runs_again_on_redelivery_and_applies_once(world: World) -> None:
    assert run(world, "evt_1", "raise ValueError('boom')") == "pending!"
    assert run(world, "evt_1", "raise ValueError('boom')") == "pending!"
    assert world.event("evt_1").attempts == 2

    (world.folder / "handlers.py").write_text(
        "def welcome(event, tx):\n  tx.grant('credits', 1, workspace='acme')\n"
    )
    world.configure(CONFIG)

    assert run(world, "evt_1", "raise ValueError('boom')") == "done"
    assert run(world, "evt_1", "raise ValueError('boom')") == "duplicate"
    assert world.balance() == 1


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("raise Park('no mapping yet', customer='cus_9')", "parked"),
        ("raise Park('ask a person')", "parked"),
        ("raise Quarantine('not like this')", "quarantined"),
    ],
)
def test_a_handler_says_what_happened(world: World, code: str, word: str) -> None:
    assert run(world, "evt_1", code) == word
    assert world.query("select * from plan_history") == []


def test_a_handler_parked_on_a_customer_runs_when_the_link_comes(world: World) -> None:
    code = """
w = tx.workspace('cus_9')
if not w: raise Park('later', customer='cus_9')
tx.grant('credits', 7, workspace=w)
"""
    assert run(world, "evt_1", code) == "parked"

    world.link("cus_9", "acme")

    assert world.state("evt_1") == "done"
    assert world.balance() == 7


def test_tx_is_dead_after_the_handler_returned(world: World) -> None:
    run(world, "evt_1", "pass")
    functions = world.processor.handlers.functions
    kept = functions["welcome"].__globals__["seen"][0]

    with pytest.raises(RuntimeError, match="until it returns"):
        kept.sql("select 1")


@pytest.mark.parametrize(
    "code",
    [
        "raise KeyboardInterrupt",
        "raise BaseException('out')",
        "import asyncio; raise asyncio.CancelledError",
        "raise type('Wordless', (Exception,), {'__str__': lambda self: 1 / 0})",
        "raise type('Ending', (Exception,), {'__str__': lambda self: exit(3)})",
        "def welcome(",
        "exit(0)",
    ],
)
def test_whatever_handlers_raise_when_imported_is_a_problem_of_the_config(
    world: World, code: str
) -> None:
    (world.folder / "handlers.py").write_text(code)

    with pytest.raises(ConfigError, match=r"handlers\.py can't be imported: "):
        world.configure(CONFIG)


# Again, by hand


def test_a_replay_of_a_done_event_changes_nothing(world: World) -> None:
    world.link()
    world.invoice("evt_1", "in_1")
    before = world.query("select * from receiver_ledger")
    row = world.event("evt_1").id

    outcome = world.store.write(lambda tx: world.processor.replay(tx, row))

    assert outcome.word == "done"
    assert world.query("select * from receiver_ledger") == before


def test_what_an_event_did_stays_done_wherever_its_customer_is_linked_now(world: World) -> None:
    world.link("cus_1", "acme")
    world.invoice("evt_1", "in_1", customer="cus_1")
    before = world.query("select * from receiver_ledger")
    row = world.event("evt_1").id
    words = []

    for moved in (links.remove, partial(links.add, workspace="other")):
        world.store.write(partial(moved, source="stripe", account="", customer="cus_1"))
        outcome = world.store.write(lambda tx: world.processor.replay(tx, row))
        words.append((outcome.word, world.event("evt_1").state))

    assert words == [("done", "done")] * 2
    assert world.query("select * from receiver_ledger") == before


def test_a_replay_takes_the_same_default_subject_for_an_unsigned_id(world: World) -> None:
    body = b'{"ref":"main","repository":{"id":7}}'
    world.deliver("github", body, event_id="guid-1", type="push")
    row = world.event("guid-1", source="github", account="7").id

    world.store.write(lambda tx: world.processor.replay(tx, row))

    assert len(world.query("select subject from receiver_records where kind = 'push'")) == 1


def test_a_replay_says_why_it_can_not_be(world: World) -> None:
    world.invoice("evt_1", "in_1")
    world.store.write(lambda tx: tx.db.execute("delete from receiver_payloads"))

    with pytest.raises(NotReplayable, match="was not kept"):
        world.store.write(lambda tx: world.processor.replay(tx, 1))
    with pytest.raises(NotReplayable, match="no event"):
        world.store.write(lambda tx: world.processor.replay(tx, 99))


def test_a_pruned_payload_makes_a_known_key_a_duplicate(world: World) -> None:
    world.link()
    world.invoice("evt_1", "in_1")
    world.store.write(lambda tx: tx.db.execute("delete from receiver_payloads"))

    assert world.invoice("evt_1", "in_other") == "duplicate"


def test_a_pin_against_an_unsigned_header_still_holds_on_replay(world: World) -> None:
    """The header is gone by then, so what it said has to be remembered."""
    word = world.deliver(
        "shopify", b'{"id": 1}', event_id="e-1", type="orders/create", account="two.myshopify.com"
    )
    assert word == "quarantined"
    [(row,)] = world.query("select id from receiver_events")

    outcome = world.store.write(lambda tx: world.processor.replay(tx, row))

    assert outcome.word == "quarantined"
    assert "two.myshopify.com" in str(world.query("select reason from receiver_events"))
