"""Follows the inbox, as long as somebody reads what is printed."""

import contextlib
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from store import inbox
from store.database import Snapshot
from store.inbox import Row

#: How often new events are looked for, in ms, and how many are read at once.
POLL_MS = 250
EVENTS_MAX = 1_000


def follow(
    read: Callable[[], AbstractContextManager[Snapshot]], last: int, closed: Callable[[], bool]
) -> Iterator[Row]:
    """The `last` newest events, then each new one, in order, until `closed` says so.

    `closed` waits a moment before it answers.
    """
    with read() as seen:
        newest = inbox.listed(seen, limit=max(last, 1))
    yield from reversed(newest[:last])
    at = newest[0].id if newest else 0
    while not closed():
        with read() as seen:
            rows = inbox.after(seen, at, EVENTS_MAX)
        yield from rows
        at = rows[-1].id if rows else at


@contextlib.contextmanager
def stdout_closed() -> Iterator[Callable[[], bool]]:
    """A function that waits for POLL_MS and says whether nobody reads our stdout any more.

    Within the block a write to a pipe without a reader ends the block quietly.
    """
    poller = select.poll()
    # No event is asked for: a pipe without a reader is reported all the same.
    poller.register(sys.stdout.fileno(), 0)
    try:
        yield lambda: bool(poller.poll(POLL_MS))
    except BrokenPipeError:
        # What is still in the buffer goes nowhere when the interpreter flushes it.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
