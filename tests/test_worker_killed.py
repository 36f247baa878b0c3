"""`kill -9` of a worker at each step of a send: nothing is lost, and doubled where allowed."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiosmtpd.controller import Controller

from store import attempts, outbox
from tests.processes import Peer, Place, crowded, destination, peering, placing
from tests.service import PATIENCE_S, held_lock, until

#: The restarted worker's clock is ahead by more than a lease lasts: 10 s and LEASE_SPARE_S.
LATER_S = 60

POLICIES = {
    "retry": "",
    "review": 'ambiguous = "review"',
    "honoured": 'ambiguous = "review"\nidempotent_for_s = 3600',
    "forgotten": "idempotent_for_s = 30",
}
REPEATED = ("retry", "honoured")
STEPS = ("before", "left", "accepted")

# Waits until it is let go, like a deploy that takes its time.
PROGRAM = """#!/bin/sh
echo "$RECEIVER_OPERATION_KEY $RECEIVER_ATTEMPT" >> "$1/ran"
until test -e "$1/go"; do sleep 0.01; done
"""


class Mailbox:
    """Takes mail, and says so once its gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.ids: list[str] = []

    async def handle_DATA(self, server: object, session: object, envelope: Any) -> str:
        lines = envelope.content.decode().splitlines()
        self.ids += [line for line in lines if line.lower().startswith("message-id:")]
        await asyncio.to_thread(self.gate.wait)
        return "250 taken"


@contextlib.contextmanager
def mailing() -> Iterator[tuple[Mailbox, int]]:
    mailbox = Mailbox()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    controller = Controller(mailbox, "127.0.0.1", port)
    controller.start()
    try:
        yield mailbox, port
    finally:
        mailbox.gate.set()
        controller.stop()


class Killed(NamedTuple):
    """What a killed and restarted worker left, and what the other sides saw."""

    place: Place
    peers: dict[str, Peer]
    mailbox: Mailbox


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    """One worker with a send at each step to a destination of each policy, killed then."""
    folder = tmp_path_factory.mktemp("killed")
    program = folder / "deploy"
    program.write_text(PROGRAM)
    program.chmod(0o700)
    with contextlib.ExitStack() as stack:
        peers = {step: stack.enter_context(peering(started=False)) for step in STEPS}
        mailbox, smtp_port = stack.enter_context(mailing())
        place = stack.enter_context(placing(folder))(config(peers, smtp_port, program), threads=1)
        for step in STEPS:
            for policy in POLICIES:
                place.owe(f"{step}-{policy}")
        for name in ("mail", "deploy"):
            place.owe(name)
        kill(place, peers, mailbox)
        (folder / "go").touch()
        place.work(ahead_s=LATER_S)
        unfinished = "select count(*) from receiver_outbox where state = 'pending'"
        place.wait_for(0, unfinished)
        yield Killed(place, peers, mailbox)


def config(peers: dict[str, Peer], smtp_port: int, program: Path) -> str:
    http = [
        destination(f"{step}-{policy}", peers[step].url(f"/{policy}"), lines)
        for step in STEPS
        for policy, lines in POLICIES.items()
    ]
    others = f"""
[destinations.mail]
kind = "email"
smtp = "smtp://127.0.0.1:{smtp_port}"
from = "billing@example.com"
to = "ann@example.com"
subject = "Paid"
text = "Thank you."

[destinations.deploy]
kind = "command"
argv = ["{program}", "{program.parent}"]
timeout_s = 10
"""
    return "".join(http) + others


def kill(place: Place, peers: dict[str, Peer], mailbox: Mailbox) -> None:
    """Bring each send to its step, then kill the worker."""
    ran = place.folder / "ran"
    peers["left"].gate.clear()
    peers["left"].start()
    peers["accepted"].gate.clear()
    peers["accepted"].start()
    with crowded(peers["before"]):
        worker = place.work()
        place.wait_for(
            len(STEPS) * len(POLICIES) + 2,
            "select count(*) from receiver_outbox where lease_owner is not null",
        )
        until(lambda: len(peers["left"].seen) == len(peers["accepted"].seen) == len(POLICIES))
        until(lambda: len(mailbox.ids) == 1 and ran.exists())
        with held_lock(place.database):
            peers["accepted"].gate.set()
            until(lambda: len(peers["accepted"].answered) == len(POLICIES))
            worker.kill()
    for gate in (mailbox.gate, peers["left"].gate):
        gate.set()
    peers["before"].start()


def story(place: Place, name: str) -> tuple[str, list[str | None]]:
    """The state of the one message to a destination, and the outcomes of its attempts."""
    [message] = place.store.write(lambda tx: outbox.listed(tx, destination=name))
    tried = place.store.write(lambda tx: attempts.of_message(tx, message.id))
    assert [one.attempt for one in tried] == list(range(1, len(tried) + 1))
    return message.state, [one.outcome for one in tried]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("policy", POLICIES)
def test_after_a_kill_the_policy_decides_and_nothing_is_lost(
    killed: Killed, step: str, policy: str
) -> None:
    keys = killed.peers[step].keys(f"/{policy}")
    before = 0 if step == "before" else 1
    if policy in REPEATED:
        assert story(killed.place, f"{step}-{policy}") == ("sent", ["unknown", "sent"])
        assert len(keys) == before + 1
    else:
        assert story(killed.place, f"{step}-{policy}") == ("review", ["unknown"])
        assert len(keys) == before
    # What is repeated is repeated under the same name.
    assert len(set(keys)) <= 1


def test_after_a_kill_mail_is_repeated_with_the_same_message_id(killed: Killed) -> None:
    assert story(killed.place, "mail") == ("sent", ["unknown", "sent"])
    first, second = killed.mailbox.ids
    assert first == second


def test_after_a_kill_a_program_is_run_again_under_the_same_key(killed: Killed) -> None:
    assert story(killed.place, "deploy") == ("sent", ["unknown", "sent"])
    ran = [line.split() for line in (killed.place.folder / "ran").read_text().splitlines()]
    (first, number), (second, again) = ran
    assert first == second
    assert (number, again) == ("1", "2")


def test_what_was_sent_and_marked_is_not_sent_again_after_a_kill(tmp_path: Path) -> None:
    with peering() as peer, placing(tmp_path) as places:
        place = places(destination("app", peer.url()))
        place.owe("app", "one")
        worker = place.work()
        place.wait_for("sent", "select state from receiver_outbox")
        worker.kill()

        place.owe("app", "two")
        place.work(ahead_s=LATER_S)
        place.wait_for(2, "select count(*) from receiver_outbox where state = 'sent'")

        assert len(set(peer.keys("/"))) == len(peer.seen) == 2


def test_a_restarted_worker_leaves_a_lease_alone_while_it_lasts(tmp_path: Path) -> None:
    with peering() as peer, placing(tmp_path) as places:
        place = places(destination("app", peer.url()), threads=1)
        peer.gate.clear()
        place.owe("app", "one")
        worker = place.work()
        until(lambda: len(peer.seen) == 1)
        worker.kill()
        peer.gate.set()

        place.owe("app", "two")
        place.work()
        place.wait_for(1, "select count(*) from receiver_outbox where state = 'sent'")

        assert len(set(peer.keys("/"))) == len(peer.seen) == 2
        held = "select subject from receiver_outbox where lease_owner is not null"
        assert place.query(held) == [("app-one",)]


# Says where it is, and goes on once it may: so it can be killed in the middle.
SLOW = """
import os
import pathlib
import time

FOLDER = pathlib.Path(__file__).parent


def wait(step):
    (FOLDER / f"{step}-{os.getpid()}").touch()
    while not (FOLDER / f"go-{os.getpid()}").exists() and not (FOLDER / "go").exists():
        time.sleep(0.01)


def ask(event):
    if event.id == "ask":
        wait("ask")
    return int((FOLDER / "amount").read_text())


def use(event, tx):
    tx.grant("credits", event.prepared, workspace="acme")
    if event.id == "use":
        wait("use")
"""

SLOW_RULE = """
[[rules]]
operation = "give"
source = "queue"
on = ["give"]
subject = "data.object.id"
prepare = "ask"
call = "use"
"""


@pytest.mark.parametrize("step", ["ask", "use"])
def test_a_queued_event_whose_worker_was_killed_is_applied_once(tmp_path: Path, step: str) -> None:
    with placing(tmp_path) as places:
        place = places(SLOW_RULE, handlers=SLOW + "\n\ndef owe(event, tx):\n    pass\n")
        (tmp_path / "amount").write_text("40")
        assert place.stripe(step, "give", source="queue", id="one") == "pending"
        worker = place.work()
        until(lambda: (tmp_path / f"{step}-{worker.pid}").exists(), PATIENCE_S)
        worker.kill()

        (tmp_path / "go").touch()
        place.work(ahead_s=600)
        place.wait_for("done", "select state from receiver_events")

        assert place.balance() == 40
        tried = "select attempt, outcome from receiver_attempts order by 1"
        assert place.query(tried) == [(1, "unknown"), (2, "done")]
