"""Runs a founder's own SQL inside our transaction without letting it break out."""

import time
from collections.abc import Sequence

import apsw

from store.errors import Failed

#: How long one founder statement may run, in seconds.
STATEMENT_S_MAX = 2.0

#: Rows that one founder statement may return.
ROWS_MAX = 10_000

#: Virtual machine steps between two looks at the clock.
_STEPS = 5_000

_DENIED = frozenset(
    {
        apsw.SQLITE_TRANSACTION,
        apsw.SQLITE_SAVEPOINT,
        apsw.SQLITE_PRAGMA,
        apsw.SQLITE_ATTACH,
        apsw.SQLITE_DETACH,
        apsw.SQLITE_ALTER_TABLE,
        apsw.SQLITE_REINDEX,
        apsw.SQLITE_ANALYZE,
        apsw.SQLITE_CREATE_INDEX,
        apsw.SQLITE_CREATE_TABLE,
        apsw.SQLITE_CREATE_TEMP_INDEX,
        apsw.SQLITE_CREATE_TEMP_TABLE,
        apsw.SQLITE_CREATE_TEMP_TRIGGER,
        apsw.SQLITE_CREATE_TEMP_VIEW,
        apsw.SQLITE_CREATE_TRIGGER,
        apsw.SQLITE_CREATE_VIEW,
        apsw.SQLITE_CREATE_VTABLE,
        apsw.SQLITE_DROP_INDEX,
        apsw.SQLITE_DROP_TABLE,
        apsw.SQLITE_DROP_TEMP_INDEX,
        apsw.SQLITE_DROP_TEMP_TABLE,
        apsw.SQLITE_DROP_TEMP_TRIGGER,
        apsw.SQLITE_DROP_TEMP_VIEW,
        apsw.SQLITE_DROP_TRIGGER,
        apsw.SQLITE_DROP_VIEW,
        apsw.SQLITE_DROP_VTABLE,
    }
)
_WRITES = frozenset({apsw.SQLITE_INSERT, apsw.SQLITE_UPDATE, apsw.SQLITE_DELETE})
_OPEN_FUNCTIONS = frozenset({"load_extension", "fts3_tokenizer"})

Value = str | int | float | bytes | None


class _Fence:
    """The connection's authorizer: strict while a founder's statement runs, else open.

    It stays installed, because changing the authorizer re-prepares every cached statement.
    """

    def __init__(self) -> None:
        self.closed = False

    def __call__(
        self, action: int, first: str | None, second: str | None, *_where: str | None
    ) -> int:
        if not self.closed:
            return apsw.SQLITE_OK
        if action in _DENIED:
            return apsw.SQLITE_DENY
        if action in _WRITES and str(first).lower().startswith(("receiver_", "sqlite_")):
            return apsw.SQLITE_DENY
        if action == apsw.SQLITE_FUNCTION and str(second).lower() in _OPEN_FUNCTIONS:
            return apsw.SQLITE_DENY
        return apsw.SQLITE_OK


def install(db: apsw.Connection) -> None:
    """Give the connection its fence; once, when it is opened."""
    db.authorizer = _Fence()


def execute(
    db: apsw.Connection, statement: str, parameters: Sequence[Value]
) -> list[tuple[Value, ...]]:
    """Run a founder's statement and return all its rows.

    Transactions, savepoints, pragmas, attaching, schema changes and writes to our tables are
    refused. Raises Failed for that, for SQL that fails, for one that runs longer than
    STATEMENT_S_MAX and for more than ROWS_MAX rows. The whole transaction may be gone after.
    """
    fence = db.authorizer
    assert isinstance(fence, _Fence), "every connection that writes has its fence"
    deadline = time.monotonic() + STATEMENT_S_MAX
    db.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
    fence.closed = True
    try:
        # Not through the statement cache: a cached statement was authorized before.
        cursor = db.cursor()
        try:
            rows = cursor.execute(statement, parameters, can_cache=False)
            # Whole, at once: a cursor left half read keeps the transaction from ending.
            found = [row for _, row in zip(range(ROWS_MAX + 1), rows, strict=False)]
        finally:
            cursor.close(True)
    except apsw.InterruptError as error:
        raise Failed(f"ran longer than {STATEMENT_S_MAX:g} s") from error
    except apsw.AuthError as error:
        raise Failed(
            "not allowed here: transactions, savepoints, pragmas, attach, schema changes "
            "and writes to receiver_ tables"
        ) from error
    except (apsw.FullError, apsw.IOError, apsw.CorruptError):
        raise
    except (apsw.Error, TypeError, ValueError, OverflowError) as error:
        raise Failed(str(error)[:500]) from error
    finally:
        fence.closed = False
        db.set_progress_handler(None)
    if len(found) > ROWS_MAX:
        raise Failed(f"returned more than {ROWS_MAX} rows: add a limit")
    return found
