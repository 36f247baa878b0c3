"""Leases a message and settles it: what each result of a send means for what is owed."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from receiver import backoff, process
from receiver.config import Worker
from receiver.destinations import Destination, Later, Never, Owed, Result, Sent, Unknown
from receiver.process import Processor
from store import attempts, outbox, tallies
from store.database import Tx
from store.outbox import Message
from store.tallies import What

#: What a lease lasts beyond the time limit of its send, in seconds.
LEASE_SPARE_S = 30

#: How an attempt ended, in one word.
OUTCOMES: Mapping[type, str] = MappingProxyType(
    {Sent: "sent", Later: "failed", Never: "refused", Unknown: "unknown"}
)


class Leased(NamedTuple):
    """A message under our lease: the number of its attempt, and when it was first tried."""

    message: Message
    owner: str
    attempt: int
    first_ms: int


def lease(
    tx: Tx, *, worker: Worker, destination: Destination, owner: str, ahead_ms: int
) -> Leased | int | None:
    """Take the message that is due longest; without one, when the next is due.

    One whose last attempt never ended may have gone through: it is only taken if sending it
    twice is allowed, and is left for the operator otherwise. Such attempts are bounded too.
    """
    while True:
        message = outbox.due(tx, destination.name, tx.now_ms, ahead_ms)
        if message is None:
            return outbox.due_ms(tx, destination.name)
        first_ms = attempts.first_ms(tx, message.id)
        first_ms = tx.now_ms if first_ms is None else first_ms
        if message.lease_owner is None:
            break
        if not _may_repeat(destination, first_ms, tx.now_ms):
            state, why = "review", "an attempt never ended: was it received?"
        elif _is_spent(worker, destination, message, message.attempts, tx.now_ms):
            state, why = "dead", "no attempt is left: the last one never ended"
        else:
            break
        attempts.close(tx, message=message.id)
        outbox.settle(tx, message.id, state, why)
    until_ms = tx.now_ms + int((destination.timeout_s + LEASE_SPARE_S) * 1000)
    outbox.lease(tx, message.id, owner, until_ms)
    attempts.start(tx, message.attempts + 1, message=message.id)
    return Leased(message, owner, message.attempts + 1, first_ms)


def owed(leased: Leased) -> Owed:
    """What is to be sent."""
    message = leased.message
    return Owed(
        operation_key=message.operation_key,
        correlation_id=correlation_of(message),
        attempt=leased.attempt,
        created_ms=message.created_ms,
        body=msgspec.json.decode(message.body),
    )


def correlation_of(message: Message) -> str:
    """What ties a message to what owes it, in the log and for the other side."""
    if message.event is None:
        return f"message-{message.id}"
    return process.correlation_of(message.event)


def settle(
    tx: Tx, *, processor: Processor, destination: Destination, leased: Leased, result: Result
) -> bool:
    """Write down how a send ended; False, with nothing written, if the lease is not ours now."""
    message, attempt = leased.message, leased.attempt
    if not outbox.holds(tx, message.id, leased.owner, attempt):
        return False
    tallies.add(tx, {What("send", destination.name, OUTCOMES[type(result)]): 1}, tx.now_ms)
    if isinstance(result, Sent):
        attempts.finish(tx, attempt, OUTCOMES[Sent], result.detail or None, message=message.id)
        outbox.settle(tx, message.id, "sent", None)
        return True
    if isinstance(result, Never):
        attempts.finish(tx, attempt, OUTCOMES[Never], result.why, message=message.id)
        outbox.settle(tx, message.id, "dead", result.why)
        return True
    known = isinstance(result, Later)
    attempts.finish(tx, attempt, OUTCOMES[type(result)], result.why, message=message.id)
    worker = processor.settings.worker
    if not known and not _may_repeat(destination, leased.first_ms, tx.now_ms):
        outbox.settle(tx, message.id, "review", result.why)
    elif _is_spent(worker, destination, message, attempt, tx.now_ms):
        outbox.settle(tx, message.id, "dead", result.why)
    else:
        delay_ms = _delay_ms(worker, leased, result, processor.random())
        outbox.retry(tx, message.id, result.why, tx.now_ms + delay_ms)
    return True


def _may_repeat(destination: Destination, first_ms: int, now_ms: int) -> bool:
    """Whether a send of unknown outcome may be made again under the same key."""
    policy = destination.policy
    if policy.idempotent_for_s is not None:
        return now_ms - first_ms <= policy.idempotent_for_s * 1000
    return policy.ambiguous == "retry"


def _is_spent(
    worker: Worker, destination: Destination, message: Message, attempt: int, now_ms: int
) -> bool:
    attempts_max = destination.policy.attempts_max or worker.attempts_max
    return backoff.is_spent(worker, attempt, attempts_max, now_ms - message.created_ms)


def _delay_ms(worker: Worker, leased: Leased, result: Result, random: float) -> int:
    delay_ms = backoff.delay_ms(worker, leased.attempt, lambda: random)
    if isinstance(result, Later) and result.retry_after_s is not None:
        asked_ms = int(result.retry_after_s * 1000)
        return min(max(delay_ms, asked_ms), worker.backoff_max_s * 1000)
    return delay_ms
