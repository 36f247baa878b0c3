"""The commands about amounts and records: ledger, balance, records."""

import functools
import secrets
import shlex
from pathlib import Path

import click

from receiver import console
from receiver.commands import shared
from receiver.commands.shared import (
    FINE,
    FOUND,
    Listed,
    NotFound,
    account_option,
    acting,
    configured,
    confirm,
    drain,
    listing,
    load_settings,
    looking,
    names_in,
    next_step,
    operating,
    print_listing,
    reason_option,
    say_new_workspace,
    say_released,
    since_option,
    why_option,
)


@click.group(cls=Listed)
def ledger() -> None:
    """Amounts that were granted, spent and taken back."""


@ledger.command("list")
@listing
@click.option("--workspace", metavar="WORKSPACE", help="Only entries of this workspace.")
@click.option("--subject", metavar="SUBJECT", help="Only entries for this subject.")
@click.option("--operation", metavar="NAME", help="Only entries of this operation.")
@since_option
def ledger_list(
    config: Path,
    as_json: bool,
    limit: int,
    workspace: str | None,
    subject: str | None,
    operation: str | None,
    since_ms: int | None,
) -> None:
    """List entries, newest first.

    \b
    Example:
      receiver ledger list --workspace acme --since 30d
    """
    from receiver import shown
    from store import ledger

    with looking(config) as seen:
        found = ledger.listed(
            seen,
            workspace=workspace,
            subject=subject,
            operation=operation,
            since_ms=since_ms,
            limit=limit,
        )
    at = shared.now_ms()
    print_listing(
        found,
        limit,
        as_json,
        shown.entry,
        ("when", "workspace", "amount", "unit", "entry"),
        lambda one: (
            console.when(one.created_ms, at),
            one.workspace,
            f"{one.amount:+}",
            one.unit,
            str(one.key),
        ),
    )


@ledger.command("grant")
@click.option(
    "--source",
    required=True,
    metavar="NAME",
    shell_complete=names_in("sources"),
    help="The source or its identity.",
)
@account_option
@click.option("--subject", required=True, metavar="SUBJECT", help="E.g. the invoice's id.")
@click.option("--operation", required=True, metavar="NAME", help="The rule's operation.")
@click.option("--workspace", required=True, metavar="WORKSPACE", help="Who gets it.")
@click.option("--amount", required=True, type=click.IntRange(1), help="How much.")
@click.option("--unit", metavar="UNIT", help="Of what [default: the rule's unit].")
@reason_option
@configured
def ledger_grant(
    config: Path,
    source: str,
    account: str | None,
    subject: str,
    operation: str,
    workspace: str,
    amount: int,
    unit: str | None,
    reason: str,
) -> None:
    """Grant what a webhook should have: it finds it done when it comes late.

    \b
    Example:
      receiver ledger grant --source stripe --subject in_1 --operation buy --workspace w1 --amount 5
    """
    from receiver import named, operate
    from store.database import Tx
    from store.operations import Key

    settings = load_settings(config)
    identity, account = named.sender(settings, source, account)
    rule = named.grant_rule(settings, identity, operation)
    unit = unit or (None if rule is None else rule.unit)
    if unit is None:
        raise click.UsageError(f"handlers.py decides what {operation} grants: say --unit")
    key = Key(identity, account, subject, operation)

    def grant(tx: Tx) -> tuple[bool, operate.Entered]:
        known = named.has_anything(tx, workspace)
        return known, operate.grant(tx, key, workspace, unit, amount, by)

    with operating(settings, reason) as (store, processor, by):
        known, entered = store.write(grant)
        drain(store, processor)
    if entered.new:
        console.say(f"{amount} {unit} were granted to workspace {workspace} by {key}")
    else:
        console.say(f"{key} had granted that already: nothing was changed")
    if not known:
        say_new_workspace(workspace)
    if entered.new and rule is not None and rule.amount not in (None, amount):
        console.warn(
            f"the rule grants {rule.amount} {rule.unit}: a webhook that comes late for this "
            "subject will be quarantined, as it differs"
        )
    say_released(config, settings, entered.released)
    next_step(f"`receiver balance {shlex.quote(workspace)}`", config)


@ledger.command("adjust")
@click.option("--workspace", required=True, metavar="WORKSPACE", help="Whose balance.")
@click.option("--unit", required=True, metavar="UNIT", help="Of what.")
@click.option("--amount", required=True, type=int, help="How much; below zero takes away.")
@click.option("--key", metavar="KEY", help="Its name: done once for it [default: a fresh one].")
@click.option("--yes", is_flag=True, help="Also below zero, and in a unit that is new.")
@why_option
@configured
def ledger_adjust(
    config: Path, workspace: str, unit: str, amount: int, key: str | None, yes: bool, reason: str
) -> None:
    """Correct a balance, by an operation of its own that no webhook has.

    \b
    Example:
      receiver ledger adjust --workspace acme --unit credits --amount -20 --reason "a mistake"
    """
    from receiver import named, operate
    from store.database import Tx

    settings = load_settings(config)
    name = key or secrets.token_hex(8)

    def adjust(tx: Tx, *, yes: bool) -> tuple[bool, operate.Entered]:
        if not yes:
            named.check_unit(tx, settings, unit)
        by, known = operate.By(who, reason), named.has_anything(tx, workspace)
        return known, operate.adjust(tx, name, workspace, unit, amount, by, overdraw=yes)

    with acting(settings) as (store, who):
        try:
            known, entered = store.write(functools.partial(adjust, yes=yes))
        except operate.Overdrawn as error:
            confirm(f"{error}. Go on?")
            known, entered = store.write(functools.partial(adjust, yes=True))
    done = "was" if entered.new else "had been"
    console.say(f"workspace {workspace} {done} adjusted by {amount:+} {unit}: {entered.entry.key}")
    if not known:
        say_new_workspace(workspace)
    next_step(f"`receiver balance {shlex.quote(workspace)}`", config)


@ledger.command("revert")
@click.argument("entry", metavar="[SOURCE/ACCOUNT/SUBJECT/OPERATION]", required=False)
@click.option(
    "--source",
    metavar="NAME",
    shell_complete=names_in("sources"),
    help="Instead of the argument: its four parts.",
)
@account_option
@click.option("--subject", metavar="SUBJECT")
@click.option("--operation", metavar="NAME")
@click.option("--amount", type=click.IntRange(1), help="How much [default: all that is left].")
@why_option
@configured
def ledger_revert(
    config: Path,
    entry: str | None,
    source: str | None,
    account: str | None,
    subject: str | None,
    operation: str | None,
    amount: int | None,
    reason: str,
) -> None:
    """Take back an entry, all or in part; the entry itself stays.

    \b
    Example:
      receiver ledger revert stripe/in_1/initial-credit-grant --reason "charged back"
    """
    from receiver import named, operate
    from store.database import Tx
    from store.operations import Key

    settings = load_settings(config)

    key = None
    if source and subject and operation:
        key = Key(*named.past_sender(settings, source, account), subject, operation)
    if (entry is None) == (key is None):
        raise click.UsageError("name the entry, or give --source, --subject and --operation")

    def target(tx: Tx) -> Key:
        return key or named.entry(tx, settings, entry or "")

    with operating(settings, reason) as (store, processor, by):
        made = store.write(lambda tx: operate.revert(tx, target(tx), amount, by)).entry
        drain(store, processor)
    console.say(
        f"{-made.amount} {made.unit} were taken back from workspace {made.workspace} by {made.key}"
    )
    next_step(f"`receiver balance {shlex.quote(made.workspace)}`", config)


@click.command()
@click.argument("workspace", required=False, metavar="[WORKSPACE]")
@click.option("--unit", metavar="UNIT", help="Only this unit.")
@listing
def balance(
    config: Path, workspace: str | None, unit: str | None, as_json: bool, limit: int
) -> int:
    """Show balances, each checked against the sum of its ledger entries.

    \b
    Example:
      receiver balance acme
    """
    from receiver import shown
    from store import ledger

    with looking(config) as seen:
        found = ledger.totals(seen, workspace=workspace, unit=unit, limit=limit)
    if workspace is not None and not found:
        of_unit = f" of {unit}" if unit else ""
        raise NotFound(f"workspace {workspace} has no entries{of_unit} in the ledger")
    print_listing(
        found,
        limit,
        as_json,
        lambda one: {"workspace": one.workspace, "unit": one.unit, "balance": one.balance},
        ("workspace", "unit", "balance"),
        lambda one: (one.workspace, one.unit, one.balance),
    )
    if found and not as_json:
        next_step("`receiver ledger list` shows what they are made of", config)
    wrong = [one for one in found if one.balance != one.total]
    for one in wrong:
        console.warn(
            f"workspace {one.workspace}: the balance says {one.balance} {one.unit}, its ledger "
            f"entries {one.total}; {shown.mending(one.total)}",
            "red",
        )
    return FOUND if wrong else FINE


@click.command()
@listing
@click.option("--kind", metavar="KIND", help="Only records of this kind.")
@click.option("--workspace", metavar="WORKSPACE", help="Only records of this workspace.")
@click.option("--subject", metavar="SUBJECT", help="Only records for this subject.")
@since_option
def records(
    config: Path,
    as_json: bool,
    limit: int,
    kind: str | None,
    workspace: str | None,
    subject: str | None,
    since_ms: int | None,
) -> None:
    """List what rules recorded, newest first.

    \b
    Example:
      receiver records --kind feedback-alert --since 7d
    """
    from receiver import shown
    from store import records

    with looking(config) as seen:
        found = records.listed(
            seen, kind=kind, workspace=workspace, subject=subject, since_ms=since_ms, limit=limit
        )
    at = shared.now_ms()
    print_listing(
        found,
        limit,
        as_json,
        shown.record,
        ("when", "kind", "workspace", "by", "data"),
        lambda one: (
            console.when(one.created_ms, at),
            one.kind,
            one.workspace,
            str(one.key),
            one.data,
        ),
        prose=True,
    )
