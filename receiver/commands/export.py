"""The command that writes everything out."""

from pathlib import Path

import click

from receiver import console
from receiver.commands.shared import configured, load_settings, reading, since_option

#: As receiver.export has them, which is slower to import.
KINDS = ("events", "ledger", "records", "messages", "audit")


@click.command()
@click.argument("kinds", metavar="[KIND]...", nargs=-1, type=click.Choice(KINDS))
@since_option
@click.option("--payload", is_flag=True, help="The payloads of events, too.")
@configured
def export(config: Path, kinds: tuple[str, ...], since_ms: int | None, payload: bool) -> None:
    """Write everything as JSON, one object a line: events, ledger, records, messages, audit.

    KIND is any of these [default: events, ledger and records]. It is read a page at a time, as
    it is then, so it takes as long as it takes and holds nobody up.

    \b
    Example:
      receiver export ledger --since 30d > ledger.ndjson
    """
    from receiver.export import export as objects

    settings = load_settings(config)
    for kind in kinds or KINDS[:3]:
        for one in objects(lambda: reading(settings), kind, since_ms, payload=payload):
            console.print_json(one)
