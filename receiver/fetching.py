"""Leases a fetch and settles it: the state of a resource, read from the sender and applied."""

from typing import NamedTuple

from receiver import backoff, effects, projection
from receiver.client import TIMEOUT_S, Client, Found, Missing, Reply
from receiver.config import Project, Settings, Source, Worker
from receiver.destinations import Later, Never
from receiver.process import Processor
from receiver.select import Unjudgeable
from store import fetches, resources
from store.database import Tx
from store.fetches import Fetch
from store.resources import Name, Seen

#: What a lease lasts beyond the time limit of its request, in seconds.
LEASE_SPARE_S = 30

LEASE_S = TIMEOUT_S + LEASE_SPARE_S

_OUTCOMES = {Found: "found", Missing: "missing", Never: "refused"}


class NotFetchable(Exception):
    """The config does not say how to read this resource; the message says what to do."""


class Plan(NamedTuple):
    """How one resource is read, and what is kept of it."""

    source: Source
    project: Project
    path: str


def plan(settings: Settings, endpoint: str, name: Name) -> Plan:
    """How a source reads a resource. Raises NotFetchable."""
    source = settings.sources.get(endpoint)
    if source is None or source.api is None:
        raise NotFetchable(f"sources.{endpoint} has no api: set it to fetch {name}")
    try:
        project = settings.projection(source.contract.identity, name.kind)
    except KeyError as error:
        raise NotFetchable(f"no rule of {name.source} projects {name.kind} now") from error
    path = project.path_by(source.api.sender)
    if path is None:
        raise NotFetchable(f"where a {name.kind} is in the API is not known: set project.fetch")
    return Plan(source, project, path)


def lease(
    tx: Tx, *, worker: Worker, endpoint: str, owner: str, ahead_ms: int
) -> Fetch | int | None:
    """Take the fetch by a source that is due longest; without one, when the next is due."""
    while True:
        fetch = fetches.due(tx, endpoint, tx.now_ms, ahead_ms)
        if fetch is None:
            return fetches.due_ms(tx, endpoint)
        if fetch.lease_owner is None or fetch.attempts < worker.attempts_max:
            return take(tx, fetch, owner)
        fetches.die(tx, fetch.id, "no attempt is left: the last one never ended")


def take(tx: Tx, fetch: Fetch, owner: str) -> Fetch:
    """The right to read one resource, until somebody takes it again."""
    return fetches.lease(tx, fetch.id, owner, tx.now_ms + int(LEASE_S * 1000))


def read(client: Client, leased: Fetch, path: str, now_ms: int) -> Reply:
    """Ask the sender. Never inside a transaction."""
    return client.resource(path, leased.resource_id, account=leased.account, now_ms=now_ms)


def outcome_of(reply: Reply) -> str:
    """How a fetch ended, for the log."""
    return _OUTCOMES.get(type(reply), "failed")


def settle(tx: Tx, *, processor: Processor, leased: Fetch, reply: Reply) -> bool:
    """Apply what was read; False, with nothing written, if the lease is not ours now.

    So what was asked earlier never takes the place of what was asked later.
    """
    if not fetches.holds(tx, leased):
        return False
    if isinstance(reply, Missing) and not leased.mend:
        reply = _believed(tx, leased, reply)
    if isinstance(reply, Found | Missing):
        return _apply(tx, processor, leased, reply)
    worker = processor.settings.worker
    spent = backoff.is_spent(
        worker, leased.attempts, worker.attempts_max, tx.now_ms - leased.wanted_ms
    )
    if not isinstance(reply, Later) or spent:
        fetches.die(tx, leased.id, reply.why)
        return True
    delay_ms = backoff.delay_ms(worker, leased.attempts, processor.random)
    if reply.retry_after_s is not None:
        asked_ms = int(reply.retry_after_s * 1000)
        delay_ms = min(max(delay_ms, asked_ms), worker.backoff_max_s * 1000)
    fetches.retry(tx, leased.id, reply.why, tx.now_ms + delay_ms)
    return True


def _believed(tx: Tx, leased: Fetch, reply: Missing) -> Missing | Later:
    """Whether it is gone: to a key of another account, nothing that events tell of is there."""
    if resources.ever_fetched(tx, leased.source, leased.account):
        return reply
    return Later(
        f"{reply.why}, and nothing else was read by this key yet: is api.key a key of the account "
        "that sends the events? (if it is gone: `receiver resources fetch --accept`)"
    )


def _apply(tx: Tx, processor: Processor, leased: Fetch, reply: Found | Missing) -> bool:
    try:
        project = plan(processor.settings, leased.endpoint, leased.name).project
        found = seen(tx, leased.name, project, reply)
    except (NotFetchable, Unjudgeable) as error:
        fetches.die(tx, leased.id, str(error))
        return True
    effects.project(
        tx,
        leased.name,
        found,
        project,
        "version" if project.version is not None and not found.deleted else "fetch",
        event=leased.event,
        fetched_through=leased.through,
        mend=leased.mend,
    )
    fetches.finish(tx, leased)
    return True


def seen(tx: Tx, name: Name, project: Project, reply: Found | Missing) -> Seen:
    """What an answer says of a resource. Raises Unjudgeable."""
    if isinstance(reply, Found):
        return projection.seen_in(project, reply.document)
    # What it was last stays readable; that it is gone is the state.
    known = resources.find(tx, name)
    fields = "{}" if known is None else known.fields
    version = None if known is None else known.version
    return Seen(projection.DELETED, fields, version, terminal=True, deleted=True)
