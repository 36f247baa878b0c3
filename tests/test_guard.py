"""Nothing but SQLite opens the database inside the process that writes it."""

import io
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from store.database import Store

OPENERS: list[Callable[[str], object]] = [
    lambda path: io.FileIO(path),
    lambda path: Path(path).read_bytes(),
    lambda path: os.open(path, os.O_RDONLY),
    lambda path: os.open(os.fsencode(path), os.O_RDONLY),
    lambda path: sqlite3.connect(path),
    lambda path: sqlite3.connect(f"file:{path}?mode=ro", uri=True),
    lambda path: sqlite3.connect("file://localhost" + path, uri=True),
    lambda path: sqlite3.connect("file:" + path.replace("receiver", "r%65ceiver"), uri=True),
    lambda path: shutil.copyfile(path, path + ".copy"),
]


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
@pytest.mark.parametrize("opener", OPENERS)
def test_opening_the_open_database_is_refused(
    store: Store, opener: Callable[[str], object], suffix: str
) -> None:
    with pytest.raises(PermissionError, match="would drop its locks"):
        opener(store.path + suffix)


def test_another_name_for_the_file_is_refused_too(store: Store, tmp_path: Path) -> None:
    os.link(store.path, tmp_path / "hard")
    os.symlink(store.path, tmp_path / "soft")

    for name in ("hard", "soft", "../" + tmp_path.name + "/receiver.db"):
        with pytest.raises(PermissionError):
            io.FileIO(tmp_path / name)


def test_other_files_open_as_ever(store: Store, tmp_path: Path) -> None:
    (tmp_path / "receiver.db.txt").write_text("x")

    assert (tmp_path / "receiver.db.txt").read_text() == "x"


def test_a_closed_database_may_be_read(store: Store, tmp_path: Path) -> None:
    other = Store.create(tmp_path / "other.db", store.clock)
    other.close()

    assert (tmp_path / "other.db").read_bytes().startswith(b"SQLite format 3")
