"""Everybody at once on one file: senders, two workers, the command line, reloads and the app."""

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import apsw

from tests.processes import Peer, Running, peering
from tests.proof.power import scratch
from tests.service import Service, by_stripe, event, services, until, word
from tests.test_crash import CONFIG as CRASH_CONFIG
from tests.test_crash import CUSTOMERS, Sender, make_app_tables

CONFIG = f"""
[worker]
run = "separate"
threads = 2
{CRASH_CONFIG}
[sources.queue]
scheme = "stripe"
secrets = ["env:STRIPE"]
livemode = false
mode = "queued"

[[rules]]
operation = "refund-credit-grant"
source = "stripe"
on = ["credit_note.created"]
subject = "data.object.id"
reverse.operation = "initial-credit-grant"
reverse.subject = "data.object.invoice"
reverse.amount = "data.object.credits"

[[rules]]
operation = "tell-invoice"
source = "stripe"
on = ["invoice.*"]
when = {{ "data.object.id" = {{ matches = "0$" }} }}
subject = "data.object.id"
send = [{{ to = "receipt" }}]

[[rules]]
operation = "keep-feedback"
source = "queue"
on = ["feedback.created"]
subject = "data.object.id"
record = {{ kind = "feedback", data = {{ id = "{{data.object.id}}" }} }}
send = [{{ to = "team" }}]

[destinations.receipt]
kind = "http"
url = "URL/receipt"
json = {{ id = "{{data.object.id}}" }}
ambiguous = "review"
timeout_s = 60

[destinations.team]
kind = "http"
url = "URL/team"
json = {{ id = "{{data.object.id}}" }}
timeout_s = 60
"""

#: What a reload brings and takes away again.
MORE = """
[[rules]]
operation = "keep-note"
source = "stripe"
on = ["note.created"]
record = { kind = "note", data = {} }
"""

# Spends and counts what it has spent, as an app does, with the SQLite of its own Python. Between
# two it leaves the file alone, as no program can if another commits without a pause.
APP = """
import json, random, select, sqlite3, sys, time
from collections import Counter
db = sqlite3.connect(sys.argv[1], timeout=5)
asked = 0
spent, errors = Counter(), []
print("running", flush=True)
while not select.select([sys.stdin], [], [], 0.002)[0]:
    asked += 1
    workspace = f"w_{random.randrange(int(sys.argv[2]))}"
    try:
        with db:
            db.execute(
                "insert into receiver_ledger (source, account, subject, operation,"
                " workspace, unit, amount, created_ms)"
                " values ('app', '', ?, 'spend', ?, 'credits', -7, ?)",
                (f"request-{asked}", workspace, time.time_ns() // 1_000_000),
            )
            db.execute("update app_usage set spends = spends + 1")
        spent[workspace] += 1
    except sqlite3.IntegrityError:
        pass  # The balance does not cover it.
    except sqlite3.OperationalError as error:
        errors.append(str(error))
print(json.dumps({"spent": spent, "errors": errors}))
"""

GRANT, REFUND, SPEND, ADJUSTMENT = 100, 10, 7, 3

#: Threads that send, and events that are answered between two reloads.
SENDERS, BETWEEN = 2, 100

#: Messages that are owed before no more feedback is given.
OWED_MAX = 200

#: Events that there are when the first ones are pruned, and run again.
ENOUGH = 50

#: How long anything may take where all wait for each other, in seconds: longer is a deadlock.
DRAIN_S = 300.0


class Raced(NamedTuple):
    """What was done by whom, and what was wrong."""

    done: str
    faults: list[str]


class Impatient(Sender):
    """A sender to whom a 503 is a surprise: nobody may keep the server from the file so long.

    Fewer threads than elsewhere: it is to meet the others, not to keep them from the processor.
    """

    def __init__(self, service: Service, seed: int) -> None:
        super().__init__(service, seed)
        del self._threads[SENDERS:]

    def _answered(self, fact: Any, status: int, outcome: str) -> None:
        if status == 503:
            self.surprises.append(f"{fact.event_id}: 503 {outcome}")
        super()._answered(fact, status, outcome)

    @property
    def told(self) -> int:
        """How many invoices there are; they are numbered from 1."""
        return self._numbers


class Race:
    """All who are at the file; each goes on in a thread of its own until it is over."""

    def __init__(
        self, service: Service, workers: Sequence[Running], sender: Impatient, seed: int
    ) -> None:
        self.service = service
        self.workers = workers
        self.sender = sender
        self.faults: list[str] = []
        self.rounds: Counter[str] = Counter()
        self.refunds = self.feedback = self.pruned = self.reloads = 0
        self.adjusted: Counter[str] = Counter()
        self.flipped_to = ""
        self._over = threading.Event()
        self._dice = random.Random(seed)
        acts = (
            self._replay,
            self._link,
            self._adjust,
            self._prune,
            self._flip,
            lambda: self._command("backup", "--json"),
            lambda: self._command("replay", "--state", "parked", "--yes", allowed=(0, 1)),
            lambda: self._command("status", "--json", allowed=(0, 1)),
            lambda: self._command("export", "ledger"),
        )
        # Two at a time at the command line, and no act by both at once but the replays.
        actors = {
            "refunds": [self._refund],
            "feedback": [self._feed_back],
            "reloads": [self._reload],
            "first operator": acts[::2],
            "second operator": acts[1::2],
        }
        self._threads = [
            threading.Thread(target=self._go_on, args=(name, steps), name=name)
            for name, steps in actors.items()
        ]

    def __enter__(self) -> "Race":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def rounds_of_all(self) -> int:
        """How often everybody has done all that he does."""
        return min(self.rounds[thread.name] for thread in self._threads)

    def _go_on(self, name: str, steps: Sequence[Callable[[], None]]) -> None:
        while not self._over.is_set():
            try:
                for step in steps:
                    step()
            except Exception as error:
                self.faults.append(f"{name}: {type(error).__name__}: {error}")
                return
            self.rounds[name] += 1

    # Senders, beside the one that has most to tell

    def _refund(self) -> None:
        """Take back a part of each invoice, which may not be here yet."""
        until(lambda: self._over.is_set() or self.sender.told > self.refunds, DRAIN_S)
        if self.sender.told > self.refunds:
            self.refunds += 1
            of = {"invoice": f"in_{self.refunds}", "credits": REFUND}
            body = event(
                f"evt_cn_{self.refunds}", "credit_note.created", id=f"cn_{self.refunds}", **of
            )
            self._post("stripe", body, ("done", "parked"))

    def _feed_back(self) -> None:
        self.feedback += 1
        body = event(f"evt_f_{self.feedback}", "feedback.created", id=f"f_{self.feedback}")
        self._post("queue", body, ("pending",))
        # More is owed than is sent otherwise.
        owed = "select count(*) from receiver_outbox where state = 'pending'"
        until(lambda: self._over.is_set() or self.service.value(owed) < OWED_MAX, DRAIN_S)

    def _post(self, source: str, body: bytes, words: Sequence[str]) -> None:
        answer = self.service.post(source, body, by_stripe(body))
        if answer.status != 200 or word(answer) not in words:
            self.faults.append(f"{source} was answered {answer.status} {word(answer)}")

    def _reload(self) -> None:
        """Another config, and everybody is told so."""
        enough = len(self.sender.acknowledged) + BETWEEN
        until(lambda: self._over.is_set() or len(self.sender.acknowledged) > enough, DRAIN_S)
        self.reloads += 1
        config = self.service.folder / "receiver.toml"
        text = config.read_text()
        other = text.removesuffix(MORE) if text.endswith(MORE) else text + MORE
        beside = config.with_suffix(".new")
        beside.write_text(other)
        beside.replace(config)
        self.service.reload()
        for worker in self.workers:
            worker.signal(signal.SIGHUP)
        for log in (lambda: self.service.log, *(lambda one=one: one.log for one in self.workers)):
            until(
                lambda log=log: log().count("toml: done") >= self.reloads,  # type: ignore[misc]
                DRAIN_S,
            )

    # The command line

    def _command(self, *words: str, allowed: Sequence[int] = (0,)) -> str:
        ran = self.service.command(*words, timeout_s=DRAIN_S)
        said = (ran.stdout + ran.stderr).strip()
        if ran.returncode not in allowed or "locked" in said:
            self.faults.append(f"{' '.join(words)}: {ran.returncode}: {said[-300:]}")
        return ran.stdout

    def _wait_for_enough(self) -> None:
        until(lambda: self._over.is_set() or len(self.sender.acknowledged) > ENOUGH, DRAIN_S)

    def _replay(self) -> None:
        self._wait_for_enough()
        newest = self.service.value("select coalesce(max(id), 0) from receiver_events")
        if newest:
            rows = {str(self._dice.randint(1, newest)) for _ in range(5)}
            # What was pruned meanwhile can't be run again.
            self._command("replay", *rows, "--yes", allowed=(0, 1))

    def _link(self) -> None:
        """The same that a checkout says, whichever is first."""
        number = self._dice.randrange(CUSTOMERS)
        self._command("links", "add", "stripe", f"cus_{number}", f"w_{number}")

    def _flip(self) -> None:
        self.flipped_to = "w_0" if self.flipped_to == "w_1" else "w_1"
        self._command("links", "add", "stripe", "cus_flip", self.flipped_to, "--repoint")

    def _adjust(self) -> None:
        workspace = f"w_{self._dice.randrange(CUSTOMERS)}"
        self.adjusted[workspace] += 1
        name = f"n-{self.adjusted.total()}"
        words = ("--workspace", workspace, "--unit", "credits", "--amount", str(ADJUSTMENT))
        for _ in range(2):
            # Said twice, it is done once.
            self._command("ledger", "adjust", *words, "--key", name, "--yes", "--reason", "a race")

    def _prune(self) -> None:
        """Of the events that are through, some are old enough all at once."""
        self._wait_for_enough()
        with contextlib.closing(apsw.Connection(str(self.service.database))) as db:
            db.set_busy_timeout(5000)
            db.execute(
                "update receiver_events set received_ms = 1 where id % 7 = 0 and state = 'done'"
            )
        self.pruned += int(json.loads(self._command("prune", "--json") or "{}").get("events", 0))


def race(
    seed: int,
    seconds: float = 0.0,
    advance: Callable[[int], None] = lambda done: None,
) -> Raced:
    """Let everybody at one file until each has been there, and so long at least."""
    with (
        scratch() as folder,
        peering() as peer,
        services(folder) as start,
        contextlib.ExitStack() as ending,
    ):
        service = start(CONFIG.replace("URL", peer.url("")), serve=False)
        make_app_tables(service)
        with contextlib.closing(apsw.Connection(str(service.database))) as db:
            db.execute(
                "create table app_usage (spends integer not null); insert into app_usage values (0)"
            )
        service.start(wait=False)
        until(lambda: service.health("/readyz") == 200, DRAIN_S)
        workers = [ending.enter_context(_working(folder, number)) for number in range(2)]
        app = ending.enter_context(_app(service))
        began = time.monotonic()
        sender = Impatient(service, seed)
        with sender, Race(service, workers, sender, seed) as running:
            until(lambda: _is_over(running, seconds, began, advance), seconds + DRAIN_S)
        spent = json.loads(app.communicate("enough\n", timeout=DRAIN_S)[0])
        faults = [*running.faults, *sender.surprises, *spent["errors"]]
        faults += _unfinished(service) or _wrong_sums(running, spent["spent"])
        faults += _wrong_sends(service, peer) + _wrong_ends(service, workers)
        return Raced(_in_words(running, spent["spent"]), faults)


def _is_over(race: Race, seconds: float, began: float, advance: Callable[[int], None]) -> bool:
    passed = time.monotonic() - began
    advance(int(passed))
    return bool(race.faults) or (race.rounds_of_all() > 0 and passed > seconds)


@contextlib.contextmanager
def _working(folder: Path, number: int) -> Iterator[Running]:
    command = [sys.executable, "-P", "-m", "cli", "work", "-c", str(folder / "receiver.toml")]
    running = Running(folder, f"work-{number}", command)
    try:
        until(lambda: "working on" in running.log, DRAIN_S)
        yield running
    finally:
        if running.process.poll() is None:
            running.kill()


@contextlib.contextmanager
def _app(service: Service) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", APP, str(service.database), str(CUSTOMERS)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
            yield process
        finally:
            process.kill()


# What must hold in the end


def _unfinished(service: Service) -> list[str]:
    left = """
        select (select count(*) from receiver_events where state not in ('done', 'ignored'))
          + (select count(*) from receiver_outbox where state <> 'sent')
    """
    try:
        until(lambda: bool(service.value(left) == 0), DRAIN_S)
    except AssertionError:
        events = service.rows("select state, count(*) from receiver_events group by 1")
        messages = service.rows("select state, count(*) from receiver_outbox group by 1")
        return [f"left: events {events}, messages {messages}"]
    return []


def _wrong_sums(race: Race, spent: Mapping[str, int]) -> list[str]:
    service, invoices, workspaces = race.service, race.sender.invoices, _WORKSPACES
    paid = dict(service.rows(f"select subject, workspace {_OF} 'initial-credit-grant'"))
    # Each is of the workspace that the invoice is of.
    refunds = [(f"cn_{n}", paid.get(f"in_{n}"), -REFUND) for n in range(1, race.refunds + 1)]
    refunded = Counter(workspace for _, workspace, _ in refunds)
    found = {
        "events": service.value("select count(*) from receiver_events"),
        "balances": dict(service.rows("select workspace, balance from receiver_balances")),
        "grants": _counted(service, "initial-credit-grant", GRANT),
        "refunds that are not as they must": sorted({*refunds} ^ _refunded(service), key=str),
        "spends": _counted(service, "spend", -SPEND),
        "adjustments": _counted(service, "adjustment", ADJUSTMENT),
        "counted by the app's table": dict(service.rows("select * from app_workspaces")),
        "spends by the app's table": service.value("select spends from app_usage"),
        "the link that was re-pointed": service.value(_FLIPPED),
        "adjustments written down": service.value(_WRITTEN, "ledger adjust"),
        "something was run again": service.value(_WRITTEN, "replay") > 0,
        "bodies that are gone": service.value(_BODILESS),
        "something was pruned": race.pruned > 0,
        "conflicts": service.value("select count(*) from receiver_conflicts"),
    }
    wanted = {
        "events": len(race.sender.acknowledged) + race.refunds + race.feedback,
        "balances": {
            one: GRANT * invoices[one]
            - REFUND * refunded[one]
            - SPEND * spent.get(one, 0)
            + ADJUSTMENT * race.adjusted[one]
            for one in workspaces
        },
        "grants": dict(invoices),
        "refunds that are not as they must": [],
        "spends": dict(spent),
        "adjustments": dict(race.adjusted),
        "counted by the app's table": {one: invoices[one] for one in workspaces},
        "spends by the app's table": sum(spent.values()),
        "the link that was re-pointed": race.flipped_to,
        "adjustments written down": race.adjusted.total(),
        "something was run again": True,
        "bodies that are gone": race.pruned,
        "something was pruned": True,
        "conflicts": 0,
    }
    faults = [f"{of}: {found[of]}, not {wanted[of]}" for of in found if found[of] != wanted[of]]
    with contextlib.suppress(AssertionError):
        service.assert_books_balance()
        return faults
    return [*faults, "a balance is not the sum of its entries"]


def _counted(service: Service, operation: str, amount: int) -> dict[str, int]:
    """How many of its entries each workspace has; those of another amount are told apart."""
    rows = service.rows(f"select workspace, amount, count(*) {_OF} ? group by 1, 2", operation)
    return {one if each == amount else f"{one}: {each}": count for one, each, count in rows}


def _refunded(service: Service) -> set[tuple[str, str, int]]:
    rows = service.rows(f"select subject, workspace, amount {_OF} 'refund-credit-grant'")
    return {(subject, workspace, amount) for subject, workspace, amount in rows}


_OF = "from receiver_ledger where operation ="
_WORKSPACES = [f"w_{number}" for number in range(CUSTOMERS)]
_BODILESS = """
    select count(*) from receiver_events where id not in (select event from receiver_payloads)
"""
_FLIPPED = "select workspace from receiver_links where customer = 'cus_flip'"
_WRITTEN = "select count(*) from receiver_audit where action = ?"


def _wrong_sends(service: Service, peer: Peer) -> list[str]:
    """Nothing was lost on the way, so that each message was received just once."""
    received = Counter(one.key for one in peer.seen)
    owed = Counter(key for (key,) in service.rows("select operation_key from receiver_outbox"))
    keys = received.keys() | owed.keys()
    return [
        f"{key} was received {received[key]} times" for key in keys if received[key] != owed[key]
    ]


def _wrong_ends(service: Service, workers: Sequence[Running]) -> list[str]:
    """Everybody ends when told to, and nobody has met a lock, or anything else that is wrong."""
    codes = [*(worker.stop() for worker in workers), service.stop()]
    logs = [*(worker.log for worker in workers), service.log]
    faults = [f"ended with {code}" for code in codes if code != 0]
    faults += [line for log in logs for line in log.splitlines() if _is_bad(line)]
    return faults[:20]


def _is_bad(line: str) -> bool:
    words = (" ERROR ", " CRITICAL ", "locked", "Traceback", "unexpected", "not written")
    return any(one in line for one in words)


def _in_words(race: Race, spent: Mapping[str, int]) -> str:
    acts = race.rounds["first operator"] + race.rounds["second operator"]
    spends = sum(spent.values())
    answered = len(race.sender.acknowledged) + race.refunds + race.feedback
    return f"{answered} events, {spends} spends, {acts} rounds of acts, {race.reloads} reloads"
