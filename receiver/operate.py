"""Acts by hand: each with its row in the audit log, in the transaction that carries it out."""

import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, NoReturn

from receiver import effects, fetching, rejected, rules
from receiver.captures import CAPTURED_MAX, reference
from receiver.config import Link, Project, Settings, Source
from receiver.named import Absent
from receiver.process import (
    DUE_MAX,
    NotReplayable,
    Outcome,
    Prepared,
    Processor,
    failure_of,
    stored_event,
)
from receiver.said import Park, Quarantine
from receiver.select import Unjudgeable
from receiver.verify import Event
from store import (
    attempts,
    audit,
    captured,
    conflicts,
    fetches,
    inbox,
    ledger,
    links,
    operations,
    outbox,
    parked,
    rejections,
)
from store.database import Job, Snapshot, Store, Tx
from store.errors import Refused
from store.inbox import Row
from store.operations import Key
from store.outbox import Message
from store.parked import Fact
from store.rejections import Kept
from store.resources import Name
from store.schema import AMOUNT_MAX

#: How long the lock is left alone between two transactions of a long act, in seconds: a server
#: that asks every 2 ms then never waits for more than one of them.
GAP_S = 0.01

#: Released events that an act's row in the audit log lists.
RELEASED_MAX = 1_000

#: The key of a correction by hand; no source is about it.
OPERATOR, ADJUSTMENT = "operator", "adjustment"


class Declined(Exception):
    """The act can't be done as asked; the message says why, and what to do instead."""


class Overdrawn(Declined):
    """The balance would be less than nothing; the operator may want that."""


class By(NamedTuple):
    """Who acts, and why."""

    actor: str
    reason: str


class Linked(NamedTuple):
    """What became of a link; `released` are the rows of the events that had waited for it."""

    word: Literal["added", "known", "repointed"]
    before: str | None
    released: list[int]


class Entered(NamedTuple):
    """What became of an entry: `new`, or there already; and the events that had waited for it."""

    entry: ledger.Entry
    new: bool
    released: list[int]


class Replayed(NamedTuple):
    """What became of one event that was run again; `problem` if it could not be.

    `repeated`: it is done, and each of its operations had been done before.
    """

    row: int
    word: str
    problem: str | None = None
    repeated: bool = False


class _Ran(NamedTuple):
    outcome: Outcome
    repeated: bool = False


class Accepted(NamedTuple):
    """What became of a delivery that was taken by hand, and the rows of its events."""

    word: str
    rows: list[int]


class Acted(NamedTuple):
    """A message as it was before an act; `problem` if it could not be done."""

    number: int
    before: Message | None
    problem: str | None = None


def target_of(row: int) -> str:
    """The audit log's name of an event."""
    return f"event {row}"


def target_of_message(number: int) -> str:
    """The audit log's name of a message."""
    return f"message {number}"


def target_of_source(source: str) -> str:
    """The audit log's name of a source."""
    return f"source {source}"


def target_of_link(source: str, account: str, customer: str) -> str:
    """The audit log's name of a link."""
    return "/".join(filter(None, ("link " + source, account, customer)))


# Events


def resolve(tx: Tx, row: int, by: By) -> None:
    """Close an event that needs nothing more. Raises Declined where it is closed or leased."""
    known = _event(tx, row)
    if known.state in ("done", "ignored"):
        raise Declined(f"{known.event_id} is {known.state} already: there is nothing to resolve")
    _check_lease(known, tx.now_ms)
    # One whose worker ended would seem to run for ever.
    attempts.close(tx, event=row)
    inbox.settle(tx, row, "ignored", by.reason)
    write_down(tx, by, "events resolve", target_of(row), was=known.state)


def attribute(tx: Tx, row: int, workspace: str, by: By) -> None:
    """Say whose event it is and make it due. Raises Declined where it is final or leased."""
    known = _event(tx, row)
    if known.is_final:
        raise Declined(f"{known.event_id} is {known.state}: only an unfinished event is attributed")
    _check_lease(known, tx.now_ms)
    _check_name("workspace", workspace)
    attempts.close(tx, event=row)
    inbox.attribute(tx, row, workspace)
    write_down(tx, by, "parked attribute", target_of(row), was=known.state, workspace=workspace)


def replay(
    store: Store, processor: Processor, rows: Sequence[int], by: By
) -> Iterator[list[Replayed]]:
    """Run stored events again, each by a job of its own; yields as batches commit."""
    for start in range(0, len(rows), DUE_MAX):
        if start:
            time.sleep(GAP_S)
        batch = rows[start : start + DUE_MAX]
        jobs = [
            Job(
                _replay_job(store, processor, row, by),
                functools.partial(_keep, processor=processor, row=row, by=by),
            )
            for row in batch
        ]
        store.write_all(jobs)
        yield [_replayed(row, job) for row, job in zip(batch, jobs, strict=True)]


def drain(store: Store, processor: Processor) -> None:
    """Apply what is due, in transactions of at most a hundred events, until nothing is."""
    while jobs := store.look(processor.due_jobs):
        store.write_all(jobs)
        errors = [job.error for job in jobs if job.error is not None]
        if len(errors) == len(jobs):
            # They stay due, and would be found again for ever.
            raise errors[0]
        time.sleep(GAP_S)


def _replay_job(store: Store, processor: Processor, row: int, by: By) -> Callable[[Tx], _Ran]:
    """The event's prepare functions run now, outside the transaction that the job runs in."""

    def read(snapshot: Snapshot, now_ms: int) -> Event:
        known = _event(snapshot, row)
        # Asked again in the job; but by then the functions have run, and reached out.
        _check_lease(known, now_ms)
        return stored_event(snapshot, processor.settings, known)

    try:
        event = store.look(read)
    except (Absent, Declined, NotReplayable) as error:
        return _raising(error)
    if event is None:
        return _raising(Declined("the file can't be read now: try again"))
    try:
        prepared = processor.prepare(event)
    except (Exception, SystemExit) as error:
        # The founder's code may raise anything; nothing was changed yet.
        return _raising(Declined(f"a prepare function failed{failure_of(error)}"))
    return functools.partial(_replay, processor=processor, row=row, by=by, prepared=prepared)


def _raising(error: Exception) -> Callable[[Tx], _Ran]:
    def run(tx: Tx) -> _Ran:
        raise error

    return run


def _replay(tx: Tx, *, processor: Processor, row: int, by: By, prepared: Prepared) -> _Ran:
    known = _event(tx, row)
    _check_lease(known, tx.now_ms)
    # One whose worker ended would seem to run for ever.
    attempts.close(tx, event=row)
    made = operations.of_event(tx, row)
    outcome = processor.replay(tx, row, prepared)
    write_down(tx, by, "replay", target_of(row), was=known.state, became=outcome.word)
    none_new = operations.of_event(tx, row) == made
    return _Ran(outcome, none_new and _does_all_once(processor, known, outcome))


def _does_all_once(processor: Processor, known: Row, outcome: Outcome) -> bool:
    """Whether an event is done, by rules that do nothing but what is claimed by a key."""
    matching = processor.settings.rules_of_stored(known.endpoint, known.source, known.type)
    # A link that was removed is made again, and a resource may be another by now.
    state = any(isinstance(rule.effect, Link | Project) for rule in matching)
    return outcome.word == "done" and bool(outcome.keys) and not state


def _keep(tx: Tx, why: str, *, processor: Processor, row: int, by: By) -> _Ran:
    known = _event(tx, row)
    outcome = processor.keep_stored(tx, why, row)
    write_down(tx, by, "replay", target_of(row), was=known.state, became=outcome.word)
    return _Ran(outcome)


def _replayed(row: int, job: Job[_Ran]) -> Replayed:
    match job.error:
        case None:
            assert job.result is not None, "a job without an error has its outcome"
            return Replayed(row, job.result.outcome.word, repeated=job.result.repeated)
        case Declined() | Absent() | NotReplayable():
            return Replayed(row, "not run", str(job.error))
    raise job.error


def check_event(tx: Tx, row: int) -> None:
    """Raises Absent for an event that is not there, Declined for one that a worker has now."""
    _check_lease(_event(tx, row), tx.now_ms)


def _event(snapshot: Snapshot, row: int) -> Row:
    known = inbox.by_row(snapshot, row)
    if known is None:
        raise Absent(f"there is no event {row}")
    return known


def _check_lease(known: Row, now_ms: int) -> None:
    _check_free(known.event_id, known.lease_until_ms, now_ms)


def _check_free(what: str, lease_until_ms: int | None, now_ms: int) -> None:
    if lease_until_ms is not None and lease_until_ms > now_ms:
        left_s = (lease_until_ms - now_ms) // 1000 + 1
        raise Declined(
            f"a worker is trying {what} now: try again in {left_s} s, when its lease has ended"
        )


# Rejections


def accept(store: Store, processor: Processor, source: Source, number: int, by: By) -> Accepted:
    """Take a rejection whose signature is right, as if it came now; `source` has its secrets.

    Raises Absent, or Declined where it is not such a one, or was accepted before.
    """
    read = store.look(lambda snapshot, _: _rejection(snapshot, source, number))
    if read is None:
        raise Declined("the file can't be read now: try again")
    kept, events = read
    request_id = kept.request.request_id

    def run(tx: Tx, why: str | None = None) -> Accepted:
        # Somebody else may have come first.
        _rejection(tx, source, number)
        if why is None:
            outcome = processor.receive(tx, events, request_id)
        else:
            outcome = processor.keep(tx, why, events=events, request_id=request_id)
        return _accepted(tx, number, events, outcome, by)

    job = Job(run, run)
    store.write_all([job])
    if job.error is not None:
        raise job.error
    assert job.result is not None, "a job without an error has its result"
    return job.result


def _rejection(snapshot: Snapshot, source: Source, number: int) -> tuple[Kept, tuple[Event, ...]]:
    kept = rejections.by_number(snapshot, number)
    if kept is None:
        raise Absent(f"there is no rejection {number}: it was among the oldest")
    try:
        return kept, rejected.events_of(source, kept)
    except rejected.Untakable as error:
        raise Declined(str(error)) from error


def _accepted(tx: Tx, number: int, events: Sequence[Event], outcome: Outcome, by: By) -> Accepted:
    rows = []
    for event in events:
        known = inbox.by_key(tx, event.identity, event.account, event.key_id)
        assert known is not None, "it was stored, or known before"
        rows.append(known.id)
        target = target_of(known.id)
        write_down(tx, by, "rejections accept", target, rejection=number, became=outcome.word)
    rejections.accepted(tx, number, rows[0])
    return Accepted(outcome.word, rows)


# Conflicts


def resolve_conflict(tx: Tx, number: int, by: By) -> None:
    """Note that the operator has looked. Raises Absent, or Declined if that was noted before."""
    known = conflicts.by_id(tx, number)
    if known is None:
        raise Absent(f"there is no conflict {number}")
    if not conflicts.resolve(tx, number):
        raise Declined(f"conflict {number} is resolved already")
    write_down(tx, by, "conflicts resolve", target_of(known.event), conflict=number)


# Resources


def fetch(tx: Tx, settings: Settings, name: Name, by: By, *, accept: bool) -> None:
    """Have a resource fetched now; with `accept` that counts whatever was known.

    Raises Declined where no source can fetch it.
    """
    endpoint = _fetcher(tx, settings, name)
    fetches.want(tx, name, endpoint, None)
    fetches.insist(tx, name, mend=accept)
    write_down(tx, by, "resources fetch", f"resource {'/'.join(name)}", accept=accept)


def _fetcher(snapshot: Snapshot, settings: Settings, name: Name) -> str:
    """A source that can: the one that was asked last, or one of the same identity."""
    owed = fetches.find(snapshot, name)
    first = [] if owed is None else [owed.endpoint]
    others = [one.name for one in settings.sources.values() if one.contract.identity == name.source]
    problem = f"no source has the identity {name.source} now"
    for endpoint in (*first, *others):
        try:
            fetching.plan(settings, endpoint, name)
        except fetching.NotFetchable as error:
            problem = str(error)
        else:
            return endpoint
    raise Declined(problem)


# Messages


def retry_messages(
    store: Store, settings: Settings, numbers: Sequence[int], by: By
) -> Iterator[list[Acted]]:
    """Make messages due now; yields as batches commit, with the reason for each that was not."""
    for start in range(0, len(numbers), DUE_MAX):
        if start:
            time.sleep(GAP_S)
        batch = numbers[start : start + DUE_MAX]
        jobs = [
            Job(functools.partial(retry_message, settings=settings, number=number, by=by))
            for number in batch
        ]
        store.write_all(jobs)
        yield [_acted(number, job) for number, job in zip(batch, jobs, strict=True)]


def retry_message(tx: Tx, settings: Settings, number: int, by: By) -> Message:
    """Make it due now; returns it as it was.

    One that did not render is rendered by the config as it is now. Raises Absent, or Declined
    where it was sent or still does not render.
    """
    message = _message(tx, number)
    if message.state == "sent":
        raise Declined(f"message {number} is sent: it is not sent again")
    if not message.is_written:
        _write_again(tx, settings, message)
    outbox.retry(tx, number, message.last_error, tx.now_ms)
    write_down(tx, by, "outbox retry", target_of_message(number), was=message.state)
    return message


def resolve_message(tx: Tx, number: int, *, sent: bool, by: By) -> None:
    """Say of a message in review whether it was received. Raises Absent or Declined."""
    message = _message(tx, number)
    if message.state != "review":
        raise Declined(
            f"message {number} is {message.state}: only one in review has an outcome to be told"
        )
    if sent:
        outbox.settle(tx, number, "sent", None)
    else:
        outbox.retry(tx, number, message.last_error, tx.now_ms)
    became = "sent" if sent else "pending"
    write_down(tx, by, "outbox resolve", target_of_message(number), was="review", became=became)


def cancel_message(tx: Tx, number: int, by: By) -> Message:
    """Say that it is not to be sent; returns it as it was. Raises Absent or Declined."""
    message = _message(tx, number)
    if message.state in ("sent", "cancelled"):
        raise Declined(f"message {number} is {message.state} already: there is nothing to cancel")
    outbox.settle(tx, number, "cancelled", message.last_error)
    write_down(tx, by, "outbox cancel", target_of_message(number), was=message.state)
    return message


def _message(tx: Tx, number: int) -> Message:
    """A message that no worker is trying; an attempt that never ended is closed."""
    message = outbox.by_id(tx, number)
    if message is None:
        raise Absent(f"there is no message {number}")
    _check_free(f"message {number}", message.lease_until_ms, tx.now_ms)
    attempts.close(tx, message=number)
    return message


def _write_again(tx: Tx, settings: Settings, message: Message) -> None:
    """Render a message that did not render before: nothing of it was ever sent."""
    if message.event is None:
        raise Declined(
            f"message {message.id} tells of an alert and does not render; "
            f"`receiver outbox cancel {message.id}`, and `receiver status` tells the same"
        )
    try:
        event = stored_event(tx, settings, _event(tx, message.event))
        outbox.write(tx, message.id, rules.write_again(tx, settings, event, message))
    except (Unjudgeable, NotReplayable) as error:
        raise Declined(
            f"message {message.id} does not render: {error}; correct "
            f"destinations.{message.destination}, or `receiver outbox cancel {message.id}`"
        ) from error


def _acted(number: int, job: Job[Message]) -> Acted:
    match job.error:
        case None:
            return Acted(number, job.result)
        case Declined() | Absent():
            return Acted(number, None, str(job.error))
    raise job.error


# Links


def link(
    tx: Tx, source: str, account: str, customer: str, workspace: str, *, repoint: bool, by: By
) -> Linked:
    """Link a customer; raises Declined if it is another workspace's and not to be re-pointed."""
    for what, text in (("customer", customer), ("workspace", workspace)):
        _check_name(what, text)
    released = parked.on(tx, Fact("link", source, account, customer))
    if links.add(tx, source, account, customer, workspace):
        detail = {"workspace": workspace, "released": released[:RELEASED_MAX]}
        _write_link(tx, by, "links add", source, account, customer, **detail)
        return Linked("added", None, released)
    before = links.workspace(tx, source, account, customer)
    if before == workspace:
        return Linked("known", before, [])
    if not repoint:
        raise Declined(
            f"customer {customer} is linked to workspace {before}: "
            f"--repoint links it to {workspace} from now on (what was granted stays where it is)"
        )
    links.repoint(tx, source, account, customer, workspace)
    _write_link(
        tx, by, "links repoint", source, account, customer, workspace=workspace, before=before
    )
    return Linked("repointed", before, [])


def unlink(tx: Tx, source: str, account: str, customer: str, by: By) -> str:
    """Forget a link and return its workspace. Raises Absent."""
    before = links.workspace(tx, source, account, customer)
    if before is None:
        of_account = f" of account {account}" if account else ""
        raise Absent(f"customer {customer}{of_account} of {source} is not linked")
    links.remove(tx, source, account, customer)
    _write_link(tx, by, "links remove", source, account, customer, before=before)
    return before


def _write_link(
    tx: Tx, by: By, action: str, source: str, account: str, customer: str, **detail: object
) -> None:
    write_down(tx, by, action, target_of_link(source, account, customer), **detail)


# Amounts


def grant(tx: Tx, key: Key, workspace: str, unit: str, amount: int, by: By) -> Entered:
    """Grant under a webhook's business key, so that the webhook finds it done.

    Raises Declined if the key was used for anything else.
    """
    for what, text in (("subject", key.subject), ("workspace", workspace), ("unit", unit)):
        _check_name(what, text)
    released = parked.on(tx, Fact("entry", *key))
    try:
        new = effects.grant(tx, key, workspace, unit, amount, None)
    except Quarantine as error:
        raise Declined(str(error).replace("this event would", "this would")) from error
    except Refused as error:
        _refuse(key, error)
    if new:
        detail = {"workspace": workspace, "unit": unit, "amount": amount}
        write_down(tx, by, "ledger grant", f"{key}", **detail, released=released[:RELEASED_MAX])
    return Entered(_entry(tx, key), new, released if new else [])


def adjust(
    tx: Tx, name: str, workspace: str, unit: str, amount: int, by: By, *, overdraw: bool = False
) -> Entered:
    """Correct a balance by an operation of its own, once for `name`.

    Raises Declined if another correction has that name, and Overdrawn unless it may `overdraw`.
    """
    for what, text in (("key", name), ("workspace", workspace), ("unit", unit)):
        _check_name(what, text)
    if amount == 0 or abs(amount) > AMOUNT_MAX:
        raise Declined(f"an adjustment of {amount} {unit}: expected 1 to {AMOUNT_MAX}, or below 0")
    key = Key(OPERATOR, "", name, ADJUSTMENT)
    known = ledger.find(tx, key)
    if known is not None:
        if (known.workspace, known.unit, known.amount) == (workspace, unit, amount):
            return Entered(known, False, [])
        raise Declined(
            f"{name} is an adjustment of {known.amount:+} {known.unit} for workspace "
            f"{known.workspace} already: give this one another --key"
        )
    balance = ledger.balance(tx, workspace, unit)
    if amount < 0 and balance + amount < 0 and not overdraw:
        raise Overdrawn(
            f"this takes the balance of workspace {workspace} from {balance} "
            f"to {balance + amount} {unit}, below zero"
        )
    try:
        ledger.enter(tx, key, workspace, unit, amount)
    except Refused as error:
        _refuse(key, error)
    write_down(tx, by, "ledger adjust", f"{key}", workspace=workspace, unit=unit, amount=amount)
    return Entered(_entry(tx, key), True, [])


def revert(tx: Tx, target: Key, amount: int | None, by: By) -> Entered:
    """Take back an entry, by default all that is left of it, by an operation of its own.

    Raises Absent, or Declined where that much is not left.
    """
    entry = ledger.find(tx, target)
    if entry is None:
        raise Absent(f"{target} is not in the ledger")
    if entry.amount < 0:
        raise Declined(
            f"{target} took {-entry.amount} {entry.unit} away: only what was granted is taken "
            "back; `receiver ledger adjust` gives it again"
        )
    left = ledger.left(tx, entry)
    if left < (amount or 1):
        raise Declined(f"{left} {entry.unit} are left of {target}: nothing was taken back")
    key = _free_reversal(tx, target)
    released = parked.on(tx, Fact("entry", *key))
    try:
        effects.reverse(tx, key, target, amount, None)
    except (Quarantine, Park) as error:
        raise Declined(str(error)) from error
    made = _entry(tx, key)
    detail = {"entry": f"{key}", "amount": made.amount, "released": released[:RELEASED_MAX]}
    write_down(tx, by, "ledger revert", f"{target}", **detail)
    return Entered(made, True, released)


def _free_reversal(tx: Tx, target: Key) -> Key:
    """A key for one more reversal by hand; no rule can be named so, as none has a colon."""
    number = 1
    while True:
        nth = "" if number == 1 else f"-{number}"
        key = Key(target.source, target.account, target.subject, f"revert{nth}:{target.operation}")
        if operations.find(tx, key) is None:
            return key
        number += 1


def _entry(tx: Tx, key: Key) -> ledger.Entry:
    entry = ledger.find(tx, key)
    assert entry is not None, "an amount that is claimed is in the ledger"
    return entry


def _refuse(key: Key, error: Refused) -> NoReturn:
    raise Declined(f"{key}: {error}") from error


def _check_name(what: str, text: str) -> None:
    try:
        effects.check_name(what, text)
    except ValueError as error:
        raise Declined(str(error)) from error


# Secrets that senders hand over


def arm(tx: Tx, source: str, minutes: int, by: By) -> None:
    """Await the secret of a source's next handshake. Raises Declined where it has too many."""
    if len(captured.listed(tx).get(source, ())) >= CAPTURED_MAX:
        raise Declined(
            f"{source} has {CAPTURED_MAX} captured secrets, which are all that it may have; "
            f"forget one with `receiver sources forget`"
        )
    captured.arm(tx, source, tx.now_ms + minutes * 60_000, by.actor)
    write_down(tx, by, "sources arm", target_of_source(source), minutes=minutes)


def disarm(tx: Tx, source: str, by: By) -> None:
    """Await nothing any more. Raises Declined where nothing was awaited."""
    if not captured.disarm(tx, source):
        raise Declined(f"{source} is not armed: there is nothing to take back")
    write_down(tx, by, "sources disarm", target_of_source(source))


def forget(tx: Tx, source: str, number: int, by: By) -> None:
    """Accept nothing more that is signed with a captured secret. Raises Absent."""
    known = next((one for one in captured.listed(tx).get(source, ()) if one.id == number), None)
    if known is None:
        raise Absent(f"{source} has no captured secret {number}")
    captured.forget(tx, number)
    write_down(
        tx,
        by,
        "sources forget",
        target_of_source(source),
        secret=reference(number),
        captured_ms=known.captured_ms,
        address=known.address,
    )


def write_down(tx: Tx, by: By, action: str, target: str, **detail: object) -> None:
    """Add an act to the audit log, in the transaction that carries it out."""
    audit.add(tx, by.actor, action, target, by.reason, json.dumps(detail))
