"""Whether the file is whole, found out by reading it."""

from store import schema
from store.database import Snapshot

#: Faults that are told, at most.
FAULTS_MAX = 10


def quick_check(snapshot: Snapshot) -> list[str]:
    """What SQLite finds wrong with the file; nothing if it is whole. Reads all of it."""
    # https://www.sqlite.org/pragma.html#pragma_quick_check
    rows = snapshot.db.execute(f"pragma quick_check({FAULTS_MAX})").fetchall()
    return [str(fault) for (fault,) in rows if fault != "ok"]


def schema_version(snapshot: Snapshot) -> int:
    """How many steps the file's schema has seen."""
    return schema.version(snapshot.db)
