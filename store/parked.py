"""Parked events, and the fact that each waits for."""

import msgspec

from store import inbox
from store.database import Snapshot, Tx


class Fact(msgspec.Struct, frozen=True):
    """What is missing: a `link` of the customer `key`, the ledger `entry` with subject `key`
    and its operation, the `resource` of id `key` and kind `operation`, or an `attribution` by
    the operator (key and operation empty)."""

    kind: str
    source: str
    account: str
    key: str = ""
    operation: str = ""


class Wait(msgspec.Struct, frozen=True):
    """A fact that an event has waited for, from `since_ms` on; it does so no longer."""

    fact: Fact
    since_ms: int


def wait(tx: Tx, event: int, fact: Fact) -> None:
    """The event waits for one fact; an earlier one is forgotten."""
    tx.db.execute(
        """
        insert into receiver_parked (event, kind, source, account, key, operation, since_ms)
        values (?, ?, ?, ?, ?, ?, ?)
        on conflict (event) do update set
          kind = excluded.kind, source = excluded.source, account = excluded.account,
          key = excluded.key, operation = excluded.operation
        """,
        (event, fact.kind, fact.source, fact.account, fact.key, fact.operation, tx.now_ms),
    )


def of_event(snapshot: Snapshot, event: int) -> Fact | None:
    """What the event waits for, or None."""
    values = snapshot.db.execute(
        "select kind, source, account, key, operation from receiver_parked where event = ?",
        (event,),
    ).fetchone()
    return None if values is None else Fact(*values)


def since(snapshot: Snapshot, event: int) -> int | None:
    """From when on the event is parked, in UTC milliseconds, or None."""
    found = snapshot.db.execute(
        "select since_ms from receiver_parked where event = ?", (event,)
    ).get
    assert found is None or isinstance(found, int), "the column is an integer"
    return found


def before(snapshot: Snapshot, event: int) -> list[Wait]:
    """What the event has waited for before, oldest first."""
    return [
        Wait(Fact(*values[:5]), values[5])
        for values in snapshot.db.execute(
            """
            select kind, source, account, key, operation, since_ms
            from receiver_waits where event = ? order by since_ms
            """,
            (event,),
        )
    ]


def on(snapshot: Snapshot, fact: Fact) -> list[int]:
    """Row numbers of the events that wait for just this fact."""
    return [
        event
        for (event,) in snapshot.db.execute(
            """
            select event from receiver_parked
            where kind = ? and source = ? and account = ? and key = ? and operation = ?
            order by event
            """,
            (fact.kind, fact.source, fact.account, fact.key, fact.operation),
        )
    ]


def listed(
    snapshot: Snapshot, *, endpoint: str | None = None, limit: int = 50
) -> list[tuple[int, Fact, int]]:
    """(event row, fact, since_ms), longest waiting first."""
    if endpoint is None:
        found = snapshot.db.execute(
            """
            select event, kind, source, account, key, operation, since_ms
            from receiver_parked where event > 0 order by event limit ?
            """,
            (limit,),
        )
        return [(values[0], Fact(*values[1:6]), values[6]) for values in found]
    events = inbox.numbers(snapshot, state="parked", endpoint=endpoint)[:limit]
    waiting = ((event, of_event(snapshot, event), since(snapshot, event)) for event in events)
    return [
        (event, fact, since_ms)
        for event, fact, since_ms in waiting
        if fact is not None and since_ms is not None
    ]
