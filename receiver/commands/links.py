"""The commands about which workspace a customer belongs to."""

import shlex
from pathlib import Path

import click

from receiver import console
from receiver.commands import shared
from receiver.commands.shared import (
    Listed,
    account_option,
    acting,
    configured,
    drain,
    listing,
    load_settings,
    names_in,
    next_step,
    operating,
    print_listing,
    reading,
    reason_option,
    say_new_workspace,
    say_released,
)


@click.group(cls=Listed)
def links() -> None:
    """Which workspace a sender's customer is."""


@links.command("list")
@listing
@click.option(
    "--source",
    metavar="NAME",
    shell_complete=names_in("sources"),
    help="Only links of this source.",
)
@click.option("--customer", metavar="CUSTOMER", help="Only links of this customer.")
@click.option("--workspace", metavar="WORKSPACE", help="Only links to this workspace.")
def links_list(
    config: Path,
    as_json: bool,
    limit: int,
    source: str | None,
    customer: str | None,
    workspace: str | None,
) -> None:
    """List links, newest first.

    \b
    Example:
      receiver links list --workspace acme
    """
    from receiver import named, shown
    from store import links

    settings = load_settings(config)
    of = None if source is None else named.identity(settings, source)
    with reading(settings) as seen:
        found = links.listed(seen, source=of, customer=customer, workspace=workspace, limit=limit)
    at = shared.now_ms()
    print_listing(
        found,
        limit,
        as_json,
        shown.link,
        ("source", "account", "customer", "workspace", "since"),
        lambda one: (
            one.source,
            one.account or None,
            one.customer,
            one.workspace,
            console.when(one.created_ms, at),
        ),
    )


@links.command("add")
@click.argument("source", metavar="SOURCE", shell_complete=names_in("sources"))
@click.argument("customer", metavar="CUSTOMER")
@click.argument("workspace", metavar="WORKSPACE")
@account_option
@click.option("--repoint", is_flag=True, help="Also where it is another workspace's now.")
@reason_option
@configured
def links_add(
    config: Path,
    source: str,
    customer: str,
    workspace: str,
    account: str | None,
    repoint: bool,
    reason: str,
) -> None:
    """Link CUSTOMER of SOURCE to WORKSPACE, and apply what was parked on it.

    \b
    Example:
      receiver links add stripe cus_1 acme
    """
    from receiver import named, operate
    from store.database import Tx

    settings = load_settings(config)
    identity, account = named.sender(settings, source, account)

    def link(tx: Tx) -> tuple[bool, operate.Linked]:
        known = named.has_anything(tx, workspace)
        return known, operate.link(
            tx, identity, account, customer, workspace, repoint=repoint, by=by
        )

    with operating(settings, reason) as (store, processor, by):
        known, linked = store.write(link)
        drain(store, processor)
    of_account = f" of account {account}" if account else ""
    words = {
        "added": f"is linked to workspace {workspace}",
        "known": f"is already linked to workspace {workspace}",
        "repointed": f"is linked to workspace {workspace}, no longer to {linked.before}",
    }
    console.say(f"customer {customer}{of_account} of {identity} {words[linked.word]}")
    if not known:
        say_new_workspace(workspace)
    say_released(config, settings, linked.released)
    if linked.released:
        next_step(f"`receiver balance {shlex.quote(workspace)}`", config)


@links.command("remove")
@click.argument("source", metavar="SOURCE", shell_complete=names_in("sources"))
@click.argument("customer", metavar="CUSTOMER")
@account_option
@reason_option
@configured
def links_remove(
    config: Path, source: str, customer: str, account: str | None, reason: str
) -> None:
    """Forget a link; what was granted through it stays.

    \b
    Example:
      receiver links remove stripe cus_1
    """
    from receiver import named, operate

    settings = load_settings(config)
    identity, account = named.past_sender(settings, source, account)
    with acting(settings) as (store, who):
        by = operate.By(who, reason)
        before = store.write(lambda tx: operate.unlink(tx, identity, account, customer, by))
    console.say(f"customer {customer} of {identity} is no longer linked to workspace {before}")
