"""Keeps every other descriptor of the database out of this process.

POSIX locks belong to a process, not to a descriptor: closing any descriptor of the file, its
-wal or its -shm drops SQLite's locks on it. The next process to close the file then takes
itself for the last one and deletes the live -wal, with all that was acknowledged in it.
https://www.sqlite.org/howtocorrupt.html (2.2)
"""

import os
import sys
from urllib.parse import unquote, urlsplit

_protected: dict[str, tuple[int, int]] = {}
_installed = False


def protect(path: str) -> None:
    """Refuse from now on that this process opens `path`, its -wal or its -shm except by SQLite.

    The file must exist. A refused open raises PermissionError.
    """
    global _installed
    real = os.path.realpath(path)
    status = os.stat(real)
    for suffix in ("", "-wal", "-shm"):
        _protected[real + suffix] = (status.st_dev, status.st_ino)
    if not _installed:
        sys.addaudithook(_refuse)
        _installed = True


def release(path: str) -> None:
    """The database was closed: its files may be opened by other means again."""
    real = os.path.realpath(path)
    for suffix in ("", "-wal", "-shm"):
        _protected.pop(real + suffix, None)


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if event not in ("open", "sqlite3.connect") or not _protected:
        return
    target = arguments[0]
    if isinstance(target, (str, bytes, os.PathLike)) and _is_protected(os.fsdecode(target)):
        raise PermissionError(
            "opening the database inside the server would drop its locks: "
            "use tx.sql in a handler, or another process"
        )


def _is_protected(target: str) -> bool:
    if target.startswith("file:"):
        target = unquote(urlsplit(target).path)
    if os.path.realpath(target) in _protected:
        return True
    try:
        status = os.stat(target)
    except (OSError, ValueError):
        return False
    # By inode too: a hard link reaches the same file by another name.
    return (status.st_dev, status.st_ino) in _protected.values()
