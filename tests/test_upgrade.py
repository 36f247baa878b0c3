"""A file of an earlier version: copied, then brought to ours in place, and never in between."""

import subprocess
import sys
from pathlib import Path

import pytest

from store import copies, schema
from store.database import Store, snapshot
from store.errors import StoreError
from store.lock import Lock, is_served
from tests.conftest import Clock
from tests.service import PATIENCE_S, ROOT, until

#: What a later version appends. The last step takes a while, so that it can be cut off.
LATER = (
    "create table receiver_later (a integer) strict; insert into receiver_later values (1);",
    "create table receiver_latest (a integer) strict; insert into receiver_latest "
    "with recursive n(i) as (select 1 union all select i + 1 from n where i < {rows}) "
    "select i from n;",
)

OPEN = """
import sys
from pathlib import Path
from store import schema
from store.database import Store
schema.STEPS = (*schema.STEPS, *sys.argv[2:])
print("opening", flush=True)
Store.open(Path(sys.argv[1]), lambda: 1).close()
print("open", flush=True)
"""


def later(rows: int = 10) -> tuple[str, ...]:
    return (LATER[0], LATER[1].format(rows=rows))


@pytest.fixture
def old(tmp_path: Path, clock: Clock) -> Path:
    """A file of this version, with something in it."""
    path = tmp_path / "receiver.db"
    store = Store.create(path, clock)
    store.write(
        lambda tx: tx.db.execute(
            """
            insert into receiver_ledger (
              source, account, subject, operation, workspace, unit, amount, created_ms)
            values ('stripe', '', 'in_1', 'grant', 'acme', 'credits', 100, 1)
            """
        )
    )
    store.close()
    return path


def balance(path: Path) -> int:
    with snapshot(path, older=True) as seen:
        found = seen.db.execute("select balance from receiver_balances").get
    assert isinstance(found, int)
    return found


def version(path: Path) -> int:
    with snapshot(path, older=True) as seen:
        return schema.version(seen.db)


def test_an_older_file_is_copied_and_then_upgraded_with_all_that_is_in_it(
    old: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = len(schema.STEPS)
    monkeypatch.setattr(schema, "STEPS", (*schema.STEPS, *later()))

    Store.open(old, clock).close()

    assert (version(old), balance(old)) == (before + 2, 100)
    copy = old.with_name(f"receiver.db.before-version-{before + 1}")
    assert copies.damage(copy) == []
    assert (version(copy), balance(copy)) == (before, 100)
    assert str(copy) in caplog.text


def test_the_copy_from_before_the_upgrade_opens_again_under_the_version_before(
    old: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(schema.STEPS)
    monkeypatch.setattr(schema, "STEPS", (*schema.STEPS, *later()))
    Store.open(old, clock).close()
    monkeypatch.undo()

    with pytest.raises(StoreError, match="before-version"):
        Store.open(old, clock)
    old.unlink()
    old.with_name(f"receiver.db.before-version-{before + 1}").rename(old)

    Store.open(old, clock).close()
    assert balance(old) == 100


def test_a_new_file_is_made_without_a_copy(tmp_path: Path, clock: Clock) -> None:
    Store.create(tmp_path / "receiver.db", clock).close()

    assert sorted(path.name for path in tmp_path.iterdir()) == ["receiver.db", "receiver.db-lock"]


def test_an_older_file_is_not_read_as_if_it_were_ours(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "STEPS", (*schema.STEPS, *later()))

    with pytest.raises(StoreError, match="restart the server, which upgrades it"), snapshot(old):
        pass


def test_a_file_that_an_older_process_uses_is_not_upgraded_under_it(
    old: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Store.open(old, clock)
    before = len(schema.STEPS)
    monkeypatch.setattr(schema, "STEPS", (*schema.STEPS, *later()))
    monkeypatch.setattr("store.database.LOCK_WAIT_S", 0.05)

    with pytest.raises(StoreError, match="another process still uses it"):
        Store.open(old, clock)

    assert version(old) == before
    running.close()
    Store.open(old, clock).close()


def test_a_copy_that_can_not_be_made_stops_the_upgrade(
    old: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(schema.STEPS)
    monkeypatch.setattr(schema, "STEPS", (*schema.STEPS, *later()))
    old.with_name(f"receiver.db.before-version-{before + 1}").mkdir()

    with pytest.raises(StoreError, match="can't be written"):
        Store.open(old, clock)

    assert version(old) == before


def test_processes_that_upgrade_at_once_all_succeed(old: Path) -> None:
    started = [opening(old, later()) for _ in range(4)]

    ended = [process.communicate(timeout=PATIENCE_S) for process in started]

    assert [out.endswith(b"open\n") for out, _ in ended] == [True] * 4, ended
    assert version_by_number(old) == len(schema.STEPS) + 2


@pytest.mark.parametrize("kill", range(6))
def test_kill_in_the_middle_of_an_upgrade_leaves_a_version_and_not_a_part_of_one(
    old: Path, kill: int
) -> None:
    before = len(schema.STEPS)
    process = opening(old, later(rows=3_000_000))
    wal = Path(f"{old}-wal")
    # Further into the last step with each of these, the last one into its commit.
    until(lambda: (wal.exists() and wal.stat().st_size > kill * 4_000_000) or process.poll() == 0)
    process.kill()
    process.communicate()

    found = version_by_number(old)
    assert found in (before, before + 1, before + 2)
    tables = names(old)
    assert ("receiver_later" in tables) == (found > before)
    assert ("receiver_latest" in tables) == (found == before + 2)
    again = opening(old, later(rows=10))
    again.communicate(timeout=PATIENCE_S)
    assert again.returncode == 0
    assert version_by_number(old) == before + 2


def opening(path: Path, steps: tuple[str, ...]) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-c", OPEN, str(path), *steps],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    return process


def version_by_number(path: Path) -> int:
    return int(ask(path, "select max(version) from receiver_schema"))


def names(path: Path) -> str:
    return ask(path, "select group_concat(name) from sqlite_schema")


def ask(path: Path, statement: str) -> str:
    program = (
        "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); "
        "print(db.execute(sys.argv[2]).fetchone()[0])"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, str(path), statement],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    return found.stdout


# Who uses the file


def test_the_lock_tells_a_server_and_ends_with_its_process(old: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from store.database import Store; "
        "s = Store.open(Path(sys.argv[1]), lambda: 1); print(s.serve(), flush=True); "
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(old)]
    assert not is_served(old)
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"True\n"

        assert is_served(old)
        lock = Lock(old)
        assert (lock.serve(), lock.alone(), lock.share()) == (False, False, True)
        lock.close()
        server.kill()

    assert not is_served(old)
