"""Acts by hand, while others use the file: nothing twice, nothing without its audit row."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from receiver import operate
from receiver.operate import By, Declined
from store import attempts, inbox, ledger, parked
from store.database import Tx
from store.operations import Key
from store.parked import Fact
from tests.command import Command
from tests.conftest import World, stripe_body

BY = By("tester", "because")

# Holds the write lock for a second once it has it, from a process of its own.
HOLD = """
import sqlite3, sys, time
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("begin immediate")
print("held", flush=True)
time.sleep(1)
db.execute("rollback")
"""

# Takes the write lock again and again until its input ends; prints how often it got it, and how
# long it waited at most, in seconds.
ASK = """
import select, sqlite3, sys, time
db = sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None)
print("ready", flush=True)
times, longest = 0, 0.0
while not select.select([sys.stdin], [], [], 0.002)[0]:
    started = time.monotonic()
    while True:
        try:
            db.execute("begin immediate")
            break
        except sqlite3.OperationalError:
            time.sleep(0.001)
    longest = max(longest, time.monotonic() - started)
    db.execute("rollback")
    times += 1
print(times, longest)
"""


@pytest.fixture
def command(world: World, monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(world, monkeypatch)


@contextmanager
def beside(world: World, program: str) -> Iterator["subprocess.Popen[str]"]:
    """A program with the file in a process of its own; it runs once it has printed a line."""
    with subprocess.Popen(
        [sys.executable, "-c", program, world.store.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process


def acts(world: World) -> list[tuple[str, str, str]]:
    return world.query("select action, target, reason from receiver_audit order by id")


def park_many(tx: Tx, count: int) -> None:
    """As many events as that, parked on customer cus_1."""
    for number in range(count):
        body = stripe_body(
            f"evt_{number}",
            "invoice.paid",
            id=f"in_{number}",
            customer="cus_1",
            status="paid",
            amount_paid=500,
        )
        row = inbox.insert(
            tx,
            source="stripe",
            account="",
            event_id=f"evt_{number}",
            endpoint="stripe",
            type="invoice.paid",
            received_ms=tx.now_ms,
            secret="env:STRIPE",
            content_type="json",
            body=body,
            body_sha256=number.to_bytes(32),
            id_signed=True,
            claimed_account=None,
            request_id=f"r-{number}",
        )
        assert row is not None
        inbox.settle(tx, row, "parked", "customer cus_1 is not linked to a workspace yet")
        parked.wait(tx, row, Fact("link", "stripe", "", "cus_1"))


def lease(world: World) -> int:
    """The row of an event that a worker is trying."""
    world.stripe("evt_1", "handler.called", id="h", run="1 / 0")
    until_ms = world.clock() + 5000
    world.query("update receiver_events set lease_owner = 'w', lease_until_ms = ?", until_ms)
    return world.event("evt_1").id


def test_ten_thousand_parked_events_are_released_in_short_transactions(
    world: World, command: Command
) -> None:
    world.store.write(lambda tx: park_many(tx, 10_000))

    with beside(world, ASK) as asking:
        began = time.monotonic()
        ran = command("links", "add", "stripe", "cus_1", "acme")
        took_s = time.monotonic() - began
        answer, _ = asking.communicate()
    times, longest_s = answer.split()

    assert "10000 parked events were released: 10000 done" in ran.out
    assert world.balance() == 1_000_000
    assert int(times) > 50
    assert float(longest_s) < took_s / 5


def test_an_act_waits_for_another_process_that_holds_the_lock(
    world: World, command: Command
) -> None:
    world.invoice("evt_1", "in_1")

    with beside(world, HOLD):
        ran = command("links", "add", "stripe", "cus_1", "acme")

    assert (ran.code, world.state("evt_1"), world.balance()) == (0, "done", 100)


def test_an_act_that_fails_leaves_no_audit_row(world: World) -> None:
    world.link()

    with pytest.raises(Declined, match="--repoint"):
        world.store.write(
            lambda tx: operate.link(tx, "stripe", "", "cus_1", "beta", repoint=False, by=BY)
        )

    assert acts(world) == []
    assert world.query("select workspace from receiver_links") == [("acme",)]


def test_every_act_is_in_the_audit_log_with_actor_and_reason(world: World) -> None:
    world.invoice("evt_1", "in_1", customer=None)
    world.invoice("evt_2", "in_2", status="open")
    world.invoice("evt_1", "in_1", customer=None, amount_paid=7)
    one, two = world.event("evt_1").id, world.event("evt_2").id
    key = Key("stripe", "", "in_9", "initial-credit-grant")
    write = world.store.write

    write(lambda tx: operate.attribute(tx, one, "acme", BY))
    write(lambda tx: operate.resolve(tx, two, BY))
    write(lambda tx: operate.resolve_conflict(tx, 1, BY))
    write(lambda tx: operate.link(tx, "stripe", "", "cus_1", "acme", repoint=False, by=BY))
    write(lambda tx: operate.link(tx, "stripe", "", "cus_1", "beta", repoint=True, by=BY))
    write(lambda tx: operate.unlink(tx, "stripe", "", "cus_1", BY))
    write(lambda tx: operate.grant(tx, key, "acme", "credits", 100, BY))
    write(lambda tx: operate.revert(tx, key, 40, BY))
    write(lambda tx: operate.adjust(tx, "k", "acme", "credits", 5, BY))
    list(operate.replay(world.store, world.processor, [one], BY))

    assert acts(world) == [
        ("parked attribute", f"event {one}", "because"),
        ("events resolve", f"event {two}", "because"),
        ("conflicts resolve", f"event {one}", "because"),
        ("links add", "link stripe/cus_1", "because"),
        ("links repoint", "link stripe/cus_1", "because"),
        ("links remove", "link stripe/cus_1", "because"),
        ("ledger grant", "stripe/in_9/initial-credit-grant", "because"),
        ("ledger revert", "stripe/in_9/initial-credit-grant", "because"),
        ("ledger adjust", "operator/k/adjustment", "because"),
        ("replay", f"event {one}", "because"),
    ]
    assert world.query("select distinct actor from receiver_audit") == [("tester",)]
    details = [json.loads(text) for (text,) in world.query("select detail from receiver_audit")]
    assert details[4] == {"workspace": "beta", "before": "acme"}


def test_an_act_that_changes_nothing_is_not_in_the_audit_log(world: World) -> None:
    world.link()
    key = Key("stripe", "", "in_1", "initial-credit-grant")
    world.invoice("evt_1", "in_1")
    write = world.store.write
    write(lambda tx: operate.adjust(tx, "k", "acme", "credits", 5, BY))

    linked = write(lambda tx: operate.link(tx, "stripe", "", "cus_1", "acme", repoint=True, by=BY))
    granted = write(lambda tx: operate.grant(tx, key, "acme", "credits", 100, BY))
    adjusted = write(lambda tx: operate.adjust(tx, "k", "acme", "credits", 5, BY))

    assert (linked.word, granted.new, adjusted.new) == ("known", False, False)
    assert [action for action, _, _ in acts(world)] == ["ledger adjust"]


@pytest.mark.parametrize(
    "act",
    [
        lambda tx, row: operate.resolve(tx, row, BY),
        lambda tx, row: operate.attribute(tx, row, "acme", BY),
    ],
)
def test_an_event_under_a_lease_is_left_to_its_worker(
    world: World, act: Callable[[Tx, int], None]
) -> None:
    row = lease(world)

    with pytest.raises(Declined, match="a worker is trying evt_1 now: try again in 6 s"):
        world.store.write(lambda tx: act(tx, row))

    assert world.event("evt_1").lease_until_ms == world.clock() + 5000


def test_an_attempt_that_never_ended_is_closed_with_its_event(world: World) -> None:
    row = lease(world)
    world.store.write(lambda tx: attempts.start(tx, 2, event=row))
    world.clock.now_ms += 5000

    world.store.write(lambda tx: operate.resolve(tx, row, BY))

    tried = world.store.write(lambda tx: attempts.of_event(tx, row))
    assert [one.outcome for one in tried] == ["failed", "unknown"]


def test_an_event_under_a_lease_is_not_replayed(world: World) -> None:
    row = lease(world)

    [[ran]] = operate.replay(world.store, world.processor, [row], BY)

    assert (ran.word, world.event("evt_1").attempts) == ("not run", 1)
    assert "a worker is trying evt_1 now" in str(ran.problem)


def test_a_replayed_event_that_ends_the_transaction_costs_its_neighbours_nothing(
    world: World,
) -> None:
    world.stripe("evt_1", "handler.called", id="h1", run="1 / 0")
    world.stripe("evt_2", "handler.called", id="h2", run="1 / 0")
    # The bodies stay; what the handler does with them changes.
    handlers = world.folder / "handlers.py"
    poison = 'tx.sql("insert into poison values (1)") if order["id"] == "h1" else None'
    handlers.write_text(
        handlers.read_text().replace('exec(order["run"]', f"{poison}; (lambda *_: 0)(order")
    )
    world.configure((world.folder / "receiver.toml").read_text())
    rows = [world.event("evt_1").id, world.event("evt_2").id]

    [ran] = operate.replay(world.store, world.processor, rows, BY)

    assert [one.word for one in ran] == ["pending", "done"]
    assert [world.event("evt_1").attempts, world.state("evt_1")] == [2, "pending"]
    assert world.query("select plan from plan_history") == [("h2",)]
    assert [action for action, _, _ in acts(world)] == ["replay", "replay"]


def test_a_grant_by_hand_is_found_done_by_the_late_webhook(world: World) -> None:
    key = Key("stripe", "", "in_1", "initial-credit-grant")
    world.link()

    world.store.write(lambda tx: operate.grant(tx, key, "acme", "credits", 100, BY))

    assert world.invoice("evt_1", "in_1") == "done"
    assert world.balance() == 100


def test_parts_of_an_entry_are_taken_back_until_nothing_is_left(world: World) -> None:
    world.link()
    world.invoice("evt_1", "in_1")
    key = Key("stripe", "", "in_1", "initial-credit-grant")
    write = world.store.write

    taken = [write(lambda tx: operate.revert(tx, key, 30, BY)).entry.amount for _ in range(3)]
    with pytest.raises(Declined, match="10 credits are left"):
        write(lambda tx: operate.revert(tx, key, 30, BY))
    rest = write(lambda tx: operate.revert(tx, key, None, BY)).entry
    with pytest.raises(Declined, match="0 credits are left"):
        write(lambda tx: operate.revert(tx, key, None, BY))

    assert (taken, rest.amount, world.balance()) == ([-30, -30, -30], -10, 0)
    assert write(lambda tx: len(ledger.reversals(tx, key))) == 4


@pytest.mark.parametrize("amount", [0, 10**15 + 1, -(10**15) - 1])
def test_an_adjustment_out_of_bounds_is_declined(world: World, amount: int) -> None:
    with pytest.raises(Declined, match="expected 1 to"):
        world.store.write(lambda tx: operate.adjust(tx, "k", "acme", "credits", amount, BY))


def test_a_name_with_control_characters_is_declined(world: World) -> None:
    with pytest.raises(Declined, match="workspace: holds a control character"):
        world.store.write(
            lambda tx: operate.link(tx, "stripe", "", "cus_1", "ac\nme", repoint=False, by=BY)
        )
