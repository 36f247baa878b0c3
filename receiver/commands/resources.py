"""The commands about the current state of the sender's objects."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from receiver import console
from receiver.commands import shared
from receiver.commands.shared import (
    Listed,
    acting,
    configured,
    json_option,
    listing,
    load_settings,
    next_step,
    print_listing,
    reading,
    reason_option,
)

if TYPE_CHECKING:
    from receiver.config import Settings
    from store.fetches import Fetch
    from store.resources import Resource

kind_option = click.option("--kind", metavar="KIND", help="Only resources of this kind.")
identity_option = click.option(
    "--source", metavar="NAME", help="Only resources of this source (or identity)."
)


@click.group(cls=Listed)
def resources() -> None:
    """Current state: what is known of subscriptions, customers and the like."""


@resources.command("list")
@listing
@identity_option
@kind_option
@click.option("--state", metavar="STATE", help="Only resources in this state.")
@click.option("--contested", is_flag=True, help="Only those with a conflict that is open.")
@click.option("--pending", is_flag=True, help="What is still to be fetched, or could not be.")
def resources_list(
    config: Path,
    as_json: bool,
    limit: int,
    source: str | None,
    kind: str | None,
    state: str | None,
    contested: bool,
    pending: bool,
) -> None:
    """List resources, or with --pending what is owed, longest known first.

    \b
    Example:
      receiver resources list --kind subscription --state active
    """
    from receiver import named
    from store import fetches, resources

    if pending and (state or contested):
        raise click.UsageError("--pending is about fetches: leave out --state and --contested")
    settings = load_settings(config)
    identity = None if source is None else named.identity(settings, source)
    with reading(settings) as seen:
        if pending:
            owed = fetches.unfinished(seen, source=identity, kind=kind, limit=limit)
        else:
            found = resources.listed(
                seen, source=identity, kind=kind, state=state, contested=contested, limit=limit
            )
    if pending:
        print_owed(owed, limit, as_json)
    else:
        print_resources(found, limit, as_json)


def print_resources(found: "list[Resource]", limit: int, as_json: bool) -> None:
    from receiver import shown

    at = shared.now_ms()
    print_listing(
        found,
        limit,
        as_json,
        shown.resource,
        ("source", "account", "kind", "id", "state", "", "updated", "by"),
        lambda one: (
            one.source,
            one.account,
            one.kind,
            one.resource_id,
            one.state,
            flags(one),
            console.when(one.updated_ms, at),
            one.came_from,
        ),
    )


def print_owed(owed: "list[Fetch]", limit: int, as_json: bool) -> None:
    from receiver import shown

    at = shared.now_ms()
    print_listing(
        owed,
        limit,
        as_json,
        shown.fetch,
        ("source", "account", "kind", "id", "fetch", "owed since", "attempts", "last error"),
        lambda one: (
            one.source,
            one.account,
            one.kind,
            one.resource_id,
            console.state(one.state),
            console.when(one.wanted_ms, at),
            one.attempts,
            one.last_error,
        ),
        prose=True,
    )


def flags(one: "Resource") -> str:
    """What there is to say of a state, in words."""
    words = {"final": one.terminal and not one.deleted, "contested": one.contested}
    return ", ".join(word for word, holds in words.items() if holds)


@resources.command("show")
@click.argument("resource", metavar="RESOURCE")
@json_option
@configured
def resources_show(config: Path, resource: str, as_json: bool) -> None:
    """Show what is known of RESOURCE, where it came from, and what is still owed.

    RESOURCE is its id, KIND/ID, or SOURCE/ACCOUNT/KIND/ID.

    \b
    Example:
      receiver resources show subscription/sub_1
    """
    from receiver import named, shown
    from store import conflicts, fetches, inbox, resources

    settings = load_settings(config)
    with reading(settings) as seen:
        name = named.resource(seen, resource)
        found, owed = resources.find(seen, name), fetches.find(seen, name)
        contests = [] if found is None else conflicts.of_resource(seen, found.id)
        row = None if found is None or found.event is None else inbox.by_row(seen, found.event)
        event = None if row is None else shown.name_of(row)
    if as_json:
        about = name._asdict() if found is None else shown.resource(found)
        fetch = None if owed is None else shown.fetch(owed)
        open_conflicts = [one.id for one in contests]
        console.print_json(about | {"fetch": fetch, "conflicts": open_conflicts})
        return
    at = shared.now_ms()
    fields: list[tuple[str, console.Cell]] = [
        (key, value or None) for key, value in name._asdict().items()
    ]
    fields += [] if found is None else known_fields(found, event, at)
    fields += [] if owed is None else owed_fields(owed, at)
    console.print_fields(fields)
    for one in contests:
        next_step(f"`receiver conflicts show {one.id}`", config)
    if owed is not None and owed.state != "done":
        again = shlex.quote("/".join(name))
        next_step(f"to try it now: `receiver resources fetch {again}`", config)


def known_fields(one: "Resource", event: str | None, at: int) -> list[tuple[str, console.Cell]]:
    return [
        ("state", one.state or None),
        ("", flags(one) or None),
        ("fields", one.fields),
        ("version", one.version),
        ("came from", f"{one.came_from}{f' for {event}' if event else ''}"),
        ("updated", console.moment(one.updated_ms, at)),
        ("checked", console.moment(one.checked_ms, at)),
    ]


def owed_fields(one: "Fetch", at: int) -> list[tuple[str, console.Cell]]:
    unfinished = one.state != "done"
    return [
        ("fetch", one.state),
        ("owed since", console.moment(one.wanted_ms, at) if unfinished else None),
        ("attempts", one.attempts if unfinished else None),
        ("next attempt", console.moment(one.next_attempt_ms, at) if unfinished else None),
        ("last error", one.last_error),
    ]


@resources.command("fetch")
@click.argument("resource", metavar="RESOURCE")
@click.option(
    "--accept", is_flag=True, help="Take what the sender says, even where that had ended."
)
@reason_option
@configured
def resources_fetch(config: Path, resource: str, accept: bool, reason: str) -> None:
    """Have RESOURCE read from the sender now, by the worker.

    RESOURCE is its id, KIND/ID, or SOURCE/ACCOUNT/KIND/ID. What could not be fetched gets all
    its attempts again. What had ended or was deleted stays so, unless you --accept.

    \b
    Example:
      receiver resources fetch sub_1 --reason "the key is corrected"
    """
    from receiver import named, operate
    from store.database import Tx

    settings = load_settings(config)
    check_worker(settings)

    def fetch(tx: Tx) -> str:
        name = named.resource(tx, resource)
        operate.fetch(tx, settings, name, operate.By(who, reason), accept=accept)
        return "/".join(name)

    with acting(settings) as (store, who):
        name = store.write(fetch)
    console.say(f"{resource} is to be fetched now")
    next_step(f"`receiver resources show {shlex.quote(name)}`", config)


def check_worker(settings: "Settings") -> None:
    if settings.worker.run == "off":
        raise shared.Failure('worker.run is "off", so nothing is fetched: turn it on')
