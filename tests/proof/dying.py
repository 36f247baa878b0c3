"""Loaded into a process of ours: kills it at a named place in its code or its storage."""

import functools
import importlib
import inspect
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import apsw

#: apsw forgets a VFS that nobody holds.
_kept: list[apsw.VFS] = []


def die(armed: Path, steps: Sequence[str], when: str, times: int = 1) -> None:
    """End as by `kill -9` once each of these calls was made, in order, after `armed` is there.

    A step is `module:name` or `module:Class.name`. `when` is before or after the last of them,
    the `times`th time.
    """
    if any(step.startswith(f"{__name__}:") for step in steps):
        _kept.append(_Vfs())
    reached: list[str] = []

    def reach(step: str, at: str) -> None:
        number = len(reached)
        last = len(steps) + times - 2
        wanted = steps[min(number, len(steps) - 1)]
        if step != wanted or at != (when if number >= len(steps) - 1 else "after"):
            return
        if not armed.exists():
            return
        if number == last:
            os.kill(os.getpid(), signal.SIGKILL)
        reached.append(step)

    for step in dict.fromkeys(steps):
        _watch(step, reach)


def move_clock(seconds: int) -> None:
    """Let the machine's clock be ahead by so much."""
    seconds_now, ns_now = time.time, time.time_ns
    time.time = lambda: seconds_now() + seconds
    time.time_ns = lambda: ns_now() + seconds * 1_000_000_000


def follow_clock(file: str) -> None:
    """Let the machine's clock be ahead by the seconds that a file says, which may change."""
    seconds_now, ns_now = time.time, time.time_ns

    def ahead_s() -> int:
        return int(Path(file).read_text() or 0)

    time.time = lambda: seconds_now() + ahead_s()
    time.time_ns = lambda: ns_now() + ahead_s() * 1_000_000_000


def _watch(step: str, reach: Callable[[str, str], None]) -> None:
    module, _, name = step.partition(":")
    *path, last = name.split(".")
    owner: Any = importlib.import_module(module)
    for one in path:
        owner = getattr(owner, one)
    setattr(owner, last, _watched(getattr(owner, last), step, reach))


def _watched(original: Any, step: str, reach: Callable[[str, str], None]) -> Any:
    if inspect.iscoroutinefunction(original):

        async def call_later(*arguments: Any, **options: Any) -> Any:
            reach(step, "before")
            result = await original(*arguments, **options)
            reach(step, "after")
            return result

        return call_later

    @functools.wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        reach(step, "before")
        result = original(*arguments, **options)
        reach(step, "after")
        return result

    return call


# Places in SQLite's storage, by the file.


def wrote_wal() -> None: ...
def synced_wal() -> None: ...
def wrote_file() -> None: ...
def synced_file() -> None: ...


class _Vfs(apsw.VFS):
    def __init__(self) -> None:
        super().__init__("dying", "unix", makedefault=True)

    # apsw gives the names.
    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        return _File("unix", name, flags)


class _File(apsw.VFSFile):
    def __init__(self, vfs: str, name: Any, flags: list[int]) -> None:
        super().__init__(vfs, name, flags)
        self._is_wal = bool(flags[0] & apsw.SQLITE_OPEN_WAL)
        self._is_file = bool(flags[0] & apsw.SQLITE_OPEN_MAIN_DB)

    def xWrite(self, data: Any, offset: int) -> None:
        super().xWrite(data, offset)
        if self._is_wal:
            wrote_wal()
        elif self._is_file:
            wrote_file()

    def xSync(self, flags: int) -> None:
        super().xSync(flags)
        if self._is_wal:
            synced_wal()
        elif self._is_file:
            synced_file()
