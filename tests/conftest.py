"""A real file and a clock that stands still, for every test that stores something."""

import functools
import io
import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from receiver import logs
from receiver.config import load
from receiver.process import Processor
from receiver.signing import sign
from receiver.verify import Delivery, Event, verify
from store import inbox, ledger, links
from store.database import Job, Store, Tx
from store.inbox import Row
from tests import canary

# What starts us in the background may have us ignore these, and our children inherit that.
for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

#: 2027-01-15 08:00:00 UTC
NOW_MS = 1_800_000_000_000


@pytest.fixture
def seed() -> int:
    """Of a test's chances; shown where it fails."""
    number = random.randrange(2**32)
    print(f"seed {number}")
    return number


class Clock:
    """UTC milliseconds that only move when told."""

    def __init__(self, now_ms: int = NOW_MS) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    opened = Store.create(tmp_path / "receiver.db", clock)
    yield opened
    opened.close()


CONFIG = """
handlers = "handlers.py"

[worker]
run = "off"

[sources.stripe]
scheme = "stripe"
secrets = ["env:STRIPE"]
livemode = false

[sources.connect]
scheme = "stripe"
identity = "stripe"
secrets = ["env:STRIPE"]
livemode = false

[sources.live]
scheme = "stripe"
secrets = ["env:STRIPE"]
livemode = true

[sources.github]
scheme = "github"
secrets = ["env:GITHUB"]

[sources.shopify]
scheme = "shopify"
secrets = ["env:SHOPIFY"]
account = "one.myshopify.com"

[[rules]]
operation = "initial-credit-grant"
source = ["stripe", "connect", "live"]
on = ["invoice.paid", "invoice.payment_succeeded"]
when = { "data.object.amount_paid" = { gt = 0 } }
expect = { "data.object.status" = "paid" }
subject = "data.object.id"
customer = "data.object.customer"
grant = { unit = "credits", amount = 100 }

[[rules]]
operation = "refund-credit-grant"
source = "stripe"
on = ["credit_note.created"]
subject = "data.object.id"
reverse.operation = "initial-credit-grant"
reverse.subject = "data.object.invoice"
reverse.amount = "data.object.credits"

[[rules]]
operation = "void-grant"
source = "stripe"
on = ["invoice.voided"]
subject = "data.object.id"
reverse = { operation = "initial-credit-grant", subject = "data.object.id" }

[[rules]]
operation = "plan-grant"
source = "stripe"
on = ["plan.bought"]
subject = "data.object.id"
customer = "data.object.customer"
grant.unit = "credits"
grant.by = ["data.object.new_price", "data.object.price"]
grant.amounts.basic = 10
grant.amounts.pro = 50

[[rules]]
operation = "feedback-alert"
source = "stripe"
on = ["feedback.*"]
record.kind = "feedback"
record.data = { text = "{data.object.text}", rating = "{data.object.rating}" }

[[rules]]
operation = "upgrade-plan"
source = "stripe"
on = ["customer.subscription.updated"]
subject = "data.object.id"
customer = "data.object.customer"
sql = [
  "update workspaces set plan = {data.object.plan} where id = {_workspace}",
  "insert into plan_history (workspace, plan) values ({_workspace}, {data.object.plan})",
]

[[rules]]
operation = "welcome"
source = "stripe"
on = ["handler.called"]
subject = "data.object.id"
call = "welcome"

[[rules]]
operation = "count-push"
source = "github"
on = ["push"]
when = { "ref" = { exists = true } }
record = { kind = "push", data = "{ref}" }

[[rules]]
operation = "count-order"
source = "shopify"
on = ["orders/*"]
when = { "id" = { exists = true } }
subject = "id"
record = { kind = "order", data = "{total_price}" }

# After the others in the file, before them in time.
[[rules]]
operation = "link-customer"
source = ["stripe", "connect", "live"]
on = ["checkout.session.completed"]
link = { customer = "data.object.customer", workspace = "data.object.client_reference_id" }
"""

HANDLERS = '''
"""Does what the event's body asks for."""

from receiver import Park, Quarantine

seen = []


def welcome(event, tx):
    order = event.body["data"]["object"]
    seen.append(tx)
    tx.sql("insert into plan_history (workspace, plan) values ('handler', ?)", (order["id"],))
    exec(order["run"], {"event": event, "tx": tx, "Park": Park, "Quarantine": Quarantine})
'''

SECRETS = {"STRIPE": "whsec_of_the_tests", "GITHUB": "of the hook", "SHOPIFY": "shpss_of_the_app"}


class World:
    """A configured receiver on a real file, without its HTTP server."""

    def __init__(self, folder: Path, store: Store, clock: Clock) -> None:
        self.folder = folder
        self.store = store
        self.clock = clock
        self.sent = 0
        (folder / "handlers.py").write_text(HANDLERS)
        self.configure(CONFIG)
        store.write(_app_tables)

    def configure(self, text: str) -> None:
        """Take this config from now on."""
        path = self.folder / "receiver.toml"
        path.write_text(text)
        self.processor = Processor.load(load(path, environment=SECRETS))
        self.store.write(self.processor.start)

    def sign(
        self, source: str, body: bytes, *, event_id: str = "", type: str = "", account: str = ""
    ) -> tuple[Event, ...]:
        """The events of a delivery that the sender would make of this body now."""
        contract = self.processor.settings.sources[source].contract
        headers = sign(
            contract.preset,
            contract.secrets[0].value,
            body,
            now_ms=self.clock(),
            event_id=event_id,
            type=type,
            account=account,
        )
        pairs = tuple((name.lower().encode(), value.encode()) for name, value in headers)
        url = f"https://hooks.example.com/webhooks/{source}"
        judged = verify(contract, Delivery("POST", url, pairs, body, self.clock()))
        assert isinstance(judged, tuple), "no handshake"
        return judged

    def deliver(
        self, source: str, body: bytes, *, event_id: str = "", type: str = "", account: str = ""
    ) -> str:
        """Send a body and return the answer's word; `!` after it asks for another try."""
        events = self.sign(source, body, event_id=event_id, type=type, account=account)
        self.sent += 1
        request_id = f"r-{self.sent}"
        job = Job(
            functools.partial(self.processor.receive, events=events, request_id=request_id),
            functools.partial(self.processor.keep, events=events, request_id=request_id),
        )
        self.store.write_all([job])
        self.drain()
        assert job.error is None, job.error
        assert job.result is not None
        return job.result.word + "!" * job.result.retry

    def stripe(
        self,
        event_id: str,
        type: str,
        *,
        source: str = "stripe",
        envelope: object = (),
        **of: Any,
    ) -> str:
        """Send a Stripe event about an object with these fields."""
        return self.deliver(source, stripe_body(event_id, type, envelope=envelope, **of))

    def invoice(self, event_id: str, invoice: str, **of: Any) -> str:
        """Send a paid invoice of customer cus_1."""
        fields = {"customer": "cus_1", "status": "paid", "amount_paid": 500} | of
        source = str(fields.pop("source", "stripe"))
        envelope = fields.pop("envelope", ())
        type = str(fields.pop("type", "invoice.paid"))
        return self.stripe(event_id, type, source=source, envelope=envelope, id=invoice, **fields)

    def link(self, customer: str = "cus_1", workspace: str = "acme", account: str = "") -> None:
        """The operator links a customer; what waited for it is applied."""
        self.store.write(lambda tx: links.add(tx, "stripe", account, customer, workspace))
        self.drain()

    def drain(self) -> None:
        """Apply what is due, as the server and the command line do after each commit."""
        while jobs := self.store.look(self.processor.due_jobs):
            self.store.write_all(jobs)

    def event(self, event_id: str, *, source: str = "stripe", account: str = "") -> Row:
        """The stored event."""
        row = self.store.write(lambda tx: inbox.by_key(tx, source, account, event_id))
        assert row is not None, f"no event {event_id}"
        return row

    def state(self, event_id: str, *, source: str = "stripe", account: str = "") -> str:
        return self.event(event_id, source=source, account=account).state

    def balance(self, workspace: str = "acme") -> int:
        """The workspace's credits; the books must balance whenever they are looked at."""
        assert self.store.write(ledger.disagreements) == []
        return self.store.write(lambda tx: ledger.balance(tx, workspace, "credits"))

    def query(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        return self.store.write(lambda tx: list(tx.db.execute(statement, parameters)))


class Logged:
    """The lines that this process logs, as on a terminal."""

    def __init__(self) -> None:
        self._stream = io.StringIO()
        logs.lines.open(self._stream, journal=False)

    @property
    def text(self) -> str:
        logs.lines.flush()
        return self._stream.getvalue()

    def of(self, event: str) -> list[str]:
        """The lines about one thing, from its name on."""
        told = (line.split(" ", 2)[2] for line in self.text.splitlines())
        return [line for line in told if line.startswith(f"{event} ")]


@pytest.fixture
def logged(every_line: TextIO) -> Iterator[Logged]:
    opened = Logged()
    yield opened
    every_line.write(opened.text)
    logs.lines.open(every_line, journal=False)


@pytest.fixture(scope="session", autouse=True)
def every_line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextIO]:
    """Where this process logs; at the end no log of the run holds a secret or a payload."""
    folder = tmp_path_factory.getbasetemp()
    with (folder / "tests.log").open("w") as stream:
        logs.lines.open(stream, journal=False)
        yield stream
        logs.lines.close()
    spoilt = {
        str(log.relative_to(folder)): found
        for log in folder.rglob("*.log")
        if (found := canary.found_in(log.read_text(errors="replace")))
    }
    assert spoilt == {}


def stripe_body(event_id: str, type: str, *, envelope: object = (), **of: Any) -> bytes:
    """A Stripe event's body."""
    event = {
        "id": event_id,
        "object": "event",
        "type": type,
        "livemode": False,
        "created": NOW_MS // 1000,
        "pending_webhooks": 1,
        "note": canary.PAYLOAD,
        "data": {"object": of},
    }
    return json.dumps(event | dict(envelope)).encode()  # type: ignore[call-overload]


def _app_tables(tx: Tx) -> None:
    tx.db.execute(
        """
        create table workspaces (id text primary key, plan text not null) strict;
        create table plan_history (workspace text not null, plan text not null) strict;
        create table poison (id integer primary key);
        create trigger poison before insert on poison
          begin select raise(rollback, 'all of it'); end;
        insert into workspaces values ('acme', 'free');
        """
    )


@pytest.fixture
def world(tmp_path: Path, store: Store, clock: Clock) -> World:
    return World(tmp_path, store, clock)
