"""The command that proves the promise on this machine."""

import random
from pathlib import Path

import click

from receiver import console
from receiver.commands import shared
from receiver.commands.shared import Failure, configured, load_settings


@click.command()
@click.option("--seed", type=int, metavar="N", help="Kill at the moments of an earlier run.")
@configured
def selftest(config: Path, seed: int | None) -> int:
    """Kill a real server under load, on the database's disk, and look what is left.

    It takes less than a minute, beside a running server, in a temporary folder next to the
    database, which it never opens. Exit code 1 if anything that was answered is lost, or was
    done twice.

    \b
    Example:
      receiver selftest
    """
    from receiver.playground import PlaygroundError
    from receiver.selftest import run

    database = load_settings(config).database
    chosen = random.randrange(2**32) if seed is None else seed  # noqa: S311  no secret
    try:
        return run(console.say, shared.now_ms, database, chosen)
    except PlaygroundError as error:
        raise Failure(str(error)) from error
    except OSError as error:
        raise Failure(f"{database.parent}: can't be written: {error.strerror}") from error
