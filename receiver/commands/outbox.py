"""The commands about messages owed to the outside."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from receiver import console
from receiver.commands import shared
from receiver.commands.shared import (
    FINE,
    FOUND,
    Listed,
    acting,
    check_destination,
    configured,
    confirm,
    json_option,
    listing,
    load_settings,
    looking,
    names_in,
    next_step,
    print_listing,
    progress,
    reading,
    reason_option,
)

if TYPE_CHECKING:
    from receiver.config import Settings
    from receiver.message import Told as MessageStory
    from receiver.operate import Acted
    from store.outbox import Message

message_state_option = click.option(
    "--state",
    type=click.Choice(("pending", "sent", "review", "dead", "cancelled")),
    help="Only messages in this state.",
)


destination_option = click.option(
    "--destination",
    metavar="NAME",
    shell_complete=names_in("destinations"),
    help="Only messages to this destination.",
)


MESSAGE_HEADINGS = (
    "message",
    "owed since",
    "to",
    "for",
    "state",
    "attempts",
    "next attempt",
    "last error",
)


@click.group(cls=Listed)
def outbox() -> None:
    """Messages owed to the outside, and what became of them."""


@outbox.command("list")
@listing
@message_state_option
@destination_option
def outbox_list(
    config: Path, as_json: bool, limit: int, state: str | None, destination: str | None
) -> None:
    """List messages, newest first.

    \b
    Example:
      receiver outbox list --state review
    """
    from receiver import shown
    from store import outbox

    with looking(config) as seen:
        found = outbox.listed(seen, state=state, destination=destination, limit=limit)
        if not found:
            check_destination(seen, config, destination)
    at = shared.now_ms()
    print_listing(
        found,
        limit,
        as_json,
        shown.message,
        MESSAGE_HEADINGS,
        lambda one: (
            one.id,
            console.moment(one.created_ms, at),
            shown.recipient(one),
            str(one.key),
            console.state(one.state),
            one.attempts,
            console.moment(one.next_attempt_ms, at),
            one.last_error,
        ),
    )


@outbox.command("show")
@click.argument("message", metavar="MESSAGE")
@click.option("--body", "with_body", is_flag=True, help="Print what is sent, too.")
@json_option
@configured
def outbox_show(config: Path, message: str, with_body: bool, as_json: bool) -> None:
    """Tell what became of MESSAGE, and what to do about it.

    MESSAGE is its number or its operation key, by which the other side knows it.

    \b
    Example:
      receiver outbox show 12 --body
    """
    import json

    from receiver import named
    from receiver.message import as_object, body_of, tell

    settings = load_settings(config)
    with reading(settings) as seen:
        told = tell(seen, settings, named.message(seen, message), shared.now_ms())
    body = body_of(told.message) if with_body else None
    if as_json:
        console.print_json(as_object(told) | ({"body": body} if with_body else {}))
        return
    print_message(told, config)
    if with_body:
        console.say("")
        for line in json.dumps(body, indent=2, ensure_ascii=False).splitlines():
            console.say(line)


@outbox.command("retry")
@click.argument("messages", metavar="[MESSAGE]...", nargs=-1)
@click.option(
    "--state",
    type=click.Choice(("dead", "pending", "cancelled", "review")),
    help="Those in this state [with --destination alone: dead].",
)
@click.option(
    "--destination",
    metavar="NAME",
    shell_complete=names_in("destinations"),
    help="Those to this destination.",
)
@click.option("--yes", is_flag=True, help="Don't ask before more than one is sent.")
@reason_option
@configured
def outbox_retry(
    config: Path,
    messages: Sequence[str],
    state: str | None,
    destination: str | None,
    yes: bool,
    reason: str,
) -> int:
    """Make messages due now, whatever state they are in but `sent`.

    Name each MESSAGE (its number or operation key), or choose them by --state and
    --destination. One whose attempts ran out gets one more; one that did not render is
    rendered by the config as it is now.

    \b
    Example:
      receiver outbox retry --state dead --destination team --reason "it is back"
    """
    from receiver import named, operate
    from store import outbox

    settings = load_settings(config)
    if bool(messages) == bool(state or destination):
        raise click.UsageError("name messages, or choose them by --state, --destination")
    with reading(settings) as seen:
        numbers = [named.message(seen, message).id for message in messages] or outbox.numbers(
            seen, state=state or "dead", destination=destination
        )
        if not numbers:
            check_destination(seen, config, destination)
    numbers = list(dict.fromkeys(numbers))
    if len(numbers) > 1 and not yes:
        twice = "; some may have been received" if state == "review" else ""
        confirm(f"Send {len(numbers)} messages again{twice}?")
    with acting(settings) as (store, who):
        acted, by = [], operate.By(who, reason)
        with progress(len(numbers), "Making messages due") as advance:
            for batch in operate.retry_messages(store, settings, numbers, by):
                acted += batch
                advance(len(batch))
    return say_retried(config, settings, acted)


def say_retried(config: Path, settings: "Settings", acted: Sequence["Acted"]) -> int:
    """What became of each; FOUND if any could not be made due."""
    for number, before, problem in acted:
        if before is None:
            console.say(f"{number}  not done: {problem}", "yellow")
        else:
            # Its last attempt may have gone through.
            twice = before.state == "review" or before.lease_owner is not None
            known = "; the other side may have it already" if twice else ""
            console.say(f"{number}  to {before.destination}: was {before.state}, is due now{known}")
    if not acted:
        console.warn("no message fits", None)
    made = [one.before for one in acted if one.before is not None]
    if made:
        say_how_sent(config, settings, made)
    return FINE if len(made) == len(acted) else FOUND


def say_how_sent(config: Path, settings: "Settings", messages: "Sequence[Message]") -> None:
    """What sends messages that are due now, or what keeps them waiting."""
    for name in sorted({one.destination for one in messages} - set(settings.destinations)):
        console.warn(f"the config has no destination {name}: what is owed to it waits")
    if settings.worker.run == "off":
        console.warn("worker.run is off: they are sent once it is on")
    who = {"inside": "the server sends", "separate": "`receiver work` sends", "off": ""}
    if who[settings.worker.run]:
        shown = f"`receiver outbox show {messages[0].id}` tells how it went"
        next_step(f"{who[settings.worker.run]} what is due; {shown}", config)


@outbox.command("resolve")
@click.argument("message", metavar="MESSAGE")
@click.option("--sent", is_flag=True, help="The other side has it.")
@click.option("--again", is_flag=True, help="The other side does not have it: send it again.")
@reason_option
@configured
def outbox_resolve(config: Path, message: str, sent: bool, again: bool, reason: str) -> None:
    """Say of MESSAGE, whose outcome is not known, whether the other side has it.

    Its records have the operation key: as Idempotency-Key, or in a mail's Message-ID.

    \b
    Example:
      receiver outbox resolve 12 --sent --reason "it is in their log"
    """
    from receiver import named, operate
    from store.database import Tx
    from store.outbox import Message

    if sent == again:
        raise click.UsageError("say --sent, or --again")
    settings = load_settings(config)

    def resolve(tx: Tx) -> Message:
        found = named.message(tx, message)
        operate.resolve_message(tx, found.id, sent=sent, by=by)
        return found

    with acting(settings) as (store, who):
        by = operate.By(who, reason)
        found = store.write(resolve)
    if sent:
        console.say(f"message {found.id} to {found.destination} is sent: it is not tried again")
        return
    console.say(f"message {found.id} to {found.destination} is due now, under the same key")
    say_how_sent(config, settings, [found])


@outbox.command("cancel")
@click.argument("message", metavar="MESSAGE")
@reason_option
@configured
def outbox_cancel(config: Path, message: str, reason: str) -> None:
    """Say that MESSAGE is not to be sent; no later event owes it again.

    \b
    Example:
      receiver outbox cancel 12 --reason "they were told by phone"
    """
    from receiver import named, operate
    from store.database import Tx
    from store.outbox import Message

    def cancel(tx: Tx) -> Message:
        return operate.cancel_message(tx, named.message(tx, message).id, by)

    with acting(load_settings(config)) as (store, who):
        by = operate.By(who, reason)
        before = store.write(cancel)
    console.say(f"message {before.id} to {before.destination} is cancelled, it was {before.state}")
    if before.state == "review" or before.lease_owner is not None:
        console.warn("an attempt has an unknown outcome: the other side may have it all the same")


def print_message(told: "MessageStory", config: Path) -> None:
    """A message's story for people."""
    from receiver import shown
    from receiver.message import is_leased

    message, at = told.message, shared.now_ms()
    leased = is_leased(message, at)
    due_ms = None if leased else message.next_attempt_ms
    console.print_fields(
        [
            ("message", message.id),
            ("to", shown.recipient(message)),
            ("operation key", message.operation_key),
            ("state", console.state(message.state)),
            ("last error", message.last_error),
            ("attempts", message.attempts),
            ("next attempt", None if due_ms is None else console.moment(due_ms, at)),
            ("leased until", console.moment(message.lease_until_ms, at) if leased else None),
        ]
    )
    console.say("")
    console.print_table(
        ("when", "what", "how"),
        [(console.moment(one.at_ms, at), one.what, one.words) for one in told.moments],
    )
    for step in told.next_steps:
        next_step(step, config)
    if told.owner is not None:
        next_step(f"`receiver events show {told.owner}` tells of the event that owes it", config)
