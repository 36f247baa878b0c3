"""The one transaction of an event: record it, make its changes, settle it."""

import functools
import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from receiver import rules
from receiver.config import ConfigError, Settings
from receiver.handlers import Handlers, HandlersError, place_of
from receiver.said import Park, Quarantine
from receiver.select import Unjudgeable
from receiver.verify import Event, canonical, reread
from store import attempts, conflicts, inbox, names, parked
from store.database import Job, Snapshot, Tx
from store.errors import TransactionLost, Unavailable
from store.inbox import Row
from store.parked import Fact

logger = logging.getLogger("receiver")

#: Due events applied in one go, each in its own savepoint.
DUE_MAX = 100

#: A due time further ahead than this was written before the clock was set back, in ms.
AHEAD_MS_MAX = 3_600_000

#: Text kept of a reason, in characters.
REASON_CHARS_MAX = 500


class Outcome(msgspec.Struct, frozen=True):
    """What became of a delivery, in one word; `retry`: the sender should send it again."""

    word: str
    retry: bool = False


class Verdict(NamedTuple):
    """The state an event gets, and why; `fact` is what a parked one waits for."""

    state: str
    reason: str | None = None
    fact: Fact | None = None


class NotReplayable(Exception):
    """The event can't be run again; the message says why."""


#: Of the events in one delivery the worst decides its answer.
_WORST_LAST = ("duplicate", "ignored", "done", "conflict", "parked", "quarantined", "pending")

_DONE = Verdict("done")


class Processor:
    """Everything that an event is judged by, from start to end: one config, one handlers.py."""

    def __init__(self, settings: Settings, handlers: Handlers) -> None:
        self.settings = settings
        self.handlers = handlers

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
        outcomes = [self._receive(tx, event, request_id) for event in events]
        return max(outcomes, key=lambda outcome: _WORST_LAST.index(outcome.word))

    def keep(self, tx: Tx, why: str, *, events: Sequence[Event], request_id: str) -> Outcome:
        """Store events whose effects ended the whole transaction: `pending`, without effects."""
        for event in events:
            row = _insert(tx, event, request_id)
            if row is not None:
                _fail(tx, row, 0, why)
                continue
            known = _known(tx, event)
            if not known.is_final:
                _fail(tx, known.id, known.attempts, why)
        return Outcome("pending", retry=True)

    def due_jobs(self, snapshot: Snapshot, now_ms: int) -> list[Job[Outcome]]:
        """A job for each event that is due, oldest first, at most DUE_MAX."""
        rows = inbox.due(snapshot, now_ms, AHEAD_MS_MAX, DUE_MAX)
        return [
            Job(
                functools.partial(self._apply_due, row=row),
                functools.partial(self.keep_stored, row=row),
            )
            for row in rows
        ]

    def replay(self, tx: Tx, row: int) -> Outcome:
        """Run a stored event again, whatever its state, by the same idempotent path.

        Raises NotReplayable.
        """
        known = inbox.by_row(tx, row)
        if known is None:
            raise NotReplayable(f"there is no event {row}")
        return self._run(tx, known, stored_event(tx, self.settings, known))

    def keep_stored(self, tx: Tx, why: str, row: int) -> Outcome:
        """A stored event ended the whole transaction: it stays `pending`, without effects."""
        known = inbox.by_row(tx, row)
        if known is not None:
            _fail(tx, row, known.attempts, why)
        return Outcome("pending", retry=True)

    def _receive(self, tx: Tx, event: Event, request_id: str) -> Outcome:
        row = _insert(tx, event, request_id)
        if row is None:
            return self._receive_again(tx, event, request_id)
        if not event.id_signed:
            inbox.mark_same_body(tx, row, event.identity, event.body_sha256)
        verdict = self._judge(tx, event, row, workspace=None, tried=0)
        if verdict is not _DONE:
            _settle(tx, row, verdict)
        return _outcome(verdict)

    def _receive_again(self, tx: Tx, event: Event, request_id: str) -> Outcome:
        known = _known(tx, event)
        volatile = self.settings.sources[event.source].contract.volatile
        if not _same_content(tx, known, event, volatile):
            _keep_conflict(tx, known, event, volatile, request_id)
            return Outcome("conflict")
        inbox.count_duplicate(tx, known.id)
        if known.is_final:
            return Outcome("duplicate")
        if known.lease_until_ms is not None and known.lease_until_ms > tx.now_ms:
            return Outcome("pending")
        return self._run(tx, known, event)

    def _run(self, tx: Tx, known: Row, event: Event) -> Outcome:
        verdict = self._judge(tx, event, known.id, known.workspace, known.attempts)
        _settle(tx, known.id, verdict)
        return _outcome(verdict)

    def _apply_due(self, tx: Tx, row: int) -> Outcome:
        known = inbox.by_row(tx, row)
        if known is None or known.next_attempt_ms is None:
            # A redelivery or the operator came first.
            return Outcome("duplicate")
        try:
            event = stored_event(tx, self.settings, known)
        except NotReplayable as error:
            inbox.settle(tx, row, "quarantined", str(error))
            return Outcome("quarantined")
        return self._run(tx, known, event)

    def _judge(self, tx: Tx, event: Event, row: int, workspace: str | None, tried: int) -> Verdict:
        """Make the event's changes, all or none of them, and say how it ends."""
        if event.defect is not None:
            return Verdict("quarantined", event.defect)
        if event.test:
            return Verdict("ignored", "a test event on a live source")
        case = rules.Case(event, row, workspace, self.handlers)
        started = time.monotonic()
        begun: list[str] = []
        try:
            with tx.attempt:
                applied = self._apply_rules(tx, case, begun)
        except Park as park:
            return Verdict("parked", words_of(park), _fact(event, park))
        except (Quarantine, Unjudgeable) as error:
            return Verdict("quarantined", words_of(error))
        except (TransactionLost, Unavailable):
            raise
        except BaseException as error:
            # The founder's code may raise anything, and none of it may cost the event.
            return _failed(tx, row, tried, started, error, begun[-1])
        return _DONE if applied else Verdict("ignored", self._why_ignored(event))

    def _why_ignored(self, event: Event) -> str:
        matching = self.settings.rules_for(event.source, event.type)
        return rules.why_none_applied(matching, event.type, rules.scope_of(event))

    def _apply_rules(self, tx: Tx, case: rules.Case, begun: list[str]) -> bool:
        scope = rules.scope_of(case.event)
        applied = False
        for rule in self.settings.rules_for(case.event.source, case.event.type):
            begun.append(rule.operation)
            applied = rules.apply(tx, rule, case, scope) or applied
        return applied


def stored_event(snapshot: Snapshot, settings: Settings, known: Row) -> Event:
    """A stored event as it was verified, judged under `settings`; raises NotReplayable."""
    source = settings.sources.get(known.endpoint)
    if source is None:
        raise NotReplayable(f"source {known.endpoint} is no longer in the config")
    body = inbox.payload(snapshot, known.id)
    if body is None:
        raise NotReplayable("its payload was pruned")
    return reread(
        source.contract,
        body=body,
        content_type=known.content_type,
        event_id=known.event_id,
        type=known.type,
        account=known.account,
        received_ms=known.received_ms,
        secret=known.secret,
        claimed_account=known.claimed_account,
    )


def words_of(error: BaseException) -> str:
    """What an error says, whatever its own code does, as text that can be stored."""
    try:
        words = str(error)
    except Exception:
        words = "it can't be put in words"
    return words.encode(errors="backslashreplace").decode()


def _insert(tx: Tx, event: Event, request_id: str) -> int | None:
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
    )


def _known(tx: Tx, event: Event) -> Row:
    known = inbox.by_key(tx, event.identity, event.account, event.key_id)
    assert known is not None, "an insert that met a known key leaves that event to be found"
    return known


def _same_content(tx: Tx, known: Row, event: Event, volatile: Sequence[str]) -> bool:
    if known.body_sha256 == event.body_sha256:
        return True
    stored = inbox.payload(tx, known.id)
    if stored is None:
        # Pruned: there is nothing left to compare with.
        return True
    content = canonical(event.body, event.content_type, volatile)
    return content is not None and content == canonical(stored, known.content_type, volatile)


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


def _fact(event: Event, park: Park) -> Fact:
    if park.customer is not None:
        return Fact("link", event.identity, event.account, park.customer)
    if park.subject is not None and park.operation is not None:
        return Fact("entry", event.identity, event.account, park.subject, park.operation)
    return Fact("attribution", event.identity, event.account)


def _settle(tx: Tx, row: int, verdict: Verdict) -> None:
    if verdict.state == "pending":
        # The failed attempt was written when it failed.
        return
    reason = None if verdict.reason is None else verdict.reason[:REASON_CHARS_MAX]
    inbox.settle(tx, row, verdict.state, reason)
    if verdict.fact is not None:
        parked.wait(tx, row, verdict.fact)


def _failed(
    tx: Tx, row: int, tried: int, started: float, error: BaseException, operation: str
) -> Verdict:
    kind, place = type(error).__name__, place_of(error)
    # The text of the error may hold what is in the payload, so the log does without.
    logger.error("event %d: %s failed: %s at %s", row, operation, kind, place)
    words = f"{operation} at {place}: {kind}: {words_of(error)}"
    duration_ms = int((time.monotonic() - started) * 1000)
    _fail(tx, row, tried, words, duration_ms)
    return Verdict("pending", words)


def _fail(tx: Tx, row: int, tried: int, words: str, duration_ms: int = 0) -> None:
    inbox.fail(tx, row, words, next_attempt_ms=None)
    attempts.add(
        tx,
        row,
        tried + 1,
        duration_ms=duration_ms,
        outcome="failed",
        error=words[: inbox.ERROR_CHARS_MAX],
    )


def _outcome(verdict: Verdict) -> Outcome:
    return Outcome(verdict.state, retry=verdict.state == "pending")
