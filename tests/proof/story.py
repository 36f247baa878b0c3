"""A day of a small shop as one scripted run, and what must hold wherever it was cut off."""

import asyncio
import contextlib
import functools
import json
import os
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import apsw
import msgspec
import pytest

from receiver import backup, operate, retention
from receiver.config import load
from receiver.destinations import Destination, Later, Owed, Result, Sent
from receiver.operate import By
from receiver.process import Processor
from receiver.signing import sign
from receiver.verify import Delivery, Event, verify
from receiver.work import OneWriter
from receiver.worker import Events, Group, Messages, Worker
from store import copies, inbox, integrity, schema
from store.database import Snapshot, Store, Tx, snapshot
from store.errors import Unavailable
from store.writer import Writer
from tests.conftest import NOW_MS, SECRETS, Clock, stripe_body

WITHOUT_APP = """
database = "receiver.db"

[worker]
run = "separate"

[sources.stripe]
scheme = "stripe"
secrets = ["env:STRIPE"]
livemode = false
retention = { payload_days = 30 }

[sources.queue]
scheme = "stripe"
secrets = ["env:STRIPE"]
livemode = false
mode = "queued"

[sources.bank]
scheme = "gocardless"
secrets = ["env:GITHUB"]
retention = { payload_days = 30 }

[[rules]]
operation = "link-customer"
source = "stripe"
on = ["checkout.session.completed"]
link = { customer = "data.object.customer", workspace = "data.object.workspace" }

[[rules]]
operation = "grant-credits"
source = "stripe"
on = ["invoice.*"]
subject = "data.object.id"
customer = "data.object.customer"
grant = { unit = "credits", amount = 100 }
send = [{ to = "receipt" }, { to = "team" }]

[[rules]]
operation = "refund-credits"
source = "stripe"
on = ["credit_note.created"]
subject = "data.object.id"
reverse = { operation = "grant-credits", subject = "data.object.invoice", amount = "data.object.credits" }

[[rules]]
operation = "keep-feedback"
source = "queue"
on = ["feedback.created"]
subject = "data.object.id"
record = { kind = "feedback", data = { text = "{data.object.text}" } }
send = [{ to = "team" }]

[[rules]]
operation = "subscription-state"
source = "stripe"
on = ["customer.subscription.updated"]
project.kind = "subscription"
project.id = "data.object.id"
project.object = "data.object"
project.state = "status"
project.version = "version"

[[rules]]
operation = "keep-payment"
source = "bank"
on = ["payments.*"]
subject = "links.payment"
record = { kind = "payment", data = { payment = "{links.payment}" } }

[destinations.receipt]
kind = "http"
url = "http://127.0.0.1:1/"
json = { invoice = "{data.object.id}" }
ambiguous = "review"

[destinations.team]
kind = "http"
url = "http://127.0.0.1:1/"
json = { id = "{data.object.id}" }
"""  # noqa: E501  a table in one line

CONFIG = f"""{WITHOUT_APP}
# Made twice, it would show.
[[rules]]
operation = "count-invoice"
source = "stripe"
on = ["invoice.*"]
subject = "data.object.id"
customer = "data.object.customer"
sql = ["update app_workspaces set invoices = invoices + 1 where id = {{_workspace}}"]
"""

#: What a later version of Receiver does to the file, for the upgrade.
LATER = (
    "create table receiver_later (a integer) strict; insert into receiver_later values (1), (2);"
)
DAY_MS = 86_400_000
#: When the machine is back after a cut: later than any lease, and than the whole day.
BACK_MS = NOW_MS + 400 * DAY_MS


class Fact(NamedTuple):
    """A delivery as the sender knows it: sent again, it is the same bytes.

    A batch has a part for each of its events: its id, and its own bytes.
    """

    source: str
    event_id: str
    body: bytes
    batch: tuple[tuple[str, bytes], ...] = ()

    @property
    def parts(self) -> tuple[tuple[str, bytes], ...]:
        return self.batch or ((self.event_id, self.body),)


class Answered(NamedTuple):
    """The sender was told that its event is safe."""

    fact: Fact
    word: str


class Received(NamedTuple):
    """The other side has got a message."""

    destination: str
    operation_key: str


class Settled(NamedTuple):
    """The worker knows of all that it has sent so far that it is written down."""


class Spent(NamedTuple):
    """The app took credits, and told its user."""

    request: str


class Linked(NamedTuple):
    """The operator was told that the link is made."""

    customer: str


class BackedUp(NamedTuple):
    """The operator was told of this backup."""

    path: str


class Pruning(NamedTuple):
    """From now on a body may be gone."""


class Upgrading(NamedTuple):
    """The later version is installed; from now on the file is opened by no other."""


class Upgraded(NamedTuple):
    """The file has the later version."""


def was_told(what: type, told: Sequence[Any]) -> bool:
    """Whether anything of this kind was; two kinds without fields are equal to each other."""
    return any(isinstance(one, what) for one in told)


def _fact(source: str, event_id: str, type: str, **of: Any) -> Fact:
    return Fact(source, event_id, stripe_body(event_id, type, **of))


def invoice(number: int, customer: str, second: str = "") -> Fact:
    type = "invoice.payment_succeeded" if second else "invoice.paid"
    event_id = f"evt_{number}{second}"
    return _fact("stripe", event_id, type, id=f"in_{number}", customer=customer)


def _refund(number: int, invoice: int, credits: int) -> Fact:
    of = {"id": f"cn_{number}", "invoice": f"in_{invoice}", "credits": credits}
    return _fact("stripe", f"evt_refund_{number}", "credit_note.created", **of)


def checkout(customer: str, workspace: str) -> Fact:
    of = {"customer": customer, "workspace": workspace}
    return _fact("stripe", f"evt_{customer}", "checkout.session.completed", **of)


def feedback(number: int) -> Fact:
    text = "slow " * 400
    return _fact("queue", f"evt_f{number}", "feedback.created", id=f"f_{number}", text=text)


def _subscription(version: int, status: str) -> Fact:
    of = {"id": "sub_1", "status": status, "version": version}
    return _fact("stripe", f"evt_sub_{version}", "customer.subscription.updated", **of)


def _payments(*numbers: int) -> Fact:
    """Several events in one delivery."""
    texts = [
        json.dumps(
            {
                "id": f"EV{number}",
                "resource_type": "payments",
                "action": "confirmed",
                "links": {"payment": f"PM{number}"},
            }
        )
        for number in numbers
    ]
    body = f'{{"events": [{", ".join(texts)}]}}'.encode()
    parts = zip(numbers, texts, strict=True)
    return Fact("bank", "", body, tuple((f"EV{number}", text.encode()) for number, text in parts))


#: Everything that the senders have to tell, in the order in which they do.
FACTS = (
    invoice(1, "cus_a"),
    checkout("cus_a", "acme"),
    invoice(2, "cus_a"),
    invoice(2, "cus_a", "_again"),
    feedback(1),
    _subscription(2, "active"),
    _payments(1, 2, 3),
    _refund(1, 1, 30),
    # Its grant comes later.
    _refund(2, 4, 10),
    invoice(3, "cus_b"),
    invoice(4, "cus_a"),
    feedback(2),
    checkout("cus_c", "city"),
    invoice(5, "cus_c"),
    invoice(6, "cus_c"),
    # Late, and of less than what is known.
    _subscription(1, "incomplete"),
    # Another content under a known id.
    _fact("stripe", "evt_2", "invoice.paid", id="in_2", customer="cus_a", note="other"),
    _refund(3, 5, 100),
    invoice(7, "cus_nobody"),
)
SPENT = (("r-1", 25), ("r-2", 40))


class FarSide:
    """The other side: takes everything, and in the name of a cut remembers what it took."""

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self._tell = tell
        self._refused: set[str] = set()

    def send(self, destination: Destination, owed: Owed, now_ms: int) -> Result:
        if destination.name == "team" and owed.operation_key not in self._refused:
            self._refused.add(owed.operation_key)
            return Later("not now")
        self._tell(Received(destination.name, owed.operation_key))
        return Sent("")

    def close(self) -> None:
        pass


class Shop:
    """The folder with the file, everybody who works on it, and what they are told."""

    def __init__(
        self, folder: Path, tell: Callable[[Any], None], config: str = CONFIG, *, app: bool = True
    ) -> None:
        self.path = folder / "receiver.db"
        self.clock = Clock()
        self.hear(tell)
        self.processor = processor_of(config)
        self._app = app

    def hear(self, tell: Callable[[Any], None]) -> None:
        """Tell another listener from now on; the other side is new as well."""
        self.tell = tell
        self._far_side = FarSide(tell)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Store]:
        store = Store.create(self.path, self.clock)
        try:
            yield store
        finally:
            store.close()

    def make(self) -> None:
        """The app makes its tables in the file, and the server starts on it for the first time."""
        with self.opened() as store:
            self._begin(store)

    def _begin(self, store: Store) -> None:
        if self._app:
            store.write(app_tables)
        store.write(self.processor.start)

    def serve(self, facts: Sequence[Fact], beside: Callable[[], None] = lambda: None) -> None:
        """Take these deliveries, the first three of them in one commit if there are so many."""
        with self.opened() as store:
            self._begin(store)
            asyncio.run(self._serve(store, facts, beside))

    async def _serve(self, store: Store, facts: Sequence[Fact], beside: Callable[[], None]) -> None:
        fatal: list[str] = []
        due = self.processor.due_jobs
        writer = Writer(store, pending_max=64, due=due, on_fatal=fatal.append)
        await asyncio.gather(*(self._deliver(writer, fact) for fact in facts[:3]))
        for fact in facts[3:-1]:
            await self._deliver(writer, fact)
        await self._idle(store, writer, fatal)
        # Its checkpoint lets what follows begin the -wal anew.
        beside()
        for fact in facts[max(3, len(facts) - 1) :]:
            await self._deliver(writer, fact)
        await self._idle(store, writer, fatal)
        await writer.close()
        assert fatal == []

    async def _idle(self, store: Store, writer: Writer, fatal: Sequence[str]) -> None:
        # The writer tells nobody when it has nothing more to do. While it commits, or opens the
        # file anew, the connection is another thread's.
        while not fatal and (  # noqa: ASYNC110
            writer.waiting
            or writer.trouble()
            or store.db.in_transaction
            or inbox.released(Snapshot(store.db), 1)
        ):
            await asyncio.sleep(0)

    def _deliver(self, writer: Writer, fact: Fact) -> Awaitable[None]:
        events = events_of(self.processor, fact, self.clock)
        receive = functools.partial(self.processor.receive, events=events, request_id="r")
        keep = functools.partial(self.processor.keep, events=events, request_id="r")

        async def answered() -> None:
            outcome = None
            while outcome is None:
                # A 503 makes the sender send again.
                with contextlib.suppress(Unavailable):
                    outcome = await writer.submit(receive, keep)
            assert not outcome.retry, outcome
            self.tell(Answered(fact, outcome.word))

        return answered()

    def work(self) -> None:
        """A worker of its own does what there is to do now."""
        with self.opened() as store:
            worker = Worker(lambda: self.processor, OneWriter(store, _fatal).write, self.clock)
            worker.senders.close()
            worker.senders = self._far_side  # type: ignore[assignment]
            groups = [Events(worker), Messages(worker, "receipt"), Messages(worker, "team")]
            # A second round for what the other side refused at first.
            for _ in range(2):
                for group in groups:
                    _work_off(group)
                self.clock.now_ms += 10 * 60_000
        self.tell(Settled())

    def link(self, customer: str, workspace: str) -> None:
        """The operator links a customer by the command line, and what waited for it is applied."""
        with self.opened() as store:
            by = By("operator", "by hand")
            store.write(
                lambda tx: operate.link(tx, "stripe", "", customer, workspace, repoint=False, by=by)
            )
            self.tell(Linked(customer))
            while jobs := store.look(self.processor.due_jobs):
                store.write_all(jobs)

    def spend(self, request: str, amount: int, synchronous: str = "full") -> None:
        """The app takes credits, on a connection of its own that checkpoints after each commit."""
        while True:
            # What fails it asks for again, as an app does.
            with contextlib.suppress(apsw.FullError, apsw.IOError, apsw.CantOpenError):
                self._spend(request, amount, synchronous)
                break
        self.tell(Spent(request))

    def _spend(self, request: str, amount: int, synchronous: str) -> None:
        with contextlib.closing(apsw.Connection(str(self.path))) as app:
            app.set_busy_timeout(5000)
            app.execute(f"pragma synchronous = {synchronous}; pragma wal_autocheckpoint = 1")
            # What it has asked for once it does not ask for again.
            app.execute(
                """
                insert into receiver_ledger (
                  source, account, subject, operation, workspace, unit, amount, created_ms)
                select 'app', '', :request, 'spend', 'acme', 'credits', :amount, :now
                where not exists (
                  select 1 from receiver_ledger where source = 'app' and subject = :request)
                """,
                {"request": request, "amount": -amount, "now": self.clock()},
            )

    def empty_wal(self) -> None:
        with self.opened() as store:
            assert store.empty_wal()

    def back_up(self) -> None:
        with snapshot(self.path) as seen:
            settings = msgspec.structs.replace(self.processor.settings, database=self.path)
            target = backup.target_of(settings, None, self.clock())
            backup.make(seen, target, self.clock(), lambda pages: None)
        self.tell(BackedUp(os.path.relpath(target, self.path.parent)))

    def prune(self) -> None:
        """Half a year later."""
        self.tell(Pruning())
        self.clock.now_ms += 180 * DAY_MS
        with self.opened() as store:
            look = retention.looking(store)
            settings, now_ms = self.processor.settings, self.clock()
            for _, batch in retention.due(settings, look, 1, 100, now_ms):
                if batch:
                    retention.prune(store, settings, batch)

    def upgrade(self) -> None:
        """A later version of Receiver opens the file."""
        self.tell(Upgrading())
        with later_version(), self.opened():
            self.tell(Upgraded())


#: The day, in steps.
DAY: Mapping[str, Callable[[Shop, str], None]] = MappingProxyType(
    {
        "first start": lambda shop, _: shop.make(),
        "deliveries": lambda shop, app: shop.serve(FACTS[:8], lambda: shop.spend(*SPENT[0], app)),
        "worker": lambda shop, _: shop.work(),
        "more deliveries": lambda shop, _: shop.serve(FACTS[8:12]),
        "link by hand": lambda shop, _: shop.link("cus_b", "bistro"),
        "checkpoint": lambda shop, _: shop.empty_wal(),
        "backup": lambda shop, _: shop.back_up(),
        "last deliveries": lambda shop, app: shop.serve(
            FACTS[12:], lambda: shop.spend(*SPENT[1], app)
        ),
        "worker again": lambda shop, _: shop.work(),
        "prune": lambda shop, _: shop.prune(),
        "upgrade": lambda shop, _: shop.upgrade(),
    }
)


def play(shop: Shop, app_synchronous: str = "full") -> None:
    """The day."""
    for step in DAY.values():
        step(shop, app_synchronous)


def play_again(shop: Shop) -> None:
    """What everybody does who heard nothing, or can't be sure: all of it, once more."""
    shop.serve(FACTS)
    shop.link("cus_b", "bistro")
    for request, amount in SPENT:
        shop.spend(request, amount)
    shop.work()


def _work_off(group: Group) -> None:
    """Do what there is to do now, as a thread of the worker goes on after what it can't write."""
    while True:
        with contextlib.suppress(Unavailable):
            if group.step("w-1") != 0:
                return


def _fatal(why: str) -> None:
    raise AssertionError(why)


@functools.cache
def processor_of(config: str) -> Processor:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "receiver.toml"
        path.write_text(config)
        return Processor.load(load(path, environment=SECRETS))


def events_of(processor: Processor, fact: Fact, clock: Clock) -> tuple[Event, ...]:
    contract = processor.settings.sources[fact.source].contract
    key = contract.secrets[0].value
    headers = sign(
        contract.preset, key, fact.body, now_ms=clock(), event_id="", type="", account=""
    )
    pairs = tuple((name.lower().encode(), value.encode()) for name, value in headers)
    judged = verify(contract, Delivery("POST", "http://x/", pairs, fact.body, clock()))
    assert isinstance(judged, tuple), "no handshake"
    return judged


def app_tables(tx: Tx) -> None:
    """The app's own table, with a row for each workspace."""
    tx.db.execute(
        """
        create table if not exists app_workspaces (id text primary key, invoices integer not null);
        insert into app_workspaces values ('acme', 0), ('bistro', 0), ('city', 0)
        on conflict do nothing
        """
    )


@contextlib.contextmanager
def later_version() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "STEPS", (*schema.STEPS, LATER))
        yield


# What must hold


class End(NamedTuple):
    """What is in a file, as far as it may not depend on when the power failed."""

    ledger: list[tuple[Any, ...]]
    balances: list[tuple[Any, ...]]
    records: list[tuple[Any, ...]]
    links: list[tuple[Any, ...]]
    operations: list[tuple[Any, ...]]
    events: list[tuple[Any, ...]]
    app: list[tuple[Any, ...]]
    owed: list[tuple[Any, ...]]
    #: Acts by hand; not the restores, of which each try is one.
    audit: list[tuple[Any, ...]]
    resources: list[tuple[Any, ...]]
    #: With the digest of what is not the event's content, as its bytes are pruned.
    conflicts: list[tuple[Any, ...]]


def end_of(path: Path, *, app: bool = True) -> End:
    key = "source, account, subject, operation"
    with snapshot(path, older=True) as seen:

        def rows(statement: str) -> list[tuple[Any, ...]]:
            return list(seen.db.execute(statement))

        return End(
            rows(f"select {key}, workspace, amount from receiver_ledger order by {key}"),
            rows("select workspace, unit, balance from receiver_balances order by 1"),
            rows(f"select {key}, kind, data from receiver_records order by {key}"),
            rows("select customer, workspace from receiver_links order by 1"),
            rows(f"select {key}, kind, amount from receiver_operations order by {key}"),
            rows("select source, event_id, state from receiver_events order by 1, 2"),
            rows("select id, invoices from app_workspaces order by 1") if app else [],
            rows("select destination, operation_key from receiver_outbox order by 1, 2"),
            rows(
                """
                select action, target, actor, reason, json_extract(detail, '$.workspace')
                from receiver_audit where action <> 'restore' order by id
                """
            ),
            rows(
                """
                select kind, resource_id, state, fields, version, contested
                from receiver_resources order by 1, 2
                """
            ),
            rows(
                """
                select e.event_id, hex(c.content_sha256), c.resource, c.resolved_ms
                from receiver_conflicts c join receiver_events e on e.id = c.event order by 1, 2
                """
            ),
        )


def faults_after(shop: Shop, told: Sequence[Any], wanted: End) -> list[str]:
    """What is wrong with a folder that a power cut has left; nothing if the promise was kept.

    `told` is what was heard outside before the cut. Everything is sent again, to see that it comes
    to the end that it must.
    """
    shop.clock.now_ms = BACK_MS
    version = later_version() if was_told(Upgrading, told) else contextlib.nullcontext()
    try:
        with version:
            with shop.opened() as store:
                faults = _broken(store) + _forgotten(store.db, told)
                faults += _forgotten_bodies(store.db, told)
            faults += bad_copies(shop.path, told)
            return faults or _different_end(shop, told, wanted)
    except Exception as error:
        # Whatever it is: the server would not have started again, or not gone on.
        return [f"{type(error).__name__}: {error}"]


def _different_end(shop: Shop, told: Sequence[Any], wanted: End) -> list[str]:
    """How it ends, when everything is sent again, otherwise than it must."""
    again: list[Any] = []
    with snapshot(shop.path) as seen:
        begun = {one for (one,) in seen.db.execute(_BEGUN)}
    shop.hear(again.append)
    play_again(shop)
    with snapshot(shop.path) as seen:
        faults = _broken(seen) + _forgotten(seen.db, told) + _forgotten(seen.db, again)
        faults += _sends(seen.db, told, again, begun)
    end = end_of(shop.path)
    for name in End._fields:
        missing, more = (
            Counter(getattr(one, name)) - Counter(getattr(other, name))
            for one, other in ((wanted, end), (end, wanted))
        )
        faults += [f"{name}: {row} is missing" for row in missing]
        faults += [f"{name}: {row} should not be" for row in more]
    return faults


# Messages of which nobody may know any more whether they went out.
_BEGUN = """
    select operation_key from receiver_outbox where state = 'review' or lease_owner is not null
"""


def _broken(seen: Snapshot | Store) -> list[str]:
    now = Snapshot(seen.db)
    faults = integrity.full_check(now) + integrity.book_faults(now)
    for what, statement in (
        (
            "an effect without its event",
            """
            select subject, operation from receiver_operations
            where event is not null and event not in (select id from receiver_events)
            """,
        ),
        (
            "an entry without its claim",
            """
            select subject, operation from receiver_ledger
            where (source, account, subject, operation) not in (
              select source, account, subject, operation from receiver_operations)
            """,
        ),
        (
            "a message without its event",
            """
            select destination, operation_key from receiver_outbox
            where event not in (select id from receiver_events)
            """,
        ),
    ):
        faults += [f"{what}: {row}" for row in now.db.execute(statement)]
    return faults


def _forgotten(db: apsw.Connection, told: Sequence[Any]) -> list[str]:
    """What was told to somebody, and is not in the file."""
    events = dict(db.execute("select event_id, state from receiver_events"))
    statement = """
        select event_id from receiver_conflicts c join receiver_events e on e.id = c.event
    """
    conflicts = {one for (one,) in db.execute(statement)}
    customers = {one for (one,) in db.execute("select customer from receiver_links")}
    spent = {
        one for (one,) in db.execute("select subject from receiver_ledger where source = 'app'")
    }
    faults = []
    for what in told:
        match what:
            case Answered(fact, word):
                faults += _forgotten_events(fact, word, events, conflicts)
            case Linked(customer) if customer not in customers:
                faults.append(f"the link of {customer} is lost")
            case Spent(request) if request not in spent:
                faults.append(f"the spending {request} is lost")
            case Upgraded() if not db.table_exists(None, "receiver_later"):
                faults.append("the upgrade is lost")
    return faults + _torn_batches(events) + _forgotten_sends(db, told)


def _torn_batches(events: Mapping[str, str]) -> list[str]:
    """Those that nobody was told of are there whole, or not at all."""
    there = [[event_id in events for event_id, _ in fact.parts] for fact in FACTS]
    return [f"of a batch there is a part: {one}" for one in there if any(one) and not all(one)]


def _forgotten_events(
    fact: Fact, word: str, events: Mapping[str, str], conflicts: set[str]
) -> list[str]:
    faults = []
    for event_id, _ in fact.parts:
        if event_id not in events:
            faults.append(f"{event_id} was answered {word}, and is lost")
        elif word == "done" and events[event_id] != "done":
            faults.append(f"{event_id} was done, and is {events[event_id]}")
        elif word == "conflict" and event_id not in conflicts:
            faults.append(f"{event_id} was answered {word}, and the conflict is lost")
    return faults


def _forgotten_bodies(db: apsw.Connection, told: Sequence[Any]) -> list[str]:
    if was_told(Pruning, told):
        return []
    statement = """
        select e.event_id, p.body from receiver_events e join receiver_payloads p on p.event = e.id
        union all
        select e.event_id, c.body from receiver_events e join receiver_conflicts c on c.event = e.id
    """
    kept = set(db.execute(statement))
    parts = {part for one in told if isinstance(one, Answered) for part in one.fact.parts}
    return [
        f"{event_id} was answered, and its body is lost" for event_id, _ in sorted(parts - kept)
    ]


def _forgotten_sends(db: apsw.Connection, told: Sequence[Any]) -> list[str]:
    known = {
        key: (state, attempts)
        for key, state, attempts in db.execute(
            "select operation_key, state, attempts from receiver_outbox"
        )
    }
    times = Counter(one.operation_key for one in told if isinstance(one, Received))
    faults = [
        f"{key} was sent {count} times, and is counted as {known.get(key)}"
        for key, count in times.items()
        if known.get(key, ("", 0))[1] < count
    ]
    faults += [
        f"{key} was settled, and is {known.get(key)}"
        for key in _settled(told)
        if known.get(key, ("", 0))[0] != "sent"
    ]
    return faults


def _settled(told: Sequence[Any]) -> set[str]:
    last = max((at for at, one in enumerate(told) if isinstance(one, Settled)), default=0)
    return {one.operation_key for one in told[:last] if isinstance(one, Received)}


def bad_copies(path: Path, told: Sequence[Any]) -> list[str]:
    """Copies that are damaged, and those that were promised and are not there."""
    before_upgrade = path.with_name(f"{path.name}.before-version-{len(schema.STEPS)}")
    made = [one for one in (*path.parent.glob("backups/*.db"), before_upgrade) if one.exists()]
    faults = [f"{copy.name}: {fault}" for copy in made for fault in copies.damage(copy)]
    if was_told(Upgrading, told) and before_upgrade not in made:
        faults.append("there is no copy from before the upgrade")
    faults += [
        f"{copy.name} has no checksum" for copy in made if not copies.checksum_path(copy).exists()
    ]
    promised = [path.parent / one.path for one in told if isinstance(one, BackedUp)]
    return faults + [f"the backup {one.name} is lost" for one in promised if one not in made]


def _sends(
    db: apsw.Connection, before: Sequence[Any], after: Sequence[Any], begun: set[str]
) -> list[str]:
    """Messages that went out too often or too rarely for their policy.

    `begun` are those that were being sent at the cut: no other needs the operator.
    """
    faults = []
    sent = [
        Counter(one.operation_key for one in told if isinstance(one, Received))
        for told in (before, after)
    ]
    settled = _settled(before)
    for key, destination, state in db.execute(
        "select operation_key, destination, state from receiver_outbox"
    ):
        first, again = sent[0][key], sent[1][key]
        allowed = {"sent", "review"} if destination == "receipt" and key in begun else {"sent"}
        at_most = 1 if destination == "receipt" or key in settled else 2
        if state not in allowed or first + again > at_most:
            faults.append(f"a message to {destination} is {state}, sent {first} and {again} times")
        if state == "sent" and first + again == 0:
            faults.append(f"a message to {destination} is {state}, and nobody has it")
    return faults
