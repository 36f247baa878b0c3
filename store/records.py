"""Records: facts for the app to read, one for each business key."""

from dataclasses import dataclass

from store.database import Snapshot, Tx
from store.operations import Key


@dataclass(frozen=True, slots=True)
class Record:
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
    return [
        Record(Key(*values[:4]), *values[4:])
        for values in snapshot.db.execute(
            """
            select source, account, subject, operation, kind, workspace, data, created_ms
            from receiver_records
            where (:kind is null or kind = :kind)
              and (:workspace is null or workspace = :workspace)
              and (:subject is null or subject = :subject)
              and (:since is null or created_ms >= :since)
            order by created_ms desc, source, account, subject, operation limit :limit
            """,
            {
                "kind": kind,
                "workspace": workspace,
                "subject": subject,
                "since": since_ms,
                "limit": limit,
            },
        )
    ]
