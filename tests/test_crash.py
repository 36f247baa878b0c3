"""`kill -9` at any moment, again and again: what was answered 2xx is there, nothing twice."""

import http.client
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import apsw
import pytest

from tests.processes import Peer, destination, peering
from tests.service import (
    STRIPE_CONFIG,
    Service,
    Start,
    by_stripe,
    checkout,
    event,
    invoice,
    services,
    stripe_request,
    until,
    word,
)

KILLS = 10
#: Deliveries that are answered between two kills, at most.
BETWEEN_MAX = 200
#: Seconds that a start takes, about.
STARTING_S = 0.6
#: Seconds that the other side of a message takes: so long that kills meet sends under way.
PEER_S = 0.02
SENDERS = 6
CUSTOMERS = 12
#: Seconds that a sender waits for an answer.
ANSWER_S = 5.0
#: Of all sends: how many are of an event that was answered before, and how many are checkouts.
AGAIN_RATE = 0.1
CHECKOUT_RATE = 0.01
#: How many invoices are told of by a second event, under another type.
TWICE_RATE = 0.3

# The statements are no upserts of a fixed value: applied twice, they would show it.
CONFIG = f"""
{STRIPE_CONFIG}
[[rules]]
operation = "count-invoice"
source = "stripe"
on = ["invoice.*"]
subject = "data.object.id"
customer = "data.object.customer"
sql = [
  "update app_workspaces set invoices = invoices + 1 where id = {{_workspace}}",
  "insert into app_invoices (id, workspace) values ({{data.object.id}}, {{_workspace}})",
]
"""

# Every other invoice is told to two others.
MESSAGES = """
[[rules]]
operation = "tell-invoice"
source = "stripe"
on = ["invoice.*"]
when = { "data.object.id" = { matches = "[02468]$" } }
subject = "data.object.id"
send = [{ to = "repeated" }, { to = "reviewed" }]
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with services(tmp_path) as starting:
        yield starting


class Fact(NamedTuple):
    """One event as a sender knows it."""

    event_id: str
    body: bytes


class Sender:
    """Sends from several threads, and again whatever it saw no 2xx for."""

    def __init__(self, service: Service, seed: int) -> None:
        self.acknowledged: set[str] = set()
        self.invoices: Counter[str] = Counter()
        self.surprises: list[str] = []
        self._service = service
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._owed: deque[Fact] = deque()
        self._done: list[Fact] = []
        self._numbers = 0
        self._unlinked = list(range(CUSTOMERS))
        self._closing = self._given_up = False
        self._threads = [threading.Thread(target=self._run) for _ in range(SENDERS)]

    def __enter__(self) -> "Sender":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Send what is still owed, and the checkouts that nobody sent yet; nothing after an error.

        What was interrupted may have no server any more.
        """
        with self._lock:
            self._closing, self._given_up = True, kind is not None
            self._owed.extend(self._checkout() for _ in list(self._unlinked))
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        connection = self._connect()
        while (fact := self._next()) is not None:
            try:
                # The same bytes each time, under a signature of the time of sending.
                headers = dict(by_stripe(fact.body))
                connection.request("POST", "/webhooks/stripe", fact.body, headers)
                answer = connection.getresponse()
                self._answered(fact, answer.status, answer.read().decode().strip())
            except (OSError, http.client.HTTPException):
                connection.close()
                connection = self._connect()
                self._owe(fact)
        connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._service.public.getsockname()
        return http.client.HTTPConnection(host, port, timeout=ANSWER_S)

    def _next(self) -> Fact | None:
        with self._lock:
            if self._given_up:
                return None
            if self._owed and (self._closing or self._random.random() < 0.5):
                return self._owed.popleft()
            if self._closing:
                return None
            if self._done and self._random.random() < AGAIN_RATE:
                return self._random.choice(self._done)
            if self._unlinked and self._random.random() < CHECKOUT_RATE:
                return self._checkout()
            return self._invoice()

    def _checkout(self) -> Fact:
        number = self._unlinked.pop(self._random.randrange(len(self._unlinked)))
        event_id = f"evt_link_{number}"
        return Fact(event_id, checkout(event_id, f"cus_{number}", f"w_{number}"))

    def _invoice(self) -> Fact:
        self._numbers += 1
        number = self._numbers
        customer = self._random.randrange(CUSTOMERS)
        of = {"id": f"in_{number}", "customer": f"cus_{customer}"}
        self.invoices[f"w_{customer}"] += 1
        if self._random.random() < TWICE_RATE:
            second = f"evt_{number}_again"
            self._owed.append(Fact(second, event(second, "invoice.payment_succeeded", **of)))
        return Fact(f"evt_{number}", event(f"evt_{number}", "invoice.paid", **of))

    def _owe(self, fact: Fact) -> None:
        with self._lock:
            if fact.event_id not in self.acknowledged:
                self._owed.append(fact)

    def _answered(self, fact: Fact, status: int, outcome: str) -> None:
        if status == 503:
            self._owe(fact)
            return
        with self._lock:
            again = fact.event_id in self.acknowledged
            if status != 200 or outcome not in ("done", "duplicate", "parked"):
                self.surprises.append(f"{fact.event_id}: {status} {outcome}")
            elif outcome == "done" and again and fact in self._done:
                self.surprises.append(f"{fact.event_id}: was done, then lost and done again")
            self.acknowledged.add(fact.event_id)
            if outcome == "done" and not again:
                self._done.append(fact)


def test_what_was_answered_is_there_and_nothing_twice_after_many_kills(
    start: Start, seed: int
) -> None:
    killed_under_load(start, seed, KILLS)


def killed_under_load(
    start: Start, seed: int, kills: int, advance: Callable[[int], None] = lambda kill: None
) -> Sender:
    """Kill a server so often at random moments; raises AssertionError if anything is wrong then."""
    with peering() as peer:
        peer.on_seen = lambda: time.sleep(PEER_S)
        told = destination("repeated", peer.url())
        told += destination("reviewed", peer.url(), 'ambiguous = "review"')
        service = start(CONFIG + MESSAGES + told, serve=False)
        make_app_tables(service)
        service.start()
        sender = _killed(service, seed, kills, advance)
        _assert_nothing_lost_or_doubled(service, sender)
        _assert_told_as_allowed(service, sender, peer)
    return sender


def _killed(service: Service, seed: int, kills: int, advance: Callable[[int], None]) -> Sender:
    moments = random.Random(seed)
    with Sender(service, seed) as sender:
        for kill in range(kills):
            # Now and then right after the first answer, while what was left is being applied, or
            # before any, at some moment of the start.
            more = moments.choice([0, 1, moments.randint(2, BETWEEN_MAX)])
            if more == 0:
                time.sleep(moments.uniform(0, STARTING_S))
            enough = len(sender.acknowledged) + more
            until(lambda enough=enough: len(sender.acknowledged) >= enough)  # type: ignore[misc]
            service.kill()
            service.start(wait=False)
            advance(kill + 1)
    return sender


def _assert_nothing_lost_or_doubled(service: Service, sender: Sender) -> None:
    until(lambda: states(service).keys() == {"done"})
    assert sender.surprises == []
    assert sender.acknowledged == {
        id for (id,) in service.rows("select event_id from receiver_events")
    }
    wanted = sorted((workspace, count) for workspace, count in sender.invoices.items())
    assert (
        service.rows("select workspace, count(*) from receiver_ledger group by 1 order by 1")
        == wanted
    )
    assert (
        service.rows("select workspace, balance / 100 from receiver_balances order by 1") == wanted
    )
    assert service.rows("select id, invoices from app_workspaces order by 1") == wanted
    assert service.value("select count(*) from receiver_conflicts") == 0
    service.assert_books_balance()


def _assert_told_as_allowed(service: Service, sender: Sender, peer: Peer) -> None:
    """Each message was received once; or again, or maybe not at all, as its policy says."""
    assert service.stop() == 0
    # What is left was leased by who was killed; nobody waits for that to run out.
    with closing(apsw.Connection(str(service.database))) as db:
        db.execute(
            """
            update receiver_outbox set lease_until_ms = 1, next_attempt_ms = 1
            where lease_owner is not null
            """
        )
    service.start()
    pending = "select count(*) from receiver_outbox where state = 'pending'"
    while left := service.value(pending):
        # There may be thousands: as long as it goes on.
        until(lambda left=left: bool(service.value(pending) < left))  # type: ignore[misc]
    received = Counter(one.key for one in list(peer.seen))
    rows = service.rows("select destination, state, attempts, operation_key from receiver_outbox")
    assert len(rows) == 2 * (sender.invoices.total() // 2)
    for to, state, attempts, key in rows:
        assert state == "sent" or (to, state) == ("reviewed", "review"), (to, state)
        most = attempts if to == "repeated" else 1
        assert int(state == "sent") <= received.pop(key, 0) <= most, (to, state, key)
    assert not received, "nobody owed these"


def make_app_tables(service: Service) -> None:
    """The app's own tables, made by the app before Receiver ever ran."""
    db = apsw.Connection(str(service.database))
    with closing(db):
        db.execute(
            """
            create table app_workspaces (id text primary key, invoices integer not null);
            create table app_invoices (id text primary key, workspace text not null);
            """
        )
        for number in range(CUSTOMERS):
            db.execute("insert into app_workspaces values (?, 0)", (f"w_{number}",))


def states(service: Service) -> dict[str, int]:
    return dict(service.rows("select state, count(*) from receiver_events group by 1"))


SUICIDE_CONFIG = f"""
handlers = "handlers.py"
{STRIPE_CONFIG}
[[rules]]
operation = "welcome"
source = "stripe"
on = ["invoice.paid"]
subject = "data.object.id"
call = "welcome"
"""
SUICIDE = """
import os, signal

def welcome(event, tx):
    tx.record("welcome", {}, operation="welcome-record")
    if not os.path.exists("repaired"):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_between_the_effect_and_the_commit_leaves_neither(start: Start) -> None:
    """C13: one commit holds the guard and the effect, so a redelivery applies both."""
    service = start(SUICIDE_CONFIG, SUICIDE)
    service.deliver(checkout("evt_link"))
    body = invoice("evt_1", "in_1")

    with service.wire() as wire:
        wire.send(stripe_request(body))
        with pytest.raises(AssertionError, match="closed after b"):
            wire.answer()
    assert service.ended() == -9
    assert service.rows("select event_id from receiver_events") == [("evt_link",)]
    assert service.rows("select * from receiver_operations") == []
    (service.folder / "repaired").touch()
    service.start()

    assert [service.deliver(body), service.deliver(body)] == ["done", "duplicate"]
    assert service.rows("select balance from receiver_balances") == [(100,)]
    assert service.value("select count(*) from receiver_records") == 1


def test_deliveries_that_waited_through_a_kill_are_answered_by_the_next_server(
    start: Start,
) -> None:
    service = start()
    service.deliver(checkout("evt_link"))
    service.kill()

    with service.wire() as waiting:
        waiting.send(stripe_request(invoice("evt_1", "in_1")))
        service.start(wait=False)

        assert word(waiting.answer()) == "done"
    service.assert_books_balance()
