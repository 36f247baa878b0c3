"""Opens the file, and runs jobs in transactions on its one writing connection."""

import contextlib
import logging
import os
import pwd
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import apsw

from store import copies, fence, guard, schema
from store.errors import Replaced, StoreError, TransactionLost, Unavailable
from store.lock import Lock, path_of

T = TypeVar("T")

logger = logging.getLogger("receiver")

#: How long the command line waits for the write lock, in seconds, and how often it asks.
LOCK_WAIT_S = 10.0
LOCK_POLL_S = 0.001

#: How long one that only reads waits where somebody has the file to himself, in milliseconds.
READ_WAIT_MS = 5_000

#: Jobs in one commit.
BATCH_MAX = 128

#: Pages of 4 KiB in the -wal before SQLite moves them into the file.
CHECKPOINT_PAGES = 2000

#: How long `empty_wal` goes on asking, in seconds, and how long it waits each time.
EMPTY_S = 5.0
EMPTY_BUSY_MS = 50

#: What a -wal that grew, while a long reader kept it from being used again, is cut back to.
WAL_BYTES_KEPT = 67_108_864

#: What ends a transaction's chance of being durable, whatever the job was.
_ENGINE_ERRORS = (
    apsw.FullError,
    apsw.IOError,
    apsw.NoMemError,
    apsw.ReadOnlyError,
    apsw.CantOpenError,
    apsw.CorruptError,
    apsw.NotADBError,
)


class Snapshot:
    """One consistent state of the file, for reading."""

    __slots__ = ("db",)

    def __init__(self, db: apsw.Connection) -> None:
        self.db = db

    def data_version(self) -> int:
        """A number that changes when another connection has written to the file."""
        found = self.db.execute("pragma data_version").get
        assert isinstance(found, int), "the pragma gives a number"
        return found


class Tx(Snapshot):
    """An open write transaction, at one instant: functions that write take it first."""

    __slots__ = ("attempt", "now_ms")

    def __init__(self, db: apsw.Connection, now_ms: int) -> None:
        super().__init__(db)
        self.now_ms = now_ms
        #: `with tx.attempt:` undoes what its body wrote if the body raises.
        self.attempt = _Savepoint(db)

    @property
    def is_open(self) -> bool:
        """False once a statement has ended the transaction: the next would commit by itself."""
        return self.db.in_transaction


class _Savepoint:
    __slots__ = ("db",)

    def __init__(self, db: apsw.Connection) -> None:
        self.db = db

    def __enter__(self) -> None:
        self.db.execute("savepoint attempt")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, _ENGINE_ERRORS):
            raise Unavailable(_words(error)) from error
        if not self.db.in_transaction:
            raise TransactionLost(_words(error)) from error
        try:
            if kind is not None:
                self.db.execute("rollback to attempt")
            self.db.execute("release attempt")
        except apsw.Error as fault:
            # What was written inside can't be undone alone, so all of it is.
            _rollback(self.db)
            raise TransactionLost(_words(fault)) from fault


class Job(Generic[T]):
    """Something to do in a transaction.

    When one raises or ends the whole transaction, each job of its batch runs again, in a
    transaction of its own. What it raises there is its result; one that ends that too is done by
    its `keep(tx, why)` instead. So nobody fails a neighbour twice.
    """

    __slots__ = ("alone", "error", "keep", "raised", "result", "run")

    def __init__(self, run: Callable[[Tx], T], keep: Callable[[Tx, str], T] | None = None) -> None:
        self.run = run
        self.keep = keep
        self.alone = False
        #: Its error is its own, and stands.
        self.raised = False
        self.result: T | None = None
        self.error: BaseException | None = None

    def fall_back(self) -> bool:
        """The transaction was lost: choose the next, safer way. False: there is none."""
        if self.raised:
            return False
        if not self.alone:
            self.alone = True
            return True
        if self.keep is None:
            self.error = self.error or TransactionLost("a statement ended the transaction")
            return False
        keep, why = self.keep, _words(self.error)
        self.run, self.keep = (lambda tx: keep(tx, why)), None
        return True


AnyJob = TypeVar("AnyJob", bound=Job[Any])


def next_batch(queue: deque[AnyJob]) -> list[AnyJob]:
    """Take the jobs for the next transaction from the front of a queue that is not empty."""
    batch = [queue.popleft()]
    if not batch[0].alone:
        while queue and len(batch) < BATCH_MAX and not queue[0].alone:
            batch.append(queue.popleft())
    return batch


def put_back(queue: deque[AnyJob], batch: Sequence[AnyJob]) -> list[AnyJob]:
    """After a lost transaction: what may run again goes to the front; returns the rest."""
    lost = []
    for job in reversed(batch):
        if job.fall_back():
            queue.appendleft(job)
        else:
            lost.append(job)
    return lost


class Store:
    """The open file. One thread at a time may use it."""

    def __init__(self, path: Path, clock: Callable[[], int]) -> None:
        # SQLite keeps the -wal and the -shm beside the file itself, not beside a link to it.
        self.path = os.path.realpath(path)
        self.clock = clock
        # Before the file is opened: a restore must not replace it meanwhile.
        self._lock = _lock(path)
        if _has_lost_wal(self.path):
            logger.error(
                "%s-wal is missing: if it was removed, what was acknowledged last is lost; compare "
                "with each sender: `receiver reconcile SOURCE --apply`",
                self.path,
            )
        try:
            self._open()
        except BaseException:
            self._lock.close()
            raise

    @classmethod
    def create(cls, path: Path, clock: Callable[[], int]) -> "Store":
        """Open the file, made (0600) and migrated if need be. Raises StoreError."""
        _refuse_lost(path)
        _make_file(path)
        return cls.open(path, clock)

    @classmethod
    def open(cls, path: Path, clock: Callable[[], int]) -> "Store":
        """Open a file that exists, migrated if need be. Raises StoreError."""
        _check_there(path)
        try:
            store = cls(path, clock)
        except (apsw.Error, OSError) as error:
            raise StoreError(f"{path}: {_why(path, error)}") from error
        try:
            store.upgrade()
        except (apsw.Error, StoreError) as error:
            store.close()
            raise StoreError(f"{path}: {_why(path, error)}") from error
        # Once it is open the writer never waits inside SQLite: it asks again, and answers
        # others meanwhile.
        store.db.set_busy_timeout(0)
        return store

    def _open(self) -> None:
        self.db = apsw.Connection(self.path, flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            _prepare(self.db)
            fence.install(self.db)
            # The -wal is there once something was read through it.
            self.db.execute("select count(*) from sqlite_schema").fetchall()
            # SQLite makes the name of a -wal durable only where it made the file itself: another
            # process's may be lost in a power cut, with all that is answered from here on.
            copies.sync(Path(self.path).parent)
            self._identity = self._on_disk()
        except BaseException:
            self.db.close(True)
            raise
        guard.protect(self.path)

    def close(self) -> None:
        """Close the file; SQLite moves the -wal into it if nobody else has it open."""
        self.db.close(True)
        guard.release(self.path)
        self._lock.close()

    def serve(self) -> bool:
        """Be the server on this file until it is closed; False if another process is."""
        return self._lock.serve()

    def work(self, place: str) -> None:
        """Be a worker on this file until it is closed, `inside` a server or `separate`."""
        self._lock.work(place)

    def empty_wal(self) -> bool:
        """Move the -wal into the file and cut it to nothing; False while readers need it.

        Raises Unavailable where the disk has no room for it.
        """
        deadline = time.monotonic() + EMPTY_S
        # Not for long at a time: meanwhile nobody can write.
        self.db.set_busy_timeout(EMPTY_BUSY_MS)
        try:
            while True:
                busy, *_ = next(self.db.execute("pragma wal_checkpoint(truncate)"))
                if not busy or time.monotonic() > deadline:
                    return not busy
                time.sleep(LOCK_POLL_S)
        except _ENGINE_ERRORS as error:
            raise Unavailable(f"the -wal can't be moved into the file: {_words(error)}") from error
        finally:
            self.db.set_busy_timeout(0)

    def upgrade(self) -> None:
        """Bring the file to our schema version.

        One that has an older version is copied first, and only while nobody else uses it: a
        process of that version would go on with statements that no longer fit. Raises StoreError.
        """
        deadline = time.monotonic() + LOCK_WAIT_S
        while 0 < schema.version(self.db) < len(schema.STEPS):
            self._lock.free()
            if self._lock.alone():
                self._upgrade_alone()
                break
            if time.monotonic() > deadline:
                raise StoreError(
                    "another process still uses it with an older schema version: stop every "
                    "`receiver serve` and `receiver work` on it, then start the new ones"
                )
            time.sleep(LOCK_POLL_S)
        if not self._lock.share():
            raise StoreError(_TAKEN)
        schema.migrate(self.db, self.clock())

    def _upgrade_alone(self) -> None:
        with self.db:
            found = schema.version(self.db)
            if found == len(schema.STEPS):
                return
            target = Path(f"{os.path.realpath(self.path)}.before-version-{found + 1}")
            copies.make(self.db, target, judge=_refuse_damaged)
        logger.warning(
            "%s: from schema version %d to %d; what it was before is in %s",
            *(self.path, found, len(schema.STEPS), target),
        )
        schema.migrate(self.db, self.clock())

    def reopen(self) -> None:
        """After an I/O error: a new connection, and a checkpoint that must succeed.

        The kernel drops pages that it failed to write and reports that once, so what the old
        connection believes to be in the -wal may not be. Raises Unavailable.
        """
        try:
            self.db.close(True)
            self._open()
            self.db.execute("pragma wal_checkpoint(passive)").fetchall()
            self.db.set_busy_timeout(0)
        except (apsw.Error, OSError) as error:
            raise Unavailable(f"the file can't be written: {_words(error)}") from error

    def begin(self) -> Tx | None:
        """Start a transaction, or None while another process holds the lock."""
        try:
            self.db.execute("begin immediate")
        except apsw.BusyError as error:
            if getattr(error, "extendedresult", 0) == apsw.SQLITE_BUSY_SNAPSHOT:
                # A statement that was dropped while another thread used the connection stays open,
                # and with it the state that it read, for ever.
                raise Unavailable("a read was left open in an older state of the file") from error
            return None
        except _ENGINE_ERRORS as error:
            raise Unavailable(_words(error)) from error
        return Tx(self.db, self.clock())

    def run(self, tx: Tx, jobs: Sequence[Job[Any]]) -> bool:
        """Run jobs; False, with everything undone, if one raised or ended the transaction.

        A savepoint for each would let the others stand, but nearly none needs it, and it is two
        statements more for each. Raises Unavailable, with everything undone, when the disk failed.
        """
        try:
            for job in jobs:
                _run_one(tx, job, alone=len(jobs) == 1)
        except TransactionLost:
            _rollback(self.db)
            return False
        except _ENGINE_ERRORS as error:
            _rollback(self.db)
            raise Unavailable(_words(error)) from error
        except BaseException:
            # An open transaction would lock everybody out.
            _rollback(self.db)
            raise
        return True

    def commit(self) -> bool:
        """Make it durable. False if a constraint that is checked last refused it.

        Raises Unavailable if it failed, and Replaced if it went into a file that is no longer
        the one on disk; either way nothing may be acknowledged.
        """
        try:
            self.db.execute("commit")
        except apsw.ConstraintError:
            _rollback(self.db)
            return False
        except apsw.Error as error:
            _rollback(self.db)
            raise Unavailable(_words(error)) from error
        self.check_identity()
        return True

    def check_identity(self) -> None:
        """Raises Replaced unless the file, -wal and -shm we use are the ones on disk."""
        if self._on_disk() != self._identity:
            then = "start again" if exists(Path(self.path)) else "`receiver restore` a backup"
            raise Replaced(
                f"{self.path}, its -wal or its -shm was deleted or replaced while it was open: "
                "what is written now would not be in the file on disk. Stop what did it, then "
                f"{then}"
            )

    def begin_waiting(self) -> Tx:
        """Start a transaction, asking for the lock every millisecond. Raises Unavailable."""
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            tx = self.begin()
            if tx is not None:
                return tx
            if time.monotonic() > deadline:
                raise Unavailable(f"{self.path}: another process holds the write lock")
            time.sleep(LOCK_POLL_S)

    def write(self, run: Callable[[Tx], T]) -> T:
        """Run one job now and return its result, committed. For the command line."""
        job = Job(run)
        self.write_all([job])
        if job.error is not None:
            raise job.error
        return job.result  # type: ignore[return-value]  # run's own result, None included

    def write_all(self, jobs: Sequence[Job[Any]]) -> None:
        """Run jobs now, in as few transactions as may be; each keeps its result or error."""
        queue = deque(jobs)
        while queue:
            batch = next_batch(queue)
            if not (self.run(self.begin_waiting(), batch) and self.commit()):
                put_back(queue, batch)

    def rehearse(self, run: Callable[[Tx], T]) -> T:
        """Run a job now, and undo all of it. Raises what it raised, or Unavailable."""
        tx = self.begin_waiting()
        try:
            return run(tx)
        except _ENGINE_ERRORS as error:
            raise Unavailable(_words(error)) from error
        finally:
            _rollback(self.db)

    def look(self, see: Callable[[Snapshot, int], T]) -> T | None:
        """What `see` finds now (UTC milliseconds), or None while the file can't be read."""
        try:
            return see(Snapshot(self.db), self.clock())
        except (apsw.BusyError, *_ENGINE_ERRORS):
            return None

    def _on_disk(self) -> tuple[tuple[int, int], ...]:
        # stat opens nothing: closing a descriptor of these files would drop SQLite's locks.
        # The -shm too: with one of their own, others would not see us, nor we them.
        try:
            found = [os.stat(self.path + suffix) for suffix in ("", "-wal", "-shm")]
        except FileNotFoundError:
            return ()
        return tuple((one.st_dev, one.st_ino) for one in found)


@contextlib.contextmanager
def snapshot(path: Path, *, ours: bool = True, older: bool = False) -> Iterator[Snapshot]:
    """One consistent state of the file, read on a connection of its own.

    Never waits for the writer. Raises StoreError if the file is missing, newer, older unless
    that is allowed, or, unless it need not be `ours` yet, without our tables.
    """
    _check_there(path)
    try:
        db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    except apsw.Error as error:
        raise StoreError(f"{path}: {_why(path, error)}") from error
    try:
        db.set_busy_timeout(READ_WAIT_MS)
        db.execute("pragma query_only = on")
        db.execute("begin")
        found = schema.version(db)
        schema.refuse_newer(found)
        if found == 0 and ours:
            raise StoreError(f"{path}: has no Receiver tables yet; `receiver serve` makes them")
        if 0 < found < len(schema.STEPS) and not older:
            raise StoreError(
                f"{path}: has schema version {found}, this Receiver's is {len(schema.STEPS)}: "
                "restart the server, which upgrades it"
            )
        yield Snapshot(db)
    except (apsw.BusyError, apsw.LockedError) as error:
        # Never in WAL mode, but while the file is replaced, or by an app that keeps it to itself.
        raise StoreError(
            f"{path}: another program has it to itself (see `fuser {path}`): try again, or stop it"
        ) from error
    except _ENGINE_ERRORS as error:
        raise StoreError(f"{path}: {_why(path, error)}") from error
    finally:
        db.close(True)


def exists(path: Path) -> bool:
    """Whether the file is there; what may not be looked at is, and opening it says why not."""
    try:
        path.stat()
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def sqlite_version() -> str:
    """The version of SQLite that is used, as in `3.51.3`."""
    return apsw.sqlite_lib_version()


def _run_one(tx: Tx, job: Job[Any], alone: bool) -> None:
    job.result = job.error = None
    try:
        job.result = job.run(tx)
    except (*_ENGINE_ERRORS, Unavailable):
        raise
    except BaseException as error:
        # The one place where any error of a job is caught: it is the job's alone.
        job.error = error
        job.raised = alone and tx.is_open
        raise TransactionLost(_words(error)) from error
    if not tx.is_open:
        raise TransactionLost("a statement ended the transaction")


def _rollback(db: apsw.Connection) -> None:
    if db.in_transaction:
        with contextlib.suppress(apsw.Error):
            db.execute("rollback")


def _prepare(db: apsw.Connection) -> None:
    db.set_busy_timeout(int(LOCK_WAIT_S * 1000))
    # FULL, not NORMAL, which loses acknowledged events. EXTRA syncs the folder after a rollback
    # journal was deleted, as in the switch to WAL, and `_open` does that in any case.
    # https://www.sqlite.org/pragma.html#pragma_synchronous
    db.execute("pragma synchronous = full")
    mode = _retry_busy(lambda: db.execute("pragma journal_mode = wal").get)
    if mode != "wal":
        raise StoreError(
            f"the file can't be put in WAL mode (it is {mode}): is it on a network file system?"
        )
    # The founder's own tables may declare foreign keys; an effect must not break them.
    db.execute("pragma foreign_keys = on")
    db.execute("pragma temp_store = memory")
    # On each connection that writes: a row that grows, or a page that is split, leaves behind
    # what stood there, and whoever deletes the row later does not reach that any more.
    # https://www.sqlite.org/pragma.html#pragma_secure_delete
    db.execute("pragma secure_delete = on")
    # Else SQLite plans anew whenever a parameter changes that it once looked at: many times the
    # cost of the statements that run after each commit. sqlite3_db_config(3)
    db.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    db.execute(f"pragma wal_autocheckpoint = {CHECKPOINT_PAGES}")
    db.execute(f"pragma journal_size_limit = {WAL_BYTES_KEPT}")


def _retry_busy(ask: Callable[[], T]) -> T:
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            return ask()
        except apsw.BusyError:
            if time.monotonic() > deadline:
                raise
            time.sleep(LOCK_POLL_S)


_TAKEN = "is being restored or upgraded by another process: try again when that is done"


def _lock(path: Path) -> Lock:
    try:
        if path.is_dir():
            raise StoreError(f"{path}: is a folder; name a file")
        lock = Lock(path)
    except OSError as error:
        told = _not_permitted(path)
        what = f"{path}: {told}" if told else f"{path_of(path)}: can't be used: {error.strerror}"
        raise StoreError(what) from error
    deadline = time.monotonic() + LOCK_WAIT_S
    while not lock.share():
        if time.monotonic() > deadline:
            lock.close()
            raise StoreError(f"{path}: {_TAKEN}")
        time.sleep(LOCK_POLL_S)
    return lock


def _refuse_damaged(part: Path) -> None:
    found = copies.damage(part)
    if found:
        raise StoreError(f"is damaged, and not upgraded: {found[0]}; `receiver restore` a backup")


def _refuse_lost(path: Path) -> None:
    # The lock is made after the file and never removed. An empty file in place of a lost one
    # would take everything for new, and grant it again.
    if exists(path_of(path)) and not exists(path):
        raise StoreError(
            f"{path}: is gone, and {path_of(path)} says that it was there: `receiver restore` a "
            "backup, or remove that too to begin with an empty file"
        )


def _has_lost_wal(path: str) -> bool:
    # Whoever closes the file last removes the -shm before the -wal (sqlite3WalClose in wal.c), and
    # whoever opens it makes the -wal first; both may happen between these looks.
    wal, shm = Path(f"{path}-wal"), Path(f"{path}-shm")
    return not exists(wal) and exists(shm) and not exists(wal)


def _make_file(path: Path) -> None:
    try:
        if not path.is_file():
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            if not path.is_file():
                raise StoreError(f"{path}: is not a file")
        if not exists(path_of(path)):
            # The name must be there after a power cut where the lock's is, which is made next.
            copies.sync(path.parent)
    except OSError as error:
        why = f"is {path.parent} a folder that this user may write to? ({error.strerror})"
        raise StoreError(f"{path}: can't be made; {why}") from error


def _check_there(path: Path) -> None:
    _refuse_lost(path)
    if not exists(path):
        raise StoreError(f"{path}: there is no such file yet; `receiver serve` makes it")


def _why(path: Path, error: Exception) -> str:
    """Why the file can't be used: what the file system says, where SQLite only says that."""
    told = isinstance(error, apsw.CantOpenError | apsw.ReadOnlyError) and _not_permitted(path)
    return told or _words(error)


def _not_permitted(path: Path) -> str | None:
    user = _user(os.geteuid())
    try:
        status = path.stat()
    except PermissionError:
        return f"{user} may not look into its folder; run this as the user whose file it is"
    if stat.S_ISDIR(status.st_mode):
        return "is a folder; name a file"
    # SQLite makes and removes the -wal and the -shm beside it.
    around = [(Path(f"{path}{suffix}"), os.R_OK | os.W_OK) for suffix in ("", "-wal", "-shm")]
    around.append((path.parent, os.W_OK | os.X_OK))
    for place, access in around:
        if place.exists() and not os.access(place, access, effective_ids=True):
            owner = _user(status.st_uid)
            what = "it" if place == path else str(place)
            return f"belongs to {owner}, and {user} may not write to {what}; run this as {owner}"
    return None


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"uid {number}"


def _words(error: BaseException | None) -> str:
    return str(error).removeprefix("Error: ")[:500] if error else "unknown"
