"""Attempts: one row for each try at an event or a message."""

from dataclasses import dataclass

from store.database import Snapshot, Tx


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at an event; `duration_ms` and `outcome` are None while it runs."""

    attempt: int
    started_ms: int
    duration_ms: int | None
    outcome: str | None
    error: str | None


def add(
    tx: Tx, event: int, attempt: int, *, duration_ms: int, outcome: str, error: str | None
) -> None:
    """Write down a try at an event that ended within this transaction."""
    tx.db.execute(
        """
        insert into receiver_attempts (event, attempt, started_ms, duration_ms, outcome, error)
        values (?, ?, ?, ?, ?, ?)
        """,
        (event, attempt, tx.now_ms, duration_ms, outcome, error),
    )


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
