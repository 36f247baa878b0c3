"""Runs events again in transactions that are undone, to tell what a replay would change."""

import contextlib
import functools
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from receiver import shown
from receiver.named import Absent
from receiver.operate import GAP_S, Declined, check_event
from receiver.process import DUE_MAX, NotReplayable, Processor
from store import attempts, changes, inbox, outbox
from store.changes import Change, Columns, Watch
from store.database import Snapshot, Store, Tx, snapshot
from store.errors import TransactionLost
from store.outbox import Message

#: How long one transaction may go on with further events, in seconds. After it the file is left
#: alone as long as it was held.
HELD_S_MAX = 0.25

# What Python tells of before it reaches out. https://docs.python.org/3/library/audit_events.html
_OUTSIDE = frozenset(
    {
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.kill",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "pty.spawn",
        "socket.connect",
        "socket.getaddrinfo",
        "socket.gethostbyname",
        "socket.sendmsg",
        "socket.sendto",
        "subprocess.Popen",
    }
)
# Its processes start without a word; what starts them is imported then.
_STARTERS = "multiprocessing.popen_"


class Rehearsed(msgspec.Struct, frozen=True):
    """What a replay of one event would do; `problem` if it could not be run, or be done.

    `notes` say what could not be tried, or told.
    """

    row: int
    word: str
    problem: str | None = None
    changes: Sequence[Change] = ()
    messages: Sequence[Message] = ()
    notes: Sequence[str] = ()


def rehearse(store: Store, processor: Processor, rows: Sequence[int]) -> Iterator[list[Rehearsed]]:
    """Run events again without keeping anything; yields one list for each transaction.

    Within it an event meets what those before it did, as in a real replay.
    """
    left = list(rows)
    while left:
        started = time.monotonic()
        told = store.rehearse(functools.partial(_some, processor=processor, rows=left, store=store))
        yield told
        left = left[len(told) :]
        if left:
            time.sleep(max(GAP_S, time.monotonic() - started))


@contextlib.contextmanager
def sealed() -> Iterator[None]:
    """Let no Python code in this process reach the network or start a program.

    What it does through a library that Python is not told of, it still can. A thread that was
    begun meanwhile stays sealed when the others are free again.
    """
    closed, known = True, frozenset(threading.enumerate())
    strays: frozenset[threading.Thread] = frozenset()

    def refuse(event: str, arguments: tuple[object, ...]) -> None:
        starts = event == "import" and str(arguments[0]).startswith(_STARTERS)
        if (starts or event in _OUTSIDE) and (closed or threading.current_thread() in strays):
            raise PermissionError(f"a dry run reaches nothing outside ({event})")

    # It stays for the rest of the process: there is no way to take it out.
    sys.addaudithook(refuse)
    try:
        yield
    finally:
        strays = frozenset(threading.enumerate()) - known
        closed = False


def as_object(seen: Snapshot, told: Rehearsed, *, payload: bool) -> dict[str, object]:
    """What a replay would do, for JSON."""
    return {
        "row": told.row,
        "id": _id(seen, told.row),
        "would_be": told.word,
        "problem": told.problem,
        "changes": [
            {
                "table": one.table,
                "key": _plain(one.table, one.key),
                "before": None if one.before is None else _plain(one.table, one.before, payload),
                "after": None if one.after is None else _plain(one.table, one.after, payload),
            }
            for one in told.changes
        ],
        "messages": [
            shown.message(one) | ({"body": json.loads(one.body)} if payload else {})
            for one in told.messages
        ],
        "notes": list(told.notes),
    }


def lines(seen: Snapshot, told: Rehearsed, *, payload: bool) -> Iterator[tuple[str, str | None]]:
    """The same for people, each line with its colour."""
    why = f": {told.problem}" if told.problem else ""
    known = inbox.by_row(seen, told.row)
    name = str(told.row) if known is None else shown.handle(seen, known)
    word = told.word if told.word == "not run" else f"would be {told.word}"
    yield f"{name}  {word}{why}", None if told.word in ("done", "ignored") else "yellow"
    for one in told.changes:
        mark, colour = _MARKS[one.before is None, one.after is None]
        yield f"  {mark} {one.table}  {_words(one)}", colour
    for message in told.messages:
        owed = "would be owed" if message.state == "pending" else f"would be {message.state}"
        said = f": {message.last_error}" if message.last_error else ""
        yield f"  message to {shown.recipient(message)} {owed}{said}", "cyan"
        if payload:
            for line in json.dumps(json.loads(message.body), indent=2).splitlines():
                yield f"    {line}", None
    for note in told.notes:
        yield f"  {note}", "yellow"


_MARKS = {(True, False): ("+", "green"), (False, True): ("-", "red"), (False, False): ("~", None)}


def _words(change: Change) -> str:
    """A new or a deleted row's values, or what changes in a row."""
    before, after = change.before, change.after
    if before is None or after is None:
        return _listed(_plain(change.table, before or after or {}))
    was, becomes = _plain(change.table, before), _plain(change.table, after)
    different = [name for name in after if before.get(name) != after[name]]
    words = ", ".join(
        f"{name} {_value(was.get(name))} -> {_value(becomes[name])}" for name in different
    )
    return f"{_listed(_plain(change.table, change.key))}: {words}"


def _listed(values: dict[str, object]) -> str:
    return " ".join(
        f"{name}={_value(value)}" for name, value in values.items() if value is not None
    )


def _value(value: object) -> str:
    return "null" if value is None else f"{value:.200}" if isinstance(value, str) else str(value)


def _plain(table: str, values: Columns, payload: bool = False) -> dict[str, object]:
    """Values as text or numbers, without what came with the event or goes out with a message."""
    hidden = {"receiver_outbox": "body", "receiver_payloads": "body"}.get(table)
    return {
        name: f"{len(value)} bytes" if isinstance(value, bytes) else value
        for name, value in values.items()
        if payload or name != hidden
    }


def _id(seen: Snapshot, row: int) -> str | None:
    known = inbox.by_row(seen, row)
    return None if known is None else known.event_id


def _some(tx: Tx, *, processor: Processor, rows: Sequence[int], store: Store) -> list[Rehearsed]:
    deadline = time.monotonic() + HELD_S_MAX
    told: list[Rehearsed] = []
    with snapshot(Path(store.path)) as base, changes.watching(tx, base) as watch:
        for row in rows[:DUE_MAX]:
            told.append(_one(tx, processor, row, watch))
            if not tx.is_open or time.monotonic() > deadline:
                break
    return told


def _one(tx: Tx, processor: Processor, row: int, watch: Watch) -> Rehearsed:
    try:
        check_event(tx, row)
        attempts.close(tx, event=row)
        word = processor.replay(tx, row).word
    except (Absent, Declined, NotReplayable) as error:
        return Rehearsed(row, "not run", str(error))
    except TransactionLost as error:
        why = f"it would end the whole transaction ({error}), and be kept without effects"
        return Rehearsed(row, "pending", why)
    changed = [one for one in watch.take() if not _is_bookkeeping(one)]
    owed = [one.after for one in changed if one.table == "receiver_outbox" and not one.before]
    messages = [outbox.by_id(tx, int(str(one["id"]))) for one in owed if one is not None]
    return Rehearsed(
        row,
        word,
        None if word == "done" else _reason(tx, row),
        changed,
        [one for one in messages if one is not None],
        [*_repeated(word, changed), *_unprepared(tx, processor, row), *_untold(watch)],
    )


def _is_bookkeeping(change: Change) -> bool:
    """Whether it only counts, or tells when an event was settled last."""
    if change.table != "receiver_events" or change.before is None or change.after is None:
        return change.table == "receiver_tallies"
    before, after = change.before, change.after
    return all(before[name] == after[name] for name in after if name != "settled_ms")


def _repeated(word: str, changed: Sequence[Change]) -> Iterator[str]:
    if word == "done" and not changed:
        yield "all had been done before: no operation and no ledger entry would be new"


def _reason(seen: Snapshot, row: int) -> str | None:
    known = inbox.by_row(seen, row)
    assert known is not None, "it was run just now"
    return known.reason or known.last_error


def _unprepared(seen: Snapshot, processor: Processor, row: int) -> Iterator[str]:
    known = inbox.by_row(seen, row)
    assert known is not None, "it was run just now"
    for rule in processor.settings.rules_of_stored(known.endpoint, known.source, known.type):
        if rule.prepare is not None:
            yield (
                f"the prepare function {rule.prepare} was not run: {rule.operation} "
                "met no event.prepared"
            )


def _untold(watch: Watch) -> Iterator[str]:
    for name in sorted(watch.untold):
        yield f"table {name} was changed too, in a way that can't be told here"
