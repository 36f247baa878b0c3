"""What was refused: counted by source and reason, never one row a request."""

from dataclasses import dataclass

from store.database import Snapshot, Tx


@dataclass(frozen=True, slots=True)
class Rejection:
    """How often a source refused for one reason; the last one's request id and detail."""

    source: str
    reason: str
    count: int
    first_ms: int
    last_ms: int
    request_id: str
    detail: str


def add(
    tx: Tx,
    source: str,
    reason: str,
    count: int,
    first_ms: int,
    last_ms: int,
    request_id: str,
    detail: str,
) -> None:
    """Add to the count of (source, reason)."""
    tx.db.execute(
        """
        insert into receiver_rejections (
          source, reason, count, first_ms, last_ms, request_id, detail)
        values (?, ?, ?, ?, ?, ?, ?)
        on conflict (source, reason) do update set
          count = count + excluded.count, last_ms = excluded.last_ms,
          request_id = excluded.request_id, detail = excluded.detail
        """,
        (source, reason, count, first_ms, last_ms, request_id, detail),
    )


def keep_expired(
    tx: Tx,
    source: str,
    request_id: str,
    headers: str,
    body: bytes,
    received_ms: int,
    skew_s: int,
    detail: str,
) -> None:
    """Keep a genuine delivery that came too late or too early; the file keeps the newest 100."""
    tx.db.execute(
        """
        insert into receiver_expired (
          source, request_id, headers, body, received_ms, skew_s, detail)
        values (?, ?, ?, ?, ?, ?, ?)
        """,
        (source, request_id, headers, body, received_ms, skew_s, detail),
    )


def of_source(snapshot: Snapshot, source: str) -> list[Rejection]:
    """What a source refused, one for each reason, the newest first."""
    return [
        Rejection(*values)
        for values in snapshot.db.execute(
            """
            select source, reason, count, first_ms, last_ms, request_id, detail
            from receiver_rejections where source = ? order by last_ms desc, reason
            """,
            (source,),
        )
    ]
