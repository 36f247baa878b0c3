"""The commands that set up and run: init, serve, work, check, version."""

import contextlib
import os
import secrets
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from receiver import __version__, console
from receiver.commands import shared
from receiver.commands.shared import (
    FINE,
    FOUND,
    USAGE,
    Failure,
    configured,
    json_option,
    next_step,
)

if TYPE_CHECKING:
    from receiver.config import Settings

#: How the findings of `check` are shown.
LEVELS = {
    "fine": ("fine   ", None),
    "warning": ("warning", "yellow"),
    "problem": ("problem", "red"),
    "config": ("problem", "red"),
}


@click.command()
@click.argument("folder", metavar="[DIR]", default=".", type=click.Path(path_type=Path))
@click.option("--live", is_flag=True, help="For live events; the secret is then yours to fill in.")
@click.option(
    "--example",
    type=click.Choice(("feedback",)),
    help="Another set-up: `feedback` is for a sender whose contract is not confirmed yet.",
)
def init(folder: Path, live: bool, example: str | None) -> int | None:
    """Write the files of a new set-up into DIR (default: here).

    receiver.toml, an example handlers.py, .env with a fresh development secret and .gitignore.
    Nothing is overwritten: if one of the first three is there, nothing is written at all.

    \b
    Example:
      receiver init my-hooks
    """
    from receiver import starter

    try:
        secret = f"whsec_{secrets.token_urlsafe(32)}"
        written = starter.write(folder, live=live, secret=secret, example=example)
    except starter.Exists as error:
        raise Failure(
            f"{error}: already there, so nothing was written; name another folder, "
            "as in `receiver init hooks`, or move them away"
        ) from error
    for path in written:
        console.say(f"wrote {path}")
    if folder / starter.IGNORE_NAME not in written:
        console.warn(f"kept {folder / starter.IGNORE_NAME}: see that it has .env and *.db*")
    enter = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    if live:
        env, name = folder / starter.ENV_NAME, starter.secret_name(example)
        console.say(f"put the endpoint's signing secret into {env}, after {name}=")
        console.hint(f"`{enter}receiver check`")
    else:
        console.hint(f"`{enter}receiver serve`")
    return None


@click.command()
@configured
def serve(config: Path) -> int:
    """Run the server until it is told to stop (Ctrl-C or SIGTERM).

    It applies queued events and sends messages too, unless worker.run says otherwise.

    \b
    Example:
      receiver serve -c /etc/receiver/receiver.toml
    """
    from receiver.server import Listening, StartError
    from receiver.server import serve as run

    go_on_as_owner(config)

    def ready(listening: Listening) -> None:
        # Nobody may be reading any more, and that must not stop the server.
        with contextlib.suppress(OSError):
            for words in after_start(listening.settings):
                next_step(words, config)

    try:
        return run(config, ready=ready)
    except StartError as error:
        raise Failure(str(error)) from error


def after_start(settings: "Settings") -> Iterator[str]:
    """What to try once the server runs; nothing under systemd, where nobody reads it."""
    first = first_to_send(settings)
    if first is None or "JOURNAL_STREAM" in os.environ:
        return
    source, event_type = first
    if settings.sources[source].contract.livemode:
        yield f"`receiver sources show {source}` has the URL for the sender"
    else:
        yield f"in another terminal, `receiver send {source} {event_type}`"


def first_to_send(settings: "Settings") -> tuple[str, str] | None:
    """The source and type that a first try begins with: one that links, if there is one."""
    from receiver.config import Link

    found = [
        (not isinstance(rule.effect, Link), source, event_type)
        for rule in settings.rules
        for source in rule.sources
        if (event_type := rule.concrete_type) is not None
    ]
    return min(found, key=lambda one: one[0])[1:] if found else None


def go_on_as_owner(config: Path) -> None:
    """Let root serve as whom the file belongs to, and say so."""
    from receiver import place
    from receiver.caller import become_owner

    database = place.named(config)
    owner = None if database is None else become_owner(database)
    if owner is not None:
        console.say(f"going on as {owner}, whom {database} belongs to")


@click.command()
@configured
def work(config: Path) -> int:
    """Apply queued events, try again what failed, and send messages, until told to stop.

    For worker.run = "separate": beside `receiver serve`, which then only receives.

    \b
    Example:
      receiver work -c /etc/receiver/receiver.toml
    """
    from receiver.work import work as run

    go_on_as_owner(config)
    return run(config, shared.now_ms)


@click.command()
@configured
@json_option
def check(config: Path, as_json: bool) -> int:
    """Look for everything that is wrong with config, secrets, handlers and database.

    Exit code 1 if something is wrong, 2 if it is the config; 0 with warnings alone.

    \b
    Example:
      receiver check --json
    """
    from receiver.check import examine

    found = examine(config)
    told = {level: [one.text for one in found if one.level == level] for level in LEVELS}
    wrong = told["config"] + told["problem"]
    if as_json:
        console.print_json({"ok": not wrong, "problems": wrong, "warnings": told["warning"]})
    else:
        for one in found:
            word, colour = LEVELS[one.level]
            console.say(f"{word}  {one.text}", colour)
    return USAGE if told["config"] else FOUND if wrong else FINE


@click.command()
@json_option
def version(as_json: bool) -> None:
    """Print the versions of Receiver, SQLite and Python.

    \b
    Example:
      receiver version --json
    """
    import platform

    from store.database import sqlite_version

    versions = {
        "receiver": __version__,
        "sqlite": sqlite_version(),
        "python": platform.python_version(),
    }
    if as_json:
        console.print_json(versions)
    else:
        console.print_fields(list(versions.items()))
