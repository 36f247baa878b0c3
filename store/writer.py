"""The one writer of a server: many jobs share one commit, each still its own transaction."""

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from store.database import Job, Snapshot, Store, Tx, next_batch, put_back
from store.errors import Replaced, Unavailable

T = TypeVar("T")

logger = logging.getLogger("receiver")

#: How long a job may wait for the write lock before it is refused, in seconds.
WAIT_S_MAX = 5.0

#: A commit that takes longer waits for a disk that hangs, in seconds.
COMMIT_S_MAX = 1.0

#: How soon the lock is asked for again, and a broken file opened again, in seconds.
LOCK_RETRY_S = 0.002
REOPEN_RETRY_S = 1.0

#: How often due events are looked for that nobody in this process made due, in seconds.
DUE_EVERY_S = 1.0

#: When the lock was ours for more than half of a window, others get a gap; in seconds.
WINDOW_S = 0.25
GAP_S = 0.025

#: Gives the jobs for what is due at that time (UTC milliseconds), at most a hundred.
DueJobs = Callable[[Snapshot, int], Sequence[Job[Any]]]


class _Waiting(Job[T]):
    """A job with somebody waiting for its result."""

    __slots__ = ("deadline", "future", "hurried")

    def __init__(
        self,
        run: Callable[[Tx], T],
        keep: Callable[[Tx, str], T] | None,
        future: "asyncio.Future[T]",
        deadline: float,
        hurried: bool = False,
    ) -> None:
        super().__init__(run, keep)
        self.future = future
        self.deadline = deadline
        self.hurried = hurried

    @property
    def is_due(self) -> bool:
        """Work that nobody waits for."""
        return self.deadline == float("inf")

    def answer(self) -> None:
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)  # type: ignore[arg-type]  # run's own result


class Writer:
    """Owns the store's writing connection, and never waits on the event loop's thread.

    Jobs run there; the commit, which waits for the disk, is handed to another thread, and what
    arrives meanwhile makes the next batch.
    """

    def __init__(
        self,
        store: Store,
        *,
        pending_max: int,
        due: DueJobs,
        on_fatal: Callable[[str], None],
        on_commit: Callable[[int, float], None] = lambda jobs, seconds: None,
    ) -> None:
        self._store = store
        self._pending_max = pending_max
        self._due = due
        self._on_fatal = on_fatal
        self._on_commit = on_commit
        self._loop = asyncio.get_running_loop()
        self._queue: deque[_Waiting[Any]] = deque()
        #: What is being committed, and the future of what another thread does for us.
        self._batch: list[_Waiting[Any]] = []
        self._handed_over: asyncio.Future[Any] | None = None
        self._handed_over_s = 0.0
        self._timer: asyncio.Handle | None = None
        self._due_timer: asyncio.TimerHandle | None = None
        self._broken = False
        self._stopped: str | None = None
        self._due_waiting = 0
        #: None of the last due ones was written yet: only the timer has them run again.
        self._due_stuck = False
        self._started = self._window_started = self._loop.time()
        self._held_s = 0.0
        self._look_for_due()

    def submit(
        self,
        run: Callable[[Tx], T],
        keep: Callable[[Tx, str], T] | None = None,
        *,
        hurried: bool = False,
    ) -> "asyncio.Future[T]":
        """Run in the next batch; the future is resolved once the commit is durable.

        `keep` runs instead when `run` has ended the whole transaction twice. The future gets
        what `run` raised, or Unavailable when nothing can be acknowledged. One that is `hurried`
        gets it also while its own commit takes too long, and may be durable all the same; the
        others wait to know.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        refusal = self._refusal()
        if refusal is not None:
            future.set_exception(Unavailable(refusal))
            return future
        deadline = self._loop.time() + WAIT_S_MAX
        self._queue.append(_Waiting(run, keep, future, deadline, hurried))
        self._schedule()
        return future

    async def close(self) -> None:
        """Write what was accepted, then accept nothing more."""
        # What is due stays due in the file, and nobody waits for it.
        self._due = lambda snapshot, now_ms: ()
        self._queue = deque(job for job in self._queue if not job.is_due)
        while self._stopped is None and (waiting := self._unanswered()):
            await asyncio.wait(waiting[-1:])
        self._stop("the server is stopping")
        while self._handed_over is not None:
            await asyncio.wait([self._handed_over])

    @property
    def waiting(self) -> int:
        """Jobs that are not written yet. May be asked on any thread, as `trouble` may."""
        return len(self._queue) + len(self._batch)

    def trouble(self) -> str | None:
        """Why a job would not be written now, as far as is known; None if nothing is wrong."""
        if self._broken:
            return "the file could not be written"
        return self._refusal()

    def _unanswered(self) -> "list[asyncio.Future[Any]]":
        return [job.future for job in (*self._batch, *self._queue) if not job.future.done()]

    def _refusal(self) -> str | None:
        if self._stopped is not None:
            return self._stopped
        if len(self._queue) >= self._pending_max:
            return f"{self._pending_max} deliveries are waiting already"
        return None

    def _stop(self, why: str) -> None:
        self._stopped = why
        for handle in (self._timer, self._due_timer):
            if handle is not None:
                handle.cancel()
        self._refuse_all(why)

    def _flush(self) -> None:
        self._timer = None
        if self._broken:
            self._hand_over(self._store.reopen, self._reopened)
        else:
            self._guarded(self._write_batch)

    def _write_batch(self) -> None:
        self._started = self._loop.time()
        tx = self._store.begin()
        if tx is None:
            self._refuse_overdue("another process holds the write lock")
            if self._queue:
                self._again_after(LOCK_RETRY_S)
            return
        self._batch = next_batch(self._queue)
        if self._store.run(tx, self._batch):
            self._hand_over(self._store.commit, self._committed)
        else:
            self._committed(durable=False)

    def _committed(self, durable: bool) -> None:
        batch, self._batch = self._batch, []
        if not durable:
            # Not those that were refused meanwhile: nobody would learn how they end.
            batch = put_back(self._queue, [job for job in batch if not job.future.done()])
        for job in batch:
            job.answer()
        held_s = self._loop.time() - self._started
        self._held_s += held_s
        self._on_commit(len(batch), held_s)
        # After those who waited: they have their answers first.
        self._timer = self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._timer = None
        self._guarded(self._enqueue_due)
        if self._queue and self._timer is None and self._stopped is None:
            self._again_after(self._gap())

    def _reopened(self, _: None) -> None:
        self._broken = False
        self._schedule()

    def _hand_over(self, act: Callable[[], T], then: Callable[[T], None]) -> None:
        """Do what waits for the disk on another thread; until then nobody else uses the file."""
        self._handed_over_s = self._loop.time()
        self._handed_over = self._loop.run_in_executor(None, act)
        self._handed_over.add_done_callback(functools.partial(self._handed_back, then))

    def _handed_back(self, then: Callable[[Any], None], done: "asyncio.Future[Any]") -> None:
        self._handed_over = None
        self._guarded(lambda: then(done.result()))

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Replaced as error:
            self._stop(str(error))
            self._on_fatal(str(error))
        except Exception as error:
            # The disk, or a fault of ours: nothing is acknowledged until the file was opened
            # anew and a checkpoint went through.
            logger.error("writer: nothing can be acknowledged now: %s", error)
            self._broken = True
            self._refuse_all(str(error))
            self._again_after(REOPEN_RETRY_S)
        except BaseException as error:
            # Whatever it was, none of these is durable for certain.
            self._refuse_all(str(error))
            raise

    def _gap(self) -> float:
        """How long to leave the lock alone, in seconds."""
        now = self._loop.time()
        window = now - self._window_started
        if window < WINDOW_S:
            return 0.0
        saturated = self._held_s > window / 2
        self._window_started, self._held_s = now, 0.0
        return GAP_S if saturated else 0.0

    def _again_after(self, delay: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay, self._flush)

    def _look_for_due(self) -> None:
        # A commit by the app can make events due, and so can the clock.
        self._due_timer = self._loop.call_later(DUE_EVERY_S, self._look_for_due)
        self._due_stuck = False
        if self._handed_over is None:
            self._enqueue_due()
        elif self._loop.time() - self._handed_over_s > COMMIT_S_MAX:
            self._refuse_overdue("the disk takes too long to write")
        self._schedule()

    def _schedule(self) -> None:
        if self._queue and self._timer is None and self._handed_over is None:
            # After the callbacks that are ready now: whatever else arrived shares the commit.
            self._timer = self._loop.call_soon(self._flush)

    def _enqueue_due(self) -> None:
        # The last ones first: until they are settled they would only be found again.
        if self._due_waiting or self._due_stuck:
            return
        if self._broken or self._handed_over is not None or self._stopped is not None:
            return
        for job in self._store.look(self._due) or ():
            future: asyncio.Future[Any] = self._loop.create_future()
            future.add_done_callback(self._due_done)
            self._queue.append(_Waiting(job.run, job.keep, future, float("inf")))
            self._due_waiting += 1
            self._due_stuck = True

    def _due_done(self, future: "asyncio.Future[Any]") -> None:
        # Nobody waits for a due event: its outcome is in its row. What could not be written is
        # due still, and found again.
        self._due_waiting -= 1
        if not future.cancelled() and future.exception() is None:
            self._due_stuck = False
        self._enqueue_due()
        self._schedule()

    def _refuse_overdue(self, why: str) -> None:
        now = self._loop.time()
        hurried = [job for job in self._batch if job.hurried]
        _refuse([job for job in (*hurried, *self._queue) if job.deadline < now], why)
        self._queue = deque(job for job in self._queue if job.deadline >= now)

    def _refuse_all(self, why: str) -> None:
        _refuse([*self._batch, *self._queue], why)
        self._batch = []
        self._queue.clear()


def _refuse(jobs: Iterable[_Waiting[Any]], why: str) -> None:
    for job in jobs:
        job.error = Unavailable(why)
        job.answer()
