"""What a start imports: each module that stands in a function for speed stays out of these."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service import ROOT, Service, Start, checkout, services

# Slow to import, and not for everybody.
SENDING = {"urllib3", "smtplib", "receiver.send_http", "receiver.send_email", "receiver.client"}
BY_HAND = {"receiver.operate", "receiver.named", "receiver.samples", "receiver.explain"}
LATER = {"receiver.readers", "receiver.reconcile", "receiver.silence"}
LIBRARIES = {"jmespath", "prometheus_client", "cryptography", "importlib.resources", "difflib"}
RARE = SENDING | BY_HAND | LATER | LIBRARIES
SERVER = {"uvicorn", "starlette", "uvloop", "httptools", "structlog", "asyncio", "ssl", "email"}
JUDGING = {"receiver.config", "receiver.presets", "receiver.verify", "receiver.rules"}
FILE = {"apsw", "msgspec", "store.database", "tomllib"}
COMMON = {"logging", "json", "shutil", "textwrap", "secrets"}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    # Python writes a line for each module, as with -X importtime.
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    with services(tmp_path) as made:
        yield made


def imported(said: str) -> set[str]:
    found = set(re.findall(r"^import time: +\d+ \| +\d+ \| +(\S+)$", said, re.MULTILINE))
    assert "click" in found, "the lines are those of Python"
    return found


def test_the_version_imports_no_more_than_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")

    said = subprocess.run(
        [sys.executable, "-m", "cli", "--version"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert not imported(said.stderr) & (RARE | SERVER | JUDGING | FILE | COMMON)


def test_a_listing_imports_neither_the_server_nor_what_judges_events(start: Start) -> None:
    service = start()
    assert service.deliver(checkout("evt_1")) == "done"

    listed = service.command("events", "list")

    assert "evt_1" in listed.stdout
    assert not imported(listed.stderr) & (RARE | SERVER | JUDGING)


def test_a_server_imports_nothing_rare_before_its_first_answer(start: Start) -> None:
    service: Service = start()

    assert service.deliver(checkout("evt_1")) == "done"

    found = imported(service.log)
    assert "uvicorn" in found
    assert not found & RARE
