"""The commands about events that wait for a fact."""

import shlex
from pathlib import Path

import click

from receiver import console
from receiver.commands import shared
from receiver.commands.shared import (
    FINE,
    FOUND,
    Listed,
    check_source,
    configured,
    drain,
    listing,
    load_settings,
    looking,
    next_step,
    operating,
    print_listing,
    reading,
    reason_option,
    source_option,
)


@click.group(cls=Listed)
def parked() -> None:
    """Events that wait for a link, for an earlier grant, or for you."""


@parked.command("list")
@listing
@source_option
def parked_list(config: Path, as_json: bool, limit: int, source: str | None) -> None:
    """List parked events and what each waits for, longest waiting first.

    \b
    Example:
      receiver parked list --source stripe
    """
    from receiver import shown
    from store import inbox, parked

    with looking(config) as seen:
        found = [
            (row, fact, since_ms)
            for event, fact, since_ms in parked.listed(seen, endpoint=source, limit=limit)
            if (row := inbox.by_row(seen, event)) is not None
        ]
        if not found:
            check_source(seen, config, source)
    at = shared.now_ms()
    print_listing(
        found,
        limit,
        as_json,
        lambda one: (
            shown.event(one[0])
            | {"waits_for": shown.fact(one[1]), "parked_at": console.rfc3339(one[2])}
        ),
        ("row", "parked", "source", "id", "type", "waits for"),
        lambda one: (
            one[0].id,
            console.when(one[2], at),
            one[0].endpoint,
            one[0].event_id,
            one[0].type,
            shown.fact_words(one[1]),
        ),
    )


@parked.command("attribute")
@click.argument("event", metavar="EVENT")
@click.option("--workspace", required=True, metavar="WORKSPACE", help="Whose event it is.")
@reason_option
@configured
def parked_attribute(config: Path, event: str, workspace: str, reason: str) -> int:
    """Say whose EVENT is, and apply it: this one only, no customer is linked.

    \b
    Example:
      receiver parked attribute evt_1NirD82eZvKYlo2C --workspace acme
    """
    from receiver import named, operate
    from store import inbox
    from store.database import Tx

    settings = load_settings(config)

    def attribute(tx: Tx) -> int:
        row = named.event(tx, event).id
        operate.attribute(tx, row, workspace, by)
        return row

    with operating(settings, reason) as (store, processor, by):
        row = store.write(attribute)
        drain(store, processor)
    with reading(settings) as seen:
        known = inbox.by_row(seen, row)
        assert known is not None, "events are never deleted"
    why = f": {known.reason or known.last_error}" if known.state != "done" else ""
    console.say(f"{event} is attributed to {workspace} and {known.state}{why}")
    if known.state in ("done", "ignored"):
        next_step(f"`receiver balance {shlex.quote(workspace)}`", config)
        return FINE
    next_step(f"`receiver events show {row}` says what it needs", config)
    return FOUND
