"""`receiver work` as a process of its own, beside whoever receives."""

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.command import Command
from tests.conftest import CONFIG, World
from tests.far_side import unused_port
from tests.processes import Peer
from tests.service import until
from tests.test_cli import PATIENCE_S, ended, receiver
from tests.test_worker import SENDING, message, peer

__all__ = ["peer"]


@pytest.fixture
def apart(world: World, peer: Peer) -> World:
    """A config whose worker runs apart, with a queued source and a destination."""
    # A process of its own has the real time.
    world.clock.now_ms = time.time_ns() // 1_000_000
    text = CONFIG.replace('run = "off"', 'run = "separate"').replace(
        "[sources.stripe]", '[sources.stripe]\nmode = "queued"'
    )
    world.configure(text + SENDING.replace("URL", peer.url()))
    return world


@contextmanager
def working(world: World, end: int = signal.SIGTERM) -> Iterator["subprocess.Popen[str]"]:
    """`receiver work` until the signal `end`, after the block; its log goes to the file `log`."""
    with (world.folder / "log").open("w") as log:
        process = receiver("work", cwd=world.folder, stderr=log)
    try:
        until(lambda: "working on" in log_of(world), PATIENCE_S)
        yield process
        process.send_signal(end)
        assert ended(process)[:2] == (0, "")
    finally:
        process.kill()
        process.communicate()


def log_of(world: World) -> str:
    return (world.folder / "log").read_text()


def test_it_applies_what_was_queued_and_sends_what_is_owed(apart: World, peer: Peer) -> None:
    apart.stripe("evt_1", "invoice.announced", id="in_1")

    with working(apart):
        until(lambda: peer.seen != [], PATIENCE_S)
        # What another process commits while it sleeps wakes it.
        apart.clock.now_ms = time.time_ns() // 1_000_000
        apart.stripe("evt_2", "invoice.announced", id="in_2")
        sent = "select count(*) from receiver_outbox where state = 'sent'"
        until(lambda: apart.query(sent) == [(4,)], PATIENCE_S)
    assert {json.loads(one.body)["invoice"] for one in peer.seen} == {"in_1", "in_2"}
    assert [apart.state(name) for name in ("evt_1", "evt_2")] == ["done", "done"]


def test_it_applies_what_was_released_without_a_server(apart: World, peer: Peer) -> None:
    apart.invoice("evt_1", "in_1", source="connect")
    apart.stripe("evt_2", "credit_note.created", id="cn_1", invoice="in_1", credits=30)

    with working(apart):
        until(lambda: apart.state("evt_2") == "parked", PATIENCE_S)
        # As the app does it. What that releases grants, and so releases the other.
        apart.query("insert into receiver_links values ('stripe', '', 'cus_1', 'acme', 1)")
        until(lambda: apart.state("evt_2") == "done", PATIENCE_S)

    assert (apart.state("evt_1"), apart.balance()) == ("done", 70)


def test_it_says_what_it_works_on_and_when_it_stopped(apart: World, peer: Peer) -> None:
    with working(apart, signal.SIGINT):
        pass
    told = [line.split(" ", 2)[2] for line in log_of(apart).splitlines() if " INFO " in line]
    assert told == [
        f"working on {apart.folder / 'receiver.db'}",
        "queued source stripe",
        f"destination app: http to {peer.url('')}",
        "stopped",
    ]


@pytest.mark.parametrize("broken", ["nonsense = 1\n", '[worker]\nrun = "separate"\n'])
def test_a_config_that_broke_is_not_taken_and_a_new_destination_is(
    apart: World, peer: Peer, broken: str
) -> None:
    path = apart.folder / "receiver.toml"
    good = path.read_text()

    with working(apart) as process:
        path.write_text(broken)
        process.send_signal(signal.SIGHUP)
        until(lambda: "the old config stays in force" in log_of(apart), PATIENCE_S)
        apart.configure(good.replace("app", "other"))
        process.send_signal(signal.SIGHUP)
        until(lambda: "reload" in log_of(apart) and ": done" in log_of(apart), PATIENCE_S)
        apart.stripe("evt_1", "invoice.announced", id="in_1")
        until(lambda: len(peer.seen) == 2, PATIENCE_S)

    assert message(apart).destination == "other"


def test_a_reload_says_what_it_does_not_take(apart: World) -> None:
    path = apart.folder / "receiver.toml"

    with working(apart) as process:
        text = 'database = "other.db"\n' + path.read_text()
        path.write_text(text.replace('run = "separate"', 'run = "inside"\nthreads = 3'))
        process.send_signal(signal.SIGHUP)
        until(lambda: ": done" in log_of(apart), PATIENCE_S)

    found = re.findall(r": (\S+) changed; restart to use it$", log_of(apart), re.MULTILINE)
    assert found == ["database", "worker.run", "worker.threads"]


@pytest.mark.parametrize(
    ("run", "words"),
    [("inside", "`receiver serve` does this work"), ("off", "nothing is worked on")],
)
def test_it_refuses_where_the_worker_is_not_to_run_apart(
    world: World, monkeypatch: pytest.MonkeyPatch, run: str, words: str
) -> None:
    monkeypatch.setenv("STRIPE", "whsec_x")
    monkeypatch.setenv("GITHUB", "x")
    monkeypatch.setenv("SHOPIFY", "x")
    world.configure(CONFIG.replace('run = "off"', f'run = "{run}"'))

    ran = Command(world, monkeypatch)("work")

    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("receiver: worker.run: ")
    assert words in ran.err
    assert '"separate"' in ran.err


def test_the_server_says_where_the_worker_runs(apart: World, peer: Peer) -> None:
    path = apart.folder / "receiver.toml"
    server = (
        f'[server]\nlisten = "127.0.0.1:{unused_port()}"\nadmin = "127.0.0.1:{unused_port()}"\n'
    )
    path.write_text(path.read_text().replace("[worker]", f"{server}[worker]", 1))
    with (apart.folder / "log").open("w") as log:
        process = receiver("serve", cwd=apart.folder, stderr=log)
    try:
        until(lambda: "destination app: http" in log_of(apart), PATIENCE_S)
    finally:
        process.terminate()
        ended(process)

    assert re.search(r" INFO worker apart, as `receiver work`\n", log_of(apart))
