"""Copies of the file that were made: when, where, and whether they were proved whole."""

from dataclasses import dataclass

from store.database import Snapshot, Tx


@dataclass(frozen=True, slots=True)
class Backup:
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
