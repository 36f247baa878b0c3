"""What was refused: a count for each source, reason and minute, and the newest requests."""

import msgspec

from store.database import Snapshot, Tx

#: Counts kept of one source, one for each minute and reason.
COUNTS_MAX = 1_000
#: Requests kept of one source and reason; and in all, of genuine ones and of the others.
KEPT_MAX = 100
KEPT_IN_ALL_MAX = 1_000
#: Bytes of their bodies, of genuine ones and of the others.
KEPT_BYTES_MAX = 64 * 1024 * 1024

MINUTE_MS = 60_000

# Whether one that can be taken, or was, has the same content and came before.
_AGAIN = """
    content_sha256 is not null and row_number() over (
      partition by source, content_sha256 order by body is null and accepted_ms is null, id) > 1
"""


class Rejection(msgspec.Struct, frozen=True):
    """How often a source refused for one reason; the last one's request id and detail."""

    source: str
    reason: str
    count: int
    last_ms: int
    request_id: str
    detail: str


class Line(msgspec.Struct, frozen=True):
    """One line of the list: what was refused within a minute, or one delivery that was genuine.

    `number` is the newest kept one's, if any is.
    """

    source: str
    reason: str
    count: int
    first_ms: int
    last_ms: int
    request_id: str
    detail: str
    number: int | None
    accepted_ms: int | None


class Request(msgspec.Struct, frozen=True):
    """A refused request. `header_names` and `headers` are JSON.

    `content_sha256` is over what the sender signed but the time, so it tells one that came again.
    `url`, `headers` and `body` are there together or not at all.
    """

    source: str
    reason: str
    request_id: str
    received_ms: int
    method: str
    address: str
    header_names: str
    body_bytes: int | None
    detail: str
    skew_s: int | None = None
    content_sha256: bytes | None = None
    url: str | None = None
    headers: str | None = None
    body: bytes | None = None


class Kept(msgspec.Struct, frozen=True):
    """A request that the file has, under its number; `event` is the one it was accepted as."""

    number: int
    request: Request
    accepted_ms: int | None
    event: int | None


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
    """Add to the count of that minute; the oldest of the source's counts go."""
    tx.db.execute(
        """
        insert into receiver_rejections (
          source, reason, minute_ms, count, first_ms, last_ms, request_id, detail)
        values (?, ?, ?, ?, ?, ?, ?, ?)
        on conflict (source, minute_ms, reason) do update set
          count = count + excluded.count, last_ms = excluded.last_ms,
          request_id = excluded.request_id, detail = excluded.detail
        """,
        (
            source,
            reason,
            last_ms - last_ms % MINUTE_MS,
            count,
            first_ms,
            last_ms,
            request_id,
            detail,
        ),
    )
    _prune_counts(tx, source)


def _prune_counts(tx: Tx, source: str) -> None:
    tx.db.execute(
        """
        delete from receiver_rejections
        where source = :source and minute_ms <= (
          select minute_ms from receiver_rejections
          where source = :source order by minute_ms desc limit 1 offset :most)
        """,
        {"source": source, "most": COUNTS_MAX},
    )


def keep(tx: Tx, request: Request) -> None:
    """Keep a refused request, until `prune_kept`."""
    tx.db.execute(
        """
        insert into receiver_rejected (
          source, reason, request_id, received_ms, method, address, header_names, body_bytes,
          detail, skew_s, content_sha256, url, headers, body)
        values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
        """,
        (
            request.source,
            request.reason,
            request.request_id,
            request.received_ms,
            request.method,
            request.address,
            request.header_names,
            request.body_bytes,
            request.detail,
            request.skew_s,
            request.content_sha256,
            request.url,
            request.headers,
            request.body,
        ),
    )


def prune_kept(tx: Tx) -> None:
    """Those go that are over the limits: first what came again, then the oldest.

    Else whoever has one stale request could push out all others with it. Genuine ones are apart,
    so that garbage can't push them out.
    """
    _prune_each(tx)
    _prune_all(tx)


def _prune_each(tx: Tx) -> None:
    tx.db.execute(
        f"""
        delete from receiver_rejected where id in (
          select id from (
            select id, row_number() over (
              partition by source, reason order by again, id desc) as place
            from (select id, source, reason, {_AGAIN} as again from receiver_rejected))
          where place > ?)
        """,  # noqa: S608  constant text
        (KEPT_MAX,),
    )


def _prune_all(tx: Tx) -> None:
    tx.db.execute(
        f"""
        delete from receiver_rejected where id in (
          select id from (
            select id,
              row_number() over kind as place,
              sum(bytes) over kind as bytes
            from (
              select id, reason, coalesce(length(body), 0) as bytes, {_AGAIN} as again
              from receiver_rejected)
            window kind as (partition by reason = 'expired' order by again, id desc))
          where place > ? or bytes > ?)
        """,  # noqa: S608  constant text
        (KEPT_IN_ALL_MAX, KEPT_BYTES_MAX),
    )


def accepted(tx: Tx, number: int, event: int) -> None:
    """The operator took it, as this event, which has the body from now on."""
    tx.db.execute(
        """
        update receiver_rejected
        set accepted_ms = ?, event = ?, url = null, headers = null, body = null
        where id = ? and accepted_ms is null
        """,
        (tx.now_ms, event, number),
    )
    assert tx.db.changes() == 1, "only a kept rejection is accepted, and once"


def of_source(snapshot: Snapshot, source: str) -> list[Rejection]:
    """What a source refused as far as it is kept, one for each reason, the newest first."""
    return [
        # The other columns are those of the row with the maximum.
        Rejection(*values)
        for values in snapshot.db.execute(
            """
            select source, reason, sum(count), max(last_ms), request_id, detail
            from receiver_rejections where source = ?
            group by reason order by max(last_ms) desc, reason
            """,
            (source,),
        )
    ]


def listed(
    snapshot: Snapshot,
    *,
    source: str | None = None,
    reason: str | None = None,
    since_ms: int | None = None,
    limit: int = 50,
) -> list[Line]:
    """The newest first: one for each minute, but each genuine delivery by itself."""
    return [
        Line(*values)
        for values in snapshot.db.execute(
            """
            select source, reason, count, first_ms, last_ms, request_id, detail, (
                select max(id) from receiver_rejected as kept
                where kept.source = counts.source and kept.reason = counts.reason
                  and kept.received_ms between counts.first_ms and counts.last_ms
              ) as number, null as accepted_ms
            from receiver_rejections as counts
            where (:source is null or source = :source) and (:reason is null or reason = :reason)
              and (:since is null or last_ms >= :since) and reason <> 'expired'
            union all
            select source, reason, 1, received_ms, received_ms, request_id, detail, id, accepted_ms
            from receiver_rejected
            where (:source is null or source = :source) and (:reason is null or reason = :reason)
              and (:since is null or received_ms >= :since) and reason = 'expired'
            order by last_ms desc, number desc limit :limit
            """,
            {"source": source, "reason": reason, "since": since_ms, "limit": limit},
        )
    ]


_COLUMNS = """
    id, accepted_ms, event, source, reason, request_id, received_ms, method, address,
    header_names, body_bytes, detail, skew_s, content_sha256, url, headers, body
"""


def by_number(snapshot: Snapshot, number: int) -> Kept | None:
    """The kept request with this number."""
    values = snapshot.db.execute(
        f"select {_COLUMNS} from receiver_rejected where id = ?",  # noqa: S608  constant columns
        (number,),
    ).fetchone()
    return None if values is None else _kept(*values)


def by_request(snapshot: Snapshot, request_id: str) -> Kept | None:
    """The kept request that was answered with this request id."""
    values = snapshot.db.execute(
        f"""
        select {_COLUMNS} from receiver_rejected where request_id = ? order by id desc limit 1
        """,  # noqa: S608  as above
        (request_id,),
    ).fetchone()
    return None if values is None else _kept(*values)


def _kept(number: int, accepted_ms: int | None, event: int | None, *request: object) -> Kept:
    return Kept(number, Request(*request), accepted_ms, event)  # type: ignore[arg-type]  # in order


def skews(snapshot: Snapshot, since_ms: int, until_ms: int | None = None) -> list[tuple[str, int]]:
    """Source and seconds of lateness of each genuine delivery refused then, newest first."""
    return [
        (source, skew_s)
        for source, skew_s in snapshot.db.execute(
            """
            select source, skew_s from receiver_rejected
            where reason = 'expired' and received_ms >= :since
              and (:until is null or received_ms <= :until)
            order by id desc
            """,
            {"since": since_ms, "until": until_ms},
        )
    ]


def wrong_clock(snapshot: Snapshot, since_ms: int) -> int:
    """How many deliveries since then were genuine, and refused for their time alone."""
    return len(skews(snapshot, since_ms))


def since(snapshot: Snapshot, from_ms: int) -> dict[tuple[str, str], int]:
    """How often by source and reason since that minute, as far as it is kept."""
    return {
        (source, reason): count
        for source, reason, count in snapshot.db.execute(
            """
            select source, reason, sum(count) from receiver_rejections
            where minute_ms > ? group by source, reason order by source, reason
            """,
            (from_ms - MINUTE_MS,),
        )
    }
