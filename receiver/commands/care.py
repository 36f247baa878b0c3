"""The commands that keep the data: copies of it, and what of it goes."""

import contextlib
import functools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from receiver import console
from receiver.commands import shared
from receiver.commands.shared import (
    FINE,
    FOUND,
    acting,
    configured,
    confirm,
    json_option,
    load_settings,
    next_step,
    progress,
    reason_option,
)

if TYPE_CHECKING:
    from receiver.backup import Made
    from receiver.config import Settings
    from receiver.operate import By
    from receiver.restore import Plan
    from store.backups import Facts, Lost
    from store.database import Store

KEEP_MAX = 10_000


# Copies


def _target(context: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    # A Path no longer knows that a folder was meant, and its name would become a file's.
    if value is not None and value.endswith("/") and not Path(value).is_dir():
        raise click.BadParameter(f"{value}: there is no such folder; make it first")
    return None if value is None else Path(value)


@click.command()
@click.argument("path", required=False, metavar="[PATH]", type=click.Path(), callback=_target)
@click.option("--verify", is_flag=True, help="Make none: look whether the backup PATH is whole.")
@click.option(
    "--keep",
    type=click.IntRange(1, KEEP_MAX),
    help="How many stay in the folder [default: backup.keep, or 7].",
)
@json_option
@configured
def backup(config: Path, path: Path | None, verify: bool, keep: int | None, as_json: bool) -> int:
    """Copy the whole file, while the server goes on, and prove that the copy is whole.

    PATH is a file that is not there yet, or a folder [default: backup.path, or `backups` beside
    the database]. In a folder its name has the time, and the oldest beyond --keep go once the
    new one was opened and found whole. Exit code 1 where anything is wrong.

    \b
    Example:
      receiver backup
      receiver backup --verify backups/receiver-20261130T140311250Z.db
    """
    from store import backups

    if verify:
        if path is None:
            raise click.UsageError("--verify needs the PATH of the backup")
        facts = backups.examine(path)
        return tell_backup(path, facts, [], as_json)
    settings = load_settings(config)
    made, removed = make_backup(settings, path, keep or settings.backup.keep)
    record_backup(settings, made)
    return tell_backup(made.path, made.facts, removed, as_json)


def make_backup(settings: "Settings", path: Path | None, keep: int) -> tuple["Made", list[Path]]:
    """The backup, and those that it made room for."""
    from receiver.backup import make, older, refuse_taken, sweep, target_of
    from receiver.caller import become_owner
    from store import copies
    from store.database import snapshot

    become_owner(settings.database)
    at_ms = shared.now_ms()
    with snapshot(settings.database, older=True):
        # Else there is nothing to make a folder for.
        target = target_of(settings, path, at_ms)
    in_folder = path is None or path.is_dir()
    # Before the moment that is copied: however long it takes, the -wal does not grow for it.
    with copies.turn(target.parent):
        if in_folder:
            sweep(settings, target.parent)
        # One of an earlier version too: that is when it matters most.
        with snapshot(settings.database, older=True) as seen:
            # Whoever had the turn may have made it.
            refuse_taken(target)
            with progress(copies.pages(seen.db), "Copying") as advance:
                made = make(seen, target, at_ms, advance)
        removed = older(settings, made, keep) if in_folder else []
        for one in removed:
            copies.remove(one)
    return made, removed


def record_backup(settings: "Settings", made: "Made") -> None:
    """Let the file know, for `status` and alerts; the copy is whole, whatever hinders this."""
    from store import backups
    from store.errors import StoreError, Unavailable
    from store.schema import STEPS

    if made.facts.version < len(STEPS):
        return
    try:
        with acting(settings) as (store, _):
            row = backups.Backup(
                made.at_ms, str(made.path.absolute()), made.facts.bytes, shared.now_ms()
            )
            store.write(lambda tx: backups.add(tx, row))
    except (StoreError, Unavailable) as error:
        console.warn(f"{made.path} is whole, but `receiver status` will not know of it: {error}")


def tell_backup(path: Path, facts: "Facts", removed: list[Path], as_json: bool) -> int:
    """What is in a whole backup; FOUND if its books are wrong, as those of the file must be."""
    if as_json:
        console.print_json(
            {
                "path": str(path),
                "bytes": facts.bytes,
                "checksum": facts.has_checksum,
                "schema_version": facts.version,
                "events": facts.events,
                "entries": facts.entries,
                "last_event_at": console.rfc3339(facts.last_event_ms),
                "faults": list(facts.faults),
                "removed": [str(one) for one in removed],
            }
        )
        return FOUND if facts.faults else FINE
    last = console.moment(facts.last_event_ms, shared.now_ms())
    console.print_fields(
        [
            ("backup", str(path)),
            ("size", console.size(facts.bytes)),
            ("holds", f"{console.counted(facts.events, 'event')}, the last {last}"),
            ("ledger", f"{facts.entries:,} entries"),
            ("whole", "yes" if facts.has_checksum else "yes, as far as is seen without a checksum"),
            ("removed", ", ".join(one.name for one in removed) or None),
        ]
    )
    for fault in facts.faults:
        console.warn(f"in the copy as in the file: {fault}; see `receiver doctor`", "red")
    return FOUND if facts.faults else FINE


@click.command()
@click.argument("backup", metavar="BACKUP", type=click.Path(path_type=Path))
@click.option("--yes", is_flag=True, help="Don't ask, whatever would be lost.")
@reason_option
@configured
def restore(config: Path, backup: Path, yes: bool, reason: str) -> None:
    """Put BACKUP in the place of the database; what was there is kept beside it.

    The server must be stopped, and a file with your app's tables is never replaced. Events that
    came after the backup are lost, and so is what they did: let the senders send them again.

    \b
    Example:
      receiver restore backups/receiver-20261130T140311250Z.db --reason "the disk failed"
    """
    from receiver import operate
    from receiver.caller import actor, become_owner
    from receiver.restore import carry_out, note, plan
    from store.database import exists

    settings = load_settings(config)
    who = actor()
    with contextlib.closing(open_backup(backup)) as source:
        planned = plan(settings.database, backup)
        tell_plan(planned)
        if not yes:
            confirm(f"Replace {settings.database}?")
        # Whoever has the file, or where there is none the folder, shall have what is restored.
        there = exists(settings.database)
        become_owner(settings.database if there else settings.database.parent)
        aside = carry_out(planned, source, shared.now_ms())
    with acting(settings) as (store, _):
        store.write(lambda tx: note(tx, planned, aside, operate.By(who, reason)))
    console.say(f"{settings.database} is what it was in {backup}")
    if aside is not None:
        console.say(f"what was there is {aside}; remove it when you no longer need it")
    next_step("`receiver doctor`, then start the server", config)


def open_backup(path: Path) -> BinaryIO:
    """The backup, read as whoever calls, before root becomes the owner of the database."""
    from store.errors import StoreError

    try:
        return path.open("rb")
    except OSError as error:
        raise StoreError(f"{path}: can't be read: {error.strerror}") from error


def tell_plan(planned: "Plan") -> None:
    """What would be lost, before it is."""
    at = shared.now_ms()
    facts, lost = planned.facts, planned.lost
    last = console.moment(facts.last_event_ms, at)
    console.say(f"{planned.backup} holds {console.counted(facts.events, 'event')}, the last {last}")
    for fault in facts.faults:
        console.warn(fault, "red")
    if planned.problem is not None:
        console.warn(f"what would be lost is not known: {planned.problem}", "red")
    if lost is not None:
        tell_lost(planned, lost, at)


def tell_lost(planned: "Plan", lost: "Lost", at: int) -> None:
    if not lost.is_ancestor:
        console.warn(f"it is not a backup of {planned.database} as that is now", "red")
    if lost.is_nothing:
        console.say("nothing would be lost")
    if lost.events:
        since = console.moment(lost.since_ms, at)
        console.warn(f"lost: {console.counted(lost.events, 'event')} received since {since}", "red")
    if lost.entries:
        console.warn(f"lost: {lost.entries} of the ledger's entries", "red")
    if lost.sent_again:
        sent = console.counted(lost.sent_again, "message")
        console.warn(f"sent again, as the backup still owes them: {sent}", "red")


# What goes


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@json_option
@configured
def prune(config: Path, dry_run: bool, as_json: bool) -> None:
    """Let go of bodies that are older than their source's retention.payload_days (90).

    Payloads of events that are `done` or `ignored`, with what their conflicts, messages and
    attempts hold, and the bodies of refused requests. Events, operations, keys, amounts and
    records stay for ever, and a redelivery is recognised all the same. Nothing that is
    unfinished is touched. For a daily timer.

    \b
    Example:
      receiver prune --dry-run
    """
    from receiver import retention
    from store import forgotten

    settings = load_settings(config)
    at_ms = shared.now_ms()
    counts: dict[str, tuple[int, int]] = {}
    with acting(settings) as (store, who):
        look = retention.looking(store)
        first, last = look(forgotten.span)
        with progress(last - first + 1, "Pruning") as advance:
            before = first - 1
            for until, batch in retention.due(settings, look, first, last, at_ms):
                if batch and not dry_run:
                    retention.prune(store, settings, batch)
                for one in batch:
                    events, size = counts.get(one.endpoint, (0, 0))
                    counts[one.endpoint] = (events + 1, size + one.bytes)
                advance(until - before)
                before = until
        refused = 0 if dry_run else store.write(lambda tx: retention.prune_rejected(tx, settings))
        if counts and not dry_run:
            store.write(lambda tx: retention.note_prune(tx, who, counts))
    tell_pruned(counts, refused, dry_run, as_json)


def tell_pruned(
    counts: dict[str, tuple[int, int]], refused: int, dry_run: bool, as_json: bool
) -> None:
    total = sum(events for events, _ in counts.values())
    size = sum(size for _, size in counts.values())
    if as_json:
        by_source = {name: {"events": n, "bytes": b} for name, (n, b) in counts.items()}
        console.print_json(
            {"dry_run": dry_run, "events": total, "bytes": size, "sources": by_source}
            | {"refused": refused}
        )
        return
    if counts:
        rows = [(name, n, console.size(b)) for name, (n, b) in sorted(counts.items())]
        console.print_table(("source", "events", "payloads"), rows)
    would = "would be" if dry_run else "were"
    console.say(f"the bodies of {console.counted(total, 'event')} {would} let go")
    if size and not dry_run:
        console.say("the file stays as large: the room in it is used again")


@click.command()
@click.argument("events", metavar="[EVENT]...", nargs=-1)
@click.option("--customer", metavar="ID", help="All that mention this id (or e-mail address).")
@click.option("--dry-run", is_flag=True, help="Only list the events.")
@click.option("--yes", is_flag=True, help="Don't ask.")
@click.option(
    "--reason",
    default="",
    metavar="TEXT",
    help="Why, for the audit log; only --dry-run needs none.",
)
@configured
def redact(
    config: Path,
    events: tuple[str, ...],
    customer: str | None,
    dry_run: bool,
    yes: bool,
    reason: str,
) -> int:
    """Take a person's data out of EVENTs: it can't be brought back.

    Their payloads, conflicts, messages, records' data and recorded errors are emptied; their
    ids, keys, operations and amounts stay, and so a redelivery is recognised. What is deleted is
    overwritten. Backups made before still have it, and so do your app's own tables and whoever
    a message was sent to.

    \b
    Example:
      receiver redact --customer cus_1 --reason "asked to be forgotten"
    """
    from receiver import named, operate, retention

    if bool(events) == bool(customer):
        raise click.UsageError("name events, or a --customer")
    if not (dry_run or reason.strip()):
        raise click.UsageError("say why with --reason, for whoever reads the audit log")
    settings = load_settings(config)
    with acting(settings) as (store, who):
        look = retention.looking(store)
        rows = [look(functools.partial(named.event, name=name)).id for name in events]
        if customer:
            rows = find_customer(store, customer)
        rows = list(dict.fromkeys(rows))
        seek = functools.partial(retention.in_rejected, customer=customer or "")
        refused = look(seek) if customer else []
        both = ((rows, "event"), (refused, "refused request"))
        what = " and ".join(console.counted(len(each), noun) for each, noun in both if each)
        if dry_run or not (rows or refused):
            tell_found(config, store, rows, refused, what)
            return FINE
        if not yes:
            confirm(f"Empty {what} for ever?")
        done = redact_all(store, settings, rows, customer, operate.By(who, reason))
    console.say(f"{done} of {what} emptied" if rows else f"{what} emptied")
    console.warn(
        "backups made before still have the data: remove them when you no longer need them"
    )
    return FINE if done == len(rows) else FOUND


def find_customer(store: "Store", customer: str) -> list[int]:
    from receiver import retention
    from store import forgotten

    look = retention.looking(store)
    first, last = look(forgotten.span)
    found: list[int] = []
    with progress(last - first + 1, "Looking") as advance:
        for page in retention.mentioning(look, customer):
            found += page
            advance(retention.PAGE_BODIES)
    for page in retention.in_conflicts(look, customer):
        found += page
    for page in retention.in_what_was_made(store, customer):
        found += page
    return sorted(found)


def tell_found(
    config: Path, store: "Store", rows: list[int], refused: list[int], what: str
) -> None:
    """What would be emptied, and how."""
    from receiver import retention, shown
    from store import inbox

    if not rows and not refused:
        console.warn("no event fits", None)
        return
    look = retention.looking(store)
    cells: list[tuple[console.Cell, ...]] = []
    for number in rows:
        row = look(functools.partial(inbox.by_row, row=number))
        assert row is not None, "events are never deleted"
        cells.append((row.id, shown.name_of(row), row.type, console.state(row.state)))
    cells += [(None, f"rejection {number}", None, None) for number in refused]
    console.print_table(("row", "event", "type", "state"), cells)
    console.say(f"{what} would be emptied for ever")
    given = click.get_current_context().params
    named = ["--customer", given["customer"]] if given["customer"] else given["events"]
    next_step(f"`receiver redact {shlex.join(named)} --reason TEXT`", config)


def redact_all(
    store: "Store", settings: "Settings", rows: list[int], customer: str | None, by: "By"
) -> int:
    """Each event in a transaction of its own; how many it went well for."""
    from receiver import retention
    from receiver.operate import Declined

    done = 0
    with progress(len(rows), "Emptying") as advance:
        for row in rows:
            content = retention.content_of(store, settings, row)
            try:
                store.write(functools.partial(retention.redact, event=row, content=content, by=by))
                done += 1
            except Declined as error:
                console.warn(f"{row}  not done: {error}")
            advance(1)
    if customer:
        store.write(functools.partial(retention.redact_rejected, customer=customer, by=by))
    empty_wal(store)
    return done


def empty_wal(store: "Store") -> None:
    """What was deleted is to be in the -wal no more; a warning where that can't be now."""
    from store.errors import Unavailable

    why = "something reads the file for long"
    try:
        if store.empty_wal():
            return
    except Unavailable as error:
        why = str(error)
    console.warn(
        f"{why}, so its -wal may still hold what was deleted; run this again, or it goes with "
        "the next restart of the server",
        "red",
    )
