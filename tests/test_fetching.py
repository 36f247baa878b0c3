"""What an event only hints at is read from a real server, once more after each hint."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from receiver import fetching
from receiver.client import Client, Found
from receiver.config import load
from receiver.process import Processor
from receiver.work import OneWriter
from receiver.worker import Worker
from store import conflicts, fetches, resources
from store.database import Job, Store, Tx
from store.fetches import Fetch
from store.resources import Name, Resource
from tests.conftest import SECRETS, Clock, World, stripe_body
from tests.sender_api import KEY, SenderApi, error, sender_api
from tests.service import until

AT = "/v1/subscriptions/sub_1"
SUBSCRIPTION = Name("stripe", "", "subscription", "sub_1")

CONFIG = """
[worker]
threads = 2
backoff_first_s = 1
attempts_max = 5

[sources.stripe]
scheme = "stripe"
secrets = ["env:STRIPE"]
livemode = false
api = { key = "env:API", base_url = "URL" }

[[rules]]
operation = "subscription-state"
source = "stripe"
on = ["customer.subscription.*", "v1.customer.subscription.*"]
project.kind = "subscription"
project.id = ["data.object.id", "related_object.id"]
project.state = "status"
project.fields = { plan = "{plan}" }
project.terminal = ["canceled"]

[[rules]]
operation = "note-end"
source = "stripe"
on = ["customer.subscription.paused", "v1.customer.subscription.*", "invoice.*"]
resource.kind = "subscription"
resource.id = ["related_object.id", "data.object.subscription", "data.object.id"]
when = { "_resource.state" = "canceled" }
record = { kind = "end", data = { plan = "{_resource.fields.plan}" } }
"""


@pytest.fixture
def far() -> Iterator[SenderApi]:
    with sender_api() as api:
        api.put(AT, status="active", plan="basic")
        yield api


@pytest.fixture
def hinted(world: World, far: SenderApi) -> World:
    return configured(world, CONFIG.replace("URL", far.url))


def configured(world: World, text: str, key: str = KEY) -> World:
    path = world.folder / "receiver.toml"
    path.write_text(text)
    world.processor = Processor.load(load(path, environment=SECRETS | {"API": key}))
    world.store.write(world.processor.start)
    return world


class Works:
    """A worker on a World's file, with a connection and threads of its own."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.store = Store.open(Path(world.store.path), world.clock)
        self.writer = OneWriter(self.store)
        self.worker = Worker(lambda: world.processor, self.writer.write, world.clock)
        self.writer.after = self.worker.look
        self.worker.start()

    def until(self, true: Callable[[], bool]) -> None:
        """Wait for it; what the test writes wakes the worker as the server's commits do."""

        def looked() -> bool:
            self.writer.look(self.worker.look)
            return true()

        until(looked)

    def until_idle(self) -> None:
        """Wait until nothing is owed, and apply what was released, as the server does."""
        self.until(lambda: not owed(self.world))
        self.world.drain()

    def stop(self) -> None:
        self.worker.stop()
        self.store.db.close(True)


@pytest.fixture
def works(hinted: World) -> Iterator[Works]:
    running = Works(hinted)
    yield running
    running.stop()


def body_of(event: str, resource_id: str = "sub_1", **envelope: object) -> bytes:
    """An event of a subscription; what it says of it is old."""
    type = f"customer.subscription.{event.rpartition('-')[2]}"
    event_id = f"evt_{event}_{resource_id}"
    return stripe_body(event_id, type, envelope=envelope, id=resource_id, status="stale")


def tell(world: World, event: str, resource_id: str = "sub_1", **envelope: object) -> str:
    return world.deliver("stripe", body_of(event, resource_id, **envelope))


def owed(world: World) -> list[Fetch]:
    """What is still to be fetched, and not dead."""
    found = world.store.write(partial(fetches.unfinished, limit=500))
    return [one for one in found if one.state == "pending"]


def fetch(world: World, name: Name = SUBSCRIPTION) -> Fetch:
    found = world.store.write(lambda tx: fetches.find(tx, name))
    assert found is not None
    return found


def known(world: World, resource_id: str = "sub_1", account: str = "") -> Resource | None:
    name = SUBSCRIPTION._replace(resource_id=resource_id, account=account)
    return world.store.write(lambda tx: resources.find(tx, name))


def state(world: World, resource_id: str = "sub_1") -> str | None:
    found = known(world, resource_id)
    return None if found is None else found.state


# A worker by hand: each step of an attempt, when the test says so


def lease_job(world: World, owner: str) -> Callable[[Tx], Fetch | int | None]:
    return partial(
        fetching.lease,
        worker=world.processor.settings.worker,
        endpoint="stripe",
        owner=owner,
        ahead_ms=3_600_000,
    )


def lease(world: World, owner: str = "one") -> Fetch:
    leased = world.store.write(lease_job(world, owner))
    assert isinstance(leased, Fetch), leased
    return leased


def settle(world: World, leased: Fetch, **fields: Any) -> bool:
    document = {"id": "sub_1", "status": "active", "plan": "basic"} | fields
    reply = Found(document, {})
    return world.store.write(
        partial(fetching.settle, processor=world.processor, leased=leased, reply=reply)
    )


# Hints


def test_an_event_is_done_when_its_hint_is_durable_and_the_state_is_fetched(
    hinted: World, far: SenderApi
) -> None:
    assert tell(hinted, "created") == "done"
    assert state(hinted) is None
    assert [one.name for one in owed(hinted)] == [SUBSCRIPTION]

    works = Works(hinted)
    works.until_idle()
    works.stop()

    found = known(hinted)
    assert found is not None
    assert (found.state, found.fields, found.came_from) == ("active", '{"plan":"basic"}', "fetch")
    assert found.event == hinted.event("evt_created_sub_1").id


def test_a_hint_is_fetched_without_being_asked_for(works: Works, far: SenderApi) -> None:
    tell(works.world, "created")

    works.until_idle()

    assert state(works.world) == "active"


def test_hints_that_come_meanwhile_are_one_more_fetch(hinted: World) -> None:
    tell(hinted, "created")
    leased = lease(hinted)
    for number in range(5):
        tell(hinted, f"{number}-updated")

    assert settle(hinted, leased)
    again = lease(hinted)
    assert settle(hinted, again, status="past_due")

    assert fetch(hinted).state == "done"
    assert fetch(hinted).fence == 2
    assert state(hinted) == "past_due"


def test_hints_that_wait_are_one_fetch(works: Works, far: SenderApi) -> None:
    gate = threading.Event()
    far.before_answer = lambda path, number: hold(gate)
    tell(works.world, "created")
    works.until(lambda: len(far.asked) == 1)
    for number in range(20):
        tell(works.world, f"{number}-updated")
    far.put(AT, status="canceled", plan="pro")
    gate.set()

    works.until_idle()

    assert len(far.asked) == 2
    assert state(works.world) == "canceled"


def hold(gate: threading.Event) -> None:
    assert gate.wait(20)


def test_an_earlier_fetch_never_takes_the_place_of_a_later_one(hinted: World, clock: Clock) -> None:
    tell(hinted, "created")
    slow = lease(hinted, "slow")
    clock.now_ms += int(fetching.LEASE_S * 1000) + 1
    quick = lease(hinted, "quick")

    assert settle(hinted, quick, status="canceled")
    assert not settle(hinted, slow, status="active")

    assert state(hinted) == "canceled"
    assert fetch(hinted).state == "done"


def test_an_earlier_fetch_is_nothing_even_while_the_later_one_is_under_way(
    hinted: World, clock: Clock
) -> None:
    tell(hinted, "created")
    # The same thread may come back to the same resource: only the fence tells them apart.
    slow = lease(hinted, "one")
    clock.now_ms += int(fetching.LEASE_S * 1000) + 1
    quick = lease(hinted, "one")

    assert not settle(hinted, slow, status="past_due")
    assert settle(hinted, quick, status="canceled")

    assert state(hinted) == "canceled"


def test_one_resource_has_one_fetch_at_a_time(works: Works, far: SenderApi) -> None:
    gate, under_way = threading.Event(), []
    at_once = []

    def before(path: str, number: int) -> None:
        under_way.append(path)
        at_once.append(under_way.count(path))
        hold(gate)
        under_way.remove(path)

    far.before_answer = before
    for number in range(4):
        far.put(f"/v1/subscriptions/sub_{number}", status="active", plan="basic")
        tell(works.world, "created", f"sub_{number}")
        tell(works.world, "1-updated", f"sub_{number}")
    works.until(lambda: len(under_way) == 2)
    gate.set()

    works.until_idle()

    assert set(at_once) == {1}


def test_an_account_of_the_event_is_asked_for_as_that_account(works: Works, far: SenderApi) -> None:
    tell(works.world, "created", account="acct_2")

    works.until_idle()

    assert far.asked[0][1]["stripe-account"] == "acct_2"
    assert known(works.world) is None
    assert known(works.world, account="acct_2") is not None


def test_a_replay_of_an_old_event_asks_for_nothing(works: Works, far: SenderApi) -> None:
    world = works.world
    tell(world, "created")
    works.until_idle()
    before = known(world)

    row = world.event("evt_created_sub_1").id
    world.store.write(partial(world.processor.replay, row=row))

    assert owed(world) == []
    assert known(world) == before


# Every life, in every order, at every speed

LIFE = (
    ("created", "incomplete"),
    ("1-updated", "active"),
    ("2-updated", "past_due"),
    ("deleted", "canceled"),
    ("late-updated", None),
)


def test_every_order_of_a_life_ends_in_the_same_state_at_every_speed(
    hinted: World, far: SenderApi, clock: Clock
) -> None:
    """What the sender has moves on, whatever order its events come in; some answers are slow."""
    api = hinted.processor.settings.sources["stripe"].api
    assert api is not None
    lives = {f"sub_{i}": order for i, order in enumerate(itertools.permutations(LIFE))}
    late: list[tuple[Fetch, Any]] = []
    with contextlib.closing(Client(api, livemode=False)) as client:
        for step in range(len(LIFE)):
            status = LIFE[step][1] or "canceled"
            plan = "pro" if status == "canceled" else "basic"
            for name in lives:
                far.put(f"/v1/subscriptions/{name}", status=status, plan=plan)
            receive(hinted, [(order[step][0], name) for name, order in lives.items()])
            replay(hinted, [(order[0][0], name) for name, order in lives.items()])
            read = read_all(hinted, client)
            # Every second answer is held up until its lease is over and others were here.
            settle_all(hinted, read[::2])
            late += read[1::2]
            clock.now_ms += int(fetching.LEASE_S * 1000) + 1
        while read := read_all(hinted, client):
            settle_all(hinted, read)
    applied = settle_all(hinted, reversed(late))

    assert late
    assert not any(applied)
    ends = set(map(projected, hinted.store.write(partial(resources.listed, limit=200))))
    assert ends == {("canceled", '{"plan":"pro"}', True, False, False)}


def projected(one: Resource) -> tuple[object, ...]:
    return (one.state, one.fields, one.terminal, one.deleted, one.contested)


def receive(world: World, told: list[tuple[str, str]]) -> None:
    """Many events in few commits."""
    events = [world.sign("stripe", body_of(event, name)) for event, name in told]
    world.store.write_all(
        [Job(partial(world.processor.receive, events=one, request_id="r")) for one in events]
    )


def replay(world: World, told: list[tuple[str, str]]) -> None:
    ids = [f"evt_{event}_{name}" for event, name in told]
    rows = [row for one in ids for (row,) in world.query(ROW, one)]
    world.store.write_all([Job(partial(world.processor.replay, row=row)) for row in rows])


ROW = "select id from receiver_events where event_id = ?"


def read_all(world: World, client: Client) -> list[tuple[Fetch, Any]]:
    """Lease all that is due, and ask the sender for it."""
    leases = [Job(lease_job(world, "a thread")) for _ in owed(world)]
    world.store.write_all(leases)
    taken = [job.result for job in leases if isinstance(job.result, Fetch)]
    path = "/v1/subscriptions/{id}"
    return [(one, fetching.read(client, one, path, world.clock())) for one in taken]


def settle_all(world: World, read: Iterable[tuple[Fetch, Any]]) -> list[bool | None]:
    settling = partial(fetching.settle, processor=world.processor)
    jobs = [Job(partial(settling, leased=leased, reply=reply)) for leased, reply in read]
    world.store.write_all(jobs)
    assert not any(job.error for job in jobs)
    return [job.result for job in jobs]


def test_many_workers_and_hints_at_once_end_with_what_the_sender_has(
    hinted: World, far: SenderApi
) -> None:
    running = [Works(hinted) for _ in range(2)]
    try:
        for step in range(5):
            for number in range(6):
                status = "canceled" if step == 4 else f"state-{step}"
                far.put(f"/v1/subscriptions/sub_{number}", status=status, plan="pro")
                tell(hinted, f"{step}-updated", f"sub_{number}")
        for works in running:
            works.until_idle()
    finally:
        for works in running:
            works.stop()

    assert [state(hinted, f"sub_{number}") for number in range(6)] == ["canceled"] * 6


# What is gone, and what had ended


def test_what_is_missing_at_the_sender_is_deleted(works: Works, far: SenderApi) -> None:
    tell(works.world, "created")
    works.until_idle()
    far.remove(AT)
    tell(works.world, "1-updated")

    works.until_idle()

    found = known(works.world)
    assert found is not None
    assert (found.state, found.deleted, found.terminal) == ("deleted", True, True)
    assert found.fields == '{"plan":"basic"}'


def test_a_key_to_which_nothing_is_there_deletes_nothing(works: Works, far: SenderApi) -> None:
    world = works.world
    far.remove(AT)
    tell(world, "created")

    works.until(lambda: fetch(world).last_error is not None)
    assert state(world) is None
    assert "is api.key a key of the account" in str(fetch(world).last_error)

    world.store.write(lambda tx: fetches.insist(tx, SUBSCRIPTION, mend=True))
    works.until_idle()
    assert state(world) == "deleted"


def test_what_had_ended_and_lives_again_is_a_conflict_until_the_operator_takes_it(
    works: Works, far: SenderApi
) -> None:
    world = works.world
    far.put(AT, status="canceled", plan="pro")
    tell(world, "deleted")
    works.until_idle()
    far.put(AT, status="active", plan="pro")
    tell(world, "1-updated")
    works.until_idle()

    found = known(world)
    assert found is not None
    assert (found.state, found.contested) == ("canceled", True)
    (conflict,) = world.store.write(conflicts.listed)
    assert b'"active"' in (conflict.body or b"")

    def mend(tx: Tx) -> None:
        fetches.want(tx, SUBSCRIPTION, "stripe", None)
        fetches.insist(tx, SUBSCRIPTION, mend=True)

    world.store.write(mend)
    works.until_idle()

    found = known(world)
    assert found is not None
    assert (found.state, found.contested) == ("active", False)
    assert not fetch(world).mend


# What goes wrong


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (error(401), "the key is refused (correct api.key)"),
        (error(403), "the key may not read this"),
        (error(503), "503 Service Unavailable"),
        (error(404), "is api.base_url right?"),
    ],
)
def test_what_can_not_be_read_now_stays_owed_and_says_why(
    works: Works, far: SenderApi, answer: Any, words: str
) -> None:
    far.instead = lambda path: answer
    tell(works.world, "created")

    works.until(lambda: fetch(works.world).last_error is not None)

    assert fetch(works.world).state == "pending"
    assert words in str(fetch(works.world).last_error)
    assert state(works.world) is None


def test_a_key_that_is_corrected_fetches_what_was_owed(hinted: World, far: SenderApi) -> None:
    configured(hinted, CONFIG.replace("URL", far.url), "sk_test_wrong")
    tell(hinted, "created")
    works = Works(hinted)
    works.until(lambda: fetch(hinted).last_error is not None)
    assert state(hinted) is None

    configured(hinted, CONFIG.replace("URL", far.url))
    hinted.clock.now_ms += 3_600_000
    works.until(lambda: state(hinted) == "active")
    works.stop()

    assert fetch(hinted).last_error is None


def test_retry_after_is_kept_to(works: Works, far: SenderApi, clock: Clock) -> None:
    far.instead = lambda path: error(503, {"Retry-After": "100"})
    tell(works.world, "created")

    works.until(lambda: fetch(works.world).last_error is not None)

    assert fetch(works.world).next_attempt_ms == clock.now_ms + 100_000


def test_a_refusal_ends_it_and_a_new_hint_revives_it(works: Works, far: SenderApi) -> None:
    far.instead = lambda path: error(400, code="parameter_unknown")
    tell(works.world, "created")
    works.until(lambda: fetch(works.world).state == "dead")

    far.instead = lambda path: None
    tell(works.world, "1-updated")
    works.until_idle()

    assert state(works.world) == "active"


def test_what_has_no_attempt_left_is_dead(hinted: World, clock: Clock) -> None:
    tell(hinted, "created")
    for _ in range(5):
        lease(hinted)
        clock.now_ms += int(fetching.LEASE_S * 1000) + 1

    next_due = hinted.store.write(lease_job(hinted, "one"))

    assert next_due is None
    assert fetch(hinted).state == "dead"
    assert fetch(hinted).last_error == "no attempt is left: the last one never ended"


def test_an_answer_that_can_not_be_projected_is_dead_with_the_reason(
    works: Works, far: SenderApi
) -> None:
    far.put(AT, plan="basic")
    tell(works.world, "created")

    works.until(lambda: fetch(works.world).state == "dead")

    assert "status: is missing" in str(fetch(works.world).last_error)


def test_a_worker_that_dies_in_the_middle_leaves_it_owed(hinted: World, clock: Clock) -> None:
    tell(hinted, "created")
    lease(hinted)
    clock.now_ms += int(fetching.LEASE_S * 1000) + 1

    again = lease(hinted, "another")
    assert again.attempts == 2
    assert settle(hinted, again)

    assert state(hinted) == "active"


def test_a_clock_that_is_set_back_delays_nothing(hinted: World, clock: Clock) -> None:
    tell(hinted, "created")
    clock.now_ms -= 10 * 86_400_000

    assert settle(hinted, lease(hinted))
    assert fetch(hinted).state == "done"


def test_a_source_that_lost_its_api_leaves_what_is_owed(hinted: World, far: SenderApi) -> None:
    tell(hinted, "created")
    text = CONFIG.replace('api = { key = "env:API", base_url = "URL" }', "")
    configured(hinted, text.replace("project.state", 'project.created = "created"\nproject.state'))
    works = Works(hinted)
    works.stop()

    assert len(owed(hinted)) == 1


# Rules that depend on it, and thin events


def notes(world: World) -> list[str]:
    return [data for (data,) in world.query("select data from receiver_records")]


def test_a_rule_that_depends_on_it_is_applied_after_the_fetch(
    hinted: World, far: SenderApi
) -> None:
    far.put(AT, status="canceled", plan="pro")

    assert tell(hinted, "paused") == "parked"
    assert notes(hinted) == []
    works = Works(hinted)
    works.until_idle()
    works.stop()

    assert hinted.state("evt_paused_sub_1") == "done"
    assert notes(hinted) == ['{"plan":"pro"}']


def test_a_thin_event_is_applied_after_the_fetch(works: Works, far: SenderApi) -> None:
    far.put(AT, status="canceled", plan="pro")
    body = (
        b'{"id": "evt_thin", "object": "v2.core.event", "livemode": false,'
        b' "type": "v1.customer.subscription.paused", "created": "2027-01-15T08:00:00Z",'
        b' "related_object": {"id": "sub_1", "type": "subscription", "url": "/v1/evil"}}'
    )

    assert works.world.deliver("stripe", body) == "parked"
    works.until_idle()

    assert works.world.state("evt_thin") == "done"
    assert notes(works.world) == ['{"plan":"pro"}']
    # Where to ask is the config's business, not the event's.
    assert far.paths == [AT]


def test_a_fetch_that_began_before_the_event_came_is_not_enough(hinted: World) -> None:
    tell(hinted, "created")
    early = lease(hinted)
    assert tell(hinted, "paused") == "parked"

    settle(hinted, early, status="active")
    hinted.drain()
    assert hinted.state("evt_paused_sub_1") == "parked"

    settle(hinted, lease(hinted), status="canceled")
    hinted.drain()
    assert hinted.state("evt_paused_sub_1") == "done"
    assert owed(hinted) == []


def test_an_event_that_waits_is_applied_when_the_resource_is_gone(
    works: Works, far: SenderApi
) -> None:
    tell(works.world, "created")
    works.until_idle()
    far.remove(AT)
    assert tell(works.world, "paused") == "parked"

    works.until_idle()

    assert works.world.state("evt_paused_sub_1") == "done"


def test_an_event_that_waits_for_a_dead_fetch_stays_parked_until_it_is_asked_again(
    works: Works, far: SenderApi
) -> None:
    world = works.world
    far.instead = lambda path: error(400)
    tell(world, "paused")
    works.until(lambda: fetch(world).state == "dead")
    world.drain()
    assert world.state("evt_paused_sub_1") == "parked"

    far.instead = lambda path: None
    row = world.event("evt_paused_sub_1").id
    world.store.write(partial(world.processor.replay, row=row))
    works.until_idle()

    assert world.state("evt_paused_sub_1") in ("done", "ignored")


def test_an_invoice_waits_for_its_subscription(works: Works, far: SenderApi) -> None:
    far.put(AT, status="canceled", plan="pro")

    word = works.world.stripe("evt_i", "invoice.paid", id="in_1", subscription="sub_1")
    assert word == "parked"
    works.until_idle()

    assert works.world.state("evt_i") == "done"
    assert state(works.world) == "canceled"
