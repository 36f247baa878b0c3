"""Every command works beside a server under load, and while there is none."""

import collections
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import Command
from tests.service import (
    SECRETS,
    STRIPE_CONFIG,
    Service,
    checkout,
    invoice,
    services,
    stripe_request,
    word,
)

#: Connections that deliver without a pause.
SENDERS = 6
RULES = """
[[rules]]
operation = "announce"
source = "stripe"
on = ["announced"]
subject = "data.object.id"
send = [{ to = "nowhere" }]

[destinations.nowhere]
kind = "http"
url = "http://127.0.0.1:1/"
"""
READS = (
    "events list",
    "events list --state parked --since 1h",
    "events list --source stripe --type invoice.paid",
    "events list --workspace acme",
    "events show evt_parked",
    "events show in_known",
    "parked list",
    "conflicts list",
    "conflicts show 1",
    "rejections list",
    "outbox list",
    "outbox show 1",
    "links list",
    "ledger list",
    "ledger list --workspace acme",
    "balance",
    "records",
    "audit",
    "sources list",
    "sources show stripe",
    "check",
)
ACTS = (
    "links add stripe cus_N wN --reason test",
    "replay evt_known --reason test",
    "replay evt_known --dry-run",
    "replay --type invoice.paid --state done --since 2s --dry-run",
    "ledger adjust --workspace acme --unit credits --amount 1 --key kN --reason test",
    "ledger revert stripe/in_known/initial-credit-grant --amount 1 --reason test",
    "outbox retry 1",
    "links remove stripe cus_N",
)


class Load:
    """Deliveries on several connections, as fast as they are answered."""

    def __init__(self, service: Service) -> None:
        self.answers: collections.Counter[str] = collections.Counter()
        self._service = service
        self._over = threading.Event()
        self._numbers = itertools.count()
        self._threads = [threading.Thread(target=self._send) for _ in range(SENDERS)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        with self._service.wire() as wire:
            while not self._over.is_set():
                number = next(self._numbers)
                body = invoice(f"evt_{number}", f"in_{number}", "cus_known")
                self.answers[word(wire.ask(stripe_request(body)))] += 1


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    with services(tmp_path) as start:
        service = start(STRIPE_CONFIG + RULES)
        service.deliver(checkout("evt_link", "cus_known"))
        service.deliver(invoice("evt_known", "in_known", "cus_known"))
        service.deliver(invoice("evt_known", "in_known", "cus_known", other=1))
        service.deliver(invoice("evt_parked", "in_parked", "cus_new"))
        announced = json.dumps(
            {"id": "evt_a", "type": "announced", "livemode": False, "data": {"object": {"id": "a"}}}
        )
        service.deliver(announced.encode())
        yield service


def problems(service: Service, turn: int) -> list[str]:
    """What each command that failed said; each is run once."""
    failed = []
    for line in (*READS, *(act.replace("N", str(turn)) for act in ACTS)):
        code, told = run(service, line.split())
        # A message may be in the hands of the worker.
        busy = line.startswith("outbox") and "a worker is trying" in told
        if (code != 0 and not busy) or "locked" in told:
            failed.append(f"{line}: {code} {told[-500:]}")
    return failed


def run(service: Service, words: list[str]) -> tuple[int, str]:
    """The exit code of a command, and what it printed."""
    if "--dry-run" in words:
        # It would keep the senders in this process from connecting.
        done = service.command(*words)
        return done.returncode, done.stdout + done.stderr
    ran = Command.on(service.folder)(*words)
    return ran.code, ran.out + ran.err


def test_all_commands_work_beside_a_loaded_server_and_neither_side_is_locked_out(
    service: Service,
) -> None:
    with Load(service) as load:
        failed = problems(service, 1)

    assert failed == []
    assert set(load.answers) == {"done"}
    assert load.answers["done"] > 100
    assert "locked" not in service.log
    assert service.value("select count(*) from receiver_events where type = 'invoice.paid'") == (
        load.answers["done"] + 2
    )
    service.assert_books_balance()


def test_all_commands_work_while_the_server_is_down(service: Service) -> None:
    service.stop()
    after_stop = problems(service, 1)
    service.start()
    service.kill()

    assert after_stop == []
    assert problems(service, 2) == []
    service.assert_books_balance()


def test_a_server_that_starts_meanwhile_is_not_kept_waiting(service: Service) -> None:
    service.stop()
    over = threading.Event()
    failed: list[str] = []

    def operate() -> None:
        for turn in itertools.count(3):
            if over.is_set():
                return
            failed.extend(problems(service, turn))

    operator = threading.Thread(target=operate)
    operator.start()
    try:
        service.start()
        service.deliver(invoice("evt_new", "in_new", "cus_known"))
    finally:
        over.set()
        operator.join()

    assert failed == []
