"""Attempts: one row for each try at an event or a message."""

import msgspec

from store.database import Snapshot, Tx


class Attempt(msgspec.Struct, frozen=True):
    """One try at an event; `duration_ms` and `outcome` are None while it runs."""

    attempt: int
    started_ms: int
    duration_ms: int | None
    outcome: str | None
    error: str | None


def start(tx: Tx, attempt: int, *, event: int | None = None, message: int | None = None) -> None:
    """A try begins, at an event or at a message; one before it that never ended is closed."""
    close(tx, event=event, message=message)
    tx.db.execute(
        """
        insert into receiver_attempts (event, message, attempt, started_ms) values (?, ?, ?, ?)
        """,
        (event, message, attempt, tx.now_ms),
    )


def close(tx: Tx, *, event: int | None = None, message: int | None = None) -> None:
    """A try that never ended, because its worker did, has an unknown outcome."""
    tx.db.execute(
        """
        update receiver_attempts
        set outcome = 'unknown', duration_ms = max(0, ? - started_ms), error = 'its lease ran out'
        where outcome is null and (event = ? or message = ?)
        """,
        (tx.now_ms, event, message),
    )


def finish(
    tx: Tx,
    attempt: int,
    outcome: str,
    error: str | None,
    *,
    event: int | None = None,
    message: int | None = None,
) -> None:
    """A try that was begun has ended."""
    tx.db.execute(
        """
        update receiver_attempts
        set outcome = ?, error = ?, duration_ms = max(0, ? - started_ms)
        where attempt = ? and (event = ? or message = ?)
        """,
        (outcome, error, tx.now_ms, attempt, event, message),
    )
    assert tx.db.changes() == 1, "only a try that was begun can end"


def first_ms(snapshot: Snapshot, message: int) -> int | None:
    """When a message was first tried, in UTC milliseconds."""
    found = snapshot.db.execute(
        "select min(started_ms) from receiver_attempts where message = ?", (message,)
    ).get
    assert found is None or isinstance(found, int), "the column is an integer"
    return found


def of_message(snapshot: Snapshot, message: int) -> list[Attempt]:
    """The tries at one message, oldest first."""
    return [
        Attempt(*values)
        for values in snapshot.db.execute(
            """
            select attempt, started_ms, duration_ms, outcome, error
            from receiver_attempts where message = ? order by attempt
            """,
            (message,),
        )
    ]


def of_event(snapshot: Snapshot, event: int) -> list[Attempt]:
    """The tries at one event, oldest first."""
    return [
        Attempt(*values)
        for values in snapshot.db.execute(
            """
            select attempt, started_ms, duration_ms, outcome, error
            from receiver_attempts where event = ? order by attempt
            """,
            (event,),
        )
    ]
