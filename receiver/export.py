"""Everything of one kind as objects, a page at a time: flat memory, no long look at the file."""

import base64
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from receiver import shown
from store import audit, inbox, ledger, outbox, records
from store.audit import Act
from store.database import Snapshot
from store.inbox import Row
from store.ledger import Entry
from store.outbox import Message
from store.records import Record

#: Rows in memory at a time, and bytes of their payloads.
PAGE_ROWS, PAGE_BYTES = 1_000, 8_388_608

KINDS = ("events", "ledger", "records", "messages", "audit")

T = TypeVar("T")
P = TypeVar("P")

Objects = Iterator[dict[str, object]]

#: Opens the file anew for each page: whoever reads slowly keeps no -wal from being used again.
Reading = Callable[[], AbstractContextManager[Snapshot]]


def export(reading: Reading, kind: str, since_ms: int | None, *, payload: bool) -> Objects:
    """The objects of one of KINDS, oldest first, or in the order of their keys."""
    match kind:
        case "events":
            return _events(reading, since_ms, payload)
        case "ledger":
            return _pages(reading, ledger.after, since_ms, None, lambda one: one.key, _entry)
        case "records":
            return _pages(reading, records.after, since_ms, None, lambda one: one.key, _record)
        case "messages":
            return _pages(reading, outbox.after, since_ms, 0, lambda one: one.id, _message)
    return _pages(reading, audit.after, since_ms, 0, lambda one: one.id, _act)


def _events(reading: Reading, since_ms: int | None, payload: bool) -> Objects:
    after = 0
    while True:
        with reading() as seen:
            page = inbox.after(seen, after, PAGE_ROWS)
            bodies = _bodies(seen, page) if payload else [{}] * len(page)
        if not page:
            return
        # Where their payloads are large, a page has fewer.
        for row, body in zip(page, bodies, strict=False):
            if row.received_ms >= (since_ms or 0):
                yield {"kind": "event"} | shown.event(row) | body
            after = row.id


def _bodies(seen: Snapshot, page: Sequence[Row]) -> list[dict[str, object]]:
    """The payloads of a page's first events, up to PAGE_BYTES or a little more."""
    found: list[dict[str, object]] = []
    size = 0
    for row in page:
        body = inbox.payload(seen, row.id)
        found.append(_body(body))
        size += len(body or b"")
        if size > PAGE_BYTES:
            break
    return found


def _body(body: bytes | None) -> dict[str, object]:
    if body is None:
        return {"payload": None}
    try:
        return {"payload": body.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(body).decode()}


def _pages(
    reading: Reading,
    after: Callable[..., list[T]],
    since_ms: int | None,
    place: P,
    place_of: Callable[[T], P],
    object_of: Callable[[T], dict[str, object]],
) -> Objects:
    while True:
        with reading() as seen:
            page = after(seen, place, since_ms=since_ms, limit=PAGE_ROWS)
        yield from map(object_of, page)
        if len(page) < PAGE_ROWS:
            return
        place = place_of(page[-1])


def _entry(one: Entry) -> dict[str, object]:
    return {"kind": "entry"} | shown.entry(one)


def _record(one: Record) -> dict[str, object]:
    # The record's own kind is one of its fields.
    fields = shown.record(one)
    return {"kind": "record", "record_kind": fields.pop("kind")} | fields


def _message(one: Message) -> dict[str, object]:
    return {"kind": "message"} | shown.message(one)


def _act(one: Act) -> dict[str, object]:
    return {"kind": "act"} | shown.act(one)
