"""Comparisons with a sender: when they ran, how far they came, and what was missing here."""

from typing import NamedTuple

import msgspec

from store.database import Snapshot, Tx


class Reconcile(msgspec.Struct, frozen=True):
    """One run that is complete; `gap` is what was still missing after it."""

    source: str
    started_ms: int
    ended_ms: int
    gap: int
    note: str


class CutOff(NamedTuple):
    """A run that did not end: what it was asked for, how far it came, and who had it last."""

    run: int
    started_ms: int
    place: str
    owner: str | None
    lease_until_ms: int | None


def begin(
    tx: Tx,
    source: str,
    *,
    about: str = "events",
    asked: str = "",
    place: str = "",
    owner: str | None = None,
    until_ms: int | None = None,
) -> int:
    """Write down that a run began; its number, for `end`. `about` is `events` or `books`."""
    tx.db.execute(
        """
        insert into receiver_reconciles (
          source, about, asked, place, owner, lease_until_ms, started_ms, note)
        values (?, ?, ?, ?, ?, ?, ?, '')
        """,
        (source, about, asked, place, owner, until_ms, tx.now_ms),
    )
    return tx.db.last_insert_rowid()


def cut_off(
    snapshot: Snapshot, source: str, about: str, asked: str, since_ms: int
) -> CutOff | None:
    """The newest run for the same, if it began since then and did not end."""
    values = snapshot.db.execute(
        """
        select id, started_ms, place, owner, lease_until_ms, ended_ms from receiver_reconciles
        where source = ? and about = ? and asked = ? and started_ms >= ? order by id desc limit 1
        """,
        (source, about, asked, since_ms),
    ).fetchone()
    return None if values is None or values[5] is not None else CutOff(*values[:5])


def take(tx: Tx, run: int, owner: str, until_ms: int) -> None:
    """Go on with a run that was cut off."""
    tx.db.execute(
        "update receiver_reconciles set owner = ?, lease_until_ms = ? where id = ?",
        (owner, until_ms, run),
    )


def keep(tx: Tx, run: int, owner: str, place: str, until_ms: int) -> bool:
    """Write down how far it came; False, with nothing written, if somebody else has it now."""
    tx.db.execute(
        """
        update receiver_reconciles set place = ?, lease_until_ms = ?
        where id = ? and owner = ? and ended_ms is null
        """,
        (place, until_ms, run, owner),
    )
    return tx.db.changes() == 1


def leave(tx: Tx, run: int, owner: str) -> None:
    """It is cut off: whoever asks for the same next goes on with it."""
    tx.db.execute(
        """
        update receiver_reconciles set owner = null, lease_until_ms = null
        where id = ? and owner = ?
        """,
        (run, owner),
    )


def end(tx: Tx, run: int, gap: int, note: str = "") -> None:
    """The run is complete; `gap` is what is still missing after it."""
    tx.db.execute(
        """
        update receiver_reconciles
        set ended_ms = ?, gap = ?, note = ?, place = '', owner = null, lease_until_ms = null
        where id = ?
        """,
        (tx.now_ms, gap, note, run),
    )
    assert tx.db.changes() == 1, "only a run that began can end"


def last(snapshot: Snapshot, source: str) -> Reconcile | None:
    """The newest complete comparison of a source's events."""
    values = snapshot.db.execute(
        """
        select source, started_ms, ended_ms, gap, note from receiver_reconciles
        where source = ? and about = 'events' and ended_ms is not null order by id desc limit 1
        """,
        (source,),
    ).fetchone()
    return None if values is None else Reconcile(*values)
