"""The commands about sources: their contract, their URL, what came last."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from receiver import console
from receiver.commands import shared
from receiver.commands.shared import (
    Listed,
    configured,
    json_option,
    listing,
    load_settings,
    reading,
    source_named,
)

if TYPE_CHECKING:
    from receiver.config import Settings
    from receiver.sources import Last


@click.group(cls=Listed)
def sources() -> None:
    """The configured senders: what each demands, and what came from it last."""


@sources.command("list")
@listing
def sources_list(config: Path, as_json: bool, limit: int) -> None:
    """List the sources.

    \b
    Example:
      receiver sources list
    """
    from receiver.sources import HEADINGS, described, row

    settings = load_settings(config)
    recent = last_of_sources(settings)
    shown = list(settings.sources.values())[:limit]
    if as_json:
        for source in shown:
            console.print_json(described(settings, source, recent[source.name]))
        return
    at = shared.now_ms()
    rows = [row(source, recent[source.name], at) for source in shown]
    console.print_table(HEADINGS, rows, "cut")
    console.more(len(shown), limit)


@sources.command("show")
@configured
@click.argument("name", metavar="SOURCE")
@json_option
def sources_show(config: Path, name: str, as_json: bool) -> None:
    """Show what a source demands of its deliveries, and the URL to enter at the sender.

    \b
    Example:
      receiver sources show stripe
    """
    from receiver.sources import described, fields

    settings = load_settings(config)
    source = source_named(settings, name)
    recent = last_of_sources(settings)[name]
    if as_json:
        console.print_json(described(settings, source, recent))
    else:
        console.print_fields(fields(settings, source, recent, shared.now_ms()))


def last_of_sources(settings: "Settings") -> "dict[str, Last]":
    """What came last from each source: nothing, while there is no file."""
    from receiver.sources import Last, last
    from store.database import exists
    from store.errors import StoreError

    if exists(settings.database):
        try:
            with reading(settings) as seen:
                return {name: last(seen, name) for name in settings.sources}
        except StoreError as error:
            console.warn(f"receiver: {error}")
    return {name: Last() for name in settings.sources}
