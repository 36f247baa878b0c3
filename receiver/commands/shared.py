"""What the commands share: options, opening the file, listings, and how an error is told."""

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ParamSpec, TypeVar

import click

from receiver import console

if TYPE_CHECKING:
    from receiver.config import Settings, Source
    from receiver.explain import Finding
    from receiver.operate import By
    from receiver.process import Processor
    from receiver.verify import Contract
    from store.database import Snapshot, Store

# What is slow to import, and every module that needs SQLite or the server, is imported by the
# function that uses it: `receiver --version` and completion answer at once.

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

PLACES = (Path("receiver.toml"), Path("/etc/receiver/receiver.toml"))
LIMIT_DEFAULT, LIMIT_MAX = 50, 1_000_000
#: Events from which on a bar shows the progress, and the largest number of a row.
PROGRESS_FROM = 100
ROW_MAX = 2**63 - 1
#: Characters of a command's first sentence in a list.
SUMMARY_CHARS_MAX = 200

#: What a shell sets to ask for completions.
COMPLETION_VARIABLE = "_RECEIVER_COMPLETE"

FINE, FOUND, USAGE, MISSING = 0, 1, 2, 3


class Failure(click.ClickException):
    """Ends the command: each line says what, where and what to do."""

    def __init__(self, *lines: str, code: int = FOUND) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines
        self.code = code


class NotFound(Failure):
    """What the command names is not there."""

    def __init__(self, line: str) -> None:
        super().__init__(line, code=MISSING)


def now_ms() -> int:
    """UTC milliseconds: the one place where a command reads the clock."""
    return time.time_ns() // 1_000_000


class Time(click.ParamType[int]):
    """A point in time, as UTC milliseconds; see `console.parse_time`."""

    name = "time"

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> int:
        try:
            return value if isinstance(value, int) else console.parse_time(value, now_ms())
        except ValueError as error:
            self.fail(str(error), parameter, context)


class Listed(click.Group):
    """Its commands are listed with their whole first sentence, not one that is cut."""

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        names = sorted(self.list_commands(context))
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.summary(context, name)) for name in names])

    def summary(self, context: click.Context, name: str) -> str:
        command = self.get_command(context, name)
        assert command is not None, f"{name} is listed"
        return command.get_short_help_str(limit=SUMMARY_CHARS_MAX)


def _config_path(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path:
    if value is not None:
        return value
    for place in PLACES:
        # One that may not be looked at is there, too: reading it says why it can't be used.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            with contextlib.suppress(PermissionError):
                place.stat()
            return place
    raise Failure(
        f"there is no {' and no '.join(map(str, PLACES))}: "
        "run `receiver init`, or name a file with --config",
        code=USAGE,
    )


def names_in(table: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Completes the names that the config has in a table, as in `sources`."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
        # Without the checks of the whole, which take long to import: a shell waits for this.
        import tomllib

        places = (context.params.get("config"), os.environ.get("RECEIVER_CONFIG"), *PLACES)
        for place in filter(None, places):
            with contextlib.suppress(OSError, ValueError):
                found = tomllib.loads(Path(place).read_text()).get(table)
                names = list(found) if isinstance(found, dict) else []
                return [name for name in names if name.startswith(incomplete)]
        return []

    return complete


def configured(command: Callable[P, R]) -> Callable[P, R]:
    """Adds -c/--config as `config: Path`."""
    return click.option(
        "-c",
        "--config",
        envvar="RECEIVER_CONFIG",
        type=click.Path(path_type=Path, dir_okay=False),
        callback=_config_path,
        help="The config file [default: $RECEIVER_CONFIG, ./receiver.toml, "
        "/etc/receiver/receiver.toml].",
    )(command)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def listing(command: Callable[P, R]) -> Callable[P, R]:
    """Adds --config, --json as `as_json: bool` and --limit as `limit: int`."""
    limit = click.option(
        "--limit",
        type=click.IntRange(1, LIMIT_MAX),
        default=LIMIT_DEFAULT,
        show_default=True,
        help="How many to list.",
    )
    as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
    return configured(limit(as_json(command)))


reason_option = click.option(
    "--reason", default="", metavar="TEXT", help="Why, for the audit log (optional)."
)


def load_settings(config: Path) -> "Settings":
    """The configuration; its secrets stay empty."""
    from receiver.config import load

    return load(config, secrets=False)


@contextlib.contextmanager
def looking(config: Path) -> Iterator["Snapshot"]:
    """A snapshot of the file that a config names, whatever else is in the config."""
    from receiver import place
    from receiver.caller import become_owner
    from store.database import snapshot

    database = place.named(config) or load_settings(config).database
    become_owner(database)
    with snapshot(database) as seen:
        yield seen


@contextlib.contextmanager
def reading(settings: "Settings") -> Iterator["Snapshot"]:
    """A snapshot of the file, opened as its owner."""
    from receiver.caller import become_owner
    from store.database import snapshot

    become_owner(settings.database)
    with snapshot(settings.database) as seen:
        yield seen


@contextlib.contextmanager
def acting(settings: "Settings") -> Iterator[tuple["Store", str]]:
    """The store, opened as the file's owner, and who acts, for the audit log."""
    from receiver.caller import actor, become_owner
    from store.database import Store

    who = actor()
    become_owner(settings.database)
    with contextlib.closing(Store.open(settings.database, now_ms)) as store:
        yield store, who


def next_step(words: str, config: Path) -> None:
    """What to try next; each command in backquotes names the same config, if that is needed."""
    import shlex

    found_without = config in PLACES or "RECEIVER_CONFIG" in os.environ
    option = "" if found_without else f" -c {shlex.quote(str(config))}"
    console.hint(re.sub(r"`(receiver [^`]+)`", lambda found: f"`{found[1]}{option}`", words))


def source_named(settings: "Settings", name: str) -> "Source":
    """The configured source; raises NotFound."""
    from receiver.select import nearest_or_all

    if name in settings.sources:
        return settings.sources[name]
    hint = nearest_or_all(name, settings.sources)
    raise NotFound(f"there is no source {name} in {settings.path}{hint}")


def check_source(seen: "Snapshot", config: Path, name: str | None) -> None:
    """Where nothing was found: raises NotFound for a source that nobody knows, as by a slip.

    One that the config lost but the file has still stands for what it received.
    """
    from store import inbox, rejections

    if name is None or inbox.latest(seen, name) is not None:
        return
    if not rejections.of_source(seen, name):
        _check_configured("source", name, config)


def check_destination(seen: "Snapshot", config: Path, name: str | None) -> None:
    """The same of a destination."""
    from store import outbox

    if name is not None and not outbox.listed(seen, destination=name, limit=1):
        _check_configured("destination", name, config)


def _check_configured(kind: str, name: str, config: Path) -> None:
    from receiver.config import ConfigError
    from receiver.select import nearest_or_all

    try:
        settings = load_settings(config)
    except ConfigError:
        # What is in the file is listed whatever else is in the config.
        return
    known = settings.sources if kind == "source" else settings.destinations
    if name not in known:
        hint = nearest_or_all(name, known)
        raise NotFound(f"there is no {kind} {name} in {settings.path}{hint}")


def with_captured(settings: "Settings", contract: "Contract") -> "Contract":
    """The contract with what was captured for its source, as far as the file can be read."""
    from receiver.captures import complete
    from store.database import exists
    from store.errors import StoreError

    if contract.preset.captures and exists(settings.database):
        with contextlib.suppress(StoreError), reading(settings) as seen:
            return complete(contract, seen)
    return contract


def read_limited(file: BinaryIO, bytes_max: int) -> bytes:
    """All of a file that is not too large; raises Failure."""
    text = file.read(bytes_max + 1)
    if len(text) > bytes_max:
        raise Failure(f"{name_of(file)}: is larger than {bytes_max} bytes", code=USAGE)
    return text


def name_of(file: BinaryIO) -> str:
    return str(getattr(file, "name", "<stdin>"))


since_option = click.option(
    "--since",
    "since_ms",
    type=Time(),
    help="Only what is newer: 2h, 3d, a date, or RFC 3339.",
)


state_option = click.option(
    "--state",
    type=click.Choice(("pending", "done", "ignored", "parked", "quarantined", "dead")),
    help="Only events in this state.",
)


source_option = click.option(
    "--source",
    metavar="NAME",
    shell_complete=names_in("sources"),
    help="Only what this source received.",
)


type_option = click.option("--type", metavar="TYPE", help="Only events of this type.")


def _account(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    # It is part of keys: one that no event can have would never be found again.
    if value is not None and (value != value.strip() or not (value.isprintable() or not value)):
        raise click.BadParameter("has white space around it or a control character; copy it anew")
    return value


account_option = click.option(
    "--account",
    metavar="ACCOUNT",
    callback=_account,
    help="The account at the sender [default: the one that the config pins, or none].",
)


def _why(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not value.strip():
        raise click.BadParameter("says nothing; write why, for whoever reads the audit log")
    return value


why_option = click.option(
    "--reason", required=True, metavar="TEXT", callback=_why, help="Why, for the audit log."
)


@contextlib.contextmanager
def operating(settings: "Settings", reason: str) -> Iterator[tuple["Store", "Processor", "By"]]:
    """What an act by hand needs: the store, what events are judged by, and who acts."""
    import logging

    from receiver.operate import By
    from receiver.process import Processor

    # What a handler raises is told with the event, in one line.
    logging.getLogger("receiver").addHandler(logging.NullHandler())
    with acting(settings) as (store, who):
        yield store, Processor.load(settings), By(who, reason)


def drain(store: "Store", processor: "Processor") -> None:
    """Apply what an act released. The act is done, whatever hinders this."""
    from receiver.operate import drain
    from store.errors import Unavailable

    try:
        drain(store, processor)
    except Unavailable as error:
        console.warn(f"done, but what it released is left to the server: {error}")


def print_listing(
    found: Sequence[T],
    limit: int,
    as_json: bool,
    object_of: Callable[[T], Mapping[str, object]],
    headings: Sequence[str],
    cells_of: Callable[[T], Sequence[console.Cell]],
    *,
    prose: bool = False,
) -> None:
    """A listing for programs or for people; says so when there is nothing.

    `prose`: the last column may be cut.
    """
    if as_json:
        for one in found:
            console.print_json(object_of(one))
    elif found:
        console.print_table(headings, [cells_of(one) for one in found], "cut" if prose else None)
        console.more(len(found), limit)
    else:
        console.warn("nothing is listed", None)


def print_findings(findings: Sequence["Finding"]) -> None:
    """The explanation, a paragraph each."""
    for finding in findings:
        console.say("")
        console.say(finding.words, "yellow")


def say_released(config: Path, settings: "Settings", released: Sequence[int]) -> None:
    """What became of the events that an act released."""
    from store import inbox

    if not released:
        return
    with reading(settings) as seen:
        states = inbox.tally(seen, released)
    words = ", ".join(f"{count} {state}" for state, count in states.items())
    console.say(f"{len(released)} parked {events_were(len(released))} released: {words}")
    for state in ("pending", "parked", "quarantined"):
        if state in states:
            next_step(f"`receiver events list --state {state}`", config)


def say_new_workspace(workspace: str) -> None:
    """After an act by hand has made it: a slip would make one that nobody looks at."""
    console.warn(f"workspace {workspace} had nothing before: is it spelt as your app has it?")


def events_were(count: int) -> str:
    return "event was" if count == 1 else "events were"


def confirm(question: str) -> None:
    """Ask on the terminal; ends the command where the answer is no, or nobody can answer."""
    try:
        agreed = click.confirm(question, err=True)
    except click.Abort as error:
        click.echo(err=True)
        raise Failure("nothing was done: answer y, or give --yes", code=USAGE) from error
    if not agreed:
        raise Failure("nothing was done, as you said no")


@contextlib.contextmanager
def progress(length: int, label: str) -> Iterator[Callable[[int], None]]:
    """A bar on stderr for long work, where that is a terminal."""
    if length <= PROGRESS_FROM or not sys.stderr.isatty():
        yield lambda count: None
        return
    with click.progressbar(length=length, label=label, file=sys.stderr) as bar:
        yield bar.update
