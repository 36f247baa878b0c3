"""Runs a founder's own SQL inside our transaction without letting it break out."""

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence

import apsw

from store import fence
from store.database import Snapshot, Tx
from store.errors import Failed, TransactionLost

#: How long the founder's statements for one operation may run, all together, in seconds.
SQL_S_MAX = 2.0

#: Rows that one founder statement may return.
ROWS_MAX = 10_000

#: Virtual machine steps between two looks at the clock.
_STEPS = 5_000

_TOO_LONG = f"ran longer than {SQL_S_MAX:g} s, all statements of the operation together"

_NOT_ALLOWED = (
    "not allowed here: transactions, savepoints, pragmas, attach, schema changes "
    "and writes to receiver_ tables"
)

Value = str | int | float | bytes | None


def deadline() -> float:
    """Until when statements that begin now may run, by the monotonic clock."""
    return time.monotonic() + SQL_S_MAX


def execute(
    tx: Tx, statement: str, parameters: Sequence[Value], until: float
) -> list[tuple[Value, ...]]:
    """Run a founder's statement, until `deadline()` at most, and return all its rows.

    Transactions, savepoints, pragmas, attaching, schema changes and writes to our tables are
    refused. Raises Failed for that, for SQL that fails, for one that runs too long and for
    more than ROWS_MAX rows; the whole transaction may be gone after. Raises TransactionLost
    if it is gone already.
    """
    if not tx.is_open:
        raise TransactionLost("an earlier statement ended the transaction")
    if time.monotonic() > until:
        raise Failed(_TOO_LONG)
    try:
        with _fenced(tx.db, until):
            rows = _fetch(tx.db, statement, parameters)
    except apsw.InterruptError as error:
        raise Failed(_TOO_LONG) from error
    except apsw.AuthError as error:
        raise Failed(_NOT_ALLOWED) from error
    except (apsw.FullError, apsw.IOError, apsw.CorruptError):
        raise
    except (apsw.Error, TypeError, ValueError, OverflowError) as error:
        raise Failed(str(error)[:500]) from error
    if len(rows) > ROWS_MAX:
        raise Failed(f"returned more than {ROWS_MAX} rows: add a limit")
    return rows


def problem(snapshot: Snapshot, statement: str, parameters: int) -> str | None:
    """Why `execute` would refuse a statement with so many parameters, or None; it is not run.

    What SQLite finds out only when it runs, or depends on values, is not told. For a connection
    that only reads.
    """
    fence.install(snapshot.db)
    cursor = snapshot.db.cursor()
    try:
        with _fenced(snapshot.db, deadline()):
            # As `explain`, the statement is prepared, and then lists its own program.
            cursor.execute(statement, (None,) * parameters, can_cache=False, explain=1).fetchall()
    except apsw.AuthError:
        return _NOT_ALLOWED
    except apsw.Error as error:
        return str(error)[:500]
    finally:
        cursor.close(True)
    return None


@contextlib.contextmanager
def _fenced(db: apsw.Connection, until: float) -> Iterator[None]:
    guarding = fence.of(db)
    # A parameter's own code may run a statement within this one: what it finds it must leave.
    outer, guarding.closed = guarding.closed, True
    db.set_progress_handler(lambda: time.monotonic() > until, _STEPS)
    try:
        yield
    finally:
        guarding.closed = outer
        if not outer:
            db.set_progress_handler(None)


def _fetch(
    db: apsw.Connection, statement: str, parameters: Sequence[Value]
) -> list[tuple[Value, ...]]:
    cursor = db.cursor()
    try:
        # Not through the statement cache: a cached statement was authorized before.
        rows = cursor.execute(statement, parameters, can_cache=False)
        # Whole, at once: a cursor left half read keeps the transaction from ending.
        return list(itertools.islice(rows, ROWS_MAX + 1))
    finally:
        cursor.close(True)
