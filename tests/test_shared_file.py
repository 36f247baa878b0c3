"""The app's own file as `database`: both write it at the same time, and neither is locked out."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import apsw
import pytest

from tests.service import (
    PATIENCE_S,
    STRIPE_CONFIG,
    Service,
    Start,
    by_stripe,
    checkout,
    invoice,
    services,
    stripe_request,
    until,
    word,
)
from tests.test_http import Wire

#: Connections that deliver at the same time, for as long as the app needs for so many spends.
SENDERS = 6
SPENDS = 40
#: Requests that a sender has under way.
AHEAD = 8

CONFIG = f"""
database = "app.db"
{STRIPE_CONFIG}
[worker]
run = "off"

[[rules]]
operation = "book-order"
source = "stripe"
on = ["invoice.paid"]
subject = "data.object.id"
customer = "data.object.customer"
sql = [
  "insert into orders (id, workspace) values ({{data.object.id}}, {{_workspace}})",
  "update workspaces set orders = orders + 1 where id = {{_workspace}}",
]
"""

# An app as it is usually written: the sqlite3 module of its Python, whatever SQLite that has, and
# the busy timeout that the documentation asks for.
APP = """
import json, select, sqlite3, sys, time
db = sqlite3.connect(sys.argv[1], timeout=5)
spent = refused = 0
longest_s = 0.0
errors = []
print("running", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    started = time.monotonic()
    try:
        with db:
            db.execute(
                "insert into receiver_ledger (source, account, subject, operation,"
                " workspace, unit, amount, created_ms)"
                " values ('app', '', ?, 'spend', 'acme', 'credits', -7, ?)",
                (f"request-{spent}", time.time_ns() // 1_000_000),
            )
            db.execute("update usage set spends = spends + 1")
        spent += 1
    except sqlite3.IntegrityError:
        refused += 1
    except sqlite3.OperationalError as error:
        errors.append(str(error))
    longest_s = max(longest_s, time.monotonic() - started)
print(json.dumps({"spent": spent, "refused": refused, "errors": errors, "longest_s": longest_s}))
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with services(tmp_path) as starting:
        yield starting


def serve(start: Start) -> Service:
    """A server on the file that an app has made and used before."""
    service = start(CONFIG, serve=False)
    service.database = service.folder / "app.db"
    execute(
        service,
        """
        create table workspaces (id text primary key, orders integer not null);
        create table orders (id text primary key, workspace text not null);
        create table usage (spends integer not null);
        insert into workspaces values ('acme', 0);
        insert into usage values (0);
        """,
    )
    service.start()
    service.deliver(checkout("evt_link"))
    return service


def execute(service: Service, statements: str) -> None:
    """What the app, or its founder, does to the file by hand."""
    with contextlib.closing(apsw.Connection(str(service.database))) as db:
        db.set_busy_timeout(5000)
        db.execute(statements)


@contextlib.contextmanager
def app_running(service: Service) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", APP, str(service.database)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        yield process
        process.kill()


def report(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """Tell the app to end; what it did."""
    out, _ = process.communicate("enough\n", timeout=PATIENCE_S)
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


class Senders:
    """Deliver one invoice after the other on several connections, until told to stop.

    Each sends a few ahead of their answers, so that the server leaves no gaps by itself.
    """

    def __init__(self, service: Service) -> None:
        self.answers: list[tuple[int, str]] = []
        self._service = service
        self._enough = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(SENDERS)]

    def _run(self, sender: int) -> None:
        sent = 0
        with self._service.wire() as wire:
            while not self._enough.is_set():
                names = [f"{sender}_{sent + ahead}" for ahead in range(AHEAD)]
                bodies = [invoice(f"evt_{name}", f"in_{name}") for name in names]
                self.answers += exchange(wire, bodies)
                sent += AHEAD

    def __enter__(self) -> "Senders":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join()


def exchange(wire: Wire, bodies: Sequence[bytes]) -> list[tuple[int, str]]:
    """Send all of these, then read their answers."""
    wire.send(b"".join(stripe_request(body) for body in bodies))
    answers = [wire.answer() for _ in bodies]
    return [(each.status, word(each)) for each in answers]


def test_the_app_spends_while_deliveries_arrive_and_nobody_is_locked_out(start: Start) -> None:
    service = serve(start)

    with app_running(service) as process:
        with Senders(service) as senders:
            until(lambda: service.value("select spends from usage") >= SPENDS)
        done = report(process)

    assert done["errors"] == []
    assert done["longest_s"] < 5
    delivered = len(senders.answers)
    assert set(senders.answers) == {(200, "done")}
    balance = 100 * delivered - 7 * done["spent"]
    assert service.value("select balance from receiver_balances") == balance
    assert service.value("select spends from usage") == done["spent"]
    assert service.value("select count(*) from orders") == delivered
    assert service.value("select orders from workspaces") == delivered
    assert "locked" not in service.log
    service.assert_books_balance()


def test_an_event_whose_sql_fails_leaves_none_of_its_writes_and_applies_once_later(
    start: Start,
) -> None:
    service = serve(start)
    # The app has an order of that name already, so the event's second rule can't be applied.
    execute(service, "insert into orders values ('in_1', 'by hand')")
    body = invoice("evt_1", "in_1")

    answer = service.post("stripe", body, by_stripe(body))

    assert (answer.status, word(answer)) == (503, "pending")
    assert service.rows("select * from receiver_ledger") == []
    assert service.rows("select * from receiver_operations") == []
    assert service.rows("select orders from workspaces") == [(0,)]
    assert service.rows("select state, attempts from receiver_events where id = 2") == [
        ("pending", 1)
    ]
    assert "UNIQUE constraint failed: orders.id" in service.value(
        "select last_error from receiver_events where id = 2"
    )
    execute(service, "delete from orders")
    assert [service.deliver(body), service.deliver(body)] == ["done", "duplicate"]
    assert service.rows("select orders from workspaces") == [(1,)]
    assert service.rows("select balance from receiver_balances") == [(100,)]


def test_a_failing_event_costs_its_neighbours_of_the_same_moment_nothing(start: Start) -> None:
    service = serve(start)
    execute(service, "insert into orders values ('in_5', 'by hand')")
    bodies = [invoice(f"evt_{number}", f"in_{number}") for number in range(16)]

    with service.wire() as wire:
        words = [outcome for _, outcome in exchange(wire, bodies)]

    assert words == ["done"] * 5 + ["pending"] + ["done"] * 10
    assert service.rows("select orders from workspaces") == [(15,)]
    assert service.rows("select balance from receiver_balances") == [(1500,)]


def test_the_app_grants_while_the_webhook_for_it_arrives(start: Start) -> None:
    """C10: whoever is first, the business key is shared and the other finds it done."""
    service = serve(start)
    program = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], timeout=5)
lost = 0
print("running", flush=True)
for number in range(200):
    try:
        with db:
            db.execute(
                "insert into receiver_ledger (source, account, subject, operation, workspace,"
                " unit, amount, created_ms) values ('stripe', '', ?, 'initial-credit-grant',"
                " 'acme', 'credits', 100, 1)",
                (f"in_{number}",),
            )
    except sqlite3.IntegrityError:
        lost += 1
print(lost)
"""
    command = [sys.executable, "-c", program, str(service.database)]
    bodies = [invoice(f"evt_{number}", f"in_{number}") for number in range(200)]
    answers: list[tuple[int, str]] = []

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        with service.wire() as wire:
            for at in range(0, len(bodies), AHEAD):
                answers += exchange(wire, bodies[at : at + AHEAD])
        lost = int(process.stdout.read())

    assert set(answers) == {(200, "done")}
    assert service.value("select balance from receiver_balances") == 100 * 200
    by_event = "select count(*) from receiver_operations where operation like 'initial%' and event"
    assert service.value(by_event) == lost
    service.assert_books_balance()
