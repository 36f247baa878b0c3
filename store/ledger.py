"""Amounts: one entry for each business key, balances kept by triggers."""

from dataclasses import dataclass
from typing import NamedTuple

import apsw

from store.database import Snapshot, Tx
from store.errors import Refused
from store.operations import Key


@dataclass(frozen=True, slots=True)
class Entry:
    """A ledger entry; `amount` in `unit`, negative for a spend or a reversal."""

    key: Key
    workspace: str
    unit: str
    amount: int
    created_ms: int
    target_subject: str | None = None
    target_operation: str | None = None


class Balance(NamedTuple):
    """What a workspace has of one unit, and the sum of its entries: always the same."""

    workspace: str
    unit: str
    balance: int
    total: int


_COLUMNS = """
    source, account, subject, operation, workspace, unit, amount, created_ms,
    target_subject, target_operation
"""


def enter(
    tx: Tx, key: Key, workspace: str, unit: str, amount: int, target: Key | None = None
) -> None:
    """Write an entry; `target` is what a reversal takes back, in the same source and account.

    The key must be claimed for just this, or not at all (then the file claims it). Raises
    Refused where the file's own rules say no.
    """
    takes_back = (None, None) if target is None else (target.subject, target.operation)
    try:
        tx.db.execute(
            """
            insert into receiver_ledger (
              source, account, subject, operation, workspace, unit, amount, created_ms,
              target_subject, target_operation)
            values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
            """,
            (*key, workspace, unit, amount, tx.now_ms, *takes_back),
        )
    except apsw.ConstraintError as error:
        raise Refused(str(error).removeprefix("receiver: ")) from error


def find(snapshot: Snapshot, key: Key) -> Entry | None:
    """The entry with this business key, or None."""
    values = snapshot.db.execute(
        f"""
        select {_COLUMNS} from receiver_ledger
        where source = ? and account = ? and subject = ? and operation = ?
        """,  # noqa: S608  constant columns
        key,
    ).fetchone()
    return None if values is None else _entry(values)


def left(snapshot: Snapshot, entry: Entry) -> int:
    """What of the entry's amount was not taken back yet."""
    reversed_ = snapshot.db.execute(
        """
        select coalesce(sum(amount), 0) from receiver_ledger
        where source = ? and account = ? and target_subject = ? and target_operation = ?
        """,
        entry.key,
    ).get
    assert isinstance(reversed_, int), "a sum of integers, 0 for none"
    return entry.amount + reversed_


def balance(snapshot: Snapshot, workspace: str, unit: str) -> int:
    """The workspace's balance in one unit, 0 if it never had any."""
    found = snapshot.db.execute(
        "select balance from receiver_balances where workspace = ? and unit = ?",
        (workspace, unit),
    ).get
    return 0 if found is None else int(found)


def units(snapshot: Snapshot) -> list[str]:
    """The units that there is a balance in."""
    found = snapshot.db.execute("select distinct unit from receiver_balances order by unit")
    return [unit for (unit,) in found]


def listed(
    snapshot: Snapshot,
    *,
    workspace: str | None = None,
    subject: str | None = None,
    operation: str | None = None,
    since_ms: int | None = None,
    limit: int = 50,
) -> list[Entry]:
    """Entries, newest first."""
    return [
        _entry(values)
        for values in snapshot.db.execute(
            f"""
            select {_COLUMNS} from receiver_ledger
            where (:workspace is null or workspace = :workspace)
              and (:subject is null or subject = :subject)
              and (:operation is null or operation = :operation)
              and (:since is null or created_ms >= :since)
            order by created_ms desc, source, account, subject, operation limit :limit
            """,  # noqa: S608  constant columns
            {
                "workspace": workspace,
                "subject": subject,
                "operation": operation,
                "since": since_ms,
                "limit": limit,
            },
        )
    ]


def reversals(snapshot: Snapshot, key: Key) -> list[Entry]:
    """The entries that take back the one with this key, oldest first."""
    return [
        _entry(values)
        for values in snapshot.db.execute(
            f"""
            select {_COLUMNS} from receiver_ledger
            where source = ? and account = ? and target_subject = ? and target_operation = ?
            order by created_ms, subject, operation
            """,  # noqa: S608  constant columns
            key,
        )
    ]


def totals(
    snapshot: Snapshot, *, workspace: str | None = None, unit: str | None = None, limit: int = 50
) -> list[Balance]:
    """Balances beside the sums of their entries, by workspace and unit."""
    return [
        Balance(*values)
        for values in snapshot.db.execute(
            """
            select k.workspace, k.unit, coalesce(b.balance, 0),
              (select coalesce(sum(amount), 0) from receiver_ledger l
               where l.workspace = k.workspace and l.unit = k.unit)
            from (
              select workspace, unit from receiver_balances
              where (:workspace is null or workspace = :workspace)
                and (:unit is null or unit = :unit)
              union
              select workspace, unit from receiver_ledger
              where (:workspace is null or workspace = :workspace)
                and (:unit is null or unit = :unit)
              order by workspace, unit limit :limit) k
            left join receiver_balances b on b.workspace = k.workspace and b.unit = k.unit
            order by k.workspace, k.unit
            """,
            {"workspace": workspace, "unit": unit, "limit": limit},
        )
    ]


def disagreements(snapshot: Snapshot) -> list[Balance]:
    """The balances that are not the sums of their entries: must be none."""
    return [
        Balance(*values)
        for values in snapshot.db.execute(
            """
            select workspace, unit, sum(balance), sum(total) from (
              select workspace, unit, balance, 0 as total from receiver_balances
              union all
              select workspace, unit, 0, amount from receiver_ledger
            ) group by workspace, unit having sum(balance) <> sum(total)
            """
        )
    ]


def _entry(values: tuple[object, ...]) -> Entry:
    return Entry(Key(*values[:4]), *values[4:])  # type: ignore[arg-type]  # columns as fields
