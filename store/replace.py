"""Puts another file in the place of the database, while nobody has it open."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import apsw

from store import copies
from store.errors import StoreError
from store.lock import Lock, path_of

#: How long another connection's last statement is waited for, in milliseconds.
_BUSY_MS = 1_000

#: What SQLite keeps beside a file; it would apply what it finds there to whatever file it is.
_BESIDE = ("-wal", "-shm", "-journal")


@contextlib.contextmanager
def alone(database: Path) -> Iterator[None]:
    """Keep every other process of ours away from the database. Raises StoreError if one has it."""
    try:
        lock = Lock(database)
    except OSError as error:
        raise StoreError(f"{path_of(database)}: can't be used: {error.strerror}") from error
    with contextlib.closing(lock):
        if not lock.alone():
            raise StoreError(
                f"{database}: is in use by a server, a worker or another command: stop it first "
                "(`systemctl stop receiver`)"
            )
        yield


def replace(database: Path, part: Path, aside: Path) -> bool:
    """Put `part`, a durable file in the same folder, in the place of the database.

    What was there is kept as `aside`; False if nothing was. The name `database` stands for one
    of the two at any moment, also after a power cut. Only while it is ours `alone`. Raises
    StoreError, with nothing changed, while any other program has the database open.
    """
    try:
        with _untouched(database):
            # Where SQLite could not read the file, these are left, and part of it.
            for suffix in _BESIDE:
                with contextlib.suppress(FileNotFoundError):
                    Path(f"{database}{suffix}").rename(f"{aside}{suffix}")
            there = database.exists()
            if there:
                os.link(database, aside)
            _take_place(database, part, aside)
            return there
    except OSError as error:
        raise StoreError(f"{database}: can't be replaced: {error.strerror}") from error
    except apsw.Error as error:
        raise StoreError(f"{database}: can't be replaced: {error}") from error


def _take_place(database: Path, part: Path, aside: Path) -> None:
    try:
        copies.sync(database.parent)
        part.replace(database)
    except BaseException:
        # Under two names the file would have two -wals, each without the other's commits.
        aside.unlink(missing_ok=True)
        raise
    copies.sync(database.parent)


@contextlib.contextmanager
def _untouched(database: Path) -> Iterator[None]:
    if not database.exists():
        yield
        return
    with contextlib.closing(apsw.Connection(str(database))) as db, _exclusive(database, db):
        yield


@contextlib.contextmanager
def _exclusive(database: Path, db: apsw.Connection) -> Iterator[None]:
    db.set_busy_timeout(_BUSY_MS)
    try:
        # Only possible while no other connection is open, and then all of it is in one file.
        # https://www.sqlite.org/wal.html#persistence_of_wal_mode
        mode = db.execute("pragma journal_mode = delete").get
        if mode != "delete":
            raise apsw.BusyError("it stays in WAL mode")
        # Whoever opens it now waits, and finds a file without a -wal.
        db.execute("begin exclusive")
    except (apsw.BusyError, apsw.LockedError) as error:
        raise StoreError(
            f"{database}: another program has it open (see `fuser {database}`): stop it first"
        ) from error
    except (apsw.NotADBError, apsw.CorruptError, apsw.IOError):
        # Damaged: it may be replaced all the same.
        yield
        return
    yield
