"""What happened how often, as it is kept in the file."""

from store import backups, reconciles, tallies
from store.backups import Backup
from store.database import Store
from store.tallies import KEPT_MS, SLOT_MS, Total, What
from tests.conftest import NOW_MS, Clock

DONE = What("delivery", "stripe", "done")


def test_counts_add_up_in_their_slot_and_for_ever(store: Store) -> None:
    store.write(lambda tx: tallies.add(tx, {DONE: 2}, NOW_MS - 10 * SLOT_MS))
    store.write(lambda tx: tallies.add(tx, {DONE: 3}, NOW_MS))

    assert store.write(lambda tx: tallies.since(tx, "delivery", NOW_MS - SLOT_MS)) == {
        ("stripe", "done"): 3
    }
    assert store.write(lambda tx: tallies.totals(tx, "delivery")) == {
        ("stripe", "done"): Total(5, NOW_MS)
    }
    assert store.write(lambda tx: tallies.totals(tx, "send")) == {}


def test_old_slots_go_and_the_total_stays(store: Store, clock: Clock) -> None:
    store.write(lambda tx: tallies.add(tx, {DONE: 2}, NOW_MS - KEPT_MS - SLOT_MS))
    store.write(tallies.prune)

    assert store.write(lambda tx: tallies.since(tx, "delivery", 0)) == {}
    assert store.write(lambda tx: tallies.totals(tx, "delivery"))["stripe", "done"].times == 2


def test_only_a_backup_that_was_proved_whole_counts_as_one(store: Store) -> None:
    whole = Backup(NOW_MS, "/backups/1.db", 4096, NOW_MS)
    store.write(lambda tx: backups.add(tx, whole))
    store.write(lambda tx: backups.add(tx, Backup(NOW_MS + 1, "/backups/2.db", 4096, None)))

    assert store.write(backups.last) == whole


def test_a_reconcile_counts_once_it_is_complete(store: Store) -> None:
    run = store.write(lambda tx: reconciles.begin(tx, "stripe"))
    assert store.write(lambda tx: reconciles.last(tx, "stripe")) is None

    store.write(lambda tx: reconciles.end(tx, run, 3, "three events"))
    store.write(lambda tx: reconciles.begin(tx, "stripe"))

    found = store.write(lambda tx: reconciles.last(tx, "stripe"))
    assert found is not None
    assert (found.gap, found.ended_ms, found.note) == (3, NOW_MS, "three events")
