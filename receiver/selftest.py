"""Kills a real server again and again on the database's own disk, and looks what is left."""

import contextlib
import random
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from receiver import machine
from receiver.console import counted
from receiver.demo import CHECKOUT, RULES, invoice, set_up, signals_noted
from receiver.playground import Answer, Playground, wait_until
from store import inbox, integrity, ledger
from store.database import Snapshot

#: Kills, at most, and seconds after which no other is begun.
KILLS, KILLING_S = 20, 30.0
#: One kill in so many is the server's own, between an effect and its commit.
OWN_EVERY = 4
#: Deliveries that are answered between two kills, at most, and seconds that this may take.
BETWEEN_MAX, BETWEEN_S = 40, 5.0
SENDERS = 4
#: The number of the last event that is not the sender's own.
FIRST = 1_000
#: Seconds in which what is owed at the end must be answered.
END_S = 15.0
#: Of all sends: how many are of an event that was answered before.
AGAIN_RATE = 0.1
#: Rows read of a table: more than is sent.
ROWS_MAX = 100_000
#: What one invoice grants, by the demo's rules.
GRANT = 100
#: Milliseconds below which a disk is unlikely to have written anything.
TOO_FAST_MS = 0.05

LIES = (
    "What this can't show: a disk, controller or virtual disk that says it has written before it "
    "has. Then a power cut loses what was answered, whatever a program does. Ask your provider "
    "whether flushes reach stable storage, or cut the power on a machine that you can spare."
)


class Check(NamedTuple):
    """One line of the report: what was looked at, what was found, and whether that is well."""

    what: str
    found: str
    well: bool = True


class Sender:
    """Sends invoices from several threads, and again whatever it saw no 2xx for."""

    def __init__(self, play: Playground, seed: int) -> None:
        self.acknowledged: set[str] = set()
        self.surprises: list[str] = []
        self._play = play
        self._random = random.Random(seed)  # noqa: S311  when to kill is no secret
        self._lock = threading.Lock()
        self._owed: deque[int] = deque()
        self._done: list[int] = []
        self._sent = FIRST
        self._ending = self._stopped = False
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(SENDERS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def finish(self, seconds: float) -> None:
        """Send what is still owed, and nothing new."""
        self._ending = True
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self.surprises.append(f"not all were answered in {seconds:.0f} s")

    def stop(self) -> None:
        """Send nothing any more."""
        self._stopped = True

    def _run(self) -> None:
        while (number := self._next()) is not None:
            answer = self._play.send(invoice(f"evt_{number}", f"in_{number}"))
            self._note(number, answer)

    def _next(self) -> int | None:
        with self._lock:
            if self._owed and not self._stopped:
                return self._owed.popleft()
            if self._ending or self._stopped:
                return None
            if self._done and self._random.random() < AGAIN_RATE:
                return self._random.choice(self._done)
            self._sent += 1
            return self._sent

    def _note(self, number: int, answer: Answer) -> None:
        event_id = f"evt_{number}"
        with self._lock:
            if answer.status == 200 and answer.word in ("done", "duplicate"):
                if answer.word == "done" and number in self._done:
                    self.surprises.append(f"{event_id}: was done, then lost and done again")
                elif answer.word == "done":
                    self._done.append(number)
                self.acknowledged.add(event_id)
            elif answer.status in (0, 503):
                if event_id not in self.acknowledged:
                    self._owed.append(number)
            else:
                self.surprises.append(f"{event_id}: {answer}")


def run(say: Callable[[str], None], clock: Callable[[], int], database: Path, seed: int) -> int:
    """Test in a temporary folder beside the database; 1 if anything was lost or done twice.

    `clock` gives UTC milliseconds. Raises PlaygroundError, OSError where the folder can't be
    made, and KeyboardInterrupt once a signal has been heeded and everything is cleaned up.
    """
    with signals_noted() as interrupted:
        folder = Path(tempfile.mkdtemp(prefix=".receiver-selftest-", dir=database.parent))
        try:
            say(f"On {database.parent}, where {database.name} is. Seed {seed}.")
            say("")
            checks = [_say_each(say, one) for one in _checks(folder, clock, seed, interrupted)]
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    failed = [one for one in checks if not one.well]
    say("")
    say(_verdict(failed))
    say(LIES)
    return 1 if failed else 0


def _checks(
    folder: Path, clock: Callable[[], int], seed: int, interrupted: threading.Event
) -> Iterator[Check]:
    yield _file_system(folder)
    yield _syncs(folder)
    with contextlib.closing(set_up(folder, clock, RULES)) as play:
        play.load()
        play.start()
        play.send(CHECKOUT)
        sender = Sender(play, seed)
        sender.start()
        try:
            yield _kill_again_and_again(play, sender, seed, interrupted)
            sender.finish(END_S)
        finally:
            sender.stop()
        yield from _what_is_left(play, sender)


def _file_system(folder: Path) -> Check:
    kind = machine.file_system(folder)
    if kind in machine.MEMORY:
        return Check("file system", f"{kind}: it forgets everything when the machine ends", False)
    if kind in machine.NETWORK:
        return Check("file system", f"{kind}: SQLite's locks can't be relied on there", False)
    return Check("file system", kind or "unknown")


def _syncs(folder: Path) -> Check:
    syncs = machine.sync_times(folder)
    words = f"{syncs.median_ms:.2f} ms in the middle, {syncs.longest_ms:.2f} ms the longest"
    if syncs.median_ms < TOO_FAST_MS:
        words += "; too fast for a disk: is it one that only promises to write?"
    return Check("4 KiB made durable", words)


def _kill_again_and_again(
    play: Playground, sender: Sender, seed: int, interrupted: threading.Event
) -> Check:
    moments = random.Random(seed)  # noqa: S311  as above
    deadline = time.monotonic() + KILLING_S
    outside = inside = 0
    for kill in range(1, KILLS + 1):
        enough = len(sender.acknowledged) + moments.randint(1, BETWEEN_MAX)
        wait_until(lambda enough=enough: len(sender.acknowledged) >= enough, BETWEEN_S)  # type: ignore[misc]
        if kill % OWN_EVERY:
            play.kill()
            outside += 1
        else:
            _let_it_kill_itself(play)
            inside += 1
        play.start()
        if interrupted.is_set():
            raise KeyboardInterrupt
        if time.monotonic() > deadline:
            break
    words = f"{outside} at random moments, {inside} between an effect and its commit"
    return Check("kill -9 under load", words)


def _let_it_kill_itself(play: Playground) -> None:
    order = play.folder / "fail-now"
    order.touch()
    # The next invoice does it; the order must be gone before another server sees it.
    play.wait_for_death(BETWEEN_S)
    order.unlink()


def _what_is_left(play: Playground, sender: Sender) -> Iterator[Check]:
    with play.file() as seen:
        states = {row.event_id: row.state for row in inbox.listed(seen, limit=ROWS_MAX)}
        lost = sender.acknowledged - states.keys()
        answered = counted(len(sender.acknowledged), "event")
        yield Check("answered 2xx", f"{answered}, {len(lost)} lost", not lost)
        unfinished = sum(state != "done" for state in states.values())
        yield Check("unfinished", str(unfinished), not unfinished)
        yield _grants(seen, sender)
        faults = integrity.full_check(seen) + integrity.book_faults(seen)
        yield Check("the file", "; ".join(faults) or "whole, its books balance", not faults)
    if sender.surprises:
        yield Check("answers", "; ".join(sender.surprises[:3]), False)


def _grants(seen: Snapshot, sender: Sender) -> Check:
    entries = ledger.listed(seen, limit=ROWS_MAX)
    subjects = {entry.key.subject for entry in entries}
    invoices = {event_id.replace("evt_", "in_") for event_id in sender.acknowledged}
    missing, twice = len(invoices - subjects), len(entries) - len(subjects)
    balance = sum(one.balance for one in ledger.totals(seen, limit=ROWS_MAX))
    words = f"{counted(len(subjects), 'invoice')}, {missing} missing, {twice} twice"
    well = not missing and not twice and balance == GRANT * len(subjects)
    return Check("granted", words if well else f"{words}; balance {balance}", well)


def _say_each(say: Callable[[str], None], check: Check) -> Check:
    say(f"{check.what:<20}  {check.found:<58}  {'ok' if check.well else 'BAD'}")
    return check


def _verdict(failed: list[Check]) -> str:
    if failed:
        return f"Not well: {', '.join(one.what for one in failed)}."
    return "Here nothing that was answered was lost, and nothing was done twice."
