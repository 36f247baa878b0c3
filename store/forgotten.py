"""Bodies that are let go, by age or on demand, and what is kept to recognise them by."""

import json
from collections.abc import Sequence
from typing import Literal

import msgspec

from store.database import Snapshot, Tx
from store.operations import Key
from store.outbox import UNWRITTEN


class Forgotten(msgspec.Struct, frozen=True):
    """What is left of a payload; `content_sha256` is None where it was not JSON."""

    content_sha256: bytes | None
    mask: tuple[str, ...]
    why: str
    forgotten_ms: int


class Held(msgspec.Struct, frozen=True):
    """An event for which a body is held; `bytes` of its payload, 0 if that is gone."""

    event: int
    endpoint: str
    state: str
    received_ms: int
    content_type: str
    bytes: int


def of_event(snapshot: Snapshot, event: int) -> Forgotten | None:
    """What is left of the event's payload, or None while it is there, or if nothing was kept."""
    values = snapshot.db.execute(
        """
        select content_sha256, mask, why, forgotten_ms from receiver_forgotten where event = ?
        """,
        (event,),
    ).fetchone()
    if values is None:
        return None
    return Forgotten(values[0], tuple(json.loads(values[1])), *values[2:])


def span(snapshot: Snapshot) -> tuple[int, int]:
    """The first event that a body is held for, and the last one there is; (1, 0) for none."""
    first, last = next(
        snapshot.db.execute(
            """
            select min(
                coalesce((select min(event) from receiver_payloads), 9223372036854775807),
                coalesce((select min(event) from receiver_conflicts where body is not null),
                  9223372036854775807)),
              (select coalesce(max(id), 0) from receiver_events)
            """
        )
    )
    return (first, last) if first <= last else (1, 0)


def finished(snapshot: Snapshot, after: int, until: int) -> list[Held]:
    """Events with row numbers above `after`, to `until`, that nothing more is done with.

    They are `done` or `ignored`, every conflict of theirs is resolved, and every message sent or
    cancelled.
    """
    return [
        Held(*values)
        for values in snapshot.db.execute(
            """
            select e.id, e.endpoint, e.state, e.received_ms, e.content_type,
              coalesce(length(p.body), 0)
            from receiver_events e left join receiver_payloads p on p.event = e.id
            where e.id > ? and e.id <= ? and e.state in ('done', 'ignored')
              and (p.event is not null or exists (
                select 1 from receiver_conflicts where event = e.id and body is not null))
              and not exists (
                select 1 from receiver_conflicts where event = e.id and resolved_ms is null)
              and not exists (
                select 1 from receiver_outbox
                where event = e.id and state in ('pending', 'review', 'dead'))
            order by e.id
            """,
            (after, until),
        )
    ]


def forget(
    tx: Tx,
    event: int,
    why: Literal["pruned", "redacted"],
    content_sha256: bytes | None,
    mask: Sequence[str],
) -> None:
    """Let go of every body that is held for the event, and of what its attempts told.

    The payload, what conflicts and messages that are over hold, and errors, which may quote it.
    `content_sha256` and `mask` tell what the payload was, while it is there.
    """
    _note(tx, event, why, content_sha256, mask)
    tx.db.execute("delete from receiver_payloads where event = ?", (event,))
    tx.db.execute("update receiver_conflicts set body = null where event = ?", (event,))
    _empty_attempts(tx, event)
    if why == "pruned":
        _drop_attempts(tx, event)
    tx.db.execute(
        """
        update receiver_outbox set body = ?, last_error = null
        where event = ? and state in ('sent', 'cancelled', 'dead')
        """,
        (UNWRITTEN, event),
    )
    tx.db.execute(
        "update receiver_events set last_error = null where id = ? and last_error is not null",
        (event,),
    )


def _note(tx: Tx, event: int, why: str, content_sha256: bytes | None, mask: Sequence[str]) -> None:
    tx.db.execute(
        """
        insert into receiver_forgotten (event, content_sha256, mask, why, forgotten_ms)
        select event, ?, ?, ?, ? from receiver_payloads where event = ?
        """,
        (content_sha256, json.dumps(list(mask)), why, tx.now_ms, event),
    )
    if tx.db.changes() == 0:
        tx.db.execute("update receiver_forgotten set why = ? where event = ?", (why, event))


def _drop_attempts(tx: Tx, event: int) -> None:
    tx.db.execute("delete from receiver_attempts where event = ?", (event,))
    tx.db.execute(
        """
        delete from receiver_attempts
        where message in (
          select id from receiver_outbox where event = ? and state in ('sent', 'cancelled'))
        """,
        (event,),
    )


def _empty_attempts(tx: Tx, event: int) -> None:
    tx.db.execute("update receiver_attempts set error = null where event = ?", (event,))
    tx.db.execute(
        """
        update receiver_attempts set error = null
        where message in (
          select id from receiver_outbox
          where event = ? and state in ('sent', 'cancelled', 'dead'))
        """,
        (event,),
    )


def forget_records(tx: Tx, event: int) -> int:
    """Empty the data of the records that the event made; how many."""
    tx.db.execute(
        """
        update receiver_records set data = '{}'
        where data <> '{}' and (source, account, subject, operation) in (
          select source, account, subject, operation from receiver_operations
          where event = ? and kind = 'record')
        """,
        (event,),
    )
    return tx.db.changes()


def forget_rejected(tx: Tx, source: str, before_ms: int) -> int:
    """Let go of what refused requests of a source held that came before; how many."""
    tx.db.execute(
        """
        update receiver_rejected set url = null, headers = null, body = null
        where source = ? and received_ms < ? and body is not null
        """,
        (source, before_ms),
    )
    return tx.db.changes()


def rejected(snapshot: Snapshot) -> list[tuple[int, bytes]]:
    """The refused requests that are held with their bodies: number and body; a bounded few."""
    return list(
        snapshot.db.execute("select id, body from receiver_rejected where body is not null")
    )


def forget_one_rejected(tx: Tx, number: int) -> None:
    """Let go of what one refused request held."""
    tx.db.execute(
        "update receiver_rejected set url = null, headers = null, body = null where id = ?",
        (number,),
    )


def payloads(snapshot: Snapshot, after: int, limit: int) -> list[tuple[int, str, bytes]]:
    """Event, content type and payload, of events with row numbers above `after`."""
    return list(
        snapshot.db.execute(
            """
            select e.id, e.content_type, p.body
            from receiver_payloads p join receiver_events e on e.id = p.event
            where p.event > ? order by p.event limit ?
            """,
            (after, limit),
        )
    )


def conflicts(snapshot: Snapshot, after: int, limit: int) -> list[tuple[int, int, str, bytes]]:
    """Number, event, content type and body, of conflicts with numbers above `after`."""
    return list(
        snapshot.db.execute(
            """
            select id, event, content_type, body from receiver_conflicts
            where id > ? and body is not null order by id limit ?
            """,
            (after, limit),
        )
    )


def records(snapshot: Snapshot, after: Key | None, limit: int) -> list[tuple[Key, int, str]]:
    """Key, event and data, of records that an event made and that still have any, beyond a key."""
    return [
        (Key(*values[:4]), *values[4:])
        for values in snapshot.db.execute(
            """
            select r.source, r.account, r.subject, r.operation, o.event, r.data
            from receiver_records r join receiver_operations o using (
              source, account, subject, operation)
            where (r.source, r.account, r.subject, r.operation) > (?, ?, ?, ?)
              and r.data <> '{}' and o.event is not null and o.kind = 'record'
            order by r.source, r.account, r.subject, r.operation limit ?
            """,
            (*(after or ("", "", "", "")), limit),
        )
    ]


def projected(snapshot: Snapshot, after: int, limit: int) -> list[tuple[int, int, str]]:
    """Number, event and fields, of resources that an event brought and that have any."""
    return list(
        snapshot.db.execute(
            """
            select id, event, fields from receiver_resources
            where id > ? and event is not null and fields <> '{}' order by id limit ?
            """,
            (after, limit),
        )
    )
