"""The commands about deliveries whose content differs from the event's."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from receiver import console
from receiver.commands import shared
from receiver.commands.shared import (
    ROW_MAX,
    Listed,
    NotFound,
    acting,
    configured,
    json_option,
    listing,
    load_settings,
    looking,
    next_step,
    print_listing,
    reading,
    reason_option,
)

if TYPE_CHECKING:
    from store.conflicts import Conflict
    from store.database import Snapshot
    from store.inbox import Row


@click.group(cls=Listed)
def conflicts() -> None:
    """Deliveries whose event is known but not their content, and ties of resources."""


@conflicts.command("list")
@listing
@click.option("--all", "everything", is_flag=True, help="The resolved ones too.")
def conflicts_list(config: Path, as_json: bool, limit: int, everything: bool) -> None:
    """List conflicts, newest first.

    \b
    Example:
      receiver conflicts list --all
    """
    from receiver import shown
    from store import conflicts, inbox

    with looking(config) as seen:
        found = [
            (one, row)
            for one in conflicts.listed(seen, resolved=everything, limit=limit)
            if (row := inbox.by_row(seen, one.event)) is not None
        ]
    at = shared.now_ms()
    print_listing(
        found,
        limit,
        as_json,
        lambda one: shown.conflict(*one),
        ("conflict", "received", "event", "type", "times", "resolved"),
        lambda one: (
            one[0].id,
            console.when(one[0].received_ms, at),
            shown.name_of(one[1]),
            one[1].type,
            one[0].deliveries,
            console.when(one[0].resolved_ms, at),
        ),
    )


@conflicts.command("show")
@click.argument("number", metavar="N", type=click.IntRange(1, ROW_MAX))
@json_option
@configured
def conflicts_show(config: Path, number: int, as_json: bool) -> None:
    """Show how the content of conflict N differs from what is stored.

    \b
    Example:
      receiver conflicts show 1
    """
    from receiver import shown
    from receiver.difference import unified
    from store import conflicts, inbox

    settings = load_settings(config)
    with reading(settings) as seen:
        one = conflicts.by_id(seen, number)
        row = None if one is None else inbox.by_row(seen, one.event)
        stored = None if one is None or row is None else content(seen, one, row)
    if one is None or row is None:
        raise NotFound(f"there is no conflict {number}: `receiver conflicts list` shows them")
    source = settings.sources.get(row.endpoint)
    volatile = () if source is None else source.contract.volatile
    lines = list(unified(stored or b"", one.body or b"", source))
    if as_json:
        gone = stored is None or one.body is None
        about = {"volatile": volatile, "pruned": gone, "diff": "\n".join(lines)}
        console.print_json(shown.conflict(one, row) | about)
        return
    at = shared.now_ms()
    console.print_fields(
        [
            ("event", shown.name_of(row)),
            ("resource", None if one.resource is None else f"row {one.resource}"),
            ("stored", console.moment(row.received_ms, at)),
            ("other", f"{console.moment(one.received_ms, at)}, {shown.times(one.deliveries)}"),
            ("not compared", ", ".join(volatile) or None),
            ("resolved", console.moment(one.resolved_ms, at) if one.resolved_ms else None),
        ]
    )
    if one.body is None:
        console.warn("its content was pruned or redacted: only what is stored is shown", None)
    elif stored is None:
        console.warn("the stored payload was pruned: only the other is shown", None)
    for line in lines:
        console.say(line, {"+": "green", "-": "red", "@": "cyan"}.get(line[:1]))
    if one.resolved_ms is None:
        next_step(f"when you have looked: `receiver conflicts resolve {number}`", config)


def content(seen: "Snapshot", one: "Conflict", row: "Row") -> bytes | None:
    """What is stored, and stands: of the event, or of the resource that it is about."""
    from receiver.projection import content_of
    from store import inbox, resources

    if one.resource is None:
        return inbox.payload(seen, row.id)
    known = resources.by_id(seen, one.resource)
    assert known is not None, "resources are never deleted"
    return content_of(known.seen)


@conflicts.command("resolve")
@click.argument("number", metavar="N", type=click.IntRange(1, ROW_MAX))
@reason_option
@configured
def conflicts_resolve(config: Path, number: int, reason: str) -> None:
    """Note that you have looked at conflict N; what is stored stays as it is.

    \b
    Example:
      receiver conflicts resolve 1 --reason "their bug"
    """
    from receiver import operate

    with acting(load_settings(config)) as (store, who):
        store.write(lambda tx: operate.resolve_conflict(tx, number, operate.By(who, reason)))
    console.say(f"conflict {number} is resolved")
