"""A sync that failed once: nothing is built on pages that the kernel has let go of."""

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from store import database, integrity
from store.database import Snapshot, Store, Tx, snapshot
from store.errors import Unavailable
from tests.conftest import Clock
from tests.proof import disk
from tests.proof.disk import Disk, Recording, restored, watched

ADD = """
insert into receiver_links (source, account, customer, workspace, created_ms)
values ('stripe', '', ?, 'acme', 1)
"""


def link(customer: str) -> Callable[[Tx], object]:
    return lambda tx: tx.db.execute(ADD, (customer,))


def fail_once(recording: Recording, suffix: str) -> None:
    """The next sync of the file with this ending fails."""

    def fails(path: str) -> bool:
        if not path.endswith(suffix):
            return False
        recording.fails = lambda path: False
        return True

    recording.fails = fails


def left_by_a_cut(recording: Recording, folder: Path) -> set[str]:
    """The customers in the file after a power cut at the end of the recording."""
    left = Disk()
    for call in recording.calls:
        left.take(call)
    folder.mkdir()
    restored(left.after_cut("nothing", random.Random(0)), folder)
    with contextlib.closing(Store.open(folder / "receiver.db", Clock())) as store:
        assert integrity.full_check(Snapshot(store.db)) == []
        return {one for (one,) in store.db.execute("select customer from receiver_links")}


# Beside a reader nothing is moved into the file.
@pytest.mark.parametrize(("suffix", "reading"), [("-wal", False), ("-wal", True), (".db", False)])
def test_what_is_answered_after_a_failed_sync_survives_a_power_cut(
    suffix: str, reading: bool, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each commit is moved into the file at once.
    monkeypatch.setattr(database, "CHECKPOINT_PAGES", 1)
    folder = tmp_path / "disk"
    folder.mkdir()
    path = folder / "receiver.db"
    answered = set()
    with watched(folder) as recording, contextlib.closing(Store.create(path, clock)) as store:
        with snapshot(path) if reading else contextlib.nullcontext():
            for number in range(6):
                if number == 2:
                    fail_once(recording, suffix)
                try:
                    store.write(link(f"cus_{number}"))
                    answered.add(f"cus_{number}")
                except Unavailable:
                    store.reopen()
        found = left_by_a_cut(recording, tmp_path / "cut")

    assert len(answered) >= 5
    assert answered <= found


def test_a_failed_sync_that_is_not_told_of_is_found_to_cost_answers(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "tell_failure", lambda: None)
    folder = tmp_path / "disk"
    folder.mkdir()
    path = folder / "receiver.db"
    with watched(folder) as recording, contextlib.closing(Store.create(path, clock)) as store:
        fail_once(recording, "-wal")
        store.write(link("cus_1"))
        found = left_by_a_cut(recording, tmp_path / "cut")

    assert found == set()


def test_a_wal_that_somebody_else_made_does_not_lose_its_name(tmp_path: Path, clock: Clock) -> None:
    """SQLite syncs the folder only for whoever made the file: here one that only reads."""
    folder = tmp_path / "disk"
    folder.mkdir()
    path = folder / "receiver.db"
    with watched(folder) as recording:
        Store.create(path, clock).close()
        with snapshot(path), contextlib.closing(Store.open(path, clock)) as store:
            store.write(link("cus_1"))

            found = left_by_a_cut(recording, tmp_path / "cut")

    assert found == {"cus_1"}
