"""Backups and restoring them: whole or recognised as not, under load, and nothing lost unsaid."""

import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from receiver import caller
from receiver.backup import is_ours
from receiver.config import load
from store import backups, copies, database
from store.database import Store, Tx, snapshot
from store.errors import StoreError
from store.lock import path_of
from store.replace import alone, replace
from tests.command import Command
from tests.conftest import World
from tests.service import (
    ROOT,
    Service,
    Start,
    checkout,
    invoice,
    services,
    stripe_request,
    until,
    word,
)

SENDERS = 4
#: Requests that a sender has under way.
AHEAD = 8
#: Deliveries that are answered before the backup begins, so that it takes a while.
BEFORE = 1_500


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with services(tmp_path) as starting:
        yield starting


@pytest.fixture
def receiver(world: World, monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(world, monkeypatch)


class Load:
    """Invoices from several connections, as fast as they are answered."""

    def __init__(self, service: Service) -> None:
        self.acknowledged: set[str] = set()
        self.surprises: list[str] = []
        self._service = service
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(SENDERS)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, sender: int) -> None:
        number = 0
        with self._service.wire() as wire:
            while not self._stop.is_set():
                ids = [f"evt_{sender}_{number + each}" for each in range(AHEAD)]
                number += AHEAD
                bodies = [invoice(one, f"in_{one}", padding="x" * 3000) for one in ids]
                wire.send(b"".join(map(stripe_request, bodies)))
                for one in ids:
                    answer = wire.answer()
                    if answer.status == 200 and word(answer) == "done":
                        self.acknowledged.add(one)
                    else:
                        self.surprises.append(f"{answer.status} {word(answer)}")


# Made under load


def test_a_backup_under_full_load_has_all_that_was_acknowledged_and_restores(
    start: Start, tmp_path: Path
) -> None:
    service = start()
    assert service.deliver(checkout("evt_link")) == "done"
    with Load(service) as load:
        until(lambda: len(load.acknowledged) >= BEFORE)
        before = set(load.acknowledged)
        made = service.command("backup", "--json")
        # It was made while deliveries went on, not when they had ended.
        until(lambda: len(load.acknowledged) > len(before) + 50)
    told = json.loads(made.stdout)
    assert (made.returncode, told["faults"], made.stderr) == (0, [], "")
    assert load.surprises == []
    running = service.command("restore", told["path"], "--yes")
    assert running.returncode == 1
    assert "in use" in running.stderr
    assert service.stop() == 0

    restored = service.command("restore", told["path"], "--yes", "--reason", "a test")

    assert restored.returncode == 0, restored.stderr
    assert "lost: " in restored.stderr
    service.start()
    there = {name for (name,) in service.rows("select event_id from receiver_events")}
    assert before <= there
    assert len(there) == told["events"]
    service.assert_books_balance()
    again = invoice("evt_0_0", "in_evt_0_0", padding="x" * 3000)
    assert service.deliver(again) == "duplicate"
    assert "locked" not in service.log


def test_a_backup_ends_while_another_process_commits_without_a_pause(tmp_path: Path) -> None:
    """SQLite begins a backup anew after each foreign commit, unless it reads one moment."""
    path = tmp_path / "busy.db"
    program = (
        "import sqlite3, sys, os\n"
        "db = sqlite3.connect(sys.argv[1], timeout=5)\n"
        "db.execute('pragma journal_mode = wal')\n"
        "db.execute('create table t (b)')\n"
        "for _ in range(3000): db.execute('insert into t values (?)', (os.urandom(3000),))\n"
        "db.commit()\n"
        "print('busy', flush=True)\n"
        "while True:\n"
        "    db.execute('insert into t values (?)', (os.urandom(3000),)); db.commit()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"busy\n"
        with snapshot(path, ours=False) as seen:
            target = tmp_path / "copy.db"
            copied: list[int] = []
            pages = copies.pages(seen.db)
            copies.make(seen.db, target, advance=copied.append)
        assert writer.poll() is None
        writer.terminate()

    assert sum(copied) == pages
    assert copies.damage(target) == []


# Whole, or recognised as not


@pytest.fixture
def made(world: World, receiver: Command) -> Path:
    """A backup of a file with a grant in it."""
    world.store.write(_drop_app_tables)
    world.link()
    assert world.invoice("evt_1", "in_1") == "done"
    (told,) = receiver.objects("backup")
    return Path(told["path"])


def test_a_backup_is_private_and_has_its_checksum_for_sha256sum(made: Path) -> None:
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700
    assert sorted(path.name for path in made.parent.iterdir()) == [
        made.name,
        f"{made.name}.sha256",
    ]
    subprocess.run(
        ["sha256sum", "--check", f"{made.name}.sha256"], cwd=made.parent, check=True, timeout=30
    )


def test_the_file_knows_of_the_backup(world: World, receiver: Command, made: Path) -> None:
    rows = world.query("select path, bytes, verified_ms is not null from receiver_backups")

    assert rows == [(str(made), made.stat().st_size, 1)]


@pytest.mark.parametrize("kept", [0, 1, 99, 100, 4096, 5000, 0.5, -4096, -1])
def test_a_backup_that_was_cut_off_is_recognised(
    receiver: Command, made: Path, kept: float
) -> None:
    size = made.stat().st_size
    os.truncate(
        made, int(size * kept) if 0 < kept < 1 else int(kept) if kept >= 0 else size + int(kept)
    )

    for checksum in ("with", "without"):
        assert_refused(receiver, made)
        if checksum == "with":
            copies.checksum_path(made).unlink()


def test_a_backup_with_any_byte_turned_over_is_recognised(receiver: Command, made: Path) -> None:
    content = bytearray(made.read_bytes())
    for place in (0, 20, 100, 4095, len(content) // 3, len(content) // 2, len(content) - 1):
        altered = bytearray(content)
        altered[place] ^= 0x40
        made.write_bytes(altered)

        assert copies.damage(made), place
    assert_refused(receiver, made)


def test_a_page_of_nothing_is_recognised_without_a_checksum(receiver: Command, made: Path) -> None:
    copies.checksum_path(made).unlink()
    content = bytearray(made.read_bytes())
    content[4096:8192] = bytes(4096)
    made.write_bytes(content)

    assert_refused(receiver, made)


def assert_refused(receiver: Command, path: Path) -> None:
    """By each command that looks at it."""
    database = load(Path(receiver.config), secrets=False).database
    before = database.stat().st_ino
    for words in (("backup", "--verify", str(path)), ("restore", str(path), "--yes")):
        ran = receiver(*words)
        assert ran.code == 1, words
        assert str(path) in ran.err
    assert database.stat().st_ino == before


def test_what_is_no_backup_of_ours_is_refused_in_words(receiver: Command, tmp_path: Path) -> None:
    empty, other = tmp_path / "empty.db", tmp_path / "other.db"
    empty.touch()
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import sqlite3, sys; d = sqlite3.connect(sys.argv[1]); "
            "d.execute('create table a (b)'); d.commit()",
            str(other),
        ],
        check=True,
        timeout=30,
    )

    for path, words in (
        (tmp_path / "nothing.db", "no such file"),
        (empty, "no SQLite database"),
        (other, "no Receiver tables"),
        (tmp_path / "receiver.db", "in use"),
    ):
        ran = receiver("backup", "--verify", str(path))
        assert ran.code == 1
        assert words in ran.err


def test_a_backup_whose_books_do_not_balance_is_made_and_told(
    world: World, receiver: Command
) -> None:
    world.link()
    world.invoice("evt_1", "in_1")
    world.store.write(lambda tx: tx.db.execute("update receiver_balances set balance = 7"))

    ran = receiver("backup")

    assert ran.code == 1
    assert "its entries add up to 100" in ran.err
    assert len(list((world.folder / "backups").glob("*.db"))) == 1


# Where they go, and which stay


def test_the_oldest_go_once_the_new_one_is_whole(world: World, receiver: Command) -> None:
    names = []
    for _ in range(4):
        world.clock.now_ms += 1000
        (told,) = receiver.objects("backup", "--keep", 2)
        names.append(Path(told["path"]).name)

    there = sorted(path.name for path in (world.folder / "backups").glob("*.db"))
    assert there == names[2:]
    assert len(list((world.folder / "backups").iterdir())) == 4


def test_a_clock_that_was_set_back_costs_no_new_backup(world: World, receiver: Command) -> None:
    receiver.objects("backup", "--keep", 1)
    world.clock.now_ms -= 86_400_000

    (told,) = receiver.objects("backup", "--keep", 1)

    assert [path.name for path in (world.folder / "backups").glob("*.db")] == [
        Path(told["path"]).name
    ]


def test_files_that_are_not_named_as_our_backups_are_never_removed(
    world: World, receiver: Command
) -> None:
    folder = world.folder / "backups"
    folder.mkdir()
    others = ["receiver.db", "receiver-mine.db", "app-20260101T000000000Z.db", "notes.txt"]
    for name in others:
        (folder / name).touch()

    receiver.objects("backup", "--keep", 1)

    settings = world.processor.settings
    assert [name for name in others if is_ours(settings, folder / name)] == []
    assert all((folder / name).exists() for name in others)


def test_a_backup_of_another_file_by_the_same_name_is_never_removed(
    world: World, receiver: Command, tmp_path: Path
) -> None:
    """Two apps that each have a receiver.db may share a folder for backups."""
    (told,) = receiver.objects("backup")
    other = Store.create(tmp_path / "other.db", lambda: world.clock() - 1)
    other.close()
    theirs = Path(told["path"]).with_name("receiver-20260101T000000000Z.db")
    os.rename(tmp_path / "other.db", theirs)
    world.clock.now_ms += 1000

    (again,) = receiver.objects("backup", "--keep", 1)

    assert again["removed"] == [told["path"]]
    assert theirs.exists()


def test_what_a_killed_backup_left_goes_with_the_next_one(world: World, receiver: Command) -> None:
    folder = world.folder / "backups"
    folder.mkdir()
    left = [
        ".receiver-20260101T000000000Z.db.part",
        ".receiver-20260101T000000000Z.db.sha256.part",
        "receiver-20260101T000000000Z.db.sha256",
    ]
    foreign = [".app-20260101T000000000Z.db.part", "notes.sha256"]
    for name in left + foreign:
        (folder / name).touch()

    (told,) = receiver.objects("backup")

    made = Path(told["path"]).name
    assert {path.name for path in folder.iterdir()} == {*foreign, made, f"{made}.sha256"}


def test_of_two_backups_at_once_each_has_its_turn(
    world: World, receiver: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = world.folder / "backups"
    folder.mkdir()
    part = folder / ".receiver-20260101T000000000Z.db.part"
    part.touch()
    monkeypatch.setattr(copies, "TURN_S", 0.0)
    with copies.turn(folder):
        waited = receiver("backup")

    assert waited.code == 1
    assert "another backup is made there" in waited.err
    assert part.exists()
    assert receiver("backup").code == 0


@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-journal", "-lock"])
def test_a_backup_is_never_what_sqlite_takes_for_its_own(
    world: World, receiver: Command, suffix: str
) -> None:
    """As a journal it would be played back, and lock the file until then."""
    target = Path(f"{world.store.path}{suffix}")
    there = target.exists()

    ran = receiver("backup", str(target))

    assert ran.code == 1
    assert "name another" in ran.err
    assert target.exists() is there


def test_a_file_that_another_keeps_to_himself_is_told_in_words(
    world: World, receiver: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "READ_WAIT_MS", 1)
    world.store.close()
    program = (
        "import sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None); "
        "db.execute('pragma journal_mode = delete'); db.execute('begin exclusive'); "
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, world.store.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"

        ran = receiver("events", "list")

        other.terminate()
    assert ran.code == 1
    assert "another program has it to itself" in ran.err
    reopen(world)


def test_a_folder_that_is_not_there_does_not_become_a_file(
    receiver: Command, tmp_path: Path
) -> None:
    ran = receiver("backup", f"{tmp_path}/nodir/")

    assert ran.code == 2
    assert f"{tmp_path}/nodir/: there is no such folder; make it first" in ran.err
    assert not (tmp_path / "nodir").exists()


def test_a_backup_overwrites_nothing(receiver: Command, made: Path) -> None:
    content = made.read_bytes()

    ran = receiver("backup", str(made))

    assert ran.code == 1
    assert "is there already" in ran.err
    assert made.read_bytes() == content


def test_the_config_says_where_they_go_and_how_many_stay(world: World, receiver: Command) -> None:
    config = Path(receiver.config)
    config.write_text(config.read_text() + '\n[backup]\npath = "safe"\nkeep = 1\n')
    for _ in range(2):
        world.clock.now_ms += 1
        receiver.objects("backup")

    assert len(list((world.folder / "safe").glob("receiver-*.db"))) == 1


def test_a_copy_that_is_refused_or_cut_off_leaves_nothing_under_its_name(
    world: World, tmp_path: Path
) -> None:
    target = tmp_path / "copy.db"

    def refuse(part: Path) -> None:
        raise StoreError("no")

    with snapshot(Path(world.store.path)) as seen, pytest.raises(StoreError):
        copies.make(seen.db, target, judge=refuse)

    assert not list(tmp_path.glob("*copy.db*"))


def test_a_folder_that_is_not_there_is_told(receiver: Command, tmp_path: Path) -> None:
    ran = receiver("backup", str(tmp_path / "nowhere" / "a.db"))

    assert ran.code == 1
    assert f"{tmp_path}/nowhere: there is no such folder; make it first" in ran.err


# Restoring


def test_a_restore_says_what_is_lost_keeps_what_was_there_and_writes_it_down(
    world: World, receiver: Command, made: Path
) -> None:
    world.invoice("evt_2", "in_2")
    database = Path(world.store.path)
    world.store.close()

    asked = receiver("restore", str(made), typed="n\n")
    ran = receiver("restore", str(made), "--reason", "a test", typed="y\n")

    assert (asked.code, ran.code) == (1, 0), ran.err
    for told in (asked.err, ran.err):
        assert "lost: 1 event received since" in told
        assert "lost: 1 of the ledger's entries" in told
    (aside,) = database.parent.glob("receiver.db.before-restore-*")
    with snapshot(database) as seen, snapshot(aside) as kept:
        assert seen.db.execute("select count(*) from receiver_events").get == 1
        assert kept.db.execute("select count(*) from receiver_events").get == 2
        acts = list(seen.db.execute("select action, reason from receiver_audit"))
        last = backups.last(seen)
    assert acts == [("restore", "a test")]
    assert last is not None
    assert last.path == str(made)
    assert stat.S_IMODE(database.stat().st_mode) == 0o600
    reopen(world)


def test_a_restore_to_where_nothing_is_puts_the_file_there(
    world: World, receiver: Command, made: Path
) -> None:
    database = Path(world.store.path)
    world.store.close()
    database.unlink()
    # Left behind, SQLite would apply it to whatever file has the name.
    Path(f"{database}-wal").write_bytes(b"of another file")

    assert receiver("restore", str(made), "--yes").code == 0

    reopen(world)
    assert world.balance() == 100


def test_a_damaged_file_is_replaced(world: World, receiver: Command, made: Path) -> None:
    database = Path(world.store.path)
    world.store.close()
    database.write_bytes(b"not a database at all" * 400)

    ran = receiver("restore", str(made), "--yes")

    assert ran.code == 0
    assert "what would be lost is not known" in ran.err
    reopen(world)
    assert world.balance() == 100


def test_a_file_that_any_program_has_open_is_not_replaced(
    world: World, receiver: Command, made: Path
) -> None:
    world.store.close()
    program = (
        "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); "
        "db.execute('select count(*) from receiver_events').fetchall(); "
        "print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, world.store.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"

        ran = receiver("restore", str(made), "--yes")

        assert ran.code == 1
        assert "another program has it open" in ran.err
        other.terminate()
    reopen(world)
    assert world.state("evt_1") == "done"


def test_a_second_restore_at_once_leaves_alone_what_the_first_one_writes(
    world: World, receiver: Command, made: Path
) -> None:
    database = Path(world.store.path)
    world.store.close()
    part = database.with_name(f".{database.name}.restoring")
    part.write_bytes(b"of the first one")
    with alone(database):
        ran = receiver("restore", str(made), "--yes")

    assert ran.code == 1
    assert "in use" in ran.err
    assert part.read_bytes() == b"of the first one"
    reopen(world)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_a_file_of_roots_in_anybodys_folder_is_restored_by_root(
    world: World, receiver: Command, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.store.close()
    became: list[int] = []
    monkeypatch.setattr(caller, "_become", lambda user, group: became.append(user))
    os.chown(world.folder, 65_534, 65_534)

    assert receiver("restore", str(made), "--yes").code == 0

    assert became == []
    reopen(world)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_root_restores_from_where_only_root_can_look(made: Path) -> None:
    """In a process of its own, which stays who it became; the backup is in root's own folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "receiver.toml").write_text('database = "receiver.db"\n')
        os.chown(folder, 65_534, 65_534)

        ran = subprocess.run(
            [sys.executable, "-m", "cli", "restore", str(made), "--yes"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )

        assert ran.returncode == 0, ran.stderr
        assert (folder / "receiver.db").stat().st_uid == 65_534


def test_a_lock_that_cant_be_used_is_named(world: World, receiver: Command, made: Path) -> None:
    world.store.close()
    lock = path_of(world.store.path)
    lock.unlink()
    lock.mkdir()

    for words in (("restore", str(made), "--yes"), ("links", "add", "stripe", "cus_2", "acme")):
        ran = receiver(*words)

        assert ran.code == 1
        assert f"{lock}: can't be used: Is a directory" in ran.err
    lock.rmdir()
    reopen(world)


def test_a_restore_that_fails_leaves_the_file_one_name(world: World, tmp_path: Path) -> None:
    """By a second name it would have a second -wal, and each program would miss the other's."""
    database, aside = Path(world.store.path), tmp_path / "aside"
    world.store.close()

    with pytest.raises(StoreError, match="can't be replaced"):
        replace(database, tmp_path / "missing", aside)

    assert not aside.exists()
    reopen(world)


def test_a_file_with_the_apps_tables_is_not_replaced(
    world: World, receiver: Command, made: Path
) -> None:
    world.store.write(lambda tx: tx.db.execute("create table users (id integer)"))
    world.store.close()

    ran = receiver("restore", str(made), "--yes")

    assert ran.code == 1
    assert "tables that are not Receiver's" in ran.err
    reopen(world)


def test_a_newer_file_is_not_replaced(world: World, receiver: Command, made: Path) -> None:
    world.store.write(lambda tx: tx.db.execute("insert into receiver_schema values (99, 1)"))
    world.store.close()

    ran = receiver("restore", str(made), "--yes")

    assert ran.code == 1
    assert "newer version" in ran.err


def test_a_backup_of_another_file_is_told(
    world: World, receiver: Command, tmp_path: Path, made: Path
) -> None:
    database = Path(world.store.path)
    world.store.close()
    database.unlink()
    path_of(database).unlink()
    Store.create(database, world.clock).close()

    ran = receiver("restore", str(made), typed="n\n")

    assert "it is not a backup of" in ran.err


def _drop_app_tables(tx: Tx) -> None:
    tx.db.execute("drop table workspaces; drop table plan_history; drop table poison")


def reopen(world: World) -> None:
    world.store = Store.open(Path(world.store.path), world.clock)
