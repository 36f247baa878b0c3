"""Tells what happened to one event: everything the file knows of it, in order of time."""

import contextlib
import shlex
from collections.abc import Iterator, Sequence

import msgspec

from receiver import projection, rules, shown
from receiver.config import Link, Project, Settings
from receiver.console import rfc3339
from receiver.extract import NOT_JSON
from receiver.operate import target_of, target_of_link, target_of_message
from receiver.process import NotReplayable, stored_event
from receiver.select import Unjudgeable
from receiver.verify import LIVE_ON_TEST, Event
from store import (
    attempts,
    audit,
    conflicts,
    deliveries,
    fetches,
    forgotten,
    inbox,
    ledger,
    links,
    operations,
    outbox,
    parked,
    records,
    resources,
)
from store.database import Snapshot
from store.deliveries import Delivery
from store.inbox import Row
from store.operations import Claim, Key
from store.resources import Name

#: Of each kind of thing, how many are told.
TOLD_MAX = 100


class Moment(msgspec.Struct, frozen=True):
    """One thing that happened; `facts` say it for programs, as `words` do for people."""

    at_ms: int
    what: str
    words: str
    facts: dict[str, object] = {}


class Story(msgspec.Struct, frozen=True):
    """What happened to an event; `waits_for` and `next_steps` are for one that is unfinished."""

    row: Row
    name: str
    moments: tuple[Moment, ...]
    waits_for: parked.Fact | None
    next_steps: tuple[str, ...]


def tell(snapshot: Snapshot, settings: Settings, row: Row) -> Story:
    """The whole story of a stored event."""
    name = shown.handle(snapshot, row)
    waits_for = parked.of_event(snapshot, row.id)
    moments = [
        *_deliveries(snapshot, row),
        *_conflicts(snapshot, row),
        *_twins(snapshot, row),
        *acts(snapshot, target_of(row.id)),
        *_waits(snapshot, row),
        *_parking(snapshot, row, waits_for),
        *_attempts(snapshot, row),
        *_changes(snapshot, settings, row),
        *_messages(snapshot, row),
        *_end(row),
        *_forgotten(snapshot, row),
    ]
    moments.sort(key=lambda moment: moment.at_ms)
    steps = tuple(_next_steps(snapshot, settings, row, name, waits_for))
    return Story(row, name, tuple(moments), waits_for, steps)


def as_object(told: Story) -> dict[str, object]:
    """The story for JSON: the event's fields, and `story` in order of time."""
    moments = [
        {"at": rfc3339(one.at_ms), "what": one.what, "words": one.words, **one.facts}
        for one in told.moments
    ]
    return shown.event(told.row) | {
        "workspace": told.row.workspace,
        "claimed_account": told.row.claimed_account,
        "request_id": told.row.request_id,
        "waits_for": None if told.waits_for is None else shown.fact(told.waits_for),
        "story": moments,
        "next": list(told.next_steps),
    }


def _deliveries(snapshot: Snapshot, row: Row) -> Iterator[Moment]:
    """The first delivery, and the newest of those that brought the same again."""
    first = Delivery(row.id, row.received_ms, row.stored_ms, row.answer, row.secret, row.request_id)
    how = "from the sender's API by reconcile, " if row.origin == "reconcile" else ""
    yield _delivery("received", f"by source {row.endpoint}, {how}", first)
    kept = deliveries.of_event(snapshot, row.id)
    left = row.duplicates - len(kept)
    if kept and left > 0:
        words = f"{left} redeliveries before this one are only counted"
        yield Moment(kept[0].received_ms, "redelivered", words, {"deliveries": left})
    for one in kept:
        yield _delivery("redelivered", "", one)


def _delivery(what: str, by: str, one: Delivery) -> Moment:
    proof = f"signed with {one.secret}" if one.secret else "not signed"
    waited_ms = max(0, one.stored_ms - one.received_ms)
    later = f", written after {waited_ms} ms" if waited_ms else ""
    return Moment(
        one.received_ms,
        what,
        f"{by}{proof}, request {one.request_id}: {one.answer}{later}",
        {
            "secret": one.secret,
            "request_id": one.request_id,
            "answer": one.answer,
            "latency_ms": waited_ms,
        },
    )


def _end(row: Row) -> Iterator[Moment]:
    if row.settled_ms is not None:
        yield Moment(row.settled_ms, row.state, row.reason or "nothing is left to do")


def _forgotten(snapshot: Snapshot, row: Row) -> Iterator[Moment]:
    left = forgotten.of_event(snapshot, row.id)
    if left is not None and left.why == "pruned":
        words = "its payload: by age; a redelivery is recognised all the same"
        yield Moment(left.forgotten_ms, "pruned", words)


def _attempts(snapshot: Snapshot, row: Row) -> Iterator[Moment]:
    for one in attempts.of_event(snapshot, row.id)[-TOLD_MAX:]:
        yield Moment(one.started_ms, "attempt", shown.attempt_words(one), shown.attempt(one))


# What it owes


def _messages(snapshot: Snapshot, row: Row) -> Iterator[Moment]:
    for one in outbox.of_event(snapshot, row.id)[:TOLD_MAX]:
        to = f"message {one.id} to {shown.recipient(one)}"
        words = f"{to} is {one.state}" + (f": {one.last_error}" if one.last_error else "")
        yield Moment(one.created_ms, "message", words, shown.message(one))
        for attempt in attempts.of_message(snapshot, one.id)[-TOLD_MAX:]:
            facts = shown.attempt(attempt) | {"message": one.id}
            yield Moment(attempt.started_ms, "send", f"{to}: {shown.attempt_words(attempt)}", facts)
        yield from acts(snapshot, target_of_message(one.id), f"{to}: ")


# What it changed, and what others had changed before it


def _changes(snapshot: Snapshot, settings: Settings, row: Row) -> Iterator[Moment]:
    event = _again(snapshot, settings, row)
    if event is not None:
        yield from _links(snapshot, settings, event)
    made = operations.of_event(snapshot, row.id)[:TOLD_MAX]
    yield from () if event is None else _resources(snapshot, settings, event)
    for key, claim, at_ms in made:
        facts = shown.key(key) | {"kind": claim.kind, "by": "this event"}
        yield Moment(at_ms, "operation", f"{_claimed(claim)} by {key}", facts)
        yield from _amounts(snapshot, key)
    own = {key for key, _, _ in made}
    asked = () if event is None else settings.rules_for(event.source, event.type)
    for key in () if event is None else rules.keys_of(asked, event):
        if key not in own:
            yield from _done_before(snapshot, key)


def _resources(snapshot: Snapshot, settings: Settings, event: Event) -> Iterator[Moment]:
    """What is known now of the resource that the event tells of, and what is still owed."""
    for rule in settings.rules_for(event.source, event.type):
        if not isinstance(rule.effect, Project):
            continue
        with contextlib.suppress(Unjudgeable):
            resource_id = projection.id_of(rule.effect.id, rules.scope_of(event))
            name = Name(event.identity, event.account, rule.effect.kind, resource_id)
            yield from _resource(snapshot, name)


def _resource(snapshot: Snapshot, name: Name) -> Iterator[Moment]:
    what = f"{name.kind} {name.resource_id}"
    found, fetch = resources.find(snapshot, name), fetches.find(snapshot, name)
    if found is not None:
        by = "fetched" if found.came_from == "fetch" else "told by an event"
        words = f"{what} is {found.state or 'known'} since then, {by}"
        yield Moment(found.updated_ms, "resource", words, shown.resource(found))
    if fetch is not None and fetch.state != "done":
        why = f": {fetch.last_error}" if fetch.last_error else ""
        words = f"{what} is to be fetched, {fetch.state}{why}"
        yield Moment(fetch.wanted_ms, "fetch", words, shown.fetch(fetch))


def _done_before(snapshot: Snapshot, key: Key) -> Iterator[Moment]:
    claim, holder = operations.find(snapshot, key), operations.holder(snapshot, key)
    if claim is None or holder is None:
        return
    event, at_ms = holder
    by = "the app or by hand"
    if event is not None:
        other = inbox.by_row(snapshot, event)
        by = f"event {event}" if other is None else f"event {shown.handle(snapshot, other)}"
    facts = shown.key(key) | {"kind": claim.kind, "by": by}
    yield Moment(at_ms, "operation", f"{_claimed(claim)} by {key}: done once, by {by}", facts)
    yield from _amounts(snapshot, key)


def _claimed(claim: Claim) -> str:
    whom = f" for workspace {claim.workspace}" if claim.workspace else ""
    return f"{claim.kind}{whom}"


def _amounts(snapshot: Snapshot, key: Key) -> Iterator[Moment]:
    entry, record = ledger.find(snapshot, key), records.find(snapshot, key)
    if entry is not None:
        words = f"{entry.amount:+} {entry.unit} for workspace {entry.workspace}"
        yield Moment(entry.created_ms, "ledger", words, shown.entry(entry))
    for one in ledger.reversals(snapshot, key)[:TOLD_MAX]:
        words = f"{one.amount:+} {one.unit} for workspace {one.workspace}, taken back by {one.key}"
        yield Moment(one.created_ms, "ledger", words, shown.entry(one))
    if record is not None:
        words = f"{record.kind}: {record.data:.200}"
        yield Moment(record.created_ms, "record", words, shown.record(record))


def _links(snapshot: Snapshot, settings: Settings, event: Event) -> Iterator[Moment]:
    """The links that the event's rules make, or needed and got after it came; as they are now."""
    needed: dict[str, bool] = {}
    for rule in settings.rules_for(event.source, event.type):
        makes = isinstance(rule.effect, Link)
        path = rule.effect.customer if isinstance(rule.effect, Link) else rule.customer
        with contextlib.suppress(Unjudgeable):
            customer = None if path is None else path.value(rules.scope_of(event))
            needed[str(customer)] = makes or needed.get(str(customer), False)
    for customer, makes in needed.items():
        one = links.find(snapshot, event.identity, event.account, customer)
        if one is not None and (makes or one.created_ms > event.received_ms):
            words = f"customer {one.customer} is linked to workspace {one.workspace}"
            yield Moment(one.created_ms, "link", words, shown.link(one))


def _again(snapshot: Snapshot, settings: Settings, row: Row) -> Event | None:
    """The event as its rules see it, if they do."""
    try:
        event = stored_event(snapshot, settings, row)
    except NotReplayable:
        return None
    return None if event.defect is not None or event.test else event


# What else came, and what was done by hand


def _conflicts(snapshot: Snapshot, row: Row) -> Iterator[Moment]:
    for one in conflicts.of_event(snapshot, row.id):
        often = shown.times(one.deliveries)
        closed = "" if one.resolved_ms is None else " (resolved)"
        yield Moment(
            one.received_ms,
            "conflict",
            f"{_differing(one)}, {often}: conflict {one.id}{closed}",
            {"conflict": one.id, "deliveries": one.deliveries, "request_id": one.request_id},
        )


def _differing(one: conflicts.Conflict) -> str:
    if one.resource is None:
        return "other content came under this id"
    return "it and another claim the same place in the order of a resource"


def _twins(snapshot: Snapshot, row: Row) -> Iterator[Moment]:
    if row.id_signed:
        return
    for other in inbox.twins(snapshot, row):
        name = shown.name_of(other)
        words = f"the same body came as {name}; who sent the id can't be proved"
        yield Moment(other.received_ms, "same body", words, {"event": name, "row": other.id})


def acts(snapshot: Snapshot, target: str, about: str = "") -> Iterator[Moment]:
    """What was done by hand to a target of the audit log."""
    for act in audit.of_target(snapshot, target)[-TOLD_MAX:]:
        facts: dict[str, object] = {"action": act.action, "actor": act.actor, "reason": act.reason}
        yield Moment(act.at_ms, "by hand", f"{about}{_act_words(act)}", facts)


def _act_words(act: audit.Act, upon: str = "") -> str:
    what = f", {upon}" if upon else ""
    why = f": {act.reason}" if act.reason else ""
    return f"{act.action} by {act.actor}{what}{why}"


def _parking(snapshot: Snapshot, row: Row, waits_for: parked.Fact | None) -> Iterator[Moment]:
    since_ms = parked.since(snapshot, row.id)
    if waits_for is not None and since_ms is not None:
        yield _parked(since_ms, "waits", waits_for)


def _waits(snapshot: Snapshot, row: Row) -> Iterator[Moment]:
    """What it waited for before, and how that came."""
    for wait in parked.before(snapshot, row.id):
        yield _parked(wait.since_ms, "waited", wait.fact)
        act = _releasing(snapshot, row, wait.fact)
        if act is not None:
            facts: dict[str, object] = {"action": act.action, "actor": act.actor}
            words = f"it was parked until then; {_act_words(act, act.target)}"
            yield Moment(act.at_ms, "released", words, facts)
            continue
        came_ms = _came_ms(snapshot, wait.fact)
        if came_ms is not None and came_ms >= wait.since_ms:
            words = f"it was parked until then; {shown.fact_words(wait.fact)} came"
            yield Moment(came_ms, "released", words)


def _parked(since_ms: int, verb: str, fact: parked.Fact) -> Moment:
    facts: dict[str, object] = {"waits_for": shown.fact(fact)}
    return Moment(since_ms, "parked", f"{verb} for {shown.fact_words(fact)}", facts)


def _releasing(snapshot: Snapshot, row: Row, fact: parked.Fact) -> audit.Act | None:
    """The act by hand that brought a fact to this event, if one did."""
    if fact.kind in ("attribution", "resource"):
        return None
    target = str(shown.entry_key(fact))
    if fact.kind == "link":
        target = target_of_link(fact.source, fact.account, fact.key)
    acts = audit.of_target(snapshot, target)
    return next((one for one in acts if row.id in _released(one)), None)


def _came_ms(snapshot: Snapshot, fact: parked.Fact) -> int | None:
    """When the fact came, if it is still there."""
    if fact.kind == "link":
        link = links.find(snapshot, fact.source, fact.account, fact.key)
        return None if link is None else link.created_ms
    if fact.kind == "resource":
        found = resources.find(snapshot, shown.resource_name(fact))
        return None if found is None else found.checked_ms
    entry = ledger.find(snapshot, shown.entry_key(fact))
    return None if entry is None else entry.created_ms


# What to do about it


def _next_steps(
    snapshot: Snapshot, settings: Settings, row: Row, name: str, waits_for: parked.Fact | None
) -> Iterator[str]:
    readable = not (row.reason or "").startswith(NOT_JSON)
    if waits_for is not None:
        yield from waiting_steps(waits_for, name)
    elif row.state == "quarantined" and readable:
        yield f"{_correct(settings, row)}, then `receiver replay {name}`"
    elif row.state in ("pending", "dead"):
        yield f"{_when(row)}: `receiver replay {name}`"
    if row.state in ("parked", "quarantined", "dead"):
        first = "if it needs nothing more" if readable else "no rule can read it"
        yield f"{first}: `receiver events resolve {name} --reason TEXT`"
    yield from _steps_beside(snapshot, row)


def _correct(settings: Settings, row: Row) -> str:
    """What has to be another before a quarantined event can be applied."""
    source = settings.sources.get(row.endpoint)
    if LIVE_ON_TEST in (row.reason or "") and source is not None and not source.contract.livemode:
        return (
            f"it is live, and sources.{row.endpoint} has livemode = false: have the sender post "
            "live events to a source with livemode = true; or, if this is that one, set it there"
        )
    return "correct the rule or the data"


def _when(row: Row) -> str:
    if row.lease_until_ms is not None:
        return "a worker has it until its lease ends; after that"
    return "when the cause is gone" if row.next_attempt_ms is None else "to try it now"


def _steps_beside(snapshot: Snapshot, row: Row) -> Iterator[str]:
    for one in conflicts.of_event(snapshot, row.id):
        if one.resolved_ms is None:
            yield f"`receiver conflicts show {one.id}` shows what differs"
    for message in outbox.of_event(snapshot, row.id)[:TOLD_MAX]:
        if message.state in ("review", "dead"):
            yield f"`receiver outbox show {message.id}` says what to do with that message"


def waiting_steps(fact: parked.Fact, name: str) -> Iterator[str]:
    """What brings a parked event, called `name`, the fact that it waits for."""
    match fact.kind:
        case "link":
            account = f" --account {shlex.quote(fact.account)}" if fact.account else ""
            words = f"{shlex.quote(fact.source)} {shlex.quote(fact.key)} WORKSPACE{account}"
            yield f"`receiver links add {words}`"
        case "entry":
            yield f"it is applied when {shown.entry_key(fact)} is granted"
        case "resource":
            named = shlex.quote(f"{fact.operation}/{fact.key}")
            yield f"it is applied when that is known: `receiver resources show {named}`"
    if fact.kind in ("link", "attribution"):
        yield f"for this one event only: `receiver parked attribute {name} --workspace WORKSPACE`"


def _released(act: audit.Act) -> Sequence[object]:
    found = act.details.get("released")
    return found if isinstance(found, list) else ()
