"""Everything of one kind as objects, a page at a time: flat memory, no long look at the file."""

import base64
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from receiver import shown
from receiver.console import rfc3339
from store import audit, inbox, ledger, outbox, records
from store.audit import Act
from store.database import Snapshot
from store.inbox import Row
from store.operations import Key

#: Rows in memory at a time, and bytes of their payloads.
PAGE_ROWS, PAGE_BYTES = 1_000, 8_388_608

KINDS = ("events", "ledger", "records", "messages", "audit")

Objects = Iterator[dict[str, object]]

#: Opens the file anew for each page: whoever reads slowly keeps no -wal from being used again.
Reading = Callable[[], AbstractContextManager[Snapshot]]


def export(reading: Reading, kind: str, since_ms: int | None, *, payload: bool) -> Objects:
    """The objects of one of KINDS, oldest first, or in the order of their keys."""
    match kind:
        case "events":
            return _events(reading, since_ms, payload)
        case "ledger":
            return _ledger(reading, since_ms)
        case "records":
            return _records(reading, since_ms)
        case "messages":
            return _messages(reading, since_ms)
    return _audit(reading, since_ms)


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


def _ledger(reading: Reading, since_ms: int | None) -> Objects:
    key: Key | None = None
    while True:
        with reading() as seen:
            page = ledger.after(seen, key, since_ms=since_ms, limit=PAGE_ROWS)
        yield from ({"kind": "entry"} | shown.entry(one) for one in page)
        if len(page) < PAGE_ROWS:
            return
        key = page[-1].key


def _records(reading: Reading, since_ms: int | None) -> Objects:
    key: Key | None = None
    while True:
        with reading() as seen:
            page = records.after(seen, key, since_ms=since_ms, limit=PAGE_ROWS)
        # The record's own kind is one of its fields.
        for one in page:
            fields = shown.record(one)
            yield {"kind": "record", "record_kind": fields.pop("kind")} | fields
        if len(page) < PAGE_ROWS:
            return
        key = page[-1].key


def _messages(reading: Reading, since_ms: int | None) -> Objects:
    after = 0
    while True:
        with reading() as seen:
            page = outbox.after(seen, after, since_ms=since_ms, limit=PAGE_ROWS)
        yield from ({"kind": "message"} | shown.message(one) for one in page)
        if len(page) < PAGE_ROWS:
            return
        after = page[-1].id


def _audit(reading: Reading, since_ms: int | None) -> Objects:
    after = 0
    while True:
        with reading() as seen:
            page = audit.after(seen, after, since_ms=since_ms, limit=PAGE_ROWS)
        yield from ({"kind": "act"} | _act(one) for one in page)
        if len(page) < PAGE_ROWS:
            return
        after = page[-1].id


def _act(one: Act) -> dict[str, object]:
    return {
        "id": one.id,
        "at": rfc3339(one.at_ms),
        "actor": one.actor,
        "action": one.action,
        "target": one.target,
        "reason": one.reason,
        "detail": one.details,
    }
