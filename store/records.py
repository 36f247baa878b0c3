"""Records: facts for the app to read, one for each business key."""

import itertools
from collections.abc import Iterable, Iterator

import msgspec

from store import names, ranges
from store.database import Snapshot, Tx
from store.operations import Key


class Record(msgspec.Struct, frozen=True):
    """`data` is JSON text."""

    key: Key
    kind: str
    workspace: str | None
    data: str
    created_ms: int


def insert(tx: Tx, key: Key, kind: str, workspace: str | None, data: str) -> None:
    """Write a record whose key the caller has just claimed."""
    tx.db.execute(
        """
        insert into receiver_records (
          source, account, subject, operation, kind, workspace, data, created_ms)
        values (?, ?, ?, ?, ?, ?, ?, ?)
        """,
        (*key, kind, workspace, data, tx.now_ms),
    )


def find(snapshot: Snapshot, key: Key) -> Record | None:
    """The record with this business key, or None."""
    values = snapshot.db.execute(
        """
        select source, account, subject, operation, kind, workspace, data, created_ms
        from receiver_records
        where source = ? and account = ? and subject = ? and operation = ?
        """,
        key,
    ).fetchone()
    return None if values is None else Record(Key(*values[:4]), *values[4:])


def after(snapshot: Snapshot, key: Key | None, *, since_ms: int | None, limit: int) -> list[Record]:
    """Records in the order of their keys, beyond `key`."""
    return [
        Record(Key(*values[:4]), *values[4:])
        for values in snapshot.db.execute(
            """
            select source, account, subject, operation, kind, workspace, data, created_ms
            from receiver_records
            where (source, account, subject, operation) > (?, ?, ?, ?)
              and created_ms >= ?
            order by source, account, subject, operation limit ?
            """,
            (*(key or ("", "", "", "")), since_ms or 0, limit),
        )
    ]


def listed(
    snapshot: Snapshot,
    *,
    kind: str | None = None,
    workspace: str | None = None,
    subject: str | None = None,
    since_ms: int | None = None,
    limit: int = 50,
) -> list[Record]:
    """Records, newest first."""
    if subject is not None:
        found: Iterable[Record] = sorted(_of_subject(snapshot, subject), key=_newness, reverse=True)
    elif workspace is not None:
        found = _of_workspace(snapshot, workspace)
    else:
        kinds = _kinds(snapshot) if kind is None else [kind]
        each = [_of_kind(snapshot, one, limit) for one in kinds]
        found = ranges.newest(each, limit, _newness)
    fits = (
        one
        for one in found
        if kind in (None, one.kind)
        and workspace in (None, one.workspace)
        and one.created_ms >= (since_ms or 0)
    )
    return list(itertools.islice(fits, limit))


def _newness(record: Record) -> tuple[int, ...]:
    return (record.created_ms,)


def _of_subject(snapshot: Snapshot, subject: str) -> Iterator[Record]:
    for values in snapshot.db.execute(
        f"""
        with {names.SENDERS.format("receiver_records")}
        select r.source, r.account, r.subject, r.operation, r.kind, r.workspace, r.data,
          r.created_ms
        from senders s cross join receiver_records r
        on r.source = s.source and r.account = s.account and r.subject = ?
        """,  # noqa: S608  constant text
        (subject,),
    ):
        yield Record(Key(*values[:4]), *values[4:])


def _of_workspace(snapshot: Snapshot, workspace: str) -> Iterator[Record]:
    for values in snapshot.db.execute(
        """
        select r.source, r.account, r.subject, r.operation, r.kind, r.workspace, r.data,
          r.created_ms
        from receiver_operations o cross join receiver_records r
        on r.source = o.source and r.account = o.account
          and r.subject = o.subject and r.operation = o.operation
        where o.workspace = ? and o.amount is null order by o.created_ms desc
        """,
        (workspace,),
    ):
        yield Record(Key(*values[:4]), *values[4:])


def _of_kind(snapshot: Snapshot, kind: str, limit: int) -> Iterator[Record]:
    for values in snapshot.db.execute(
        """
        select source, account, subject, operation, kind, workspace, data, created_ms
        from receiver_records where kind = ? order by created_ms desc limit ?
        """,
        (kind, limit),
    ):
        yield Record(Key(*values[:4]), *values[4:])


def _kinds(snapshot: Snapshot) -> Iterator[str]:
    return ranges.leaps(
        lambda before: (
            snapshot.db.execute(
                "select min(kind) from receiver_records where kind > ?", (before,)
            ).get
        )
    )
