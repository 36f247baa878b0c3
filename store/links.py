"""Links: which workspace a sender's customer is."""

from typing import NamedTuple

from store.database import Snapshot, Tx


class Link(NamedTuple):
    """`source` is the identity."""

    source: str
    account: str
    customer: str
    workspace: str
    created_ms: int


def workspace(snapshot: Snapshot, source: str, account: str, customer: str) -> str | None:
    """The workspace linked to (identity, account, customer), or None."""
    found = snapshot.db.execute(
        """
        select workspace from receiver_links
        where source = ? and account = ? and customer = ?
        """,
        (source, account, customer),
    ).get
    assert found is None or isinstance(found, str), "the column is text"
    return found


def add(tx: Tx, source: str, account: str, customer: str, workspace: str) -> bool:
    """Link a customer; False, with nothing written, if it is linked already (to anything).

    The file makes due what was parked on this link.
    """
    tx.db.execute(
        """
        insert into receiver_links (source, account, customer, workspace, created_ms)
        values (?, ?, ?, ?, ?)
        on conflict (source, account, customer) do nothing
        """,
        (source, account, customer, workspace, tx.now_ms),
    )
    return tx.db.changes() == 1


def repoint(tx: Tx, source: str, account: str, customer: str, workspace: str) -> bool:
    """Link a linked customer to another workspace; False if it has no link."""
    tx.db.execute(
        """
        update receiver_links set workspace = ?
        where source = ? and account = ? and customer = ?
        """,
        (workspace, source, account, customer),
    )
    return tx.db.changes() == 1


def remove(tx: Tx, source: str, account: str, customer: str) -> bool:
    """Forget a link; False if there was none. What was granted through it stays."""
    tx.db.execute(
        "delete from receiver_links where source = ? and account = ? and customer = ?",
        (source, account, customer),
    )
    return tx.db.changes() == 1


def listed(
    snapshot: Snapshot,
    *,
    source: str | None = None,
    customer: str | None = None,
    workspace: str | None = None,
    limit: int = 50,
) -> list[Link]:
    """Links, newest first."""
    return [
        Link(*values)
        for values in snapshot.db.execute(
            """
            select source, account, customer, workspace, created_ms from receiver_links
            where (:source is null or source = :source)
              and (:customer is null or customer = :customer)
              and (:workspace is null or workspace = :workspace)
            order by created_ms desc, source, account, customer limit :limit
            """,
            {"source": source, "customer": customer, "workspace": workspace, "limit": limit},
        )
    ]
