"""The worker with a real file, a real HTTP server and its own threads."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from receiver import dispatch, operate
from receiver.destinations import Later, Never, Result, Sent, Unknown
from receiver.dispatch import Leased
from receiver.operate import By
from receiver.work import OneWriter
from receiver.worker import EVENT_LEASE_S, Worker
from store import attempts, inbox, outbox
from store.database import Store, Tx
from store.outbox import Message
from tests.conftest import CONFIG, World
from tests.processes import Peer, peering
from tests.service import until

BY = By("tester", "because")

SENDING = """
[[rules]]
operation = "announce"
source = "stripe"
on = ["invoice.announced"]
subject = "data.object.id"
send = [{ to = "app" }, { to = "app", name = "again" }]

[destinations.app]
kind = "http"
url = "URL"
timeout_s = 5
json = { invoice = "{data.object.id}", key = "{_message.operation_key}" }
"""


@pytest.fixture
def peer() -> Iterator[Peer]:
    with peering() as peer:
        yield peer


class Works:
    """A worker on a World's file, with a connection and threads of its own."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.store = Store.open(Path(world.store.path), world.clock)
        self.writer = OneWriter(self.store)
        self.worker = Worker(lambda: world.processor, self.writer.write, world.clock)
        self.writer.after = self.worker.look
        self.worker.start()

    def look(self) -> None:
        self.writer.look(self.worker.look)

    def stop(self) -> None:
        self.worker.stop()
        self.store.db.close(True)


@pytest.fixture
def sending(world: World, peer: Peer) -> World:
    text = CONFIG.replace('run = "off"', "threads = 2").replace("URL", peer.url())
    world.configure(text + SENDING.replace("URL", peer.url()))
    return world


@pytest.fixture
def works(sending: World) -> Iterator[Works]:
    running = Works(sending)
    yield running
    running.stop()


def queue(world: World) -> None:
    """Make the Stripe source a queued one."""
    path = world.folder / "receiver.toml"
    text = path.read_text()
    world.configure(text.replace("[sources.stripe]", '[sources.stripe]\nmode = "queued"', 1))


def message(world: World, number: int = 1) -> Message:
    found = world.store.write(lambda tx: outbox.by_id(tx, number))
    assert found is not None
    return found


ASKING = """
[sources.slow]
scheme = "stripe"
secrets = ["env:STRIPE"]
mode = "queued"

[[rules]]
operation = "ask"
source = "slow"
on = ["ask"]
subject = "data.object.id"
prepare = "ask"
call = "use"
"""

ASKED = """
from receiver import Park, Quarantine

asked = []


def say(said):
    raise said


def ask(event):
    asked.append(event.id)
    return eval(event.body["data"]["object"]["answer"])


def use(event, tx):
    tx.grant("credits", event.prepared, workspace="acme")


def welcome(event, tx):
    pass
"""

# Events


def test_a_queued_event_is_answered_pending_and_applied_by_the_worker(works: Works) -> None:
    world = works.world
    queue(world)
    world.link()

    word = world.invoice("evt_1", "in_1")
    works.look()

    assert word == "pending"
    until(lambda: world.state("evt_1") == "done")
    assert world.balance() == 100
    assert world.invoice("evt_1", "in_1") == "duplicate"
    assert tries(world) == [(1, "done")]


def tries(world: World) -> list[tuple[int, str | None]]:
    row = world_row(world)
    found = world.store.write(lambda tx: attempts.of_event(tx, row))
    return [(one.attempt, one.outcome) for one in found]


def world_row(world: World, event_id: str = "evt_1") -> int:
    [(row,)] = world.query("select id from receiver_events where event_id = ?", event_id)
    return int(row)


def asking(world: World) -> None:
    (world.folder / "handlers.py").write_text(ASKED)
    world.configure((world.folder / "receiver.toml").read_text() + ASKING)


def test_a_prepare_function_runs_outside_the_transaction_and_its_result_is_handed_on(
    works: Works,
) -> None:
    world = works.world
    asking(world)

    world.stripe("evt_1", "ask", source="slow", id="a", answer="40 + 2")
    works.look()

    until(lambda: world.query("select state from receiver_events") == [("done",)])
    assert world.balance() == 42


def test_a_prepare_function_that_fails_is_a_failed_attempt(works: Works) -> None:
    world = works.world
    asking(world)

    world.stripe("evt_1", "ask", source="slow", id="a", answer="1 / 0")
    works.look()

    until(lambda: world.query("select last_error from receiver_events") != [(None,)])
    row = world.event("evt_1", source="slow")
    assert (row.state, row.attempts) == ("pending", 1)
    assert "ZeroDivisionError" in str(row.last_error)
    assert row.next_attempt_ms is not None
    assert world.clock() <= row.next_attempt_ms <= world.clock() + 5000


@pytest.mark.parametrize(
    ("said", "state"), [("Park('no mapping yet')", "parked"), ("Quarantine('odd')", "quarantined")]
)
def test_a_prepare_function_says_what_a_handler_may_say(
    works: Works, said: str, state: str
) -> None:
    world = works.world
    asking(world)

    world.stripe("evt_1", "ask", source="slow", id="a", answer=f"say({said})")
    works.look()

    until(lambda: world.query("select state from receiver_events") == [(state,)])
    assert tries(world) == [(1, state)]


def test_a_failed_handler_of_a_sync_source_is_answered_pending_and_tried_again(
    works: Works,
) -> None:
    world = works.world
    world.processor.random = lambda: 0.5
    word = world.stripe("evt_1", "handler.called", id="x", run="raise ValueError('boom')")
    assert word == "pending"
    assert world.event("evt_1").next_attempt_ms == world.clock() + 2500

    fixed = "def welcome(event, tx):\n  tx.grant('credits', 1, workspace='acme')\n"
    (world.folder / "handlers.py").write_text(fixed)
    world.configure((world.folder / "receiver.toml").read_text())
    world.clock.now_ms += 2500
    works.look()

    until(lambda: world.state("evt_1") == "done")
    assert world.balance() == 1
    assert tries(world) == [(1, "failed"), (2, "done")]


def test_an_event_that_keeps_failing_is_dead_with_its_history_and_replay_completes_it_once(
    works: Works,
) -> None:
    world = works.world
    text = (world.folder / "receiver.toml").read_text()
    world.configure(text.replace("threads = 2", "threads = 2\nattempts_max = 3"))
    world.stripe("evt_1", "handler.called", id="x", run="raise ValueError('boom')")

    def keep_time() -> bool:
        world.clock.now_ms += 60_000
        works.look()
        return world.state("evt_1") == "dead"

    until(keep_time)
    row = world.event("evt_1")
    assert (row.attempts, row.next_attempt_ms) == (3, None)
    assert row.settled_ms is not None
    tried = world.store.write(lambda tx: attempts.of_event(tx, row.id))
    assert [one.outcome for one in tried] == ["failed"] * 3

    fixed = "def welcome(event, tx):\n  tx.grant('credits', 1, workspace='acme')\n"
    (world.folder / "handlers.py").write_text(fixed)
    world.configure(text)
    for _ in range(2):
        outcome = world.store.write(lambda tx: world.processor.replay(tx, row.id))
        assert outcome.word == "done"
    assert world.balance() == 1


def test_a_poison_event_blocks_no_other(works: Works) -> None:
    world = works.world
    queue(world)
    world.link()
    for n in range(10):
        world.stripe(f"bad_{n}", "handler.called", id=f"b{n}", run="raise ValueError")
    world.invoice("evt_1", "in_1")
    works.look()

    until(lambda: world.state("evt_1") == "done")


def test_a_redelivery_of_a_queued_event_makes_it_due_now(sending: World) -> None:
    world = sending
    queue(world)
    world.invoice("evt_1", "in_1")
    row = world_row(world)
    world.store.write(lambda tx: inbox.fail(tx, row, 1, "later", world.clock() + 99_000))

    assert world.invoice("evt_1", "in_1") == "pending"
    assert world.event("evt_1").next_attempt_ms == world.clock()


def test_a_stale_worker_can_not_settle_an_event_that_was_leased_again(sending: World) -> None:
    world = sending
    queue(world)
    world.link()
    world.invoice("evt_1", "in_1")
    day = 86_400_000
    first = world.store.write(lambda tx: inbox.lease(tx, "one", tx.now_ms + 300_000, day))
    assert first is not None
    assert world.store.write(lambda tx: inbox.lease(tx, "two", tx.now_ms + 300_000, day)) is None

    world.clock.now_ms += EVENT_LEASE_S * 1000 + 1
    second = world.store.write(lambda tx: inbox.lease(tx, "two", tx.now_ms + 300_000, day))

    assert second is not None
    assert second.attempts == 2
    assert not world.store.write(lambda tx: inbox.holds(tx, first.id, "one", first.attempts))
    assert world.store.write(lambda tx: inbox.holds(tx, first.id, "two", second.attempts))
    assert world.invoice("evt_1", "in_1") == "pending"


def test_a_redelivery_after_a_lease_ran_out_closes_the_attempt_that_never_ended(
    sending: World,
) -> None:
    world = sending
    world.link()
    run = "raise ValueError('boom')"
    world.stripe("evt_1", "handler.called", id="x", run=run)
    row = world_row(world)

    def lease(tx: Tx) -> None:
        world.clock.now_ms += 3_600_000
        taken = inbox.lease(tx, "gone", world.clock() + 1000, 86_400_000)
        assert taken is not None
        attempts.start(tx, taken.attempts, event=row)

    world.store.write(lambda tx: inbox.make_due(tx, row, by_worker=True))
    world.store.write(lease)
    world.clock.now_ms += 7_200_000
    world.stripe("evt_1", "handler.called", id="x", run=run)

    assert tries(world) == [(1, "failed"), (2, "unknown"), (3, "failed")]


def test_a_worker_whose_event_was_made_due_again_has_nothing_more_to_settle(
    sending: World,
) -> None:
    """What the operator has said meanwhile it does not know."""
    world = sending
    queue(world)
    world.invoice("evt_1", "in_1", customer=None)
    taken = world.store.write(lambda tx: inbox.lease(tx, "slow", tx.now_ms + 1000, 86_400_000))
    assert taken is not None
    world.store.write(lambda tx: attempts.start(tx, taken.attempts, event=taken.id))
    world.clock.now_ms += 1001

    world.store.write(lambda tx: operate.attribute(tx, taken.id, "acme", BY))

    assert not world.store.write(lambda tx: inbox.holds(tx, taken.id, "slow", taken.attempts))
    assert tries(world) == [(1, "unknown")]
    world.drain()
    assert (world.state("evt_1"), world.balance()) == ("done", 100)


# Messages


def test_two_events_for_one_invoice_owe_each_message_once(works: Works, peer: Peer) -> None:
    world = works.world

    world.stripe("evt_1", "invoice.announced", id="in_1")
    world.stripe("evt_2", "invoice.announced", id="in_1")
    works.look()

    until(lambda: world.query("select distinct state from receiver_outbox") == [("sent",)])
    assert len(peer.seen) == 2
    first, again = message(world, 1), message(world, 2)
    assert (first.name, again.name) == ("", "again")
    assert {one.key for one in peer.seen} == {first.operation_key, again.operation_key}
    assert json.loads(peer.seen[0].body) == {"invoice": "in_1", "key": peer.seen[0].key}


def test_a_handler_sends_too(works: Works, peer: Peer) -> None:
    world = works.world
    code = "assert tx.send('app', name='n', data={'x': 1}) and not tx.send('app', name='n')"

    assert world.stripe("evt_1", "handler.called", id="x", run=code) == "done"
    works.look()

    until(lambda: message(world).state == "sent")
    assert len(peer.seen) == 1


def test_a_message_is_undone_with_its_event(works: Works, peer: Peer) -> None:
    world = works.world
    code = "tx.send('app')\nraise Quarantine('no')"

    assert world.stripe("evt_1", "handler.called", id="x", run=code) == "quarantined"
    assert world.query("select * from receiver_outbox") == []


def test_what_is_owed_is_not_altered_by_a_later_config(sending: World, peer: Peer) -> None:
    world = sending
    world.stripe("evt_1", "invoice.announced", id="in_1")
    text = (world.folder / "receiver.toml").read_text()
    world.configure(text.replace('invoice = "{data.object.id}"', 'invoice = "changed"'))

    works = Works(world)
    works.look()
    until(lambda: len(peer.seen) == 2)
    works.stop()

    assert {json.loads(one.body)["invoice"] for one in peer.seen} == {"in_1"}


def test_a_message_that_does_not_render_is_dead_and_the_grant_stays(sending: World) -> None:
    world = sending
    world.link()
    text = (world.folder / "receiver.toml").read_text()
    text = text.replace('subject = "data.object.id"\nsend', 'subject = "data.object.id"\nsend')
    text = text.replace(
        'grant = { unit = "credits", amount = 100 }',
        'grant = { unit = "credits", amount = 100 }\nsend = [{ to = "app" }]',
        1,
    )
    world.configure(text.replace('"{data.object.id}"', '"invoice {data.object.number}"'))

    assert world.invoice("evt_1", "in_1") == "done"

    assert world.balance() == 100
    dead = message(world)
    assert (dead.state, dead.next_attempt_ms) == ("dead", None)
    assert "data.object.number" in str(dead.last_error)


SENT, LATER = Sent(detail=""), Later(why="busy", retry_after_s=None, unreachable=False)


def take(tx: Tx, world: World, owner: str) -> Leased | int | None:
    settings = world.processor.settings
    return dispatch.lease(
        tx,
        worker=settings.worker,
        destination=settings.destinations["app"],
        owner=owner,
        ahead_ms=86_400_000,
    )


def leased(world: World, *, first_ms: int | None = None) -> Leased:
    found = world.store.write(lambda tx: take(tx, world, "me"))
    assert isinstance(found, Leased)
    return found if first_ms is None else found._replace(first_ms=first_ms)


def settle(world: World, lease: Leased, result: Result) -> bool:
    destination = world.processor.settings.destinations["app"]
    return world.store.write(
        lambda tx: dispatch.settle(
            tx,
            processor=world.processor,
            destination=destination,
            leased=lease,
            result=result,
        )
    )


@pytest.mark.parametrize(
    ("result", "state", "outcome"),
    [
        (Sent(detail="200"), "sent", "sent"),
        (Never(why="404"), "dead", "refused"),
        (LATER, "pending", "failed"),
        (Unknown(why="time-out"), "pending", "unknown"),
    ],
)
def test_each_result_of_a_send_has_its_state(
    sending: World, result: Result, state: str, outcome: str
) -> None:
    sending.stripe("evt_1", "invoice.announced", id="in_1")

    assert settle(sending, leased(sending), result)

    assert message(sending).state == state
    tried = sending.store.write(lambda tx: attempts.of_message(tx, 1))
    assert [(one.attempt, one.outcome) for one in tried] == [(1, outcome)]


def test_retry_after_is_honoured_within_the_cap(sending: World) -> None:
    sending.stripe("evt_1", "invoice.announced", id="in_1")
    now_ms = sending.clock()

    settle(sending, leased(sending), Later(why="429", retry_after_s=120, unreachable=False))
    assert message(sending).next_attempt_ms == now_ms + 120_000

    settle(sending, leased(sending), Later(why="429", retry_after_s=1e9, unreachable=False))
    assert message(sending, 2).next_attempt_ms == now_ms + 3_600_000


def policy(world: World, line: str) -> None:
    text = (world.folder / "receiver.toml").read_text()
    world.configure(text.replace("timeout_s = 5", f"timeout_s = 5\n{line}"))


def test_an_unknown_outcome_waits_for_the_operator_where_asked(sending: World) -> None:
    policy(sending, 'ambiguous = "review"')
    sending.stripe("evt_1", "invoice.announced", id="in_1")

    settle(sending, leased(sending), Unknown(why="reset"))

    waiting = message(sending)
    assert (waiting.state, waiting.next_attempt_ms) == ("review", None)


def test_an_unknown_outcome_is_repeated_while_the_other_side_honours_the_key(
    sending: World,
) -> None:
    policy(sending, "idempotent_for_s = 60")
    sending.stripe("evt_1", "invoice.announced", id="in_1")

    settle(sending, leased(sending), Unknown(why="reset"))
    assert message(sending).state == "pending"

    sending.clock.now_ms += 61_000
    first = leased(sending)
    settle(sending, first, Unknown(why="reset"))
    assert message(sending, first.message.id).state == (
        "review" if first.message.id == 1 else "pending"
    )


def test_a_crash_with_the_lease_open_is_an_unknown_outcome(sending: World) -> None:
    policy(sending, 'ambiguous = "review"')
    sending.stripe("evt_1", "invoice.announced", id="in_1")
    stale = leased(sending)
    other = leased(sending)
    assert (stale.message.id, other.message.id) == (1, 2)

    sending.clock.now_ms += 120_000
    nothing = sending.store.write(lambda tx: take(tx, sending, "new"))

    assert nothing is None
    assert [message(sending, n).state for n in (1, 2)] == ["review", "review"]
    assert not settle(sending, stale, SENT)
    assert message(sending).state == "review"


def test_a_stale_worker_can_not_settle_a_message_that_was_leased_again(sending: World) -> None:
    sending.stripe("evt_1", "invoice.announced", id="in_1")
    stale = leased(sending)
    leased(sending)
    sending.clock.now_ms += 120_000
    again = leased(sending)
    assert (again.message.id, again.attempt) == (1, 2)

    assert not settle(sending, stale, Never(why="late"))
    assert message(sending).state == "pending"
    assert settle(sending, again, SENT)
    assert not settle(sending, stale, Never(why="later"))
    assert message(sending).state == "sent"


def test_attempts_are_bounded_by_the_destination(sending: World) -> None:
    policy(sending, "attempts_max = 2")
    sending.stripe("evt_1", "invoice.announced", id="in_1")

    for expected in ("pending", "dead"):
        lease = leased(sending)
        while lease.message.id != 1:
            settle(sending, lease, SENT)
            lease = leased(sending)
        settle(sending, lease, LATER)
        assert message(sending).state == expected
        sending.clock.now_ms += 3_600_000


@pytest.mark.parametrize("days", [1, -1])
def test_a_clock_that_jumps_neither_stalls_nor_kills_work(
    works: Works, peer: Peer, days: int
) -> None:
    world = works.world
    peer.status = 503
    world.stripe("evt_1", "invoice.announced", id="in_1")
    works.look()
    failed = "select count(*) from receiver_outbox where last_error is not null"
    until(lambda: world.query(failed) == [(2,)])

    peer.status = 200
    world.clock.now_ms += days * 86_400_000
    works.look()

    def sent() -> bool:
        works.look()
        return world.query("select distinct state from receiver_outbox") == [("sent",)]

    until(sent)


def test_a_message_that_is_refused_for_good_is_a_warning_that_names_it(
    works: Works, peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    peer.status = 404
    works.world.stripe("evt_1", "invoice.announced", id="in_1")
    works.look()
    until(lambda: works.world.query("select distinct state from receiver_outbox") == [("dead",)])

    until(lambda: caplog.text.count("outcome=refused") == 2)
    told = [one for one in caplog.records if "outcome=refused" in one.getMessage()]
    assert {one.levelname for one in told} == {"WARNING"}
    assert all(f"number={n}" in caplog.text for n in (1, 2))


def test_a_dead_destination_keeps_its_messages_attempts_and_delays_no_other(
    works: Works, peer: Peer
) -> None:
    world = works.world
    text = (world.folder / "receiver.toml").read_text()
    gone = """
[[rules]]
operation = "shout"
source = "stripe"
on = ["shout"]
subject = "data.object.id"
send = [{ to = "gone" }]

[destinations.gone]
kind = "http"
url = "http://127.0.0.1:1/"
"""
    world.configure(text + gone)
    works.worker.start()
    for n in range(1000):
        world.stripe(f"evt_{n}", "shout", id=f"s{n}")
    works.look()
    until(lambda: world.query("select max(attempts) from receiver_outbox") == [(1,)])

    world.stripe("evt_x", "invoice.announced", id="in_1")
    works.look()
    until(lambda: len(peer.seen) == 2)

    [(tries,)] = world.query("select sum(attempts) from receiver_outbox where destination = 'gone'")
    assert tries < 20
