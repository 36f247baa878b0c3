"""Alerts: each opens once, is told once, and closes when its cause is gone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from receiver import facts, watch
from receiver.config import ConfigError, load
from receiver.facts import Disk
from receiver.watch import FLAP_MS, GATHER_MS, HOUR_MS, Watch
from store import alerts, backups, fetches, inbox, outbox, parked, reconciles, rejections, tallies
from store.backups import Backup
from store.database import Tx
from store.operations import Key
from store.parked import Fact
from store.rejections import Request
from store.resources import Name
from store.tallies import What
from tests.conftest import CONFIG, SECRETS, World

CONFIG = (
    CONFIG.replace('scheme = "stripe"\n', 'scheme = "stripe"\nsilence_s = 3600\n', 1)
    + """
[alerts]
to = "team"

[destinations.team]
kind = "http"
url = "http://127.0.0.1:1/"
"""
)
ROOM = Disk(1_000, 0, 90_000, 100_000)


class Watched:
    """A watch on the file of a World."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch, config: str = CONFIG) -> None:
        self.world = world
        self.disk = ROOM
        #: Whether the messages reach the other side.
        self.arrives = True
        world.configure(config)
        monkeypatch.setattr(facts, "disk_of", lambda database: self.disk)
        self.watch = Watch(
            lambda: world.processor.settings,
            lambda run, keep=None: world.store.write(run),
            world.clock,
            sends=True,
        )

    def look(self, after_ms: int = 0) -> None:
        """Let time pass, and let the watch look."""
        self.world.clock.now_ms += after_ms
        if self.arrives:
            self.world.store.write(
                lambda tx: tx.db.execute(
                    "update receiver_outbox set state = 'sent', settled_ms = 1, "
                    "next_attempt_ms = null where operation = 'alert'"
                )
            )
        self.watch.step()

    @property
    def open(self) -> list[str]:
        found = self.world.store.write(alerts.opened)
        return [f"{one.name} {one.subject}".rstrip() for one in found]

    @property
    def told(self) -> list[str]:
        """What each message says, the oldest first."""
        rows = self.world.query("select body, state from receiver_outbox where operation = 'alert'")
        return [json.loads(body)["json"]["text"] for body, _ in rows]


@pytest.fixture
def watched(world: World, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(world, monkeypatch)


def an_event(tx: Tx, state: str, *, type: str = "a.b") -> int:
    number = len(tx.db.execute("select 1 from receiver_events").fetchall())
    row = inbox.insert(
        tx,
        source="stripe",
        account="",
        event_id=f"evt_{number}",
        endpoint="stripe",
        type=type,
        received_ms=tx.now_ms,
        secret="env:STRIPE",
        content_type="json",
        body=b"{}",
        body_sha256=b"x" * 32,
        id_signed=True,
        claimed_account=None,
        request_id="r",
        queued=state == "pending",
    )
    assert row is not None
    if state not in ("pending", "done"):
        inbox.settle(tx, row, state, None)
    return row


def a_message(tx: Tx, state: str) -> int:
    outbox.insert(tx, Key("stripe", "", state, "o"), "team", "", body='{"json":{}}', event=1)
    number = tx.db.last_insert_rowid()
    if state != "pending":
        outbox.settle(tx, number, state, None)
    return number


def park(tx: Tx) -> None:
    row = an_event(tx, "parked")
    tx.now_ms -= 86_400_001
    parked.wait(tx, row, Fact("link", "stripe", "", "cus_1"))


def stale(tx: Tx) -> None:
    for number in range(3):
        rejections.keep(
            tx,
            Request(
                source="stripe",
                reason="expired",
                request_id=f"r-{number}",
                received_ms=tx.now_ms,
                method="POST",
                address="127.0.0.1",
                header_names="[]",
                body_bytes=2,
                detail="late",
                skew_s=400,
            ),
        )


def conflict(tx: Tx) -> None:
    row = an_event(tx, "done")
    tx.db.execute(
        """
        insert into receiver_conflicts (
          event, content_sha256, body, content_type, received_ms, deliveries, request_id)
        values (?, ?, ?, 'json', 1, 1, 'r')
        """,
        (row, b"y" * 32, b"{}"),
    )


def a_fetch(tx: Tx, state: str = "pending") -> None:
    fetches.want(tx, Name("stripe", "", "subscription", "sub_1"), "stripe", None)
    if state == "dead":
        tx.db.execute(
            "update receiver_fetches set state = 'dead', settled_ms = 1, next_attempt_ms = null"
        )


def reconcile(tx: Tx, gap: int = 4) -> None:
    reconciles.end(tx, reconciles.begin(tx, "stripe"), gap)


def back_up(tx: Tx) -> None:
    backups.add(tx, Backup(tx.now_ms, "/b", 1, tx.now_ms))


def refuse(tx: Tx) -> None:
    rejections.add(tx, "stripe", "bad-signature", 5, tx.now_ms, tx.now_ms, "r", "no")


def deliver(tx: Tx) -> None:
    tallies.add(tx, {What("delivery", "stripe", "done"): 1}, tx.now_ms)


def settle_all(tx: Tx) -> None:
    tx.db.execute(
        "update receiver_events set state = 'ignored', settled_ms = 1, "
        "next_attempt_ms = null where state <> 'done'"
    )
    tx.db.execute(
        "update receiver_outbox set state = 'cancelled', settled_ms = 1, "
        "next_attempt_ms = null where operation <> 'alert'"
    )
    tx.db.execute("update receiver_conflicts set resolved_ms = 1")
    tx.db.execute(
        "update receiver_fetches set state = 'done', settled_ms = 1, next_attempt_ms = null"
    )


def do(*acts: Callable[[Tx], Any]) -> Callable[[Tx], None]:
    def run(tx: Tx) -> None:
        for act in acts:
            act(tx)

    return run


def failed(tx: Tx) -> None:
    for _ in range(5):
        row = an_event(tx, "pending", type="invoice.paid")
        inbox.fail(tx, row, 1, "no", tx.now_ms + 1)


#: What opens an alert, how long after; what closes it, how long after.
CAUSES: list[tuple[str, Callable[[Tx], Any], int, Callable[[Tx], Any], int]] = [
    ("oldest-unfinished events", lambda tx: an_event(tx, "pending"), 900_001, settle_all, 0),
    ("oldest-unfinished messages", lambda tx: a_message(tx, "pending"), 900_001, settle_all, 0),
    ("oldest-unfinished fetches", a_fetch, 900_001, settle_all, 0),
    ("parked-too-long", park, 0, settle_all, 0),
    ("dead events", lambda tx: an_event(tx, "dead"), 0, settle_all, 0),
    ("dead messages", lambda tx: a_message(tx, "dead"), 0, settle_all, 0),
    ("dead fetches", lambda tx: a_fetch(tx, "dead"), 0, settle_all, 0),
    ("quarantined", lambda tx: an_event(tx, "quarantined"), 0, settle_all, 0),
    ("conflicts", conflict, 0, settle_all, 0),
    ("review", lambda tx: a_message(tx, "review"), 0, settle_all, 0),
    ("failures-of-type stripe/invoice.paid", failed, 0, settle_all, 0),
    ("rejection-rate stripe", refuse, 0, settle_all, HOUR_MS + 60_000),
    ("wrong-clock stripe", stale, 0, settle_all, 600_001),
    ("backup-age", lambda tx: None, 172_800_001, back_up, 0),
    ("reconcile-gap stripe", reconcile, 0, lambda tx: reconcile(tx, 0), 0),
    ("silence stripe", deliver, 3_660_001, deliver, 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "cause", "after_ms", "cure", "then_ms"), CAUSES)
def test_an_alert_opens_once_is_told_once_and_closes_when_its_cause_is_gone(
    watched: Watched,
    name: str,
    cause: Callable[[Tx], Any],
    after_ms: int,
    cure: Callable[[Tx], Any],
    then_ms: int,
) -> None:
    store = watched.world.store
    watched.look()
    assert watched.open == []

    store.write(cause)
    watched.look(after_ms)
    for _ in range(5):
        watched.look(GATHER_MS)

    assert watched.open == [name]
    (text,) = watched.told
    assert text.startswith("Receiver: 1 alert open\n- ")
    assert "run `" in text

    store.write(cure)
    watched.look(then_ms)

    assert watched.open == []
    assert len(watched.told) == 1
    assert facts.needs(now_of(watched), watched.world.processor.settings) == []


def now_of(watched: Watched) -> facts.Facts:
    world = watched.world
    settings, at_ms = world.processor.settings, world.clock()
    return world.store.write(lambda tx: facts.look(tx, settings, at_ms, watched.disk))


def test_a_disk_that_is_nearly_full_is_told(watched: Watched) -> None:
    watched.disk = Disk(1_000, 0, 9_999, 100_000)
    watched.look()
    assert watched.open == ["disk-free"]

    watched.disk = Disk(1_000, 0, 10_000, 100_000)
    watched.look()
    assert watched.open == []


def test_alerts_that_open_together_are_one_message(watched: Watched) -> None:
    watched.world.store.write(do(conflict, reconcile, lambda tx: an_event(tx, "dead")))
    watched.look()

    (text,) = watched.told
    assert text.splitlines()[0] == "Receiver: 3 alerts open"


def test_what_opens_right_after_a_message_waits_for_the_next(watched: Watched) -> None:
    watched.world.store.write(conflict)
    watched.look()
    watched.world.store.write(lambda tx: an_event(tx, "dead"))
    watched.world.store.write(reconcile)
    watched.look(15_000)
    watched.look(15_000)
    assert len(watched.told) == 1

    watched.look(GATHER_MS)
    watched.look(GATHER_MS)

    first, second = watched.told
    assert "conflicts" in first
    assert "dead (events)" in second
    assert "reconcile-gap (stripe)" in second


def test_an_alert_that_comes_and_goes_is_told_once_an_hour(watched: Watched) -> None:
    for _ in range(50):
        watched.world.store.write(conflict)
        watched.look(GATHER_MS)
        watched.world.store.write(settle_all)
        watched.look(GATHER_MS)

    assert len(watched.told) == 1 + 99 * GATHER_MS // FLAP_MS


def test_a_clock_that_was_set_back_starts_no_storm_and_silences_nothing(watched: Watched) -> None:
    watched.world.store.write(reconcile)
    watched.world.store.write(conflict)
    watched.look()
    watched.world.clock.now_ms -= 3 * 24 * HOUR_MS
    for _ in range(50):
        watched.world.store.write(conflict)
        watched.look(15_000)
        watched.world.store.write(settle_all)
        watched.look(15_000)

    # Twice at most: what is open is told once more, by the clock as it is now.
    assert 2 <= len(watched.told) <= 3


def test_what_stays_open_is_told_again_after_a_day_and_all_of_it_in_one_message(
    watched: Watched,
) -> None:
    watched.world.store.write(conflict)
    watched.look()
    watched.world.store.write(reconcile)
    watched.look(HOUR_MS)
    assert len(watched.told) == 2

    for _ in range(3 * 24):
        watched.world.store.write(back_up)
        watched.look(HOUR_MS)

    again = watched.told[2:]
    assert len(again) == 3
    assert all(text.startswith("Receiver: 2 alerts still open\n") for text in again)


def test_an_alert_that_cant_be_delivered_starts_no_chain_of_others(watched: Watched) -> None:
    def give_up(tx: Tx) -> None:
        tx.db.execute(
            "update receiver_outbox set state = 'dead', settled_ms = 1, next_attempt_ms = null"
        )

    watched.arrives = False
    watched.world.store.write(conflict)
    for _ in range(10):
        watched.look(GATHER_MS)
        watched.world.store.write(give_up)

    assert len(watched.told) == 1
    assert watched.open == ["conflicts", "alerts-unsent"]
    needs = facts.needs(now_of(watched), watched.world.processor.settings)
    assert [one.name for one in needs] == ["conflicts", "alerts-unsent"]


def test_without_a_destination_or_a_worker_alerts_are_only_written_down(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(world, monkeypatch, CONFIG.replace('to = "team"', ""))
    world.store.write(conflict)
    watched.look()

    assert watched.open == ["conflicts"]
    assert watched.told == []


def test_each_alert_can_be_turned_off(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        *("oldest_unfinished_s", "parked_too_long_s", "dead", "quarantined", "conflicts", "review"),
        *("failures_of_type", "rejection_rate", "wrong_clock", "disk_free_percent"),
        *("backup_age_s", "reconcile_gap"),
    ]
    off = "".join(f"{name} = false\n" for name in names)
    config = CONFIG.replace('to = "team"\n', off).replace("silence_s = 3600\n", "")
    watched = Watched(world, monkeypatch, config)
    watched.disk = Disk(1, 0, 0, 100)
    for _, cause, *_ in CAUSES:
        world.store.write(cause)

    watched.look(10 * 86_400_000)

    assert watched.open == []


def test_looking_writes_nothing_while_nothing_changes(watched: Watched) -> None:
    watched.world.store.write(conflict)
    watched.look()

    watched.arrives = False
    changes = watched.world.store.db.total_changes()
    watched.look(1_000)

    assert watched.world.store.db.total_changes() == changes


def test_closed_alerts_are_bounded_and_open_ones_stay(world: World) -> None:
    def open_and_close(tx: Tx) -> None:
        alerts.open(tx, "dead", "events", "1")
        alerts.close(tx, alerts.listed(tx, 1)[0].id)

    world.store.write(lambda tx: alerts.open(tx, "conflicts", "", "still"))
    for _ in range(1_100):
        world.store.write(open_and_close)

    assert world.query("select count(*) from receiver_alerts") == [(1_001,)]
    assert [one.name for one in world.store.write(alerts.opened)] == ["conflicts"]


def refusal(folder: Path, text: str) -> str:
    path = folder / "receiver.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(path, environment=SECRETS)
    return "\n".join(refused.value.problems)


def test_a_destination_that_needs_an_event_is_refused_for_alerts(
    world: World, tmp_path: Path
) -> None:
    wrong = CONFIG + 'json = { text = "New: {feedback.text}" }\n'
    assert "alerts.to: " in refusal(tmp_path, wrong)
    assert "{_alert.text}" in refusal(tmp_path, wrong)
    assert "no destination 'crew'" in refusal(tmp_path, CONFIG.replace('"team"', '"crew"'))
    assert "alerts.rejection_rate: expected more than 0" in refusal(
        tmp_path, CONFIG.replace('to = "team"', "rejection_rate = 7")
    )

    world.configure(CONFIG + 'json = { content = "{_alert.text}", kind = "{_event.type}" }\n')


def test_a_destination_that_would_not_say_what_is_wrong_is_warned_of(world: World) -> None:
    def warnings(json: str) -> str:
        world.configure(CONFIG + json)
        return "\n".join(world.processor.settings.warnings)

    assert "alerts.to: what destinations.team sends would not say" in warnings(
        'json = { text = "{_event.type}" }\n'
    )
    assert "alerts.to" not in warnings('json = { text = "{_alert.text || _event.type}" }\n')
    assert "alerts.to" not in warnings("")


def test_a_mail_says_what_its_templates_take_from_the_alert(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    mail = """
kind = "email"
smtp = "smtp://127.0.0.1:25"
from = "receiver@example.com"
to = "me@example.com"
subject = "Receiver: {_alert.names}"
text = "{_alert.text}"
"""
    config = CONFIG[: CONFIG.index('kind = "http"\nurl = "http://127.0.0.1:1/"')] + mail
    watched = Watched(world, monkeypatch, config)
    world.store.write(do(conflict, lambda tx: an_event(tx, "dead")))
    watched.look()

    ((body,),) = world.query("select body from receiver_outbox where operation = 'alert'")
    assert json.loads(body)["subject"] == "Receiver: dead, conflicts"
    assert "run `receiver conflicts list`" in json.loads(body)["text"]


def test_the_file_that_cant_be_read_stops_no_watch(watched: Watched) -> None:
    (watched.world.folder / "receiver.toml").write_text(CONFIG)
    settings = watched.world.processor.settings
    gone = Watch(
        lambda: load(settings.path, environment={**SECRETS, "STATE_DIRECTORY": "/nowhere"}),
        lambda run, keep=None: watched.world.store.write(run),
        watched.world.clock,
        sends=True,
    )

    assert gone.step() == watch.LOOK_S
