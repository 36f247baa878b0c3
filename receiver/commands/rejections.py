"""The commands about what was refused: list, explain, accept."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from receiver import console
from receiver.commands import shared
from receiver.commands.shared import (
    FINE,
    FOUND,
    Listed,
    check_source,
    configured,
    drain,
    json_option,
    listing,
    load_settings,
    looking,
    next_step,
    operating,
    print_findings,
    print_listing,
    reading,
    since_option,
    source_named,
    source_option,
    why_option,
    with_captured,
)

if TYPE_CHECKING:
    from receiver.explain import Finding
    from receiver.operate import Accepted
    from store.rejections import Kept

HEADINGS = ("rejection", "last", "source", "reason", "times", "detail")
REASONS = (
    *("bad-signature", "expired", "unknown", "too-large", "encoding", "address", "certificate"),
    "unavailable",
)


@click.group(cls=Listed)
def rejections() -> None:
    """What was refused, why, and what of it can be accepted all the same."""


@rejections.command("list")
@listing
@source_option
@click.option("--reason", type=click.Choice(REASONS), help="Only for this reason.")
@since_option
def rejections_list(
    config: Path,
    as_json: bool,
    limit: int,
    source: str | None,
    reason: str | None,
    since_ms: int | None,
) -> None:
    """List what was refused, newest first.

    A line for each minute, source and reason; but one for each delivery whose signature is right
    (reason `expired`). The first column is the number of the newest one that is kept.

    \b
    Example:
      receiver rejections list --source stripe --since 2h
    """
    from receiver.rejected import as_line
    from store import rejections

    with looking(config) as seen:
        found = rejections.listed(
            seen, source=source, reason=reason, since_ms=since_ms, limit=limit
        )
        if not found:
            check_source(seen, config, source)
    at = shared.now_ms()
    print_listing(
        found,
        limit,
        as_json,
        as_line,
        HEADINGS,
        lambda one: (
            one.number,
            console.when(one.last_ms, at),
            one.source or "-",
            one.reason,
            one.count,
            "accepted" if one.accepted_ms is not None else one.detail,
        ),
        prose=True,
    )
    kept = next((one.number for one in found if one.number is not None), None)
    if kept is not None and not as_json:
        next_step(f"`receiver rejections explain {kept}` says why", config)


@rejections.command("explain")
@click.argument("name", metavar="N|REQUEST_ID")
@json_option
@configured
def rejections_explain(config: Path, name: str, as_json: bool) -> None:
    """Say in plain words why a request was refused, and what to do about it.

    It is named by its number, or by the X-Request-Id of the answer. What would match if the body,
    the secret or the URL were another is tried; that explains, and is never accepted.

    \b
    Example:
      receiver rejections explain 12
    """
    from receiver import named
    from receiver.rejected import as_object, clocks_near, explained

    settings, at = load_settings(config), shared.now_ms()
    with reading(settings) as seen:
        kept = named.rejection(seen, name)
        clocks = clocks_near(seen, settings, kept.request.received_ms, at)
        accepted = kept.accepted_ms is not None
        findings = () if accepted else explained(settings, kept.request, seen, clocks)
    if as_json:
        console.print_json(as_object(kept, findings))
        return
    print_rejection(kept, findings)
    for step in next_steps(kept, findings):
        next_step(step, config)


@rejections.command("accept")
@click.argument("name", metavar="N|REQUEST_ID")
@why_option
@configured
def rejections_accept(config: Path, name: str, reason: str) -> int:
    """Take a delivery whose signature is right and whose time was not.

    It goes the way of any delivery: known ones are recognised, rules apply once.

    \b
    Example:
      receiver rejections accept 12 --reason "our clock was wrong"
    """
    from msgspec.structs import replace

    from receiver import named, operate
    from receiver.sources import with_secrets

    settings = load_settings(config)
    with reading(settings) as seen:
        kept = named.rejection(seen, name)
    source = with_secrets(source_named(settings, kept.request.source), config)
    source = replace(source, contract=with_captured(settings, source.contract))
    with operating(settings, reason) as (store, processor, by):
        taken = operate.accept(store, processor, source, kept.number, by)
        drain(store, processor)
    return say_accepted(config, kept, taken)


def say_accepted(config: Path, kept: "Kept", taken: "Accepted") -> int:
    """What became of it; FOUND if it is unfinished."""
    events = ", ".join(map(str, taken.rows))
    console.say(f"rejection {kept.number} is accepted as event {events}: {taken.word}")
    next_step(f"`receiver events show {taken.rows[0]}` tells the rest", config)
    return FINE if taken.word in ("done", "ignored", "duplicate", "pending") else FOUND


def print_rejection(kept: "Kept", findings: "Sequence[Finding]") -> None:
    """What was kept of it, and why it was refused."""
    request, at = kept.request, shared.now_ms()
    accepted = None
    if kept.accepted_ms is not None:
        accepted = f"{console.moment(kept.accepted_ms, at)}, as event {kept.event}"
    console.print_fields(
        [
            ("rejection", kept.number),
            ("request", request.request_id),
            ("received", console.moment(request.received_ms, at)),
            ("source", request.source or "-"),
            ("reason", request.reason),
            ("detail", request.detail),
            ("from", f"{request.method} by {request.address}"),
            ("headers", ", ".join(json.loads(request.header_names)) or None),
            ("body", body_words(kept)),
            ("accepted", accepted),
        ]
    )
    print_findings(findings)


def body_words(kept: "Kept") -> str | None:
    size = kept.request.body_bytes
    if size is None:
        return None
    return f"{size} bytes, {'kept' if kept.request.body is not None else 'not kept'}"


def next_steps(kept: "Kept", findings: "Sequence[Finding]") -> list[str]:
    """What can be done about it."""
    request = kept.request
    if kept.event is not None:
        return [f"`receiver events show {kept.event}`"]
    if request.reason == "expired":
        return [
            f'if it may still be applied: `receiver rejections accept {kept.number} --reason "..."`'
        ]
    unknown = any(finding.cause == "not-kept" for finding in findings)
    if request.reason == "bad-signature" and unknown:
        return [
            f"to have the next one kept: keep_rejected = true in [sources.{request.source}], "
            "reload the service, and have it sent again",
            "one that you have from the sender or the proxy: "
            f"`receiver verify {request.source} --request FILE`",
        ]
    return []
