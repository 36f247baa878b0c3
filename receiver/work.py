"""The worker as a process of its own, beside a server that only receives."""

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from receiver import config, duties, logs, reloading, systemd
from receiver.config import ConfigError, Settings
from receiver.logs import log
from receiver.process import Processor
from receiver.worker import Worker
from store.database import Job, Snapshot, Store, Tx
from store.errors import Replaced, StoreError, Unavailable

T = TypeVar("T")

#: How often to look whether another process has written, in seconds. One pragma a look.
LOOK_S = 0.25


def leave(why: str) -> NoReturn:
    """End at once, without closing the file: that would write into the one that replaced it."""
    log.critical("stopped: %s", why)
    os._exit(1)


class OneWriter:
    """The jobs of several threads on one connection, one after the other."""

    def __init__(self, store: Store, on_fatal: Callable[[str], None] = leave) -> None:
        self._store = store
        self._on_fatal = on_fatal
        self._lock = threading.Lock()
        self._broken = False
        self._closed = False
        #: Told of each commit: what it made due has no other messenger in this process.
        self.after: Callable[[Snapshot, int], None] | None = None

    def write(self, run: Callable[[Tx], T], keep: Callable[[Tx, str], T] | None = None) -> T:
        """Run one job now and return its result, committed. Raises what it raised."""
        job = Job(run, keep)
        with self._lock:
            self._write(job)
            if self.after is not None:
                self._store.look(self.after)
        if job.error is not None:
            raise job.error
        return job.result  # type: ignore[return-value]  # run's own result, None included

    def look(self, see: Callable[[Snapshot, int], T]) -> T | None:
        """What `see` finds now, or None while the file can't be read, or a thread waits for it."""
        # A thread that waits for another process's lock must not keep the main one from a signal.
        if not self._lock.acquire(timeout=LOOK_S):
            return None
        try:
            return self._store.look(see)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the file, unless a thread is still in the middle of a job: then it stays open."""
        if self._lock.acquire(timeout=LOOK_S):
            self._closed = True
            self._store.close()
            self._lock.release()

    def _write(self, job: Job[Any]) -> None:
        if self._closed:
            raise Unavailable("the worker is stopping")
        try:
            if self._broken:
                # Whatever it was: after an I/O error nothing else may be relied on.
                self._store.reopen()
                self._broken = False
            self._store.write_all([job])
        except Unavailable:
            self._broken = True
            raise
        except Replaced as error:
            self._on_fatal(str(error))
            raise


class Work:
    """One running worker process."""

    def __init__(
        self,
        processor: Processor,
        store: Store,
        notifier: systemd.Notifier,
        flush_log: Callable[[], None],
    ) -> None:
        self._processor = processor
        self._notifier = notifier
        self._flush_log = flush_log
        self._writer = OneWriter(store)
        self._worker = Worker(lambda: self._processor, self._writer.write, store.clock)
        self._writer.after = self._worker.look
        self._stop = threading.Event()
        self._reload = threading.Event()

    def run(self) -> None:
        """Work until SIGTERM or SIGINT. Raises StoreError if it can't begin."""
        try:
            self._begin()
            self._go_on()
        finally:
            self._writer.close()

    def _begin(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGHUP, self._on_reload)
        database = self._processor.settings.database
        try:
            self._writer.write(self._processor.start)
        except Unavailable as error:
            raise StoreError(f"{database}: {error}") from error
        self._worker.start()
        self._notifier.ready("working")
        self._announce()

    def _go_on(self) -> None:
        seen = 0
        while not self._stop.wait(LOOK_S):
            if self._reload.is_set():
                self._reload.clear()
                self._load_again()
                # What was owed to a destination that is back has no other messenger.
                seen = 0
            # Only what another process made due has no messenger here.
            now_seen = self._writer.look(lambda snapshot, now_ms: snapshot.data_version()) or 0
            if now_seen != seen:
                seen = now_seen
                self._writer.look(self._worker.look)
            self._flush_log()
        self._notifier.stopping()
        self._worker.stop()
        log.info("stopped")
        self._flush_log()

    def _announce(self) -> None:
        settings = self._processor.settings
        log.info("working on %s", settings.database)
        for duty in duties.listed(settings):
            log.info("%s", duty)
        for warning in settings.warnings:
            log.warning("%s: %s", settings.path, warning)
        self._flush_log()

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop.set()

    def _on_reload(self, number: int, frame: FrameType | None) -> None:
        self._reload.set()

    def _load_again(self) -> None:
        self._notifier.reloading(time.monotonic_ns())
        self._take(self._processor.settings.path)
        self._notifier.ready("working")

    def _take(self, path: Path) -> None:
        """Take the config file as it is now; a broken one changes nothing."""
        try:
            old = self._processor.settings
            found = config.load_again(old)
            processor = Processor.load(reloading.in_force(old, found))
        except ConfigError as error:
            for problem in error.problems:
                log.error("reload %s: %s", path, problem)
            log.error("reload %s: the old config stays in force", path)
            return
        for name in reloading.restart_needed(old, found):
            log.warning("reload %s: %s changed; restart to use it", path, name)
        self._processor = processor
        self._worker.start()
        # As in the server: else the old handlers.py would stay.
        gc.collect()
        try:
            self._writer.write(processor.start)
        except Unavailable as error:
            log.error("reload: the names in the config could not be stored: %s", error)
        log.info("reload %s: done", path)


def work(config_path: Path, clock: Callable[[], int]) -> int:
    """Work until a signal ends it; the exit code.

    Raises ConfigError, also where the config wants no worker of its own, or StoreError.
    """
    settings = config.load(config_path)
    _check_place(settings)
    processor = Processor.load(settings)
    lines = logs.configure(sys.stderr, os.environ)
    with contextlib.closing(lines):
        store = Store.create(settings.database, clock)
        store.work("separate")
        Work(processor, store, systemd.Notifier(os.environ), lines.flush).run()
    return 0


def _check_place(settings: Settings) -> None:
    match settings.worker.run:
        case "inside":
            why = '"inside", so `receiver serve` does this work'
        case "off":
            why = '"off", so that nothing is worked on'
        case "separate":
            return
    raise ConfigError(
        [f'worker.run: is {why}; set it to "separate" for `receiver work`, and restart the server']
    )
