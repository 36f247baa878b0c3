"""The command `receiver`: each command declares its options and calls one function."""

import contextlib
import functools
import logging
import os
import re
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ParamSpec, TypeVar

import click

from receiver import __version__, console

if TYPE_CHECKING:
    from receiver.config import Settings, Source
    from receiver.message import Told as MessageStory
    from receiver.operate import Acted, By, Replayed
    from receiver.process import Processor
    from receiver.samples import Wish
    from receiver.sending import Answer
    from receiver.sources import Last
    from receiver.story import Story
    from receiver.verify import Verdict
    from store.database import Snapshot, Store
    from store.inbox import Row
    from store.outbox import Message

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
#: Characters of an unexpected error's message, and of a command's first sentence in a list.
WORDS_CHARS_MAX = 500
SUMMARY_CHARS_MAX = 200

#: How the findings of `check` are shown.
LEVELS = {
    "fine": ("fine   ", None),
    "warning": ("warning", "yellow"),
    "problem": ("problem", "red"),
    "config": ("problem", "red"),
}
#: The verdicts that a server would accept.
ACCEPTED = ("valid", "handshake")

FINE, FOUND, USAGE, MISSING, INTERRUPTED = 0, 1, 2, 3, 130
#: Whoever read the output has closed it: what a shell says of a command that SIGPIPE ended.
UNREAD = 141

#: How `receiver --help` groups the commands.
SECTIONS = {
    "Set up and run": ("init", "serve", "work", "check", "sources", "version"),
    "Try out": ("demo", "send", "verify"),
    "Look and repair": ("events", "replay", "parked", "conflicts", "outbox"),
    "Customers and amounts": ("links", "balance", "ledger", "records"),
}


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
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.summary(name)) for name in sorted(self.commands)])

    def summary(self, name: str) -> str:
        return self.commands[name].get_short_help_str(limit=SUMMARY_CHARS_MAX)


class Commands(Listed):
    """Errors become lines on stderr and an exit code, never a traceback.

    A command returns its exit code, or None for 0.
    """

    group_class = Listed

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        run = functools.partial(
            super().main, args, prog_name, complete_var, standalone_mode=False, **extra
        )
        if not standalone_mode:
            return run()
        for stream in (sys.stdout, sys.stderr):
            # A terminal that can't show a character gets its escape.
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        sys.exit(exit_code_of(run))

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except BrokenPipeError as error:
            # Whatever is still to be written, at the end too, goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise Failure(code=UNREAD) from error

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        listed = [name for names in SECTIONS.values() for name in names]
        others = tuple(name for name in self.commands if name not in listed)
        for title, names in (SECTIONS | {"Others": others}).items():
            rows = [(name, self.summary(name)) for name in names if name in self.commands]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def exit_code_of(run: Callable[[], Any]) -> int:
    """Run a command; what went wrong is one line, or several, on stderr."""
    lines: Sequence[str]
    try:
        return int(run() or FINE)
    except click.Abort:
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        # Its message is the whole help.
        error.show()
        return USAGE
    except Failure as error:
        lines, code = error.lines, error.code
    except click.ClickException as error:
        lines, code = usage_lines(error), error.exit_code
    except Exception as error:
        # The outermost place: whatever it is, the operator gets a line and no traceback.
        lines, code = known_failure(error)
    for line in lines:
        console.warn(f"receiver: {line}", "red")
    return code


def usage_lines(error: click.ClickException) -> Sequence[str]:
    """One line: what is wrong, and where to read how it is used."""
    text = " ".join(error.format_message().split())
    context = error.ctx if isinstance(error, click.UsageError) else None
    if isinstance(error, click.NoSuchOption) and isinstance(getattr(context, "command", 0), Listed):
        text = f"{text.rstrip('.')}: options stand after the whole command"
    where = "" if context is None else f" (see `{context.command_path} --help`)"
    return (text.rstrip(".") + where,)


def known_failure(error: Exception) -> tuple[Sequence[str], int]:
    """The lines and the exit code of an error."""
    from receiver.config import ConfigError
    from receiver.named import Absent, Ambiguous
    from receiver.operate import Declined
    from receiver.process import NotReplayable
    from store.errors import Refused, Replaced, StoreError, Unavailable

    match error:
        case ConfigError():
            return error.problems, USAGE
        case Absent():
            return (str(error),), MISSING
        case Ambiguous():
            return (str(error), *error.names), USAGE
        case Declined() | StoreError() | Unavailable() | Refused() | Replaced() | NotReplayable():
            return (str(error),), FOUND
        case OSError() if error.strerror:
            named = "" if error.filename is None else f"{error.filename}: "
            return (f"{named}{error.strerror}",), FOUND
    return (unexpected(error),), FOUND


def unexpected(error: Exception) -> str:
    """What to report of an error that nobody foresaw, with the place that raised it."""
    import traceback

    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    words = " ".join(str(error).split())[:WORDS_CHARS_MAX]
    return f"unexpected {type(error).__name__} at {place}: {words}; please report it"


# What commands share


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


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="receiver", message="%(prog)s %(version)s")
def main() -> None:
    """Receive webhooks, verify them, and apply each one once."""


# Setting up


@main.command()
@click.argument("folder", metavar="[DIR]", default=".", type=click.Path(path_type=Path))
@click.option("--live", is_flag=True, help="For live events; the secret is then yours to fill in.")
def init(folder: Path, live: bool) -> int | None:
    """Write the files of a new set-up into DIR (default: here).

    receiver.toml, an example handlers.py, .env with a fresh development secret and .gitignore.
    Nothing is overwritten: if one of the first three is there, nothing is written at all.

    \b
    Example:
      receiver init my-hooks
    """
    from receiver import starter

    try:
        written = starter.write(folder, live=live, secret=f"whsec_{secrets.token_urlsafe(32)}")
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
        env = folder / starter.ENV_NAME
        console.say(f"put the endpoint's signing secret into {env}, after {starter.SECRET_NAME}=")
        console.hint(f"`{enter}receiver check`")
    else:
        console.hint(f"`{enter}receiver serve`")
    return None


@main.command()
@configured
def serve(config: Path) -> int:
    """Run the server until it is told to stop (Ctrl-C or SIGTERM).

    It applies queued events and sends messages too, unless worker.run says otherwise.

    \b
    Example:
      receiver serve -c /etc/receiver/receiver.toml
    """
    from receiver import samples  # noqa: F401  used once it is ready, as another user
    from receiver.caller import become_owner
    from receiver.server import Listening, StartError
    from receiver.server import serve as run

    settings = load_settings(config)
    owner = become_owner(settings.database)
    if owner is not None:
        console.say(f"going on as {owner}, whom {settings.database} belongs to")

    def ready(_: Listening) -> None:
        # Nobody may be reading any more, and that must not stop the server.
        with contextlib.suppress(OSError):
            for words in after_start(settings):
                next_step(words, config)

    try:
        return run(config, ready=ready)
    except StartError as error:
        raise Failure(str(error)) from error


def after_start(settings: "Settings") -> Iterator[str]:
    """What to try once the server runs; nothing under systemd, where nobody reads it."""
    from receiver import samples

    first = samples.first_to_send(settings)
    if first is None or "JOURNAL_STREAM" in os.environ:
        return
    source, event_type = first
    if settings.sources[source].contract.livemode:
        yield f"`receiver sources show {source}` has the URL for the sender"
    else:
        yield f"in another terminal, `receiver send {source} {event_type}`"


@main.command()
@configured
def work(config: Path) -> int:
    """Apply queued events, try again what failed, and send messages, until told to stop.

    For worker.run = "separate": beside `receiver serve`, which then only receives.

    \b
    Example:
      receiver work -c /etc/receiver/receiver.toml
    """
    from receiver.caller import become_owner
    from receiver.work import work as run

    become_owner(load_settings(config).database)
    return run(config, now_ms)


@main.command()
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


@main.group()
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
    at = now_ms()
    rows = [row(source, recent[source.name], at) for source in shown]
    console.print_table(HEADINGS, rows, "cut")
    console.more(len(shown), limit)


@sources.command("show")
@configured
@click.argument("name", metavar="SOURCE")
@json_option
def sources_show(config: Path, name: str, as_json: bool) -> None:
    """Show what a source demands of its deliveries, and the URL to enter at the sender.

    \b
    Example:
      receiver sources show stripe
    """
    from receiver.sources import described, fields

    settings = load_settings(config)
    source = source_named(settings, name)
    recent = last_of_sources(settings)[name]
    if as_json:
        console.print_json(described(settings, source, recent))
    else:
        console.print_fields(fields(settings, source, recent, now_ms()))


@main.command()
@configured
@click.argument("source", metavar="SOURCE")
@click.argument("event_type", metavar="TYPE")
@click.option(
    "--file",
    "body",
    type=click.File("rb"),
    help="A JSON body in place of the sample, - for stdin; it gets a fresh id unless --exact.",
)
@click.option(
    "--exact", is_flag=True, help="Send the file's bytes as they are, its own id included."
)
@click.option(
    "--id",
    "event_id",
    metavar="ID",
    help="The event's id, in place of a fresh one; the same again is a duplicate.",
)
@click.option("--customer", metavar="ID", help="Whose event it is.")
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="PATH=VALUE",
    help="Change the body, as in data.object.amount_paid=0; several may be given.",
)
@click.option("--url", metavar="URL", help="Where to post it, in place of the config's address.")
@click.option("--yes", is_flag=True, help="Send to a live source, too.")
@json_option
def send(
    config: Path,
    source: str,
    event_type: str,
    url: str | None,
    yes: bool,
    as_json: bool,
    **wish: Any,
) -> int:
    """Sign a sample event of TYPE and post it to the running server, as SOURCE would.

    \b
    Example:
      receiver send stripe invoice.paid --customer cus_1
    """
    from receiver import samples, sending
    from receiver.sources import url_of, with_secrets

    settings = load_settings(config)
    found = with_secrets(source_named(settings, source), config)
    if found.contract.livemode and not yes:
        raise Failure(
            f"sources.{source} is live: a sample would change real balances; "
            "use a source with livemode = false, or add --yes",
            code=USAGE,
        )
    try:
        target = sending.Target(url) if url else sending.target_of(settings, source)
        sample = samples.make(found, wish_of(event_type, wish), url_of(found) or target.url)
        answer = sending.post(target, sample.headers, sample.body)
    except ValueError as error:
        raise Failure(str(error), code=USAGE) from error
    except sending.NotSent as error:
        raise Failure(str(error)) from error
    if as_json:
        console.print_json(described_answer(sample.event_id, answer))
    else:
        console.print_fields([*described_answer(sample.event_id, answer).items()])
        next_step(samples.advice(settings, source, sample, answer.word), config)
    return FINE if answer.status < 300 else FOUND


@main.command()
@configured
@click.argument("source", metavar="SOURCE")
@click.option(
    "--request",
    "request_file",
    type=click.File("rb"),
    default="-",
    help="A JSON object with method, url, headers, body or body_base64; - for stdin (default).",
)
@click.option("--at", type=Time(), help="When it was received: RFC 3339 or Unix seconds [now].")
@json_option
def verify(config: Path, source: str, request_file: BinaryIO, at: int | None, as_json: bool) -> int:
    """Judge one stored request offline; nothing is written.

    Exit code 0 if it is valid, 1 if not.

    \b
    Example:
      receiver verify stripe --request request.json --at 2026-11-30T14:03:11Z
    """
    from receiver.requests import REQUEST_BYTES_MAX, Malformed, parse
    from receiver.sources import url_of, with_secrets
    from receiver.verify import verdict

    found = with_secrets(source_named(load_settings(config), source), config)
    text = read_limited(request_file, REQUEST_BYTES_MAX)
    url = url_of(found) or f"http://localhost/webhooks/{source}"
    try:
        delivery = parse(text, url=url, received_ms=now_ms() if at is None else at)
    except Malformed as error:
        raise Failure(f"{name_of(request_file)}: {error}", code=USAGE) from error
    judged = verdict(found.contract, delivery)
    tell_verdict(judged, as_json)
    return FINE if judged.verdict in ACCEPTED else FOUND


@main.command()
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


# What the commands above tell


def next_step(words: str, config: Path) -> None:
    """What to try next; each command in backquotes names the same config, if that is needed."""
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


def wish_of(event_type: str, options: dict[str, Any]) -> "Wish":
    """What `send` was asked for; raises ValueError in words."""
    from receiver.samples import Wish, parse_change
    from receiver.sending import BODY_BYTES_MAX

    file = options["body"]
    if options["exact"] and file is None:
        raise ValueError("--exact needs --file; name the file to send as it is")
    return Wish(
        type=event_type,
        token=secrets.token_hex(12),
        now_ms=now_ms(),
        event_id=options["event_id"],
        customer=options["customer"],
        changes=[parse_change(text) for text in options["changes"]],
        body=None if file is None else read_limited(file, BODY_BYTES_MAX),
        exact=options["exact"],
    )


def described_answer(event_id: str, answer: "Answer") -> dict[str, str | int | None]:
    return {
        "event_id": event_id,
        "answer": answer.word,
        "status": answer.status,
        "request_id": answer.request_id,
    }


def tell_verdict(judged: "Verdict", as_json: bool) -> None:
    from msgspec.structs import asdict

    fields = asdict(judged)
    if as_json:
        console.print_json(fields)
    else:
        colour = "green" if judged.verdict in ACCEPTED else "red"
        verdict = console.Painted(judged.verdict, colour)
        console.print_fields([*(fields | {"verdict": verdict}).items()])


def read_limited(file: BinaryIO, bytes_max: int) -> bytes:
    """All of a file that is not too large; raises Failure."""
    text = file.read(bytes_max + 1)
    if len(text) > bytes_max:
        raise Failure(f"{name_of(file)}: is larger than {bytes_max} bytes", code=USAGE)
    return text


def name_of(file: BinaryIO) -> str:
    return str(getattr(file, "name", "<stdin>"))


# Events and what follows


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
    "--source", metavar="NAME", help="Only events that this source received."
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
why_option = click.option("--reason", required=True, metavar="TEXT", help="Why, for the audit log.")


@contextlib.contextmanager
def operating(settings: "Settings", reason: str) -> Iterator[tuple["Store", "Processor", "By"]]:
    """What an act by hand needs: the store, what events are judged by, and who acts."""
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


def say_released(config: Path, settings: "Settings", released: Sequence[int]) -> None:
    """What became of the events that an act released."""
    from store import inbox

    if not released:
        return
    with reading(settings) as seen:
        states = inbox.tally(seen, released)
    words = ", ".join(f"{count} {state}" for state, count in states.items())
    console.say(f"{len(released)} parked {_events(len(released))} released: {words}")
    for state in ("pending", "parked", "quarantined"):
        if state in states:
            next_step(f"`receiver events list --state {state}`", config)


def _events(count: int) -> str:
    return "event was" if count == 1 else "events were"


@main.group("events")
def events_group() -> None:
    """The inbox: what was received, and what became of it."""


EVENT_HEADINGS = ("row", "received", "source", "id", "type", "state", "reason")


def event_cells(row: "Row") -> Sequence[console.Cell]:
    """The cells under EVENT_HEADINGS."""
    source = f"{row.endpoint}/{row.account}" if row.account else row.endpoint
    at = console.when(row.received_ms, now_ms())
    reason = row.reason or (row.last_error if row.state in ("pending", "dead") else None) or ""
    return (row.id, at, source, row.event_id, row.type, console.state(row.state), reason)


@events_group.command("list")
@listing
@state_option
@source_option
@type_option
@since_option
def events_list(
    config: Path,
    as_json: bool,
    limit: int,
    state: str | None,
    source: str | None,
    type: str | None,
    since_ms: int | None,
) -> None:
    """List events, newest first.

    \b
    Example:
      receiver events list --state quarantined --since 2d
    """
    from receiver import shown
    from store import inbox

    with reading(load_settings(config)) as seen:
        rows = inbox.listed(
            seen, state=state, endpoint=source, type=type, since_ms=since_ms, limit=limit
        )
    print_listing(rows, limit, as_json, shown.event, EVENT_HEADINGS, event_cells, prose=True)


@events_group.command("show")
@click.argument("event", metavar="EVENT")
@click.option("--payload", is_flag=True, help="Print the stored body too.")
@json_option
@configured
def events_show(config: Path, event: str, payload: bool, as_json: bool) -> None:
    """Tell what happened to EVENT, and what to do about it.

    EVENT is its id, source/account/id, source/id, or its row number.

    \b
    Example:
      receiver events show evt_1NirD82eZvKYlo2C --payload
    """
    from receiver import named, story
    from receiver.difference import pretty
    from store import inbox

    settings = load_settings(config)
    with reading(settings) as seen:
        told = story.tell(seen, settings, named.event(seen, event))
        body = inbox.payload(seen, told.row.id) if payload else None
    lines = [] if body is None else pretty(body, settings.sources.get(told.row.endpoint))
    if as_json:
        extra = {"payload": "\n".join(lines) if body is not None else None} if payload else {}
        console.print_json(story.as_object(told) | extra)
        return
    print_story(told, config)
    if payload:
        console.say("")
        for line in lines or ["its payload was pruned"]:
            console.say(line)


def print_story(told: "Story", config: Path) -> None:
    """A story for people."""
    from receiver import shown

    row, at = told.row, now_ms()
    waits_for = None if told.waits_for is None else shown.fact_words(told.waits_for)
    console.print_fields(
        [
            ("event", shown.name_of(row)),
            ("row", row.id),
            ("type", row.type or None),
            ("state", console.state(row.state)),
            ("reason", row.reason),
            ("waits for", waits_for),
            ("last error", row.last_error),
            ("redelivered", shown.times(row.duplicates) if row.duplicates else None),
            (
                "leased until" if row.lease_until_ms else "next attempt",
                console.moment(row.next_attempt_ms, at) if row.next_attempt_ms else None,
            ),
            ("attributed to", row.workspace),
            ("claimed account", row.claimed_account),
        ]
    )
    console.say("")
    console.print_table(
        ("when", "what", "how"),
        [(console.when(one.at_ms, at), one.what, one.words) for one in told.moments],
        "wrap",
    )
    for step in told.next_steps:
        next_step(step, config)


@events_group.command("tail")
@click.option(
    "-n",
    "last",
    type=click.IntRange(0, 10_000),
    default=10,
    show_default=True,
    help="How many of the newest to begin with.",
)
@json_option
@configured
def events_tail(config: Path, last: int, as_json: bool) -> None:
    """Print events as they come, until Ctrl-C; needs no server.

    \b
    Example:
      receiver events tail -n 20
    """
    from receiver import shown
    from receiver.tail import follow, stdout_closed

    settings = load_settings(config)
    with stdout_closed() as closed, contextlib.suppress(KeyboardInterrupt):
        for row in follow(functools.partial(reading, settings), last, closed):
            if as_json:
                console.print_json(shown.event(row))
            else:
                cells = map(console.plain, event_cells(row))
                console.say("  ".join(filter(None, cells)))


@events_group.command("resolve")
@click.argument("event", metavar="EVENT")
@why_option
@configured
def events_resolve(config: Path, event: str, reason: str) -> None:
    """Close EVENT, which needs nothing more, as `ignored`.

    \b
    Example:
      receiver events resolve evt_1NirD82eZvKYlo2C --reason "a test of ours"
    """
    from receiver import named, operate

    with acting(load_settings(config)) as (store, who):
        by = operate.By(who, reason)
        store.write(lambda tx: operate.resolve(tx, named.event(tx, event).id, by))
    console.say(f"{event} is ignored from now on: {reason}")


@main.command("replay")
@click.argument("events", metavar="[EVENT]...", nargs=-1)
@state_option
@source_option
@type_option
@since_option
@click.option("--yes", is_flag=True, help="Don't ask before more than one is run.")
@reason_option
@configured
def replay(
    config: Path,
    events: Sequence[str],
    state: str | None,
    source: str | None,
    type: str | None,
    since_ms: int | None,
    yes: bool,
    reason: str,
) -> int:
    """Run events again, now; what was done is never done twice.

    That goes for every state: for `dead` ones once their cause is gone, for `pending` ones
    before their next attempt is due, and for those of queued sources, whose prepare functions
    run first.

    Name each EVENT (its id, source/account/id, source/id or row number), or choose them by
    --state, --source, --type and --since.

    \b
    Example:
      receiver replay --state quarantined --since 2d --reason "price was missing"
    """
    from receiver import named, operate
    from store import inbox

    settings = load_settings(config)
    filters = (state, source, type, since_ms)
    if bool(events) == any(one is not None for one in filters):
        raise click.UsageError("name events, or choose them by --state, --source, --type, --since")
    with reading(settings) as seen:
        rows = [named.event(seen, event).id for event in events] or inbox.numbers(
            seen, state=state, endpoint=source, type=type, since_ms=since_ms
        )
    rows = list(dict.fromkeys(rows))
    if len(rows) > 1 and not yes:
        confirm(f"Run {len(rows)} events again?")
    with operating(settings, reason) as (store, processor, by):
        with progress(len(rows), "Running events again") as advance:
            ran = []
            for batch in operate.replay(store, processor, rows, by):
                ran += batch
                advance(len(batch))
        drain(store, processor)
    return say_replayed(config, settings, ran)


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


def say_replayed(config: Path, settings: "Settings", ran: Sequence["Replayed"]) -> int:
    """What became of each; FOUND if any is still unfinished."""
    from receiver import shown
    from store import inbox

    counts: dict[str, int] = {}
    with reading(settings) as seen:
        for one in ran:
            row = inbox.by_row(seen, one.row)
            name = str(one.row) if row is None else shown.handle(seen, row)
            why = one.problem or (None if row is None else row.reason or row.last_error)
            fine = one.word in ("done", "ignored")
            told = f": {why}" if why and one.word != "done" else ""
            console.say(f"{name}  {one.word}{told}", None if fine else "yellow")
            counts[one.word] = counts.get(one.word, 0) + 1
    if not ran:
        console.warn("no event fits", None)
    if len(ran) > 1:
        words = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
        console.say(f"{len(ran)} events were run again: {words}")
    unfinished = [one for one in ran if one.word not in ("done", "ignored")]
    if unfinished:
        next_step(f"`receiver events show {unfinished[0].row}` says what it needs", config)
    return FOUND if unfinished else FINE


@main.group("parked")
def parked_group() -> None:
    """Events that wait for a link, for an earlier grant, or for you."""


@parked_group.command("list")
@listing
@source_option
def parked_list(config: Path, as_json: bool, limit: int, source: str | None) -> None:
    """List parked events and what each waits for, longest waiting first.

    \b
    Example:
      receiver parked list --source stripe
    """
    from receiver import shown
    from store import inbox, parked

    with reading(load_settings(config)) as seen:
        found = [
            (row, fact, since_ms)
            for event, fact, since_ms in parked.listed(seen, endpoint=source, limit=limit)
            if (row := inbox.by_row(seen, event)) is not None
        ]
    at = now_ms()
    print_listing(
        found,
        limit,
        as_json,
        lambda one: (
            shown.event(one[0])
            | {"waits_for": shown.fact(one[1]), "parked_at": console.rfc3339(one[2])}
        ),
        ("row", "parked", "source", "id", "type", "waits for"),
        lambda one: (
            one[0].id,
            console.when(one[2], at),
            one[0].endpoint,
            one[0].event_id,
            one[0].type,
            shown.fact_words(one[1]),
        ),
    )


@parked_group.command("attribute")
@click.argument("event", metavar="EVENT")
@click.option("--workspace", required=True, metavar="WORKSPACE", help="Whose event it is.")
@reason_option
@configured
def parked_attribute(config: Path, event: str, workspace: str, reason: str) -> int:
    """Say whose EVENT is, and apply it: this one only, no customer is linked.

    \b
    Example:
      receiver parked attribute evt_1NirD82eZvKYlo2C --workspace acme
    """
    from receiver import named, operate
    from store import inbox
    from store.database import Tx

    settings = load_settings(config)

    def attribute(tx: Tx) -> int:
        row = named.event(tx, event).id
        operate.attribute(tx, row, workspace, by)
        return row

    with operating(settings, reason) as (store, processor, by):
        row = store.write(attribute)
        drain(store, processor)
    with reading(settings) as seen:
        known = inbox.by_row(seen, row)
        assert known is not None, "events are never deleted"
    why = f": {known.reason or known.last_error}" if known.state != "done" else ""
    console.say(f"{event} is attributed to {workspace} and {known.state}{why}")
    if known.state in ("done", "ignored"):
        next_step(f"`receiver balance {shlex.quote(workspace)}`", config)
        return FINE
    next_step(f"`receiver events show {row}` says what it needs", config)
    return FOUND


@main.group("conflicts")
def conflicts_group() -> None:
    """Deliveries whose event is known, but not their content."""


@conflicts_group.command("list")
@listing
@click.option("--all", "everything", is_flag=True, help="The resolved ones too.")
def conflicts_list(config: Path, as_json: bool, limit: int, everything: bool) -> None:
    """List conflicts, newest first.

    \b
    Example:
      receiver conflicts list --all
    """
    from receiver import shown
    from store import conflicts, inbox

    with reading(load_settings(config)) as seen:
        found = [
            (one, row)
            for one in conflicts.listed(seen, resolved=everything, limit=limit)
            if (row := inbox.by_row(seen, one.event)) is not None
        ]
    at = now_ms()
    print_listing(
        found,
        limit,
        as_json,
        lambda one: shown.conflict(*one),
        ("conflict", "received", "event", "type", "times", "resolved"),
        lambda one: (
            one[0].id,
            console.when(one[0].received_ms, at),
            shown.name_of(one[1]),
            one[1].type,
            one[0].deliveries,
            console.when(one[0].resolved_ms, at),
        ),
    )


@conflicts_group.command("show")
@click.argument("number", metavar="N", type=click.IntRange(1, ROW_MAX))
@json_option
@configured
def conflicts_show(config: Path, number: int, as_json: bool) -> None:
    """Show how the content of conflict N differs from what is stored.

    \b
    Example:
      receiver conflicts show 1
    """
    from receiver import shown
    from receiver.difference import unified
    from store import conflicts, inbox

    settings = load_settings(config)
    with reading(settings) as seen:
        one = conflicts.by_id(seen, number)
        row = None if one is None else inbox.by_row(seen, one.event)
        stored = None if row is None else inbox.payload(seen, row.id)
    if one is None or row is None:
        raise NotFound(f"there is no conflict {number}: `receiver conflicts list` shows them")
    source = settings.sources.get(row.endpoint)
    volatile = () if source is None else source.contract.volatile
    lines = list(unified(stored or b"", one.body, source))
    if as_json:
        about = {"volatile": volatile, "pruned": stored is None, "diff": "\n".join(lines)}
        console.print_json(shown.conflict(one, row) | about)
        return
    at = now_ms()
    console.print_fields(
        [
            ("event", shown.name_of(row)),
            ("stored", console.moment(row.received_ms, at)),
            ("other", f"{console.moment(one.received_ms, at)}, {shown.times(one.deliveries)}"),
            ("not compared", ", ".join(volatile) or None),
            ("resolved", console.moment(one.resolved_ms, at) if one.resolved_ms else None),
        ]
    )
    if stored is None:
        console.warn("the stored payload was pruned: only the other is shown", None)
    for line in lines:
        console.say(line, {"+": "green", "-": "red", "@": "cyan"}.get(line[:1]))
    if one.resolved_ms is None:
        next_step(f"when you have looked: `receiver conflicts resolve {number}`", config)


@conflicts_group.command("resolve")
@click.argument("number", metavar="N", type=click.IntRange(1, ROW_MAX))
@reason_option
@configured
def conflicts_resolve(config: Path, number: int, reason: str) -> None:
    """Note that you have looked at conflict N; what is stored stays as it is.

    \b
    Example:
      receiver conflicts resolve 1 --reason "their bug"
    """
    from receiver import operate

    with acting(load_settings(config)) as (store, who):
        store.write(lambda tx: operate.resolve_conflict(tx, number, operate.By(who, reason)))
    console.say(f"conflict {number} is resolved")


# Customers and amounts


@main.group("links")
def links_group() -> None:
    """Which workspace a sender's customer is."""


@links_group.command("list")
@listing
@click.option("--source", metavar="NAME", help="Only links of this source.")
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
    at = now_ms()
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


@links_group.command("add")
@click.argument("source", metavar="SOURCE")
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

    settings = load_settings(config)
    identity, account = named.sender(settings, source, account)
    with operating(settings, reason) as (store, processor, by):
        linked = store.write(
            lambda tx: operate.link(
                tx, identity, account, customer, workspace, repoint=repoint, by=by
            )
        )
        drain(store, processor)
    of_account = f" of account {account}" if account else ""
    words = {
        "added": f"is linked to workspace {workspace}",
        "known": f"is already linked to workspace {workspace}",
        "repointed": f"is linked to workspace {workspace}, no longer to {linked.before}",
    }
    console.say(f"customer {customer}{of_account} of {identity} {words[linked.word]}")
    say_released(config, settings, linked.released)
    if linked.released:
        next_step(f"`receiver balance {shlex.quote(workspace)}`", config)


@links_group.command("remove")
@click.argument("source", metavar="SOURCE")
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


@main.group("ledger")
def ledger_group() -> None:
    """Amounts that were granted, spent and taken back."""


@ledger_group.command("list")
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

    with reading(load_settings(config)) as seen:
        found = ledger.listed(
            seen,
            workspace=workspace,
            subject=subject,
            operation=operation,
            since_ms=since_ms,
            limit=limit,
        )
    at = now_ms()
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


@ledger_group.command("grant")
@click.option("--source", required=True, metavar="NAME", help="The source or its identity.")
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
    from store.operations import Key

    settings = load_settings(config)
    identity, account = named.sender(settings, source, account)
    rule = named.grant_rule(settings, identity, operation)
    unit = unit or (None if rule is None else rule.unit)
    if unit is None:
        raise click.UsageError(f"handlers.py decides what {operation} grants: say --unit")
    key = Key(identity, account, subject, operation)
    with operating(settings, reason) as (store, processor, by):
        entered = store.write(lambda tx: operate.grant(tx, key, workspace, unit, amount, by))
        drain(store, processor)
    if entered.new:
        console.say(f"{amount} {unit} were granted to workspace {workspace} by {key}")
    else:
        console.say(f"{key} had granted that already: nothing was changed")
    if entered.new and rule is not None and rule.amount not in (None, amount):
        console.warn(
            f"the rule grants {rule.amount} {rule.unit}: a webhook that comes late for this "
            "subject will be quarantined, as it differs"
        )
    say_released(config, settings, entered.released)
    next_step(f"`receiver balance {shlex.quote(workspace)}`", config)


@ledger_group.command("adjust")
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

    def adjust(tx: Tx, *, yes: bool) -> operate.Entered:
        if not yes:
            named.check_unit(tx, settings, unit)
        by = operate.By(who, reason)
        return operate.adjust(tx, name, workspace, unit, amount, by, overdraw=yes)

    with acting(settings) as (store, who):
        try:
            entered = store.write(functools.partial(adjust, yes=yes))
        except operate.Overdrawn as error:
            confirm(f"{error}. Go on?")
            entered = store.write(functools.partial(adjust, yes=True))
    done = "was" if entered.new else "had been"
    console.say(f"workspace {workspace} {done} adjusted by {amount:+} {unit}: {entered.entry.key}")
    next_step(f"`receiver balance {shlex.quote(workspace)}`", config)


@ledger_group.command("revert")
@click.argument("entry", metavar="[SOURCE/ACCOUNT/SUBJECT/OPERATION]", required=False)
@click.option("--source", metavar="NAME", help="Instead of the argument: its four parts.")
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


@main.command("balance")
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

    with reading(load_settings(config)) as seen:
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


@main.command("records")
@listing
@click.option("--kind", metavar="KIND", help="Only records of this kind.")
@click.option("--workspace", metavar="WORKSPACE", help="Only records of this workspace.")
@click.option("--subject", metavar="SUBJECT", help="Only records for this subject.")
@since_option
def records_command(
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

    with reading(load_settings(config)) as seen:
        found = records.listed(
            seen, kind=kind, workspace=workspace, subject=subject, since_ms=since_ms, limit=limit
        )
    at = now_ms()
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


# Messages


message_state_option = click.option(
    "--state",
    type=click.Choice(("pending", "sent", "review", "dead", "cancelled")),
    help="Only messages in this state.",
)
destination_option = click.option(
    "--destination", metavar="NAME", help="Only messages to this destination."
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


@main.group("outbox")
def outbox_group() -> None:
    """Messages owed to the outside, and what became of them."""


@outbox_group.command("list")
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

    with reading(load_settings(config)) as seen:
        found = outbox.listed(seen, state=state, destination=destination, limit=limit)
    at = now_ms()
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


@outbox_group.command("show")
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
        told = tell(seen, settings, named.message(seen, message), now_ms())
    body = body_of(told.message) if with_body else None
    if as_json:
        console.print_json(as_object(told) | ({"body": body} if with_body else {}))
        return
    print_message(told, config)
    if with_body:
        console.say("")
        for line in json.dumps(body, indent=2, ensure_ascii=False).splitlines():
            console.say(line)


@outbox_group.command("retry")
@click.argument("messages", metavar="[MESSAGE]...", nargs=-1)
@click.option(
    "--state",
    type=click.Choice(("dead", "pending", "cancelled", "review")),
    help="Those in this state [with --destination alone: dead].",
)
@click.option("--destination", metavar="NAME", help="Those to this destination.")
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


@outbox_group.command("resolve")
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


@outbox_group.command("cancel")
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

    message, at = told.message, now_ms()
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


# Demo


@main.command()
@click.option("--keep", is_flag=True, help="Leave the folder, to look into its file and log.")
def demo(keep: bool) -> int:
    """Play the whole story against a real server on a temporary file.

    Exit code 1 if anything comes out other than expected.

    \b
    Example:
      receiver demo
    """
    from receiver.demo import PlaygroundError, run

    try:
        return run(console.say, now_ms, keep=keep, program=program())
    except PlaygroundError as error:
        raise Failure(str(error)) from error


def program() -> str:
    """How to call this command from any folder."""
    found = shutil.which("receiver")
    started = Path(sys.argv[0]).absolute()
    if found is not None or started.suffix == ".py":
        return "receiver"
    return shlex.quote(str(started))


if __name__ == "__main__":
    main()
