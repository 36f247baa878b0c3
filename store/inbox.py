"""Events received: each stored once, by its event key."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from store.database import Snapshot, Tx

#: Text kept of an error, in characters.
ERROR_CHARS_MAX = 500

#: Events with one body that are told, at most.
TWINS_MAX = 10

STATES = ("pending", "done", "ignored", "parked", "quarantined", "dead")


@dataclass(frozen=True, slots=True)
class Row:
    """A stored event; times in UTC milliseconds. `source` is the identity."""

    id: int
    source: str
    account: str
    event_id: str
    endpoint: str
    type: str
    state: str
    reason: str | None
    duplicates: int
    attempts: int
    next_attempt_ms: int | None
    by_worker: bool
    last_error: str | None
    received_ms: int
    settled_ms: int | None
    secret: str
    content_type: str
    body_sha256: bytes
    id_signed: bool
    same_body_as: int | None
    claimed_account: str | None
    workspace: str | None
    request_id: str
    lease_until_ms: int | None

    @property
    def is_final(self) -> bool:
        """No more attempt will be made unless the operator asks for one."""
        return self.state in ("done", "ignored", "dead")


_BOOLEANS = [number for number, field in enumerate(fields(Row)) if field.type is bool]

_COLUMNS = """
    id, source, account, event_id, endpoint, type, state, reason, duplicates, attempts,
    next_attempt_ms, by_worker, last_error, received_ms, settled_ms, secret, content_type,
    body_sha256,
    id_signed, same_body_as, claimed_account, workspace, request_id, lease_until_ms
"""


def insert(
    tx: Tx,
    *,
    source: str,
    account: str,
    event_id: str,
    endpoint: str,
    type: str,
    received_ms: int,
    secret: str,
    content_type: str,
    body: bytes,
    body_sha256: bytes,
    id_signed: bool,
    claimed_account: str | None,
    request_id: str,
    queued: bool = False,
) -> int | None:
    """Store a new event and return its row number, or None if its key is known.

    A queued one is due for a worker. Any other is written as `done`, which is how nearly all
    end, so that they need no second write; the caller settles it otherwise before the
    transaction ends.
    """
    tx.db.execute(
        """
        insert into receiver_events (
          source, account, event_id, endpoint, type, state, duplicates, attempts,
          next_attempt_ms, by_worker, received_ms, settled_ms, secret, content_type,
          body_sha256, id_signed, claimed_account, request_id)
        values (?, ?, ?, ?, ?, ?, 0, 0, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
        on conflict (source, account, event_id) do nothing
        """,
        (
            source,
            account,
            event_id,
            endpoint,
            type,
            "pending" if queued else "done",
            tx.now_ms if queued else None,
            int(queued),
            received_ms,
            None if queued else tx.now_ms,
            secret,
            content_type,
            body_sha256,
            int(id_signed),
            claimed_account,
            request_id,
        ),
    )
    if tx.db.changes() == 0:
        return None
    row = tx.db.last_insert_rowid()
    tx.db.execute("insert into receiver_payloads (event, body) values (?, ?)", (row, body))
    return row


def settle(tx: Tx, row: int, state: str, reason: str | None) -> None:
    """Give the event its new state; a final one gets its time, a lease ends."""
    settled = tx.now_ms if state in ("done", "ignored", "dead") else None
    tx.db.execute(
        """
        update receiver_events
        set state = ?, reason = ?, settled_ms = ?, next_attempt_ms = null,
          lease_owner = null, lease_until_ms = null
        where id = ?
        """,
        (state, reason, settled, row),
    )
    assert tx.db.changes() == 1, "only an event that is stored can be settled"


def fail(tx: Tx, row: int, attempts: int, error: str, next_attempt_ms: int | None) -> None:
    """The attempt with this number failed: the event stays `pending`, its lease ends.

    It is due for a worker when told; None: not due, until a redelivery or the operator.
    """
    tx.db.execute(
        """
        update receiver_events
        set state = 'pending', reason = null, settled_ms = null, attempts = ?, last_error = ?,
          next_attempt_ms = ?, by_worker = ?, lease_owner = null, lease_until_ms = null
        where id = ?
        """,
        (attempts, error[:ERROR_CHARS_MAX], next_attempt_ms, next_attempt_ms is not None, row),
    )
    assert tx.db.changes() == 1, "only an event that is stored can fail"


def die(tx: Tx, row: int, attempts: int, error: str) -> None:
    """The attempt with this number failed and was the last: the event is `dead`."""
    tx.db.execute(
        """
        update receiver_events
        set state = 'dead', reason = null, settled_ms = ?, attempts = ?, last_error = ?,
          next_attempt_ms = null, lease_owner = null, lease_until_ms = null
        where id = ?
        """,
        (tx.now_ms, attempts, error[:ERROR_CHARS_MAX], row),
    )
    assert tx.db.changes() == 1, "only an event that is stored can die"


def lease(tx: Tx, owner: str, until_ms: int, ahead_ms_max: int) -> Row | None:
    """Take the right to the next attempt at the event that is due longest, or None.

    The attempt is counted now. Until `until_ms` nobody else gets the event; then it is due.
    """
    values = tx.db.execute(
        f"""
        update receiver_events
        set attempts = attempts + 1, lease_owner = :owner, lease_until_ms = :until,
          next_attempt_ms = :until
        where id = coalesce(
          (select id from receiver_events
           where by_worker = 1 and next_attempt_ms <= :now order by next_attempt_ms limit 1),
          (select id from receiver_events
           where by_worker = 1 and next_attempt_ms > :far limit 1))
        returning {_COLUMNS}
        """,  # noqa: S608  constant columns
        {"owner": owner, "until": until_ms, "now": tx.now_ms, "far": tx.now_ms + ahead_ms_max},
    ).fetchall()
    return _row(values[0]) if values else None


def holds(snapshot: Snapshot, row: int, owner: str, attempt: int) -> bool:
    """Whether this attempt's lease is still the event's: only then may it settle the event."""
    found = snapshot.db.execute(
        "select 1 from receiver_events where id = ? and lease_owner = ? and attempts = ?",
        (row, owner, attempt),
    ).get
    return found is not None


def queue_due_ms(snapshot: Snapshot) -> int | None:
    """When the next event is due for a worker, in UTC milliseconds; None if none is."""
    found = snapshot.db.execute(
        """
        select min(next_attempt_ms) from receiver_events
        where next_attempt_ms is not null and by_worker = 1
        """
    ).get
    assert found is None or isinstance(found, int), "the column is an integer"
    return found


def count_duplicate(tx: Tx, row: int) -> None:
    """One more redelivery of the same content."""
    tx.db.execute("update receiver_events set duplicates = duplicates + 1 where id = ?", (row,))


def make_due(tx: Tx, row: int, *, by_worker: bool) -> None:
    """Let the worker, or else whoever applies released events, run this one again now."""
    tx.db.execute(
        """
        update receiver_events
        set state = 'pending', settled_ms = null, next_attempt_ms = ?, by_worker = ?
        where id = ?
        """,
        (tx.now_ms, by_worker, row),
    )


def attribute(tx: Tx, row: int, workspace: str) -> None:
    """The operator says whose event it is; it is due now."""
    tx.db.execute("update receiver_events set workspace = ? where id = ?", (workspace, row))
    make_due(tx, row, by_worker=False)


def mark_same_body(tx: Tx, row: int, source: str, body_sha256: bytes) -> int | None:
    """Flag the event if the same body came before under another id; return that event."""
    other = tx.db.execute(
        """
        select id from receiver_events
        where source = ? and body_sha256 = ? and id_signed = 0 and id < ?
        order by id limit 1
        """,
        (source, body_sha256, row),
    ).get
    assert other is None or isinstance(other, int), "the column is a row number"
    if other is not None:
        tx.db.execute("update receiver_events set same_body_as = ? where id = ?", (other, row))
    return other


def released(snapshot: Snapshot, limit: int) -> list[int]:
    """Row numbers of events that were released and need no worker, oldest first."""
    return [
        row
        for (row,) in snapshot.db.execute(
            """
            select id from receiver_events
            where next_attempt_ms is not null and by_worker = 0
            order by id limit ?
            """,
            (limit,),
        )
    ]


def by_key(snapshot: Snapshot, source: str, account: str, event_id: str) -> Row | None:
    """The event with this key."""
    return _one(
        snapshot,
        f"""
        select {_COLUMNS} from receiver_events
        where source = ? and account = ? and event_id = ?
        """,  # noqa: S608  a constant list of columns
        (source, account, event_id),
    )


def by_row(snapshot: Snapshot, row: int) -> Row | None:
    """The event with this row number."""
    return _one(
        snapshot,
        f"select {_COLUMNS} from receiver_events where id = ?",  # noqa: S608  as above
        (row,),
    )


def named(snapshot: Snapshot, name: str, limit: int = 10) -> list[Row]:
    """Events that an operator may mean by `name`, oldest first.

    It is an id, `source/id`, `source/account/id` or a row number; the source is the identity
    or the source's own name. An id that a sender uses once for each topic is found without it.
    """
    if name.isascii() and name.isdecimal() and len(name) < 19:
        found = by_row(snapshot, int(name))
        if found is not None:
            return [found]
    return list(_by_id(snapshot, name, limit)) or list(_by_path(snapshot, name, limit))


def forget_payload(tx: Tx, row: int) -> None:
    """Keep the event without its body; it can't be run again."""
    tx.db.execute("delete from receiver_payloads where event = ?", (row,))


def payload(snapshot: Snapshot, row: int) -> bytes | None:
    """The stored body; None once it was pruned."""
    found = snapshot.db.execute("select body from receiver_payloads where event = ?", (row,)).get
    assert found is None or isinstance(found, bytes), "the column is a blob"
    return found


def listed(
    snapshot: Snapshot,
    *,
    state: str | None = None,
    endpoint: str | None = None,
    type: str | None = None,
    since_ms: int | None = None,
    after_row: int | None = None,
    newest_first: bool = True,
    limit: int = 50,
) -> list[Row]:
    """Events by what is given; `after_row` for following along, oldest first then."""
    order = "desc" if newest_first else "asc"
    return [
        _row(values)
        for values in snapshot.db.execute(
            f"""
            select {_COLUMNS} from receiver_events
            where (:state is null or state = :state)
              and (:endpoint is null or endpoint = :endpoint)
              and (:type is null or type = :type)
              and (:since is null or received_ms >= :since)
              and (:after is null or id > :after)
            order by id {order} limit :limit
            """,  # noqa: S608  constant columns, and one of two words
            {
                "state": state,
                "endpoint": endpoint,
                "type": type,
                "since": since_ms,
                "after": after_row,
                "limit": limit,
            },
        )
    ]


def numbers(
    snapshot: Snapshot,
    *,
    state: str | None = None,
    endpoint: str | None = None,
    type: str | None = None,
    since_ms: int | None = None,
) -> list[int]:
    """Row numbers of all events that fit, oldest first."""
    return [
        row
        for (row,) in snapshot.db.execute(
            """
            select id from receiver_events
            where (:state is null or state = :state)
              and (:endpoint is null or endpoint = :endpoint)
              and (:type is null or type = :type)
              and (:since is null or received_ms >= :since)
            order by id
            """,
            {"state": state, "endpoint": endpoint, "type": type, "since": since_ms},
        )
    ]


def tally(snapshot: Snapshot, rows: Sequence[int]) -> dict[str, int]:
    """How many of these events are in each state."""
    return dict(
        snapshot.db.execute(
            """
            select state, count(*) from receiver_events
            where id in (select value from json_each(?)) group by state order by state
            """,
            (json.dumps(rows),),
        )
    )


def twins(snapshot: Snapshot, row: Row) -> list[Row]:
    """Other events of the source with the same body, whose ids nobody signed; oldest first."""
    return [
        _row(values)
        for values in snapshot.db.execute(
            f"""
            select {_COLUMNS} from receiver_events
            where source = ? and body_sha256 = ? and id_signed = 0 and id <> ?
            order by id limit ?
            """,  # noqa: S608  constant columns
            (row.source, row.body_sha256, row.id, TWINS_MAX),
        )
    ]


def latest(snapshot: Snapshot, endpoint: str) -> int | None:
    """When the newest event of a source was received, in UTC milliseconds."""
    found = snapshot.db.execute(
        """
        select received_ms from receiver_events where endpoint = ? order by id desc limit 1
        """,
        (endpoint,),
    ).get
    assert found is None or isinstance(found, int), "the column is an integer"
    return found


def _by_id(snapshot: Snapshot, name: str, limit: int) -> Iterator[Row]:
    # `;` follows `:`, so this is the range of all ids that begin with the name and a colon.
    for values in snapshot.db.execute(
        f"""
        select {_COLUMNS} from receiver_events
        where source in (select name from receiver_names where kind = 'identity')
          and (event_id = :name or (event_id > :name || ':' and event_id < :name || ';'))
        order by id limit :limit
        """,  # noqa: S608  constant columns
        {"name": name, "limit": limit},
    ):
        yield _row(values)


def _by_path(snapshot: Snapshot, name: str, limit: int) -> Iterator[Row]:
    parts = name.split("/")
    if len(parts) < 2:
        return
    source = parts[0]
    seen: set[int] = set()
    for account, event_id in [(None, "/".join(parts[1:])), (parts[1], "/".join(parts[2:]))]:
        for row in _by_id(snapshot, event_id, limit) if event_id else ():
            fits = source in (row.source, row.endpoint) and account in (None, row.account)
            if fits and row.id not in seen:
                seen.add(row.id)
                yield row


def _one(snapshot: Snapshot, statement: str, parameters: tuple[object, ...]) -> Row | None:
    values = snapshot.db.execute(statement, parameters).fetchone()
    return None if values is None else _row(values)


def _row(values: tuple[object, ...]) -> Row:
    # The columns stand in the order of the fields.
    columns: list[Any] = list(values)
    for number in _BOOLEANS:
        columns[number] = bool(columns[number])
    return Row(*columns)
