"""Alerts through the real thing: a server, its file, and the other side that hears of them."""

import contextlib
import functools
import http.client
import json
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from receiver.signing import sign
from store import reconciles
from tests.command import Command
from tests.conftest import Clock, stripe_body
from tests.far_side import Far, answering, part, serving
from tests.processes import Place, Running, placing
from tests.service import until

OK = answering(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
NO = answering(b"HTTP/1.1 400 No\r\nContent-Length: 0\r\n\r\n")
BUSY = answering(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")
#: The other side takes the request and goes away.
GONE = answering(b"", then=part)

#: The processes' clock is ahead by what a file says, and they look often.
BEFORE = """
import pathlib, time
real = time.time_ns
time.time_ns = lambda: real() + int(pathlib.Path("ahead").read_text()) * 1_000_000
from receiver import watch
watch.LOOK_S, watch.GATHER_MS = 0.05, 0
"""
HANDLERS = """
from receiver import Park

def owe(event, tx):
    order = event.body["data"]["object"]
    if order["to"] == "park":
        raise Park("nobody knows")
    if order["to"] == "fail":
        raise ValueError("it fails")
    tx.send(order["to"])
"""
ALERTS = """
[alerts]
to = "team"
remind_h = 8760
oldest_unfinished_s = 300
parked_too_long_s = 60
disk_free_percent = 1
backup_age_s = 31536000
"""
MINUTE_MS = 60_000


class Ahead(Clock):
    """The clock of the processes."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "ahead"
        self.ahead_ms = 0
        self.move(0)

    def move(self, by_ms: int) -> None:
        self.ahead_ms += by_ms
        new = self._file.with_suffix(".new")
        new.write_text(str(self.ahead_ms))
        # Whole at every moment: it is read all the time.
        new.rename(self._file)

    def __call__(self) -> int:
        return time.time_ns() // 1_000_000 + self.ahead_ms


class Scene:
    """A server whose alerts reach the other side, and an operator."""

    def __init__(
        self, place: Place, running: Running, clock: Ahead, team: Far, run: Command
    ) -> None:
        self.place, self.running, self.clock, self.team = place, running, clock, team
        #: A command of the operator, by the same clock.
        self.run = run

    def post(self, name: str, to: str, **of: Any) -> None:
        body = stripe_body(name, of.pop("type", "owe"), id=name, to=to, **of)
        assert self.place.post(self.running, "stripe", body)[0] == 200

    def refused(self, body: bytes, *, secret: bytes | None = None, late_ms: int = 0) -> None:
        """Send one that is signed otherwise, or too late."""
        contract = self.place.processor.settings.sources["stripe"].contract
        secret = secret or contract.secrets[0].value
        headers = sign(contract.preset, secret, body, now_ms=self.clock() - late_ms)
        client = http.client.HTTPConnection(self.place.address(self.running), timeout=20)
        with contextlib.closing(client):
            client.request("POST", "/webhooks/stripe", body, dict(headers))
            assert client.getresponse().status == 401

    def told(self, alert: str) -> int:
        """How often the other side heard of an alert."""
        texts = [json.loads(one.partition(b"\r\n\r\n")[2])["text"] for one in self.team.requests]
        return sum(f"\n- {alert}: " in text for text in texts)

    def heard(self, alerts: Sequence[str]) -> bool:
        return all(self.told(alert) == 1 for alert in alerts)

    def open(self) -> list[str]:
        rows = self.place.query("select name, subject from receiver_alerts where closed_ms is null")
        return [f"{name} ({subject})" if subject else name for name, subject in rows]

    def act(self, *arguments: str) -> None:
        ran = self.run(*arguments)
        assert ran.code == 0, ran.err

    def resolve(self, name: str) -> None:
        self.act("events", "resolve", name, "--reason", "looked at")

    def message(self, to: str) -> str:
        """The number of the message that is owed to a destination."""
        return str(self.place.value("select id from receiver_outbox where destination = ?", to))

    def reload(self, **of: str) -> None:
        path = self.place.folder / "receiver.toml"
        for key, value in of.items():
            path.write_text(re.sub(rf"(?m)^{key} = .*$", f"{key} = {value}", path.read_text()))
        before = self.running.log.count(": done")
        self.running.signal(signal.SIGHUP)
        until(lambda: self.running.log.count(": done") > before)


def sends(name: str, far: Far, more: str = "") -> str:
    url = f"http://127.0.0.1:{far.port}/"
    return f'\n[destinations.{name}]\nkind = "http"\nurl = "{url}"\n{more}\n'


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    with (
        serving(OK) as team,
        serving(NO) as refusing,
        serving(GONE) as gone,
        serving(BUSY) as busy,
        placing(tmp_path) as make,
    ):
        config = (
            sends("team", team)
            + sends("refusing", refusing)
            + sends("gone", gone, 'ambiguous = "review"')
            + sends("busy", busy, "attempts_max = 100")
            + ALERTS
        )
        place = make(config, run="inside", handlers=HANDLERS)
        text = (tmp_path / "receiver.toml").read_text()
        text = text.replace("threads = 2", "threads = 2\nattempts_max = 1", 1)
        (tmp_path / "receiver.toml").write_text(text.replace("\n[sources.github]", GITHUB, 1))
        place.clock = clock = Ahead(tmp_path)
        running = place.serve(before=BEFORE)
        yield Scene(place, running, clock, team, Command(place, monkeypatch))


GITHUB = "silence_s = 1000000\n\n[sources.github]"


def quarantine(scene: Scene) -> None:
    scene.post("evt_q", "team", envelope={"livemode": None})


def conflict(scene: Scene) -> None:
    scene.post("evt_c", "", type="nothing")
    scene.post("evt_c", "", type="nothing", other="content")


def park(scene: Scene) -> None:
    scene.post("evt_p", "park")
    scene.clock.move(2 * MINUTE_MS)


def fail(scene: Scene) -> None:
    for number in range(5):
        scene.post(f"evt_f{number}", "fail")


def resolve_failed(scene: Scene) -> None:
    for number in range(5):
        scene.resolve(f"evt_f{number}")


def stay_pending(scene: Scene) -> None:
    scene.post("evt_b", "busy")
    scene.clock.move(6 * MINUTE_MS)


def come_late(scene: Scene) -> None:
    for number in range(3):
        scene.refused(stripe_body(f"evt_l{number}", "owe"), late_ms=10 * MINUTE_MS)


def forge(scene: Scene) -> None:
    for number in range(40):
        scene.refused(stripe_body(f"evt_x{number}", "owe"), secret=b"whsec_of_another")


def reconcile(scene: Scene, gap: int = 3) -> None:
    write = scene.place.store.write
    run = write(lambda tx: reconciles.begin(tx, "stripe"))
    write(lambda tx: reconciles.end(tx, run, gap))


Act = Callable[[Scene], object]

#: What the other side hears, what causes it, and what an operator or time does about it.
CASES: list[tuple[tuple[str, ...], Act, Act]] = [
    (("quarantined",), quarantine, lambda scene: scene.resolve("evt_q")),
    (("conflicts",), conflict, lambda scene: scene.act("conflicts", "resolve", "1")),
    (("parked-too-long",), park, lambda scene: scene.resolve("evt_p")),
    (("dead (events)", "failures-of-type (stripe/owe)"), fail, resolve_failed),
    (
        ("dead (messages)",),
        lambda scene: scene.post("evt_m", "refusing"),
        lambda scene: scene.act("outbox", "cancel", scene.message("refusing")),
    ),
    (
        ("review",),
        lambda scene: scene.post("evt_r", "gone"),
        lambda scene: scene.act("outbox", "resolve", scene.message("gone"), "--sent"),
    ),
    (
        ("oldest-unfinished (messages)",),
        stay_pending,
        lambda scene: scene.act("outbox", "cancel", scene.message("busy")),
    ),
    (("wrong-clock (stripe)",), come_late, lambda scene: scene.clock.move(11 * MINUTE_MS)),
    (("rejection-rate (stripe)",), forge, lambda scene: scene.clock.move(90 * MINUTE_MS)),
    (("reconcile-gap (stripe)",), reconcile, lambda scene: reconcile(scene, 0)),
    (
        ("disk-free",),
        lambda scene: scene.reload(disk_free_percent="100"),
        lambda scene: scene.reload(disk_free_percent="false"),
    ),
    (
        ("silence (stripe)",),
        lambda scene: scene.clock.move(1_000_100_000),
        lambda scene: scene.post("evt_s", "", type="nothing"),
    ),
    (
        ("backup-age",),
        lambda scene: scene.reload(backup_age_s="60"),
        lambda scene: scene.act("backup", str(scene.place.folder / "copy.db")),
    ),
]


def test_each_alert_is_told_once_and_closes_and_then_status_needs_nobody(scene: Scene) -> None:
    assert scene.run("status").code == 0

    for names, cause, cure in CASES:
        cause(scene)
        until(functools.partial(scene.heard, names))
        ran = scene.run("status", "--quiet")
        assert ran.code == 1, names
        assert len(ran.out.splitlines()) == len(names), ran.out
        assert sorted(scene.open()) == sorted(names)

        cure(scene)
        until(lambda: scene.open() == [])
        assert scene.run("status", "--quiet").code == 0, names

    heard = [name for names, *_ in CASES for name in names]
    assert [scene.told(name) for name in heard] == [1] * len(heard)
    assert len(scene.team.requests) <= len(heard)
    assert scene.running.stop() == 0
