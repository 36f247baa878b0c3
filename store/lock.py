"""Says which processes use a database, so that none replaces or upgrades it under another.

SQLite's own locks end with each transaction, and know nothing of the file's name. These are on
a file of their own beside it, and the kernel drops them with the process that held them.
"""

import contextlib
import fcntl
import os
import struct
from collections.abc import Mapping
from pathlib import Path

#: One byte for each thing that is held: the file is in use; a server runs on it; a worker does,
#: in the server or apart.
_IN_USE, _SERVING = 0, 1
_WORKING: Mapping[str, int] = {"inside": 2, "separate": 3}

#: struct flock of fcntl(2): type, whence, start, length, pid. The pid must be 0.
_FLOCK = "hhqqi4x"


def path_of(database: str | Path) -> Path:
    """The file that the locks are on; it is never removed."""
    return Path(f"{os.path.realpath(database)}-lock")


class Lock:
    """What this process holds of a database; nothing at first. Raises OSError."""

    def __init__(self, database: str | Path) -> None:
        mode = _mode(database)
        self._descriptor = os.open(path_of(database), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
        # Whoever may write to the database may hold its lock, whatever the umask says.
        with contextlib.suppress(PermissionError):
            os.fchmod(self._descriptor, mode)

    def share(self) -> bool:
        """Use the file together with others; False while another has it for itself alone."""
        return self._take(_IN_USE, fcntl.F_RDLCK)

    def alone(self) -> bool:
        """Have the file for ourselves; False while others use it."""
        return self._take(_IN_USE, fcntl.F_WRLCK)

    def free(self) -> None:
        """Neither."""
        self._take(_IN_USE, fcntl.F_UNLCK)

    def serve(self) -> bool:
        """Be the server on the file, until the process ends; False if another process is."""
        return self._take(_SERVING, fcntl.F_WRLCK)

    def work(self, place: str) -> None:
        """Be a worker on the file, `inside` a server or `separate`, until the process ends."""
        # Beside others: nobody ever holds it alone.
        self._take(_WORKING[place], fcntl.F_RDLCK)

    def close(self) -> None:
        """Let go of everything; again does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _take(self, place: int, kind: int) -> bool:
        # Open file description locks: those of the process would end when any descriptor does.
        wanted = struct.pack(_FLOCK, kind, os.SEEK_SET, place, 1, 0)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, wanted)
        except BlockingIOError:
            return False
        return True


def _mode(database: str | Path) -> int:
    try:
        return os.stat(database).st_mode & 0o666
    except FileNotFoundError:
        return 0o600


def is_served(database: str | Path) -> bool | None:
    """Whether a server runs on the file; None where this user may not know."""
    return _is_held(database, _SERVING)


def workers(database: str | Path) -> tuple[str, ...] | None:
    """Where workers run on the file: `inside` a server, `separate`; None as above."""
    held = {place: _is_held(database, byte) for place, byte in _WORKING.items()}
    if None in held.values():
        return None
    return tuple(place for place, is_held in held.items() if is_held)


def _is_held(database: str | Path, place: int) -> bool | None:
    try:
        # Asking takes nothing, and needs no right to write.
        descriptor = os.open(path_of(database), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        # Nobody has ever opened it for writing.
        return False
    except OSError:
        return None
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
    finally:
        os.close(descriptor)
    kind: int = struct.unpack(_FLOCK, answer)[0]
    return kind != fcntl.F_UNLCK
