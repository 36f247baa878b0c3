"""A day that ends with a restore: what was answered is in the file, or in the one kept aside."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from receiver import restore
from receiver.operate import By
from store import integrity
from store.database import snapshot
from tests.conftest import NOW_MS
from tests.proof.disk import Recording, watched
from tests.proof.power import scratch
from tests.proof.story import (
    FACTS,
    WITHOUT_APP,
    Answered,
    BackedUp,
    End,
    Shop,
    bad_copies,
    end_of,
    was_told,
)


class Restoring(NamedTuple):
    """The operator has begun to restore this backup."""

    path: str


class Restored(NamedTuple):
    """The operator was told that it is done."""


def recorded() -> Recording:
    """The calls of this day."""
    with scratch() as folder, watched(folder) as recording:
        _play(_shop(folder, recording.tell))
    return recording


def during(recording: Recording) -> range:
    """The cuts from where the restore begins."""
    begun = next(at for at, what in recording.told if isinstance(what, Restoring))
    return range(begun, len(recording.calls) + 1)


def expected_end() -> End:
    """Where it ends without a cut, with everything sent once more."""
    with scratch() as folder:
        shop = _shop(folder, lambda what: None)
        _play(shop)
        return _sent_again(shop)


def judged(folder: Path, told: Sequence[Any], wanted: End) -> list[str]:
    """What is wrong in a folder that a cut has left; nothing if the promise was kept."""
    shop = _shop(folder, lambda what: None)
    try:
        with shop.opened():
            pass
        faults = _lost(shop, told) + _unnoted(shop, told) + bad_copies(shop.path, told)
        if _sent_again(shop) != wanted:
            faults.append("sent again, it ends otherwise")
    except Exception as error:
        # Whatever it is: the server would not have started again, or not gone on.
        return [f"{type(error).__name__}: {error}"]
    return faults


def _shop(folder: Path, tell: Any) -> Shop:
    return Shop(folder, tell, WITHOUT_APP, app=False)


def _play(shop: Shop) -> None:
    shop.make()
    shop.serve(FACTS[:8])
    shop.back_up()
    shop.serve(FACTS[8:12])
    (backup,) = (shop.path.parent / "backups").glob("*.db")
    shop.tell(Restoring(backup.name))
    shop.clock.now_ms += 1_000
    planned = restore.plan(shop.path, backup)
    with backup.open("rb") as source:
        aside = restore.carry_out(planned, source, shop.clock())
    with shop.opened() as store:
        store.write(lambda tx: restore.note(tx, planned, aside, By("somebody", "a test")))
    shop.tell(Restored())


def _sent_again(shop: Shop) -> End:
    shop.clock.now_ms = NOW_MS + 60_000
    shop.serve(FACTS)
    with snapshot(shop.path) as seen:
        faults = integrity.full_check(seen) + integrity.book_faults(seen)
    assert faults == [], faults
    return end_of(shop.path, app=False)


def _lost(shop: Shop, told: Sequence[Any]) -> list[str]:
    """A restore gives up what came after the backup, and nothing before that; the rest is aside."""
    answered = _ids(told)
    backed_up = next((at for at, one in enumerate(told) if isinstance(one, BackedUp)), len(told))
    early = _ids(told[:backed_up])
    there = _events(shop.path)
    kept = set(there)
    for aside in shop.path.parent.glob("receiver.db.before-restore-*"):
        if not aside.name.endswith(("-wal", "-shm", "-journal")):
            kept |= _events(aside)
    begun = was_told(Restoring, told)
    faults = [f"{one} is lost" for one in answered if one not in kept]
    return faults + [
        f"{one} is not in the file" for one in (early if begun else answered) if one not in there
    ]


def _ids(told: Sequence[Any]) -> list[str]:
    return [id for one in told if isinstance(one, Answered) for id, _ in one.fact.parts]


def _events(path: Path) -> set[str]:
    with snapshot(path) as seen:
        return {one for (one,) in seen.db.execute("select event_id from receiver_events")}


def _unnoted(shop: Shop, told: Sequence[Any]) -> list[str]:
    if not was_told(Restored, told):
        return []
    with snapshot(shop.path) as seen:
        noted = seen.db.execute("select count(*) from receiver_audit where action = 'restore'").get
    return [] if noted == 1 else [f"the restore is noted {noted} times"]
