"""Links: which workspace a sender's customer is."""

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from store import names, ranges
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


def find(snapshot: Snapshot, source: str, account: str, customer: str) -> Link | None:
    """The link of (identity, account, customer), or None."""
    values = snapshot.db.execute(
        """
        select source, account, customer, workspace, created_ms from receiver_links
        where source = ? and account = ? and customer = ?
        """,
        (source, account, customer),
    ).fetchone()
    return None if values is None else Link(*values)


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
    if customer is not None:
        found: Iterable[Link] = _of_customer(snapshot, customer)
    elif workspace is not None:
        found = _of_workspace(snapshot, workspace)
    else:
        sources = _sources(snapshot) if source is None else [source]
        each = (_of_source(snapshot, one, limit) for one in sources)
        found = ranges.newest(each, limit, lambda link: (link.created_ms,))
    fits = (
        link
        for link in found
        if source in (None, link.source) and workspace in (None, link.workspace)
    )
    return list(itertools.islice(fits, limit))


def _of_customer(snapshot: Snapshot, customer: str) -> Iterator[Link]:
    for values in snapshot.db.execute(
        f"""
        with {names.SENDERS.format("receiver_links")}
        select l.source, l.account, l.customer, l.workspace, l.created_ms
        from senders s cross join receiver_links l
        on l.source = s.source and l.account = s.account and l.customer = ?
        order by l.created_ms desc, l.source, l.account
        """,  # noqa: S608  constant text
        (customer,),
    ):
        yield Link(*values)


def _of_workspace(snapshot: Snapshot, workspace: str) -> Iterator[Link]:
    for values in snapshot.db.execute(
        """
        select source, account, customer, workspace, created_ms from receiver_links
        where workspace = ? order by created_ms desc
        """,
        (workspace,),
    ):
        yield Link(*values)


def _of_source(snapshot: Snapshot, source: str, limit: int) -> Iterator[Link]:
    for values in snapshot.db.execute(
        """
        select source, account, customer, workspace, created_ms from receiver_links
        where source = ? order by created_ms desc limit ?
        """,
        (source, limit),
    ):
        yield Link(*values)


def _sources(snapshot: Snapshot) -> Iterator[str]:
    return ranges.leaps(
        lambda before: (
            snapshot.db.execute(
                "select min(source) from receiver_links where source > ?", (before,)
            ).get
        )
    )
