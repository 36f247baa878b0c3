"""What Receiver promises, said as plainly as can be: dictionaries, without SQL, locks or processes.

Each method is one thing that can happen, whole. Whatever else goes on in the program, the file must
say the same as this after each of them; `tests/proof/machine.py` compares the two.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

#: As in the config that the program runs under, in ms where it is a time.
ATTEMPTS_MAX, BACKOFF_FIRST_MS, BACKOFF_MAX_MS = 3, 60_000, 600_000
EVENT_LEASE_MS, SEND_LEASE_MS = 300_000, 40_000
DAY_MS = 86_400_000
#: `receipt` may not be repeated when its outcome is unknown, unless the config says so.
DESTINATIONS = ("receipt", "team")
FINAL = ("done", "ignored", "dead")

T = TypeVar("T")
#: Account and id: "have I accepted this before?"
EventKey = tuple[str, str]
#: What a parked event waits for.
Fact = tuple[str, ...]
Results = Literal["sent", "later", "never", "unknown"]


class Key(NamedTuple):
    """The business key: "has this already been done?" """

    source: str
    account: str
    subject: str
    operation: str


class Content(NamedTuple):
    """What an event says. `text` is a link's workspace, a refund's invoice, or a resource's state;
    `number` a refund's amount, a resource's version, or a note; `extra` may be called volatile."""

    kind: str
    subject: str
    customer: str = ""
    text: str = ""
    number: int = 0
    extra: int | None = 0


class Rules(NamedTuple):
    """What the config may say; `queued` and `there` are about the second source."""

    amount: int = 100
    wanted: bool = False
    queued: bool = True
    there: bool = True
    works: bool = True
    keep_ignored: bool = True
    mask_extra: bool = False
    repeat: bool = False

    def kinds(self, source: str) -> set[str]:
        """What the rules of a source are for."""
        more = {"void"} | ({"other"} if self.wanted else set())
        wanted = {"link", "pay", "refund", "state", "seen", "note"}
        return wanted | (more if source == "stripe" else set())

    def compared(self, content: Content) -> Content:
        return content._replace(extra=None) if self.mask_extra else content


@dataclass
class Event:
    source: str
    content: Content
    received: int
    state: str = "pending"
    waits_for: Fact | None = None
    duplicates: int = 0
    attempts: int = 0
    #: From when on it is applied, and whether by a worker; 0 for what was released.
    due: int | None = None
    by_worker: bool = False
    lease: int | None = None
    workspace: str = ""
    #: Whether the body is `there`, or `gone`, or what is left of it to compare another with: a
    #: hash of it all (`plain`), or without what is volatile (`masked`).
    body: str = "there"


@dataclass(frozen=True)
class Message:
    due: int | None
    state: str = "pending"
    attempts: int = 0
    lease: int | None = None
    blank: bool = False


class Books(NamedTuple):
    """All that an event can change: the whole of it, or nothing."""

    #: The kind, workspace, amount and target of an operation, and the event that it was done by.
    claims: dict[Key, tuple[tuple[Any, ...], EventKey | None]]
    ledger: dict[Key, tuple[str, int, Key | None]]
    records: dict[Key, int | None]
    links: dict[tuple[str, str], str]
    owed: dict[tuple[Key, str], Message]
    #: Version and state of a resource.
    states: dict[tuple[str, str], tuple[int, str]]
    #: What the founder's own statement has counted, by workspace.
    counted: dict[str, int]
    #: Deliveries of it, and whether it is resolved, by the event and what else it said.
    conflicts: dict[tuple[EventKey, Any], tuple[int, bool]]


class Parked(Exception):
    pass


class Quarantined(Exception):
    pass


class Failed(Exception):
    pass


class Model:
    def __init__(self, now: int) -> None:
        self.now, self.rules, self.broken = now, Rules(), False
        self.events: dict[EventKey, Event] = {}
        self.books = Books({}, {}, {}, {}, {}, {}, {}, {})
        #: Acts by hand: each is in the audit log.
        self.acts = 0
        self.failures = 0

    # A delivery

    def deliver(self, source: str, key: EventKey, content: Content) -> str:
        event = self.events.get(key)
        if event is None:
            event = self.events[key] = Event(source, content, self.now)
        elif not self._same(event, content):
            self._conflict(key, self.rules.compared(content))
            return "conflict"
        else:
            event.duplicates += 1
            if event.state in FINAL:
                return "duplicate"
            if event.lease is not None and event.lease > self.now:
                return "pending"
        if self._is_there(event.source):
            # Whoever brings it again: the source that it came in by has it judged.
            source = event.source
        if source == "queue" and self.rules.queued:
            self._make_due(event, by_worker=True)
            return "pending"
        return self._run(key, source)

    def _same(self, event: Event, content: Content) -> bool:
        masked = self.rules.mask_extra
        if event.body == "gone" or event.body == ("plain" if masked else "masked"):
            # They can't be compared.
            return True
        return self.rules.compared(event.content) == self.rules.compared(content)

    def _conflict(self, key: EventKey, content: Any) -> None:
        deliveries, resolved = self.books.conflicts.get((key, content), (0, False))
        self.books.conflicts[key, content] = (deliveries + 1, resolved)

    # What an event does

    def _run(self, key: EventKey, source: str, *, leased: bool = False) -> str:
        event = self.events[key]
        before = self._copy()
        try:
            state = "done" if self._apply(key, event, source) else "ignored"
        except Parked as parked:
            state, event.waits_for = "parked", parked.args[0]
        except Quarantined:
            state = "quarantined"
        except Failed:
            state = "failed"
        if state == "done":
            self._release(before)
        else:
            self.books = before
        if state == "failed":
            return self._fail(event, leased=leased)
        self._settle(event, state)
        if state == "ignored" and not self.rules.keep_ignored:
            event.body = "gone"
        return state

    def _apply(self, key: EventKey, event: Event, source: str) -> bool:
        """Do what the rules of its source say; False if there is none for it."""
        told, account = event.content, key[0]
        if told.kind not in self.rules.kinds(source):
            return False
        own = Key("stripe", account, told.subject, told.kind)
        grant = own._replace(operation="grant")
        match told.kind:
            case "link":
                self._link(account, told.customer, told.text or event.workspace)
            case "pay":
                self._pay(grant, key, event)
            case "refund":
                self._reverse(own, grant._replace(subject=told.text), told.number, key)
            case "void":
                self._reverse(own, grant, None, key)
            case "state":
                self._project(key, (account, told.subject), (told.number, told.text))
                self._claim(own._replace(subject=key[1]), ("project", None, None, None), key)
            case "seen":
                return self._see(own, told.number, key)
            case _:
                self._record(own, told.number, key)
        return True

    def _pay(self, grant: Key, by: EventKey, event: Event) -> None:
        count = grant._replace(operation="count")
        undone = [one for one in (grant, count) if not self._did(one, by)]
        if not undone:
            return
        workspace = self._workspace(by[0], event.content.customer, event)
        amount = self.rules.amount
        if grant in undone and self._claim(grant, ("grant", workspace, amount, None), by):
            self.books.ledger[grant] = (workspace, amount, None)
            for to in DESTINATIONS:
                self.books.owed[grant, to] = Message(self.now)
        if count in undone and self._claim(count, ("sql", workspace, None, None), by):
            if self.broken:
                raise Failed
            self.books.counted[workspace] = self.books.counted.get(workspace, 0) + 1

    def _see(self, key: Key, note: int, by: EventKey) -> bool:
        known = self.books.states.get((key.account, key.subject))
        if known is None:
            raise Parked(("resource", key.account, key.subject))
        if known[1] == "open":
            self._record(key, note, by)
        return known[1] == "open"

    def _did(self, key: Key, by: EventKey) -> bool:
        """Whether that very event did it, which stands whatever the rules and links are now."""
        return key in self.books.claims and self.books.claims[key][1] == by

    def _claim(self, key: Key, what: tuple[Any, ...], by: EventKey | None) -> bool:
        if key not in self.books.claims:
            self.books.claims[key] = (what, by)
            return True
        if self.books.claims[key][0] != what:
            raise Quarantined
        return False

    def _record(self, key: Key, note: int, by: EventKey) -> None:
        if self._claim(key, ("record", None, None, None), by):
            self.books.records[key] = note

    def _workspace(self, account: str, customer: str, event: Event) -> str:
        if not customer and not event.workspace:
            raise Parked(("attribution", account))
        found = event.workspace or self.books.links.get((account, customer))
        if found is None:
            raise Parked(("link", account, customer))
        return found

    def _link(self, account: str, customer: str, workspace: str) -> None:
        if not customer:
            raise Parked(("attribution", account))
        known = self.books.links.get((account, customer))
        if not (known or workspace):
            raise Parked(("link", account, customer))
        if known and workspace not in ("", known):
            raise Quarantined
        self.books.links[account, customer] = known or workspace

    def _reverse(self, key: Key, target: Key, amount: int | None, by: EventKey | None) -> None:
        """Take back what a grant gave, or all that is left of it."""
        entry, known = self.books.ledger.get(target), self.books.claims.get(key)
        if known is not None:
            is_other = known[0][0] != "reverse" or known[0][3] != target
            if is_other and (by is None or known[1] != by):
                raise Quarantined
        elif entry is None:
            raise Parked(("entry", *target))
        else:
            left = self.left(target)
            taken = left if amount is None else amount
            if not 0 < taken <= left:
                raise Quarantined
            self.books.claims[key] = (("reverse", entry[0], -taken, target), by)
            self.books.ledger[key] = (entry[0], -taken, target)

    def left(self, target: Key) -> int:
        """What of a grant was not taken back."""
        taken = (amount for _, amount, of in self.books.ledger.values() if of == target)
        return self.books.ledger[target][1] + sum(taken)

    def _project(self, by: EventKey, name: tuple[str, str], seen: tuple[int, str]) -> None:
        """A later version stands; of two contents of one version the first, contested."""
        known = self.books.states.get(name)
        if known is None or seen[0] > known[0]:
            self.books.states[name] = seen
            for one, (deliveries, _) in self.books.conflicts.items():
                if one[1][0] == name:
                    self.books.conflicts[one] = (deliveries, True)
        elif seen[0] == known[0] and seen != known:
            self._conflict(by, (name, seen))

    # What becomes of an event

    def _settle(self, event: Event, state: str) -> None:
        event.state, event.due, event.lease = state, None, None
        if state != "parked":
            event.waits_for = None

    def _fail(self, event: Event, *, leased: bool) -> str:
        event.attempts += not leased
        self.failures += 1
        if self.rules.works and event.attempts >= ATTEMPTS_MAX:
            self._settle(event, "dead")
            return "dead"
        self._settle(event, "pending")
        event.by_worker = self.rules.works
        if self.rules.works:
            event.due = self.now + backoff_ms(event.attempts)
        # Where nobody tries again, the sender must.
        return "pending" if self.rules.works else "pending!"

    def _make_due(self, event: Event, *, by_worker: bool) -> None:
        self._settle(event, "pending")
        event.due, event.by_worker = self.now, by_worker

    def _release(self, before: Books) -> None:
        """Make due what waited for a fact that is there now."""
        links, now = self.books.links.items() - before.links.items(), self.books
        facts: set[Fact] = {("link", *name) for name, _ in links}
        facts |= {("entry", *key) for key in now.ledger.keys() - before.ledger.keys()}
        facts |= {("resource", *name) for name in now.states.keys() - before.states.keys()}
        for event in self.events.values():
            if event.waits_for in facts:
                event.state, event.due, event.waits_for = "pending", 0, None

    def released(self) -> list[EventKey]:
        """What is to be applied by whoever commits next, the oldest first."""
        return [k for k, one in self.events.items() if one.due is not None and not one.by_worker]

    def apply_due(self, key: EventKey) -> None:
        if key in self.released():
            self._run_stored(key)

    def _run_stored(self, key: EventKey, *, leased: bool = False) -> str:
        event = self.events[key]
        judge = self._judge_of(event)
        if judge is None or event.body != "there":
            self._settle(event, "quarantined")
            return "quarantined"
        return self._run(key, judge, leased=leased)

    def _is_there(self, source: str) -> bool:
        return source == "stripe" or self.rules.there

    def _judge_of(self, event: Event) -> str | None:
        """The source by whose rules it is judged: where its own is gone, the one of its sender."""
        if self._is_there(event.source):
            return event.source
        return "stripe" if event.content.kind in self.rules.kinds("stripe") else None

    def _copy(self) -> Books:
        return Books(*(dict(table) for table in self.books))  # type: ignore[arg-type]

    # A worker

    def lease_event(self) -> EventKey | None:
        """The attempt at what is due longest; one whose worker ended has counted as well."""
        while True:
            queue = {k: one.due for k, one in self.events.items() if one.by_worker}
            key = self._longest(queue)
            if key is None:
                return None
            event = self.events[key]
            if event.attempts < ATTEMPTS_MAX:
                event.attempts += 1
                event.due = event.lease = self.now + EVENT_LEASE_MS
                return key
            self._settle(event, "dead")

    def settle_event(self, key: EventKey, attempt: int, rules: Rules) -> None:
        """The end of an attempt, under the rules that it was begun under; maybe too late."""
        event = self.events[key]
        if event.lease is None or event.attempts != attempt:
            return
        now_rules, self.rules = self.rules, rules
        self._run_stored(key, leased=True)
        self.rules = now_rules

    def lease_message(self, to: str) -> tuple[Key, str] | None:
        while True:
            queue = {k: one.due for k, one in self.books.owed.items() if k[1] == to}
            key = self._longest(queue)
            if key is None:
                return None
            message = self.books.owed[key]
            if message.lease is not None and not self.may_repeat(to):
                self._mail(key, "review")
            elif message.lease is not None and message.attempts >= ATTEMPTS_MAX:
                self._mail(key, "dead")
            else:
                until = self.now + SEND_LEASE_MS
                attempts = message.attempts + 1
                self.books.owed[key] = replace(message, attempts=attempts, lease=until, due=until)
                return key

    def settle_message(
        self, key: tuple[Key, str], attempt: int, result: Results, *, may_repeat: bool
    ) -> None:
        message = self.books.owed[key]
        if message.lease is None or message.attempts != attempt:
            return
        if result == "sent":
            self._mail(key, "sent")
        elif result == "never":
            self._mail(key, "dead")
        elif result == "unknown" and not may_repeat:
            self._mail(key, "review")
        elif attempt >= ATTEMPTS_MAX:
            self._mail(key, "dead")
        else:
            self._mail(key, "pending", self.now + backoff_ms(attempt))

    def may_repeat(self, to: str) -> bool:
        return to != "receipt" or self.rules.repeat

    def _longest(self, queue: dict[T, int | None]) -> T | None:
        """What is due longest; what is due in too far a future was written by a wrong clock."""
        all_due = {key: at for key, at in queue.items() if at is not None}
        due = {key: at for key, at in all_due.items() if at <= self.now}
        far = {key: at for key, at in all_due.items() if at > self.now + BACKOFF_MAX_MS}
        return min(due or far, key=(due or far).__getitem__, default=None)

    def _mail(self, key: tuple[Key, str], state: str, due: int | None = None) -> None:
        self.books.owed[key] = replace(self.books.owed[key], state=state, due=due, lease=None)

    # Acts by hand: False where it is declined, and nothing has changed

    def link(self, account: str, customer: str, workspace: str, *, repoint: bool) -> bool:
        known, before = self.books.links.get((account, customer)), self._copy()
        if known not in (None, workspace) and not repoint:
            return False
        self.books.links[account, customer] = workspace
        self._release(before)
        self.acts += known != workspace
        return True

    def unlink(self, account: str, customer: str) -> bool:
        there = self.books.links.pop((account, customer), None) is not None
        self.acts += there
        return there

    def replay(self, key: EventKey) -> str | None:
        event = self.events[key]
        if self._is_leased(event) or self._judge_of(event) is None or event.body != "there":
            return None
        self.acts += 1
        return self._run_stored(key).removesuffix("!")

    def resolve(self, key: EventKey) -> bool:
        event = self.events[key]
        if event.state in ("done", "ignored") or self._is_leased(event):
            return False
        self._settle(event, "ignored")
        self.acts += 1
        return True

    def attribute(self, key: EventKey, workspace: str) -> bool:
        event = self.events[key]
        if event.state in FINAL or self._is_leased(event):
            return False
        event.workspace = workspace
        self._make_due(event, by_worker=False)
        self.acts += 1
        return True

    def _is_leased(self, one: Event | Message) -> bool:
        return one.lease is not None and one.lease > self.now

    def resolve_conflict(self, which: tuple[EventKey, Any]) -> bool:
        deliveries, resolved = self.books.conflicts[which]
        self.books.conflicts[which] = (deliveries, True)
        self.acts += not resolved
        return not resolved

    def grant(self, key: Key, workspace: str, amount: int) -> bool:
        return self._enter(key, ("grant", workspace, amount, None), by_hand=True)

    def adjust(self, name: str, workspace: str, amount: int, *, overdraw: bool) -> bool:
        key = Key("operator", "", name, "adjustment")
        kind = "grant" if amount > 0 else "spend"
        new, balance = key not in self.books.ledger, self.balances().get(workspace, 0)
        if new and amount < 0 and balance + amount < 0 and not overdraw:
            return False
        return self._enter(key, (kind, workspace, amount, None), by_hand=True)

    def revert(self, target: Key, amount: int | None) -> bool:
        entry = self.books.ledger.get(target)
        if entry is None or entry[1] < 0 or self.left(target) < (amount or 1):
            return False
        numbers = ("", *(f"-{number}" for number in range(2, 99)))
        names = (target._replace(operation=f"revert{n}:{target.operation}") for n in numbers)
        key = next(name for name in names if name not in self.books.claims)
        self._reverse(key, target, amount, None)
        self.acts += 1
        return True

    def _enter(self, key: Key, what: tuple[Any, ...], *, by_hand: bool) -> bool:
        before = self._copy()
        try:
            new = self._claim(key, what, None)
        except Quarantined:
            return False
        if new:
            self.books.ledger[key] = (what[1], what[2], None)
            self._release(before)
            self.acts += by_hand
        return True

    def mail(self, key: tuple[Key, str], act: Literal["retry", "sent", "again", "cancel"]) -> bool:
        """What is said of a message by hand."""
        message = self.books.owed[key]
        allowed = {"retry": message.state != "sent" and not message.blank}
        allowed |= {"cancel": message.state not in ("sent", "cancelled")}
        if self._is_leased(message) or not allowed.get(act, message.state == "review"):
            return False
        state = {"sent": "sent", "cancel": "cancelled"}.get(act, "pending")
        self._mail(key, state, self.now if state == "pending" else None)
        self.acts += 1
        return True

    def prune(self) -> None:
        for key, event in self.events.items():
            there = self._is_there(event.source)
            old = event.received < self.now - (30 if there else 90) * DAY_MS
            unwanted = event.state == "ignored" and there and not self.rules.keep_ignored
            if (old or unwanted) and self._is_over(key, ("pending", "review", "dead")):
                self._forget(key)

    def redact(self, key: EventKey) -> bool:
        if not self._is_over(key, ("pending", "review"), conflicts=False):
            return False
        self._forget(key)
        made = [one for one, claim in self.books.claims.items() if claim[1] == key]
        self.books.records.update({one: None for one in made if one in self.books.records})
        self.acts += 1
        return True

    def _is_over(self, key: EventKey, owed: tuple[str, ...], *, conflicts: bool = True) -> bool:
        open_conflict = any(
            one[0] == key and not resolved for one, (_, resolved) in self.books.conflicts.items()
        )
        return (
            self.events[key].state in ("done", "ignored")
            and not (conflicts and open_conflict)
            and not any(self.books.owed[one].state in owed for one in self._messages(key))
        )

    def _messages(self, key: EventKey) -> list[tuple[Key, str]]:
        return [one for one in self.books.owed if self.books.claims[one[0]][1] == key]

    def _forget(self, key: EventKey) -> None:
        event = self.events[key]
        if event.body == "there" and not self._is_there(event.source):
            event.body = "gone"
        elif event.body == "there":
            event.body = "masked" if self.rules.mask_extra else "plain"
        for one in self._messages(key):
            self.books.owed[one] = replace(self.books.owed[one], blank=True)

    # The app, on a connection of its own

    def spend(self, name: str, workspace: str, amount: int) -> bool:
        key = Key("app", "", name, "spend")
        if key in self.books.ledger or self.balances().get(workspace, 0) < amount:
            return False
        return self._enter(key, ("spend", workspace, -amount, None), by_hand=False)

    def app_grant(self, key: Key, workspace: str, amount: int) -> bool:
        if key in self.books.ledger:
            return False
        return self._enter(key, ("grant", workspace, amount, None), by_hand=False)

    def balances(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for workspace, amount, _ in self.books.ledger.values():
            found[workspace] = found.get(workspace, 0) + amount
        return found


def backoff_ms(attempt: int) -> int:
    """Half of the longest pause, as the proof's dice always fall in the middle."""
    return min(BACKOFF_MAX_MS, BACKOFF_FIRST_MS << (attempt - 1)) // 2
