"""Makes a copy of the file while others write to it, and tells whether a copy is whole."""

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import apsw

from store.errors import StoreError

#: Pages of 4 KiB copied between two looks at the progress.
STEP_PAGES = 256

#: How long another copy to the same folder is waited for, in seconds, and how often it is asked.
TURN_S, TURN_POLL_S = 600.0, 0.05

#: Bytes read at a time.
CHUNK_BYTES = 1_048_576

#: Faults of a copy that are told, at most.
FAULTS_MAX = 10

#: What the file with a copy's checksum is called, as sha256sum(1) reads it.
CHECKSUM_SUFFIX = ".sha256"

#: Where SQLite's header has the size of a page and the number of pages; and its length.
#: https://www.sqlite.org/fileformat2.html#the_database_header
_PAGE_SIZE, _PAGES, _HEADER_BYTES = slice(16, 18), slice(28, 32), 100
_MAGIC = b"SQLite format 3\0"


class Copy(NamedTuple):
    """A copy that is on the disk, under its final name and durable."""

    path: Path
    bytes: int


def pages(db: apsw.Connection) -> int:
    """How many pages a copy of this connection's file has."""
    found = db.execute("pragma page_count").get
    assert isinstance(found, int), "the pragma gives a number"
    return found


def make(
    db: apsw.Connection,
    target: Path,
    *,
    judge: Callable[[Path], None] = lambda part: None,
    advance: Callable[[int], None] = lambda count: None,
) -> Copy:
    """Copy what `db` sees to `target`, mode 0600, with its checksum beside it.

    `db` must be in a read transaction: otherwise each commit by another process makes SQLite
    begin anew, and under load it never ends. `advance` is told of the pages that were copied.
    `judge` looks at the whole copy before it gets its name, and raises to refuse it. The name
    stands for a whole copy or for nothing, also after a power cut. Raises StoreError, with
    nothing left unless that can't be removed now either.
    """
    assert db.in_transaction, "a copy is of one moment"
    part = part_path(target)
    try:
        _copy(db, part, advance)
        judge(part)
        size = part.stat().st_size
        _write_checksum(target, checksum(part))
        _rename(part, target)
    except (apsw.Error, OSError) as error:
        raise StoreError(f"{target}: can't be written: {_words(error)}") from error
    finally:
        # What can't be removed now either is removed before the next copy.
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    return Copy(target, size)


def damage(path: Path, *, named: Path | None = None) -> list[str]:
    """Why a copy is no whole database, in words; nothing if it is whole. Reads all of it.

    `named` is the name that its checksum goes by, if it has another one yet.
    """
    try:
        return _cut_off(path) or _altered(path, named or path) or _broken(path)
    except OSError as error:
        return [f"can't be read: {error.strerror}"]


@contextlib.contextmanager
def opened(path: Path) -> Iterator[apsw.Connection]:
    """A copy that nobody writes to, for reading; no file is made beside it. Raises StoreError."""
    try:
        db = apsw.Connection(
            f"file:{quote(str(path))}?immutable=1",
            flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI,
        )
    except apsw.Error as error:
        raise StoreError(f"{path}: {_words(error)}") from error
    try:
        db.execute("begin")
        yield db
    except (apsw.CorruptError, apsw.NotADBError, apsw.IOError) as error:
        raise StoreError(f"{path}: is damaged: {_words(error)}") from error
    finally:
        db.close(True)


@contextlib.contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Be the only one who makes copies in a folder; waits for another. Raises StoreError.

    The kernel ends it with the process: whatever is half written there then is nobody's.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(f"{folder}: can't be written: {error.strerror}") from error
    try:
        deadline = time.monotonic() + TURN_S
        while not _locked(descriptor):
            if time.monotonic() > deadline:
                raise StoreError(f"{folder}: another backup is made there all the time")
            time.sleep(TURN_POLL_S)
        yield
    finally:
        os.close(descriptor)


def part_path(target: Path) -> Path:
    """What a copy is called until it is whole."""
    return target.with_name(f".{target.name}.part")


def checksum_path(path: Path) -> Path:
    """Where the checksum of a copy is."""
    return path.with_name(path.name + CHECKSUM_SUFFIX)


def checksum(path: Path) -> str:
    """The SHA-256 of a file that is no open database, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create(path: Path) -> None:
    """An empty file that only its owner may read, in place of whatever was there."""
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def remove(path: Path) -> None:
    """A copy and its checksum."""
    path.unlink(missing_ok=True)
    checksum_path(path).unlink(missing_ok=True)


def _locked(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # There are file systems that lock no folder: as well as it goes.
        return True
    return True


def _copy(db: apsw.Connection, part: Path, advance: Callable[[int], None]) -> None:
    create(part)
    with contextlib.closing(apsw.Connection(str(part))) as target:
        # It is thrown away unless all of it was written and made durable at the end.
        target.execute("pragma journal_mode = off")
        target.execute("pragma synchronous = off")
        with target.backup("main", db, "main") as copying:
            left = pages(db)
            while not copying.done:
                copying.step(STEP_PAGES)
                advance(left - copying.remaining)
                left = copying.remaining
    sync(part)


def _write_checksum(target: Path, digest: str) -> None:
    path = checksum_path(target)
    part = part_path(path)
    create(part)
    part.write_text(f"{digest}  {target.name}\n")
    # Before the copy gets its name: one without a checksum could be cut off unnoticed.
    _rename(part, path)


def _rename(part: Path, target: Path) -> None:
    sync(part)
    part.replace(target)
    try:
        sync(target.parent)
    except OSError:
        # It may be gone after a power cut, and whoever hears of that makes it anew.
        with contextlib.suppress(OSError):
            target.unlink()
        raise


def _cut_off(path: Path) -> list[str]:
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
        size = os.fstat(file.fileno()).st_size
    if len(header) < _HEADER_BYTES or not header.startswith(_MAGIC):
        return ["is no SQLite database, or only its beginning"]
    # 1 stands for 65536, which does not fit.
    page = int.from_bytes(header[_PAGE_SIZE], "big") or 1
    wanted = int.from_bytes(header[_PAGES], "big") * (65_536 if page == 1 else page)
    if size != wanted:
        return [f"has {size} bytes, and its header says {wanted}: it was cut off, or grew"]
    return []


def _altered(path: Path, named: Path) -> list[str]:
    beside = checksum_path(named)
    if not beside.exists():
        return []
    said = beside.read_text(errors="replace").split(maxsplit=1)
    if said[:1] == [checksum(path)]:
        return []
    return [f"is not what was written: its checksum is not the one in {beside}"]


def _broken(path: Path) -> list[str]:
    try:
        with opened(path) as db:
            # https://www.sqlite.org/pragma.html#pragma_integrity_check
            rows = db.execute(f"pragma integrity_check({FAULTS_MAX})").fetchall()
    except (apsw.Error, StoreError) as error:
        return [str(error).removeprefix(f"{path}: ")]
    return [str(fault) for (fault,) in rows if fault != "ok"]


def _words(error: Exception) -> str:
    if isinstance(error, apsw.FullError):
        # In a copy under way SQLite itself has no words for it.
        return "the disk is full"
    return getattr(error, "strerror", None) or str(error).removeprefix("Error: ")[:500]
