"""What a founder's SQL may not do inside our transaction, as SQLite asks of each statement."""

import apsw

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


class Fence:
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
        if action == apsw.SQLITE_PRAGMA and first == "data_version" and second is None:
            # What FTS5 asks before each use of one of its tables.
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
    db.authorizer = Fence()


def of(db: apsw.Connection) -> Fence:
    """The connection's fence."""
    fence = db.authorizer
    assert isinstance(fence, Fence), "every connection that writes has its fence"
    return fence
