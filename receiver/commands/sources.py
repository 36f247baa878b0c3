"""The commands about sources: their contract, their URL, what came last."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from receiver import console
from receiver.commands import shared
from receiver.commands.shared import (
    ROW_MAX,
    USAGE,
    Failure,
    Listed,
    acting,
    configured,
    json_option,
    listing,
    load_settings,
    names_in,
    next_step,
    reading,
    reason_option,
    source_named,
)

if TYPE_CHECKING:
    from receiver.config import Settings, Source
    from receiver.sources import Last

#: Minutes that a source waits for a handshake with a secret: usually, and at most.
ARM_MINUTES, ARM_MINUTES_MAX = 10, 1_440


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
@click.argument("name", metavar="SOURCE", shell_complete=names_in("sources"))
@click.option("--reveal", is_flag=True, help="Show the secret that is a part of the URL, too.")
@json_option
def sources_show(config: Path, name: str, reveal: bool, as_json: bool) -> None:
    """Show what a source demands of its deliveries, and the URL to enter at the sender.

    \b
    Example:
      receiver sources show stripe
    """
    from receiver.sources import described, fields, with_secrets

    settings = load_settings(config)
    source = source_named(settings, name)
    recent = last_of_sources(settings)[name]
    if reveal:
        source = with_secrets(source, config)
    if as_json:
        console.print_json(described(settings, source, recent, reveal))
    else:
        console.print_fields(fields(settings, source, recent, shared.now_ms(), reveal))


@sources.command("presets")
@click.argument("name", metavar="[NAME]", required=False)
@json_option
def sources_presets(name: str | None, as_json: bool) -> None:
    """List the senders that `scheme` may name, or show one: ids, secrets, retries, and notes.

    \b
    Example:
      receiver sources presets paddle
    """
    from receiver import caveats, presets

    try:
        found = [presets.get(one) for one in ([name] if name else presets.names())]
    except presets.PresetError as error:
        raise shared.NotFound(str(error)) from error
    if as_json:
        for preset in found:
            console.print_json(caveats.described(preset))
    elif name:
        console.print_fields(list(caveats.fields(found[0])))
    else:
        console.print_table(caveats.HEADINGS, list(map(caveats.row, found)), "cut")


@sources.command("arm")
@configured
@click.argument("name", metavar="SOURCE")
@click.option(
    "--minutes",
    type=click.IntRange(1, ARM_MINUTES_MAX),
    default=ARM_MINUTES,
    show_default=True,
    help="How long to wait.",
)
@click.option("--off", is_flag=True, help="Wait no longer.")
@reason_option
def sources_arm(config: Path, name: str, minutes: int, off: bool, reason: str) -> None:
    """Take the secret that the sender's next handshake brings, once.

    For senders that hand their secret over when the webhook is made, as Asana and Notion do. The
    first handshake is taken, whoever sends it: arm the source just before you make the webhook,
    and compare afterwards, with `receiver sources show`, who sent it and when. A running server
    knows of it within a second.

    \b
    Example:
      receiver sources arm asana --minutes 5
    """
    from receiver import operate
    from receiver.sources import url_of

    settings = load_settings(config)
    source = capturing(settings, name)
    with acting(settings) as (store, who):
        by = operate.By(who, reason)
        if off:
            store.write(lambda tx: operate.disarm(tx, name, by))
        else:
            store.write(lambda tx: operate.arm(tx, name, minutes, by))
    if off:
        console.say(f"{name} is not armed any more")
        return
    console.say(
        f"{name} is armed for {console.counted(minutes, 'minute')}: make the webhook at the sender"
    )
    console.say(f"its URL is {url_of(source) or f'<public_url>/webhooks/{name}'}")
    next_step(f"then `receiver sources show {name}`", config)


@sources.command("captured")
@configured
@click.argument("name", metavar="SOURCE")
@click.option("--show", is_flag=True, help="Print the secrets themselves, too.")
@json_option
def sources_captured(config: Path, name: str, show: bool, as_json: bool) -> None:
    """List the secrets that a sender handed over; they are accepted until they are forgotten.

    \b
    Example:
      receiver sources captured notion --show
    """
    from receiver.sources import captured_words, described_captured
    from store import captured

    settings = load_settings(config)
    capturing(settings, name)
    with reading(settings) as seen:
        kept = captured.listed(seen).get(name, [])
    if not kept and not as_json:
        console.warn("nothing is listed", None)
    for one in kept:
        # Only printable ASCII is captured.
        value = one.secret.decode()
        if as_json:
            console.print_json(described_captured(one) | ({"value": value} if show else {}))
            continue
        console.say(captured_words(one, shared.now_ms()))
        if show:
            console.say(value)


@sources.command("forget")
@configured
@click.argument("name", metavar="SOURCE")
@click.argument("number", metavar="N", type=click.IntRange(1, ROW_MAX))
@reason_option
def sources_forget(config: Path, name: str, number: int, reason: str) -> None:
    """Accept nothing more that is signed with captured secret N.

    \b
    Example:
      receiver sources forget asana 1 --reason "not our webhook"
    """
    from receiver import operate

    settings = load_settings(config)
    capturing(settings, name)
    with acting(settings) as (store, who):
        by = operate.By(who, reason)
        store.write(lambda tx: operate.forget(tx, name, number, by))
    console.say(f"captured:{number} is forgotten: what it signs is refused from now on")


def capturing(settings: "Settings", name: str) -> "Source":
    """The source, whose sender hands over its secret; raises Failure."""
    source = source_named(settings, name)
    if not source.contract.preset.captures:
        raise Failure(
            f"sources.{name}: {source.scheme} hands over no secret; write it under `secrets`",
            code=USAGE,
        )
    return source


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
