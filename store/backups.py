"""Copies of the file that were made: when, where, and whether they were proved whole."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import apsw
import msgspec

from store import copies, counts, integrity, schema
from store.database import Snapshot, Tx
from store.errors import NewerFile, StoreError


class Backup(msgspec.Struct, frozen=True):
    """One copy; `verified_ms` is None until it was opened and found whole."""

    at_ms: int
    path: str
    bytes: int
    verified_ms: int | None


def add(tx: Tx, backup: Backup) -> None:
    """Write down that a copy was made."""
    tx.db.execute(
        "insert into receiver_backups (at_ms, path, bytes, verified_ms) values (?, ?, ?, ?)",
        (backup.at_ms, backup.path, backup.bytes, backup.verified_ms),
    )


def last(snapshot: Snapshot) -> Backup | None:
    """The newest copy that was proved whole."""
    values = snapshot.db.execute(
        """
        select at_ms, path, bytes, verified_ms from receiver_backups
        where verified_ms is not null order by id desc limit 1
        """
    ).fetchone()
    return None if values is None else Backup(*values)


class Facts(msgspec.Struct, frozen=True):
    """What is in a whole copy.

    `copied_ms` is when it was written, and `made_ms` when the file that it is of got its tables.
    `faults` are books that do not balance and references that lead nowhere: the copy is as the
    file was.
    """

    bytes: int
    copied_ms: int
    has_checksum: bool
    version: int
    made_ms: int
    events: int
    last_event_ms: int | None
    entries: int
    foreign_tables: tuple[str, ...]
    faults: tuple[str, ...]


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Snapshot]:
    """A copy, for reading. Raises StoreError."""
    with copies.opened(path) as db:
        yield Snapshot(db)


def made_ms(path: Path) -> int | None:
    """When the file that a copy is of got its tables: of two files never at the same time.

    None where it can't be read.
    """
    try:
        with opened(path) as seen:
            return counts.made_ms(seen) if schema.version(seen.db) else None
    except (apsw.Error, StoreError):
        return None


def examine(path: Path, *, named: Path | None = None) -> Facts:
    """Open a copy and look at all of it. Raises StoreError where it is damaged or not ours.

    `named` is the name that its checksum goes by, if it has another one yet.
    """
    if not path.is_file():
        raise StoreError(f"{path}: there is no such file")
    wal = Path(f"{path}-wal")
    if wal.exists() and wal.stat().st_size:
        raise StoreError(f"{path}: has a -wal beside it: it is a database in use, and no backup")
    found = copies.damage(path, named=named)
    if found:
        raise StoreError(f"{path}: {found[0]}; use another backup")
    with opened(path) as seen:
        return _facts(seen, path, copies.checksum_path(named or path).exists())


def _facts(seen: Snapshot, path: Path, has_checksum: bool) -> Facts:
    version = schema.version(seen.db)
    if version == 0:
        raise StoreError(f"{path}: has no Receiver tables; name a backup of a Receiver file")
    try:
        schema.refuse_newer(version)
    except NewerFile as error:
        raise StoreError(f"{path}: {error}") from error
    count, last_ms = next(seen.db.execute("select count(*), max(received_ms) from receiver_events"))
    status = path.stat()
    return Facts(
        bytes=status.st_size,
        copied_ms=status.st_mtime_ns // 1_000_000,
        has_checksum=has_checksum,
        version=version,
        made_ms=counts.made_ms(seen),
        events=count,
        last_event_ms=last_ms,
        entries=_count(seen, "select count(*) from receiver_ledger"),
        foreign_tables=tuple(integrity.foreign_tables(seen)),
        faults=(*integrity.book_faults(seen), *integrity.foreign_key_faults(seen)),
    )


class Lost(msgspec.Struct, frozen=True):
    """What a file has that a copy has not; without `is_ancestor` the copy is not of this file.

    `sent_again` are messages that the copy still owes and the file has sent.
    """

    is_ancestor: bool
    events: int
    since_ms: int | None
    entries: int
    sent_again: int

    @property
    def is_nothing(self) -> bool:
        return not (self.events or self.entries or self.sent_again)


def lost(seen: Snapshot, copy: Snapshot) -> Lost:
    """What would be gone if the copy took the place of the file that `seen` is of."""
    newest = "select id, source, account, event_id from receiver_events order by id desc limit 1"
    last = copy.db.execute(newest).fetchone() or (0,)
    known = seen.db.execute(
        "select id, source, account, event_id from receiver_events where id = ?", last[:1]
    ).fetchone()
    is_ancestor = last == (0,) or last == known
    events, since_ms = next(
        seen.db.execute(
            "select count(*), min(received_ms) from receiver_events where id > ?",
            (last[0] if is_ancestor else 0,),
        )
    )
    entries = _count(seen, "select count(*) from receiver_ledger")
    if is_ancestor:
        # Entries are never taken out, so what is in the copy is in the file.
        entries -= _count(copy, "select count(*) from receiver_ledger")
    owed = [key for (key,) in copy.db.execute(_OWED)]
    sent = _count(seen, _SENT, (json.dumps(owed),))
    return Lost(is_ancestor, events, since_ms, max(entries, 0), sent)


_OWED = "select operation_key from receiver_outbox where state = 'pending'"
_SENT = """
select count(*) from receiver_outbox
where state = 'sent' and operation_key in (select value from json_each(?))
"""


def _count(seen: Snapshot, statement: str, values: tuple[str, ...] = ()) -> int:
    found = seen.db.execute(statement, values).get
    assert isinstance(found, int), "a count is a number"
    return found
