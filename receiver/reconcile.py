"""Finds what a sender has and we do not, and puts it through the same inbox and rules."""

import os
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from receiver import fetching
from receiver.client import Client, Elsewhere, Found, Missing, Reply
from receiver.config import Source
from receiver.console import rfc3339
from receiver.destinations import Never
from receiver.fetching import NotFetchable
from receiver.listing import DAY_MS, Listing, Unreadable
from receiver.operate import By, write_down
from receiver.pages import CursorLost, Pages, Stopped, Wait, patiently
from receiver.process import Outcome, Processor
from receiver.select import Unjudgeable
from receiver.verify import Event, reread
from store import fetches, inbox, reconciles, resources
from store.database import Tx
from store.inbox import Row
from store.resources import Resource, Seen

if TYPE_CHECKING:
    from receiver.worker import Write

#: What is younger may still be on its way, in seconds.
GRACE_S = 300

#: How far to look back at a sender of whom it is not known how long it keeps events, in days.
LOOKBACK_DAYS = 30

#: How old a run may be that is gone on with, in ms, and how long it is ours without a sign of life.
RESUME_MS = DAY_MS
LEASE_MS = 900_000

#: Pages of one run; the next one goes on behind them.
PAGES_MAX = 10_000

#: Events looked up in one transaction, and those of a run whose end is looked at once more.
LOOKED_UP, LEFT_MAX = 100, 1_000

#: Other resources that are asked for before one is believed to be gone.
WITNESSES_MAX = 5

UNFINISHED = ("pending", "parked", "quarantined", "dead")


class Difference(msgspec.Struct, frozen=True):
    """Something that is not here as it is at the sender."""

    what: str
    account: str
    type: str
    id: str
    at_ms: int | None
    detail: str = ""
    workspace: str = ""


class Asked(msgspec.Struct, frozen=True):
    """What a run is asked for; `since` is as the operator wrote it, None for all that is kept."""

    accounts: tuple[str, ...]
    since: str | None = None
    since_ms: int | None = None
    everything: bool = False
    apply: bool = False
    resources: bool = True

    def __str__(self) -> str:
        """What a run must have been asked for to be gone on with."""
        words = (self.since, self.everything, self.apply, self.resources)
        return msgspec.json.encode((self.accounts, words)).decode()


class Counts(msgspec.Struct):
    """How many of what."""

    listed: int = 0
    unwanted: int = 0
    missing: int = 0
    unfinished: int = 0
    asked: int = 0
    resources: int = 0
    unread: int = 0
    drifted: int = 0
    mended: int = 0

    def add(self, other: "Counts") -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Window(msgspec.Struct):
    """A stretch of one account's list, the newest first, and how far it is read."""

    account: str
    since_ms: int
    until_ms: int
    cursor: str | None = None
    read: bool = False
    counts: Counts = msgspec.field(default_factory=Counts)


class Place(msgspec.Struct):
    """How far a run is. `left` are rows of events that were put through and not finished."""

    until_ms: int
    windows: list[Window]
    counts: Counts = msgspec.field(default_factory=Counts)
    left: list[int] = msgspec.field(default_factory=list)
    left_beyond: int = 0
    resource: int = 0


class Result(NamedTuple):
    """What a complete run found; `gap` is what still differs, `open` the events that do."""

    counts: Counts
    gap: int
    open: Sequence[Row]


class Tell(Protocol):
    """Who is told as it goes on."""

    def difference(self, one: Difference) -> None: ...

    def progress(self, part: float) -> None: ...

    def note(self, words: str) -> None: ...


class Means(msgspec.Struct, frozen=True):
    """What a run works with; `owner` is nobody else, and of the form of `owner_here`."""

    processor: Processor
    write: "Write"
    clock: Callable[[], int]
    wait: Wait
    owner: str
    by: By
    #: Called outside any transaction after events were put through: what they released is due.
    drain: Callable[[], None]


class _Met(NamedTuple):
    """One wanted item of a list, as the event that it is here."""

    item: object
    account: str
    key_id: str
    type: str
    at_ms: int


class Run:
    """One comparison of a source's events, and of the state of its resources."""

    def __init__(self, source: Source, asked: Asked, means: Means, tell: Tell) -> None:
        assert source.api is not None, "the caller has looked"
        self.source = source
        self.asked = asked
        self.means = means
        self.tell = tell
        self.api = source.api
        self.identity = source.contract.identity
        self.number = 0
        self._client = Client(source.api, source.contract.livemode)
        self._place = Place(0, [])
        # By account and key: what was looked at, told, and sent a moment ago.
        self._met: set[tuple[str, str]] = set()
        self._told: set[tuple[str, str]] = set()
        self._recent: set[tuple[str, str]] = set()
        self._pages = 0
        self._oldest_ms = 0
        # By account: whether the key reads anything that is known of it.
        self._reads: dict[str, bool] = {}

    def run(self) -> Result:
        """All of it. Raises Stopped; the next run for the same goes on from there."""
        self._begin()
        try:
            for window in self._place.windows:
                self._read(window)
            if self.asked.resources:
                self._compare_resources()
            return self._end()
        finally:
            self._client.close()
            self.means.write(partial(reconciles.leave, run=self.number, owner=self.means.owner))

    # Beginning and ending

    def _begin(self) -> None:
        now_ms = self.means.clock()
        start = partial(self._start, now_ms=now_ms, since_ms=self._since_ms(now_ms))
        started_ms = self.means.write(start)
        if started_ms is not None:
            read = self._total().listed
            minutes = (now_ms - started_ms) // 60_000
            told = ": what differed among them was told then" if read else ""
            self.tell.note(
                f"goes on with the run that was cut off {minutes} min ago, "
                f"{read} events read then{told}"
            )

    def _start(self, tx: Tx, now_ms: int, since_ms: int) -> int | None:
        """Take up a run that was cut off, and return when it began; or begin one."""
        means, until_ms = self.means, self._until_ms(now_ms)
        # Under other rules other events would have been wanted.
        name, asked = self.source.name, f"{self.asked} {self._patterns()}"
        found = reconciles.cut_off(tx, name, "events", asked, now_ms - RESUME_MS)
        if found is not None and self._is_free(found, now_ms):
            self.number = found.run
            self._place = msgspec.json.decode(found.place, type=Place)
            self._extend(until_ms)
            reconciles.take(tx, found.run, means.owner, now_ms + LEASE_MS)
            return found.started_ms
        windows = [Window(one, since_ms, until_ms) for one in self._accounts()]
        self._place = Place(until_ms, windows)
        self.number = reconciles.begin(
            tx,
            name,
            asked=asked,
            place=self._encoded(),
            owner=means.owner,
            until_ms=now_ms + LEASE_MS,
        )
        if self.asked.apply:
            write_down(tx, means.by, "reconcile", f"source {name}", run=self.number)
        return None

    def _is_free(self, found: reconciles.CutOff, now_ms: int) -> bool:
        if found.owner is None or (found.lease_until_ms or 0) <= now_ms:
            return True
        return not _may_run(found.owner)

    def _extend(self, until_ms: int) -> None:
        """What has come since the run was cut off is read too."""
        before_ms, self._place.until_ms = self._place.until_ms, until_ms
        if until_ms > before_ms:
            windows = [Window(one, before_ms, until_ms) for one in self._accounts()]
            self._place.windows += windows

    def _accounts(self) -> tuple[str, ...]:
        return self.asked.accounts if self._listing is not None else ()

    def _until_ms(self, now_ms: int) -> int:
        # One second more: what is created in this second counts.
        return now_ms + 1_000 if self.asked.everything else now_ms - GRACE_S * 1000

    def _since_ms(self, now_ms: int) -> int:
        days = 0 if self._listing is None else self._listing.days
        kept_ms = now_ms - (days or LOOKBACK_DAYS) * DAY_MS
        since_ms = kept_ms if self.asked.since_ms is None else self.asked.since_ms
        if days and since_ms < kept_ms:
            self.tell.note(
                f"{self.source.name} keeps events for {days} days: what is older can't be listed"
                + (", compare --books" if self.api.sender.books is not None else "")
            )
            return kept_ms
        return since_ms

    def _end(self) -> Result:
        counts, place = self._total(), self._place
        rows = self.means.write(lambda tx: [inbox.by_row(tx, row) for row in place.left])
        still = [row for row in rows if row is not None and not self._is_done(row)]
        gap = counts.missing + counts.unfinished + counts.drifted + counts.unread
        if self.asked.apply:
            gap = len(still) + place.left_beyond + counts.asked + counts.unread
            gap += counts.drifted - counts.mended
        since = rfc3339(min((one.since_ms for one in place.windows), default=None))
        note = f"{counts.listed} events since {since}, {counts.missing} missing"
        self.means.write(partial(reconciles.end, run=self.number, gap=gap, note=note))
        return Result(counts, gap, still)

    def _is_done(self, row: Row) -> bool:
        # On a queued source it is the worker that applies it.
        queued = row.state == "pending" and row.by_worker and row.last_error is None
        return row.state in ("done", "ignored") or (queued and self.source.mode == "queued")

    def _total(self) -> Counts:
        total = Counts()
        for counts in (self._place.counts, *(one.counts for one in self._place.windows)):
            total.add(counts)
        return total

    def _encoded(self) -> str:
        return msgspec.json.encode(self._place).decode()

    def _keep(self) -> None:
        """Write down how far it is. Raises Stopped where somebody else goes on with the run."""
        until_ms = self.means.clock() + LEASE_MS
        keep = partial(
            reconciles.keep,
            run=self.number,
            owner=self.means.owner,
            place=self._encoded(),
            until_ms=until_ms,
        )
        if not self.means.write(keep):
            raise Stopped("another `receiver reconcile` goes on with this run now")

    # Events

    @property
    def _listing(self) -> Listing | None:
        return self.api.sender.events if self.api.events is not None else None

    def _read(self, window: Window) -> None:
        listing, path = self._listing, self.api.events
        assert listing is not None, "else there is no window"
        assert path is not None, "the same"
        pages = Pages(
            self._client,
            listing,
            path,
            window.account,
            clock=self.means.clock,
            wait=self.means.wait,
        )
        types = self._types()
        while not window.read:
            self._pages += 1
            if self._pages > PAGES_MAX:
                raise Stopped(f"{PAGES_MAX} pages are read, the next run goes on behind them")
            self._read_page(pages, window, types)
            self._keep()
            whole_ms = max(1, window.until_ms - window.since_ms)
            self.tell.progress(1.0 if window.read else self._part(window, whole_ms))

    def _part(self, window: Window, whole_ms: int) -> float:
        return min(1.0, (window.until_ms - self._oldest_ms) / whole_ms)

    def _read_page(self, pages: Pages, window: Window, types: tuple[str, ...]) -> None:
        try:
            page = pages.read(
                window.cursor, since_ms=window.since_ms, until_ms=window.until_ms, types=types
            )
            met = self._wanted(page.items, window)
            times = [pages.listing.time_ms(one) for one in page.items[-1:]]
        except Unreadable as error:
            raise Stopped(f"{pages.path}: {error} (is api.events right?)") from error
        except CursorLost as error:
            self.tell.note(f"{error.args[0]}: its place is lost, so the list is read anew")
            window.cursor, window.counts = None, Counts()
            self._met.clear()
            return
        for start in range(0, len(met), LOOKED_UP):
            self._look_up(pages, window, met[start : start + LOOKED_UP])
        self._oldest_ms = min(times, default=window.since_ms)
        window.cursor = page.next
        window.read = page.next is None or self._oldest_ms < window.since_ms

    def _types(self) -> tuple[str, ...]:
        """The types that rules want, if all of them are named in full; none otherwise."""
        patterns = self._patterns()
        return () if any("*" in one for one in patterns) else patterns

    def _patterns(self) -> tuple[str, ...]:
        rules = self.means.processor.settings.rules
        wanted = [on for rule in rules if self.source.name in rule.sources for on in rule.on]
        return tuple(dict.fromkeys(wanted))

    def _wanted(self, items: Iterable[object], window: Window) -> list[_Met]:
        """The events of the window that a rule wants, each once. Raises Unreadable."""
        listing, rules_for = self._listing, self.means.processor.settings.rules_for
        assert listing is not None, "there is a window"
        found = []
        for item in items:
            met = self._event_of(item, listing, window.account)
            key = (met.account, met.key_id)
            if met.at_ms >= window.until_ms:
                self._recent.add(key)
            if not window.since_ms <= met.at_ms < window.until_ms or key in self._met:
                continue
            self._met.add(key)
            window.counts.listed += 1
            if rules_for(self.source.name, met.type):
                found.append(met)
            else:
                window.counts.unwanted += 1
        return found

    def _event_of(self, item: object, listing: Listing, account: str) -> _Met:
        contract, type_ = self.source.contract, listing.item_type(item)
        id_ = listing.item_id(item)
        if not contract.account and not account and listing.account is not None:
            account = listing.item_account(item)
        return _Met(
            item=item,
            account=contract.account or account,
            key_id=f"{id_}:{type_}" if contract.preset.keyed_by_type else id_,
            type=type_,
            at_ms=listing.time_ms(item),
        )

    def _look_up(self, pages: Pages, window: Window, met: Sequence[_Met]) -> None:
        rows = self.means.write(
            lambda tx: [inbox.by_key(tx, self.identity, one.account, one.key_id) for one in met]
        )
        differ = [
            (one, row)
            for one, row in zip(met, rows, strict=True)
            if row is None or row.state in UNFINISHED
        ]
        # The oldest first, as they would have come.
        for one, row in reversed(differ):
            self._differs(window.counts, one, row)
            if self.asked.apply:
                self._put_through(pages, window.counts, one)
        if self.asked.apply and differ:
            self.means.drain()

    def _differs(self, counts: Counts, one: _Met, row: Row | None) -> None:
        if row is None:
            counts.missing += 1
        else:
            counts.unfinished += 1
        if (one.account, one.key_id) in self._told:
            return
        self._told.add((one.account, one.key_id))
        self.tell.difference(
            Difference(
                what="missing" if row is None else row.state,
                account=one.account,
                type=one.type,
                id=one.key_id,
                at_ms=one.at_ms,
                detail="" if row is None else row.reason or row.last_error or "",
            )
        )

    def _put_through(self, pages: Pages, counts: Counts, one: _Met) -> None:
        """As a delivery of it would be; or the sender is asked for one."""
        if pages.listing.again is not None:
            recent = (one.account, one.key_id) in self._recent
            why = None if recent else pages.again(one.item)
            if why is None:
                counts.asked += 1
            else:
                self._place.left_beyond += 1
                self.tell.note(f"{one.key_id} is not delivered again: {why}")
            return
        event = self._as_event(one)
        outcome = receive(self.means, event, f"reconcile-{self.number}")
        if outcome.word in ("done", "ignored"):
            return
        if len(self._place.left) < LEFT_MAX:
            self._place.left.append(outcome.row)
        else:
            self._place.left_beyond += 1

    def _as_event(self, one: _Met) -> Event:
        return event_of(
            self.source,
            msgspec.json.encode(one.item),
            event_id=one.key_id,
            type=one.type,
            account=one.account,
            now_ms=self.means.clock(),
        )

    # Resources

    def _compare_resources(self) -> None:
        counts, place = self._place.counts, self._place
        while batch := self.means.write(
            partial(resources.listed, source=self.identity, after=place.resource, limit=LOOKED_UP)
        ):
            for one in batch:
                self._compare(one, counts)
                counts.resources += 1
                place.resource = one.id
                self._keep()

    def _compare(self, one: Resource, counts: Counts) -> None:
        try:
            path = fetching.plan(self.means.processor.settings, self.source.name, one.name).path
            reply = self._believed(one, self._fetch(one, path))
            seen = self.means.write(partial(self._seen, one=one, reply=reply))
        except (NotFetchable, Unjudgeable) as error:
            counts.unread += 1
            self._tell_of(one, "unread", str(error))
            return
        if seen is None:
            return
        counts.drifted += 1
        was = f"{one.state} {one.fields}".strip()
        self._tell_of(one, "differs", f"{was} here, {seen.state} {seen.fields} at the sender")
        if self.asked.apply and self._mend(one, path):
            counts.mended += 1

    def _believed(self, one: Resource, reply: Found | Missing) -> Found | Missing:
        """To a key of another account all that is known here is missing. Raises Unjudgeable."""
        if isinstance(reply, Found):
            self._reads[one.account] = True
        elif not (one.deleted or self._reads_others(one)):
            raise Unjudgeable(
                one.resource_id,
                f"{reply.why}, and so are others: is api.key a key of the account that sends the "
                "events? (if it is gone: `receiver resources fetch --accept`)",
            )
        return reply

    def _reads_others(self, one: Resource) -> bool:
        """Whether the key reads anything else of the account. Raises Stopped."""
        if one.account not in self._reads:
            listed = partial(resources.listed, source=self.identity, limit=LOOKED_UP)
            others = [
                other
                for other in self.means.write(listed)
                if other.account == one.account and other.id != one.id and not other.deleted
            ]
            self._reads[one.account] = any(map(self._is_there, others[-WITNESSES_MAX:]))
        return self._reads[one.account]

    def _is_there(self, one: Resource) -> bool:
        try:
            path = fetching.plan(self.means.processor.settings, self.source.name, one.name).path
            return isinstance(self._fetch(one, path), Found)
        except (NotFetchable, Unjudgeable):
            return False

    def _fetch(self, one: Resource, path: str) -> Found | Missing:
        """Raises Stopped, or Unjudgeable for what can't be had by this key."""
        reply = patiently(
            lambda: self._client.resource(
                path, one.resource_id, account=one.account, now_ms=self.means.clock()
            ),
            self.means.wait,
        )
        if isinstance(reply, Found | Missing):
            return reply
        if isinstance(reply, Elsewhere | Never):
            raise Unjudgeable(one.resource_id, reply.why)
        raise Stopped(reply.why)

    def _seen(self, tx: Tx, one: Resource, reply: Found | Missing) -> Seen | None:
        """What the sender says, if it is something else than what is known now and not owed."""
        owed, known = fetches.find(tx, one.name), resources.find(tx, one.name)
        assert known is not None, "resources are kept"
        if owed is not None and owed.state == "pending" and not self.asked.apply:
            return None
        project = fetching.plan(self.means.processor.settings, self.source.name, one.name).project
        seen = fetching.seen(tx, one.name, project, reply)
        if seen.version is not None and seen.version < (known.version or seen.version):
            # A copy of the sender's that lags behind what was here before.
            return None
        same = (known.state, known.fields, known.deleted)
        return None if same == (seen.state, seen.fields, seen.deleted) else seen

    def _mend(self, one: Resource, path: str) -> bool:
        """Take what the sender says now, by the same lease as any fetch."""

        def lease(tx: Tx) -> fetches.Fetch | None:
            fetches.want(tx, one.name, self.source.name, None)
            fetches.insist(tx, one.name, mend=True)
            found = fetches.find(tx, one.name)
            assert found is not None, "it is wanted"
            if found.lease_until_ms is not None and found.lease_until_ms > tx.now_ms:
                return None
            return fetching.take(tx, found, self.means.owner)

        leased = self.means.write(lease)
        if leased is None:
            # A worker reads it just now, and takes what it is told.
            return False
        reply: Reply = fetching.read(self._client, leased, path, self.means.clock())
        settle = partial(
            fetching.settle, processor=self.means.processor, leased=leased, reply=reply
        )
        return self.means.write(settle) and isinstance(reply, Found | Missing)

    def _tell_of(self, one: Resource, what: str, detail: str) -> None:
        self.tell.difference(
            Difference(
                what=what,
                account=one.account,
                type=one.kind,
                id=one.resource_id,
                at_ms=one.updated_ms,
                detail=detail,
            )
        )


def owner_here() -> str:
    """A new owner, in this process."""
    return f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"


def _may_run(owner: str) -> bool:
    """Whether the process of an owner may still be at it: one of another machine may."""
    host, _, rest = owner.partition("/")
    number = rest.partition("/")[0]
    if host != socket.gethostname() or not number.isdecimal():
        return True
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def event_of(
    source: Source, body: bytes, *, event_id: str, type: str, account: str, now_ms: int
) -> Event:
    """What the sender's API says, as an event; it is judged as a delivery of it would be."""
    event = reread(
        source.contract,
        body=body,
        content_type="json",
        event_id=event_id,
        type=type,
        account=account,
        received_ms=now_ms,
        secret="",
        id_signed=True,
    )
    return msgspec.structs.replace(event, origin="reconcile")


def receive(means: Means, event: Event, request_id: str) -> Outcome:
    """Put one event through the same transaction as any delivery of it."""
    processor, events = means.processor, (event,)
    return means.write(
        partial(processor.receive, events=events, request_id=request_id),
        partial(processor.keep, events=events, request_id=request_id),
    )
