"""Which bodies are let go of: those that are old enough, and a person's when that is asked."""

import functools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from receiver import rejected
from receiver.config import Retention, Settings
from receiver.extract import canonical, whole
from receiver.operate import GAP_S, By, Declined, target_of
from store import audit, forgotten, inbox, outbox, resources
from store.database import Snapshot, Store, Tx
from store.forgotten import Held
from store.inbox import Row
from store.operations import Key

T = TypeVar("T")

#: Events looked at in one read, and events that one transaction lets go of the bodies of.
SCAN_EVENTS, BATCH_EVENTS = 1_000, 100

#: Bodies that are in memory at a time, while a person's are looked for.
PAGE_BODIES = 50

#: A number counts as somebody's id from so many digits on: shorter ones are amounts and dates.
ID_DIGITS_MIN = 6

DAY_MS = 86_400_000

_PLAIN = re.compile(rb"[A-Za-z0-9]+")

#: Gives what a look at the file finds, each time at the file as it is then.
Look = Callable[[Callable[[Snapshot], T]], T]


def looking(store: Store) -> Callable[[Callable[[Snapshot], T]], T]:
    """Looks through a store's own connection. Raises Declined while the file can't be read."""

    def look(see: Callable[[Snapshot], T]) -> T:
        found = store.look(lambda snapshot, _: (see(snapshot),))
        if found is None:
            raise Declined("the file can't be read now: try again")
        return found[0]

    return look


# By age


def is_due(settings: Settings, held: Held, now_ms: int) -> bool:
    """Whether an event that is finished is old enough for its source."""
    source = settings.sources.get(held.endpoint)
    retention = Retention() if source is None else source.retention
    if held.state == "ignored" and not retention.ignored:
        return True
    return held.received_ms < now_ms - retention.payload_days * DAY_MS


def due(
    settings: Settings, look: "Look[list[Held]]", first: int, last: int, now_ms: int
) -> Iterator[tuple[int, list[Held]]]:
    """Events from `first` to `last` whose bodies are due, in batches; with how far that is."""
    for after in range(first - 1, last, SCAN_EVENTS):
        until = min(after + SCAN_EVENTS, last)
        held = look(functools.partial(forgotten.finished, after=after, until=until))
        ripe = [one for one in held if is_due(settings, one, now_ms)]
        for start in range(0, len(ripe), BATCH_EVENTS):
            batch = ripe[start : start + BATCH_EVENTS]
            yield batch[-1].event, batch
        yield until, []


def prune(store: Store, settings: Settings, batch: Sequence[Held]) -> int:
    """Let go of the bodies of these events, in one transaction; how many events had any."""
    contents = [content_of(store, settings, one.event) for one in batch]

    def run(tx: Tx) -> int:
        pruned = 0
        for one, (content, mask) in zip(batch, contents, strict=True):
            # The operator may have run it again meanwhile.
            if forgotten.finished(tx, one.event - 1, one.event):
                forgotten.forget(tx, one.event, "pruned", content, mask)
                pruned += 1
        return pruned

    pruned = store.write(run)
    time.sleep(GAP_S)
    return pruned


def prune_rejected(tx: Tx, settings: Settings) -> int:
    """Let go of the bodies of refused requests that are old enough; how many."""
    return sum(
        forgotten.forget_rejected(tx, name, tx.now_ms - source.retention.payload_days * DAY_MS)
        for name, source in settings.sources.items()
    )


def note_prune(tx: Tx, actor: str, counts: Mapping[str, tuple[int, int]]) -> None:
    """Write down what went, by source."""
    detail = {name: events for name, (events, _) in counts.items()}
    audit.add(tx, actor, "prune", "payloads", "older than payload_days", json.dumps(detail))


def content_of(store: Store, settings: Settings, event: int) -> tuple[bytes | None, Sequence[str]]:
    """What to recognise a redelivery of the payload by: its canonical hash, and the mask."""
    known, body = looking(store)(
        lambda seen: (inbox.by_row(seen, event), inbox.payload(seen, event))
    )
    source = None if known is None else settings.sources.get(known.endpoint)
    mask = () if source is None else source.contract.volatile
    if known is None or body is None:
        return None, mask
    return canonical(body, known.content_type, mask), mask


# A person's


def mentioning(look: "Look[list[tuple[int, str, bytes]]]", customer: str) -> Iterator[list[int]]:
    """Events whose payload has this value, page by page as they are looked through."""
    after = 0
    while page := look(functools.partial(forgotten.payloads, after=after, limit=PAGE_BODIES)):
        yield [event for event, kind, body in page if mentions(body, kind, customer)]
        after = page[-1][0]


def in_conflicts(
    look: "Look[list[tuple[int, int, str, bytes]]]", customer: str
) -> Iterator[list[int]]:
    """Events of which a conflict has this value, page by page."""
    after = 0
    while page := look(functools.partial(forgotten.conflicts, after=after, limit=PAGE_BODIES)):
        yield [event for _, event, kind, body in page if mentions(body, kind, customer)]
        after = page[-1][0]


def in_what_was_made(store: Store, customer: str) -> Iterator[list[int]]:
    """Events whose records or resources have this value, page by page.

    Those of an event stay when its payload has gone by age.
    """
    look = looking(store)
    key: Key | None = None
    while page := look(functools.partial(forgotten.records, after=key, limit=PAGE_BODIES)):
        yield [event for _, event, data in page if mentions(data.encode(), "json", customer)]
        key = page[-1][0]
    number = 0
    while known := look(functools.partial(forgotten.projected, after=number, limit=PAGE_BODIES)):
        yield [event for _, event, data in known if mentions(data.encode(), "json", customer)]
        number = known[-1][0]


def mentions(body: bytes, content_type: str, customer: str) -> bool:
    """Whether a body has this as a whole value anywhere; one that can't be read, if it has it."""
    sought = customer.encode()
    # Written otherwise it would have a backslash or a percent sign.
    if _PLAIN.fullmatch(sought) and not (sought in body or b"\\" in body or b"%" in body):
        return False
    document = whole(body, content_type)
    return sought in body if document.problem is not None else _has(document.value, customer)


def _has(root: object, customer: str) -> bool:
    nodes = [root]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            nodes.extend(node.values())
        elif isinstance(node, list):
            nodes.extend(node)
        elif _is(node, customer):
            return True
    return False


def _is(value: object, customer: str) -> bool:
    if isinstance(value, str):
        return value == customer
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return is_number and len(customer) >= ID_DIGITS_MIN and str(value) == customer


def redact(tx: Tx, event: int, content: tuple[bytes | None, Sequence[str]], by: By) -> None:
    """Let go of a person's data in the event, the keys, operations and amounts stay.

    Raises Declined for an event, or a message of its, that is still to be worked on.
    """
    row = inbox.by_row(tx, event)
    assert row is not None, "events are never deleted"
    _check_finished(tx, row)
    forgotten.forget(tx, event, "redacted", *content)
    records = forgotten.forget_records(tx, event)
    resources.forget_fields(tx, event)
    audit.add(
        tx,
        by.actor,
        "redact",
        target_of(event),
        by.reason,
        json.dumps({"records": records}),
    )


def in_rejected(snapshot: Snapshot, customer: str) -> list[int]:
    """Refused requests whose kept body has this value, as it came or unpacked."""
    return [
        number
        for number, body in forgotten.rejected(snapshot)
        if any(_says(each, customer) for each in (body, rejected.unpacked(body)) if each)
    ]


def _says(body: bytes, customer: str) -> bool:
    kinds = ("json", "form")
    return customer.encode() in body or any(mentions(body, kind, customer) for kind in kinds)


def redact_rejected(tx: Tx, customer: str, by: By) -> int:
    """Let go of what refused requests held that mention the person; how many."""
    found = in_rejected(tx, customer)
    for number in found:
        forgotten.forget_one_rejected(tx, number)
        audit.add(tx, by.actor, "redact", f"rejection {number}", by.reason, "{}")
    return len(found)


def _check_finished(tx: Tx, row: Row) -> None:
    if not row.is_final or row.state == "dead":
        raise Declined(
            f"event {row.id} is {row.state}, and can't be finished without its payload: "
            f"`receiver events resolve {row.id}` first"
        )
    for message in outbox.of_event(tx, row.id):
        if message.state in ("pending", "review"):
            raise Declined(
                f"message {message.id} of event {row.id} is {message.state}: let it be sent, or "
                f"`receiver outbox cancel {message.id}` first"
            )
