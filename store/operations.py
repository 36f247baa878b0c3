"""Claims: which business change was made for which subject, once and for ever."""

from typing import NamedTuple

from store import names
from store.database import Snapshot, Tx


class Key(NamedTuple):
    """The business key. `source` is the identity; `account` may be ''.

    In the order of every table's primary key, so that a statement binds it as it is.
    """

    source: str
    account: str
    subject: str
    operation: str

    def __str__(self) -> str:
        return "/".join(filter(None, self))


class Claim(NamedTuple):
    """What an operation did; `amount` in `unit`, negative for what takes away."""

    kind: str
    workspace: str | None = None
    unit: str | None = None
    amount: int | None = None
    target_subject: str | None = None
    target_operation: str | None = None


def claim(tx: Tx, key: Key, what: Claim, event: int | None) -> bool:
    """Claim the key for ever. False: it is claimed already, and nothing was written."""
    tx.db.execute(
        """
        insert into receiver_operations (
          source, account, subject, operation, kind, workspace, unit, amount,
          target_subject, target_operation, event, created_ms)
        values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
        on conflict (source, account, subject, operation) do nothing
        """,
        (*key, *what, event, tx.now_ms),
    )
    return tx.db.changes() == 1


def find(snapshot: Snapshot, key: Key) -> Claim | None:
    """What the key is claimed for, or None."""
    values = snapshot.db.execute(
        """
        select kind, workspace, unit, amount, target_subject, target_operation
        from receiver_operations
        where source = ? and account = ? and subject = ? and operation = ?
        """,
        key,
    ).fetchone()
    return None if values is None else Claim(*values)


def holder(snapshot: Snapshot, key: Key) -> tuple[int | None, int] | None:
    """(event, created_ms) of the claim, or None. The event is None for the app and by hand."""
    values = snapshot.db.execute(
        """
        select event, created_ms from receiver_operations
        where source = ? and account = ? and subject = ? and operation = ?
        """,
        key,
    ).fetchone()
    return None if values is None else (values[0], values[1])


def of_event(snapshot: Snapshot, event: int) -> list[tuple[Key, Claim, int]]:
    """The operations that an event claimed, with their time in UTC milliseconds."""
    return [
        (Key(*values[:4]), Claim(*values[4:10]), values[10])
        for values in snapshot.db.execute(
            """
            select source, account, subject, operation, kind, workspace, unit, amount,
              target_subject, target_operation, created_ms
            from receiver_operations where event = ? order by created_ms, operation
            """,
            (event,),
        )
    ]


def events_of_subject(snapshot: Snapshot, subject: str) -> list[int]:
    """Row numbers of the events that made an operation for a subject, oldest first."""
    return [
        event
        for (event,) in snapshot.db.execute(
            f"""
            with {names.SENDERS.format("receiver_operations")}
            select distinct o.event from senders s cross join receiver_operations o
            on o.source = s.source and o.account = s.account and o.subject = ?
            where o.event is not null order by 1
            """,  # noqa: S608  constant text
            (subject,),
        )
    ]
