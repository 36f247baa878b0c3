"""What a stored thing is called, and how it looks as JSON, wherever it is listed."""

import json
import shlex
from typing import TYPE_CHECKING

from receiver.console import rfc3339
from store import inbox
from store.database import Snapshot
from store.inbox import Row
from store.operations import Key
from store.resources import Name

if TYPE_CHECKING:
    # Listings are of one of them: the others need not be imported for it.
    from store.attempts import Attempt
    from store.audit import Act
    from store.conflicts import Conflict
    from store.fetches import Fetch
    from store.ledger import Entry
    from store.links import Link
    from store.outbox import Message
    from store.parked import Fact
    from store.records import Record
    from store.resources import Resource


def name_of(row: Row) -> str:
    """`source/account/id`, or `source/id` where the account is empty."""
    return "/".join(filter(None, (row.source, row.account, row.event_id)))


def full_name(row: Row) -> str:
    """The same, with a place for an empty account too: it names this event and no other."""
    return f"{row.source}/{row.account}/{row.event_id}"


def times(count: int) -> str:
    """How often, in words."""
    return "once" if count == 1 else f"{count} times"


def mending(total: int) -> str:
    """What to do about a balance that is not the sum of its entries."""
    return (
        "the entries are what counts, and something else than Receiver wrote to "
        f"receiver_balances: find it, then set the balance to {total} there"
    )


def handle(snapshot: Snapshot, row: Row) -> str:
    """The shortest name by which a command finds the event, quoted for a shell."""
    for name in (row.event_id, full_name(row)):
        if [found.id for found in inbox.named(snapshot, name, 2)] == [row.id]:
            return shlex.quote(name)
    return str(row.id)


def event(row: Row) -> dict[str, object]:
    """An event; `source` is its identity, `endpoint` the source that it came in by."""
    return {
        "row": row.id,
        "source": row.source,
        "endpoint": row.endpoint,
        "origin": row.origin,
        "account": row.account,
        "id": row.event_id,
        "type": row.type,
        "state": row.state,
        "reason": row.reason,
        "duplicates": row.duplicates,
        "same_body_as": row.same_body_as,
        "attempts": row.attempts,
        "received_at": rfc3339(row.received_ms),
        "settled_at": rfc3339(row.settled_ms),
        "next_attempt_at": rfc3339(row.next_attempt_ms),
        "last_error": row.last_error,
    }


def fact(waited_for: "Fact") -> dict[str, object]:
    """What a parked event waits for."""
    about: dict[str, object] = {
        "for": waited_for.kind,
        "source": waited_for.source,
        "account": waited_for.account,
    }
    if waited_for.kind == "link":
        about["customer"] = waited_for.key
    if waited_for.kind == "entry":
        about |= {"subject": waited_for.key, "operation": waited_for.operation}
    if waited_for.kind == "resource":
        about |= {"kind": waited_for.operation, "resource_id": waited_for.key}
    return about


def fact_words(waited_for: "Fact") -> str:
    """The same as part of a sentence."""
    match waited_for.kind:
        case "link":
            account = f" of account {waited_for.account}" if waited_for.account else ""
            return f"the link of customer {waited_for.key}{account}"
        case "entry":
            return f"the ledger entry {entry_key(waited_for)}"
        case "resource":
            return f"the state of {waited_for.operation} {waited_for.key}"
    return "you to say whose it is"


def entry_key(waited_for: "Fact") -> Key:
    """The business key of the entry that is waited for."""
    return Key(waited_for.source, waited_for.account, waited_for.key, waited_for.operation)


def resource_name(waited_for: "Fact") -> Name:
    """The resource whose state is waited for."""
    return Name(waited_for.source, waited_for.account, waited_for.operation, waited_for.key)


def conflict(one: "Conflict", row: Row) -> dict[str, object]:
    """A conflict, without its content."""
    return {
        "conflict": one.id,
        "source": row.source,
        "endpoint": row.endpoint,
        "account": row.account,
        "id": row.event_id,
        "type": row.type,
        "received_at": rfc3339(one.received_ms),
        "deliveries": one.deliveries,
        "request_id": one.request_id,
        "resolved_at": rfc3339(one.resolved_ms),
        "resource": one.resource,
    }


def resource(one: "Resource") -> dict[str, object]:
    """What is known of a resource; `source` is the identity, `event` the row that brought it."""
    return one.name._asdict() | {
        "state": one.state,
        "fields": json.loads(one.fields),
        "version": one.version,
        "terminal": one.terminal,
        "deleted": one.deleted,
        "contested": one.contested,
        "came_from": one.came_from,
        "event": one.event,
        "updated_at": rfc3339(one.updated_ms),
        "checked_at": rfc3339(one.checked_ms),
    }


def fetch(one: "Fetch") -> dict[str, object]:
    """What is, or was, still to be fetched."""
    return one.name._asdict() | {
        "endpoint": one.endpoint,
        "state": one.state,
        "attempts": one.attempts,
        "last_error": one.last_error,
        "owed_since": rfc3339(one.wanted_ms),
        "next_attempt_at": rfc3339(one.next_attempt_ms),
        "settled_at": rfc3339(one.settled_ms),
        "event": one.event,
    }


def link(one: "Link") -> dict[str, object]:
    """A link."""
    return {
        "source": one.source,
        "account": one.account,
        "customer": one.customer,
        "workspace": one.workspace,
        "created_at": rfc3339(one.created_ms),
    }


def message(one: "Message") -> dict[str, object]:
    """A message, without its body; `event` is the row of the event that owes it."""
    return {
        "id": one.id,
        "operation_key": one.operation_key,
        **key(one.key),
        "destination": one.destination,
        "name": one.name,
        "state": one.state,
        "attempts": one.attempts,
        "last_error": one.last_error,
        "created_at": rfc3339(one.created_ms),
        "settled_at": rfc3339(one.settled_ms),
        "next_attempt_at": rfc3339(one.next_attempt_ms),
        "event": one.event,
    }


def recipient(one: "Message") -> str:
    """The destination of a message, and the name that tells it from others to the same."""
    return f"{one.destination} ({one.name})" if one.name else one.destination


def attempt(one: "Attempt") -> dict[str, object]:
    """One try at an event or a message."""
    return {
        "attempt": one.attempt,
        "outcome": one.outcome,
        "duration_ms": one.duration_ms,
        "error": one.error,
    }


def attempt_words(one: "Attempt") -> str:
    """The same as part of a sentence, as in `number 2 failed after 1.5 s: 503`."""
    if one.outcome is None:
        return f"number {one.attempt} is running"
    took = f" after {one.duration_ms / 1000:.3g} s" if one.duration_ms else ""
    why = f": {one.error}" if one.error else ""
    return f"number {one.attempt} {one.outcome}{took}{why}"


def act(one: "Act") -> dict[str, object]:
    """An act by hand, its detail decoded."""
    return {
        "id": one.id,
        "at": rfc3339(one.at_ms),
        "actor": one.actor,
        "action": one.action,
        "target": one.target,
        "reason": one.reason,
        "detail": one.details,
    }


def key(business_key: Key) -> dict[str, object]:
    """The four parts of a business key."""
    return business_key._asdict()


def entry(one: "Entry") -> dict[str, object]:
    """A ledger entry; the target is what a reversal takes back."""
    return key(one.key) | {
        "workspace": one.workspace,
        "unit": one.unit,
        "amount": one.amount,
        "target_subject": one.target_subject,
        "target_operation": one.target_operation,
        "created_at": rfc3339(one.created_ms),
    }


def record(one: "Record") -> dict[str, object]:
    """A record, its data decoded."""
    return key(one.key) | {
        "kind": one.kind,
        "workspace": one.workspace,
        "data": json.loads(one.data),
        "created_at": rfc3339(one.created_ms),
    }
