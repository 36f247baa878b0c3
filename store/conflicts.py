"""Deliveries whose event key is known but whose content differs, kept aside."""

import msgspec

from store.database import Snapshot, Tx

#: Distinct contents kept for one event; further ones are only counted on the newest.
CONTENTS_MAX = 20


class Conflict(msgspec.Struct, frozen=True):
    """A different content that came under a known event key; no body once it was forgotten."""

    id: int
    event: int
    body: bytes | None
    content_type: str
    received_ms: int
    deliveries: int
    request_id: str
    resolved_ms: int | None
    #: What would be projected of this resource, instead of a delivery's content.
    resource: int | None


_COLUMNS = """
    id, event, body, content_type, received_ms, deliveries, request_id, resolved_ms, resource
"""


def add(
    tx: Tx,
    event: int,
    *,
    content_sha256: bytes,
    body: bytes,
    content_type: str,
    received_ms: int,
    request_id: str,
    resource: int | None = None,
) -> None:
    """Keep a content, or count one more delivery of it."""
    kept = tx.db.execute("select count(*) from receiver_conflicts where event = ?", (event,)).get
    if kept >= CONTENTS_MAX and _count(tx, event, content_sha256):
        return
    tx.db.execute(
        """
        insert into receiver_conflicts (
          event, content_sha256, body, content_type, received_ms, deliveries, request_id, resource)
        values (?, ?, ?, ?, ?, 1, ?, ?)
        on conflict (event, content_sha256) do update set deliveries = deliveries + 1
        """,
        (event, content_sha256, body, content_type, received_ms, request_id, resource),
    )


def _count(tx: Tx, event: int, content_sha256: bytes) -> bool:
    tx.db.execute(
        """
        update receiver_conflicts set deliveries = deliveries + 1
        where id = coalesce(
          (select id from receiver_conflicts where event = :event and content_sha256 = :content),
          (select max(id) from receiver_conflicts where event = :event))
        """,
        {"event": event, "content": content_sha256},
    )
    return tx.db.changes() == 1


def by_id(snapshot: Snapshot, number: int) -> Conflict | None:
    """One conflict."""
    values = snapshot.db.execute(
        f"select {_COLUMNS} from receiver_conflicts where id = ?",  # noqa: S608  constant
        (number,),
    ).fetchone()
    return None if values is None else Conflict(*values)


def of_event(snapshot: Snapshot, event: int) -> list[Conflict]:
    """The conflicts of one event, oldest first."""
    return [
        Conflict(*values)
        for values in snapshot.db.execute(
            f"""
            select {_COLUMNS} from receiver_conflicts where event = ? order by id
            """,  # noqa: S608  constant columns
            (event,),
        )
    ]


def of_resource(snapshot: Snapshot, resource: int) -> list[Conflict]:
    """The open conflicts about one resource, oldest first."""
    return [
        Conflict(*values)
        for values in snapshot.db.execute(
            f"""
            select {_COLUMNS} from receiver_conflicts
            where resource = ? and resolved_ms is null order by id
            """,  # noqa: S608  constant columns
            (resource,),
        )
    ]


def listed(snapshot: Snapshot, *, resolved: bool = False, limit: int = 50) -> list[Conflict]:
    """Open conflicts (or resolved ones too), newest first."""
    which = "id > 0" if resolved else "id > 0 and resolved_ms is null"
    return [
        Conflict(*values)
        for values in snapshot.db.execute(
            f"""
            select {_COLUMNS} from receiver_conflicts where {which} order by id desc limit ?
            """,  # noqa: S608  constant text
            (limit,),
        )
    ]


def resolve(tx: Tx, number: int) -> bool:
    """The operator has looked; False if it is not open."""
    tx.db.execute(
        "update receiver_conflicts set resolved_ms = ? where id = ? and resolved_ms is null",
        (tx.now_ms, number),
    )
    return tx.db.changes() == 1


def supersede(tx: Tx, resource: int) -> None:
    """The resource has a later state: what contested the former one needs nobody any more."""
    tx.db.execute(
        """
        update receiver_conflicts set resolved_ms = ?
        where resource = ? and resolved_ms is null
        """,
        (tx.now_ms, resource),
    )
