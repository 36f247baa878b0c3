"""How much there is of what, for those who watch: each answered by an index, never by a scan."""

from typing import NamedTuple

from store.database import Snapshot
from store.outbox import ALERTS

#: Failed events that are looked at for their type, of each state, and the types that are told.
FAILED_MAX = 200
TYPES_MAX = 20

# Each query repeats the condition of the partial index that it uses.


class Failing(NamedTuple):
    """How many unfinished events of one type failed or can't be applied."""

    source: str
    type: str
    events: int


class Owed(NamedTuple):
    """How many messages to one destination are in one state; `alerts`: told by ourselves."""

    destination: str
    state: str
    alerts: bool
    messages: int


def events(snapshot: Snapshot) -> dict[str, int]:
    """Events by state; those that are done or ignored are `settled` together."""
    found = dict.fromkeys(("pending", "parked", "quarantined", "dead"), 0)
    for state, count in snapshot.db.execute(
        """
        select state, count(*) from receiver_events
        where state in ('pending', 'parked', 'quarantined', 'dead') group by state
        """
    ):
        found[state] = count
    # No event is ever deleted, so the newest one's number is that of all.
    newest = snapshot.db.execute("select coalesce(max(id), 0) from receiver_events").get
    assert isinstance(newest, int), "the column is an integer"
    return found | {"settled": newest - sum(found.values())}


def oldest_event_ms(snapshot: Snapshot) -> int | None:
    """When the oldest event that is still pending was received."""
    return _number(
        snapshot,
        """
        select received_ms from receiver_events
        where state in ('pending', 'parked', 'quarantined', 'dead') and state = 'pending'
        order by id limit 1
        """,
    )


def oldest_message_ms(snapshot: Snapshot, *, alerts: bool = False) -> int | None:
    """When the oldest message that is still pending was owed: an alert's, or any other."""
    return _number(
        snapshot,
        """
        select created_ms from receiver_outbox
        where state in ('pending', 'review', 'dead') and state = 'pending'
          and (source = ?) = ?
        order by id limit 1
        """,
        ALERTS,
        int(alerts),
    )


def messages(snapshot: Snapshot) -> list[Owed]:
    """Messages that are not sent, by destination and state."""
    return [
        Owed(destination, state, bool(alerts), count)
        for state, destination, alerts, count in snapshot.db.execute(
            """
            select state, destination, source = ?, count(*) from receiver_outbox
            where state in ('pending', 'review', 'dead') group by 1, 2, 3
            """,
            (ALERTS,),
        )
    ]


def parked_before(snapshot: Snapshot, before_ms: int) -> int:
    """How many events have been parked since before that time."""
    return (
        _number(snapshot, "select count(*) from receiver_parked where since_ms < ?", before_ms) or 0
    )


def conflicts(snapshot: Snapshot) -> int:
    """How many conflicts nobody has resolved."""
    return (
        _number(snapshot, "select count(*) from receiver_conflicts where resolved_ms is null") or 0
    )


def same_body(snapshot: Snapshot) -> int:
    """How many events have the body of an earlier one, under another id that nobody signed."""
    return (
        _number(snapshot, "select count(*) from receiver_events where same_body_as is not null")
        or 0
    )


def failing(snapshot: Snapshot, least: int) -> list[Failing]:
    """Types of which at least so many of the newest unfinished events failed, the most first."""
    return [
        Failing(*values)
        for values in snapshot.db.execute(
            """
            with newest (id) as (
              select * from (select id from receiver_events
                where state in ('pending', 'parked', 'quarantined', 'dead') and state = 'pending'
                order by id desc limit :most)
              union all
              select * from (select id from receiver_events
                where state in ('pending', 'parked', 'quarantined', 'dead')
                  and state = 'quarantined'
                order by id desc limit :most)
              union all
              select * from (select id from receiver_events
                where state in ('pending', 'parked', 'quarantined', 'dead') and state = 'dead'
                order by id desc limit :most)
            )
            select endpoint, type, count(*)
            from newest cross join receiver_events as event on event.id = newest.id
            where state <> 'pending' or attempts > 0
            group by endpoint, type having count(*) >= :least
            order by count(*) desc, endpoint, type limit :types
            """,
            {"most": FAILED_MAX, "least": least, "types": TYPES_MAX},
        )
    ]


def made_ms(snapshot: Snapshot) -> int:
    """When the file got its tables."""
    found = _number(snapshot, "select min(applied_ms) from receiver_schema")
    assert found is not None, "a file of ours has been migrated"
    return found


def _number(snapshot: Snapshot, statement: str, *parameters: str | int) -> int | None:
    found = snapshot.db.execute(statement, parameters).get
    assert found is None or isinstance(found, int), "the columns are integers"
    return found
