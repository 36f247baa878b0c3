"""Messages owed to the outside: each once by its operation key, sent under a lease."""

import hashlib
import itertools
import json
from collections.abc import Iterator

import msgspec

from store import ranges
from store.database import Snapshot, Tx
from store.operations import Key

#: Text kept of an error, in characters.
ERROR_CHARS_MAX = 500

#: The body of a message that did not render; no other is empty.
UNWRITTEN = "{}"

#: In place of the identity where it is not an event that owes a message, but an alert.
ALERTS = "receiver"

STATES = ("pending", "sent", "review", "dead", "cancelled")


class Message(msgspec.Struct, frozen=True):
    """A message; times in UTC milliseconds, `body` as JSON text, `source` the identity."""

    id: int
    operation_key: str
    source: str
    account: str
    subject: str
    operation: str
    destination: str
    name: str
    state: str
    attempts: int
    next_attempt_ms: int | None
    last_error: str | None
    body: str
    event: int | None
    created_ms: int
    settled_ms: int | None
    lease_owner: str | None
    lease_until_ms: int | None

    @property
    def key(self) -> Key:
        return Key(self.source, self.account, self.subject, self.operation)

    @property
    def is_written(self) -> bool:
        """False if it did not render when it was owed: there is nothing to send."""
        return self.body != UNWRITTEN


_COLUMNS = """
    id, operation_key, source, account, subject, operation, destination, name, state, attempts,
    next_attempt_ms, last_error, body, event, created_ms, settled_ms, lease_owner, lease_until_ms
"""


def operation_key(key: Key, destination: str, name: str) -> str:
    """The message's name for the other side: stable, and safe in headers and mail addresses."""
    parts = [key.source, key.account, key.subject, key.operation, destination, name]
    return "op_" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


def insert(
    tx: Tx,
    key: Key,
    destination: str,
    name: str,
    *,
    body: str,
    event: int | None,
    error: str | None = None,
) -> bool:
    """Owe a message; False, with nothing written, if it is owed already.

    With an `error` it can't be sent and is `dead` from the start.
    """
    state = "pending" if error is None else "dead"
    tx.db.execute(
        """
        insert into receiver_outbox (
          operation_key, source, account, subject, operation, destination, name, state,
          attempts, next_attempt_ms, last_error, body, event, created_ms, settled_ms)
        values (?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?, ?, ?, ?, ?)
        on conflict (operation_key) do nothing
        """,
        (
            operation_key(key, destination, name),
            key.source,
            key.account,
            key.subject,
            key.operation,
            destination,
            name,
            state,
            tx.now_ms if error is None else None,
            None if error is None else error[:ERROR_CHARS_MAX],
            body,
            event,
            tx.now_ms,
            None if error is None else tx.now_ms,
        ),
    )
    return tx.db.changes() == 1


def due(snapshot: Snapshot, destination: str, now_ms: int, ahead_ms_max: int) -> Message | None:
    """The message to a destination that is due longest, or None.

    One with a `lease_owner` was leased for an attempt that never ended. A due time further
    ahead than `ahead_ms_max` was written by a clock since set back: due.
    """
    return _one(
        snapshot,
        f"""
        select {_COLUMNS} from receiver_outbox
        where id = coalesce(
          (select id from receiver_outbox
           where destination = :destination and next_attempt_ms <= :now
           order by next_attempt_ms limit 1),
          (select id from receiver_outbox
           where destination = :destination and next_attempt_ms > :far limit 1))
        """,  # noqa: S608  constant columns
        {"destination": destination, "now": now_ms, "far": now_ms + ahead_ms_max},
    )


def lease(tx: Tx, message: int, owner: str, until_ms: int) -> None:
    """Take the right to the next attempt, which is counted now; at `until_ms` it is due again."""
    tx.db.execute(
        """
        update receiver_outbox
        set attempts = attempts + 1, lease_owner = ?, lease_until_ms = ?, next_attempt_ms = ?
        where id = ?
        """,
        (owner, until_ms, until_ms, message),
    )


def holds(snapshot: Snapshot, message: int, owner: str, attempt: int) -> bool:
    """Whether this attempt's lease is still the message's: only then may it settle it."""
    found = snapshot.db.execute(
        "select 1 from receiver_outbox where id = ? and lease_owner = ? and attempts = ?",
        (message, owner, attempt),
    ).get
    return found is not None


def settle(tx: Tx, message: int, state: str, error: str | None) -> None:
    """Give the message a state in which nothing is due; a final one gets its time."""
    settled = tx.now_ms if state in ("sent", "dead", "cancelled") else None
    tx.db.execute(
        """
        update receiver_outbox
        set state = ?, last_error = ?, settled_ms = ?, next_attempt_ms = null,
          lease_owner = null, lease_until_ms = null
        where id = ?
        """,
        (state, None if error is None else error[:ERROR_CHARS_MAX], settled, message),
    )
    assert tx.db.changes() == 1, "only a message that is owed can be settled"


def retry(tx: Tx, message: int, error: str | None, next_attempt_ms: int) -> None:
    """The message is to be tried again then."""
    tx.db.execute(
        """
        update receiver_outbox
        set state = 'pending', last_error = ?, settled_ms = null, next_attempt_ms = ?,
          lease_owner = null, lease_until_ms = null
        where id = ?
        """,
        (None if error is None else error[:ERROR_CHARS_MAX], next_attempt_ms, message),
    )
    assert tx.db.changes() == 1, "only a message that is owed can be tried again"


def write(tx: Tx, message: int, body: str) -> None:
    """Give a message that did not render its body."""
    tx.db.execute(
        "update receiver_outbox set body = ? where id = ? and body = ?",
        (body, message, UNWRITTEN),
    )
    assert tx.db.changes() == 1, "what is owed is not altered once it is written"


def due_ms(snapshot: Snapshot, destination: str) -> int | None:
    """When the next message to a destination is due, in UTC milliseconds; None if none is."""
    found = snapshot.db.execute(
        """
        select min(next_attempt_ms) from receiver_outbox
        where destination = ? and next_attempt_ms is not null
        """,
        (destination,),
    ).get
    assert found is None or isinstance(found, int), "the column is an integer"
    return found


def by_id(snapshot: Snapshot, message: int) -> Message | None:
    """The message with this number."""
    return _one(
        snapshot,
        f"select {_COLUMNS} from receiver_outbox where id = ?",  # noqa: S608  constant columns
        (message,),
    )


def by_operation_key(snapshot: Snapshot, operation_key: str) -> Message | None:
    """The message that the other side knows by this key."""
    return _one(
        snapshot,
        f"select {_COLUMNS} from receiver_outbox where operation_key = ?",  # noqa: S608  as above
        (operation_key,),
    )


def of_event(snapshot: Snapshot, event: int) -> list[Message]:
    """The messages that an event owes, oldest first."""
    return [
        Message(*values)
        for values in snapshot.db.execute(
            f"""
            select {_COLUMNS} from receiver_outbox where event = ? order by id
            """,  # noqa: S608  constant columns
            (event,),
        )
    ]


def after(snapshot: Snapshot, message: int, *, since_ms: int | None, limit: int) -> list[Message]:
    """Messages with numbers above `message`, oldest first."""
    return [
        Message(*values)
        for values in snapshot.db.execute(
            f"""
            select {_COLUMNS} from receiver_outbox
            where id > ? and created_ms >= ? order by id limit ?
            """,  # noqa: S608  constant columns
            (message, since_ms or 0, limit),
        )
    ]


def listed(
    snapshot: Snapshot,
    *,
    state: str | None = None,
    destination: str | None = None,
    limit: int = 50,
) -> list[Message]:
    """Messages, newest first."""
    if state is destination is None:
        found = list(_newest(snapshot, limit))
    else:
        each = [
            _newest_of(snapshot, to, one, limit) for to, one in _kinds(snapshot, state, destination)
        ]
        found = ranges.newest(each, limit, lambda number: (number,))
    return [message for number in found if (message := by_id(snapshot, number)) is not None]


def numbers(
    snapshot: Snapshot, *, state: str | None = None, destination: str | None = None
) -> list[int]:
    """Numbers of all messages that fit, oldest first."""
    if state is destination is None:
        return sorted(_newest(snapshot, -1))
    kinds = _kinds(snapshot, state, destination)
    each = (_newest_of(snapshot, to, one, -1) for to, one in kinds)
    return sorted(itertools.chain.from_iterable(each))


def _newest(snapshot: Snapshot, limit: int) -> Iterator[int]:
    for (number,) in snapshot.db.execute(
        "select id from receiver_outbox where id > 0 order by id desc limit ?", (limit,)
    ):
        yield number


def _newest_of(snapshot: Snapshot, destination: str, state: str, limit: int) -> Iterator[int]:
    for (number,) in snapshot.db.execute(
        """
        select id from receiver_outbox
        where destination = ? and state = ? order by id desc limit ?
        """,
        (destination, state, limit),
    ):
        yield number


def _kinds(
    snapshot: Snapshot, state: str | None, destination: str | None
) -> Iterator[tuple[str, str]]:
    """The (destination, state) pairs that fit; some of them may have no message."""
    for to in _destinations(snapshot) if destination is None else (destination,):
        yield from ((to, one) for one in (STATES if state is None else (state,)))


def _destinations(snapshot: Snapshot) -> Iterator[str]:
    return ranges.leaps(
        lambda before: (
            snapshot.db.execute(
                "select min(destination) from receiver_outbox where destination > ?", (before,)
            ).get
        )
    )


def _one(
    snapshot: Snapshot, statement: str, parameters: dict[str, object] | tuple[object, ...]
) -> Message | None:
    values = snapshot.db.execute(statement, parameters).fetchone()
    return None if values is None else Message(*values)
