"""Comparisons with a sender: when they ran, and how much of what it has was missing here."""

from dataclasses import dataclass

from store.database import Snapshot, Tx


@dataclass(frozen=True, slots=True)
class Reconcile:
    """One run; `gap` and `ended_ms` are None while it is under way, or when it was cut off."""

    source: str
    started_ms: int
    ended_ms: int | None
    gap: int | None
    note: str


def begin(tx: Tx, source: str) -> int:
    """Write down that a run began; its number, for `end`."""
    tx.db.execute(
        "insert into receiver_reconciles (source, started_ms, note) values (?, ?, '')",
        (source, tx.now_ms),
    )
    return tx.db.last_insert_rowid()


def end(tx: Tx, run: int, gap: int, note: str = "") -> None:
    """The run is complete; `gap` is what is still missing after it."""
    tx.db.execute(
        "update receiver_reconciles set ended_ms = ?, gap = ?, note = ? where id = ?",
        (tx.now_ms, gap, note, run),
    )
    assert tx.db.changes() == 1, "only a run that began can end"


def last(snapshot: Snapshot, source: str) -> Reconcile | None:
    """The newest run of a source that was complete."""
    values = snapshot.db.execute(
        """
        select source, started_ms, ended_ms, gap, note from receiver_reconciles
        where source = ? and ended_ms is not null order by id desc limit 1
        """,
        (source,),
    ).fetchone()
    return None if values is None else Reconcile(*values)
