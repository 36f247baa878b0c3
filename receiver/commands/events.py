"""The commands about the inbox: list, show, tail, resolve, and replay."""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from receiver import console
from receiver.commands import shared
from receiver.commands.shared import (
    FINE,
    FOUND,
    Listed,
    acting,
    check_source,
    configured,
    confirm,
    drain,
    json_option,
    listing,
    load_settings,
    looking,
    next_step,
    operating,
    print_listing,
    progress,
    reading,
    reason_option,
    since_option,
    source_option,
    state_option,
    type_option,
    why_option,
)

if TYPE_CHECKING:
    from receiver.config import Settings
    from receiver.operate import Replayed
    from receiver.rehearsal import Rehearsed
    from receiver.story import Story
    from store.database import Snapshot
    from store.inbox import Row


@click.group(cls=Listed)
def events() -> None:
    """The inbox: what was received, and what became of it."""


EVENT_HEADINGS = ("row", "received", "source", "id", "type", "state", "reason")


def event_cells(row: "Row") -> Sequence[console.Cell]:
    """The cells under EVENT_HEADINGS."""
    source = f"{row.endpoint}/{row.account}" if row.account else row.endpoint
    at = console.when(row.received_ms, shared.now_ms())
    reason = row.reason or (row.last_error if row.state in ("pending", "dead") else None)
    twin = None if row.same_body_as is None else f"same body as event {row.same_body_as}"
    why = "; ".join(filter(None, (reason, twin)))
    return (row.id, at, source, row.event_id, row.type, console.state(row.state), why)


@events.command("list")
@listing
@state_option
@source_option
@type_option
@since_option
@click.option("--subject", metavar="SUBJECT", help="Only events about this, as an invoice's id.")
@click.option("--workspace", metavar="WORKSPACE", help="Only events that did something for it.")
def events_list(
    config: Path,
    as_json: bool,
    limit: int,
    state: str | None,
    source: str | None,
    type: str | None,
    since_ms: int | None,
    subject: str | None,
    workspace: str | None,
) -> None:
    """List events, newest first.

    \b
    Example:
      receiver events list --state quarantined --since 2d
    """
    from receiver import shown
    from store import inbox

    if subject is None and workspace is None:
        with looking(config) as seen:
            rows = inbox.listed(
                seen, state=state, endpoint=source, type=type, since_ms=since_ms, limit=limit
            )
            if not rows:
                check_source(seen, config, source)
    else:
        # It reads the rules, to find who asks for a subject.
        from receiver import named

        settings = load_settings(config)
        with reading(settings) as seen:
            rows = inbox.among(
                seen,
                named.about(seen, settings, subject, workspace),
                state=state,
                endpoint=source,
                type=type,
                since_ms=since_ms,
                limit=limit,
            )
            if not rows:
                check_source(seen, config, source)
    print_listing(rows, limit, as_json, shown.event, EVENT_HEADINGS, event_cells, prose=True)


@events.command("show")
@click.argument("event", metavar="EVENT")
@click.option("--payload", is_flag=True, help="Print the stored body too.")
@json_option
@configured
def events_show(config: Path, event: str, payload: bool, as_json: bool) -> None:
    """Tell what happened to EVENT, and what to do about it.

    EVENT is its id, source/account/id, source/id, or its row number; or the id of a request that
    brought it, what it is about (an invoice's id), or a workspace that has no other.

    \b
    Example:
      receiver events show evt_1NirD82eZvKYlo2C --payload
    """
    from receiver import named, story
    from receiver.difference import pretty
    from store import inbox

    settings = load_settings(config)
    with reading(settings) as seen:
        told = story.tell(seen, settings, named.event_about(seen, settings, event))
        body = inbox.payload(seen, told.row.id) if payload else None
    lines = [] if body is None else pretty(body, settings.sources.get(told.row.endpoint))
    if as_json:
        extra = {"payload": "\n".join(lines) if body is not None else None} if payload else {}
        console.print_json(story.as_object(told) | extra)
        return
    print_story(told, config)
    if payload:
        console.say("")
        for line in lines or ["its payload is not there: it was pruned, redacted or never kept"]:
            console.say(line)


def print_story(told: "Story", config: Path) -> None:
    """A story for people."""
    from receiver import shown

    row, at = told.row, shared.now_ms()
    waits_for = None if told.waits_for is None else shown.fact_words(told.waits_for)
    console.print_fields(
        [
            ("event", shown.name_of(row)),
            ("row", row.id),
            ("type", row.type or None),
            ("state", console.state(row.state)),
            ("reason", row.reason),
            ("waits for", waits_for),
            ("last error", row.last_error),
            ("redelivered", shown.times(row.duplicates) if row.duplicates else None),
            (
                "leased until" if row.lease_until_ms else "next attempt",
                console.moment(row.next_attempt_ms, at) if row.next_attempt_ms else None,
            ),
            ("attributed to", row.workspace),
            ("claimed account", row.claimed_account),
        ]
    )
    console.say("")
    console.print_table(
        ("when", "what", "how"),
        [(console.when(one.at_ms, at), one.what, one.words) for one in told.moments],
        "wrap",
    )
    for step in told.next_steps:
        next_step(step, config)


@events.command("tail")
@click.option(
    "-n",
    "last",
    type=click.IntRange(0, 10_000),
    default=10,
    show_default=True,
    help="How many of the newest to begin with.",
)
@json_option
@configured
def events_tail(config: Path, last: int, as_json: bool) -> None:
    """Print events as they come, until Ctrl-C; needs no server.

    \b
    Example:
      receiver events tail -n 20
    """
    from receiver import shown
    from receiver.tail import follow, stdout_closed

    settings = load_settings(config)
    with stdout_closed() as closed, contextlib.suppress(KeyboardInterrupt):
        for row in follow(functools.partial(reading, settings), last, closed):
            if as_json:
                console.print_json(shown.event(row))
            else:
                cells = map(console.plain, event_cells(row))
                console.say("  ".join(filter(None, cells)))


@events.command("resolve")
@click.argument("event", metavar="EVENT")
@why_option
@configured
def events_resolve(config: Path, event: str, reason: str) -> None:
    """Close EVENT, which needs nothing more, as `ignored`.

    \b
    Example:
      receiver events resolve evt_1NirD82eZvKYlo2C --reason "a test of ours"
    """
    from receiver import named, operate

    with acting(load_settings(config)) as (store, who):
        by = operate.By(who, reason)
        store.write(lambda tx: operate.resolve(tx, named.event(tx, event).id, by))
    console.say(f"{event} is ignored from now on: {reason}")


@click.command()
@click.argument("events", metavar="[EVENT]...", nargs=-1)
@state_option
@source_option
@type_option
@since_option
@click.option("--yes", is_flag=True, help="Don't ask before more than one is run.")
@click.option("--dry-run", is_flag=True, help="Keep nothing, and tell what would change.")
@click.option("--payload", is_flag=True, help="With --dry-run, print what messages say too.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run, one JSON object a line.")
@reason_option
@configured
def replay(
    config: Path,
    events: Sequence[str],
    dry_run: bool,
    payload: bool,
    as_json: bool,
    yes: bool,
    reason: str,
    **filters: Any,
) -> int:
    """Run events again, now; what was done is never done twice.

    That goes for every state: for `dead` ones once their cause is gone, for `pending` ones
    before their next attempt is due, and for those of queued sources, whose prepare functions
    run first.

    Name each EVENT (its id, source/account/id, source/id or row number), or choose them by
    --state, --source, --type and --since.

    --dry-run runs the effects and undoes them: the file stays as it is and nothing is sent. It
    runs no prepare function; a handler runs, but can't reach the network or start a program.

    \b
    Example:
      receiver replay --state quarantined --since 2d --reason "price was missing"
    """
    settings = load_settings(config)
    if (payload or as_json) and not dry_run:
        raise click.UsageError("--payload and --json go with --dry-run")
    rows = rows_to_replay(settings, events, filters)
    if dry_run:
        return rehearse(config, settings, rows, payload=payload, as_json=as_json)
    if len(rows) > 1 and not yes:
        confirm(f"Run {len(rows)} events again?")
    return say_replayed(config, settings, run_again(settings, rows, reason))


def rows_to_replay(
    settings: "Settings", events: Sequence[str], filters: Mapping[str, Any]
) -> list[int]:
    """The rows that are named, or else those that fit; raises UsageError without either."""
    from receiver import named
    from store import inbox

    if bool(events) == any(one is not None for one in filters.values()):
        raise click.UsageError("name events, or choose them by --state, --source, --type, --since")
    with reading(settings) as seen:
        rows = [named.event(seen, event).id for event in events] or inbox.numbers(
            seen,
            state=filters["state"],
            endpoint=filters["source"],
            type=filters["type"],
            since_ms=filters["since_ms"],
        )
        if not rows:
            check_source(seen, settings.path, filters["source"])
    return list(dict.fromkeys(rows))


def run_again(settings: "Settings", rows: Sequence[int], reason: str) -> "list[Replayed]":
    from receiver import operate

    ran = []
    with operating(settings, reason) as (store, processor, by):
        with progress(len(rows), "Running events again") as advance:
            for batch in operate.replay(store, processor, rows, by):
                ran += batch
                advance(len(batch))
        drain(store, processor)
    return ran


def rehearse(
    config: Path, settings: "Settings", rows: Sequence[int], *, payload: bool, as_json: bool
) -> int:
    """Tell what a replay would change; FOUND if anything would still be unfinished."""
    from receiver import rehearsal

    parts, words = 0, set()
    with rehearsal.sealed(), operating(settings, "") as (store, processor, _):
        for batch in rehearsal.rehearse(store, processor, rows):
            parts += 1
            words |= {one.word for one in batch}
            with reading(settings) as seen:
                print_rehearsed(seen, batch, payload=payload, as_json=as_json)
    if not rows:
        console.warn("no event fits", None)
    if parts > 1:
        console.warn(f"tried in {parts} parts: no part met what the one before it did", None)
    console.warn("a dry run: nothing was changed, and nothing was sent", None)
    return FINE if words <= {"done", "ignored"} else FOUND


def print_rehearsed(
    seen: "Snapshot", batch: "Sequence[Rehearsed]", *, payload: bool, as_json: bool
) -> None:
    """What each event of a dry run would do."""
    from receiver import rehearsal

    for one in batch:
        if as_json:
            console.print_json(rehearsal.as_object(seen, one, payload=payload))
            continue
        for line, colour in rehearsal.lines(seen, one, payload=payload):
            console.say(line, colour)


def say_replayed(config: Path, settings: "Settings", ran: Sequence["Replayed"]) -> int:
    """What became of each; FOUND if any is still unfinished."""
    from receiver import shown
    from store import inbox

    counts: dict[str, int] = {}
    settled: set[int] = set()
    with reading(settings) as seen:
        for one in ran:
            row = inbox.by_row(seen, one.row)
            name = str(one.row) if row is None else shown.handle(seen, row)
            why = one.problem or (None if row is None else row.reason or row.last_error)
            fine = one.word in ("done", "ignored")
            told = f": {why}" if why and one.word != "done" else ""
            if one.repeated:
                told = ": all had been done before, no operation and no ledger entry is new"
            console.say(f"{name}  {one.word}{told}", None if fine else "yellow")
            counts[one.word] = counts.get(one.word, 0) + 1
            if row is not None and row.state in ("done", "ignored"):
                settled.add(one.row)
    if not ran:
        console.warn("no event fits", None)
    if len(ran) > 1:
        words = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
        console.say(f"{len(ran)} events were run again: {words}")
    unfinished = [one for one in ran if one.word not in ("done", "ignored")]
    needing = [one.row for one in unfinished if one.row not in settled]
    if needing:
        next_step(f"`receiver events show {needing[0]}` says what it needs", config)
    return FOUND if unfinished else FINE
