"""Fetches: resources whose state is to be read from the sender, one lease at a time for each."""

import msgspec

from store.database import Snapshot, Tx
from store.resources import Name

#: Text kept of an error, in characters.
ERROR_CHARS_MAX = 500

STATES = ("pending", "done", "dead")


class Fetch(msgspec.Struct, frozen=True):
    """What is owed for one resource; times in UTC milliseconds.

    `endpoint` is the source's name. A fetch answers what was `wanted` when it had `begun`, and
    knows what came up to the event in row `through`. Only the lease with the last `fence` counts.
    """

    id: int
    source: str
    account: str
    kind: str
    resource_id: str
    endpoint: str
    state: str
    wanted: int
    begun: int
    fence: int
    mend: bool
    attempts: int
    next_attempt_ms: int | None
    last_error: str | None
    event: int | None
    wanted_ms: int
    settled_ms: int | None
    through: int
    lease_owner: str | None
    lease_until_ms: int | None

    @property
    def name(self) -> Name:
        return Name(self.source, self.account, self.kind, self.resource_id)


_COLUMNS = """
    id, source, account, kind, resource_id, endpoint, state, wanted, begun, fence, mend, attempts,
    next_attempt_ms, last_error, event, wanted_ms, settled_ms, through, lease_owner, lease_until_ms
"""


def want(tx: Tx, name: Name, endpoint: str, event: int | None) -> None:
    """The resource is to be fetched once more after now.

    What is owed already is not owed twice, and keeps the time of its next attempt. One that is
    under way was begun too early: another follows it.
    """
    tx.db.execute(
        """
        insert into receiver_fetches (
          source, account, kind, resource_id, endpoint, state, wanted, begun, fence, mend,
          attempts, next_attempt_ms, event, wanted_ms, through)
        values (?, ?, ?, ?, ?, 'pending', 1, 0, 0, 0, 0, ?, ?, ?, 0)
        on conflict (source, account, kind, resource_id) do update set
          wanted = wanted + 1,
          endpoint = excluded.endpoint,
          event = coalesce(excluded.event, event),
          attempts = iif(state = 'pending', attempts, 0),
          next_attempt_ms = iif(state = 'pending', next_attempt_ms, excluded.next_attempt_ms),
          wanted_ms = iif(state = 'pending', wanted_ms, excluded.wanted_ms),
          settled_ms = null,
          state = 'pending'
        """,
        (*name, endpoint, tx.now_ms, event, tx.now_ms),
    )


def insist(tx: Tx, name: Name, *, mend: bool) -> None:
    """What is owed is due now, with all its attempts; unless a worker has it, which goes on.

    With `mend` what is fetched next counts also over a final state.
    """
    tx.db.execute(
        """
        update receiver_fetches
        set attempts = iif(lease_owner is null, 0, attempts),
          next_attempt_ms = iif(lease_owner is null, ?, next_attempt_ms),
          mend = max(mend, ?)
        where source = ? and account = ? and kind = ? and resource_id = ? and state = 'pending'
        """,
        (tx.now_ms, int(mend), *name),
    )
    assert tx.db.changes() == 1, "only what is owed can be insisted on"


def due(snapshot: Snapshot, endpoint: str, now_ms: int, ahead_ms_max: int) -> Fetch | None:
    """The fetch by a source that is due longest, or None.

    One with a `lease_owner` was leased for an attempt that never ended. A due time further
    ahead than `ahead_ms_max` was written by a clock since set back: due.
    """
    return _one(
        snapshot,
        f"""
        select {_COLUMNS} from receiver_fetches
        where id = coalesce(
          (select id from receiver_fetches
           where endpoint = :endpoint and next_attempt_ms <= :now
           order by next_attempt_ms limit 1),
          (select id from receiver_fetches
           where endpoint = :endpoint and next_attempt_ms > :far limit 1))
        """,  # noqa: S608  constant columns
        {"endpoint": endpoint, "now": now_ms, "far": now_ms + ahead_ms_max},
    )


def due_ms(snapshot: Snapshot, endpoint: str) -> int | None:
    """When the next fetch by a source is due, in UTC milliseconds; None if none is."""
    found = snapshot.db.execute(
        """
        select min(next_attempt_ms) from receiver_fetches
        where endpoint = ? and next_attempt_ms is not null
        """,
        (endpoint,),
    ).get
    assert found is None or isinstance(found, int), "the column is an integer"
    return found


def lease(tx: Tx, fetch: int, owner: str, until_ms: int) -> Fetch:
    """Take the right to the next attempt, counted now; at `until_ms` it is due again."""
    tx.db.execute(
        """
        update receiver_fetches
        set attempts = attempts + 1, fence = fence + 1, begun = wanted,
          through = (select coalesce(max(id), 0) from receiver_events),
          lease_owner = ?, lease_until_ms = ?, next_attempt_ms = ?
        where id = ?
        """,
        (owner, until_ms, until_ms, fetch),
    )
    found = by_id(tx, fetch)
    assert found is not None, "what is due is there"
    return found


def holds(snapshot: Snapshot, leased: Fetch) -> bool:
    """Whether that lease is still the last: only then may its result be applied."""
    found = snapshot.db.execute(
        "select 1 from receiver_fetches where id = ? and lease_owner = ? and fence = ?",
        (leased.id, leased.lease_owner, leased.fence),
    ).get
    return found is not None


def finish(tx: Tx, leased: Fetch) -> bool:
    """It was fetched. False: it was wanted again meanwhile, and is due now."""
    tx.db.execute(
        """
        update receiver_fetches
        set state = iif(wanted = begun, 'done', 'pending'),
          next_attempt_ms = iif(wanted = begun, null, :now),
          settled_ms = iif(wanted = begun, :now, null),
          wanted_ms = iif(wanted = begun, wanted_ms, :now),
          attempts = iif(wanted = begun, attempts, 0),
          mend = iif(wanted = begun, 0, mend),
          last_error = null, lease_owner = null, lease_until_ms = null
        where id = :id
        """,
        {"now": tx.now_ms, "id": leased.id},
    )
    found = by_id(tx, leased.id)
    return found is not None and found.state == "done"


def retry(tx: Tx, fetch: int, error: str, next_attempt_ms: int) -> None:
    """It is to be tried again then."""
    tx.db.execute(
        """
        update receiver_fetches
        set last_error = ?, next_attempt_ms = ?, lease_owner = null, lease_until_ms = null
        where id = ?
        """,
        (error[:ERROR_CHARS_MAX], next_attempt_ms, fetch),
    )


def die(tx: Tx, fetch: int, error: str) -> None:
    """No attempt is left; whoever wants it again revives it."""
    tx.db.execute(
        """
        update receiver_fetches
        set state = 'dead', last_error = ?, settled_ms = ?, next_attempt_ms = null,
          lease_owner = null, lease_until_ms = null
        where id = ?
        """,
        (error[:ERROR_CHARS_MAX], tx.now_ms, fetch),
    )


def by_id(snapshot: Snapshot, fetch: int) -> Fetch | None:
    """The fetch with this row number."""
    return _one(
        snapshot,
        f"select {_COLUMNS} from receiver_fetches where id = ?",  # noqa: S608  constant columns
        (fetch,),
    )


def find(snapshot: Snapshot, name: Name) -> Fetch | None:
    """What is, or was, owed for this resource."""
    return _one(
        snapshot,
        f"""
        select {_COLUMNS} from receiver_fetches
        where source = ? and account = ? and kind = ? and resource_id = ?
        """,  # noqa: S608  constant columns
        tuple(name),
    )


def unfinished(
    snapshot: Snapshot, *, source: str | None = None, kind: str | None = None, limit: int = 50
) -> list[Fetch]:
    """What is owed or has died, longest first."""
    return [
        _fetch(values)
        for values in snapshot.db.execute(
            f"""
            select {_COLUMNS} from receiver_fetches
            where state in ('pending', 'dead')
              and (:source is null or source = :source)
              and (:kind is null or kind = :kind)
            order by id limit :limit
            """,  # noqa: S608  constant columns
            {"source": source, "kind": kind, "limit": limit},
        )
    ]


def tally(snapshot: Snapshot) -> dict[str, int]:
    """How many fetches are unfinished, by state."""
    return dict(
        snapshot.db.execute(
            """
            select state, count(*) from receiver_fetches
            where state in ('pending', 'dead') group by state order by state
            """
        )
    )


def oldest_ms(snapshot: Snapshot) -> int | None:
    """Since when the oldest fetch that is still pending is owed."""
    found = snapshot.db.execute(
        """
        select wanted_ms from receiver_fetches
        where state in ('pending', 'dead') and state = 'pending' order by id limit 1
        """
    ).get
    assert found is None or isinstance(found, int), "the column is an integer"
    return found


def _one(
    snapshot: Snapshot, statement: str, parameters: dict[str, object] | tuple[object, ...]
) -> Fetch | None:
    values = snapshot.db.execute(statement, parameters).fetchone()
    return None if values is None else _fetch(values)


def _fetch(values: tuple[object, ...]) -> Fetch:
    columns = list(values)
    columns[10] = bool(columns[10])
    return Fetch(*columns)  # type: ignore[arg-type]  # in the order of the fields
