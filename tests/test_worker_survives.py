"""What goes wrong around a worker: it goes on, and what it held is not lost."""

import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from receiver.worker import EVENT_LEASE_S
from tests.processes import (
    HANDLERS,
    Peer,
    Places,
    destination,
    peering,
    placing,
)
from tests.service import PATIENCE_S, held_lock, until

#: By more than a lease lasts: 10 s and LEASE_SPARE_S.
LATER_S = 60

#: The file is given up sooner than in production: nothing here waits for ten seconds.
IMPATIENT = {
    "inside": "from store import writer\nwriter.WAIT_S_MAX = 0.2",
    "separate": "from store import database\ndatabase.LOCK_WAIT_S = 0.2",
}
LOCKED = "another process holds the write lock"

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

ASKING = (
    HANDLERS
    + """

import pathlib
import time

FOLDER = pathlib.Path(__file__).parent


def ask(event):
    (FOLDER / "asks").touch()
    while not (FOLDER / "go").exists():
        time.sleep(0.01)


def use(event, tx):
    tx.grant("credits", 1, workspace="acme")
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


@KINDS
def test_what_was_sent_while_the_file_was_locked_is_marked_and_not_sent_again(
    places: Places, peer: Peer, kind: str
) -> None:
    place = places(destination("app", peer.url()), run=kind)
    peer.gate.clear()
    place.owe("app")
    running = place.run(kind, before=IMPATIENT[kind])
    until(lambda: len(peer.seen) == 1)

    with held_lock(place.database):
        peer.gate.set()
        running.wait_for(LOCKED, times=2)

    place.wait_for("sent", "select state from receiver_outbox")
    place.owe("app", "two")
    until(lambda: len(peer.seen) == 2)
    assert place.value("select max(attempts) from receiver_outbox") == 1
    assert running.stop() == 0


@KINDS
def test_an_event_prepared_while_the_file_was_locked_is_applied_once_it_is_not(
    places: Places, kind: str
) -> None:
    """Not only when its lease has run out."""
    place = places(GIVING, run=kind, handlers=ASKING)
    place.stripe("one", "give", source="queue", id="one")
    running = place.run(kind, before=IMPATIENT[kind])
    until(lambda: (place.folder / "asks").exists())

    with held_lock(place.database):
        (place.folder / "go").touch()
        running.wait_for(LOCKED, times=2)

    place.wait_for("done", "select state from receiver_events")
    assert place.value("select attempts from receiver_events") == 1


def test_a_locked_file_holds_no_stop_and_no_reload_up(places: Places, peer: Peer) -> None:
    place = places(destination("app", peer.url()))
    before = "from store import database\ndatabase.LOCK_WAIT_S = 2\nworker.STOP_S = 0.1"
    worker = place.work(before=before)
    with held_lock(place.database):
        # All threads want the lock.
        worker.signal(signal.SIGHUP)
        worker.wait_for("could not be stored")
        started = time.monotonic()
        assert worker.stop() == 0
        assert time.monotonic() - started < 5
    assert "Traceback" not in worker.log


def test_a_worker_that_meets_a_locked_file_at_its_start_says_so(places: Places) -> None:
    place = places("")
    with held_lock(place.database):
        before = IMPATIENT["separate"] + "\nfrom store import schema\n"
        worker = place.work(before=before, ready=False)
        assert worker.process.wait(PATIENCE_S) != 0
    assert f"StoreError: {place.database}: " in worker.log


def test_a_worker_goes_on_after_a_disk_that_was_full(places: Places, peer: Peer) -> None:
    place = places(destination("app", peer.url()))
    worker = place.work()
    unlimited = resource.prlimit(worker.pid, resource.RLIMIT_FSIZE)
    peer.gate.clear()
    place.owe("app")
    until(lambda: len(peer.seen) == 1)

    # Enough for its log, not for what is added to the -wal.
    resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (16_384, unlimited[1]))
    place.owe("app", "two")
    peer.gate.set()
    worker.wait_for("WARNING", times=2)
    resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, unlimited)

    place.wait_for(2, "select count(*) from receiver_outbox where state = 'sent'")
    assert len(peer.seen) == 2


def test_a_worker_whose_file_was_replaced_ends_and_sends_nothing(
    places: Places, peer: Peer, tmp_path: Path
) -> None:
    place = places(destination("app", peer.url()), threads=1)
    peer.gate.clear()
    place.owe("app", messages=2)
    worker = place.work()
    until(lambda: len(peer.seen) == 1)
    # As another program: ours may not open the file but through SQLite.
    copy = tmp_path / "copy.db"
    subprocess.run(["cp", place.database, copy], check=True)
    os.replace(copy, place.database)

    peer.gate.set()

    assert worker.process.wait(PATIENCE_S) == 1
    assert "was deleted or replaced while it was open" in worker.log
    assert len(peer.seen) == 1


def test_a_fault_inside_a_sender_is_a_failed_attempt_like_any_other(
    places: Places, peer: Peer
) -> None:
    program = '\n[destinations.app]\nkind = "command"\nargv = ["/bin/true"]\n'
    place = places(program + destination("other", peer.url()))
    place.owe("app")
    broken = "from receiver import send_command; send_command.send = lambda *_: 1 / 0"
    place.work(before=broken)

    place.wait_for(True, "select last_error is not null from receiver_outbox")
    assert place.query("select attempt, outcome from receiver_attempts")[0] == (1, "unknown")
    place.owe("other")
    until(lambda: len(peer.seen) == 1)


def test_a_destination_that_a_reload_takes_away_in_mid_send_is_settled(
    places: Places, peer: Peer
) -> None:
    gone = destination("app", peer.url())
    place = places(destination("other", peer.url()) + gone)
    peer.gate.clear()
    place.owe("app", messages=3)
    worker = place.work()
    until(lambda: len(peer.seen) == 2)

    place.configure((place.folder / "receiver.toml").read_text().replace(gone, ""))
    worker.signal(signal.SIGHUP)
    worker.wait_for(": done")
    peer.gate.set()

    sent = "select count(*) from receiver_outbox where state = 'sent'"
    place.wait_for(2, sent)
    place.owe("other")
    place.wait_for(3, sent)
    assert place.query("select attempts from receiver_outbox where state = 'pending'") == [(0,)]


def test_a_message_that_kills_each_worker_runs_out_of_attempts(places: Places, peer: Peer) -> None:
    place = places(destination("app", peer.url(), "attempts_max = 2"), threads=1)
    peer.gate.clear()
    place.owe("app")
    for number in range(2):
        worker = place.work(ahead_s=number * LATER_S)
        until(lambda number=number: len(peer.seen) == number + 1)  # type: ignore[misc]
        worker.kill()

    place.work(ahead_s=2 * LATER_S)

    place.wait_for("dead", "select state from receiver_outbox")
    assert "never ended" in place.value("select last_error from receiver_outbox")
    tried = "select attempt, outcome from receiver_attempts order by 1"
    assert place.query(tried) == [(1, "unknown"), (2, "unknown")]
    assert len(peer.seen) == 2


def test_an_event_that_kills_each_worker_runs_out_of_attempts(places: Places) -> None:
    place = places(GIVING, handlers=ASKING)
    text = (place.folder / "receiver.toml").read_text()
    place.configure(text.replace("[worker]", "[worker]\nattempts_max = 2"))
    place.stripe("one", "give", source="queue", id="one")
    for number in range(2):
        worker = place.work(ahead_s=number * 2 * EVENT_LEASE_S)
        until(lambda: (place.folder / "asks").exists())
        worker.kill()
        (place.folder / "asks").unlink()

    place.work(ahead_s=4 * EVENT_LEASE_S)

    place.wait_for("dead", "select state from receiver_events")
    assert "never ended" in place.value("select last_error from receiver_events")
    assert place.value("select attempts from receiver_events") == 2
    tried = "select attempt, outcome from receiver_attempts order by 1"
    assert place.query(tried) == [(1, "unknown"), (2, "unknown")]
    assert not (place.folder / "asks").exists()
