"""The scripted run, its power cut at each storage call in turn."""

import contextlib
import hashlib
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.proof.disk import KINDS, Disk, Recording, restored, watched
from tests.proof.story import (
    End,
    Shop,
    Spent,
    end_of,
    faults_after,
    later_version,
    play,
    play_again,
)

#: Where a sync costs nothing, if the machine has such a place.
MEMORY = Path("/dev/shm")

#: Calls before the app's commit, and after it: up to the next answer and beyond.
BEFORE_SPENT, AFTER_SPENT = 3, 30


#: What is wrong in a folder that a cut has left, by what had been told.
Judge = Callable[[Path, Sequence[Any], End], list[str]]


class Fault(NamedTuple):
    """What was wrong after a cut, and how to have the same again."""

    cut: int
    kind: str
    seed: int
    words: str

    def __str__(self) -> str:
        return f"cut after call {self.cut} ({self.kind}, seed {self.seed}): {self.words}"


class Cuts(NamedTuple):
    """What came of it: cuts made, different disks that they left, and what was wrong with those."""

    calls: int
    cuts: int
    disks: int
    faults: list[Fault]


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder of its own, in memory if possible."""
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="receiver-proof-", dir=place) as folder:
        yield Path(folder)


def recorded(app_synchronous: str = "full") -> Recording:
    """The calls of one day."""
    with scratch() as folder, watched(folder) as recording:
        play(Shop(folder, recording.tell), app_synchronous)
    return recording


def expected_end() -> End:
    """Where a day ends on which the power stays on, and everything is sent once more."""
    with scratch() as folder:
        shop = Shop(folder, lambda what: None)
        play(shop)
        with later_version():
            play_again(shop)
            return end_of(shop.path)


def some_cuts(recording: Recording, seed: int, count: int) -> list[int]:
    """Right after each answer, and after so many other calls."""
    answered = {at for at, _ in recording.told}
    others = random.Random(seed).sample(range(1, len(recording.calls) + 1), count)
    return sorted({*answered, *others})


def after_spending(recording: Recording) -> list[int]:
    """The cuts around what the app did."""
    spent = [at for at, what in recording.told if isinstance(what, Spent)]
    return [one for at in spent for one in range(at - BEFORE_SPENT, at + AFTER_SPENT)]


def judged(folder: Path, told: Sequence[Any], wanted: End) -> list[str]:
    """What is wrong in a folder that a cut of the day has left."""
    return faults_after(Shop(folder, lambda what: None), told, wanted)


def cut(
    recording: Recording,
    wanted: End,
    *,
    seed: int,
    at: Sequence[int] | None = None,
    kinds: Sequence[str] | None = None,
    faults_max: int = 10,
    judge: Judge = judged,
    advance: Callable[[int], None] = lambda cut: None,
) -> Cuts:
    """Cut the power after each call, or after these, and stop after so many faults.

    Without `kinds`: once so that nothing is left of what was not synced, and once otherwise.
    """
    disk = Disk()
    wanted_cuts = set(range(1, len(recording.calls) + 1) if at is None else at)
    seen: set[bytes] = set()
    cuts = 0
    faults: list[Fault] = []
    for number, call in enumerate(recording.calls, 1):
        disk.take(call)
        if number not in wanted_cuts or len(faults) >= faults_max:
            continue
        told = recording.told_by(number)
        chance = random.Random(f"{seed} {number}")
        for kind in kinds or ("nothing", chance.choice(KINDS[1:])):
            cuts += 1
            found = disk.after_cut(kind, random.Random(f"{seed} {number} {kind}"))
            digest = _digest(found, told)
            if digest not in seen:
                seen.add(digest)
                words = _faults(found, told, wanted, judge)
                faults += [Fault(number, kind, seed, one) for one in words]
        advance(number)
    return Cuts(len(recording.calls), cuts, len(seen), faults)


def _faults(
    found: dict[str, bytes | None], told: Sequence[Any], wanted: End, judge: Judge
) -> list[str]:
    with scratch() as folder:
        restored(found, folder)
        return judge(folder, told, wanted)


def _digest(found: dict[str, bytes | None], told: Sequence[Any]) -> bytes:
    hashed = hashlib.sha256(str(len(told)).encode())
    for path in sorted(found):
        hashed.update(repr((path, hashlib.sha256(found[path] or b"").digest())).encode())
    return hashed.digest()
