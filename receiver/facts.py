"""What the file says about itself, and which of it needs a person."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from receiver.config import Settings
from receiver.console import age, counted, size
from store import (
    alerts,
    backups,
    counts,
    fetches,
    inbox,
    outbox,
    reconciles,
    rejections,
    secrets,
    tallies,
)
from store.alerts import Alert
from store.backups import Backup
from store.counts import Failing, Owed
from store.database import Snapshot
from store.lock import is_served, workers
from store.reconciles import Reconcile
from store.secrets import SecretUse

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
#: Within this time right signatures with a wrong clock are counted.
CLOCK_MS = 600_000
#: Refusals of a source in an hour from which on their part of its deliveries is judged.
REFUSED_MIN = 5
#: Where the units of a service manager are.
UNIT_FOLDERS = ("/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")
#: Refused for what the server, and not the sender, did.
OUR_FAULT = "unavailable"

#: How often, by source and outcome or reason.
Rates = Mapping[tuple[str, str], int]


class Disk(NamedTuple):
    """Bytes of the file and its -wal, and what is free where they are."""

    file_bytes: int
    wal_bytes: int
    free_bytes: int
    total_bytes: int

    @property
    def free_percent(self) -> int:
        return self.free_bytes * 100 // max(1, self.total_bytes)


class Need(NamedTuple):
    """Something that needs a person, and the command to begin with.

    One that is not `told` is never sent: it is about what was.
    """

    name: str
    subject: str
    words: str
    command: str
    told: bool = True


class Running(NamedTuple):
    """Whether a server runs on the file, and where workers do; None: not known."""

    server: bool | None
    #: Of `inside` and `separate`, as in worker.run.
    workers: tuple[str, ...] | None


class Facts(msgspec.Struct, frozen=True):
    """One look at the file; times in UTC milliseconds."""

    at_ms: int
    events: Mapping[str, int]
    oldest_event_ms: int | None
    oldest_message_ms: int | None
    #: Fetches of current state that are pending or dead.
    fetches: Mapping[str, int]
    oldest_fetch_ms: int | None
    #: Since when the work that is due longest has been due.
    due_ms: int | None
    messages: tuple[Owed, ...]
    oldest_alert_ms: int | None
    parked_too_long: int
    conflicts: int
    same_body: int
    failing: tuple[Failing, ...]
    delivered_hour: Rates
    delivered_day: Rates
    refused_hour: Rates
    refused_day: Rates
    last_delivered_ms: Mapping[str, int]
    #: Deliveries refused for their time alone, by source.
    wrong_clock: Mapping[str, int]
    #: Of sources with several.
    secrets: tuple[SecretUse, ...]
    backup: Backup | None
    made_ms: int
    reconciles: tuple[Reconcile, ...]
    open_alerts: tuple[Alert, ...]
    disk: Disk

    def owed(self, state: str, *, alerts: bool = False) -> int:
        """Messages in a state: those of alerts, or the others."""
        return sum(
            one.messages for one in self.messages if one.state == state and one.alerts is alerts
        )


def look(snapshot: Snapshot, settings: Settings, now_ms: int, disk: Disk) -> Facts:
    """Gather what there is to know; each part is answered by an index."""
    limits = settings.alerts
    totals = tallies.totals(snapshot, "delivery")
    last_ms: dict[str, int] = {}
    for (source, _), total in totals.items():
        if source not in settings.sources:
            continue
        last_ms[source] = max(last_ms.get(source, 0), total.last_ms)
    due = [inbox.queue_due_ms(snapshot)]
    due += [outbox.due_ms(snapshot, name) for name in settings.destinations]
    parked_ms = (limits.parked_too_long_s or 0) * 1000
    ran = (reconciles.last(snapshot, name) for name in settings.sources)
    return Facts(
        at_ms=now_ms,
        events=counts.events(snapshot),
        oldest_event_ms=counts.oldest_event_ms(snapshot),
        oldest_message_ms=counts.oldest_message_ms(snapshot),
        fetches=fetches.tally(snapshot),
        oldest_fetch_ms=fetches.oldest_ms(snapshot),
        due_ms=min((one for one in due if one is not None), default=None),
        messages=tuple(counts.messages(snapshot)),
        oldest_alert_ms=counts.oldest_message_ms(snapshot, alerts=True),
        parked_too_long=counts.parked_before(snapshot, now_ms - parked_ms),
        conflicts=counts.conflicts(snapshot),
        same_body=counts.same_body(snapshot),
        failing=tuple(counts.failing(snapshot, limits.failures_of_type or 1)),
        delivered_hour=tallies.since(snapshot, "delivery", now_ms - HOUR_MS),
        delivered_day=tallies.since(snapshot, "delivery", now_ms - DAY_MS),
        refused_hour=rejections.since(snapshot, now_ms - HOUR_MS),
        refused_day=rejections.since(snapshot, now_ms - DAY_MS),
        last_delivered_ms=last_ms,
        wrong_clock=Counter(name for name, _ in rejections.skews(snapshot, now_ms - CLOCK_MS)),
        secrets=tuple(_secrets(snapshot, settings)),
        backup=backups.last(snapshot),
        made_ms=counts.made_ms(snapshot),
        reconciles=tuple(one for one in ran if one is not None),
        open_alerts=tuple(alerts.opened(snapshot)),
        disk=disk,
    )


def running_on(settings: Settings) -> Running:
    """Who holds the locks beside the file now; no network, and SQLite's own are not touched."""
    return Running(is_served(settings.database), workers(settings.database))


def amiss(running: Running, settings: Settings) -> list[Need]:
    """Processes that should run and do not, or run otherwise than the config says.

    For `status` and `doctor` alone: who would send an alert is what does not run.
    """
    if running.server is False:
        words = "none runs on the database, so nothing is received"
        command = _command("status", "receiver", "receiver serve")
        return [Need("server", "", words, command), *_amiss_apart(running, settings)]
    found = _amiss_apart(running, settings)
    inside = running.workers is not None and "inside" in running.workers
    if running.workers is not None and inside is not (settings.worker.run == "inside"):
        state = "works itself" if inside else "runs without a worker"
        words = (
            f"the server {state}, which is not what worker.run says now: stop it, and start it anew"
        )
        command = _command("restart", "receiver", "pgrep -fa 'receiver serve'")
        found.append(Need("worker", "inside", words, command))
    return found


def _amiss_apart(running: Running, settings: Settings) -> list[Need]:
    wanted = settings.worker.run == "separate"
    if running.workers is None or wanted is ("separate" in running.workers):
        return []
    unit = "receiver-worker"
    if wanted:
        words = 'none runs, but worker.run is "separate"'
        command = _command("status", unit, "receiver work")
    else:
        words = f'one runs apart, but worker.run is "{settings.worker.run}": stop it'
        command = _command("stop", unit, "pgrep -fa 'receiver work'")
    return [Need("worker", "apart", words, command)]


def _command(verb: str, unit: str, otherwise: str) -> str:
    # No program is asked: the walls of a service may let none run.
    installed = any(Path(folder, f"{unit}.service").exists() for folder in UNIT_FOLDERS)
    return f"systemctl {verb} {unit}" if installed else otherwise


def disk_of(database: Path) -> Disk:
    """What the file takes, and leaves; nothing is opened, which would drop SQLite's locks."""
    room = os.statvfs(database.parent)
    return Disk(
        _size(database),
        _size(Path(f"{database}-wal")),
        room.f_bavail * room.f_frsize,
        room.f_blocks * room.f_frsize,
    )


def needs(facts: Facts, settings: Settings) -> list[Need]:
    """What needs a person, by the limits of the config; the same for `status` and for alerts."""
    return [
        *_stuck(facts, settings),
        *_given_up(facts, settings),
        *_failing(facts, settings),
        *_refused(facts, settings),
        *_of_the_machine(facts, settings),
        *_of_senders(facts, settings),
        *_of_alerts(facts, settings),
    ]


def _stuck(facts: Facts, settings: Settings) -> Iterator[Need]:
    limits, now_ms = settings.alerts, facts.at_ms
    for what, oldest_ms, command in (
        ("event", facts.oldest_event_ms, "receiver events list --state pending"),
        ("message", facts.oldest_message_ms, "receiver outbox list --state pending"),
        ("fetch", facts.oldest_fetch_ms, "receiver resources list --pending"),
    ):
        limit_s = limits.oldest_unfinished_s
        if limit_s is not None and oldest_ms is not None and now_ms - oldest_ms > limit_s * 1000:
            words = f"the oldest {what} that is still pending came {age(now_ms - oldest_ms)}"
            subject = "fetches" if what == "fetch" else f"{what}s"
            yield Need("oldest-unfinished", subject, words, command)
    if limits.parked_too_long_s is not None and facts.parked_too_long:
        many = counted(facts.parked_too_long, "event")
        words = f"{many} parked for more than {span(limits.parked_too_long_s * 1000)}"
        yield Need("parked-too-long", "", words, "receiver parked list")


def _given_up(facts: Facts, settings: Settings) -> Iterator[Need]:
    limits, events = settings.alerts, facts.events
    dead, review, unread = facts.owed("dead"), facts.owed("review"), facts.fetches.get("dead", 0)
    for name, subject, limit, count, noun, command in (
        ("dead", "events", limits.dead, events["dead"], "dead event", "events list --state dead"),
        ("dead", "messages", limits.dead, dead, "dead message", "outbox list --state dead"),
        ("dead", "fetches", limits.dead, unread, "unread resource", "resources list --pending"),
        ("quarantined", "", limits.quarantined, events["quarantined"], "quarantined event", ""),
        ("conflicts", "", limits.conflicts, facts.conflicts, "open conflict", "conflicts list"),
        ("review", "", limits.review, review, "uncertain message", "outbox list --state review"),
    ):
        if limit is not None and count >= limit:
            command = command or f"events list --state {name}"
            yield Need(name, subject, counted(count, noun), f"receiver {command}")


def _failing(facts: Facts, settings: Settings) -> Iterator[Need]:
    if settings.alerts.failures_of_type is None:
        return
    for one in facts.failing:
        yield Need(
            "failures-of-type",
            f"{one.source}/{one.type}",
            f"{counted(one.events, 'event')} of this type failed and wait",
            f"receiver events list --source {one.source} --type {one.type}",
        )


def _refused(facts: Facts, settings: Settings) -> Iterator[Need]:
    limits = settings.alerts
    for name in settings.sources:
        refused = sum(
            count
            for (source, reason), count in facts.refused_hour.items()
            if source == name and reason != OUR_FAULT
        )
        taken = sum(count for (source, _), count in facts.delivered_hour.items() if source == name)
        if (
            limits.rejection_rate is not None
            and refused >= REFUSED_MIN
            and refused / (refused + taken) >= limits.rejection_rate
        ):
            words = f"{refused} of {refused + taken} deliveries in the last hour were refused"
            yield Need("rejection-rate", name, words, f"receiver sources show {name}")
        wrong = facts.wrong_clock.get(name, 0)
        if limits.wrong_clock is not None and wrong >= limits.wrong_clock:
            words = f"{wrong} genuine deliveries were refused for their time: a clock is wrong"
            yield Need("wrong-clock", name, words, f"receiver rejections list --source {name}")


def _of_the_machine(facts: Facts, settings: Settings) -> Iterator[Need]:
    limits, disk = settings.alerts, facts.disk
    percent = limits.disk_free_percent
    if percent is not None and disk.free_bytes * 100 < disk.total_bytes * percent:
        words = f"{disk.free_percent} % of the disk is free ({size(disk.free_bytes)})"
        yield Need("disk-free", "", words, f"df -h {settings.database.parent}")
    last_ms = facts.made_ms if facts.backup is None else facts.backup.at_ms
    limit_s = limits.backup_age_s
    if limit_s is not None and facts.at_ms - last_ms > limit_s * 1000:
        words = "no backup was ever made"
        if facts.backup is not None:
            words = f"the last backup was made {age(facts.at_ms - last_ms)}"
        yield Need("backup-age", "", words, "receiver backup")


def _of_senders(facts: Facts, settings: Settings) -> Iterator[Need]:
    least = settings.alerts.reconcile_gap
    for run in facts.reconciles:
        if least is not None and run.gap >= least:
            words = f"the last reconcile found {run.gap} missing"
            yield Need("reconcile-gap", run.source, words, f"receiver reconcile {run.source}")
    for source in settings.sources.values():
        last_ms = facts.last_delivered_ms.get(source.name)
        if source.silence_s is None or last_ms is None:
            continue
        if facts.at_ms - last_ms > source.silence_s * 1000:
            words = f"nothing genuine came for {span(facts.at_ms - last_ms)}"
            yield Need("silence", source.name, words, f"receiver sources show {source.name}")


def _of_alerts(facts: Facts, settings: Settings) -> Iterator[Need]:
    """That alerts don't arrive: never told by an alert, or it would never end."""
    failed = facts.owed("dead", alerts=True) + facts.owed("review", alerts=True)
    limit_s = settings.alerts.oldest_unfinished_s
    oldest_ms = facts.oldest_alert_ms
    late = limit_s is not None and oldest_ms is not None
    if late and facts.at_ms - (oldest_ms or 0) > (limit_s or 0) * 1000:
        failed += facts.owed("pending", alerts=True)
    if failed:
        words = f"{counted(failed, 'message')} about alerts could not be sent"
        yield Need("alerts-unsent", "", words, "receiver outbox list", told=False)


def _secrets(snapshot: Snapshot, settings: Settings) -> Iterator[SecretUse]:
    """When each secret was used of the sources that have several: a rotation under way."""
    for use in secrets.last_used(snapshot):
        source = settings.sources.get(use.source)
        references = {one.reference for one in source.contract.secrets} if source else set()
        if len(references) > 1 and use.reference in references:
            yield use


def span(passed_ms: int) -> str:
    """A length of time for a person, as in `4 min`."""
    return age(passed_ms).removesuffix(" ago")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
