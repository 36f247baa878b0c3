"""Storage that fails for a while at every call in turn: nothing is lost, and it goes on."""

import errno
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import apsw
import pytest

from receiver import worker
from receiver.operate import Declined
from store import writer
from store.errors import StoreError, Unavailable
from tests.proof.disk import Recording, watched
from tests.proof.power import scratch
from tests.proof.story import DAY, End, Shop, faults_after

#: What each failing call says: SQLite's, and Python's.
KINDS = MappingProxyType(
    {"disk full": (apsw.FullError, errno.ENOSPC), "i/o error": (apsw.IOError, errno.EIO)}
)

#: Calls in a row that fail, and seconds until what failed is tried again.
IN_A_ROW, AGAIN_S = 3, 0.001

#: A call that is not made.
NEVER = 1_000_000

#: How often somebody tries who is told that it failed.
TRIES = 2 * IN_A_ROW


class Failed(NamedTuple):
    """Runs in which storage failed, how many calls there are to fail, and what was wrong."""

    runs: int
    calls: int
    faults: list[str]


class _Morning(NamedTuple):
    """What a step of the day finds."""

    folder: Path
    now_ms: int
    told: Sequence[Any]


def fail_at(
    wanted: End,
    *,
    every: int,
    first: int = 0,
    advance: Callable[[int], None] = lambda done: None,
) -> Failed:
    """Play each step of a day with storage failing from each `every`th call on, in both ways."""
    runs = calls = 0
    faults: list[str] = []
    with scratch() as place:
        for name, morning in _mornings(place):
            made, words = _play(name, morning, wanted, NEVER, "i/o error")
            faults += [f"{name}, undisturbed: {one}" for one in words]
            for call in range((first - calls) % every, made, every):
                for kind in KINDS:
                    words = _play(name, morning, wanted, call, kind)[1]
                    faults += [f"{name}, {kind} at call {call}: {one}" for one in words]
                    runs += 1
                advance(calls + call)
            calls += made
    return Failed(runs, calls, faults)


def _mornings(place: Path) -> Iterator[tuple[str, _Morning]]:
    told: list[Any] = []
    today = place / "today"
    today.mkdir()
    shop = Shop(today, told.append)
    for number, (name, step) in enumerate(DAY.items()):
        before = place / str(number)
        shutil.copytree(today, before)
        yield name, _Morning(before, shop.clock.now_ms, tuple(told))
        step(shop, "full")


def _play(
    name: str, morning: _Morning, wanted: End, at: int, kind: str
) -> tuple[int, Sequence[str]]:
    with scratch() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "REOPEN_RETRY_S", AGAIN_S)
        patch.setattr(worker, "UNAVAILABLE_S", AGAIN_S)
        shutil.copytree(morning.folder, folder, dirs_exist_ok=True)
        told = list(morning.told)
        shop = Shop(folder, told.append)
        shop.clock.now_ms = morning.now_ms
        try:
            with watched(folder) as recording:
                made = _failing(recording, at, kind)
                _until_done(name, shop)
            return made(), faults_after(shop, told, wanted)
        except Exception as wrong:
            return 0, [f"{type(wrong).__name__}: {wrong}"]


def _until_done(name: str, shop: Shop) -> None:
    """Again and again, as a service manager does, or an operator who reads what he is told."""
    for _ in range(TRIES):
        try:
            return DAY[name](shop, "full")
        except (StoreError, Unavailable, Declined):
            # Whoever tries again does so later: backups are named after the time.
            shop.clock.now_ms += 1
    raise AssertionError("it does not go on")


def _failing(recording: Recording, at: int, kind: str) -> Callable[[], int]:
    made = 0
    error, number = KINDS[kind]

    def before(by_sqlite: bool) -> None:
        nonlocal made
        made += 1
        if at < made <= at + IN_A_ROW:
            raise error("storage fails") if by_sqlite else OSError(number, "storage fails")

    recording.before = before
    return lambda: made
