"""The commands that keep the data beside a server under load, and beside none."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service import Service, Start, checkout, invoice, services, until
from tests.test_backup import Load

COMMANDS = (
    ("backup", "--json"),
    ("prune", "--json"),
    ("export",),
    ("export", "events", "--payload"),
    ("redact", "evt_first", "--yes", "--reason", "a test"),
    ("doctor", "--json", "--offline"),
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with services(tmp_path) as starting:
        yield starting


def run_all(service: Service) -> None:
    for words in COMMANDS:
        ran = service.command(*words)
        assert "locked" not in ran.stdout + ran.stderr, words
        # The doctor has something to say of any machine that tests run on.
        assert ran.returncode == 0 or words[0] == "doctor", (words, ran.stderr)
        if words[0] == "doctor":
            assert "database is" not in ran.stdout
            assert json.loads(ran.stdout)["checklist"]


def test_they_work_while_the_server_is_under_load_and_while_it_is_down(start: Start) -> None:
    service = start()
    service.deliver(checkout("evt_link"))
    service.deliver(invoice("evt_first", "in_first"))
    with Load(service) as load:
        until(lambda: len(load.acknowledged) > 200)
        run_all(service)
        during = len(load.acknowledged)
        until(lambda: len(load.acknowledged) > during)
    assert load.surprises == []
    assert service.stop() == 0
    assert "locked" not in service.log

    run_all(service)

    service.start()
    service.assert_books_balance()


def test_prune_beside_a_server_under_load_takes_every_old_payload(start: Start) -> None:
    service = start()
    service.deliver(checkout("evt_link"))
    with Load(service) as load:
        until(lambda: len(load.acknowledged) > 600)
    assert service.stop() == 0
    age_all(service)
    old = service.value("select count(*) from receiver_payloads")
    service.start()
    with Load(service) as again:
        ran = service.command("prune", "--json")

    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["events"] == old
    assert again.surprises == [] or set(again.surprises) == {"200 duplicate"}
    assert service.value("select count(*) from receiver_forgotten") == old
    service.assert_books_balance()


def age_all(service: Service) -> None:
    with sqlite3.connect(service.database) as db:
        db.execute("update receiver_events set received_ms = 1")
    db.close()
