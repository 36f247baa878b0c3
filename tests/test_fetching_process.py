"""Fetches by processes of ours: inside the server, apart, killed, and asleep past a lease."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from receiver.fetching import LEASE_S
from tests.conftest import stripe_body
from tests.processes import Place, Places, placing
from tests.sender_api import KEY, SenderApi, sender_api
from tests.service import until

#: By more than a lease lasts.
LATER_S = int(LEASE_S) + 10

KINDS = pytest.mark.parametrize("kind", ["inside", "separate"])
AT = "/v1/subscriptions/sub_1"

PROJECTING = """
[sources.subs]
scheme = "stripe"
secrets = ["env:STRIPE"]
livemode = false
api = { key = "file:api.key", base_url = "URL" }

[[rules]]
operation = "subscription-state"
source = "subs"
on = ["customer.subscription.*"]
project.kind = "subscription"
project.id = "data.object.id"
project.state = "status"
project.terminal = ["canceled"]

[[rules]]
operation = "note-end"
source = "subs"
on = ["customer.subscription.deleted"]
resource = { kind = "subscription", id = "data.object.id" }
when = { "_resource.state" = "canceled" }
record = { kind = "end", data = {} }
"""
STATE = "select max(state) from receiver_resources"


@pytest.fixture
def far() -> Iterator[SenderApi]:
    with sender_api() as api:
        api.put(AT, status="active")
        yield api


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    (tmp_path / "api.key").write_text(KEY)
    with placing(tmp_path) as made:
        yield made


def tell(place: Place, event: str = "created") -> str:
    return place.stripe(f"evt_{event}", f"customer.subscription.{event}", source="subs", id="sub_1")


@KINDS
def test_what_is_hinted_at_is_fetched_wherever_the_worker_runs(
    places: Places, far: SenderApi, kind: str
) -> None:
    place = places(PROJECTING.replace("URL", far.url), run=kind)
    running = place.run(kind)

    tell(place)

    place.wait_for("active", STATE)
    assert running.stop() == 0
    assert " fetch " in running.log
    assert KEY not in running.log


def test_an_event_that_waits_is_applied_by_the_server_after_the_fetch(
    places: Places, far: SenderApi
) -> None:
    far.put(AT, status="canceled")
    place = places(PROJECTING.replace("URL", far.url), run="inside")
    running = place.serve()
    body = stripe_body("evt_1", "customer.subscription.deleted", id="sub_1")

    assert place.post(running, "subs", body) == (200, "parked")

    place.wait_for("done", "select state from receiver_events")
    assert place.value("select count(*) from receiver_records") == 1


def test_a_worker_that_is_killed_in_the_middle_of_a_fetch_leaves_it_to_another(
    places: Places, far: SenderApi
) -> None:
    gate = threading.Event()
    far.before_answer = lambda path, number: hold(gate, number)
    place = places(PROJECTING.replace("URL", far.url))
    tell(place)
    killed = place.work()
    until(lambda: len(far.asked) == 1)
    killed.kill()
    gate.set()

    assert place.query("select * from receiver_resources") == []
    place.work(ahead_s=LATER_S)

    place.wait_for("active", STATE)
    place.wait_for("done", "select state from receiver_fetches")
    assert place.value("select attempts from receiver_fetches") == 2


def hold(gate: threading.Event, number: int) -> None:
    if number == 1:
        assert gate.wait(30)


def test_a_worker_that_slept_past_its_lease_changes_nothing(places: Places, far: SenderApi) -> None:
    gate = threading.Event()
    far.before_answer = lambda path, number: hold(gate, number)
    place = places(PROJECTING.replace("URL", far.url), threads=1)
    tell(place)
    sleeper = place.work()
    until(lambda: len(far.asked) == 1)
    sleeper.signal(signal.SIGSTOP)
    far.put(AT, status="past_due")
    gate.set()
    other = place.work(ahead_s=LATER_S)
    place.wait_for("past_due", STATE)
    place.wait_for("done", "select state from receiver_fetches")
    assert other.stop() == 0
    before = place.query("select * from receiver_resources")

    sleeper.signal(signal.SIGCONT)
    # Its one thread takes the next once it is through with the first.
    far.put("/v1/subscriptions/sub_2", status="active")
    place.stripe("evt_2", "customer.subscription.created", source="subs", id="sub_2")
    place.wait_for(2, "select count(*) from receiver_resources")

    assert place.query("select * from receiver_resources where resource_id = 'sub_1'") == before
    assert sleeper.stop() == 0


def test_a_server_whose_worker_is_apart_fetches_nothing_itself(
    places: Places, far: SenderApi
) -> None:
    place = places(PROJECTING.replace("URL", far.url), run="separate")
    running = place.serve()
    body = stripe_body("evt_1", "customer.subscription.updated", id="sub_1")

    assert place.post(running, "subs", body) == (200, "done")
    assert far.asked == []

    place.work()
    place.wait_for("active", STATE)


def test_what_is_owed_is_seen_and_asked_for_by_the_command_line(
    places: Places, far: SenderApi
) -> None:
    far.instead = lambda path: (400, {}, b"{}")
    place = places(PROJECTING.replace("URL", far.url))
    tell(place)
    place.work()
    place.wait_for("dead", "select state from receiver_fetches")
    listed = place.command("resources", "list", "--pending")
    assert "400 Bad Request" in listed.stdout

    far.instead = lambda path: None
    assert place.command("resources", "fetch", "sub_1").returncode == 0

    place.wait_for("active", STATE)
