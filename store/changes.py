"""Sees which rows a transaction changes, of every table, while it is open."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import apsw

from store.database import Snapshot, Tx
from store.founder import Value

Columns = dict[str, Value]


class Change(NamedTuple):
    """A row as it was and as it is, by column; `before` is None for a new one, `after` for none.

    `key` are the columns, or the rowid, by which it is found.
    """

    table: str
    key: Columns
    before: Columns | None
    after: Columns | None


class _Table(NamedTuple):
    """How a row is found: by these columns (name, number), or else by its rowid."""

    name: str
    key: tuple[tuple[str, int], ...]
    rowid: str


class Watch:
    """The rows that were touched.

    SQLite's preupdate hook tells which, of tables without a primary key too, which its sessions
    leave out. Their values are read when asked for, so what a savepoint undid is no change.
    """

    def __init__(self, tx: Tx, base: Snapshot) -> None:
        self._db = tx.db
        self._base = base.db
        self._tables = {table.name: table for table in _tables(tx.db)}
        self._touched: dict[tuple[str, tuple[Value, ...]], None] = {}
        self._last: dict[tuple[str, tuple[Value, ...]], Columns | None] = {}
        #: Tables that were changed in a way that can't be told.
        self.untold: set[str] = set()

    def take(self) -> list[Change]:
        """What has changed since this was asked last."""
        touched, self._touched = list(self._touched), {}
        changes = []
        for name, key in touched:
            table = self._tables[name]
            if (name, key) not in self._last:
                self._last[name, key] = _row(self._base, table, key)
            before, after = self._last[name, key], _row(self._db, table, key)
            self._last[name, key] = after
            if before != after:
                changes.append(Change(name, _named(table, key), before, after))
        return changes

    def touch(self, update: apsw.PreUpdate) -> None:
        """The hook: may not read the file, and what it raises changes nothing."""
        table = self._tables.get(update.table_name)
        if table is None:
            self.untold.add(update.table_name)
            return
        for key in _keys(update, table):
            self._touched[table.name, key] = None
        if table.key and not _has_values(update):
            self.untold.add(table.name)


@contextlib.contextmanager
def watching(tx: Tx, base: Snapshot) -> Iterator[Watch]:
    """Watch a transaction; `base` is a snapshot of the file, begun after it."""
    watch = Watch(tx, base)
    tx.db.preupdate_hook(watch.touch)
    try:
        yield watch
    finally:
        tx.db.preupdate_hook(None)


def _keys(update: apsw.PreUpdate, table: _Table) -> Iterator[tuple[Value, ...]]:
    """The row's key before and after."""
    if not table.key:
        yield (update.rowid,)
        yield (update.rowid_new,)
    elif _has_values(update):
        for values in (update.old, update.new):
            if values is not None:
                yield tuple(values[number] for _, number in table.key)


def _has_values(update: apsw.PreUpdate) -> bool:
    try:
        return (update.old or update.new) is not None
    except apsw.RangeError:
        # A table with generated columns has fewer stored than it has columns.
        return False


def _tables(db: apsw.Connection) -> Iterator[_Table]:
    # https://www.sqlite.org/pragma.html#pragma_table_list
    for schema, name, kind, _, without_rowid, _ in db.execute("pragma table_list").fetchall():
        if schema != "main" or kind != "table":
            continue
        columns: list[tuple[int, str, int]] = db.execute(
            "select cid, name, pk from pragma_table_info(?)", (name,)
        ).fetchall()  # type: ignore[assignment]  # as the pragma has them
        primary = sorted((pk, column, number) for number, column, pk in columns if pk)
        if without_rowid:
            yield _Table(str(name), tuple((column, number) for _, column, number in primary), "")
            continue
        taken = {column.lower() for _, column, _ in columns}
        for rowid in ("rowid", "_rowid_", "oid"):
            if rowid not in taken:
                yield _Table(str(name), (), rowid)
                break


def _named(table: _Table, key: tuple[Value, ...]) -> Columns:
    return dict(zip([name for name, _ in table.key] or [table.rowid], key, strict=True))


def _row(db: apsw.Connection, table: _Table, key: tuple[Value, ...]) -> Columns | None:
    where = " and ".join(f"{_quoted(name)} = ?" for name in _named(table, key))
    cursor = db.execute(f"select * from {_quoted(table.name)} where {where}", key)  # noqa: S608  quoted names
    values = cursor.fetchone()
    if values is None:
        return None
    return dict(zip((name for name, *_ in cursor.description_full), values, strict=True))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
