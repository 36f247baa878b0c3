"""The command that lists what was done by hand."""

from pathlib import Path

import click

from receiver import console
from receiver.commands import shared
from receiver.commands.shared import (
    listing,
    looking,
    print_listing,
    since_option,
)


@click.command()
@listing
@since_option
@click.option("--actor", metavar="USER", help="Only acts of this user, as they are listed.")
@click.option("--action", metavar="WORDS", help="Only these acts, as in `replay` or `ledger`.")
def audit(
    config: Path,
    as_json: bool,
    limit: int,
    since_ms: int | None,
    actor: str | None,
    action: str | None,
) -> None:
    """List what was done by hand: when, who, what, and why; newest first.

    The file takes additions only. After sudo the user is `CALLER as USER`.

    \b
    Example:
      receiver audit --since 7d --action ledger
    """
    from receiver import shown
    from store import audit

    with looking(config) as seen:
        found = audit.listed(seen, actor=actor, action=action, since_ms=since_ms, limit=limit)
    at = shared.now_ms()
    print_listing(
        found,
        limit,
        as_json,
        shown.act,
        ("when", "who", "what", "to", "why"),
        lambda one: (
            console.when(one.at_ms, at),
            one.actor,
            one.action,
            one.target,
            one.reason or None,
        ),
        prose=True,
    )
