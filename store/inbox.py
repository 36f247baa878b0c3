"""Events received: each stored once, by its event key."""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from store import names, ranges
from store.database import Snapshot, Tx

#: Text kept of an error, in characters.
ERROR_CHARS_MAX = 500

#: Events with one body that are told, at most.
TWINS_MAX = 10

#: How far the times of receipt may be out of the order of rows, in ms.
SINCE_SLACK_MS = 60_000

STATES = ("pending", "done", "ignored", "parked", "quarantined", "dead")


class Row(msgspec.Struct, frozen=True):
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
    stored_ms: int
    answer: str
    settled_ms: int | None
    secret: str
    content_type: str
    body_sha256: bytes
    id_signed: bool
    same_body_as: int | None
    claimed_account: str | None
    origin: str
    workspace: str | None
    request_id: str
    lease_until_ms: int | None

    @property
    def is_final(self) -> bool:
        """No more attempt will be made unless the operator asks for one."""
        return self.state in ("done", "ignored", "dead")


_BOOLEANS = [number for number, kind in enumerate(Row.__annotations__.values()) if kind is bool]

_COLUMNS = """
    id, source, account, event_id, endpoint, type, state, reason, duplicates, attempts,
    next_attempt_ms, by_worker, last_error, received_ms, stored_ms, answer, settled_ms, secret,
    content_type, body_sha256, id_signed, same_body_as, claimed_account, origin,
    workspace, request_id, lease_until_ms
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
    origin: str = "delivery",
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
          next_attempt_ms, by_worker, received_ms, stored_ms, answer, settled_ms, secret,
          content_type, body_sha256, id_signed, claimed_account, origin, request_id)
        values (?, ?, ?, ?, ?, ?, 0, 0, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
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
            tx.now_ms,
            "pending" if queued else "done",
            None if queued else tx.now_ms,
            secret,
            content_type,
            body_sha256,
            int(id_signed),
            claimed_account,
            origin,
            request_id,
        ),
    )
    if tx.db.changes() == 0:
        return None
    row = tx.db.last_insert_rowid()
    tx.db.execute("insert into receiver_payloads (event, body) values (?, ?)", (row, body))
    return row


def settle(tx: Tx, row: int, state: str, reason: str | None, *, answer: str | None = None) -> None:
    """Give the event its new state; a final one gets its time, a lease ends.

    `answer` is what its first delivery is answered, while that is being judged.
    """
    settled = tx.now_ms if state in ("done", "ignored", "dead") else None
    tx.db.execute(
        """
        update receiver_events
        set state = ?, reason = ?, settled_ms = ?, next_attempt_ms = null,
          lease_owner = null, lease_until_ms = null, answer = coalesce(?, answer)
        where id = ?
        """,
        (state, reason, settled, answer, row),
    )
    assert tx.db.changes() == 1, "only an event that is stored can be settled"


def fail(
    tx: Tx,
    row: int,
    attempts: int,
    error: str,
    next_attempt_ms: int | None,
    *,
    answer: str | None = None,
) -> None:
    """The attempt with this number failed: the event stays `pending`, its lease ends.

    It is due for a worker when told; None: not due, until a redelivery or the operator.
    """
    tx.db.execute(
        """
        update receiver_events
        set state = 'pending', reason = null, settled_ms = null, attempts = ?, last_error = ?,
          next_attempt_ms = ?, by_worker = ?, lease_owner = null, lease_until_ms = null,
          answer = coalesce(?, answer)
        where id = ?
        """,
        (
            attempts,
            error[:ERROR_CHARS_MAX],
            next_attempt_ms,
            next_attempt_ms is not None,
            answer,
            row,
        ),
    )
    assert tx.db.changes() == 1, "only an event that is stored can fail"


def die(tx: Tx, row: int, attempts: int, error: str, *, answer: str | None = None) -> None:
    """The attempt with this number failed and was the last: the event is `dead`."""
    tx.db.execute(
        """
        update receiver_events
        set state = 'dead', reason = null, settled_ms = ?, attempts = ?, last_error = ?,
          next_attempt_ms = null, lease_owner = null, lease_until_ms = null,
          answer = coalesce(?, answer)
        where id = ?
        """,
        (tx.now_ms, attempts, error[:ERROR_CHARS_MAX], answer, row),
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
    """Let the worker, or else whoever applies released events, run this one again now.

    A lease ends, so that whoever held it can't settle the event by what it knew.
    """
    tx.db.execute(
        """
        update receiver_events
        set state = 'pending', settled_ms = null, next_attempt_ms = ?, by_worker = ?,
          lease_owner = null, lease_until_ms = null
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
    """The stored body; None once it was pruned or redacted."""
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
    limit: int = 50,
) -> list[Row]:
    """Events by what is given, newest first."""
    first, since = _first_since(snapshot, since_ms)
    if state is endpoint is type is None:
        return list(rows(snapshot, _newest(snapshot, first, since, limit)))
    found: list[int] = []
    for kind in _kinds(snapshot, state=state, endpoint=endpoint, type=type):
        found += _newest_of_kind(snapshot, kind, first, since, limit)
        if len(found) >= limit:
            # What is older than these, of any further kind, is not among the newest.
            found = sorted(found, reverse=True)[:limit]
            first = found[-1]
    return list(rows(snapshot, sorted(found, reverse=True)))


def among(
    snapshot: Snapshot,
    numbers: Sequence[int],
    *,
    state: str | None = None,
    endpoint: str | None = None,
    type: str | None = None,
    since_ms: int | None = None,
    limit: int = 50,
) -> list[Row]:
    """Those of these rows (oldest first) that fit, newest first."""
    fits = (
        row
        for row in rows(snapshot, reversed(numbers))
        if state in (None, row.state)
        and endpoint in (None, row.endpoint)
        and type in (None, row.type)
        and row.received_ms >= (since_ms or 0)
    )
    return list(itertools.islice(fits, limit))


def after(snapshot: Snapshot, row: int, limit: int) -> list[Row]:
    """Events that came after the one in this row, oldest first."""
    return [
        _row(values)
        for values in snapshot.db.execute(
            f"select {_COLUMNS} from receiver_events where id > ? order by id limit ?",  # noqa: S608
            (row, limit),
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
    first, since = _first_since(snapshot, since_ms)
    if state is endpoint is type is None:
        return sorted(_newest(snapshot, first, since, -1))
    kinds = _kinds(snapshot, state=state, endpoint=endpoint, type=type)
    each = (_newest_of_kind(snapshot, kind, first, since, -1) for kind in kinds)
    return sorted(itertools.chain.from_iterable(each))


def of_workspace(snapshot: Snapshot, workspace: str) -> list[int]:
    """Row numbers of the events that did something for a workspace, or were attributed to it.

    Oldest first. Of an event that did nothing, since another had done it before, nothing is known.
    """
    return [
        event
        for (event,) in snapshot.db.execute(
            """
            select o.event from receiver_ledger l
            cross join receiver_operations o
              on o.source = l.source and o.account = l.account
                and o.subject = l.subject and o.operation = l.operation
            where l.workspace = :workspace and l.source <> 'app' and o.event is not null
            union
            select event from receiver_operations
            where workspace = :workspace and amount is null and event is not null
            union
            select id from receiver_events where workspace = :workspace
            order by 1
            """,
            {"workspace": workspace},
        )
    ]


def unfinished(snapshot: Snapshot, limit: int) -> list[Row]:
    """The newest events that are neither done nor ignored, newest first."""
    found: list[int] = [
        row
        for (row,) in snapshot.db.execute(
            """
            select id from receiver_events
            where state in ('pending', 'parked', 'quarantined', 'dead') order by id desc limit ?
            """,
            (limit,),
        )
    ]
    return list(rows(snapshot, found))


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


def same_bodies(snapshot: Snapshot, since_ms: int) -> tuple[int, int | None]:
    """How many events since then were flagged as the same body as another, and the last one."""
    values = snapshot.db.execute(
        """
        select count(*), max(id) from receiver_events
        where same_body_as is not null and received_ms >= ?
        """,
        (since_ms,),
    ).fetchone()
    assert values is not None, "a count is always there"
    return values[0], values[1]


def latest(snapshot: Snapshot, endpoint: str) -> int | None:
    """When the newest event of a source was received, in UTC milliseconds."""
    newest = listed(snapshot, endpoint=endpoint, limit=1)
    return newest[0].received_ms if newest else None


def rows(snapshot: Snapshot, numbers: Iterable[int]) -> Iterator[Row]:
    """The events in these rows, in the order given."""
    for number in numbers:
        row = by_row(snapshot, number)
        assert row is not None, "events are never deleted"
        yield row


def first_since(snapshot: Snapshot, at_ms: int) -> int:
    """The first row received at a time or later, where rows stand in the order of receipt."""
    newest = snapshot.db.execute(
        "select id from receiver_events where id > 0 order by id desc limit 1"
    ).get
    low, high = 0, (newest or 0) + 1
    while low + 1 < high:
        middle = (low + high) // 2
        found = snapshot.db.execute(
            "select received_ms from receiver_events where id >= ? order by id limit 1", (middle,)
        ).get
        if found is None or found >= at_ms:
            high = middle
        else:
            low = middle
    return high


def _first_since(snapshot: Snapshot, since_ms: int | None) -> tuple[int, int]:
    """(the row before which none is wanted, the time before which none is).

    Times may be out of order by SINCE_SLACK_MS; by more only where the clock was set back.
    """
    if since_ms is None:
        return 0, 0
    return first_since(snapshot, since_ms - SINCE_SLACK_MS), since_ms


def _newest(snapshot: Snapshot, first: int, since_ms: int, limit: int) -> Iterator[int]:
    for (row,) in snapshot.db.execute(
        """
        select id from receiver_events
        where id >= ? and received_ms >= ? order by id desc limit ?
        """,
        (first, since_ms, limit),
    ):
        yield row


def _newest_of_kind(
    snapshot: Snapshot, kind: tuple[str, str, str], first: int, since_ms: int, limit: int
) -> Iterator[int]:
    for (row,) in snapshot.db.execute(
        """
        select id from receiver_events
        where endpoint = ? and type = ? and state = ? and id >= ? and received_ms >= ?
        order by id desc limit ?
        """,
        (*kind, first, since_ms, limit),
    ):
        yield row


def _kinds(
    snapshot: Snapshot, *, state: str | None, endpoint: str | None, type: str | None
) -> Iterator[tuple[str, str, str]]:
    """The kinds of events that fit: (endpoint, type, state). Some of them may have no event."""
    states = STATES if state is None else (state,)
    for one in _endpoints(snapshot) if endpoint is None else (endpoint,):
        for kind in _types(snapshot, one) if type is None else (type,):
            yield from ((one, kind, each) for each in states)


def _endpoints(snapshot: Snapshot) -> Iterator[str]:
    return ranges.leaps(
        lambda before: (
            snapshot.db.execute(
                """
                select endpoint from receiver_events where endpoint > ?
                order by endpoint limit 1
                """,
                (before,),
            ).get
        )
    )


def _types(snapshot: Snapshot, endpoint: str) -> Iterator[str]:
    # A type may be missing, and is '' then.
    yield ""
    yield from ranges.leaps(
        lambda before: (
            snapshot.db.execute(
                """
                select type from receiver_events where endpoint = ? and type > ?
                order by type limit 1
                """,
                (endpoint, before),
            ).get
        )
    )


def received(snapshot: Snapshot, since_ms: int, until_ms: int) -> dict[str, int]:
    """How many events each source received in that time."""
    first, since_ms = _first_since(snapshot, since_ms)
    return {
        endpoint: count
        for endpoint, count in snapshot.db.execute(
            """
            select endpoint, count(*) from receiver_events
            where id >= ? and received_ms between ? and ? group by endpoint order by endpoint
            """,
            (first, since_ms, until_ms),
        )
    }


def _by_id(snapshot: Snapshot, name: str, limit: int) -> Iterator[Row]:
    # `;` follows `:`, so the range is that of all ids that begin with the name and a colon.
    for (row,) in snapshot.db.execute(
        f"""
        with {names.SENDERS.format("receiver_events")}
        select e.id from senders s cross join receiver_events e
        on e.source = s.source and e.account = s.account and e.event_id = :name
        union all
        select e.id from senders s cross join receiver_events e
        on e.source = s.source and e.account = s.account
          and e.event_id > :name || ':' and e.event_id < :name || ';'
        order by 1 limit :limit
        """,  # noqa: S608  constant text
        {"name": name, "limit": limit},
    ):
        yield from rows(snapshot, (row,))


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
