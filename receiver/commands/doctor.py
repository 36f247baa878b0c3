"""The command that examines everything."""

from pathlib import Path

import click

from receiver import console
from receiver.commands import shared
from receiver.commands.setup import LEVELS
from receiver.commands.shared import FINE, FOUND, USAGE, configured, json_option


@click.command()
@click.option("--offline", is_flag=True, help="Don't look whether public_url is reached.")
@json_option
@configured
def doctor(config: Path, offline: bool, as_json: bool) -> int:
    """Examine config, secrets, database, clock, disk, TLS, systemd and backups.

    What `receiver check` finds, and what only a running set-up shows; each finding says what to
    do. At the end stands the production checklist, with a tick for what was found to be so. It
    reads the whole file and the newest backup, beside a running server. Exit code 1 if something
    is wrong, 2 if it is the config.

    \b
    Example:
      receiver doctor --offline
    """
    from msgspec import to_builtins

    from receiver.doctor import examine

    found = examine(config, shared.now_ms(), offline=offline)
    if as_json:
        console.print_json({"ok": found.is_well, **to_builtins(found)})
    else:
        for one in found.findings:
            word, colour = LEVELS[one.level]
            console.say(f"{word}  {one.text}", colour)
        console.say("")
        for tick in found.checklist:
            mark, colour = ("[x]", "green") if tick.done else ("[ ]", "red")
            console.say(f"{mark} {tick.item}: {tick.why}", colour)
    if any(one.level == "config" for one in found.findings):
        return USAGE
    return FINE if found.is_well else FOUND
