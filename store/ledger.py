"""Amounts: one entry for each business key, balances kept by triggers."""

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import apsw
import msgspec

from store import names, ranges
from store.database import Snapshot, Tx
from store.errors import Refused
from store.operations import Key


class Entry(msgspec.Struct, frozen=True):
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
    since = since_ms or 0
    if subject is not None:
        fits = [
            entry
            for entry in _of_subject(snapshot, subject)
            if workspace in (None, entry.workspace) and operation in (None, entry.key.operation)
        ]
        each: Iterable[Iterator[Entry]] = [iter(sorted(fits, key=_newness, reverse=True))]
    elif workspace is not None:
        within = _leaps(snapshot, "unit", "workspace = ?", (workspace,))
        each = [_of_unit(snapshot, workspace, unit, operation, since) for unit in within]
    else:
        every = _leaps(snapshot, "operation", "true", ()) if operation is None else [operation]
        each = [_of_operation(snapshot, one, since) for one in every]
    newest = ranges.newest(each, limit, _newness)
    return [entry for entry in newest if entry.created_ms >= since]


def _newness(entry: Entry) -> tuple[int, ...]:
    return (entry.created_ms,)


def _leaps(
    snapshot: Snapshot, column: str, where: str, parameters: tuple[str, ...]
) -> Iterator[str]:
    statement = f"select min({column}) from receiver_ledger where {where} and {column} > ?"  # noqa: S608  constant text
    return ranges.leaps(lambda before: snapshot.db.execute(statement, (*parameters, before)).get)


def _of_subject(snapshot: Snapshot, subject: str) -> Iterator[Entry]:
    for values in snapshot.db.execute(
        f"""
        with {names.SENDERS.format("receiver_ledger")}
        select l.* from senders s cross join (select {_COLUMNS} from receiver_ledger) l
        on l.source = s.source and l.account = s.account and l.subject = ?
        """,  # noqa: S608  constant text
        (subject,),
    ):
        yield _entry(values)


def _of_unit(
    snapshot: Snapshot, workspace: str, unit: str, operation: str | None, since_ms: int
) -> Iterator[Entry]:
    for values in snapshot.db.execute(
        f"""
        select {_COLUMNS} from receiver_ledger
        where workspace = ? and unit = ? and created_ms >= ? and (?4 is null or operation = ?4)
        order by created_ms desc
        """,  # noqa: S608  constant columns
        (workspace, unit, since_ms, operation),
    ):
        yield _entry(values)


def _of_operation(snapshot: Snapshot, operation: str, since_ms: int) -> Iterator[Entry]:
    for values in snapshot.db.execute(
        f"""
        select {_COLUMNS} from receiver_ledger
        where operation = ? and created_ms >= ? order by created_ms desc
        """,  # noqa: S608  constant columns
        (operation, since_ms),
    ):
        yield _entry(values)


def of_operation(
    snapshot: Snapshot,
    *,
    source: str,
    account: str,
    operation: str,
    since_ms: int,
    until_ms: int,
    after: tuple[int, str],
    limit: int,
) -> list[Entry]:
    """Entries of one operation in a period, oldest first, from behind (created_ms, subject)."""
    return [
        _entry(values)
        for values in snapshot.db.execute(
            f"""
            select {_COLUMNS} from receiver_ledger
            where operation = ? and created_ms >= ? and created_ms < ?
              and source = ? and account = ? and (created_ms, subject) > (?, ?)
            order by created_ms, subject limit ?
            """,  # noqa: S608  constant columns
            (operation, max(since_ms, after[0]), until_ms, source, account, *after, limit),
        )
    ]


def after(snapshot: Snapshot, key: Key | None, *, since_ms: int | None, limit: int) -> list[Entry]:
    """Entries in the order of their keys, beyond `key`."""
    return [
        _entry(values)
        for values in snapshot.db.execute(
            f"""
            select {_COLUMNS} from receiver_ledger
            where (source, account, subject, operation) > (?, ?, ?, ?)
              and created_ms >= ?
            order by source, account, subject, operation limit ?
            """,  # noqa: S608  constant columns
            (*(key or ("", "", "", "")), since_ms or 0, limit),
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
    held = itertools.islice(_held(snapshot, workspace, unit), limit)
    return [_balance(snapshot, *one) for one in held]


def _balance(snapshot: Snapshot, workspace: str, unit: str) -> Balance:
    ((kept, total),) = snapshot.db.execute(
        """
        select
          (select balance from receiver_balances where workspace = :workspace and unit = :unit),
          (select coalesce(sum(amount), 0) from receiver_ledger
            where workspace = :workspace and unit = :unit)
        """,
        {"workspace": workspace, "unit": unit},
    )
    return Balance(workspace, unit, kept or 0, total)


def _held(snapshot: Snapshot, workspace: str | None, unit: str | None) -> Iterator[tuple[str, str]]:
    """What there is a balance or an entry of, by workspace and unit."""
    at = ("", "") if workspace is None else (workspace, "")
    while True:
        # A balance whose row is gone must be found all the same.
        found = snapshot.db.execute(
            """
            select * from (
              select workspace, unit from receiver_balances
              where (workspace, unit) > (:workspace, :unit) order by workspace, unit limit 1)
            union
            select * from (
              select workspace, unit from receiver_ledger
              where (workspace, unit) > (:workspace, :unit) order by workspace, unit limit 1)
            order by workspace, unit limit 1
            """,
            {"workspace": at[0], "unit": at[1]},
        ).fetchone()
        if found is None or workspace not in (None, found[0]):
            return
        at = (found[0], found[1])
        if unit in (None, at[1]):
            yield at


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
