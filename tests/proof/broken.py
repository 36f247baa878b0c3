"""Storage that fails for a while at every call in turn: nothing is lost, and it goes on."""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import NamedTuple

import apsw
import pytest

from store import writer
from tests.proof.disk import Recording, watched
from tests.proof.power import scratch
from tests.proof.story import FACTS, End, Shop, faults_after

#: What each failing call says.
KINDS = MappingProxyType({"disk full": apsw.FullError, "i/o error": apsw.IOError})

#: Calls in a row that fail, and seconds until the file is opened again.
IN_A_ROW, REOPEN_S = 3, 0.001


class Failed(NamedTuple):
    """Runs in which storage failed, how many calls there are to fail, and what was wrong."""

    runs: int
    calls: int
    faults: list[str]


def fail_at(
    wanted: End,
    *,
    every: int,
    first: int = 0,
    advance: Callable[[int], None] = lambda done: None,
) -> Failed:
    """Serve a day, with storage failing from each `every`th call on, as each kind of failure."""
    calls = _serve(wanted, 1_000_000, apsw.IOError)[0]
    chosen = range(first, calls, every)
    faults = []
    for call in chosen:
        for name, error in KINDS.items():
            words = _serve(wanted, call, error)[1]
            faults += [f"{name} at call {call}: {one}" for one in words]
        advance(call)
    return Failed(len(chosen) * len(KINDS), calls, faults)


def _serve(wanted: End, at: int, error: type[Exception]) -> tuple[int, Sequence[str]]:
    with (
        scratch() as folder,
        watched(folder) as recording,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(writer, "REOPEN_RETRY_S", REOPEN_S)
        shop = Shop(folder, recording.tell)
        shop.make()
        made = _failing(recording, at, error)
        try:
            # By then all is answered; what fails while the file is closed is told to nobody.
            shop.serve(FACTS, lambda: setattr(recording, "before", lambda: None))
            served = made()
            told = [what for _, what in recording.told]
            return served, faults_after(shop, told, wanted)
        except Exception as wrong:
            return 0, [f"{type(wrong).__name__}: {wrong}"]


def _failing(recording: Recording, at: int, error: type[Exception]) -> Callable[[], int]:
    made = 0

    def before() -> None:
        nonlocal made
        made += 1
        if at < made <= at + IN_A_ROW:
            raise error("storage fails")

    recording.before = before
    return lambda: made
