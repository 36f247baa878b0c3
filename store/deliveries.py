"""Redeliveries: the newest of each event; the first delivery is in the event itself."""

import msgspec

from store import inbox
from store.database import Snapshot, Tx

#: Redeliveries kept for one event.
KEPT_MAX = 20
#: How long after its receipt a delivery may be written behind later ones, in ms.
ORDER_SLACK_MS = 10_000


class Delivery(msgspec.Struct, frozen=True):
    """A delivery of an event; `answer` is the word that the sender was told.

    From `received_ms` to `stored_ms` it waited for its transaction.
    """

    event: int
    received_ms: int
    stored_ms: int
    answer: str
    secret: str
    request_id: str


def add(
    tx: Tx, event: int, nth: int, *, received_ms: int, answer: str, secret: str, request_id: str
) -> None:
    """Keep the nth redelivery, in place of the one KEPT_MAX before it."""
    tx.db.execute(
        """
        insert into receiver_deliveries (
          event, slot, received_ms, stored_ms, answer, secret, request_id)
        values (?, ?, ?, ?, ?, ?, ?)
        on conflict (event, slot) do update set
          received_ms = excluded.received_ms, stored_ms = excluded.stored_ms,
          answer = excluded.answer, secret = excluded.secret, request_id = excluded.request_id
        """,
        (event, nth % KEPT_MAX, received_ms, tx.now_ms, answer, secret, request_id),
    )


def of_event(snapshot: Snapshot, event: int) -> list[Delivery]:
    """The kept redeliveries of an event, oldest first."""
    return [
        Delivery(*values)
        for values in snapshot.db.execute(
            """
            select event, received_ms, stored_ms, answer, secret, request_id
            from receiver_deliveries where event = ? order by stored_ms, received_ms
            """,
            (event,),
        )
    ]


def events_of_request(snapshot: Snapshot, request_id: str, limit: int) -> list[int]:
    """Row numbers of the events that a request brought, or brought again, or contradicted.

    The id begins with the time of receipt, in hexadecimal UTC milliseconds: an index of ids
    would cost every event, and rows stand in the order of receipt.
    """
    try:
        at_ms = int(request_id.partition("-")[0], 16)
    except ValueError:
        first = last = 0
    else:
        first = inbox.first_since(snapshot, at_ms - ORDER_SLACK_MS)
        last = inbox.first_since(snapshot, at_ms + ORDER_SLACK_MS)
    return [
        event
        for (event,) in snapshot.db.execute(
            """
            select id from receiver_events
            where id >= :first and id < :last and request_id = :request
            union select event from receiver_deliveries where request_id = :request
            union select event from receiver_conflicts where request_id = :request
            order by 1 limit :limit
            """,
            {"request": request_id, "first": first, "last": last, "limit": limit},
        )
    ]
