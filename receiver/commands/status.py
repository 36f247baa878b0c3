"""The commands that tell how things are: `status` on one screen, and the alerts."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from receiver import console
from receiver.commands import shared
from receiver.commands.shared import (
    FINE,
    FOUND,
    USAGE,
    Failure,
    Listed,
    configured,
    json_option,
    listing,
    load_settings,
    looking,
    next_step,
    print_listing,
    reading,
)
from receiver.console import age, counted, moment, rfc3339

if TYPE_CHECKING:
    from receiver.config import Settings
    from receiver.facts import Facts, Need, Running
    from store.alerts import Alert

RULES = Path(__file__).parents[1] / "examples" / "alerts.rules.yml"
#: How often to look for a server that is not there, and the pause between two looks in seconds:
#: longer than a restart takes.
LOOKS, LOOK_PAUSE_S = 40, 0.05
#: Outcomes as they are told, the most wanted first.
_OUTCOMES = ("done", "duplicate", "ignored", "pending", "parked", "quarantined", "conflict")


@click.command()
@configured
@json_option
@click.option("--quiet", is_flag=True, help="Print only what needs you: for cron.")
@click.option(
    "--ping",
    metavar="SECRET",
    help="Where nothing needs you, ask the URL behind env:NAME, file:/path or credential:NAME.",
)
def status(config: Path, as_json: bool, quiet: bool, ping: str | None) -> int:
    """Tell on one screen how things are; the exit code is 1 if something needs you.

    Reads the file alone, so it works while the server is down, which needs you, too. What else
    does, and from when on, is said by [alerts] in the config. With --ping it is a dead man's
    switch: whoever is asked there raises the alarm once nobody asks.

    \b
    Example:
      receiver status --quiet
      receiver status --quiet --ping file:/etc/receiver/ping-url
    """
    from receiver import facts

    settings = load_settings(config)
    url = None if ping is None else _url(ping)
    with reading(settings) as seen:
        disk = facts.disk_of(settings.database)
        now = facts.look(seen, settings, shared.now_ms(), disk)
    running = _running_on(settings)
    found = [*facts.amiss(running, settings), *facts.needs(now, settings)]
    if as_json:
        console.print_json(as_object(now, running, found))
    elif quiet:
        for one in found:
            console.say(f"{_about(one)}: {one.words}; `{one.command}`")
    else:
        _print(now, _processes(running, settings), found)
        for one in found:
            next_step(f"`{one.command}`", config)
    if url is not None and not found:
        _ping(url)
    return FOUND if found else FINE


def _running_on(settings: "Settings") -> "Running":
    """Who runs on the file: asked again for a while, as a restart takes a moment."""
    from receiver import facts

    running = facts.running_on(settings)
    for _ in range(LOOKS):
        if not facts.amiss(running, settings):
            break
        time.sleep(LOOK_PAUSE_S)
        running = facts.running_on(settings)
    return running


def _processes(running: "Running", settings: "Settings") -> Iterator[tuple[str, console.Cell]]:
    """What runs, in words; a worker that is not there and not wanted is off."""
    unknown = "not known, as this user may not read the lock beside the database"
    none = console.Painted("none runs", "red")
    if running.server is None or running.workers is None:
        yield "server", unknown
        return
    yield "server", "running" if running.server else none
    places = {"inside": "inside the server", "separate": "apart"}
    found = " and ".join(places[one] for one in running.workers)
    yield "worker", found or ("off" if settings.worker.run == "off" else none)


def _url(reference: str) -> str:
    from receiver.references import References, Unresolved

    try:
        value, _ = References(Path(), os.environ).resolve(reference)
    except Unresolved as error:
        raise Failure(f"--ping: {error}", code=USAGE) from error
    return value.decode(errors="replace")


def _ping(url: str) -> None:
    from receiver import machine

    problem = machine.ping(url)
    if problem is not None:
        raise Failure(f"--ping: {problem}")


@click.group(cls=Listed)
def alerts() -> None:
    """Conditions that needed a person: open ones, and those that are gone."""


@alerts.command("list")
@listing
def alerts_list(config: Path, as_json: bool, limit: int) -> None:
    """List alerts, the newest first; an open one closes by itself when its cause is gone.

    \b
    Example:
      receiver alerts list --json
    """
    from store import alerts

    with looking(config) as seen:
        found = alerts.listed(seen, limit)
    at = shared.now_ms()
    print_listing(
        found,
        limit,
        as_json,
        lambda one: {
            "name": one.name,
            "subject": one.subject,
            "words": one.words,
            "opened_at": rfc3339(one.opened_ms),
            "closed_at": rfc3339(one.closed_ms),
            "sent_at": rfc3339(one.sent_ms),
        },
        ("alert", "about", "opened", "closed", "sent", "what"),
        lambda one: (
            one.name,
            one.subject,
            console.when(one.opened_ms, at),
            console.when(one.closed_ms, at),
            console.when(one.sent_ms, at),
            one.words,
        ),
        prose=True,
    )


@alerts.command("rules")
def alerts_rules() -> None:
    """Print alert rules for Prometheus, over the metrics of the admin listener.

    \b
    Example:
      receiver alerts rules > /etc/prometheus/rules.d/receiver.yml
    """
    click.echo(RULES.read_text(encoding="utf-8"), nl=False)


def as_object(now: "Facts", running: "Running", found: "Iterable[Need]") -> dict[str, object]:
    """How things are, for JSON; ages in seconds."""
    return {
        "at": rfc3339(now.at_ms),
        "needs": [
            {"name": one.name, "subject": one.subject, "words": one.words, "command": one.command}
            for one in found
        ],
        "running": {"server": running.server, "workers": running.workers},
        "events": dict(now.events),
        "oldest_event_at": rfc3339(now.oldest_event_ms),
        "oldest_message_at": rfc3339(now.oldest_message_ms),
        "lag_s": _lag_ms(now) / 1000,
        "messages": [
            {"destination": one.destination, "state": one.state, "messages": one.messages}
            for one in now.messages
        ],
        "fetches": dict(now.fetches),
        "parked_too_long": now.parked_too_long,
        "conflicts": now.conflicts,
        "same_body": now.same_body,
        "delivered": {
            "hour": _by_source(now.delivered_hour),
            "day": _by_source(now.delivered_day),
        },
        "refused": {"hour": _by_source(now.refused_hour), "day": _by_source(now.refused_day)},
        "last_delivered_at": {name: rfc3339(at) for name, at in now.last_delivered_ms.items()},
        "secrets": [
            {"source": one.source, "reference": one.reference, "last_used_at": rfc3339(one.last_ms)}
            for one in now.secrets
        ],
        "file": {
            "bytes": now.disk.file_bytes,
            "wal_bytes": now.disk.wal_bytes,
            "disk_free_bytes": now.disk.free_bytes,
            "disk_free_percent": now.disk.free_percent,
        },
        "last_backup_at": None if now.backup is None else rfc3339(now.backup.at_ms),
        "reconciles": [
            {"source": one.source, "started_at": rfc3339(one.started_ms), "gap": one.gap}
            for one in now.reconciles
        ],
        "alerts": [
            {"name": one.name, "subject": one.subject, "opened_at": rfc3339(one.opened_ms)}
            for one in now.open_alerts
        ],
    }


def _print(
    now: "Facts", processes: "Iterable[tuple[str, console.Cell]]", found: "list[Need]"
) -> None:
    good = console.Painted("nothing needs you", "green")
    needs = console.Painted(f"{counted(len(found), 'thing')} needing you", "red")
    console.print_fields([("status", needs if found else good), *processes, *_fields(now)])
    if found:
        console.say("")
        console.print_table(
            ("needs you", "what"), [(_about(one), one.words) for one in found], prose="wrap"
        )


def _fields(now: "Facts") -> Iterator[tuple[str, console.Cell]]:
    yield "last hour", _rates(now.delivered_hour, now.refused_hour)
    yield "last day", _rates(now.delivered_day, now.refused_day)
    yield "events", ", ".join(f"{count} {state}" for state, count in now.events.items())
    yield "oldest pending", _oldest(now)
    yield "lag", console.age(_lag_ms(now)).removesuffix(" ago") if _lag_ms(now) else "none"
    unsent = (f"{one.messages} {one.state} to {one.destination}" for one in now.messages)
    yield "messages", ", ".join(unsent) or "all sent"
    if now.fetches:
        yield "fetches", ", ".join(f"{count} {state}" for state, count in now.fetches.items())
    yield "conflicts", f"{now.conflicts} open"
    if now.same_body:
        yield "same body", f"{counted(now.same_body, 'event')} came again under another id"
    for use in now.secrets:
        words = f"{use.reference} last used {age(now.at_ms - use.last_ms)}"
        yield f"secret of {use.source}", words
    yield "file", _file(now)
    backup = None if now.backup is None else now.backup.at_ms
    yield "last backup", "never" if backup is None else moment(backup, now.at_ms)
    for run in now.reconciles:
        words = f"{moment(run.started_ms, now.at_ms)}, {run.gap} missing"
        yield f"reconcile {run.source}", words
    opened = ", ".join(_about(one) for one in now.open_alerts)
    yield "open alerts", opened or "none"


def _about(one: "Alert | Need") -> str:
    return f"{one.name} {one.subject}".rstrip()


def _rates(delivered: Mapping[tuple[str, str], int], refused: Mapping[tuple[str, str], int]) -> str:
    words = [*_summed(delivered, _OUTCOMES)]
    words += [f"{each} refused" for each in _summed(refused)]
    return ", ".join(words) or "nothing came"


def _summed(counts: Mapping[tuple[str, str], int], first: Iterable[str] = ()) -> Iterator[str]:
    sums: dict[str, int] = dict.fromkeys(first, 0)
    for (_, word), count in counts.items():
        sums[word] = sums.get(word, 0) + count
    return (f"{count} {word}" for word, count in sums.items() if count)


def _by_source(counts: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (source, word), count in counts.items():
        found.setdefault(source, {})[word] = count
    return found


def _oldest(now: "Facts") -> str:
    found = (("event", now.oldest_event_ms), ("message", now.oldest_message_ms))
    words = [f"{what} {age(now.at_ms - at_ms)}" for what, at_ms in found if at_ms is not None]
    return ", ".join(words) or "none"


def _lag_ms(now: "Facts") -> int:
    return 0 if now.due_ms is None else max(0, now.at_ms - now.due_ms)


def _file(now: "Facts") -> str:
    disk = now.disk
    free = f"{disk.free_percent} % of the disk free ({console.size(disk.free_bytes)})"
    return f"{console.size(disk.file_bytes)}, -wal {console.size(disk.wal_bytes)}, {free}"
