"""Opening the file: what is promised of it before the first event."""

import contextlib
import functools
import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from store import schema
from store.database import Store, snapshot
from store.errors import NewerFile, StoreError
from tests.conftest import Clock

PRAGMAS = """
import json, sqlite3, sys
db = sqlite3.connect(sys.argv[1])
one = lambda statement: db.execute(statement).fetchone()[0]
print(json.dumps({
    "journal": one("pragma journal_mode"),
    "user_version": one("pragma user_version"),
    "application_id": one("pragma application_id"),
    "tables": [row[0] for row in db.execute("select name from sqlite_schema")],
    "strict": [row[0] for row in db.execute(
        "select name from sqlite_schema where type = 'table' and sql not like '%strict%'")],
}))
"""


def inspect(path: Path) -> dict[str, object]:
    output = subprocess.run(
        [sys.executable, "-c", PRAGMAS, path], capture_output=True, check=True, timeout=30
    ).stdout
    found = json.loads(output)
    assert isinstance(found, dict)
    return found


def test_a_new_file_is_ours_alone_and_changes_no_pragma_but_wal(store: Store) -> None:
    found = inspect(Path(store.path))

    assert stat.S_IMODE(os.stat(store.path).st_mode) == 0o600
    assert (found["journal"], found["user_version"], found["application_id"]) == ("wal", 0, 0)
    assert found["strict"] == []
    tables = found["tables"]
    assert isinstance(tables, list)
    assert all(name.startswith(("receiver_", "sqlite_autoindex_receiver_")) for name in tables), (
        tables
    )


def test_the_writer_is_as_durable_as_a_wal_can_be(store: Store) -> None:
    full = 2
    assert store.db.execute("pragma synchronous").get == full
    assert store.db.execute("pragma journal_mode").get == "wal"


def test_the_apps_tables_are_left_alone(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "app.db"
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]);"
            "db.execute('create table users (id integer)'); db.execute('pragma user_version = 7')",
            path,
        ],
        check=True,
        timeout=30,
    )

    Store.create(path, clock).close()

    found = inspect(path)
    assert found["user_version"] == 7
    assert "users" in str(found["tables"])


def test_opening_twice_migrates_once(store: Store, clock: Clock) -> None:
    again = Store.create(Path(store.path), clock)

    assert again.write(lambda tx: tx.db.execute("select count(*) from receiver_schema").get) == len(
        schema.STEPS
    )
    again.db.close(True)


def test_processes_that_create_one_file_at_once_all_succeed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from store.database import Store;"
        "Store.create(Path(sys.argv[1]), lambda: 1).close()"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, tmp_path / "receiver.db"],
            stderr=subprocess.PIPE,
            cwd=Path(__file__).parent.parent,
        )
        for _ in range(6)
    ]

    failures = [process.communicate(timeout=60)[1] for process in started]

    assert failures == [b""] * 6


def test_a_newer_file_is_refused_and_not_touched(store: Store, clock: Clock) -> None:
    store.write(lambda tx: tx.db.execute("insert into receiver_schema values (99, 1)"))
    path = Path(store.path)

    with pytest.raises(StoreError, match="schema version 99"):
        Store.open(path, clock)
    with pytest.raises(NewerFile, match="schema version 99"), snapshot(path):
        pass


def test_a_step_that_fails_leaves_the_version_before_it(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "receiver.db"
    Store.create(path, clock).close()
    broken = "create table receiver_later (a integer); this is no sql;"
    monkeypatch.setattr(schema, "STEPS", (*schema.STEPS, broken))

    with pytest.raises(StoreError):
        Store.open(path, clock)

    assert "receiver_later" not in str(inspect(path)["tables"])
    monkeypatch.undo()
    Store.open(path, clock).close()


@pytest.mark.parametrize("content", [b"not a database" * 100, b"SQLite format 3\0garbage" * 99])
def test_a_file_that_is_no_database_is_refused_in_words(
    tmp_path: Path, clock: Clock, content: bytes
) -> None:
    path = tmp_path / "receiver.db"
    path.write_bytes(content)

    with pytest.raises(StoreError, match=str(path)):
        Store.open(path, clock)

    assert path.read_bytes() == content


def test_what_can_not_be_opened_is_refused_in_words(tmp_path: Path, clock: Clock) -> None:
    with pytest.raises(StoreError, match="no such file yet"):
        Store.open(tmp_path / "receiver.db", clock)
    with pytest.raises(StoreError, match="can't be made"):
        Store.create(tmp_path / "nowhere" / "receiver.db", clock)
    with pytest.raises(StoreError, match="is not a file"):
        Store.create(tmp_path, clock)


def test_a_file_that_was_lost_is_not_made_anew(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "receiver.db"
    Store.create(path, clock).close()
    path.unlink()

    for use in (Store.create, Store.open):
        words = raised(functools.partial(use, path, clock))
        assert words == (
            f"{path}: is gone, and {path}-lock says that it was there: `receiver restore` a "
            "backup, or remove that too to begin with an empty file"
        )
    assert not path.exists()

    Path(f"{path}-lock").unlink()
    Store.create(path, clock).close()


def test_a_snapshot_does_not_wait_for_the_writer_and_does_not_change(store: Store) -> None:
    tx = store.begin()
    assert tx is not None
    tx.db.execute("insert into receiver_links values ('a', '', 'c', 'w', 1)")

    with snapshot(Path(store.path)) as seen:
        assert seen.db.execute("select count(*) from receiver_links").get == 0
        assert store.commit()
        assert seen.db.execute("select count(*) from receiver_links").get == 0


def test_a_snapshot_can_not_write(store: Store) -> None:
    with snapshot(Path(store.path)) as seen, pytest.raises(Exception, match="readonly"):
        seen.db.execute("delete from receiver_links")


def test_the_schema_is_understood_by_the_oldest_sqlite_at_hand(store: Store) -> None:
    """One construct that an app's library does not know would hide the app's own tables."""
    words = "\n".join(schema.STEPS).lower()

    # All newer than 3.37: 3.38, 3.39, 3.42 and 3.46 brought them.
    for construct in ("->", "unixepoch(", "is distinct", "right join", "subsec", "group_concat("):
        assert construct not in words
    assert "receiver_events" in str(inspect(Path(store.path))["tables"])


# Who may open it


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Not as root, who may open every file."""
    user = os.geteuid()
    os.seteuid(user or 65_534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize(
    ("folder_mode", "file_mode", "words"),
    [
        (0o700, 0o600, "may not look into its folder; run this as"),
        (0o755, 0o600, "may not write to it; run this as"),
        (0o755, 0o644, "may not write to it; run this as"),
        (0o755, 0o666, "may not write to "),
    ],
)
def test_a_file_that_is_not_ours_to_open_is_told_with_its_owner(
    clock: Clock, folder_mode: int, file_mode: int, words: str
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as later:
        folder = Path(name)
        path = folder / "app.db"
        Store.create(path, clock).close()
        later.callback(folder.chmod, 0o700)
        path.chmod(file_mode)
        folder.chmod(folder_mode)

        with as_nobody():
            problems = [raised(lambda: Store.open(path, clock)), raised(lambda: seen(path))]

    for problem in problems:
        assert words in problem
        assert "unable to open" not in problem
        assert folder_mode == 0o700 or "belongs to root, and nobody" in problem


def test_a_folder_in_place_of_the_file_is_told(tmp_path: Path, clock: Clock) -> None:
    assert raised(lambda: Store.open(tmp_path, clock)) == f"{tmp_path}: is a folder; name a file"
    assert raised(lambda: seen(tmp_path)) == f"{tmp_path}: is a folder; name a file"


def seen(path: Path) -> None:
    with snapshot(path):
        pass


def raised(run: Callable[[], object]) -> str:
    with pytest.raises(StoreError) as caught:
        run()
    return str(caught.value)
