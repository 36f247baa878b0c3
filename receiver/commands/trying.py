"""The commands to try things out: demo, send, verify."""

import json
import secrets
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from receiver import console
from receiver.commands import shared
from receiver.commands.shared import (
    FINE,
    FOUND,
    USAGE,
    Failure,
    Time,
    configured,
    json_option,
    load_settings,
    name_of,
    names_in,
    next_step,
    print_findings,
    read_limited,
    source_named,
    with_captured,
)

if TYPE_CHECKING:
    from receiver.coded import Certificates
    from receiver.config import Settings, Source
    from receiver.explain import Finding
    from receiver.samples import Wish
    from receiver.sending import Answer
    from receiver.verify import Delivery, Verdict

#: The verdicts that a server would accept.
ACCEPTED = ("valid", "handshake")
#: Those that are explained.
EXPLAINED = ("bad-signature", "expired")


@click.command()
@configured
@click.argument("source", metavar="SOURCE", shell_complete=names_in("sources"))
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
@click.option(
    "--private-key",
    "private_key",
    metavar="REF",
    help="For a sender that signs with one: env:NAME or file:/path of a key in PEM, whose public "
    "key (or certificate) is the source's secret.",
)
@click.option("--yes", is_flag=True, help="Send to a live source, too.")
@json_option
def send(
    config: Path,
    source: str,
    event_type: str,
    url: str | None,
    private_key: str | None,
    yes: bool,
    as_json: bool,
    **wish: Any,
) -> int:
    """Sign a sample event of TYPE and post it to the running server, as SOURCE would.

    \b
    Example:
      receiver send stripe invoice.paid --customer cus_1
    """
    from msgspec.structs import replace

    from receiver import samples, sending
    from receiver.sources import resolved, url_of, with_secrets

    settings = load_settings(config)
    found = with_secrets(source_named(settings, source), config)
    found = replace(found, contract=with_captured(settings, found.contract))
    if found.contract.livemode and not yes:
        raise Failure(
            f"sources.{source} is live: a sample would change real balances; "
            "use a source with livemode = false, or add --yes",
            code=USAGE,
        )
    try:
        target = sending.Target(url) if url else sending.target_of(settings, source)
        key = None if private_key is None else resolved(private_key, settings)
        wanted = wish_of(event_type, wish)
        sample = samples.make(found, wanted, url_of(found) or target.url, key)
        place = samples.place_of(found, target)
        answer = sending.post(place, sample.headers, sample.body)
    except ValueError as error:
        raise Failure(str(error), code=USAGE) from error
    except RecursionError as error:
        raise Failure("the body is nested too deeply to be changed", code=USAGE) from error
    except sending.NotSent as error:
        raise Failure(str(error)) from error
    if as_json:
        console.print_json(described_answer(sample.event_id, answer))
    else:
        told = described_answer(sample.event_id, answer)
        console.print_fields([*(told | {"answer": answer.word or "nothing (empty body)"}).items()])
        next_step(samples.advice(settings, source, sample, answer.status, answer.word), config)
    return FINE if answer.status < 300 else FOUND


@click.command()
@configured
@click.argument("source", metavar="SOURCE", shell_complete=names_in("sources"))
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

    What is refused is explained, as `receiver rejections explain` does. Exit code 0 if it is
    valid, 1 if not. A handshake is judged as if the source were armed, and its
    answer is printed.

    \b
    Example:
      receiver verify stripe --request request.json --at 2026-11-30T14:03:11Z
    """
    from receiver.explain import explain
    from receiver.requests import REQUEST_BYTES_MAX, Malformed, parse
    from receiver.sources import others_with_secrets, url_of, with_secrets
    from receiver.verify import verdict

    settings = load_settings(config)
    found = with_secrets(source_named(settings, source), config)
    text = read_limited(request_file, REQUEST_BYTES_MAX)
    url = url_of(found) or f"http://localhost/webhooks/{source}"
    try:
        request = parse(text, url=url, received_ms=shared.now_ms() if at is None else at)
        delivery = unpacked(request, found, settings)
    except Malformed as error:
        raise Failure(f"{name_of(request_file)}: {error}", code=USAGE) from error
    contract = with_captured(settings, found.contract)
    judged = verdict(contract, delivery, certificates_of(settings, found, delivery))
    findings: Sequence[Finding] = ()
    if judged.verdict in EXPLAINED:
        findings = explain(contract, delivery, others_with_secrets(settings, found))
    tell_verdict(judged, findings, as_json)
    return FINE if judged.verdict in ACCEPTED else FOUND


def unpacked(delivery: "Delivery", source: "Source", settings: "Settings") -> "Delivery":
    """The delivery with its gzip body inflated, as the server would; raises Failure."""
    from msgspec.structs import replace

    from receiver.app import Refused, check_headers, inflate

    length_max = settings.server.body_bytes_max
    try:
        if not check_headers(delivery.headers, source, length_max)[0]:
            return delivery
        return replace(delivery, inflated=inflate(delivery.body, length_max))
    except Refused as refused:
        raise Failure(f"the server refuses it unread: {refused.detail}") from refused


def certificates_of(settings: "Settings", source: "Source", delivery: "Delivery") -> "Certificates":
    """Those that the server has fetched and that were valid then, if the sender signs with one."""
    from receiver.certificate_book import Book
    from store import certificates
    from store.database import exists

    book = Book(lambda: delivery.received_ms)
    if source.contract.preset.by_certificate and exists(settings.database):
        with shared.reading(settings) as seen:
            book.load(certificates.known(seen))
    return book


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
        now_ms=shared.now_ms(),
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


def tell_verdict(judged: "Verdict", findings: Sequence["Finding"], as_json: bool) -> None:
    fields = described_verdict(judged)
    if as_json:
        why = {"explanation": [finding._asdict() for finding in findings]} if findings else {}
        console.print_json(fields | why)
    else:
        for name in ("headers", "events"):
            fields |= {name: json.dumps(fields[name])} if name in fields else {}
        colour = "green" if judged.verdict in ACCEPTED else "red"
        verdict = console.Painted(judged.verdict, colour)
        console.print_fields([*(fields | {"verdict": verdict}).items()])
        print_findings(findings)


def described_verdict(judged: "Verdict") -> dict[str, Any]:
    """What `--json` prints; `status`, `response`, `headers` and `events` where there are any."""
    told: dict[str, Any] = {
        "verdict": judged.verdict,
        "event_id": judged.event_id,
        "event_type": judged.event_type,
        "account": judged.account,
        "reason": judged.reason,
    }
    if judged.status is not None:
        told |= {"status": judged.status, "response": judged.response}
        told["headers"] = dict(judged.headers or ())
    if judged.events is not None:
        told["events"] = [described_verdict(one) for one in judged.events]
    return told


@click.command()
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
        return run(console.say, shared.now_ms, keep=keep, program=program())
    except PlaygroundError as error:
        raise Failure(str(error)) from error


def program() -> str:
    """How to call this command from any folder."""
    found = shutil.which("receiver")
    started = Path(sys.argv[0]).absolute()
    if found is not None or started.suffix == ".py":
        return "receiver"
    return shlex.quote(str(started))
