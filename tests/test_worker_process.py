"""Workers as processes: several on one file, stopped, reloaded, idle, and beside a server."""

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from receiver.worker import EVENT_LEASE_S
from tests.conftest import stripe_body
from tests.processes import (
    HANDLERS,
    Peer,
    Place,
    Places,
    Running,
    destination,
    peering,
    placing,
)
from tests.service import PATIENCE_S, until

#: By more than a lease lasts: 10 s and LEASE_SPARE_S.
LATER_S = 60

#: How long an idle process is watched, in seconds, and the part of a CPU that it may use.
IDLE_S = 3.0
IDLE_CPU = 0.05

KINDS = pytest.mark.parametrize("kind", ["inside", "separate"])

GIVING = """
[[rules]]
operation = "give"
source = "queue"
on = ["give"]
subject = "data.object.id"
prepare = "ask"
call = "use"
"""

# Says who asks, and waits until that process may go on.
ASKING = (
    HANDLERS
    + """

import os
import pathlib
import time

FOLDER = pathlib.Path(__file__).parent


def ask(event):
    go = FOLDER / f"go-{os.getpid()}"
    (FOLDER / f"asks-{os.getpid()}").touch()
    while not go.exists() and not (FOLDER / "go").exists():
        time.sleep(0.01)
    return int(go.read_text()) if go.exists() else 1


def use(event, tx):
    tx.grant("credits", event.prepared, workspace=event.id)
"""
)


@pytest.fixture
def peer() -> Iterator[Peer]:
    with peering() as made:
        yield made


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with placing(tmp_path) as made:
        yield made


def all_rows(place: Place) -> list[list[tuple[Any, ...]]]:
    tables = ("outbox", "attempts", "ledger", "events")
    return [place.query(f"select * from receiver_{table} order by 1") for table in tables]


# Several workers


def test_two_workers_on_one_file_do_each_thing_once(places: Places, peer: Peer) -> None:
    place = places(GIVING + destination("app", peer.url()), handlers=ASKING)
    place.owe("app", messages=300)
    for n in range(100):
        assert place.stripe(f"e{n}", "give", source="queue", id=f"g{n}") == "pending"

    # Nothing goes on until both are at work on both.
    peer.gate.clear()
    workers = [place.work(), place.work()]
    for table in ("outbox", "events"):
        owners = f"select distinct lease_owner from receiver_{table} where lease_owner is not null"
        until(lambda owners=owners: len(place.query(owners)) == 4)  # type: ignore[misc]
        pids = {int(owner.partition("-")[0]) for (owner,) in place.query(owners)}
        assert pids == {worker.pid for worker in workers}
    (place.folder / "go").touch()
    peer.gate.set()
    place.wait_for(300, "select count(*) from receiver_outbox where state = 'sent'")
    place.wait_for(100, "select count(*) from receiver_events where state = 'done' and by_worker")

    assert len(peer.seen) == len({seen.key for seen in peer.seen}) == 300
    tried = "select message is null, attempt, outcome, count(*) from receiver_attempts group by 1"
    assert place.query(tried) == [(0, 1, "sent", 300), (1, 1, "done", 100)]
    grants = "select count(*), count(distinct workspace), sum(amount) from receiver_ledger"
    assert place.query(grants) == [(100, 100, 100)]
    assert [worker.stop() for worker in workers] == [0, 0]


def test_a_worker_that_slept_past_the_lease_of_a_message_changes_nothing(
    places: Places, peer: Peer
) -> None:
    place = places(destination("app", peer.url()), threads=1)
    peer.gate.clear()
    place.owe("app", "one")
    sleeper = place.work()
    until(lambda: len(peer.seen) == 1)
    sleeper.signal(signal.SIGSTOP)
    other = place.work(ahead_s=LATER_S)
    until(lambda: len(peer.seen) == 2)
    # The answer to the sleeper, which would be the end of the message.
    peer.status = 404
    peer.gate.set()
    until(lambda: len(peer.answered) == 2)
    place.wait_for("dead", "select state from receiver_outbox")
    assert other.stop() == 0
    before = all_rows(place)

    peer.status = 200
    sleeper.signal(signal.SIGCONT)
    # Its one thread takes the next once it is through with the first.
    place.owe("app", "two")
    place.wait_for("sent", "select state from receiver_outbox where subject = 'app-two'")

    assert [rows[: len(was)] for rows, was in zip(all_rows(place), before, strict=True)] == before
    assert place.query("select attempt, outcome from receiver_attempts where message = 1") == [
        (1, "unknown"),
        (2, "refused"),
    ]


def test_a_worker_that_slept_past_the_lease_of_an_event_changes_nothing(places: Places) -> None:
    place = places(GIVING, threads=1, handlers=ASKING)
    place.stripe("one", "give", source="queue", id="one")
    sleeper = place.work()
    until(lambda: (place.folder / f"asks-{sleeper.pid}").exists())
    sleeper.signal(signal.SIGSTOP)
    other = place.work(ahead_s=EVENT_LEASE_S + 1)
    (place.folder / f"go-{other.pid}").write_text("5")
    place.wait_for("done", "select state from receiver_events")
    assert other.stop() == 0
    before = all_rows(place)

    (place.folder / f"go-{sleeper.pid}").write_text("7")
    sleeper.signal(signal.SIGCONT)
    place.stripe("two", "give", source="queue", id="two")
    place.wait_for("done", "select state from receiver_events where event_id = 'two'")

    assert [rows[: len(was)] for rows, was in zip(all_rows(place), before, strict=True)] == before
    assert place.balance("one") == 5


# Stopping


@KINDS
def test_a_send_that_is_under_way_is_finished_on_sigterm(
    places: Places, peer: Peer, kind: str
) -> None:
    place = places(destination("app", peer.url()), run=kind, threads=1)
    peer.gate.clear()
    place.owe("app", messages=2)
    running = place.run(kind)
    until(lambda: len(peer.seen) == 1)

    running.signal(signal.SIGTERM)
    if kind == "inside":
        until(lambda: place.status(running, "/readyz") != 200)
    else:
        # Its main thread, and the one that sends.
        until(lambda: running.threads == 2)
    peer.gate.set()

    assert running.process.wait(PATIENCE_S) == 0
    assert place.query("select state, attempts, lease_owner from receiver_outbox order by 1") == [
        ("pending", 0, None),
        ("sent", 1, None),
    ]
    assert len(peer.seen) == 1


def test_a_send_that_never_ends_holds_no_stop_up(places: Places, peer: Peer) -> None:
    place = places(destination("app", peer.url(), "timeout_s = 60"), threads=1)
    peer.gate.clear()
    place.owe("app")
    worker = place.work(before="worker.STOP_S = 0.2")
    until(lambda: len(peer.seen) == 1)

    started = time.monotonic()
    assert worker.stop() == 0

    assert time.monotonic() - started < 5
    assert "still at work, left to their leases" in worker.log
    assert "Traceback" not in worker.log
    assert place.value("select count(*) from receiver_outbox where lease_owner is not null") == 1


def test_an_event_that_is_under_way_is_finished_on_sigterm(places: Places) -> None:
    place = places(GIVING, threads=1, handlers=ASKING)
    place.stripe("one", "give", source="queue", id="one")
    worker = place.work()
    until(lambda: (place.folder / f"asks-{worker.pid}").exists())

    worker.signal(signal.SIGTERM)
    (place.folder / "go").touch()

    assert worker.process.wait(PATIENCE_S) == 0
    assert place.query("select state, lease_owner from receiver_events") == [("done", None)]


# Cost and speed


def test_who_has_nothing_to_do_costs_nothing(tmp_path: Path, peer: Peer) -> None:
    """Neither what waits for its time, nor a destination that is not there, keeps us busy."""
    with placing(tmp_path / "a") as inside, placing(tmp_path / "b") as separate:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        config = destination("app", peer.url()) + destination("gone", "http://127.0.0.1:1/")
        running = []
        for place in (inside(config, run="inside"), separate(config)):
            place.owe("app")
            place.owe("gone", messages=200)
            running.append(place.serve() if place.folder.name == "a" else place.work())
            place.wait_for("sent", "select state from receiver_outbox where destination = 'app'")

        used_s = [-each.cpu_s() for each in running]
        with pytest.raises(subprocess.TimeoutExpired):
            running[0].process.wait(IDLE_S)
        for number, each in enumerate(running):
            used_s[number] += each.cpu_s()

    assert max(used_s) < IDLE_S * IDLE_CPU, used_s


@pytest.mark.parametrize(("kind", "within_s"), [("inside", 0.5), ("separate", 1.0)])
def test_a_message_is_sent_soon_after_its_delivery(
    places: Places, peer: Peer, kind: str, within_s: float
) -> None:
    place = places(destination("app", peer.url()), run=kind)
    server = place.serve()
    if kind == "separate":
        place.work()

    took_s = []
    for n in range(1, 6):
        started = time.monotonic()
        body = stripe_body(f"evt_{n}", "owe", id=f"s{n}", to="app", messages=1)
        assert place.post(server, "stripe", body) == (200, "done")
        until(lambda n=n: len(peer.seen) == n)  # type: ignore[misc]
        took_s.append(peer.seen[-1].at_s - started)

    # Others use this machine too.
    assert min(took_s) < within_s


def test_neither_a_hanging_nor_a_dead_destination_delays_another(
    places: Places, peer: Peer
) -> None:
    with peering() as hanging:
        hanging.gate.clear()
        config = [
            destination("app", peer.url()),
            destination("hangs", hanging.url(), "timeout_s = 20"),
            destination("gone", "http://127.0.0.1:1/"),
        ]
        place = places("".join(config), run="inside")
        place.owe("hangs", messages=1000)
        place.owe("gone", messages=1000)
        server = place.serve()
        until(lambda: len(hanging.seen) == 2)
        place.wait_for(1, "select max(attempts) from receiver_outbox where destination = 'gone'")

        started = time.monotonic()
        body = stripe_body("evt_1", "owe", id="s", to="app", messages=20)
        assert place.post(server, "stripe", body) == (200, "done")

        until(lambda: len(peer.seen) == 20)
        # What waited for the hanging one would come after its 20 s.
        assert peer.seen[-1].at_s - started < 10
        # Two at a time is all that one destination gets.
        assert len(hanging.seen) == 2


# Reloading


@KINDS
def test_a_reload_takes_destinations_as_they_are_now(places: Places, peer: Peer, kind: str) -> None:
    lost = destination("lost", peer.url("/lost"))
    moved = destination("moved", peer.url("/old"))
    place = places(moved + lost, run=kind)
    text = (place.folder / "receiver.toml").read_text()
    running = place.run(kind)
    place.owe("moved", "one")
    until(lambda: peer.count("/old") == 1)
    place.wait_for("sent", "select state from receiver_outbox")

    place.configure(
        text.replace("/old", "/new").replace(lost, destination("fresh", peer.url("/fresh")))
    )
    reload(running, 1)
    # Owed under the config before.
    place.configure(text)
    place.owe("lost")
    place.owe("moved", "two")
    place.configure(text + destination("fresh", peer.url("/fresh")))
    place.owe("fresh")
    until(lambda: peer.count("/new") == peer.count("/fresh") == 1)
    assert place.value("select attempts from receiver_outbox where destination = 'lost'") == 0

    # It comes back, and so does what is owed to it.
    reload(running, 2)
    until(lambda: peer.count("/lost") == 1)
    assert peer.count("/old") == 1


def reload(running: Running, number: int) -> None:
    running.signal(signal.SIGHUP)
    until(lambda: running.log.count(": done") == number)


@KINDS
def test_a_broken_config_leaves_the_old_one_in_force(places: Places, peer: Peer, kind: str) -> None:
    place = places(destination("app", peer.url()), run=kind)
    running = place.run(kind)
    path = place.folder / "receiver.toml"
    path.write_text(path.read_text() + "\nnonsense = 1\n")

    running.signal(signal.SIGHUP)
    running.wait_for("the old config stays in force")
    place.owe("app")

    until(lambda: len(peer.seen) == 1)


# Without a worker


def test_with_the_worker_off_a_failed_github_delivery_is_kept_and_replayed(places: Places) -> None:
    """GitHub never sends again by itself."""
    rule = """
[[rules]]
operation = "deploy"
source = "github"
on = ["push"]
call = "deploy"
"""
    fixed = (
        HANDLERS
        + '\n\ndef deploy(event, tx):\n    tx.record("push", event.body["ref"], operation="note")\n'
    )
    broken = HANDLERS + "\n\ndef deploy(event, tx):\n    raise ValueError('boom')\n"
    place = places(rule, run="off", handlers=broken)
    server = place.serve()

    answer = place.post(server, "github", b'{"ref": "main"}', event_id="d-1", type="push")

    assert answer[0] == 503
    kept = "select state, attempts, next_attempt_ms, last_error from receiver_events"
    line = len(broken.splitlines())
    assert place.query(kept) == [
        ("pending", 1, None, f"deploy at handlers.py:{line}: ValueError: boom")
    ]

    place.handle(fixed)
    server.signal(signal.SIGHUP)
    server.wait_for(": done")
    ran = place.command("replay", "d-1", "--reason", "fixed")
    assert ran.returncode == 0, ran.stdout
    assert place.query("select state from receiver_events") == [("done",)]
    again = place.command("replay", "d-1", "--reason", "once more")
    assert again.returncode == 0, again.stderr
    assert place.query("select data from receiver_records") == [('"main"',)]
