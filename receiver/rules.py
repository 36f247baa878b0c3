"""Applies one rule to one event, inside the event's transaction."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from receiver import api, effects, projection
from receiver.config import (
    Call,
    Effect,
    Grant,
    Link,
    Project,
    Record,
    Reverse,
    Rule,
    Send,
    Settings,
    Sql,
)
from receiver.destinations import Destination, render
from receiver.handlers import Handlers
from receiver.projection import Needed
from receiver.said import Park, Quarantine
from receiver.select import Condition, Path, Scope, Unjudgeable, key_text
from receiver.verify import Event
from store import fetches, founder, ledger, links, operations, outbox, resources
from store.database import Snapshot, Tx
from store.operations import Key
from store.outbox import Message
from store.resources import Name, Resource


class Case(msgspec.Struct, frozen=True):
    """One event before its rules: where it is stored, and whose the operator says it is."""

    event: Event
    row: int
    workspace: str | None
    handlers: Handlers
    destinations: Mapping[str, Destination]
    prepared: Mapping[str, object]
    settings: Settings
    #: Nothing of this event was ever done before.
    first: bool = False
    #: The operations that were begun, and their keys, for whoever tells of the event.
    begun: list[str] = msgspec.field(default_factory=list)
    keys: list[Key] = msgspec.field(default_factory=list)
    #: The resources that this event has asked to be fetched, so far.
    hinted: set[Name] = msgspec.field(default_factory=set)

    @property
    def sender(self) -> api.SenderApi | None:
        """How to read from the event's sender, if a key is configured."""
        reach_by = self.settings.sources[self.event.source].api
        return None if reach_by is None else reach_by.sender


class Unfetched(Park):
    """The state of a resource is needed, and not known, or not since the event came.

    `fetch_by` is the source whose API is to be asked; None: another event brings it.
    """

    def __init__(self, reason: str, name: Name, fetch_by: str | None) -> None:
        super().__init__(reason)
        self.name = name
        self.fetch_by = fetch_by


def scope_of(event: Event) -> Scope:
    """What the paths of a config are looked up in."""
    about = {
        "source": event.source,
        "account": event.account,
        "id": event.event_id,
        "type": event.type,
        "received_ms": event.received_ms,
    }
    return Scope(event.document, {"_event": about})


def apply(tx: Tx, rule: Rule, case: Case, scope: Scope) -> str | None:
    """Make the rule's change, once; in words what is not met, if `when` is not.

    Raises Park, Quarantine or Unjudgeable, or whatever a handler raises: then the caller
    undoes everything that the event has done.
    """
    unmet = _unmet(tx, rule, case, scope)
    if unmet is not None:
        return unmet
    if rule.expect is not None:
        unmet = rule.expect.unmet(scope)
        if unmet is not None:
            raise Quarantine(unmet)
    if isinstance(rule.effect, Link):
        _link(tx, rule.effect, case, scope)
        return None
    event = case.event
    key = Key(event.identity, event.account, subject_of(rule, event, scope), rule.operation)
    case.keys.append(key)
    if not case.first and not isinstance(rule.effect, Project) and _did(tx, case, key):
        return None
    workspace = _workspace(tx, rule, case, scope)
    scope.own["_workspace"] = workspace
    prepared = case.prepared.get(rule.operation)
    if _make(tx, rule.effect, case, scope, key, workspace, prepared) and rule.send:
        scope.own["_grant"] = _granted(tx, key)
        for send in rule.send:
            _owe(tx, case, scope, key, send.to, send.name, workspace)
    return None


def _did(tx: Tx, case: Case, key: Key) -> bool:
    """Whether this very event has done it: whatever was linked anew since, it stays done."""
    held = operations.holder(tx, key)
    return held is not None and held[0] == case.row


def _unmet(tx: Tx, rule: Rule, case: Case, scope: Scope) -> str | None:
    """What of `when` does not hold; the resource is only asked for where the rest does."""
    scope.own.pop("_resource", None)
    if rule.resource is not None:
        early = None if rule.when is None else _without_resource(rule.when).unmet(scope)
        if early is not None:
            return early
        scope.own["_resource"] = _resource(tx, rule.resource, case, scope)
    return None if rule.when is None else rule.when.unmet(scope)


def _without_resource(when: Condition) -> Condition:
    return Condition(tuple(one for one in when.comparisons if not one.path.uses_own("_resource")))


def _resource(tx: Tx, needed: Needed, case: Case, scope: Scope) -> dict[str, object] | None:
    """What a rule knows as `_resource`; None if the event names none. Raises Unfetched."""
    if needed.id.value(scope) is None:
        return None
    event = case.event
    name = Name(event.identity, event.account, needed.kind, projection.id_of(needed.id, scope))
    what = case.settings.projection(event.identity, needed.kind)
    path = what.path_by(case.sender)
    known = resources.find(tx, name)
    asked = what.by(case.sender) == "fetch" or name in case.hinted
    if known is None or (asked and not _is_fetched(known, case)):
        reason = f"the state of {needed.kind} {name.resource_id} is not known since it came"
        raise Unfetched(reason, name, None if path is None else event.source)
    return known_as(known)


def known_as(known: Resource) -> dict[str, object]:
    """A resource as rules and texts see it."""
    return {
        "kind": known.kind,
        "id": known.resource_id,
        "state": known.state,
        "fields": msgspec.json.decode(known.fields),
        "version": known.version,
        "terminal": known.terminal,
        "deleted": known.deleted,
        "contested": known.contested,
    }


def _is_fetched(known: Resource, case: Case) -> bool:
    """Whether it was read from the sender after the event had come."""
    return known.fetched_through is not None and known.fetched_through >= case.row


def prepare(rules: Sequence[Rule], event: Event, handlers: Handlers) -> dict[str, object]:
    """What the prepare functions of rules give for an event, by operation."""
    scope = scope_of(event)
    return {
        rule.operation: handlers.prepare(rule.prepare, event)
        for rule in rules
        if rule.prepare is not None and (rule.when is None or rule.when.holds(scope))
    }


def why_none_applied(matching: Sequence[Rule], event_type: str, scope: Scope) -> str:
    """Why an event was ignored, where `matching` are the rules for its type."""
    if not matching:
        return f"no rule for {event_type}"
    unmet = ((rule.operation, rule.when and _words(rule.when, scope)) for rule in matching)
    return none_applied([f"{name}: {words}" for name, words in unmet if words])


def _words(when: Condition, scope: Scope) -> str | None:
    try:
        return when.unmet(scope)
    except Unjudgeable as error:
        # It is about a resource, which is not known here.
        return str(error)


def none_applied(unmet: Sequence[str]) -> str:
    """The same, in the words that each rule gave."""
    return f"no rule applied: {'; '.join(unmet)}"


def subject_of(rule: Rule, event: Event, scope: Scope) -> str:
    """What the rule's operation may happen once for; raises Unjudgeable."""
    if rule.subject is not None:
        return key_text(rule.subject.value(scope), rule.subject.text)
    if event.id_signed:
        return event.event_id
    # An unsigned id could be changed by whoever replays a body; the body itself could not.
    return f"sha256:{event.body_sha256.hex()}"


def keys_of(rules: Sequence[Rule], event: Event) -> Iterator[Key]:
    """The business keys that an event asks for by these rules, as far as they can be judged."""
    scope = scope_of(event)
    for rule in rules:
        try:
            if isinstance(rule.effect, Link) or not (rule.when is None or rule.when.holds(scope)):
                continue
            subject = subject_of(rule, event, scope)
        except Unjudgeable:
            continue
        yield Key(event.identity, event.account, subject, rule.operation)


def _workspace(tx: Tx, rule: Rule, case: Case, scope: Scope) -> str | None:
    if rule.customer is None:
        return None
    customer = _customer(rule.customer, scope)
    if case.workspace is not None:
        return case.workspace
    if customer is None:
        raise Park(f"{rule.customer.text} is null: no customer to look up")
    return effects.workspace_of(tx, case.event.identity, case.event.account, customer)


def _customer(path: Path, scope: Scope) -> str | None:
    value = path.value(scope)
    return None if value is None else key_text(value, path.text)


def _link(tx: Tx, effect: Link, case: Case, scope: Scope) -> None:
    source, account = case.event.identity, case.event.account
    customer = _customer(effect.customer, scope)
    if customer is None:
        raise Park(f"{effect.customer.text} is null: no customer to link")
    found = _customer(effect.workspace, scope) or case.workspace
    if found is not None:
        effects.link(tx, source, account, customer, found)
    elif links.workspace(tx, source, account, customer) is None:
        raise Park(
            f"{effect.workspace.text} is null: no workspace to link customer {customer} to",
            customer=customer,
        )


def _make(
    tx: Tx,
    effect: Effect | None,
    case: Case,
    scope: Scope,
    key: Key,
    workspace: str | None,
    prepared: object,
) -> bool:
    """Make the change; False if it was made before."""
    if effect is None:
        return effects.begin(tx, key, "send", workspace, case.row)
    if isinstance(effect, Grant):
        assert workspace is not None, "the config demands a customer for a grant"
        amount = _entitlement(effect, scope)
        return effects.grant(tx, key, workspace, effect.unit, amount, case.row)
    if isinstance(effect, Reverse):
        return _reverse(tx, effect, case, scope, key)
    if isinstance(effect, Record):
        data = msgspec.json.encode(effect.data.render(scope)).decode()
        return effects.record(tx, key, effect.kind, workspace, data, case.row)
    if isinstance(effect, Sql):
        return effects.begin(tx, key, "sql", workspace, case.row) and _execute(tx, effect, scope)
    if isinstance(effect, Project):
        _project(tx, effect, case, scope)
        return effects.begin(tx, key, "project", workspace, case.row)
    assert isinstance(effect, Call), "links are made before the claim, and nothing else is left"
    return effects.begin(tx, key, "call", workspace, case.row) and _call(
        tx, effect, case, scope, key, workspace, prepared
    )


def _project(tx: Tx, effect: Project, case: Case, scope: Scope) -> None:
    """Take what the event says of its resource, or have that fetched."""
    event = case.event
    name = Name(event.identity, event.account, effect.kind, projection.id_of(effect.id, scope))
    by = effect.by(case.sender)
    seen = None if by == "fetch" else projection.seen_in_event(effect, scope)
    if seen is not None:
        effects.project(tx, name, seen, effect, by, event=case.row)
        return
    if effect.path_by(case.sender) is None:
        where = "the event" if effect.object is None else effect.object.text
        raise Quarantine(
            f"{where} has no {effect.kind}, and it can't be fetched: "
            f"set api in [sources.{event.source}], then replay"
        )
    case.hinted.add(name)
    known = resources.find(tx, name)
    # A replay: it was asked for already, and answered.
    if known is None or not _is_fetched(known, case):
        fetches.want(tx, name, event.source, case.row)


def _execute(tx: Tx, effect: Sql, scope: Scope) -> bool:
    until = founder.deadline()
    for statement in effect.statements:
        founder.execute(tx, statement.sql, statement.bind(scope), until)
    return True


def _call(
    tx: Tx,
    effect: Call,
    case: Case,
    scope: Scope,
    key: Key,
    workspace: str | None,
    prepared: object,
) -> bool:
    def owe(to: str, name: str, said: object) -> bool:
        if to not in case.destinations:
            raise ValueError(f"no destination {to} in the config")
        scope.own["_grant"] = _granted(tx, key)
        return _owe(tx, case, scope, key, to, name, workspace, said)

    case.handlers.call(
        effect.function, tx, case.event, key, workspace, case.row, prepared=prepared, owe=owe
    )
    return True


def _granted(snapshot: Snapshot, key: Key) -> dict[str, object] | None:
    entry = ledger.find(snapshot, key)
    if entry is None:
        return None
    return {"unit": entry.unit, "amount": entry.amount, "workspace": entry.workspace}


def _owe(
    tx: Tx,
    case: Case,
    scope: Scope,
    key: Key,
    to: str,
    name: str,
    workspace: str | None,
    said: object = None,
) -> bool:
    """Owe a message, rendered now; what does not render is dead from the start."""
    text, error = outbox.UNWRITTEN, None
    try:
        text = _written(case.destinations[to], scope, key, name, workspace, said)
    except Unjudgeable as unjudgeable:
        error = f"does not render: {unjudgeable}"
    return outbox.insert(tx, key, to, name, body=text, event=case.row, error=error)


def write_again(snapshot: Snapshot, settings: Settings, event: Event, message: Message) -> str:
    """The body of a message that did not render when it was owed, by the config as it is now.

    Raises Unjudgeable if it still does not, also where a handler owed it: what that said in it
    is not known any more.
    """
    destination = settings.destinations.get(message.destination)
    if destination is None:
        raise Unjudgeable(f"destinations.{message.destination}", "is not in the config now")
    key, send = message.key, Send(message.destination, message.name)
    if not any(rule.operation == key.operation and send in rule.send for rule in settings.rules):
        raise Unjudgeable("send", f"no rule of {key.operation} sends it, so its data is not known")
    claim = operations.find(snapshot, key)
    workspace = None if claim is None else claim.workspace
    scope = scope_of(event)
    scope.own |= {"_workspace": workspace, "_grant": _granted(snapshot, key)}
    return _written(destination, scope, key, message.name, workspace)


def _written(
    destination: Destination,
    scope: Scope,
    key: Key,
    name: str,
    workspace: str | None,
    said: object = None,
) -> str:
    about: dict[str, object] = {
        "operation_key": outbox.operation_key(key, destination.name, name),
        "operation": key.operation,
        "subject": key.subject,
        "source": key.source,
        "account": key.account,
        "workspace": workspace,
        "destination": destination.name,
        "name": name,
    }
    scope.own["_message"] = about | {"data": said}
    return msgspec.json.encode(render(destination, scope, about)).decode()


def _entitlement(effect: Grant, scope: Scope) -> int:
    if effect.amount is not None:
        return effect.amount
    assert effect.by is not None, "a grant has an amount or a table of amounts"
    found = effect.by.value(scope)
    amount = effect.amounts.get(found) if isinstance(found, str) else None
    if amount is None:
        shown = f"{found!r:.60} is in no entitlement table" if found is not None else "is null"
        raise Quarantine(f"{effect.by.text} {shown}: add it to grant.amounts, then replay")
    return amount


def _reverse(tx: Tx, effect: Reverse, case: Case, scope: Scope, key: Key) -> bool:
    subject = key_text(effect.subject.value(scope), effect.subject.text)
    target = Key(key.source, key.account, subject, effect.operation)
    amount = None
    if effect.amount is not None:
        found = effect.amount.value(scope)
        if isinstance(found, bool) or not isinstance(found, int):
            raise Quarantine(f"{effect.amount.text}: expected a whole number to reverse")
        amount = found
    return effects.reverse(tx, key, target, amount, case.row)


def call_problems(rules: Sequence[Rule], handlers: Handlers) -> list[str]:
    """Why a rule can't call its functions, for each that it can't."""
    wanted = [
        (f"rules[{number}].{what}", function, parameters)
        for number, rule in enumerate(rules)
        if isinstance(rule.effect, Call)
        for what, function, parameters in (
            ("call", rule.effect.function, ("event", "tx")),
            ("prepare", rule.prepare, ("event",)),
        )
        if function is not None
    ]
    problems = ((where, handlers.problem(name, takes)) for where, name, takes in wanted)
    return [f"{where}: {problem}" for where, problem in problems if problem is not None]
