"""A dry run tells what a replay would change, changes nothing, and reaches nothing outside."""

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import apsw
import pytest

from receiver import rehearsal
from tests.command import Command
from tests.conftest import CONFIG, World
from tests.far_side import answering, serving

OWING = """
[[rules]]
operation = "announce"
source = "stripe"
on = ["announced"]
subject = "data.object.id"
customer = "data.object.customer"
grant = { unit = "credits", amount = 5 }
send = [{ to = "far" }]
"""

OWN_TABLES = """
create table notes (text);
create table "odd names" ("rowid" text, "_rowid_" int, v);
create table pairs (a text, b int, v, primary key (b, a)) without rowid;
create table sums (a int, b as (a + 1) stored, c as (a * 2), d text);
create table summed (k text primary key, a int, b as (a + 1)) without rowid;
create virtual table words using fts5(text);
"""


@pytest.fixture
def command(world: World, monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(world, monkeypatch)


def handled(world: World, event_id: str, run: str) -> None:
    """An event whose handler does this when it is run again; at first it fails."""
    body = "if tx.sql('select v from switch')[0][0]:\n" + "".join(
        f"  {line}\n" for line in run.splitlines()
    )
    world.query("update switch set v = 0")
    world.stripe(event_id, "handler.called", id=event_id, run=body + "else:\n  1 / 0")
    world.query("update switch set v = 1")


@pytest.fixture
def tables(world: World) -> World:
    world.store.db.execute(
        OWN_TABLES + "create table switch (v int); insert into switch values (1)"
    )
    return world


_DUMP = """
import sqlite3, sys
print("\\n".join(sqlite3.connect(sys.argv[1]).iterdump()))
"""


def dump(world: World) -> str:
    """All that is in the file, as SQL, as another process with another library reads it."""
    command = [sys.executable, "-c", _DUMP, str(world.folder / "receiver.db")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def tried(command: Command, *arguments: str) -> list[dict[str, Any]]:
    return command("replay", *arguments, "--dry-run", "--json").objects


def changes(told: dict[str, Any], table: str) -> list[tuple[Any, Any]]:
    found = [one for one in told["changes"] if one["table"] == table]
    return [(one["before"], one["after"]) for one in found]


# What it tells


def test_a_dry_run_tells_the_rows_that_a_replay_would_change(
    world: World, command: Command
) -> None:
    world.link()
    world.invoice("evt_1", "in_1")
    world.invoice("evt_2", "in_2", status="open")
    world.configure(CONFIG.replace('= "paid" }', '= "open" }'))

    (told,) = tried(command, "evt_2")
    out = command("replay", "evt_2", "--dry-run")

    assert (told["id"], told["would_be"], told["problem"]) == ("evt_2", "done", None)
    ((none, entry),) = changes(told, "receiver_ledger")
    assert (none, entry["subject"], entry["amount"]) == (None, "in_2", 100)
    ((before, after),) = changes(told, "receiver_balances")
    assert (before["balance"], after["balance"]) == (100, 200)
    ((before, after),) = changes(told, "receiver_events")
    assert (before["state"], after["state"]) == ("quarantined", "done")
    assert out.code == 0
    assert "~ receiver_balances  workspace=acme unit=credits: balance 100 -> 200" in out.out
    assert "a dry run: nothing was changed, and nothing was sent" in out.err
    assert world.balance() == 100


def test_a_dry_run_tells_just_what_the_replay_then_does(tables: World, command: Command) -> None:
    world = tables
    handled(
        world,
        "evt_1",
        "tx.sql(\"insert into notes values ('a')\")\ntx.grant('credits', 7, workspace='acme')",
    )
    columns = "state, attempts, settled_ms"

    (told,) = tried(command, "evt_1")
    command("replay", "evt_1")

    ((_, event),) = changes(told, "receiver_events")
    assert world.query(f"select {columns} from receiver_events") == [
        tuple(event[name] for name in columns.split(", "))
    ]
    for table in ("receiver_ledger", "receiver_operations", "receiver_balances"):
        after = [tuple(row.values()) for _, row in changes(told, table)]
        assert world.query(f"select * from {table}") == after


def test_a_dry_run_of_what_was_done_says_that_nothing_is_new(
    world: World, command: Command
) -> None:
    world.link()
    world.invoice("evt_1", "in_1")
    command("ledger", "revert", "stripe/in_1/initial-credit-grant", "--reason", "x")
    world.clock.now_ms += 1_000

    (told,) = tried(command, "evt_1")

    assert (told["would_be"], told["changes"]) == ("done", [])
    assert told["notes"] == [
        "all had been done before: no operation and no ledger entry would be new"
    ]
    assert command("replay", "evt_1", "--dry-run").out.count("\n") == 2


def test_a_replay_of_what_was_done_says_that_nothing_is_new(world: World, command: Command) -> None:
    world.invoice("evt_1", "in_1", status="open")
    world.link()
    world.invoice("evt_2", "in_1")
    world.configure(CONFIG.replace('= "paid" }', '= ["open", "paid"] }'))

    by_another, again = command("replay", "evt_1"), command("replay", "evt_2")

    why = "all had been done before, no operation and no ledger entry is new"
    assert (by_another.out, again.out) == (f"evt_1  done: {why}\n", f"evt_2  done: {why}\n")
    assert world.balance() == 100


def test_of_an_event_that_links_it_is_not_said_though_its_source_was_renamed(
    world: World, command: Command
) -> None:
    noted = (
        CONFIG.partition("[[rules]]")[0].partition("[sources.connect]")[0]
        + """
[[rules]]
operation = "link"
source = "stripe"
on = ["checkout"]
link = { customer = "data.object.customer", workspace = "data.object.workspace" }

[[rules]]
operation = "note"
source = "stripe"
on = ["checkout"]
record = { kind = "checkout", data = "{data.object.customer}" }
"""
    )
    world.configure(noted)
    world.stripe("evt_1", "checkout", customer="cus_1", workspace="acme")
    renamed = noted.replace("[sources.stripe]", '[sources.payments]\nidentity = "stripe"')
    world.configure(renamed.replace('source = "stripe"', 'source = "payments"'))

    assert command("replay", "evt_1").out == "evt_1  done\n"


def test_what_an_effect_undid_is_no_change(world: World, command: Command) -> None:
    world.invoice("evt_1", "in_1")

    (told,) = tried(command, "evt_1")

    assert (told["would_be"], told["changes"]) == ("parked", [])
    assert command("replay", "evt_1", "--dry-run").code == 1


@pytest.mark.parametrize(
    ("statement", "table", "change"),
    [
        ("insert into notes values ('a')", "notes", (None, {"text": "a"})),
        ("update notes set text = 'b'", "notes", ({"text": "old"}, {"text": "b"})),
        ("delete from notes", "notes", ({"text": "old"}, None)),
        ("delete from pairs", "pairs", ({"a": "k", "b": 1, "v": 2}, None)),
        (
            "update pairs set a = 'z'",
            "pairs",
            ({"a": "k", "b": 1, "v": 2}, None),
        ),
        (
            "update sums set a = 5",
            "sums",
            (
                {"a": 1, "b": 2, "c": 2, "d": "x"},
                {"a": 5, "b": 6, "c": 10, "d": "x"},
            ),
        ),
        (
            "update 'odd names' set v = 2",
            "odd names",
            ({"rowid": "r", "_rowid_": 1, "v": 1}, {"rowid": "r", "_rowid_": 1, "v": 2}),
        ),
    ],
)
def test_rows_of_the_founders_tables_are_told_with_or_without_a_primary_key(
    tables: World, command: Command, statement: str, table: str, change: tuple[Any, Any]
) -> None:
    tables.store.db.execute(
        """
        insert into notes values ('old'); insert into pairs values ('k', 1, 2);
        insert into sums (a, d) values (1, 'x'); insert into "odd names" values ('r', 1, 1);
        """
    )
    handled(tables, "evt_1", f'tx.sql("{statement}")')

    (told,) = tried(command, "evt_1")

    assert told["would_be"] == "done", told
    assert change in changes(told, table)


@pytest.mark.parametrize(
    ("statement", "table"),
    [
        ("insert into words values ('hello')", "words_"),
        ("insert into summed (k, a) values ('k', 1)", "summed"),
    ],
)
def test_a_change_that_can_not_be_told_is_said_to_be_one(
    tables: World, command: Command, statement: str, table: str
) -> None:
    handled(tables, "evt_1", f'tx.sql("{statement}")')

    (told,) = tried(command, "evt_1")

    assert any(table in note and "can't be told" in note for note in told["notes"])


def test_events_of_a_dry_run_meet_what_those_before_them_did(
    world: World, command: Command
) -> None:
    world.link()
    for number in (1, 2):
        world.invoice(f"evt_{number}", "in_1", status="open")
    world.configure(CONFIG.replace('= "paid" }', '= "open" }'))

    one, two = tried(command, "--state", "quarantined")

    assert len(changes(one, "receiver_ledger")) == 1
    assert changes(two, "receiver_ledger") == []
    assert [one["would_be"], two["would_be"]] == ["done", "done"]


def test_a_dry_run_says_why_an_event_can_not_be_run(world: World, command: Command) -> None:
    world.invoice("evt_1", "in_1")
    world.query("delete from receiver_payloads")

    (told,) = tried(command, "evt_1")

    assert (told["would_be"], told["problem"]) == (
        "not run",
        "its body was not kept, so it can't be run again",
    )


def test_a_dry_run_says_why_an_event_would_not_be_done(world: World, command: Command) -> None:
    world.invoice("evt_1", "in_1")

    (told,) = tried(command, "evt_1")
    ran = command("replay", "evt_1", "--dry-run")

    why = "customer cus_1 is not linked to a workspace yet"
    assert (told["would_be"], told["problem"]) == ("parked", why)
    assert f"evt_1  would be parked: {why}\n" in ran.out


def test_an_effect_that_ends_the_transaction_ends_the_dry_run_of_no_other(
    world: World, command: Command
) -> None:
    world.stripe("evt_1", "handler.called", id="h", run="tx.sql('insert into poison values (1)')")
    world.stripe("evt_2", "feedback.created", id="f", text="hi", rating=5)
    before = dump(world)

    poison, other = tried(command, "evt_1", "evt_2")

    assert (poison["would_be"], other["would_be"]) == ("pending", "done")
    assert "would end the whole transaction" in poison["problem"]
    assert dump(world) == before


def test_prepare_functions_are_not_run_and_that_is_said(world: World, command: Command) -> None:
    (world.folder / "handlers.py").write_text(
        "def ask(event):\n    open('asked', 'w')\n\ndef welcome(event, tx):\n    pass\n"
    )
    text = CONFIG.replace('call = "welcome"', 'call = "welcome"\nprepare = "ask"')
    text = text.replace("livemode = false", 'livemode = false\nmode = "queued"', 1)
    world.configure(text.replace('run = "off"', 'run = "inside"'))
    world.stripe("evt_1", "handler.called", id="h")

    (told,) = tried(command, "evt_1")

    assert told["notes"] == ["the prepare function ask was not run: welcome met no event.prepared"]
    assert not Path("asked").exists()


# What it leaves alone


def test_a_dry_run_leaves_the_file_as_it_is_and_sends_nothing(
    world: World, command: Command
) -> None:
    with serving(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")) as far:
        world.configure(
            CONFIG.replace('run = "off"', 'run = "inside"')
            + OWING
            + f'\n[destinations.far]\nkind = "http"\nurl = "http://127.0.0.1:{far.port}/"\n'
        )
        for number in range(150):
            world.stripe(f"evt_{number}", "announced", id=f"a_{number}", customer="cus_1")
        world.query("insert into receiver_links values ('stripe', '', 'cus_1', 'acme', 1)")
        world.query("update receiver_events set state = 'parked', next_attempt_ms = null")
        before = dump(world)

        told = tried(command, "--type", "announced")
        shown = command("replay", "evt_1", "--dry-run", "--payload").out

        assert dump(world) == before
        assert [one["would_be"] for one in told] == ["done"] * 150
        assert {one["messages"][0]["destination"] for one in told} == {"far"}
        assert "body" not in told[0]["messages"][0]
        assert "message to far would be owed" in shown
        assert '"type": "announced"' in shown
        assert far.connections == 0


@pytest.mark.parametrize(
    "reach",
    [
        "import socket; socket.create_connection(('127.0.0.1', PORT))",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:PORT/', timeout=5)",
        "import socket\nwith socket.socket(type=2) as udp: udp.sendto(b'x', ('127.0.0.1', PORT))",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.system('true')",
        "import multiprocessing as m; m.get_context('spawn').Process(target=print).start()",
    ],
)
def test_a_handler_reaches_nothing_outside_in_a_dry_run(
    world: World, command: Command, reach: str
) -> None:
    with serving(answering(b"")) as far:
        world.stripe("evt_1", "handler.called", id="h", run="raise Park('later')")
        world.query(
            "update receiver_payloads set body = ?", _body(reach.replace("PORT", str(far.port)))
        )
        before = dump(world)

        (told,) = tried(command, "evt_1")

        assert told["would_be"] == "pending"
        ((_, event),) = changes(told, "receiver_events")
        assert "a dry run reaches nothing outside" in event["last_error"]
        assert (far.connections, dump(world)) == (0, before)


def test_a_thread_that_a_handler_left_behind_reaches_nothing_after_the_dry_run() -> None:
    told: list[str] = []
    over = threading.Event()

    def later() -> None:
        over.wait()
        try:
            socket.create_connection(("127.0.0.1", 1))
        except OSError as error:
            told.append(str(error))

    with rehearsal.sealed():
        thread = threading.Thread(target=later)
        thread.start()
    over.set()
    thread.join()

    assert told == ["a dry run reaches nothing outside (socket.getaddrinfo)"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", 1))


def _body(run: str) -> bytes:
    order = {"object": {"id": "h", "run": run}}
    return json.dumps(
        {"id": "evt_1", "type": "handler.called", "livemode": False, "data": order}
    ).encode()


def test_a_dry_run_of_many_leaves_the_lock_to_others_in_between(
    world: World, command: Command
) -> None:
    for number in range(600):
        world.stripe(f"evt_{number}", "feedback.created", id=f"f_{number}", text="hi", rating=5)
    waits: list[float] = []
    done = threading.Event()

    def write() -> None:
        db = apsw.Connection(str(world.folder / "receiver.db"))
        db.set_busy_timeout(5000)
        with contextlib.closing(db):
            while not done.is_set():
                db.execute("begin immediate; update workspaces set plan = 'pro'; commit")
                waits.append(0)

    other = threading.Thread(target=write)
    other.start()
    try:
        ran = command("replay", "--type", "feedback.created", "--dry-run")
    finally:
        done.set()
        other.join()

    assert ran.code == 0
    assert re.search(r"tried in \d+ parts: no part met what the one before it did", ran.err)
    # One between any two parts, at the least.
    assert len(waits) >= 5
