"""The one transaction of an event: record it, make its changes, settle it."""

import functools
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec

from receiver import backoff, rules
from receiver.config import ConfigError, Rule, Settings
from receiver.handlers import Handlers, HandlersError, place_of
from receiver.logs import FIELD_CHARS_MAX, log
from receiver.said import Park, Quarantine
from receiver.select import Unjudgeable
from receiver.shown import resource_name
from receiver.verify import Event, canonical, reread
from store import attempts, conflicts, deliveries, fetches, forgotten, inbox, names, parked, tallies
from store.database import Job, Snapshot, Tx
from store.errors import TransactionLost, Unavailable
from store.inbox import Row
from store.operations import Key
from store.parked import Fact
from store.tallies import What

#: Due events applied in one go, each by a job of its own.
DUE_MAX = 100

#: An effect that takes longer is told of, in seconds: deliveries are answered by one thread.
SLOW_S = 1.0

#: Text kept of a reason, in characters.
REASON_CHARS_MAX = 500


#: Who applies an event: this transaction, a worker, or the writer by a job of its own.
Doer = Literal["here", "worker", "writer"]


class Outcome(msgspec.Struct, frozen=True):
    """What became of a delivery, in one word; `retry`: the sender should send it again.

    `keys` are the business keys of its rules, whether the change was made now or before; `event`
    is the number of the one that it is about, from 0, where a delivery has several.
    """

    word: str
    retry: bool = False
    row: int = 0
    keys: tuple[Key, ...] = ()
    event: int = 0


class Judgement(NamedTuple):
    """The state an event gets, and why; `fact` is what a parked one waits for, and `fetch_by`
    the source whose API brings it.

    With a `failure`, in words, the attempt failed, and the state is yet to be decided.
    """

    state: str
    reason: str | None = None
    fact: Fact | None = None
    failure: str | None = None
    keys: tuple[Key, ...] = ()
    fetch_by: str | None = None


class Prepared(NamedTuple):
    """What prepare functions gave, by operation; or what one of them `said` instead."""

    results: Mapping[str, object] = MappingProxyType({})
    said: Park | Quarantine | Unjudgeable | None = None


#: Where there is no prepare function.
UNPREPARED = Prepared()


class Try(NamedTuple):
    """One attempt at a stored event.

    A `leased` one was counted and written down when the worker took it. `workspace` is the
    operator's attribution.
    """

    row: int
    number: int
    received_ms: int
    workspace: str | None = None
    leased: bool = False
    prepared: Prepared = UNPREPARED
    #: Its outcome is what the event's first delivery is answered.
    first: bool = False

    def answer(self, word: str) -> str | None:
        """The word, if it answers the event's first delivery."""
        return word if self.first else None


class NotReplayable(Exception):
    """The event can't be run again; the message says why."""


#: Of the events in one delivery the worst decides its answer.
_WORST_LAST = (
    "duplicate",
    "ignored",
    "done",
    "conflict",
    "parked",
    "quarantined",
    "dead",
    "pending",
)


class Processor:
    """Everything that an event is judged by, from start to end: one config, one handlers.py."""

    def __init__(
        self,
        settings: Settings,
        handlers: Handlers,
        random: Callable[[], float] = random.random,
    ) -> None:
        self.settings = settings
        self.handlers = handlers
        self.random = random

    @classmethod
    def load(cls, settings: Settings) -> "Processor":
        """Import handlers.py and check that each `call` has its function. Raises ConfigError."""
        try:
            handlers = Handlers.load(settings.handlers)
        except HandlersError as error:
            raise ConfigError([str(error)]) from error
        problems = rules.call_problems(settings.rules, handlers)
        if problems:
            raise ConfigError(problems)
        return cls(settings, handlers)

    def start(self, tx: Tx) -> None:
        """Let the file know the names that this config puts into keys."""
        names.remember(tx, "identity", self.settings.identities)
        names.remember(tx, "operation", self.settings.operations)

    def receive(self, tx: Tx, events: Sequence[Event], request_id: str) -> Outcome:
        """Store each event of a delivery and apply it, or find that it was stored before."""
        return _worst([self._receive(tx, event, request_id) for event in events])

    def keep(self, tx: Tx, why: str, *, events: Sequence[Event], request_id: str) -> Outcome:
        """Store events whose effects ended the whole transaction: `pending`, without effects.

        Of several nobody knows which one did it, so each is run again by itself, right after.
        """
        if len(events) > 1:
            return _worst([self._receive(tx, event, request_id, put_off=True) for event in events])
        outcome = Outcome("duplicate")
        for event in events:
            row = _insert(tx, event, request_id)
            known = _known(tx, event)
            if row is not None or not known.is_final:
                this = _try_of(known)._replace(first=row is not None)
                outcome = self._fail(tx, this, why)
            if row is None:
                _count_again(tx, known, event, outcome, request_id)
        return outcome

    def due_jobs(self, snapshot: Snapshot, now_ms: int) -> list[Job[Outcome]]:
        """A job for each event that was released, oldest first, at most DUE_MAX."""
        rows = inbox.released(snapshot, DUE_MAX)
        return [
            Job(
                functools.partial(self._apply_due, row=row),
                functools.partial(self.keep_stored, row=row),
            )
            for row in rows
        ]

    def apply_released(self, tx: Tx) -> Outcome | None:
        """Apply the oldest event that was released, or None if there is none."""
        rows = inbox.released(tx, 1)
        return self._apply_due(tx, rows[0]) if rows else None

    def keep_released(self, tx: Tx, why: str) -> Outcome | None:
        """The oldest released event ended the whole transaction, twice."""
        rows = inbox.released(tx, 1)
        return self.keep_stored(tx, why, rows[0]) if rows else None

    def replay(self, tx: Tx, row: int, prepared: Prepared = UNPREPARED) -> Outcome:
        """Run a stored event again, whatever its state, by the same idempotent path.

        `prepared` is what `prepare` gave for it. Raises NotReplayable.
        """
        known = inbox.by_row(tx, row)
        if known is None:
            raise NotReplayable(f"there is no event {row}")
        this = _try_of(known)._replace(prepared=prepared)
        return self._run(tx, this, stored_event(tx, self.settings, known))

    def prepare(self, event: Event) -> Prepared:
        """Run the prepare functions of the event's rules.

        Outside any transaction, since they may use the network. Raises what they raise, but
        for what a handler may say too.
        """
        if event.defect is not None or event.test:
            return UNPREPARED
        matching = self.settings.rules_for(event.source, event.type)
        try:
            return Prepared(rules.prepare(matching, event, self.handlers))
        except (Park, Quarantine, Unjudgeable) as said:
            return Prepared(said=said)

    def work(self, tx: Tx, known: Row, prepared: Prepared) -> Outcome:
        """Make the attempt that a worker has leased and still holds."""
        this = _try_of(known, leased=True)._replace(prepared=prepared)
        try:
            event = stored_event(tx, self.settings, known)
        except NotReplayable as error:
            return self._end(tx, this, Judgement("quarantined", str(error)))
        return self._run(tx, this, event)

    def fail_work(self, tx: Tx, known: Row, why: str) -> Outcome:
        """The attempt that a worker has leased, and still holds, failed."""
        return self._fail(tx, _try_of(known, leased=True), why)

    def keep_stored(self, tx: Tx, why: str, row: int) -> Outcome:
        """A stored event ended the whole transaction: it stays `pending`, without effects."""
        known = inbox.by_row(tx, row)
        assert known is not None, "events are never deleted"
        return self._fail(tx, _try_of(known), why)

    def _receive(self, tx: Tx, event: Event, request_id: str, *, put_off: bool = False) -> Outcome:
        """`put_off`: only store it, to be applied by a job of its own."""
        doer = self._doer(event.source, put_off=put_off)
        row = _insert(tx, event, request_id, doer == "worker")
        if row is None:
            return self._receive_again(tx, event, request_id, put_off=put_off)
        if not event.id_signed:
            inbox.mark_same_body(tx, row, event.identity, event.body_sha256)
        if doer == "writer":
            inbox.settle(tx, row, "pending", None, answer="pending")
            inbox.make_due(tx, row, by_worker=False)
        if doer != "here":
            return Outcome("pending", row=row)
        this = Try(row, 1, event.received_ms, first=True)
        verdict = self._judge(tx, event, this)
        if verdict.state == "done":
            # A new event stands as that already.
            return Outcome("done", row=row, keys=verdict.keys)
        return self._settled(tx, this, event, verdict)

    def _doer(self, source: str, *, put_off: bool) -> Doer:
        if self.settings.sources[source].mode == "queued":
            return "worker"
        return "writer" if put_off else "here"

    def _receive_again(self, tx: Tx, event: Event, request_id: str, *, put_off: bool) -> Outcome:
        known = _known(tx, event)
        volatile = self.settings.sources[event.source].contract.volatile
        if not _same_content(tx, known, event, volatile):
            _keep_conflict(tx, known, event, volatile, request_id)
            return Outcome("conflict", row=known.id)
        outcome = self._again(tx, known, event, put_off=put_off)
        _count_again(tx, known, event, outcome, request_id)
        return outcome

    def _again(self, tx: Tx, known: Row, event: Event, *, put_off: bool) -> Outcome:
        """Run a known event once more, if it is unfinished and nobody has its lease."""
        if known.is_final:
            return Outcome("duplicate", row=known.id)
        if known.lease_until_ms is not None and known.lease_until_ms > tx.now_ms:
            return Outcome("pending", row=known.id)
        if known.lease_until_ms is not None:
            # Whoever held it never came back.
            attempts.close(tx, event=known.id)
        if known.endpoint != event.source and known.endpoint in self.settings.sources:
            # Two sources of one identity: the one that it came in by has it judged, always.
            event = stored_event(tx, self.settings, known)
        doer = self._doer(event.source, put_off=put_off)
        if doer != "here":
            inbox.make_due(tx, known.id, by_worker=doer == "worker")
            return Outcome("pending", row=known.id)
        return self._run(tx, _try_of(known), event)

    def _run(self, tx: Tx, this: Try, event: Event) -> Outcome:
        return self._settled(tx, this, event, self._judge(tx, event, this))

    def _settled(self, tx: Tx, this: Try, event: Event, verdict: Judgement) -> Outcome:
        outcome = self._end(tx, this, verdict)
        retention = self.settings.sources[event.source].retention
        if outcome.word == "ignored" and not retention.ignored:
            inbox.forget_payload(tx, this.row)
        return outcome

    def _apply_due(self, tx: Tx, row: int) -> Outcome:
        known = inbox.by_row(tx, row)
        if known is None or known.next_attempt_ms is None:
            # A redelivery or the operator came first.
            return Outcome("duplicate", row=row)
        this = _try_of(known)
        try:
            event = stored_event(tx, self.settings, known)
        except NotReplayable as error:
            return self._end(tx, this, Judgement("quarantined", str(error)))
        return self._run(tx, this, event)

    def _judge(self, tx: Tx, event: Event, this: Try) -> Judgement:
        """Make the event's changes, all or none of them, and say how it ends."""
        if event.defect is not None:
            return Judgement("quarantined", event.defect)
        if event.test:
            return Judgement("ignored", "a test event on a live source")
        if this.prepared.said is not None:
            return _said(event, this.prepared.said)
        case = rules.Case(
            event,
            this.row,
            this.workspace,
            self.handlers,
            self.settings.destinations,
            this.prepared.results,
            self.settings,
            this.first,
        )
        try:
            with tx.attempt:
                ignored = self._apply_rules(tx, case)
        except (Park, Quarantine, Unjudgeable) as said:
            return _said(event, said)
        except (TransactionLost, Unavailable):
            raise
        except BaseException as error:
            # The founder's code may raise anything, and none of it may cost the event.
            return _failure(event, this.row, error, case.begun[-1])
        if ignored is not None:
            return Judgement("ignored", ignored)
        return Judgement("done", keys=tuple(case.keys))

    def _end(self, tx: Tx, this: Try, verdict: Judgement) -> Outcome:
        """Write down how an attempt ended."""
        if verdict.failure is not None:
            return self._fail(tx, this, verdict.failure)
        reason = None if verdict.reason is None else verdict.reason[:REASON_CHARS_MAX]
        inbox.settle(tx, this.row, verdict.state, reason, answer=this.answer(verdict.state))
        if verdict.fact is not None:
            parked.wait(tx, this.row, verdict.fact)
        if verdict.fact is not None and verdict.fetch_by is not None:
            # Not with the event's own changes, which are undone until it is here.
            fetches.want(tx, resource_name(verdict.fact), verdict.fetch_by, this.row)
        if this.leased:
            attempts.finish(tx, this.number, verdict.state, reason, event=this.row)
            tallies.add(tx, {What("attempt", "", verdict.state): 1}, tx.now_ms)
        return Outcome(verdict.state, row=this.row, keys=verdict.keys)

    def _fail(self, tx: Tx, this: Try, words: str) -> Outcome:
        """Write down a failed attempt, and when the next is made if there is one."""
        worker = self.settings.worker
        words = words[: inbox.ERROR_CHARS_MAX]
        if not this.leased:
            attempts.start(tx, this.number, event=this.row)
        attempts.finish(tx, this.number, "failed", words, event=this.row)
        tallies.add(tx, {What("attempt", "", "failed"): 1}, tx.now_ms)
        if worker.run == "off":
            inbox.fail(tx, this.row, this.number, words, None, answer=this.answer("pending"))
            return Outcome("pending", retry=True, row=this.row)
        age_ms = tx.now_ms - this.received_ms
        if backoff.is_spent(worker, this.number, worker.attempts_max, age_ms):
            inbox.die(tx, this.row, this.number, words, answer=this.answer("dead"))
            return Outcome("dead", row=this.row)
        delay_ms = backoff.delay_ms(worker, this.number, self.random)
        at_ms = tx.now_ms + delay_ms
        inbox.fail(tx, this.row, this.number, words, at_ms, answer=this.answer("pending"))
        return Outcome("pending", row=this.row)

    def _apply_rules(self, tx: Tx, case: rules.Case) -> str | None:
        """Why the event is ignored, or None."""
        event, scope = case.event, rules.scope_of(case.event)
        matching = self.settings.rules_for(event.source, event.type)
        unmet: list[str] = []
        for rule in matching:
            case.begun.append(rule.operation)
            began = time.monotonic()
            words = rules.apply(tx, rule, case, scope)
            if time.monotonic() - began > SLOW_S:
                _tell_slow(event, case.row, rule, time.monotonic() - began)
            if words is not None:
                unmet.append(f"{rule.operation}: {words}")
        if not matching:
            return rules.why_none_applied(matching, event.type, scope)
        return rules.none_applied(unmet) if len(unmet) == len(matching) else None


def stored_event(snapshot: Snapshot, settings: Settings, known: Row) -> Event:
    """A stored event as it was verified, judged under `settings`; raises NotReplayable."""
    source = settings.source_of(known.endpoint, known.source, known.type)
    if source is None:
        raise NotReplayable(
            f"source {known.endpoint} is no longer in the config "
            f'(if it has another name now, it needs identity = "{known.source}")'
        )
    body = inbox.payload(snapshot, known.id)
    if body is None:
        raise NotReplayable(_why_no_body(snapshot, known.id))
    return reread(
        source.contract,
        body=body,
        content_type=known.content_type,
        event_id=known.event_id,
        type=known.type,
        account=known.account,
        received_ms=known.received_ms,
        secret=known.secret,
        id_signed=known.id_signed,
        claimed_account=known.claimed_account,
    )


def _why_no_body(snapshot: Snapshot, row: int) -> str:
    """Why a stored event without its body can't be run again."""
    left = forgotten.of_event(snapshot, row)
    # What no rule wanted, of a source that keeps none of it, leaves nothing.
    what = "was not kept" if left is None else f"was {left.why}"
    return f"its body {what}, so it can't be run again"


def about(source: str, account: str, id: str, type: str, row: int) -> dict[str, str]:
    """What names an event in the log, the same in each line about it."""
    return {
        "source": source,
        "account": account,
        "id": id,
        "type": type,
        "correlation": correlation_of(row),
    }


def correlation_of(row: int) -> str:
    """What ties the lines about an event, and the messages that it owes, together."""
    return f"event-{row}"


def words_of_keys(keys: Iterable[Key]) -> tuple[str, ...]:
    """Business keys for the log: what was done, and what it may be done once for."""
    return tuple([f"{key.operation}:{key.subject}"[:FIELD_CHARS_MAX] for key in keys])


def _worst(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome that answers for a delivery's events: above all what has to be sent again."""
    if len(outcomes) == 1:
        return outcomes[0]
    numbered = [msgspec.structs.replace(one, event=n) for n, one in enumerate(outcomes)]
    return max(numbered, key=lambda one: (one.retry, _WORST_LAST.index(one.word)))


def words_of(error: BaseException) -> str:
    """What an error says, whatever its own code does, as text that can be stored."""
    try:
        words = str(error)
    except Exception:
        words = "it can't be put in words"
    return words.encode(errors="backslashreplace").decode()


def _tell_slow(event: Event, row: int, rule: Rule, took_s: float) -> None:
    log.warning(
        'slow effect, and all else waited: a source with mode = "queued" keeps it from others',
        **about(event.source, event.account, event.key_id, event.type, row),
        operation=rule.operation,
        took_s=round(took_s, 1),
    )


def _failure(event: Event, row: int, error: BaseException, operation: str) -> Judgement:
    # The text of the error may hold what is in the payload, so the log does without.
    log.error(
        "failed",
        **about(event.source, event.account, event.key_id, event.type, row),
        operation=operation,
        error=type(error).__name__,
        at=place_of(error).removeprefix(" at "),
    )
    return Judgement("pending", failure=f"{operation}{failure_of(error)}")


def failure_of(error: BaseException) -> str:
    """Where the founder's code failed and how, as it is kept with the attempt."""
    return f"{place_of(error, own=True)}: {type(error).__name__}: {words_of(error)}"


def _try_of(known: Row, leased: bool = False) -> Try:
    # A lease has counted its attempt already.
    number = known.attempts if leased else known.attempts + 1
    return Try(known.id, number, known.received_ms, known.workspace, leased)


def _insert(tx: Tx, event: Event, request_id: str, queued: bool = False) -> int | None:
    return inbox.insert(
        tx,
        source=event.identity,
        account=event.account,
        event_id=event.key_id,
        endpoint=event.source,
        type=event.type,
        received_ms=event.received_ms,
        secret=event.secret,
        content_type=event.content_type,
        body=event.body,
        body_sha256=event.body_sha256,
        id_signed=event.id_signed,
        claimed_account=event.claimed_account,
        request_id=request_id,
        origin=event.origin,
        queued=queued,
    )


def _known(tx: Tx, event: Event) -> Row:
    known = inbox.by_key(tx, event.identity, event.account, event.key_id)
    assert known is not None, "an insert that met a known key leaves that event to be found"
    return known


def _count_again(tx: Tx, known: Row, event: Event, outcome: Outcome, request_id: str) -> None:
    """One more redelivery of the same content, and what it was answered."""
    inbox.count_duplicate(tx, known.id)
    deliveries.add(
        tx,
        known.id,
        known.duplicates,
        received_ms=event.received_ms,
        answer=outcome.word,
        secret=event.secret,
        request_id=request_id,
    )


def _same_content(tx: Tx, known: Row, event: Event, volatile: Sequence[str]) -> bool:
    # What its API lists is the sender's own word on an event, in whatever words.
    if known.body_sha256 == event.body_sha256 or "reconcile" in (known.origin, event.origin):
        return True
    stored = inbox.payload(tx, known.id)
    if stored is None:
        return _same_as_forgotten(tx, known, event, volatile)
    content = canonical(event.body, event.content_type, volatile)
    return content is not None and content == canonical(stored, known.content_type, volatile)


def _same_as_forgotten(tx: Tx, known: Row, event: Event, volatile: Sequence[str]) -> bool:
    """By the hash that was kept; what can't be compared counts as the same."""
    left = forgotten.of_event(tx, known.id)
    if left is None:
        return True
    if left.content_sha256 is None:
        # Not JSON: only the raw body says, and it is another one.
        return False
    if canonical(event.body, event.content_type, left.mask) == left.content_sha256:
        return True
    # Under another mask than the one of now, they may differ in what is masked now.
    return set(left.mask) != set(volatile)


def _keep_conflict(
    tx: Tx, known: Row, event: Event, volatile: Sequence[str], request_id: str
) -> None:
    conflicts.add(
        tx,
        known.id,
        content_sha256=canonical(event.body, event.content_type, volatile) or event.body_sha256,
        body=event.body,
        content_type=event.content_type,
        received_ms=event.received_ms,
        request_id=request_id,
    )


def _said(event: Event, said: Park | Quarantine | Unjudgeable) -> Judgement:
    if isinstance(said, rules.Unfetched):
        return Judgement("parked", words_of(said), _fact(event, said), fetch_by=said.fetch_by)
    if isinstance(said, Park):
        return Judgement("parked", words_of(said), _fact(event, said))
    return Judgement("quarantined", words_of(said))


def _fact(event: Event, park: Park) -> Fact:
    if isinstance(park, rules.Unfetched):
        source, account, kind, resource_id = park.name
        return Fact("resource", source, account, resource_id, kind)
    if park.customer is not None:
        return Fact("link", event.identity, event.account, park.customer)
    if park.subject is not None and park.operation is not None:
        return Fact("entry", event.identity, event.account, park.subject, park.operation)
    return Fact("attribution", event.identity, event.account)
