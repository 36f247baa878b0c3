"""Does what must not sit in a request: queued events, retries, and messages to the outside."""

import functools
import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from receiver import dispatch, process
from receiver.config import Settings
from receiver.destinations import (
    Destination,
    Later,
    Never,
    Result,
    Senders,
    Unknown,
    import_way,
    one_line,
)
from receiver.dispatch import LEASE_SPARE_S, Leased
from receiver.handlers import place_of
from receiver.logs import log, trail_of
from receiver.process import UNPREPARED, NotReplayable, Outcome, Prepared, Processor
from store import attempts, inbox, outbox
from store.database import Snapshot, Tx
from store.errors import Unavailable
from store.inbox import Row

T = TypeVar("T")

#: How long a worker may prepare and apply one event, in seconds; after that another may.
EVENT_LEASE_S = 300

#: How long to leave the file alone when it could not be written, in seconds.
UNAVAILABLE_S = 1.0

#: A destination that can't be reached is left alone for a while, doubling, in seconds.
UNREACHABLE_FIRST_S, UNREACHABLE_MAX_S = 1.0, 60.0

#: How long stopping waits for what is under way, in seconds; after that its lease runs out.
STOP_S = 10.0


class Write(Protocol):
    """Runs a job in a transaction and returns its result once that is durable.

    Raises what the job raised, or Unavailable. May be called on any thread.
    """

    def __call__(self, run: Callable[[Tx], T], keep: Callable[[Tx, str], T] | None = None) -> T: ...


class Worker:
    """Threads that lease work, do it, and settle it while the lease is theirs."""

    def __init__(
        self, processor: Callable[[], Processor], write: Write, clock: Callable[[], int]
    ) -> None:
        self.processor = processor
        self.write = write
        self.clock = clock
        self.senders = Senders()
        # No two processes, and no two starts of one, are the same owner.
        self._owner = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._groups: dict[str, Group] = {}
        self._watching = watching(lambda: processor().settings, write, clock, sends=True)

    def start(self) -> None:
        """Begin, or after a reload begin for destinations that are new."""
        settings = self.processor().settings
        wanted: list[Group] = [Events(self)]
        if settings.worker.run == "separate":
            wanted.append(Released(self))
        wanted += [Messages(self, name) for name in settings.destinations]
        if any(one.api is not None for one in settings.sources.values()):
            # Only then: what asks a sender is half of the worker, and takes long to import.
            from receiver import readers

            wanted += readers.wanted(self, settings)
        new = {group.name: group for group in wanted if group.name not in self._groups}
        # Not changed in place: other threads go through it.
        self._groups = self._groups | new
        for group in new.values():
            group.start(self._owner, settings.worker.threads)
        self._watching.start()

    def look(self, snapshot: Snapshot, now_ms: int) -> None:
        """Wake whoever has work now."""
        for group in self._groups.values():
            group.look(snapshot, now_ms)

    def stop(self) -> None:
        """Take no more work, and wait a while for what is under way."""
        lanes = [lane for group in self._groups.values() for lane in group.lanes]
        lanes.append(self._watching)
        for lane in lanes:
            lane.stop()
        deadline = time.monotonic() + STOP_S
        for lane in lanes:
            if lane.thread.ident is not None:
                lane.thread.join(max(0.0, deadline - time.monotonic()))
        left = [lane.thread.name for lane in lanes if lane.thread.is_alive()]
        if left:
            log.warning("still at work, left to their leases", threads=tuple(left))
        self.senders.close()
        for group in self._groups.values():
            group.close()

    def ahead_ms(self) -> int:
        """A due time further ahead than this was written before the clock was set back."""
        settings = self.processor().settings
        longest_s: list[float] = [settings.worker.backoff_max_s, EVENT_LEASE_S]
        longest_s += [one.timeout_s + LEASE_SPARE_S for one in settings.destinations.values()]
        return int(max(longest_s) * 1000)

    def seconds_until(self, due_ms: int | None) -> float | None:
        """How long to sleep before something is due; None: until woken."""
        if due_ms is None:
            return None
        return min(max(0.0, due_ms - self.clock()), self.ahead_ms()) / 1000


class Lane:
    """One thread that does one kind of work, and sleeps while there is none."""

    def __init__(self, name: str, step: Callable[[], float | None]) -> None:
        self.wake = threading.Event()
        self.stopping = False
        self._step = step
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin, once."""
        if self.thread.ident is None:
            self.thread.start()

    def stop(self) -> None:
        """Take no more work; what is under way goes on."""
        self.stopping = True
        self.wake.set()

    def _run(self) -> None:
        while not self.stopping:
            # Cleared before looking: what comes while we look wakes us again.
            self.wake.clear()
            pause_s = self._safe_step()
            if pause_s != 0 and not self.stopping:
                self.wake.wait(pause_s)

    def _safe_step(self) -> float | None:
        try:
            return self._step()
        except Unavailable as error:
            if not self.stopping:
                log.warning("not written", thread=self.thread.name, why=str(error))
        except Exception as error:
            # The top of the thread. Whatever it was, the lease runs out and it is tried again.
            log_unexpected(error, thread=self.thread.name)
        return UNAVAILABLE_S


def watching(
    settings: Callable[[], Settings], write: Write, clock: Callable[[], int], *, sends: bool
) -> Lane:
    """The thread that looks for what needs a person; it `sends` where there is a worker."""

    def step() -> float:
        # By its own thread, which nobody waits for: it brings all that `status` knows.
        from receiver.watch import Watch

        return Watch(settings, write, clock, sends=sends).step()

    return Lane("alerts", step)


class Group:
    """The threads for one kind of work. One that hangs keeps no other kind waiting."""

    name: str

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.lanes: list[Lane] = []

    def start(self, owner: str, threads: int) -> None:
        names = [f"{owner}-{self.name}-{number}" for number in range(threads)]
        # Known before they look for work: from then on they are woken when there is some.
        self.lanes = [Lane(name, functools.partial(self.step, name)) for name in names]
        for lane in self.lanes:
            lane.start()

    def look(self, snapshot: Snapshot, now_ms: int) -> None:
        """Wake the threads if there is work now."""
        due_ms = self.due_ms(snapshot)
        if due_ms is not None and due_ms <= now_ms:
            for lane in self.lanes:
                lane.wake.set()

    def due_ms(self, snapshot: Snapshot) -> int | None:
        """When there is work next, in UTC milliseconds; None if none is known."""
        raise NotImplementedError

    def step(self, owner: str) -> float | None:
        """Do one piece of work; how long to sleep then, None until woken."""
        raise NotImplementedError

    def close(self) -> None:
        """Give up what is kept open between two pieces of work."""

    def write_surely(
        self,
        run: Callable[[Tx], T],
        keep: Callable[[Tx, str], T] | None = None,
        *,
        for_s: float,
    ) -> T:
        """Go on trying to write how an attempt ended while its lease lasts: else it is made again.

        Raises what the job raised, or Unavailable.
        """
        deadline = time.monotonic() + for_s
        while True:
            try:
                return self.worker.write(run, keep)
            except Unavailable as error:
                if time.monotonic() > deadline:
                    raise
                log.warning("not written yet", thread=self.name, why=str(error))
                time.sleep(UNAVAILABLE_S)


class Released(Group):
    """Applies events whose fact has come. Inside the server its writer does that."""

    name = "released"

    def due_ms(self, snapshot: Snapshot) -> int | None:
        return 0 if inbox.released(snapshot, 1) else None

    def step(self, owner: str) -> float | None:
        processor = self.worker.processor()
        applied = self.worker.write(processor.apply_released, processor.keep_released)
        return None if applied is None else 0


class Taken(NamedTuple):
    """An event under our lease."""

    known: Row
    owner: str


class Events(Group):
    """Applies queued events, and those whose handler failed, by the path of any delivery."""

    name = "events"

    def due_ms(self, snapshot: Snapshot) -> int | None:
        return inbox.queue_due_ms(snapshot)

    def step(self, owner: str) -> float | None:
        worker, processor = self.worker, self.worker.processor()
        taken = worker.write(
            functools.partial(
                _lease,
                owner=owner,
                ahead_ms=worker.ahead_ms(),
                attempts_max=processor.settings.worker.attempts_max,
            )
        )
        if not isinstance(taken, Taken):
            return worker.seconds_until(taken)
        started = time.perf_counter()
        try:
            prepared = self._prepare(processor, taken.known)
        except Unavailable:
            raise
        except BaseException as error:
            # The founder's code may raise anything.
            log.error(
                "failed",
                **_about(taken.known),
                operation="prepare",
                error=type(error).__name__,
                at=place_of(error).removeprefix(" at "),
            )
            _log_attempt(taken, self._fail(taken, f"prepare{process.failure_of(error)}"), started)
            return 0
        outcome = self.write_surely(
            lambda tx: _if_held(tx, taken, lambda known: processor.work(tx, known, prepared)),
            lambda tx, why: _if_held(tx, taken, lambda known: processor.fail_work(tx, known, why)),
            for_s=EVENT_LEASE_S,
        )
        _log_attempt(taken, outcome, started)
        return 0

    def _prepare(self, processor: Processor, known: Row) -> Prepared:
        """What the rules' prepare functions give; with the network, so outside a transaction."""
        rules = processor.settings.rules_of_stored(known.endpoint, known.source, known.type)
        if all(rule.prepare is None for rule in rules):
            return UNPREPARED
        try:
            event = self.write_surely(
                lambda tx: process.stored_event(tx, processor.settings, known),
                for_s=EVENT_LEASE_S,
            )
        except NotReplayable:
            # Said again, and written down, when it is applied.
            return UNPREPARED
        return processor.prepare(event)

    def _fail(self, taken: Taken, why: str) -> Outcome | None:
        processor = self.worker.processor()
        return self.write_surely(
            lambda tx: _if_held(tx, taken, lambda known: processor.fail_work(tx, known, why)),
            for_s=EVENT_LEASE_S,
        )


class Outward(Group):
    """Talks to one other side; while that can't be reached, all its work waits."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._pause_s = 0.0
        self._paused_until = 0.0

    def paused_s(self) -> float:
        return self._paused_until - time.monotonic()

    def note(self, result: object) -> None:
        """What can't be reached is left alone for all that is owed, which keeps its attempts."""
        if isinstance(result, Later) and result.unreachable:
            asked_s = min(result.retry_after_s or 0.0, UNREACHABLE_MAX_S)
            longer_s = max(UNREACHABLE_FIRST_S, self._pause_s * 2, asked_s)
            self._pause_s = min(longer_s, UNREACHABLE_MAX_S)
            self._paused_until = time.monotonic() + self._pause_s
        else:
            self._pause_s = 0.0


class Messages(Outward):
    """Sends what is owed to one destination."""

    def __init__(self, worker: Worker, destination: str) -> None:
        super().__init__(worker)
        self.name = f"to-{destination}"
        self._destination = destination

    def due_ms(self, snapshot: Snapshot) -> int | None:
        known = self._destination in self.worker.processor().settings.destinations
        if not known or self.paused_s() > 0:
            return None
        return outbox.due_ms(snapshot, self._destination)

    def step(self, owner: str) -> float | None:
        worker = self.worker
        destination = worker.processor().settings.destinations.get(self._destination)
        if destination is None:
            # A reload took it away; what is owed to it waits for it to come back.
            return None
        import_way(destination)
        paused_s = self.paused_s()
        if paused_s > 0:
            return paused_s
        leased = worker.write(
            functools.partial(
                dispatch.lease,
                worker=worker.processor().settings.worker,
                destination=destination,
                owner=owner,
                ahead_ms=worker.ahead_ms(),
            )
        )
        if not isinstance(leased, Leased):
            return worker.seconds_until(leased)
        started = time.perf_counter()
        result = self._send(destination, leased)
        _log_send(leased, result, started)
        self.note(result)
        settle = functools.partial(
            dispatch.settle,
            processor=worker.processor(),
            destination=destination,
            leased=leased,
            result=result,
        )
        self.write_surely(settle, for_s=destination.timeout_s + LEASE_SPARE_S)
        return 0

    def _send(self, destination: Destination, leased: Leased) -> Result:
        worker = self.worker
        try:
            return worker.senders.send(destination, dispatch.owed(leased), worker.clock())
        except Exception as error:
            # A fault of ours ends the attempt like any other: it is counted, and bounded.
            log_unexpected(error, message=leased.message.id)
            why = f"sending it to this {type(destination).__name__} failed inside Receiver"
            return Unknown(one_line(f"{why}{process.failure_of(error)}"))


def _lease(tx: Tx, *, owner: str, ahead_ms: int, attempts_max: int) -> Taken | int | None:
    """An event under our lease; without one, when the next is due.

    One that ends each worker in the middle of its attempt does so `attempts_max` times.
    """
    while True:
        known = inbox.lease(tx, owner, tx.now_ms + EVENT_LEASE_S * 1000, ahead_ms)
        if known is None:
            return inbox.queue_due_ms(tx)
        if known.attempts <= attempts_max:
            break
        attempts.close(tx, event=known.id)
        inbox.die(tx, known.id, known.attempts - 1, "no attempt is left: the last one never ended")
    attempts.start(tx, known.attempts, event=known.id)
    return Taken(known, owner)


def _if_held(tx: Tx, taken: Taken, do: Callable[[Row], Outcome]) -> Outcome | None:
    """Only while the lease is ours: what was leased again, or settled, is not ours to change."""
    if not inbox.holds(tx, taken.known.id, taken.owner, taken.known.attempts):
        return None
    return do(taken.known)


# What is told to the operator.


def _about(known: Row) -> dict[str, str]:
    return process.about(known.endpoint, known.account, known.event_id, known.type, known.id)


def _log_attempt(taken: Taken, outcome: Outcome | None, started: float) -> None:
    log.info(
        "attempt",
        **_about(taken.known),
        attempt=taken.known.attempts,
        keys=() if outcome is None else process.words_of_keys(outcome.keys),
        outcome="lease lost" if outcome is None else outcome.word,
        ms=ms_since(started),
    )


def _log_send(leased: Leased, result: Result, started: float) -> None:
    message = leased.message
    # Its words may hold what the other side knows: `receiver outbox show` has them.
    tell = log.warning if isinstance(result, Never) else log.info
    tell(
        "send",
        number=message.id,
        destination=message.destination,
        operation_key=message.operation_key,
        keys=process.words_of_keys([message.key]),
        correlation=dispatch.correlation_of(message),
        attempt=leased.attempt,
        outcome=dispatch.OUTCOMES[type(result)],
        ms=ms_since(started),
    )


def log_unexpected(error: Exception, **fields: object) -> None:
    # Its words may hold a payload.
    log.error("unexpected", **fields, error=type(error).__name__, at=trail_of(error))


def ms_since(started: float) -> float:
    return round((time.perf_counter() - started) * 1000, 1)
