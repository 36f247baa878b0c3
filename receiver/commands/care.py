"""The commands that keep the data: copies of it, and what of it goes."""

import contextlib
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
    from receiver.restore import Plan
    from store.backups import Facts, Lost

KEEP_MAX = 10_000


# Copies


@click.command()
@click.argument("path", required=False, metavar="[PATH]", type=click.Path(path_type=Path))
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
    from receiver.backup import older
    from store import backups, copies

    if verify:
        if path is None:
            raise click.UsageError("--verify needs the PATH of the backup")
        facts = backups.examine(path)
        return tell_backup(path, facts, [], as_json)
    settings = load_settings(config)
    made = make_backup(settings, path)
    removed = []
    if path is None or path.is_dir():
        removed = older(settings, made.path, keep or settings.backup.keep)
    for one in removed:
        copies.remove(one)
    record_backup(settings, made)
    return tell_backup(made.path, made.facts, removed, as_json)


def make_backup(settings: "Settings", path: Path | None) -> "Made":
    from receiver.backup import make, target_of
    from receiver.caller import become_owner
    from store import copies
    from store.database import snapshot

    become_owner(settings.database)
    at_ms = shared.now_ms()
    # One of an earlier version too: that is when it matters most.
    with snapshot(settings.database, older=True) as seen:
        target = target_of(settings, path, at_ms)
        with progress(copies.pages(seen.db), "Copying") as advance:
            return make(seen, target, at_ms, advance)


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
            ("size", f"{facts.bytes / 1e6:,.1f} MB"),
            ("holds", f"{console.counted(facts.events, 'event')}, the last {last}"),
            ("ledger", str(facts.entries) + " entries"),
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

    settings = load_settings(config)
    who = actor()
    with contextlib.closing(open_backup(backup)) as source:
        planned = plan(settings.database, backup)
        tell_plan(planned)
        if not yes:
            confirm(f"Replace {settings.database}?")
        # Whoever has the file, or else the folder, shall have what is restored.
        become_owner(settings.database) or become_owner(settings.database.parent)
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
