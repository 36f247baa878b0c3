"""The command that compares with the sender: its events, its objects, and what was paid."""

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from receiver import console
from receiver.commands import shared
from receiver.commands.shared import (
    FINE,
    FOUND,
    USAGE,
    Failure,
    configured,
    json_option,
    next_step,
    operating,
    reason_option,
)

if TYPE_CHECKING:
    from receiver.books import Line, Sheet
    from receiver.config import Source
    from receiver.operate import By
    from receiver.process import Processor
    from receiver.reconcile import Asked, Difference, Means, Result
    from store.database import Store

#: The bar goes by thousandths of the time that is read.
PROGRESS_WHOLE = 1_000

#: Events that are named at the end, of those that are still not done.
OPEN_SHOWN_MAX = 20


@click.command()
@click.argument("source", metavar="SOURCE")
@click.option("--since", metavar="TIME", help="From then on: 2h, 3d, a date, or RFC 3339.")
@click.option("--until", metavar="TIME", help="Up to then, with --books.")
@click.option("--all", "everything", is_flag=True, help="Also what may still be on its way.")
@click.option(
    "--account", "accounts", metavar="ACCOUNT", multiple=True, help="Of this account; repeatable."
)
@click.option("--events-only", is_flag=True, help="Don't read the objects that are projected.")
@click.option("--books", is_flag=True, help="Compare what was paid with what was granted.")
@click.option("--apply", is_flag=True, help="Put what is missing through the same rules.")
@json_option
@reason_option
@configured
def reconcile(
    config: Path,
    source: str,
    since: str | None,
    until: str | None,
    everything: bool,
    accounts: tuple[str, ...],
    events_only: bool,
    books: bool,
    apply: bool,
    as_json: bool,
    reason: str,
) -> int:
    """Find what SOURCE's sender has and we do not; exit 1 if anything differs.

    Lists its events by its API and looks for each that a rule wants. With --apply what is
    missing or unfinished goes through the same inbox and rules as any delivery, so that nothing
    is done twice. A run that was cut off goes on where it stopped. With --books the invoices
    that were paid and the credit notes are compared with what was granted and reversed.

    \b
    Example:
      receiver reconcile stripe --since 3d --apply
    """
    from receiver.config import load
    from receiver.reconcile import Asked

    settings = load(config)
    endpoint = shared.source_named(settings, source)
    check(endpoint, books=books, until=until)
    named = accounts or (endpoint.contract.account or "",)
    with operating(settings, reason) as (store, processor, by):
        means = means_of(store, processor, by)
        if books:
            period = period_of(since, until, everything)
            return compare_books(config, endpoint, means, named, period, apply, as_json)
        asked = Asked(
            accounts=named,
            since=since,
            since_ms=time_of(since, "--since"),
            everything=everything,
            apply=apply,
            resources=not events_only,
        )
        return compare_events(config, endpoint, means, asked, as_json)


def check(source: "Source", *, books: bool, until: str | None) -> None:
    """Ends the command where the config does not say how to compare."""
    from receiver import presets

    where = f"sources.{source.name}.api"
    recover = source.contract.preset.recover
    elsewhere = f"; what it offers: {recover}" if recover else ""
    known = presets.api_of(source.contract.preset)
    if source.api is None and elsewhere and known.events is None and not known.resources:
        raise Failure(
            f"sources.{source.name}: how this sender lists its events is not known{elsewhere}",
            code=USAGE,
        )
    if source.api is None:
        raise Failure(
            f'{where} is missing: write api = {{ key = "env:NAME" }} to compare', code=USAGE
        )
    sender = source.api.sender
    if books and sender.books is None:
        raise Failure(f"{where}: what is paid for at this sender is not known", code=USAGE)
    if until is not None and not books:
        raise Failure("--until is about --books", code=USAGE)
    if books or source.api.events is not None:
        return
    if sender.events is None and not sender.resources:
        raise Failure(
            f"{where}: how this sender lists its events is not known{elsewhere}", code=USAGE
        )
    if sender.events is not None:
        why = "is missing: write the path of the list, as in /repos/OWNER/REPO/hooks/ID/deliveries"
        raise Failure(f"{where}.events {why}", code=USAGE)


def time_of(text: str | None, option: str) -> int | None:
    if text is None:
        return None
    try:
        return console.parse_time(text, shared.now_ms())
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from error


def period_of(since: str | None, until: str | None, everything: bool) -> tuple[int, int]:
    """The period of the books, in UTC milliseconds."""
    from receiver.listing import DAY_MS
    from receiver.reconcile import GRACE_S, LOOKBACK_DAYS

    now_ms = shared.now_ms()
    since_ms, until_ms = time_of(since, "--since"), time_of(until, "--until")
    if until_ms is None:
        until_ms = now_ms + 1_000 if everything else now_ms - GRACE_S * 1000
    if since_ms is None:
        since_ms = until_ms - LOOKBACK_DAYS * DAY_MS
    if since_ms >= until_ms:
        raise click.UsageError("the period is empty: --since is not before its end")
    return since_ms, until_ms


def means_of(store: "Store", processor: "Processor", by: "By") -> "Means":
    from receiver.operate import drain
    from receiver.reconcile import Means, owner_here
    from receiver.work import OneWriter

    def fail(why: str) -> None:
        raise Failure(why)

    return Means(
        processor=processor,
        write=OneWriter(store, fail).write,
        clock=shared.now_ms,
        wait=wait,
        owner=owner_here(),
        by=by,
        drain=lambda: drain(store, processor),
    )


def wait(seconds: float, why: str) -> None:
    if sys.stderr.isatty():
        # Below the bar, which stays where it was.
        click.echo(err=True)
    console.warn(f"{why}; asking again in {seconds:.0f} s")
    time.sleep(seconds)


class Teller:
    """Tells what is found as it is found; where a bar is shown, once that is over."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._move: Callable[[int], None] = lambda steps: None
        self._at = 0
        self._held: list[Callable[[], None]] = []
        self._holds = False

    @contextlib.contextmanager
    def bar(self, label: str) -> Iterator[None]:
        self._holds = sys.stderr.isatty()
        try:
            with shared.progress(PROGRESS_WHOLE, label) as self._move:
                yield
        finally:
            self._holds = False
            for tell in self._held:
                tell()

    def difference(self, one: "Difference") -> None:
        self._say(lambda: self._print(one))

    def note(self, words: str) -> None:
        self._say(lambda: console.warn(words))

    def _say(self, tell: Callable[[], None]) -> None:
        if self._holds:
            self._held.append(tell)
        else:
            tell()

    def _print(self, one: "Difference") -> None:
        if self._as_json:
            import msgspec

            found = msgspec.structs.asdict(one) | {"at": console.rfc3339(one.at_ms)}
            del found["at_ms"]
            console.print_json(found)
            return
        name = "/".join(filter(None, (one.account, one.id)))
        why = f": {one.detail}" if one.detail else ""
        whose = f" (workspace {one.workspace})" if one.workspace else ""
        when = console.moment(one.at_ms, shared.now_ms())
        console.say(f"{one.what}  {one.type} {name}, {when}{whose}{why}", "yellow")

    def progress(self, part: float) -> None:
        # The next list begins anew; the bar does not go back.
        at = max(self._at, int(part * PROGRESS_WHOLE))
        self._move(at - self._at)
        self._at = at


def again_with_apply(source: "Source") -> str:
    """The command as it was given, with --apply: without its flags it would look elsewhere."""
    given, words = click.get_current_context().params, [source.name]
    for name, option in (("since", "--since"), ("until", "--until")):
        words += [option, given[name]] if given[name] is not None else []
    for name, option in (("everything", "--all"), ("events_only", "--events-only")):
        words += [option] if given[name] else []
    for account in given["accounts"]:
        words += ["--account", account]
    words += ["--books"] if given["books"] else []
    return f"`receiver reconcile {shlex.join(words)} --apply`"


def compare_events(
    config: Path, source: "Source", means: "Means", asked: "Asked", as_json: bool
) -> int:
    import msgspec

    from receiver.pages import Stopped
    from receiver.reconcile import Run

    teller = Teller(as_json)
    with teller.bar(f"reading {source.name}"):
        try:
            result = Run(source, asked, means, teller).run()
        except Stopped as error:
            raise stopped(source, error) from error
    if as_json:
        counts = msgspec.structs.asdict(result.counts)
        console.print_json(
            {"what": "summary", "source": source.name} | counts | {"gap": result.gap}
        )
    else:
        print_events(config, source, result, asked)
    return FOUND if result.gap else FINE


def stopped(source: "Source", error: Exception) -> Failure:
    return Failure(
        f"{source.name}: {error}; what was found and done until then stays: "
        "run the same again, and it goes on from there"
    )


def print_events(config: Path, source: "Source", result: "Result", asked: "Asked") -> None:
    from receiver.reconcile import GRACE_S

    counts = result.counts
    console.say(
        f"{console.counted(counts.listed, 'event')} at {source.name}: "
        f"{counts.unwanted} that no rule wants, {counts.missing} missing, "
        f"{counts.unfinished} here and unfinished"
    )
    if counts.resources:
        console.say(
            f"{console.counted(counts.resources, 'resource')} read again: "
            f"{counts.drifted} differ, {counts.unread} could not be read"
        )
    if counts.asked:
        console.say(f"{counts.asked} were asked for again; run it once more when they have come")
    if not asked.everything:
        console.say(
            f"What is younger than {GRACE_S // 60} min is left out, it may be on its way: "
            "--all takes it too"
        )
    if asked.apply:
        console.say(f"{result.gap} still differ" if result.gap else "nothing differs any more")
        for row in result.open[:OPEN_SHOWN_MAX]:
            console.say(f"{row.state}  {row.event_id}: {row.reason or row.last_error or ''}")
        if result.open:
            next_step("`receiver events list`, then `receiver replay`", config)
    elif result.gap:
        next_step(again_with_apply(source), config)


def compare_books(
    config: Path,
    source: "Source",
    means: "Means",
    accounts: tuple[str, ...],
    period: tuple[int, int],
    apply: bool,
    as_json: bool,
) -> int:
    from receiver import books
    from receiver.pages import Stopped

    asked = books.Asked(accounts, *period, apply)
    teller = Teller(as_json)
    comparison = books.Comparison(source, asked, means, teller)
    with teller.bar(f"reading {source.name}"):
        try:
            gap = comparison.run()
        except Stopped as error:
            raise stopped(source, error) from error
    print_books(comparison.sheets, as_json)
    if not comparison.sheets:
        console.warn("no rule grants or takes back an amount for what this sender lists")
    if gap and not apply and not as_json:
        next_step(again_with_apply(source), config)
    return FOUND if gap else FINE


def print_books(sheets: "list[Sheet]", as_json: bool) -> None:
    """A line for each operation, and, where there are several, for each workspace of it."""
    for sheet in sheets:
        if as_json:
            console.print_json(summary(sheet, "", sheet.total))
        else:
            console.say(f"{sheet.operation}: {words_of(sheet, sheet.total)}")
        several = len(sheet.workspaces) > 1
        for workspace, line in sorted(sheet.workspaces.items()) if several else ():
            if as_json:
                console.print_json(summary(sheet, workspace, line))
            else:
                name = workspace or "no workspace known"
                console.say(f"  {name}: {words_of(sheet, line)}")


def words_of(sheet: "Sheet", line: "Line") -> str:
    mended = f", {line.mended} of them granted now" if line.mended else ""
    return (
        f"{console.counted(line.objects, sheet.words)}, "
        f"{console.counted(line.here, sheet.effect)}, {line.missing} missing{mended}, "
        f"{line.extra} extra, {line.other} of another amount"
    )


def summary(sheet: "Sheet", workspace: str, line: "Line") -> dict[str, object]:
    import msgspec

    about = {"what": "summary", "operation": sheet.operation, "objects_are": sheet.words}
    return about | {"workspace": workspace or None} | msgspec.structs.asdict(line)
