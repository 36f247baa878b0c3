"""Fills a file with as many events as wanted, by the store's own statements.

As a program it makes a file and measures the commands on it:
`python -m tests.bulk FOLDER [EVENTS]`.
"""

import contextlib
import hashlib
import io
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from store import (
    attempts,
    audit,
    conflicts,
    deliveries,
    inbox,
    ledger,
    links,
    names,
    operations,
    outbox,
    parked,
    records,
)
from store.database import Store, Tx
from store.operations import Claim, Key
from store.parked import Fact

#: Events of one transaction, and how far apart they are received, in ms.
BATCH = 5_000
APART_MS = 2_000
#: 2027-01-15 08:00:00 UTC: when the newest event is received.
NOW_MS = 1_800_000_000_000

CONFIG = """
[worker]
run = "off"

[sources.stripe]
scheme = "stripe"
secrets = ["env:STRIPE"]
livemode = true

[sources.connect]
scheme = "stripe"
identity = "stripe"
secrets = ["env:STRIPE"]
livemode = true

[sources.github]
scheme = "github"
secrets = ["env:GITHUB"]

[[rules]]
operation = "initial-credit-grant"
source = ["stripe", "connect"]
on = ["invoice.paid"]
subject = "data.object.id"
customer = "data.object.customer"
grant = { unit = "credits", amount = 100 }
"""


class Size(NamedTuple):
    """How many of each there are among so many events."""

    events: int
    accounts: int = 200
    customers: int = 50_000
    workspaces: int = 20_000
    types: int = 120


class Filling:
    """One file being filled; the same size gives the same rows."""

    def __init__(self, store: Store, size: Size) -> None:
        self.store = store
        self.size = size
        self.random = random.Random(size.events)
        self.first_ms = NOW_MS - size.events * APART_MS

    def fill(self, body_bytes: int = 300) -> None:
        """Write all of it. The store's clock is set aside."""
        self.store.db.execute("pragma synchronous = off")
        clock, self.store.clock = self.store.clock, lambda: NOW_MS
        self._customers(self.store.begin_waiting())
        self.store.commit()
        for first in range(0, self.size.events, BATCH):
            # Without a savepoint around it: SQLite walks all that one has changed, again and
            # again.
            numbers = range(first, min(first + BATCH, self.size.events))
            self._events(self.store.begin_waiting(), numbers, body_bytes)
            self.store.commit()
        self.store.clock = clock
        self.store.db.execute("pragma synchronous = full")

    def _customers(self, tx: Tx) -> None:
        names.remember(tx, "identity", ["stripe", "github"])
        for number in range(self.size.customers):
            tx.now_ms = self.first_ms + number
            account = self._account(number)
            links.add(tx, "stripe", account, f"cus_{number}", self._workspace(number))

    def _account(self, number: int) -> str:
        return "" if number % 2 else f"acct_{number % self.size.accounts}"

    def _workspace(self, number: int) -> str:
        return f"w{number % self.size.workspaces}"

    def _events(self, tx: Tx, numbers: range, body_bytes: int) -> None:
        for number in numbers:
            tx.now_ms = self.first_ms + number * APART_MS + 3
            self._event(tx, number, body_bytes)

    def _event(self, tx: Tx, number: int, body_bytes: int) -> None:
        chance, random_number = self.random.random(), self.random.randrange(self.size.customers)
        endpoint = ("stripe", "connect", "stripe", "github")[number % 4]
        source = "github" if endpoint == "github" else "stripe"
        account = "" if source == "github" else self._account(random_number)
        invoice = chance < 0.6 and source == "stripe"
        type = "invoice.paid" if invoice else f"type.{self.random.randrange(self.size.types)}"
        tail = f"{self.random.getrandbits(64):016x}"
        body = f'{{"id":"evt_{tail}","pad":"{tail * (body_bytes // 16)}"}}'.encode()
        row = inbox.insert(
            tx,
            source=source,
            account=account,
            event_id=f"evt_{tail}",
            endpoint=endpoint,
            type=type,
            received_ms=tx.now_ms - 3,
            secret="env:STRIPE",
            content_type="json",
            body=body,
            body_sha256=hashlib.sha256(body).digest(),
            id_signed=source == "stripe",
            claimed_account=None,
            request_id=f"{tx.now_ms - 3:x}-f0fdde6c-{number:x}",
        )
        assert row is not None, "ids do not repeat"
        key = Key(source, account, f"in_{tail}" if invoice else f"evt_{tail}", "record-it")
        workspace = self._workspace(random_number)
        if invoice:
            key = key._replace(operation="initial-credit-grant")
        self._outcome(tx, row, number, key, workspace, chance)
        self._beside(tx, row, number, body)

    def _outcome(
        self, tx: Tx, row: int, number: int, key: Key, workspace: str, chance: float
    ) -> None:
        """Most are done, by a grant or by a record; some ignored; few unfinished."""
        if number % 250 == 0:
            inbox.settle(tx, row, "parked", "customer is not linked", answer="parked")
            parked.wait(tx, row, Fact("link", key.source, key.account, f"new_{number}"))
        elif number % 400 == 1:
            inbox.settle(tx, row, "quarantined", "no entitlement", answer="quarantined")
        elif number % 2_000 == 2:
            attempts.start(tx, 1, event=row)
            attempts.finish(tx, 1, "failed", "boom", event=row)
            inbox.die(tx, row, 1, "boom", answer="pending")
        elif key.operation == "initial-credit-grant":
            operations.claim(tx, key, Claim("grant", workspace, "credits", 100), row)
            ledger.enter(tx, key, workspace, "credits", 100)
        elif chance > 0.9:
            operations.claim(tx, key, Claim("record", workspace), row)
            records.insert(tx, key, f"kind-{number % 20}", workspace, '{"a":1}')
        elif chance > 0.7:
            inbox.settle(tx, row, "ignored", "no rule", answer="ignored")
        if number % 25 == 3:
            self._message(tx, row, number, key)

    def _message(self, tx: Tx, row: int, number: int, key: Key) -> None:
        outbox.insert(tx, key, f"to-{number % 3}", "", body='{"a":1}', event=row)
        message = tx.db.last_insert_rowid()
        attempts.start(tx, 1, message=message)
        attempts.finish(tx, 1, "sent", None, message=message)
        if number % 1_000 != 3:
            outbox.settle(tx, message, "sent", None)

    def _beside(self, tx: Tx, row: int, number: int, body: bytes) -> None:
        if number % 50 == 4:
            inbox.count_duplicate(tx, row)
            deliveries.add(
                tx,
                row,
                0,
                received_ms=tx.now_ms,
                answer="duplicate",
                secret="env:STRIPE",
                request_id=f"{tx.now_ms:x}-f0fdde6c-d{number:x}",
            )
        if number % 1_000 == 5:
            conflicts.add(
                tx,
                row,
                content_sha256=hashlib.sha256(body + b"2").digest(),
                body=body,
                content_type="json",
                received_ms=tx.now_ms,
                request_id=f"{tx.now_ms:x}-f0fdde6c-c{number:x}",
            )
        if number % 100 == 6:
            audit.add(tx, "root", "replay", f"event {row}", "", "{}")


def fill(folder: Path, size: Size) -> Store:
    """A config and its file in this folder, filled; the store is left open."""
    (folder / "receiver.toml").write_text(CONFIG)
    store = Store.create(folder / "receiver.db", lambda: NOW_MS)
    Filling(store, size).fill()
    return store


def commands(folder: Path, size: Size) -> list[list[str]]:
    """The listings and look-ups, with every filter, of which some find nothing."""
    middle = size.events // 2
    request = f"{NOW_MS - middle * APART_MS:x}-f0fdde6c-{size.events - middle:x}"
    event = ["events", "list"]
    return [
        event,
        *([*event, "--state", state] for state in inbox.STATES),
        [*event, "--source", "connect"],
        [*event, "--source", "nobody"],
        [*event, "--type", "invoice.paid"],
        [*event, "--type", "type.7", "--state", "dead"],
        [*event, "--source", "github", "--type", "invoice.paid"],
        [*event, "--since", "10d"],
        [*event, "--since", "1h", "--state", "ignored"],
        [*event, "--workspace", "w7"],
        [*event, "--workspace", "w7", "--state", "parked"],
        [*event, "--subject", "in_nothing"],
        ["events", "show", str(middle)],
        ["events", "show", "w19999"],
        ["events", "show", request],
        ["events", "show", "evt_nothing"],
        ["parked", "list"],
        ["parked", "list", "--source", "github"],
        ["conflicts", "list"],
        ["conflicts", "list", "--all"],
        ["conflicts", "show", "1"],
        ["links", "list"],
        ["links", "list", "--source", "github"],
        ["links", "list", "--customer", "cus_7"],
        ["links", "list", "--workspace", "w7"],
        ["ledger", "list"],
        ["ledger", "list", "--workspace", "w7"],
        ["ledger", "list", "--workspace", "w7", "--operation", "initial-credit-grant"],
        ["ledger", "list", "--subject", "in_nothing"],
        ["ledger", "list", "--operation", "initial-credit-grant"],
        ["ledger", "list", "--operation", "none", "--since", "1h"],
        ["balance"],
        ["balance", "w7"],
        ["records"],
        ["records", "--kind", "kind-7"],
        ["records", "--workspace", "w7"],
        ["records", "--subject", "in_nothing"],
        ["records", "--since", "1d"],
        ["outbox", "list"],
        *(["outbox", "list", "--state", state] for state in outbox.STATES),
        ["outbox", "list", "--destination", "to-2"],
        ["outbox", "list", "--destination", "nobody", "--state", "dead"],
        ["outbox", "show", "7"],
        ["sources", "list"],
        ["audit"],
        ["audit", "--action", "replay", "--actor", "root", "--since", "1d"],
        ["audit", "--actor", "nobody"],
    ]


def measure(run: Callable[[], object], times: int = 5) -> float:
    """The median of some runs, in milliseconds of this process's CPU."""
    taken = []
    for _ in range(times):
        started = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run()
        taken.append((time.process_time() - started) * 1000)
    return statistics.median(taken)


def main(folder: Path, events: int) -> None:
    import cli
    from receiver.commands import shared

    shared.now_ms = lambda: NOW_MS
    size = Size(events)
    if not (folder / "receiver.db").exists():
        fill(folder, size).close()
    for words in commands(folder, size):
        arguments = [*words, "--config", str(folder / "receiver.toml")]

        def run(arguments: list[str] = arguments) -> None:
            with contextlib.suppress(SystemExit):
                cli.main(arguments)

        sys.stdout.write(f"{measure(run):8.1f} ms  {' '.join(words)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000)
