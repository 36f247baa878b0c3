"""A disk that forgets: every storage call of a run, and what a power cut may leave of them.

A run goes through `watched`, which writes down each call that changes the disk. From those calls
alone `Disk` then tells what may be on the platters if the power fails right after any of them:
what was synced is there, of everything else any part may be, down to single sectors.
"""

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import pytest

#: What a disk writes whole or not at all, in bytes.
SECTOR_BYTES = 512

#: The files of which SQLite syncs the folder when it first syncs the file: os_unix.c, DIRSYNC.
_WITH_FOLDER = apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL

#: What becomes of calls that were not synced: torn is by sectors, reordered is by whole calls.
KINDS = ("nothing", "everything", "torn", "reordered")


class Write(NamedTuple):
    inode: int
    offset: int
    data: bytes


class Truncate(NamedTuple):
    inode: int
    size: int


class Sync(NamedTuple):
    inode: int


class FailedSync(NamedTuple):
    """It was reported once, and the kernel has let go of the pages as if they were written."""

    inode: int


class Name(NamedTuple):
    """A name stands for this file from now on; None: for nothing."""

    path: str
    inode: int | None
    #: The name that it had before, which goes in the same step.
    instead_of: str | None = None


class SyncFolder(NamedTuple):
    path: str


Call = Write | Truncate | Sync | FailedSync | Name | SyncFolder

#: A folder is a file without content.
_FOLDER = -1


class Recording:
    """The calls of a run, in order, and what it said in between."""

    def __init__(self, root: Path) -> None:
        self.root = os.path.realpath(root)
        self.calls: list[Call] = []
        #: What was told to the outside, and after how many calls.
        self.told: list[tuple[int, Any]] = []
        #: Whether the next sync of the file with this path is to fail.
        self.fails: Callable[[str], bool] = lambda path: False
        #: Asked before each call that can fail, whether SQLite makes it (True) or Python; raises
        #: for it to fail. Not before those that only let go, nor before what SQLite does with the
        #: -shm, which apsw shows to nobody.
        self.before: Callable[[bool], None] = lambda by_sqlite: None
        self._names: dict[str, int] = {}
        self._content: dict[int, bytes] = {}
        self._inodes = 0

    def tell(self, what: Any) -> None:
        """The outside heard of this: it may not be forgotten."""
        self.told.append((len(self.calls), what))

    def told_by(self, cut: int) -> list[Any]:
        """What was told before the power went after call `cut`."""
        return [what for at, what in self.told if at <= cut]

    def is_ours(self, path: str) -> bool:
        return (os.path.realpath(path) + "/").startswith(self.root + "/")

    def inode(self, path: str) -> int | None:
        return self._names.get(os.path.realpath(path))

    def create(self, path: str) -> int:
        """The file of this name, made if there is none."""
        known = self.inode(path)
        if known is not None:
            return known
        self._inodes += 1
        self._name(path, _FOLDER if os.path.isdir(path) else self._inodes)
        return self._inodes

    def remove(self, path: str) -> None:
        self._names.pop(os.path.realpath(path), None)
        self.calls.append(Name(self._relative(path), None))

    def rename(self, old: str, new: str) -> None:
        inode = self._names.pop(os.path.realpath(old), None)
        if inode is None:
            return
        self._names[os.path.realpath(new)] = inode
        self.calls.append(Name(self._relative(new), inode, self._relative(old)))

    def link(self, old: str, new: str) -> None:
        inode = self.inode(old)
        assert inode is not None, "only what is there is linked"
        self._name(new, inode)

    def sync(self, path: str) -> None:
        """What fsync(2) does to whatever this is."""
        if os.path.isdir(path):
            self.calls.append(SyncFolder(self._relative(path)))
            return
        inode = self.inode(path)
        if inode is None:
            return
        content = self._written_elsewhere(path, inode)
        if content is not None:
            self.calls += [Truncate(inode, 0), Write(inode, 0, content)]
        self.calls.append(Sync(inode))

    def write(self, inode: int, offset: int, data: bytes) -> None:
        self._content.pop(inode, None)
        self.calls.append(Write(inode, offset, data))

    def _written_elsewhere(self, path: str, inode: int) -> bytes | None:
        """What Python itself has written: nobody sees those calls, so the sync tells of them."""
        by_sqlite = any(isinstance(call, Write) and call.inode == inode for call in self.calls)
        if by_sqlite and inode not in self._content:
            return None
        content = Path(path).read_bytes()
        if self._content.get(inode, b"") == content:
            return None
        self._content[inode] = content
        return content

    def _name(self, path: str, inode: int) -> None:
        self._names[os.path.realpath(path)] = inode
        self.calls.append(Name(self._relative(path), inode))

    def _relative(self, path: str) -> str:
        return os.path.relpath(os.path.realpath(path), self.root)


class _File(apsw.VFSFile):
    def __init__(self, recording: Recording, name: Any, flags: list[int]) -> None:
        self._recording = recording
        self.path = name.filename() if isinstance(name, apsw.URIFilename) else name
        new = recording.inode(self.path) is None
        recording.before(True)
        super().__init__("unix", name, flags)
        self._with_folder = new and bool(flags[0] & _WITH_FOLDER)
        self._inode = recording.create(self.path)

    # apsw gives the names.
    def xRead(self, amount: int, offset: int) -> bytes:
        self._recording.before(True)
        return super().xRead(amount, offset)

    def xFileSize(self) -> int:
        self._recording.before(True)
        return super().xFileSize()

    def xLock(self, level: int) -> None:
        self._recording.before(True)
        super().xLock(level)

    def xWrite(self, data: Any, offset: int) -> None:
        self._recording.before(True)
        super().xWrite(data, offset)
        self._recording.write(self._inode, offset, bytes(data))

    def xTruncate(self, newsize: int) -> None:
        self._recording.before(True)
        super().xTruncate(newsize)
        self._recording.calls.append(Truncate(self._inode, newsize))

    def xSync(self, flags: int) -> None:
        self._recording.before(True)
        if self._recording.fails(self.path):
            self._recording.calls.append(FailedSync(self._inode))
            return tell_failure()
        super().xSync(flags)
        self._recording.calls.append(Sync(self._inode))
        if self._with_folder:
            self._with_folder = False
            self._recording.sync(os.path.dirname(self.path))


def tell_failure() -> None:
    """What fsync(2) tells of a failure."""
    error = apsw.IOError("the disk failed")
    error.extendedresult = apsw.SQLITE_IOERR_FSYNC  # type: ignore[attr-defined]  # apsw reads it
    raise error


class _Vfs(apsw.VFS):
    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        super().__init__("recording", "unix", makedefault=True)

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        if path is None or not self._recording.is_ours(path):
            return apsw.VFSFile("unix", name, flags)
        return _File(self._recording, name, flags)

    def xAccess(self, pathname: str, flags: int) -> bool:
        if self._recording.is_ours(pathname):
            self._recording.before(True)
        return super().xAccess(pathname, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        if self._recording.is_ours(filename):
            self._recording.before(True)
        super().xDelete(filename, syncdir)
        if self._recording.is_ours(filename):
            self._recording.remove(filename)
            if syncdir:
                self._recording.sync(os.path.dirname(filename))


class _Connection(apsw.Connection):
    def close(self, force: bool = False) -> None:
        # What fails then SQLite tells nobody, but apsw would; the file is closed all the same.
        with contextlib.suppress(apsw.IOError, apsw.FullError):
            super().close(force)


@contextlib.contextmanager
def watched(root: Path) -> Iterator[Recording]:
    """Write down what happens in this folder, whether SQLite does it or Python."""
    recording = Recording(root)
    vfs = _Vfs(recording)
    with pytest.MonkeyPatch.context() as patch:
        _watch_python(recording, patch)
        patch.setattr(apsw, "Connection", _Connection)
        try:
            yield recording
        finally:
            apsw.set_default_vfs("unix")
            vfs.unregister()


def _watch_python(recording: Recording, patch: pytest.MonkeyPatch) -> None:
    for name, note in (
        ("open", _opened),
        ("mkdir", lambda recording, path, *_: recording.create(path)),
        ("unlink", lambda recording, path: recording.remove(path)),
        ("rename", Recording.rename),
        ("replace", Recording.rename),
        ("link", Recording.link),
        ("fsync", Recording.sync),
    ):
        patch.setattr(os, name, _noting(recording, getattr(os, name), note))


def _opened(recording: Recording, path: str, flags: int, *_: object) -> None:
    if flags & os.O_CREAT:
        recording.create(path)


def _noting(
    recording: Recording, original: Callable[..., Any], note: Callable[..., object]
) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        told = [os.fspath(one) if isinstance(one, Path) else one for one in arguments]
        if original.__name__ == "fsync":
            told = [os.readlink(f"/proc/self/fd/{arguments[0]}")]
        ours = isinstance(told[0], str) and recording.is_ours(told[0])
        if ours:
            recording.before(False)
        result = original(*arguments, **options)
        if ours:
            note(recording, *told)
        return result

    return call


class Disk:
    """What is on the platters after the first calls of a recording, and what is on its way."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._files: dict[int, bytes] = {}
        self._names_pending: list[Name] = []
        self._pending: dict[int, list[Write | Truncate]] = {}

    def take(self, call: Call) -> None:
        """The next call has been made."""
        match call:
            case Write() | Truncate():
                self._pending.setdefault(call.inode, []).append(call)
            case Sync():
                self._files[call.inode] = _all_applied(
                    self._files.get(call.inode, b""), self._pending.pop(call.inode, [])
                )
            case FailedSync():
                left = [one for one in self._pending.get(call.inode, []) if _is_cut(one)]
                self._pending[call.inode] = left
            case Name():
                self._names_pending.append(call)
            case SyncFolder():
                durable = [one for one in self._names_pending if _folder(one.path) == call.path]
                _apply_names(self._names, durable)
                self._names_pending = [one for one in self._names_pending if one not in durable]

    def after_cut(self, kind: str, chance: random.Random) -> dict[str, bytes | None]:
        """What is found when the power comes back, by path; None: a folder."""
        names = dict(self._names)
        _apply_names(names, _survivors(self._names_pending, kind, chance))
        contents: dict[int, bytes] = {}
        for inode in sorted(set(names.values())):
            contents[inode] = self._content_after_cut(inode, kind, chance)
        return {
            path: None if inode == _FOLDER else contents[inode]
            for path, inode in names.items()
            if _folder(path) == "." or names.get(_folder(path)) == _FOLDER
        }

    def _content_after_cut(self, inode: int, kind: str, chance: random.Random) -> bytes:
        durable, pending = self._files.get(inode, b""), self._pending.get(inode, [])
        if kind == "nothing":
            return durable
        if kind == "everything":
            return _all_applied(durable, pending)
        content = bytearray(durable)
        keep = chance.random()
        for call in pending:
            if isinstance(call, Write):
                _put_some(content, call, kind, keep, chance)
            elif chance.random() < keep:
                _truncate(content, call.size)
        return bytes(content)


def restored(found: dict[str, bytes | None], folder: Path) -> None:
    """Put what a cut has left into a folder that is empty."""
    for path in sorted(found):
        content = found[path]
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)


def _survivors(pending: list[Name], kind: str, chance: random.Random) -> list[Name]:
    match kind:
        case "nothing":
            return []
        case "everything":
            return pending
        case "torn":
            # A journal of the file system's: in order, up to some point.
            return pending[: chance.randint(0, len(pending))]
        case _:
            return [one for one in pending if chance.random() < 0.5]


def _apply_names(names: dict[str, int], changes: list[Name]) -> None:
    for path, inode, instead_of in changes:
        if instead_of is not None:
            names.pop(instead_of, None)
        if inode is None:
            names.pop(path, None)
        else:
            names[path] = inode


def _all_applied(durable: bytes, pending: list[Write | Truncate]) -> bytes:
    content = bytearray(durable)
    for call in pending:
        if isinstance(call, Truncate):
            _truncate(content, call.size)
        else:
            _put(content, call.offset, call.data)
    return bytes(content)


def _is_cut(call: Write | Truncate) -> bool:
    return isinstance(call, Truncate)


def _put_some(
    content: bytearray, write: Write, kind: str, keep: float, chance: random.Random
) -> None:
    for at, piece in _sectors(write) if kind == "torn" else [(write.offset, write.data)]:
        if chance.random() < keep:
            _put(content, at, piece)
        elif chance.random() < keep:
            # The file has its new length already, and the block is empty.
            _put(content, len(content), bytes(max(0, at + len(piece) - len(content))))


def _sectors(write: Write) -> Iterator[tuple[int, bytes]]:
    start, end = write.offset, write.offset + len(write.data)
    while start < end:
        until = min(end, (start // SECTOR_BYTES + 1) * SECTOR_BYTES)
        yield start, write.data[start - write.offset : until - write.offset]
        start = until


def _put(content: bytearray, at: int, piece: bytes) -> None:
    if len(content) < at:
        content.extend(bytes(at - len(content)))
    content[at : at + len(piece)] = piece


def _truncate(content: bytearray, size: int) -> None:
    if size < len(content):
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))


def _folder(path: str) -> str:
    return os.path.dirname(path) or "."
