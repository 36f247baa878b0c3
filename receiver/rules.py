"""Applies one rule to one event, inside the event's transaction."""

from collections.abc import Sequence

import msgspec

from receiver import effects
from receiver.config import Call, Effect, Grant, Link, Record, Reverse, Rule, Sql
from receiver.handlers import Handlers
from receiver.said import Park, Quarantine
from receiver.select import Path, Scope, key_text
from receiver.verify import Event
from store import founder, links
from store.database import Tx
from store.operations import Key


class Case(msgspec.Struct, frozen=True):
    """One event before its rules: where it is stored, and whose the operator says it is."""

    event: Event
    row: int
    workspace: str | None
    handlers: Handlers


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


def apply(tx: Tx, rule: Rule, case: Case, scope: Scope) -> bool:
    """Make the rule's change, once; False if its `when` is not met.

    Raises Park, Quarantine or Unjudgeable, or whatever a handler raises: then the caller
    undoes everything that the event has done.
    """
    if rule.when is not None and not rule.when.holds(scope):
        return False
    if rule.expect is not None:
        unmet = rule.expect.unmet(scope)
        if unmet is not None:
            raise Quarantine(unmet)
    if isinstance(rule.effect, Link):
        _link(tx, rule.effect, case, scope)
        return True
    event = case.event
    key = Key(event.identity, event.account, subject_of(rule, event, scope), rule.operation)
    workspace = _workspace(tx, rule, case, scope)
    scope.own["_workspace"] = workspace
    assert rule.effect is not None, "the config demands an effect"
    _make(tx, rule.effect, case, scope, key, workspace)
    return True


def why_none_applied(matching: Sequence[Rule], event_type: str, scope: Scope) -> str:
    """Why an event was ignored, where `matching` are the rules for its type."""
    if not matching:
        return f"no rule for {event_type}"
    unmet = ((rule.operation, rule.when and rule.when.unmet(scope)) for rule in matching)
    return f"no rule applied: {'; '.join(f'{name}: {words}' for name, words in unmet if words)}"


def subject_of(rule: Rule, event: Event, scope: Scope) -> str:
    """What the rule's operation may happen once for; raises Unjudgeable."""
    if rule.subject is not None:
        return key_text(rule.subject.value(scope), rule.subject.text)
    if event.id_signed:
        return event.event_id
    # An unsigned id could be changed by whoever replays a body; the body itself could not.
    return f"sha256:{event.body_sha256.hex()}"


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
    tx: Tx, effect: Effect, case: Case, scope: Scope, key: Key, workspace: str | None
) -> None:
    if isinstance(effect, Grant):
        assert workspace is not None, "the config demands a customer for a grant"
        amount = _entitlement(effect, scope)
        effects.grant(tx, key, workspace, effect.unit, amount, case.row)
    elif isinstance(effect, Reverse):
        _reverse(tx, effect, case, scope, key)
    elif isinstance(effect, Record):
        data = msgspec.json.encode(effect.data.render(scope)).decode()
        effects.record(tx, key, effect.kind, workspace, data, case.row)
    elif isinstance(effect, Sql):
        if effects.begin(tx, key, "sql", workspace, case.row):
            _execute(tx, effect, scope)
    elif effects.begin(tx, key, "call", workspace, case.row):
        assert isinstance(effect, Call), "links are made before the claim, and nothing else is left"
        case.handlers.call(effect.function, tx, case.event, key, workspace, case.row)


def _execute(tx: Tx, effect: Sql, scope: Scope) -> None:
    until = founder.deadline()
    for statement in effect.statements:
        founder.execute(tx, statement.sql, statement.bind(scope), until)


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


def _reverse(tx: Tx, effect: Reverse, case: Case, scope: Scope, key: Key) -> None:
    subject = key_text(effect.subject.value(scope), effect.subject.text)
    target = Key(key.source, key.account, subject, effect.operation)
    amount = None
    if effect.amount is not None:
        found = effect.amount.value(scope)
        if isinstance(found, bool) or not isinstance(found, int):
            raise Quarantine(f"{effect.amount.text}: expected a whole number to reverse")
        amount = found
    effects.reverse(tx, key, target, amount, case.row)


def call_problems(rules: Sequence[Rule], handlers: Handlers) -> list[str]:
    """Why a rule can't call its function, for each that can't."""
    return [
        f"rules[{number}].call: {problem}"
        for number, rule in enumerate(rules)
        if isinstance(rule.effect, Call)
        and (problem := handlers.problem(rule.effect.function)) is not None
    ]
