"""A refused request that was kept, as a delivery again: why it was refused, and taking it."""

import json
import math
from collections.abc import Sequence

import msgspec

from receiver import explain
from receiver.captures import complete
from receiver.config import ConfigError, Settings, Source
from receiver.console import rfc3339
from receiver.explain import Clocks, Finding
from receiver.handshakes import Handshake
from receiver.presets import Preset
from receiver.select import nearest_or_all
from receiver.sources import others_with_secrets, tolerance_of, with_secrets
from receiver.verify import EXPIRED, Delivery, Event, Rejected, verify
from store import inbox, rejections
from store.database import Snapshot
from store.rejections import Kept, Line, Request

#: How far from a delivery others may be that say something of its clock, in milliseconds.
NEAR_MS = 600_000

LET_GO = "its body was pruned or redacted since, so it can't be taken any more"


class Untakable(Exception):
    """The delivery can't be accepted; the message says why."""


def explained(
    settings: Settings, request: Request, seen: Snapshot, clocks: Clocks | None = None
) -> tuple[Finding, ...]:
    """Why it was refused, as far as what was kept tells; reads secrets."""
    source = settings.sources.get(request.source)
    if request.reason not in (EXPIRED, "bad-signature") or source is None:
        return (_by_reason(settings, request),)
    try:
        delivery = delivery_of(source, request)
        if delivery is not None:
            own = complete(with_secrets(source, settings.path).contract, seen)
            others = others_with_secrets(settings, source)
            return explain.explain(own, delivery, others, clocks)
    except ConfigError as error:
        return (Finding("no-secret", f"its secrets can't be read here: {error.problems[0]}"),)
    if request.reason == EXPIRED:
        return (Finding("not-kept", f"the signature was right: {request.detail}; {LET_GO}"),)
    names = json.loads(request.header_names)
    found = explain.explain_unkept(source.contract.preset, names, request.body_bytes)
    return tuple(found) or (_unjudged(source.contract.preset),)


def clocks_near(snapshot: Snapshot, settings: Settings, at_ms: int, now_ms: int) -> Clocks:
    """What other deliveries of that time say of the clocks."""
    since_ms, until_ms = at_ms - NEAR_MS, at_ms + NEAR_MS
    received = inbox.received(snapshot, since_ms, until_ms)
    timed = [one.name for one in settings.sources.values() if tolerance_of(one) is not None]
    return Clocks(
        now_ms=now_ms,
        skews=rejections.skews(snapshot, since_ms, until_ms),
        accepted={name: count for name, count in received.items() if name in timed},
    )


def delivery_of(source: Source, request: Request) -> Delivery | None:
    """As it arrived; None if its body was not kept."""
    if request.url is None or request.headers is None or request.body is None:
        return None
    headers = tuple(
        (name.encode("latin-1"), value.encode("latin-1"))
        for name, value in json.loads(request.headers)
    )
    codings = [value.strip().lower() for name, value in headers if name == b"content-encoding"]
    packed = source.body_gzip and any(coding in (b"gzip", b"x-gzip") for coding in codings)
    return Delivery(
        method=request.method,
        url=request.url,
        headers=headers,
        body=request.body,
        received_ms=request.received_ms,
        inflated=unpacked(request.body) if packed else None,
    )


def unpacked(body: bytes) -> bytes | None:
    """A body that came as gzip, as it was before; None if it is none."""
    # Only what was gzip needs the server's limits.
    from receiver.app import Refused, inflate

    try:
        return inflate(body, len(body) * 1024)
    except Refused:
        return None


def events_of(source: Source, kept: Kept) -> tuple[Event, ...]:
    """Its events, proved again by the source's secrets as they are now. Raises Untakable.

    Only the time is not asked: a signature that a variation alone would match is not right.
    """
    number, request = kept.number, kept.request
    if kept.accepted_ms is not None:
        raise Untakable(f"rejection {number} is accepted already, as event {kept.event}")
    if request.reason != EXPIRED:
        raise Untakable(
            f"rejection {number} ({request.reason}) is not one whose signature is right: it is "
            f"never accepted; `receiver rejections explain {number}` says why it was refused"
        )
    delivery = delivery_of(source, request)
    if delivery is None:
        raise Untakable(f"rejection {number}: {LET_GO}")
    timeless = msgspec.structs.replace(source.contract, tolerance_s=math.inf)
    try:
        judged = verify(timeless, delivery)
    except Rejected as error:
        raise Untakable(
            f"rejection {number} matches none of the secrets of {source.name} any more "
            f"({error.detail}): put the one back that it was signed with, or have it sent again"
        ) from error
    if isinstance(judged, Handshake) or not judged:
        raise Untakable(f"rejection {number} holds no event: it was a handshake, or an empty batch")
    return judged


def as_line(one: Line) -> dict[str, object]:
    """A line of the list for JSON; `rejection` is the number of the newest that is kept."""
    return {
        "rejection": one.number,
        "source": one.source,
        "reason": one.reason,
        "count": one.count,
        "first_at": rfc3339(one.first_ms),
        "at": rfc3339(one.last_ms),
        "request_id": one.request_id,
        "detail": one.detail,
        "accepted_at": rfc3339(one.accepted_ms),
    }


def as_object(kept: Kept, findings: Sequence[Finding]) -> dict[str, object]:
    """A kept rejection for JSON: never a value of a header, nor the body."""
    request = kept.request
    return {
        "rejection": kept.number,
        "source": request.source,
        "reason": request.reason,
        "detail": request.detail,
        "request_id": request.request_id,
        "received_at": rfc3339(request.received_ms),
        "method": request.method,
        "address": request.address,
        "header_names": json.loads(request.header_names),
        "body_bytes": request.body_bytes,
        "body_kept": request.body is not None,
        "skew_s": request.skew_s,
        "accepted_at": rfc3339(kept.accepted_ms),
        "event": kept.event,
        "explanation": [finding._asdict() for finding in findings],
    }


def _by_reason(settings: Settings, request: Request) -> Finding:
    detail = request.detail
    match request.reason:
        case "unknown":
            name = detail.removeprefix("/webhooks/").strip("/")
            words = f"no source has the path {detail}{nearest_or_all(name, settings.sources)}"
        case "too-large":
            words = f"{detail}: more than server.body_bytes_max allows; raise it if that is genuine"
        case "address":
            words = (
                f"{detail}: add it if it is the sender's; behind a proxy, the proxy has to be "
                "one of server.trusted_proxies"
            )
        case "unavailable":
            words = f"nothing could be written ({detail}), so it was answered 503: it comes again"
        case "certificate":
            words = (
                f"{detail}: it was answered 503, so it comes again; if that does not end, the log "
                "says why the certificate can't be had, or give it as a secret named cert_pem"
            )
        case "encoding":
            words = detail
        case _:
            words = f"source {request.source} is no longer in the config: nothing can be judged"
    return Finding(request.reason, words)


def _unjudged(preset: Preset) -> Finding:
    parts = "the secret, the body or the URL" if preset.signs_url else "the secret or the body"
    return Finding(
        "not-kept",
        f"the headers that it takes are there, so {parts} is another one than the sender's; which "
        "of them can't be told, since its body was not kept",
    )
