"""Conditions that need a person: each opened once, closed when it is gone."""

import msgspec

from store.database import Snapshot, Tx


class Alert(msgspec.Struct, frozen=True):
    """One condition; times in UTC milliseconds, `sent_ms` is when a message was owed last."""

    id: int
    name: str
    subject: str
    words: str
    opened_ms: int
    closed_ms: int | None
    sent_ms: int | None


_COLUMNS = "id, name, subject, words, opened_ms, closed_ms, sent_ms"


def open(tx: Tx, name: str, subject: str, words: str) -> None:
    """Write down that a condition holds."""
    tx.db.execute(
        """
        insert into receiver_alerts (name, subject, words, opened_ms) values (?, ?, ?, ?)
        on conflict (name, subject) where closed_ms is null do nothing
        """,
        (name, subject, words, tx.now_ms),
    )


def close(tx: Tx, alert: int) -> None:
    """The condition is gone."""
    tx.db.execute(
        """
        update receiver_alerts set closed_ms = max(opened_ms, ?)
        where id = ? and closed_ms is null
        """,
        (tx.now_ms, alert),
    )


def sent(tx: Tx, alert: int) -> None:
    """A message that tells of it is owed."""
    tx.db.execute("update receiver_alerts set sent_ms = ? where id = ?", (tx.now_ms, alert))


def opened(snapshot: Snapshot) -> list[Alert]:
    """What holds now, the oldest first."""
    return [
        Alert(*values)
        for values in snapshot.db.execute(
            f"""
            select {_COLUMNS} from receiver_alerts where closed_ms is null order by id
            """,  # noqa: S608  constant columns
        )
    ]


def listed(snapshot: Snapshot, limit: int = 50) -> list[Alert]:
    """The newest first, closed ones too."""
    return [
        Alert(*values)
        for values in snapshot.db.execute(
            f"""
            select {_COLUMNS} from receiver_alerts order by id desc limit ?
            """,  # noqa: S608  constant columns
            (limit,),
        )
    ]


def last_sent_ms(snapshot: Snapshot, name: str, subject: str, now_ms: int) -> int | None:
    """When a message told last of this condition, in this or an earlier opening.

    A time ahead of now was written by a clock since set back, and says nothing.
    """
    found = snapshot.db.execute(
        """
        select max(sent_ms) from receiver_alerts
        where name = ? and subject = ? and sent_ms <= ?
        """,
        (name, subject, now_ms),
    ).get
    assert found is None or isinstance(found, int), "the column is an integer"
    return found


def newest_sent_ms(snapshot: Snapshot, now_ms: int) -> int | None:
    """When a message told last of any; the same of a time ahead of now."""
    found = snapshot.db.execute(
        "select max(sent_ms) from receiver_alerts where sent_ms <= ?", (now_ms,)
    ).get
    assert found is None or isinstance(found, int), "the column is an integer"
    return found
