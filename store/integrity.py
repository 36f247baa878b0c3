"""Whether the file is whole, found out by reading it."""

import apsw

from store import ledger, schema
from store.database import Snapshot

#: Faults that are told, at most.
FAULTS_MAX = 10


def quick_check(snapshot: Snapshot) -> list[str]:
    """What SQLite finds wrong with the file; nothing if it is whole. Reads all of it."""
    # https://www.sqlite.org/pragma.html#pragma_quick_check
    rows = snapshot.db.execute(f"pragma quick_check({FAULTS_MAX})").fetchall()
    return [str(fault) for (fault,) in rows if fault != "ok"]


def full_check(snapshot: Snapshot) -> list[str]:
    """The same with every index compared with its table."""
    # https://www.sqlite.org/pragma.html#pragma_integrity_check
    rows = snapshot.db.execute(f"pragma integrity_check({FAULTS_MAX})").fetchall()
    return [str(fault) for (fault,) in rows if fault != "ok"]


def journal_mode(snapshot: Snapshot) -> str:
    """How the file is kept whole; `wal`, unless somebody switched it."""
    return str(snapshot.db.execute("pragma journal_mode").get)


def foreign_triggers(snapshot: Snapshot) -> list[str]:
    """Triggers on our tables that are not ours, by name."""
    return [
        name
        for (name,) in snapshot.db.execute(
            """
            select name from sqlite_schema
            where type = 'trigger' and substr(tbl_name, 1, 9) = 'receiver_'
              and substr(name, 1, 9) <> 'receiver_'
            order by name
            """
        )
    ]


def schema_version(snapshot: Snapshot) -> int:
    """How many steps the file's schema has seen."""
    return schema.version(snapshot.db)


def foreign_tables(snapshot: Snapshot) -> list[str]:
    """The tables in the file that are not ours, by name."""
    return [
        name
        for (name,) in snapshot.db.execute(
            """
            select name from sqlite_schema
            where type = 'table' and substr(name, 1, 9) <> 'receiver_'
              and substr(name, 1, 7) <> 'sqlite_'
            order by name
            """
        )
    ]


def foreign_key_faults(snapshot: Snapshot) -> list[str]:
    """Rows that refer to a row which is not there, counted by table; Receiver declares none."""
    # https://www.sqlite.org/pragma.html#pragma_foreign_key_check
    try:
        rows = snapshot.db.execute("pragma foreign_key_check").fetchall()
    except apsw.SQLError as error:
        return [str(error)]
    tables = sorted({str(table) for table, *_ in rows})
    return [
        f"{sum(row[0] == table for row in rows)} rows of {table} refer to rows that are not there"
        for table in tables
    ]


def schema_faults(snapshot: Snapshot) -> list[str]:
    """How our part of the schema differs from what this version makes."""
    wanted, found = _objects(schema.fresh()), _objects(snapshot.db)
    missing = [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())]
    altered = [
        f"{name} is not as Receiver made it"
        for name in sorted(wanted.keys() & found.keys())
        if wanted[name] != found[name]
    ]
    return [*missing, *altered]


def book_faults(snapshot: Snapshot) -> list[str]:
    """Balances that are not the sum of their entries, in words."""
    return [
        f"balance of {workspace} is {balance} {unit}, its entries add up to {total}"
        for workspace, unit, balance, total in ledger.disagreements(snapshot)
    ]


def _objects(db: apsw.Connection) -> dict[str, str]:
    return {
        name: " ".join(sql.split())
        for name, sql in db.execute(
            """
            select name, sql from sqlite_schema
            where substr(name, 1, 9) = 'receiver_' and sql is not null
            """
        )
    }
