"""Compares what was paid for, and given back, at a sender with the amounts that are here."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from receiver import rules
from receiver.client import Client, Elsewhere, Found, Missing, Reply
from receiver.config import Grant, Reverse, Rule, Source
from receiver.destinations import Later
from receiver.listing import DAY_MS, Books, Objects, Unreadable
from receiver.operate import write_down
from receiver.pages import CursorLost, Pages, Stopped
from receiver.reconcile import PAGES_MAX, Difference, Means, Tell, event_of, receive
from receiver.said import Park, Quarantine
from receiver.select import Scope, Unjudgeable
from receiver.verify import Event
from store import ledger, operations, reconciles
from store.database import Tx
from store.ledger import Entry
from store.operations import Claim, Key

#: Objects judged, and entries read, in one transaction.
JUDGED_MAX = 100

#: What stands for the row of an event that is only tried: no event has it.
TRIED = 0


class Asked(msgspec.Struct, frozen=True):
    """The period, in UTC milliseconds, and what to do about what is missing in it."""

    accounts: tuple[str, ...]
    since_ms: int
    until_ms: int
    apply: bool = False


class Line(msgspec.Struct):
    """One line of the books: objects at the sender, entries here, and how they differ."""

    objects: int = 0
    here: int = 0
    missing: int = 0
    extra: int = 0
    other: int = 0
    mended: int = 0

    @property
    def gap(self) -> int:
        return self.missing - self.mended + self.extra + self.other


class Sheet(msgspec.Struct):
    """What is said of one kind of objects and one operation; and of each workspace of it."""

    words: str
    operation: str
    effect: str
    total: Line = msgspec.field(default_factory=Line)
    workspaces: dict[str, Line] = msgspec.field(default_factory=dict)

    def lines(self, workspace: str) -> tuple[Line, Line]:
        return self.total, self.workspaces.setdefault(workspace, Line())


class _Rule(NamedTuple):
    """A rule about one kind of objects, the type of event that it is judged by, and its sheet."""

    objects: Objects
    rule: Rule
    type: str
    sheet: Sheet


class _Judged(NamedTuple):
    """What a rule would do for an object, and what was done under the same key.

    `word` is matched, missing, other or extra; without a key the rule can't even name it.
    """

    word: str
    key: Key | None = None
    claim: Claim | None = None
    why: str = ""


class _Undo(Exception):
    """Ends an attempt so that nothing of it is kept; `found` is what it has seen."""

    def __init__(self, found: _Judged) -> None:
        super().__init__("only tried")
        self.found = found


#: Of what several rules say of one entry the first counts.
_BEST_FIRST = ("matched", "other", "extra")


class Comparison:
    """One comparison of a source's books."""

    def __init__(self, source: Source, asked: Asked, means: Means, tell: Tell) -> None:
        assert source.api is not None, "the caller has looked"
        assert source.api.sender.books is not None, "for this too"
        self.source = source
        self.asked = asked
        self.means = means
        self.tell = tell
        self.books: Books = source.api.sender.books
        self.sheets: list[Sheet] = []
        self.number = 0
        self._client = Client(source.api, source.contract.livemode)
        self._known: set[Key] = set()

    def run(self) -> int:
        """Compare all of it; what still differs. Raises Stopped."""
        begin = partial(reconciles.begin, source=self.source.name, about="books")
        self.number = self.means.write(begin)
        if self.asked.apply:
            target = f"source {self.source.name}"
            act = partial(write_down, by=self.means.by, action="reconcile books", target=target)
            self.means.write(lambda tx: act(tx, run=self.number))
        try:
            ours = list(self._rules())
            for account in self.asked.accounts:
                self._compare(ours, account)
        finally:
            self._client.close()
        gap = sum(sheet.total.gap for sheet in self.sheets)
        self.means.write(partial(reconciles.end, run=self.number, gap=gap))
        return gap

    def _rules(self) -> Iterator[_Rule]:
        """The rules that grant or take back an amount for what the sender lists."""
        settings, name = self.means.processor.settings, self.source.name
        for objects in self.books.objects.values():
            each = [(rule, on) for on in objects.on for rule in settings.rules_for(name, on)]
            # A rule for several of the types is judged by the first.
            first = {id(rule): (rule, on) for rule, on in reversed(each)}
            for rule, type_ in reversed(first.values()):
                if not isinstance(rule.effect, Grant | Reverse):
                    continue
                if rule.subject is None or rule.subject.uses_own("_event"):
                    self.tell.note(
                        f"{rule.operation} is not compared: without a subject it is done once for "
                        "each event (set subject to the object's id)"
                    )
                    continue
                yield _Rule(objects, rule, type_, self._sheet(objects, rule))

    def _sheet(self, objects: Objects, rule: Rule) -> Sheet:
        effect = "grant" if isinstance(rule.effect, Grant) else "reversal"
        for sheet in self.sheets:
            if (sheet.words, sheet.operation) == (objects.words, rule.operation):
                return sheet
        self.sheets.append(Sheet(objects.words, rule.operation, effect))
        return self.sheets[-1]

    def _compare(self, ours: Sequence[_Rule], account: str) -> None:
        for objects in self.books.objects.values():
            about = [one for one in ours if one.objects is objects]
            for batch in self._listed(objects, account) if about else ():
                for one in about:
                    self._judge(one, account, batch)
        for operation in dict.fromkeys(one.rule.operation for one in ours):
            makers = [one for one in ours if one.rule.operation == operation]
            self._extra(makers, operation, account)

    # What the sender has

    def _pages(self, objects: Objects, account: str) -> Pages:
        assert objects.listing.path is not None, "demanded where it is read"
        return Pages(
            self._client,
            objects.listing,
            objects.listing.path,
            account,
            clock=self.means.clock,
            wait=self.means.wait,
        )

    def _listed(self, objects: Objects, account: str) -> Iterator[list[object]]:
        """The objects that count in the period, each once, some at a time."""
        pages, until_ms = self._pages(objects, account), self.asked.until_ms
        since_ms = self.asked.since_ms - objects.early_days * DAY_MS
        cursor: str | None = None
        seen: set[str] = set()
        for _ in range(PAGES_MAX):
            try:
                page = pages.read(cursor, since_ms=since_ms, until_ms=until_ms)
            except CursorLost as error:
                self.tell.note(f"{error.args[0]}: its place is lost, so the list is read anew")
                cursor = None
                continue
            try:
                fits = [one for one in page.items if self._fits(objects, one, seen)]
                last_ms = min(map(objects.listing.time_ms, page.items), default=since_ms)
            except Unreadable as error:
                raise Stopped(f"{pages.path}: {error}") from error
            for start in range(0, len(fits), JUDGED_MAX):
                yield fits[start : start + JUDGED_MAX]
            self.tell.progress(min(1.0, (until_ms - last_ms) / max(1, until_ms - since_ms)))
            cursor = page.next
            if cursor is None or last_ms < since_ms:
                return
        raise Stopped(f"{PAGES_MAX} pages are read: ask for a shorter period (--since, --until)")

    def _fits(self, objects: Objects, one: object, seen: set[str]) -> bool:
        id_ = objects.listing.item_id(one)
        if id_ in seen:
            return False
        seen.add(id_)
        in_time = self.asked.since_ms <= objects.paid_ms(one) < self.asked.until_ms
        return in_time and objects.counts(one)

    def _event(self, one: _Rule, thing: object, account: str) -> Event:
        """What the sender would have told of an object. Raises Stopped."""
        try:
            id_ = f"reconcile:{one.type}:{one.objects.listing.item_id(thing)}"
            created = one.objects.paid_ms(thing) // 1000
        except Unreadable as error:
            raise Stopped(f"{one.objects.words}: {error}") from error
        about = {"id": id_, "type": one.type, "created": created, "object": thing}
        return event_of(
            self.source,
            msgspec.json.encode(self.books.event.render(Scope(about, {}))),
            event_id=id_,
            type=one.type,
            account=self.source.contract.account or account,
            now_ms=self.means.clock(),
        )

    # What a rule would do

    def _judge(self, one: _Rule, account: str, batch: Sequence[object]) -> None:
        events = [self._event(one, thing, account) for thing in batch]
        verdicts = self._tried(one.rule, events)
        for thing, event, verdict in zip(batch, events, verdicts, strict=True):
            if verdict is None:
                continue
            after = verdict
            if verdict.word == "missing" and self.asked.apply:
                after = self._put_through(one.rule, event)
            self._enter(one, thing, event, verdict, after)

    def _tried(self, rule: Rule, events: Sequence[Event]) -> list[_Judged | None]:
        """What the rule would do for each event; None where it does not apply. Nothing is kept."""
        return self.means.write(lambda tx: [self._try(tx, rule, event) for event in events])

    def _try(self, tx: Tx, rule: Rule, event: Event) -> _Judged | None:
        if event.defect is not None or event.test:
            return _Judged("missing", why=event.defect or "is of the other mode")
        processor = self.means.processor
        case = rules.Case(
            event,
            TRIED,
            None,
            processor.handlers,
            processor.settings.destinations,
            {},
            processor.settings,
        )
        scope = rules.scope_of(event)
        try:
            with tx.attempt:
                if rules.apply(tx, rule, case, scope) is not None:
                    return None
                raise _Undo(_done(tx, rule, scope, case.keys[-1]))
        except _Undo as undone:
            return undone.found
        except (Park, Quarantine, Unjudgeable) as said:
            return _refused(tx, case, said)

    def _put_through(self, rule: Rule, event: Event) -> _Judged:
        """As the sender's own event would be; then what the rule says."""
        outcome = receive(self.means, event, f"reconcile-{self.number}")
        if outcome.word == "duplicate":
            # It was put through before, under other rules.
            self.means.write(partial(self.means.processor.replay, row=outcome.row))
        self.means.drain()
        (after,) = self._tried(rule, [event])
        return after or _Judged("missing", why=f"became {outcome.word}")

    def _enter(
        self, one: _Rule, thing: object, event: Event, verdict: _Judged, after: _Judged
    ) -> None:
        claim = after.claim or verdict.claim
        again = verdict.key is not None and verdict.key in self._known
        missing = verdict.word == "missing" and not again
        for line in one.sheet.lines("" if claim is None else claim.workspace or ""):
            line.objects += 1
            line.here += not again and "missing" not in (verdict.word, after.word)
            line.here += missing and after.word == "matched"
            line.missing += missing
            line.other += verdict.word == "other"
            line.mended += missing and after.word == "matched"
        if verdict.key is not None:
            self._known.add(verdict.key)
        if missing or verdict.word == "other":
            self.tell.difference(
                Difference(
                    what=_WHAT.get(verdict.word, verdict.word),
                    account=event.account,
                    type=one.rule.operation,
                    id=one.objects.listing.item_id(thing),
                    at_ms=one.objects.paid_ms(thing),
                    detail=after.why or _said(claim),
                    workspace="" if claim is None else claim.workspace or "",
                )
            )

    # What is here, and not there

    def _extra(self, makers: Sequence[_Rule], operation: str, account: str) -> None:
        """Entries of the period that no object of the lists stands for."""
        types = {type_ for one in makers for type_ in one.objects.on}
        elsewhere = [
            rule
            for rule in self.means.processor.settings.rules
            if rule.operation == operation and not types.issuperset(rule.on)
        ]
        if elsewhere:
            self.tell.note(
                f"{operation} is made for other events too, so what is extra of it is not told"
            )
            return
        after = (0, "")
        while batch := self.means.write(
            partial(
                ledger.of_operation,
                source=self.source.contract.identity,
                account=self.source.contract.account or account,
                operation=operation,
                since_ms=self.asked.since_ms,
                until_ms=self.asked.until_ms,
                after=after,
                limit=JUDGED_MAX,
            )
        ):
            after = (batch[-1].created_ms, batch[-1].key.subject)
            for entry in batch:
                if entry.key not in self._known:
                    self._look_for(makers, account, entry)

    def _look_for(self, makers: Sequence[_Rule], account: str, entry: Entry) -> None:
        """Its object by itself: it may have been paid at another time than it was entered."""
        judged = [(self._alone(one, account, entry), one) for one in makers]
        best, one = min(judged, key=lambda pair: _BEST_FIRST.index(pair[0].word))
        self._known.add(entry.key)
        for line in one.sheet.lines(entry.workspace):
            line.here += 1
            line.objects += best.word != "extra"
            line.extra += best.word == "extra"
            line.other += best.word == "other"
        if best.word != "matched":
            self.tell.difference(
                Difference(
                    what=_WHAT.get(best.word, best.word),
                    account=entry.key.account,
                    type=entry.key.operation,
                    id=entry.key.subject,
                    at_ms=entry.created_ms,
                    detail=best.why,
                    workspace=entry.workspace,
                )
            )

    def _alone(self, one: _Rule, account: str, entry: Entry) -> _Judged:
        """What the rule says of the object that an entry names. Raises Stopped."""
        try:
            reply = self._pages(one.objects, account).one(one.objects.one, entry.key.subject)
        except Unjudgeable as error:
            return _Judged("extra", why=str(error))
        if isinstance(reply, Later) and not isinstance(reply, Elsewhere):
            raise Stopped(reply.why)
        if not isinstance(reply, Found):
            return _Judged("extra", why=_not_there(reply))
        if not one.objects.counts(reply.document):
            return _Judged("extra", why=f"is no {one.objects.words} at the sender")
        (verdict,) = self._tried(one.rule, [self._event(one, reply.document, account)])
        if verdict is None or verdict.key != entry.key or verdict.word == "missing":
            return _Judged("extra", why=f"{one.rule.operation} would not be made for it now")
        return verdict


_WHAT = {"other": "another amount"}


def _done(tx: Tx, rule: Rule, scope: Scope, key: Key) -> _Judged:
    """What stands under the key once the rule was applied: made by that, or before."""
    holder, claim = operations.holder(tx, key), operations.find(tx, key)
    assert holder is not None, "the rule has claimed it, or found it claimed"
    assert claim is not None, "that is the same row"
    if holder[0] == TRIED:
        return _Judged("missing", key, claim)
    why, effect = "", rule.effect
    if isinstance(effect, Reverse) and effect.amount is not None:
        # Of a grant the rule has compared the amount by itself.
        asked = effect.amount.value(scope)
        if claim.amount is not None and asked != -claim.amount:
            why = f"was done as {claim.amount} {claim.unit}; this would take back {asked}"
    return _Judged("other" if why else "matched", key, claim, why)


def _refused(tx: Tx, case: rules.Case, said: Exception) -> _Judged:
    key = case.keys[-1] if case.keys else None
    claim = None if key is None else operations.find(tx, key)
    if claim is None:
        return _Judged("missing", key, None, str(said))
    # Done already: what it waits for can't make it another.
    return _Judged("matched" if isinstance(said, Park) else "other", key, claim, str(said))


def _not_there(reply: Reply) -> str:
    match reply:
        case Elsewhere():
            return "is an object of the other mode"
        case Missing(why=why):
            return f"is not at the sender: {why}"
    assert not isinstance(reply, Found), "that is there"
    return f"can't be found at the sender: {reply.why}"


def _said(claim: Claim | None) -> str:
    return "" if claim is None else f"{claim.amount} {claim.unit}"
