"""Tells what became of one message: who owes it, each try to send it, and what to do next."""

from collections.abc import Iterator

import msgspec

from receiver import shown
from receiver.config import Settings
from receiver.console import rfc3339
from receiver.operate import target_of_message
from receiver.select import MISSING
from receiver.story import TOLD_MAX, Moment, acts
from store import attempts, inbox
from store.attempts import Attempt
from store.database import Snapshot
from store.outbox import ALERTS, Message


class Told(msgspec.Struct, frozen=True):
    """A message and its story; `owner` names the event that owes it, for a command line."""

    message: Message
    owner: str | None
    moments: tuple[Moment, ...]
    next_steps: tuple[str, ...]


def tell(snapshot: Snapshot, settings: Settings, message: Message, now_ms: int) -> Told:
    """The whole story of a message."""
    event = None if message.event is None else inbox.by_row(snapshot, message.event)
    owner = None if event is None else shown.handle(snapshot, event)
    who = "an alert" if message.source == ALERTS else f"event {owner or '?'}"
    moments = [
        Moment(
            message.created_ms,
            "owed",
            f"by {who}, once for {message.key}",
            {"event": message.event} | shown.key(message.key),
        ),
        *map(_attempt, attempts.of_message(snapshot, message.id)[-TOLD_MAX:]),
        *acts(snapshot, target_of_message(message.id)),
        *_end(message),
    ]
    moments.sort(key=lambda moment: moment.at_ms)
    steps = tuple(_next_steps(settings, message, owner, now_ms))
    return Told(message, owner, tuple(moments), steps)


def as_object(told: Told) -> dict[str, object]:
    """The story for JSON: the message's fields, and `story` in order of time."""
    moments = [
        {"at": rfc3339(one.at_ms), "what": one.what, "words": one.words, **one.facts}
        for one in told.moments
    ]
    return shown.message(told.message) | {
        "leased_until": rfc3339(told.message.lease_until_ms),
        "story": moments,
        "next": list(told.next_steps),
    }


def body_of(message: Message) -> object:
    """What is sent, decoded."""
    return msgspec.json.decode(message.body)


def is_leased(message: Message, now_ms: int) -> bool:
    """Whether a worker is trying it now."""
    return message.lease_until_ms is not None and message.lease_until_ms > now_ms


def _attempt(one: Attempt) -> Moment:
    return Moment(one.started_ms, "attempt", shown.attempt_words(one), shown.attempt(one))


_ENDS = {
    "sent": "nothing is left to do",
    "dead": "nothing more is tried",
    "cancelled": "it is not to be sent",
}


def _end(message: Message) -> Iterator[Moment]:
    if message.settled_ms is not None:
        words = message.last_error if message.state == "dead" else None
        yield Moment(message.settled_ms, message.state, words or _ENDS[message.state])


def _next_steps(
    settings: Settings, message: Message, owner: str | None, now_ms: int
) -> Iterator[str]:
    number = message.id
    unfinished = message.state in ("pending", "review", "dead")
    if unfinished and message.destination not in settings.destinations:
        yield f"the config has no destination {message.destination} now: add it again first"
    match message.state:
        case "pending":
            yield from _pending_steps(settings, message, now_ms)
        case "review":
            yield (
                f"look for {message.operation_key} in the other side's records; if it is there, "
                f"`receiver outbox resolve {number} --sent`"
            )
            yield f"if it is not: `receiver outbox resolve {number} --again`"
        case "dead":
            yield from _dead_steps(message, owner)
        case "cancelled":
            yield f"if it is to be sent after all: `receiver outbox retry {number}`"


def _dead_steps(message: Message, owner: str | None) -> Iterator[str]:
    retry = f"`receiver outbox retry {message.id}`"
    cancel = f"`receiver outbox cancel {message.id}`"
    where = f"destinations.{message.destination}"
    if not message.is_written and (message.last_error or "").endswith(MISSING):
        # No config can give an event what its sender left out.
        yield f"if event {owner or '?'} rightly has no such value: {cancel}"
        yield f"if {where} is to take another one: correct that, then {retry}"
        return
    first = "when the cause is gone" if message.is_written else f"correct {where}, then"
    yield f"{first}: {retry}"
    yield f"if it is not needed any more: {cancel}"


def _pending_steps(settings: Settings, message: Message, now_ms: int) -> Iterator[str]:
    if is_leased(message, now_ms):
        yield "a worker is trying it now"
        return
    due_ms = message.next_attempt_ms
    if settings.worker.run == "off":
        yield "worker.run is off: turn it on, and restart the server, to have it sent"
    elif due_ms is not None and due_ms > now_ms:
        yield f"`receiver outbox retry {message.id}` tries it now"
    elif settings.worker.run == "separate":
        yield "it is due: see that `receiver work` is running"
    else:
        yield "it is due: see that `receiver serve` is running"
