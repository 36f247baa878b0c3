"""The program on a real file, as the machine drives it, and the file in the model's shape."""

import asyncio
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from receiver.config import load
from receiver.destinations import Destination, Owed, Result, Sent
from receiver.process import Outcome, Processor
from receiver.projection import content_of
from receiver.verify import canonical
from store.database import Job, Snapshot, Store
from store.resources import Seen
from store.writer import Writer
from tests.conftest import SECRETS, Clock, stripe_body
from tests.proof import model
from tests.proof.model import Content, EventKey, Key, Model, Rules
from tests.proof.power import scratch

CONFIG = """
database = "receiver.db"

[worker]
run = "{run}"
attempts_max = 3
backoff_first_s = 60
backoff_max_s = 600

[sources.stripe]
scheme = "stripe"
secrets = ["env:STRIPE"]
livemode = false
volatile = [{volatile}]
retention = {{ payload_days = 30, ignored = {keep_ignored} }}
{queue}
[[rules]]
operation = "link"
source = [{both}]
on = ["link"]
link = {{ customer = "data.object.customer", workspace = "data.object.text" }}

[[rules]]
operation = "grant"
source = [{both}]
on = ["pay"]
subject = "data.object.id"
customer = "data.object.customer"
grant = {{ unit = "credits", amount = {amount} }}
send = [{{ to = "receipt" }}, {{ to = "team" }}]

[[rules]]
operation = "count"
source = [{both}]
on = ["pay"]
subject = "data.object.id"
customer = "data.object.customer"
sql = ["update app_counts set count = count + 1 where workspace = {{_workspace}}"]

[[rules]]
operation = "refund"
source = [{both}]
on = ["refund"]
subject = "data.object.id"
reverse = {{ operation = "grant", subject = "data.object.text", amount = "data.object.number" }}

[[rules]]
operation = "void"
source = "stripe"
on = ["void"]
subject = "data.object.id"
reverse = {{ operation = "grant", subject = "data.object.id" }}

[[rules]]
operation = "state"
source = [{both}]
on = ["state"]
project.kind = "thing"
project.id = "data.object.id"
project.object = "data.object"
project.state = "text"
project.version = "number"

[[rules]]
operation = "seen"
source = [{both}]
on = ["seen"]
subject = "data.object.id"
resource = {{ kind = "thing", id = "data.object.id" }}
when = {{ "_resource.state" = "open" }}
record = {{ kind = "seen", data = "{{data.object.number}}" }}

[[rules]]
operation = "note"
source = [{both}]
on = ["note"]
subject = "data.object.id"
record = {{ kind = "note", data = "{{data.object.number}}" }}
{other}
[destinations.receipt]
kind = "http"
url = "http://127.0.0.1:1/"
json = {{ id = "{{data.object.id}}" }}
ambiguous = "{ambiguous}"

[destinations.team]
kind = "http"
url = "http://127.0.0.1:1/"
json = {{ id = "{{data.object.id}}" }}
"""

QUEUE = """
[sources.queue]
scheme = "stripe"
identity = "stripe"
secrets = ["env:STRIPE"]
livemode = false
volatile = [{volatile}]
mode = "{mode}"
retention = {{ payload_days = 30, ignored = {keep_ignored} }}
"""

OTHER = """
[[rules]]
operation = "other"
source = "stripe"
on = ["other"]
subject = "data.object.id"
record = { kind = "other", data = "{data.object.number}" }
"""

TABLES = """
create table app_counts (workspace text primary key, count integer not null) strict;
insert into app_counts values ('w-1', 0), ('w-2', 0);
create table app_faults (kind text not null) strict;
create trigger app_fails before update on app_counts
  when exists (select 1 from app_faults where kind = 'abort')
  begin select raise(abort, 'broken'); end;
create trigger app_ends_all before update on app_counts
  when exists (select 1 from app_faults where kind = 'rollback')
  begin select raise(rollback, 'broken for all'); end;
"""


@functools.cache
def processor_of(rules: Rules) -> Processor:
    values = {
        "run": "separate" if rules.works else "off",
        "volatile": '"extra"' if rules.mask_extra else "",
        "keep_ignored": str(rules.keep_ignored).lower(),
        "amount": rules.amount,
        "ambiguous": "retry" if rules.repeat else "review",
        "both": '"stripe", "queue"' if rules.there else '"stripe"',
        "mode": "queued" if rules.queued else "sync",
    }
    queue = QUEUE.format(**values) if rules.there else ""
    text = CONFIG.format(**values, queue=queue, other=OTHER if rules.wanted else "")
    with scratch() as folder:
        path = folder / "receiver.toml"
        path.write_text(text)
        loaded = Processor.load(load(path, environment=SECRETS))
    return Processor(loaded.settings, loaded.handlers, random=lambda: 0.5)


class FarSide:
    """The other side, which answers what it is told to."""

    def __init__(self) -> None:
        self.result: Result = Sent("")

    def send(self, destination: Destination, owed: Owed, now_ms: int) -> Result:
        return self.result

    def close(self) -> None:
        pass


class Server:
    """One running server, as far as it writes."""

    def __init__(self, path: Path, clock: Clock, processor: Callable[[], Processor]) -> None:
        self.store = Store.open(path, clock)
        self.loop = asyncio.new_event_loop()
        self.fatal: list[str] = []
        self.processor = processor
        self.loop.run_until_complete(self._begin())

    async def _begin(self) -> None:
        self.writer = Writer(
            self.store,
            pending_max=64,
            due=lambda seen, now_ms: self.processor().due_jobs(seen, now_ms),
            on_fatal=self.fatal.append,
        )
        await self._until_idle()

    def deliver(self, jobs: Sequence[Job[Outcome]]) -> list[Outcome]:
        """What arrives at one moment; and what it released is applied."""

        async def run() -> list[Outcome]:
            answers = await asyncio.gather(*(self.writer.submit(one.run, one.keep) for one in jobs))
            await self._until_idle()
            return answers

        return self.loop.run_until_complete(run())

    def look(self) -> None:
        """As every second."""

        async def run() -> None:
            self.writer._look_for_due()
            await self._until_idle()

        self.loop.run_until_complete(run())

    async def _until_idle(self) -> None:
        # The writer tells nobody when it has nothing more to do, and hears of what was due itself
        # a turn after it was written.
        while self.writer.waiting or self.writer._due_waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)

    def stop(self) -> None:
        self.loop.run_until_complete(self.writer.close())
        self.kill()

    def kill(self) -> None:
        self.writer._stop("killed")
        self.loop.close()
        self.store.close()
        assert self.fatal == []


# The two, in one shape


def differences(file: dict[str, Any], model: dict[str, Any]) -> str:
    """What the file has otherwise than the model, in words."""
    found = []
    for name in file:
        if file[name] != model[name] and isinstance(file[name], dict):
            keys = file[name].keys() | model[name].keys()
            each = ((key, file[name].get(key), model[name].get(key)) for key in keys)
            found += [f"{name} {key}: {one}, not {two}" for key, one, two in each if one != two]
        elif file[name] != model[name]:
            found.append(f"{name}: {file[name]}, not {model[name]}")
    return "; ".join(found)


def of_model(model: Model) -> dict[str, object]:
    books = model.books
    conflicts = books.conflicts.items()
    return {
        "events": {
            key: (
                *(one.source, one.state, one.waits_for, one.duplicates, one.attempts),
                *(one.due, one.by_worker, one.lease, one.workspace, one.body),
            )
            for key, one in model.events.items()
        },
        "claims": books.claims,
        "ledger": books.ledger,
        "balances": model.balances(),
        "records": books.records,
        "links": books.links,
        "owed": {
            key: (one.state, one.attempts, one.due, one.lease) for key, one in books.owed.items()
        },
        "states": books.states,
        "counted": books.counted,
        "conflicts": {(key, digest_of(key, what)): how for (key, what), how in conflicts},
        "contested": {
            what[0] for (_, what), how in conflicts if what[0] in books.states and not how[1]
        },
        "acts": model.acts,
    }


def of_file(seen: Snapshot) -> dict[str, object]:
    def rows(statement: str) -> list[tuple[Any, ...]]:
        return list(seen.db.execute(statement))

    def key(one: tuple[Any, ...]) -> Key:
        return Key(*one[:4])

    def target(subject: str | None, operation: str | None, key: Key) -> Key | None:
        if subject is None or operation is None:
            return None
        return key._replace(subject=subject, operation=operation)

    names = {row: (account, name) for row, account, name in rows(_NAMES)}
    return {
        "events": {
            names[row]: (
                source,
                state,
                fact_of(*fact.split("|")) if fact else None,
                *rest,
                body_of(kept, mask),
            )
            for row, source, state, fact, *rest, kept, mask in rows(_EVENTS)
        },
        "claims": {
            key(one): ((*one[4:7], target(one[7], one[8], key(one))), names.get(one[9]))
            for one in rows(_CLAIMS)
        },
        "ledger": {
            key(one): (*one[4:6], target(one[6], one[7], key(one))) for one in rows(_LEDGER)
        },
        "balances": dict(rows("select workspace, balance from receiver_balances")),
        "records": {key(one): None if one[4] == "{}" else int(one[4]) for one in rows(_RECORDS)},
        "links": {one[:2]: one[2] for one in rows(_LINKS)},
        "owed": {(key(one), one[4]): one[5:] for one in rows(_OWED)},
        "states": {one[:2]: one[2:] for one in rows(_STATES)},
        "counted": dict(rows("select workspace, count from app_counts where count > 0")),
        "conflicts": {(names[one[0]], one[1]): (one[2], bool(one[3])) for one in rows(_CONFLICTS)},
        "contested": set(rows(_CONTESTED)),
        "acts": rows("select count(*) from receiver_audit")[0][0],
    }


_NAMES = "select id, account, event_id from receiver_events"
_EVENTS = """
    select e.id, endpoint, state,
      p.kind || '|' || p.source || '|' || p.account || '|' || p.key || '|' || p.operation,
      duplicates, attempts, next_attempt_ms, by_worker = 1, lease_until_ms, coalesce(workspace, ''),
      b.event is not null, mask
    from receiver_events e
    left join receiver_parked p on p.event = e.id
    left join receiver_payloads b on b.event = e.id
    left join receiver_forgotten f on f.event = e.id
"""
_CLAIMS = """
    select source, account, subject, operation, kind, workspace, amount,
      target_subject, target_operation, event
    from receiver_operations
"""
_LEDGER = """
    select source, account, subject, operation, workspace, amount,
      target_subject, target_operation
    from receiver_ledger
"""
_RECORDS = "select source, account, subject, operation, data from receiver_records"
_LINKS = "select account, customer, workspace from receiver_links"
_OWED = """
    select source, account, subject, operation, destination,
      state, attempts, next_attempt_ms, lease_until_ms
    from receiver_outbox
"""
_STATES = "select account, resource_id, version, state from receiver_resources"
_CONTESTED = "select account, resource_id from receiver_resources where contested"
_CONFLICTS = """
    select event, content_sha256, deliveries, resolved_ms is not null from receiver_conflicts
"""


def fact_of(kind: str, source: str, account: str, key: str, operation: str) -> model.Fact:
    if kind == "entry":
        return (kind, source, account, key, operation)
    return (kind, account, key) if key else (kind, account)


def body_of(kept: int, mask: str | None) -> str:
    """As the model has it: what is left of a body to compare another with."""
    if kept:
        return "there"
    if not json.loads(mask or "[]"):
        return "gone"
    return "masked" if "extra" in json.loads(mask or "[]") else "plain"


@functools.cache
def digest_of(key: EventKey, what: Any) -> bytes:
    """What a conflict is known by in the file."""
    if isinstance(what, Content):
        masked = what.extra is None
        volatile = ("pending_webhooks", *(("extra",) if masked else ()))
        digest = canonical(body_for(key, what, 0), "json", volatile)
        assert digest is not None
        return digest
    _, (version, state) = what
    return hashlib.sha256(content_of(Seen(state, "{}", version, None, False, False))).digest()


def body_for(key: EventKey, content: Content, noise: int) -> bytes:
    """The body of a delivery; `noise` is what may differ between two of one event."""
    account, event_id = key
    envelope = {"pending_webhooks": noise, "extra": content.extra, "account": account or None}
    of: dict[str, Any] = {"id": content.subject, "customer": content.customer or None}
    of |= {"text": content.text or None, "number": content.number}
    return stripe_body(event_id, content.kind, envelope=envelope, **of)
