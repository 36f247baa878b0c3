"""What a sender has and we do not is found by its API, and goes through the same rules, once."""

import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from receiver.console import rfc3339
from receiver.operate import By, drain
from receiver.pages import Stopped
from receiver.reconcile import Asked, Difference, Means, Result, Run
from receiver.work import OneWriter
from store import audit, reconciles, resources
from store.database import Store
from store.resources import Name, Seen
from tests.conftest import NOW_MS, World, stripe_body
from tests.sender_api import Reply, error
from tests.sender_lists import NOW_S, SenderLists, sender_lists
from tests.test_fetching import configured

EVENTS = "/v1/events"
DAY_S = 86_400

CONFIG = """
[sources.stripe]
scheme = "stripe"
secrets = ["env:STRIPE"]
livemode = false
api = { key = "env:API", base_url = "URL" }

[[rules]]
operation = "link-customer"
source = "stripe"
on = ["checkout.session.completed"]
link = { customer = "data.object.customer", workspace = "data.object.client_reference_id" }

[[rules]]
operation = "initial-credit-grant"
source = "stripe"
on = ["invoice.paid"]
subject = "data.object.id"
customer = "data.object.customer"
grant = { unit = "credits", amount = 100 }

[[rules]]
operation = "note-plan"
source = "stripe"
on = ["invoice.paid"]
subject = "data.object.id"
sql = ["insert into plan_history (workspace, plan) values ('acme', {data.object.id})"]
"""


@pytest.fixture
def far() -> Iterator[SenderLists]:
    with sender_lists() as lists:
        lists.add(EVENTS)
        yield lists


@pytest.fixture
def hooked(world: World, far: SenderLists) -> World:
    configured(world, CONFIG.replace("URL", far.url))
    world.link()
    return world


class Told:
    """What a run tells, and what it waits for."""

    def __init__(self) -> None:
        self.differences: list[Difference] = []
        self.notes: list[str] = []
        self.waited: list[float] = []
        self.parts: list[float] = []

    def difference(self, one: Difference) -> None:
        self.differences.append(one)

    def note(self, words: str) -> None:
        self.notes.append(words)

    def progress(self, part: float) -> None:
        self.parts.append(part)

    @property
    def ids(self) -> list[str]:
        return [one.id for one in self.differences]


def means(
    world: World, told: Told, store: Store | None = None, owner: str = "elsewhere/1/one"
) -> Means:
    store = store or world.store
    return Means(
        processor=world.processor,
        write=OneWriter(store).write,
        clock=world.clock,
        wait=lambda seconds, why: told.waited.append(seconds),
        owner=owner,
        by=By("root", "an outage"),
        drain=lambda: drain(store, world.processor),
    )


def run(world: World, source: str = "stripe", **asked: Any) -> tuple[Result, Told]:
    told = Told()
    what = Asked(**{"accounts": ("",)} | asked)
    return Run(world.processor.settings.sources[source], what, means(world, told), told).run(), told


def paid(number: int, *, minutes_ago: int = 60, **envelope: Any) -> dict[str, Any]:
    """The event of a paid invoice, as the sender has it."""
    body = stripe_body(
        f"evt_{number}",
        "invoice.paid",
        envelope={"created": NOW_S - minutes_ago * 60, "pending_webhooks": 0} | envelope,
        id=f"in_{number}",
        customer="cus_1",
    )
    found: dict[str, Any] = json.loads(body)
    return found


def deliver(world: World, event: dict[str, Any]) -> str:
    return world.deliver("stripe", json.dumps(event | {"pending_webhooks": 1}).encode())


def outage(world: World, far: SenderLists, whole: int = 500) -> list[dict[str, Any]]:
    """So many events at the sender; each tenth from 0 to 5 is handled, three of ten never came."""
    events = [paid(n, minutes_ago=9_000 - n) for n in range(whole)]
    far.add(EVENTS, *events)
    crashed = [one for n, one in enumerate(events) if n % 50 in (0, 1, 2)]
    lost = [one for n, one in enumerate(events) if n % 25 in (5, 9, 11, 13, 17, 23)]
    world.query("drop table plan_history")
    for one in crashed:
        assert deliver(world, one) == "pending"
    world.query("create table plan_history (workspace text not null, plan text not null) strict")
    for one in events:
        if one not in lost and one not in crashed:
            assert deliver(world, one) == "done"
    return events


def test_an_outage_is_found_exactly_and_mended_and_then_there_is_nothing(
    hooked: World, far: SenderLists
) -> None:
    outage(hooked, far)
    assert hooked.balance() == 350 * 100

    found, told = run(hooked)

    assert (found.counts.listed, found.counts.missing, found.counts.unfinished) == (500, 120, 30)
    assert found.gap == len(set(told.ids)) == 150
    assert hooked.balance() == 350 * 100
    mended, _ = run(hooked, apply=True)
    assert (mended.counts.missing, mended.counts.unfinished, mended.gap) == (120, 30, 0)
    assert hooked.balance() == 500 * 100
    assert hooked.query("select count(distinct plan), count(*) from plan_history") == [(500, 500)]
    again, told = run(hooked, apply=True)
    assert (again.counts.missing, again.counts.unfinished, again.gap) == (0, 0, 0)
    assert told.differences == []
    last = hooked.store.write(lambda tx: reconciles.last(tx, "stripe"))
    assert last is not None
    assert last.gap == 0


def test_two_runs_at_once_beside_live_redelivery_grant_nothing_twice(
    hooked: World, far: SenderLists
) -> None:
    events = outage(hooked, far, 200)
    failures: list[BaseException] = []

    def other(owner: str) -> None:
        told = Told()
        store = Store.open(Path(hooked.store.path), hooked.clock)
        try:
            ours = means(hooked, told, store, owner)
            source = hooked.processor.settings.sources["stripe"]
            Run(source, Asked(("",), apply=True), ours, told).run()
        except BaseException as failed:
            failures.append(failed)
        finally:
            store.close()

    threads = [threading.Thread(target=other, args=(f"run-{n}",)) for n in range(2)]
    for thread in threads:
        thread.start()
    for one in events:
        deliver(hooked, one)
    for thread in threads:
        thread.join(60)

    assert failures == []
    assert hooked.balance() == 200 * 100
    assert hooked.query("select count(distinct plan), count(*) from plan_history") == [(200, 200)]
    assert run(hooked)[0].gap == 0


def test_an_event_of_reconcile_tells_its_origin_and_the_account_that_was_asked_for(
    hooked: World, far: SenderLists
) -> None:
    hooked.link(account="acct_2")
    far.add(EVENTS, paid(1), account="acct_2")

    found, _ = run(hooked, accounts=("acct_2",), apply=True)

    assert found.gap == 0
    row = hooked.event("evt_1", account="acct_2")
    assert (row.origin, row.state, row.secret) == ("reconcile", "done", "")
    assert row.request_id == "reconcile-1"
    (act,) = hooked.store.write(lambda tx: audit.of_target(tx, "source stripe"))
    assert (act.action, act.reason) == ("reconcile", "an outage")
    # Then the webhook comes after all, in its own words.
    assert deliver(hooked, paid(1, account="acct_2", request={"id": "req_1"})) == "duplicate"


def test_what_was_parked_on_a_later_page_is_done_in_the_end(
    hooked: World, far: SenderLists, monkeypatch: pytest.MonkeyPatch
) -> None:
    bought = {"id": "cs_1", "customer": "cus_9", "client_reference_id": "late"}
    link = json.loads(stripe_body("evt_0", "checkout.session.completed", **bought))
    link["created"] = NOW_S - 9 * DAY_S
    invoices = [paid(n) for n in range(1, 150)]
    for one in invoices:
        one["data"]["object"]["customer"] = "cus_9"
    far.add(EVENTS, link, *invoices)

    found, _ = run(hooked, apply=True)

    assert (found.counts.missing, found.gap) == (150, 0)
    assert hooked.balance("late") == 149 * 100


def test_what_no_rule_wants_is_not_missing_and_all_types_are_asked_for_by_name(
    hooked: World, far: SenderLists
) -> None:
    far.add(EVENTS, json.loads(stripe_body("evt_9", "charge.updated", id="ch_1")), paid(1))

    _, told = run(hooked)

    assert told.ids == ["evt_1"]
    assert "types%5B%5D=invoice.paid" in far.paths[0]
    configured(
        hooked,
        CONFIG.replace("URL", far.url).replace('["checkout.session.completed"]', '["checkout.*"]'),
    )
    assert run(hooked, everything=True)[0].counts.unwanted == 1


def test_what_is_young_may_still_be_on_its_way(hooked: World, far: SenderLists) -> None:
    far.add(EVENTS, paid(1, minutes_ago=4), paid(2, minutes_ago=0))

    assert run(hooked)[1].ids == []
    assert sorted(run(hooked, everything=True)[1].ids) == ["evt_1", "evt_2"]


def test_what_is_older_than_the_sender_keeps_is_said_and_not_called_complete(
    hooked: World, far: SenderLists
) -> None:
    far.add(EVENTS, paid(1, minutes_ago=29 * 24 * 60))

    _, told = run(hooked, since="90d", since_ms=NOW_MS - 90 * DAY_S * 1000)

    assert told.ids == ["evt_1"]
    assert told.notes == [
        "stripe keeps events for 30 days: what is older can't be listed, compare --books"
    ]


# Failures of the other side


@pytest.mark.parametrize(
    ("answers", "waited"),
    [
        ([error(429, {"Retry-After": "7"}, code="rate_limit")] * 2, [7.0, 7.0]),
        ([error(500)] * 3, [1.0, 2.0, 4.0]),
        ([(200, {"Content-Length": "9", "Connection": "close"}, b"{")], [1.0]),
    ],
)
def test_a_limit_and_a_failure_are_waited_for(
    hooked: World, far: SenderLists, answers: list[Any], waited: list[float]
) -> None:
    far.add(EVENTS, paid(1))
    left = list(answers)
    far.instead = lambda path: left.pop() if left else None

    _, told = run(hooked)

    assert told.ids == ["evt_1"]
    assert told.waited == waited


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (error(401), "the key is refused (correct api.key)"),
        (error(403), "the key may not read this (give it the permission, or use another)"),
        (error(429, {"Retry-After": "600"}), "429 Too Many Requests and asks to wait 600 s"),
        (error(500), "500 Internal Server Error"),
        ((200, {}, b'{"object": "list"}'), "/v1/events: data is no list"),
        ((200, {}, b"[]"), "/v1/events: data is no list"),
        ((200, {}, b'{"data": [{"created": 1}]}'), "/v1/events: of an item type: is missing"),
        ((200, {}, b'{"data": [{"id": "evt_1", "type": "a"}]}'), "created of an item is no time"),
        (
            (200, {}, json.dumps({"data": [paid(1, livemode=True)]}).encode()),
            "the answer is live data: use a key for test data in api.key",
        ),
    ],
)
def test_a_run_that_can_not_go_on_says_why_loses_nothing_and_is_repeated(
    hooked: World, far: SenderLists, answer: Any, words: str
) -> None:
    far.add(EVENTS, *[paid(n, minutes_ago=500 - n) for n in range(150)])
    # In the middle: the first page is there.
    far.instead = lambda path: answer if "starting_after" in path else None

    with pytest.raises(Stopped):
        run(hooked, apply=True)
    assert hooked.balance() == 100 * 100
    with pytest.raises(Stopped) as stopped:
        run(hooked, apply=True)
    assert words in str(stopped.value)
    assert hooked.store.write(lambda tx: reconciles.last(tx, "stripe")) is None

    far.instead = lambda path: None
    asked = len(far.asked)
    found, told = run(hooked, apply=True)
    assert (found.counts.missing, found.gap) == (150, 0)
    assert "goes on with the run that was cut off 0 min ago, 100 events read" in told.notes[0]
    assert len(far.asked) == asked + 1
    assert hooked.balance() == 150 * 100


def test_a_run_goes_on_only_with_one_for_the_same(hooked: World, far: SenderLists) -> None:
    far.add(EVENTS, *[paid(n, minutes_ago=500 - n) for n in range(150)])
    far.instead = lambda path: error(401) if "starting_after" in path else None
    with pytest.raises(Stopped):
        run(hooked)
    far.instead = lambda path: None

    found, told = run(hooked, apply=True)

    assert told.notes == []
    assert (found.counts.missing, found.gap) == (150, 0)


def test_a_run_that_was_killed_is_gone_on_with_and_one_that_lives_is_left_alone(
    hooked: World, far: SenderLists
) -> None:
    far.add(EVENTS, *[paid(n, minutes_ago=500 - n) for n in range(150)])
    far.instead = lambda path: error(401) if "starting_after" in path else None
    with pytest.raises(Stopped):
        run(hooked, apply=True)
    far.instead = lambda path: None
    until = hooked.clock() + 60_000

    def had_by(process: int) -> None:
        owner = f"{socket.gethostname()}/{process}/x"
        hooked.query(f"update receiver_reconciles set owner='{owner}', lease_until_ms={until}")

    had_by(dead_process())
    found, told = run(hooked, apply=True)

    assert "goes on with the run" in told.notes[0]
    assert (found.counts.missing, found.gap) == (150, 0)
    hooked.query("update receiver_reconciles set ended_ms = null")
    had_by(os.getpid())
    assert run(hooked, apply=True)[1].notes == []


def dead_process() -> int:
    """The number of a process that has ended."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    return ended.pid


def test_what_came_after_a_run_was_cut_off_is_read_too(hooked: World, far: SenderLists) -> None:
    far.add(EVENTS, *[paid(n, minutes_ago=500 - n) for n in range(150)])
    far.instead = lambda path: error(401) if "starting_after" in path else None
    with pytest.raises(Stopped):
        run(hooked, apply=True)
    far.instead = lambda path: None
    hooked.clock.now_ms += 3_600_000
    far.add(EVENTS, paid(900, minutes_ago=-30))

    found, _ = run(hooked, apply=True)

    assert found.counts.missing == 151
    assert hooked.state("evt_900") == "done"


def test_a_cursor_that_expired_costs_a_new_beginning_and_tells_nothing_twice(
    hooked: World, far: SenderLists
) -> None:
    far.add(EVENTS, *[paid(n, minutes_ago=500 - n) for n in range(250)])
    gone = error(400, code="resource_missing", param="starting_after")
    once = [gone]
    far.instead = lambda path: once.pop() if "starting_after" in path and once else None

    found, told = run(hooked)

    assert (found.counts.listed, found.counts.missing) == (250, 250)
    assert len(told.ids) == 250
    assert "its place is lost, so the list is read anew" in told.notes[0]


def test_a_page_that_is_refused_again_and_again_ends_the_run(
    hooked: World, far: SenderLists
) -> None:
    far.add(EVENTS, *[paid(n, minutes_ago=500 - n) for n in range(150)])
    far.instead = lambda path: error(400, code="odd") if "starting_after" in path else None

    with pytest.raises(Stopped, match=r"400 Bad Request \(odd\)"):
        run(hooked)
    assert len(far.asked) <= 10


def test_a_sender_that_repeats_a_page_for_ever_is_left(hooked: World, far: SenderLists) -> None:
    page = json.dumps({"data": [paid(1)], "has_more": True}).encode()
    far.instead = lambda path: (200, {}, page)

    with pytest.raises(Stopped, match="the next page is one that was read before"):
        run(hooked)


def test_a_list_that_leads_back_to_itself_is_left(hooked: World, far: SenderLists) -> None:
    def leading_on(path: str) -> Reply:
        there = 1 if path.endswith("evt_3") else int(path[-1]) + 1 if "after" in path else 0
        return (200, {}, json.dumps({"data": [paid(there)], "has_more": True}).encode())

    far.instead = leading_on

    with pytest.raises(Stopped, match="the next page is one that was read before"):
        run(hooked)
    assert len(far.asked) <= 6


def test_a_dead_event_is_told_and_left_to_a_replay(hooked: World, far: SenderLists) -> None:
    deliver(hooked, paid(1))
    far.add(EVENTS, paid(1))
    hooked.query("update receiver_events set state = 'dead'")

    found, told = run(hooked, apply=True)

    assert [one.what for one in told.differences] == ["dead"]
    assert found.gap == 1
    assert [row.event_id for row in found.open] == ["evt_1"]


def test_nothing_is_asked_inside_a_transaction(hooked: World, far: SenderLists) -> None:
    far.add(EVENTS, *[paid(n) for n in range(150)])
    other = Store.open(Path(hooked.store.path), hooked.clock)
    far.before_answer = lambda path, number: other.write(lambda tx: None)

    assert run(hooked, apply=True)[0].gap == 0
    other.close()


# Other senders


OTHERS = """
[sources.github]
scheme = "github"
secrets = ["env:GITHUB"]
api = { key = "env:API", base_url = "URL", events = "/repos/me/app/hooks/7/deliveries" }

[sources.paddle]
scheme = "paddle"
secrets = ["env:STRIPE"]
api = { key = "env:API", base_url = "URL" }

[[rules]]
operation = "count-push"
source = "github"
on = ["push"]
record = { kind = "push", data = "{ref}" }

[[rules]]
operation = "count-order"
source = "paddle"
on = ["transaction.completed"]
subject = "data.id"
record = { kind = "order", data = "{data.id}" }
"""

HOOK = "/repos/me/app/hooks/7/deliveries"


def sent(number: int, *, minutes_ago: int = 60, **of: Any) -> dict[str, Any]:
    """A delivery as GitHub lists it."""
    return {
        "id": 10**15 + number,
        "guid": f"guid-{number}",
        "delivered_at": rfc3339(NOW_MS - minutes_ago * 60_000),
        "redelivery": False,
        "status": "OK",
        "status_code": 200,
        "event": "push",
        "action": None,
        "installation_id": None,
        "repository_id": 7,
    } | of


def push(world: World, number: int) -> str:
    body = json.dumps({"ref": f"r-{number}", "repository": {"id": 7}}).encode()
    return world.deliver("github", body, event_id=f"guid-{number}", type="push")


def test_github_is_asked_to_deliver_again_what_never_came(world: World, far: SenderLists) -> None:
    configured(world, OTHERS.replace("URL", far.url))
    for number in range(250):
        if number not in (3, 240):
            push(world, number)
    far.add(HOOK, *[sent(n, minutes_ago=500 - n, status_code=502) for n in range(250)])
    far.add(HOOK, sent(998, event="ping"), sent(999, minutes_ago=4 * 1440))

    found, told = run(world, "github")
    assert (sorted(told.ids), found.gap, far.again) == (["guid-240", "guid-3"], 2, [])
    asked, _ = run(world, "github", apply=True)

    assert sorted(far.again) == [f"{HOOK}/{10**15 + n}/attempts" for n in (3, 240)]
    assert (asked.counts.asked, asked.gap) == (2, 2)
    gone: tuple[int, dict[str, str], bytes] = (422, {}, b"{}")
    far.instead = lambda path: gone if path.endswith("/attempts") else None
    refused, told = run(world, "github", apply=True)
    assert (refused.gap, refused.counts.asked, len(told.notes)) == (2, 0, 2)
    assert "guid-240 is not delivered again: " in told.notes[0] + told.notes[1]
    far.instead = lambda path: None
    far.add(HOOK, sent(3, minutes_ago=0, id=5, redelivery=True))
    run(world, "github", apply=True)
    assert len(far.again) == 3, "the one on its way is not asked for once more"
    assert [push(world, n) for n in (3, 240)] == ["done", "done"]
    assert run(world, "github", apply=True)[0].gap == 0


def test_a_sender_is_reconciled_by_what_its_data_says_alone(world: World, far: SenderLists) -> None:
    configured(world, OTHERS.replace("URL", far.url))
    events = [
        {
            "event_id": f"evt_{n:05}",
            "event_type": "transaction.completed" if n % 2 else "customer.updated",
            "occurred_at": rfc3339(NOW_MS - (9_000 - n) * 60_000),
            "data": {"id": f"txn_{n}"},
        }
        for n in range(500)
    ]
    far.add("/events", *events)
    body = json.dumps(events[1] | {"notification_id": "ntf_1"}).encode()
    assert world.deliver("paddle", body) == "done"

    found, _ = run(world, "paddle", apply=True)

    assert (found.counts.listed, found.counts.unwanted, found.counts.missing) == (500, 250, 249)
    assert world.query("select count(*) from receiver_records") == [(250,)]
    assert run(world, "paddle")[0].gap == 0
    # The time that is asked for ends it: no page beyond is read.
    far.asked.clear()
    since_ms = NOW_MS - 8_600 * 60_000
    assert run(world, "paddle", since="x", since_ms=since_ms)[0].counts.listed == 100
    assert len(far.asked) == 1


# Resources


STATE = (
    CONFIG
    + """
[[rules]]
operation = "subscription-state"
source = "stripe"
on = ["customer.subscription.*"]
project.kind = "subscription"
project.id = "data.object.id"
project.state = "status"
project.fields = { plan = "{plan}" }
project.terminal = ["canceled"]
"""
)


@pytest.fixture
def projected(world: World, far: SenderLists) -> World:
    """Three subscriptions, as they were when they were fetched last."""
    configured(world, STATE.replace("URL", far.url))
    for number, status in enumerate(("active", "canceled", "active")):
        name = Name("stripe", "", "subscription", f"sub_{number}")
        seen = Seen(status, '{"plan":"pro"}', terminal=status == "canceled")
        put = partial(resources.put, name=name, seen=seen, came_from="fetch", event=None)
        world.store.write(put)
        far.put(f"/v1/subscriptions/sub_{number}", status=status, plan="pro")
    return world


def states(world: World) -> list[tuple[Any, ...]]:
    return world.query("select resource_id, state, fields from receiver_resources order by 1")


def test_what_drifted_is_told_and_with_apply_mended_the_canceled_ones_too(
    projected: World, far: SenderLists
) -> None:
    assert run(projected)[0].gap == 0
    far.put("/v1/subscriptions/sub_0", status="canceled", plan="pro")
    far.put("/v1/subscriptions/sub_1", status="active", plan="max")
    far.remove("/v1/subscriptions/sub_2")
    before = states(projected)

    found, told = run(projected)
    assert (found.counts.resources, found.counts.drifted, found.gap) == (3, 3, 3)
    assert sorted(told.ids) == ["sub_0", "sub_1", "sub_2"]
    assert 'canceled {"plan":"pro"} here, active {"plan":"max"}' in told.differences[1].detail
    assert states(projected) == before

    assert run(projected, apply=True)[0].gap == 0
    assert states(projected) == [
        ("sub_0", "canceled", '{"plan":"pro"}'),
        ("sub_1", "active", '{"plan":"max"}'),
        ("sub_2", "deleted", '{"plan":"pro"}'),
    ]
    assert run(projected)[0].gap == 0


def test_an_older_version_at_the_sender_is_no_drift(world: World, far: SenderLists) -> None:
    versioned = STATE.replace("project.state", 'project.version = "v"\nproject.state')
    configured(world, versioned.replace("URL", far.url))
    name = Name("stripe", "", "subscription", "sub_0")
    seen = Seen("active", '{"plan":"max"}', version=5)
    world.store.write(partial(resources.put, name=name, seen=seen, came_from="event", event=None))
    far.put("/v1/subscriptions/sub_0", status="active", plan="pro", v=4)

    assert run(world, apply=True)[0].counts.drifted == 0
    assert states(world) == [("sub_0", "active", '{"plan":"max"}')]

    far.put("/v1/subscriptions/sub_0", status="active", plan="pro", v=6)
    assert run(world, apply=True)[0].counts.mended == 1


def test_a_key_of_another_account_deletes_nothing(projected: World, far: SenderLists) -> None:
    for number in range(3):
        far.remove(f"/v1/subscriptions/sub_{number}")
    before = states(projected)

    found, told = run(projected, apply=True)

    assert (found.counts.unread, found.counts.mended, found.gap) == (3, 0, 3)
    assert "is api.key a key of the account" in told.differences[0].detail
    assert states(projected) == before


def test_reading_resources_goes_on_where_it_was_cut_off(projected: World, far: SenderLists) -> None:
    far.instead = lambda path: error(401) if path.endswith("sub_2") else None
    with pytest.raises(Stopped):
        run(projected)
    far.instead = lambda path: None
    far.asked.clear()

    found, _ = run(projected)

    assert (found.counts.resources, found.gap) == (3, 0)
    assert far.paths == ["/v1/subscriptions/sub_2"]


def test_a_resource_of_the_other_mode_is_told_and_the_others_are_read(
    projected: World, far: SenderLists
) -> None:
    message = "No such subscription; a similar object exists in live mode, but a test mode key"
    there = error(404, code="resource_missing", message=message)
    far.instead = lambda path: there if path.endswith("sub_1") else None

    found, told = run(projected)

    assert (found.counts.resources, found.counts.unread, found.gap) == (3, 1, 1)
    assert "it is there in the other mode" in told.differences[0].detail
