"""`receiver status`: one screen, its exit code, and that no part of it scans the file."""

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest
from click.testing import CliRunner

import cli
from receiver import facts
from receiver.commands.status import RULES
from store import alerts, secrets, tallies
from store.database import Store, Tx, snapshot
from store.lock import Lock, path_of
from store.tallies import What
from tests.command import Command
from tests.conftest import CONFIG, NOW_MS, Clock, World
from tests.far_side import Far, Script, part, serving
from tests.service import STRIPE_CONFIG, services
from tests.test_watch import CAUSES, a_message, an_event, back_up, conflict

#: What a look may take with many events, in seconds; the machine may be busy.
LOOK_S = 0.1
EVENTS = 200_000


@pytest.fixture
def run(world: World, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Beside a server, which a World has none of, and without waiting for one."""
    world.store.serve()
    monkeypatch.setattr("receiver.commands.status.LOOKS", 0)
    return Command(world, monkeypatch)


def test_a_file_with_nothing_wrong_needs_nobody(world: World, run: Command) -> None:
    world.store.write(lambda tx: an_event(tx, "done"))
    world.store.write(lambda tx: tallies.add(tx, {What("delivery", "stripe", "done"): 3}, NOW_MS))

    ran = run("status")

    assert ran.code == 0
    told = dict(line.split("  ", 1) for line in ran.out.splitlines())
    assert told["status"].strip() == "nothing needs you"
    assert told["last hour"].strip() == "3 done"
    assert told["events"].strip().endswith("1 settled")
    assert run("status", "--quiet") == (0, "", "")


@pytest.mark.parametrize(("name", "cause", "after_ms", "cure", "then_ms"), CAUSES)
def test_status_is_1_while_something_needs_a_person_and_names_the_command(
    world: World,
    run: Command,
    name: str,
    cause: Callable[[Tx], Any],
    after_ms: int,
    cure: Callable[[Tx], Any],
    then_ms: int,
) -> None:
    world.configure(CONFIG.replace('scheme = "stripe"\n', 'scheme = "stripe"\nsilence_s = 3600\n'))
    world.store.write(cause)
    world.clock.now_ms += after_ms

    ran = run("status")
    quiet = run("status", "--quiet")

    assert (ran.code, quiet.code) == (1, 1)
    assert "1 thing needing you" in ran.out
    assert "next: `receiver " in ran.out
    (line,) = quiet.out.splitlines()
    assert line.startswith(f"{name}: ")
    assert "; `receiver " in line
    (needs,) = json.loads(run("status", "--json").out)["needs"]
    assert f"{needs['name']} {needs['subject']}".rstrip() == name

    world.store.write(cure)
    world.clock.now_ms += then_ms
    assert run("status").code == 0


def test_a_killed_server_needs_a_person_though_nothing_else_is_wrong(tmp_path: Path) -> None:
    with services(tmp_path) as start:
        service = start(STRIPE_CONFIG)
        well = service.command("status", "--quiet")
        service.kill()
        killed = service.command("status", "--quiet")
        told = json.loads(service.command("status", "--json").stdout)
        service.start()
        again = service.command("status", "--quiet")

    assert (well.returncode, well.stdout) == (0, "")
    assert killed.returncode == 1
    words = "server: none runs on the database, so nothing is received; `receiver serve`"
    assert killed.stdout == f"{words}\n"
    assert told["running"] == {"server": False, "workers": []}
    assert [one["name"] for one in told["needs"]] == ["server"]
    assert (again.returncode, again.stdout) == (0, "")


def test_a_worker_apart_that_does_not_run_needs_a_person(world: World, run: Command) -> None:
    world.configure(CONFIG.replace('run = "off"', 'run = "separate"'))

    ran = run("status")

    assert ran.code == 1
    assert 'none runs, but worker.run is "separate"' in ran.out
    assert "next: `receiver work " in ran.out
    workers = [Lock(world.folder / "receiver.db") for _ in range(2)]
    for one in workers:
        one.work("separate")
    workers[0].close()
    assert run("status").code == 0, "another one is left"
    workers[1].close()
    assert run("status").code == 1


def test_a_server_that_was_started_without_its_worker_needs_a_person(
    world: World, run: Command
) -> None:
    world.configure(CONFIG.replace('run = "off"', 'run = "inside"'))
    assert "worker inside: the server runs without" in run("status", "--quiet").out

    world.store.work("inside")
    assert run("status").code == 0


def test_a_restart_is_waited_for(
    world: World, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.store._lock.close()
    assert run("status").code == 1
    started = Lock(world.folder / "receiver.db")
    monkeypatch.setattr("receiver.commands.status.LOOKS", 1)
    monkeypatch.setattr("time.sleep", lambda seconds: started.serve())

    assert run("status").code == 0
    started.close()


def test_a_lock_that_may_not_be_read_needs_nobody(world: World, run: Command) -> None:
    lock = path_of(world.folder / "receiver.db")
    lock.unlink()
    lock.symlink_to(lock)

    ran = run("status")

    assert ran.code == 0
    assert "not known" in ran.out
    assert json.loads(run("status", "--json").out)["running"]["server"] is None


def test_an_installed_unit_is_what_to_look_at(
    world: World, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.store._lock.close()
    monkeypatch.setattr("receiver.facts.UNIT_FOLDERS", (str(world.folder),))
    (world.folder / "receiver.service").touch()

    assert "next: `systemctl status receiver`" in run("status").out

    # What runs is not to be started once more.
    started = Lock(world.folder / "receiver.db")
    started.serve()
    world.configure(CONFIG.replace('run = "off"', 'run = "inside"'))
    assert "next: `systemctl restart receiver`" in run("status").out
    (world.folder / "receiver.service").unlink()
    assert "next: `pgrep -fa 'receiver serve'`" in run("status").out
    started.close()


def test_status_as_json_is_one_object_with_everything(world: World, run: Command) -> None:
    world.store.write(lambda tx: a_message(tx, "dead"))
    world.store.write(conflict)
    world.store.write(back_up)
    world.store.write(lambda tx: alerts.open(tx, "conflicts", "", "1 open conflict"))
    world.store.write(lambda tx: tallies.add(tx, {What("delivery", "stripe", "parked"): 2}, NOW_MS))

    ran = run("status", "--json")

    assert ran.code == 1
    (line,) = ran.out.splitlines()
    told = json.loads(line)
    assert [one["name"] for one in told["needs"]] == ["dead", "conflicts"]
    assert told["messages"] == [{"destination": "team", "state": "dead", "messages": 1}]
    assert told["delivered"]["day"] == {"stripe": {"parked": 2}}
    assert told["last_backup_at"] == "2027-01-15T08:00:00.000Z"
    assert [one["name"] for one in told["alerts"]] == ["conflicts"]
    assert told["file"]["bytes"] > 0


def test_status_tells_when_each_secret_of_a_rotation_was_used(world: World, run: Command) -> None:
    world.configure(
        CONFIG.replace('secrets = ["env:STRIPE"]', 'secrets = ["env:GITHUB", "env:STRIPE"]', 1)
    )
    world.store.write(lambda tx: secrets.used(tx, "stripe", "env:STRIPE", NOW_MS - 180_000, 1))

    assert "env:STRIPE last used 3 min ago" in run("status").out


def test_alerts_are_listed_with_their_times(world: World, run: Command) -> None:
    world.store.write(lambda tx: alerts.open(tx, "conflicts", "", "1 open conflict"))
    (one,) = run.objects("alerts", "list")

    assert (one["name"], one["closed_at"]) == ("conflicts", None)
    assert one["opened_at"] == "2027-01-15T08:00:00.000Z"
    assert "1 open conflict" in run("alerts", "list").out


def test_the_rules_for_prometheus_are_printed_as_they_are_shipped() -> None:
    ran = CliRunner().invoke(cli.main, ["alerts", "rules"])

    assert (ran.exit_code, ran.output) == (0, RULES.read_text())


def fill(tx: Tx, events: int) -> None:
    """Many settled events, some unfinished ones, and as many messages."""
    tx.db.execute(
        """
        with recursive numbers (n) as (
          select 1 union all select n + 1 from numbers where n < ?)
        insert into receiver_events (
          source, account, event_id, endpoint, type, state, duplicates, attempts,
          by_worker, received_ms, stored_ms, answer, settled_ms, secret, content_type, body_sha256,
          id_signed, request_id, origin)
        select 'stripe', '', 'evt_' || n, 'stripe', 'invoice.paid',
          case when n % 1000 then 'done' else 'quarantined' end, 0, 1,
          0, n, n, 'done', iif(n % 1000, n, null), 'env:STRIPE', 'json', zeroblob(32), 1, 'r',
          'delivery'
        from numbers
        """,
        (events,),
    )
    tx.db.execute(
        """
        insert into receiver_outbox (
          operation_key, source, account, subject, operation, destination, name, state, attempts,
          body, event, created_ms, settled_ms)
        select id, 'stripe', '', id, 'o', 'team', '', iif(id % 1000, 'sent', 'review'), 1,
          '{}', id, 1, iif(id % 1000, 1, null)
        from receiver_events where id <= ?
        """,
        (events // 4,),
    )


def test_a_look_uses_an_index_for_everything_that_grows(world: World) -> None:
    world.store.write(lambda tx: fill(tx, 5_000))
    asked: list[tuple[str, Any]] = []
    grows = ("receiver_events", "receiver_outbox", "receiver_payloads", "receiver_operations")

    def trace(cursor: apsw.Cursor, statement: str, bindings: Any) -> bool:
        asked.append((statement, bindings))
        return True

    with snapshot(world.processor.settings.database) as seen:
        seen.db.exec_trace = trace
        facts.look(seen, world.processor.settings, NOW_MS, facts.Disk(1, 1, 1, 1))
        seen.db.exec_trace = None
        plans = {
            statement: [
                row[3] for row in seen.db.execute(f"explain query plan {statement}", values)
            ]
            for statement, values in asked
            if any(table in statement for table in grows)
        }

    assert len(plans) >= 8
    for statement, plan in plans.items():
        for step in plan:
            scans = step.startswith("SCAN ") and any(table in step for table in grows)
            # A partial index that is read whole holds unfinished ones only.
            assert not scans or " INDEX receiver_" in step, (statement, plan)


def test_a_look_at_many_events_is_fast(tmp_path: Path, clock: Clock, world: World) -> None:
    path = tmp_path / "many.db"
    store = Store.create(path, clock)
    store.write(lambda tx: fill(tx, EVENTS))
    settings = world.processor.settings
    try:
        with snapshot(path) as seen:
            took = []
            for _ in range(5):
                started = time.perf_counter()
                found = facts.look(seen, settings, NOW_MS, facts.disk_of(path))
                took.append(time.perf_counter() - started)
    finally:
        store.close()

    assert found.events["settled"] == EVENTS - EVENTS // 1000
    assert found.owed("review") == EVENTS // 4000
    assert min(took) < LOOK_S


def pinged(answer: str) -> Script:
    def play(far: Far, connection: socket.socket) -> None:
        far.requests.append(connection.recv(65_536).partition(b" HTTP")[0])
        connection.sendall(f"HTTP/1.1 {answer}\r\nContent-Length: 0\r\n\r\n".encode())

    return play


def test_only_while_nothing_needs_anybody_the_url_is_pinged(world: World, run: Command) -> None:
    with serving(part, pinged("200 OK")) as far:
        (world.folder / "ping").write_text(f"http://127.0.0.1:{far.port}/secret\n")
        fine = run("status", "--quiet", "--ping", f"file:{world.folder}/ping")
        world.store.write(lambda tx: an_event(tx, "quarantined"))
        needed = run("status", "--quiet", "--ping", f"file:{world.folder}/ping")

    assert (fine.code, fine.out, needed.code) == (0, "", 1)
    assert far.requests == [b"GET /secret"], "and once more where nobody had answered"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://127.0.0.1:{port}/secret", "the answer was 404"),
        ("ftp://127.0.0.1/secret", "is no URL that begins with https://"),
    ],
)
def test_a_ping_that_is_not_taken_is_told_without_its_url(
    world: World, run: Command, url: str, problem: str
) -> None:
    with serving(pinged("404 Not Found")) as far:
        (world.folder / "ping").write_text(url.format(port=far.port))

        ran = run("status", "--ping", f"file:{world.folder}/ping")

    assert ran.code == 1
    assert ran.err == f"receiver: --ping: {problem}\n"
