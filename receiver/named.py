"""Finds what an operator means by the names on a command line."""

import re
import shlex
from collections.abc import Sequence

from receiver import process, rules
from receiver.config import Call, Grant, Settings
from receiver.select import nearest_or_all
from receiver.shown import handle
from store import deliveries, inbox, ledger, links, operations, outbox, rejections, resources
from store.database import Snapshot
from store.inbox import Row
from store.operations import Key
from store.outbox import Message
from store.rejections import Kept
from store.resources import Name

#: Names that are listed when more than one thing is meant.
NAMES_MAX = 10
#: Unfinished events that are asked what they are about, the newest.
ASKING_MAX = 1_000

#: A subject that stands in a body as it is, whatever the body's format.
_PLAIN = re.compile(r"[0-9A-Za-z_.-]+", re.ASCII)


class Absent(Exception):
    """What is named is not there."""


class Ambiguous(Exception):
    """More than one thing has that name, or not enough is said; `names` can be used instead."""

    def __init__(self, words: str, names: Sequence[str] = ()) -> None:
        super().__init__(words)
        self.names = names


def event(snapshot: Snapshot, name: str) -> Row:
    """The one event of that name. Raises Absent or Ambiguous."""
    found = inbox.named(snapshot, name, NAMES_MAX)
    if not found:
        raise Absent(f"there is no event {name}: `receiver events list` shows what there is")
    if len(found) > 1:
        names = [_described(snapshot, row) for row in found]
        raise Ambiguous(f"{name} is more than one event: use one of these names", names)
    return found[0]


def event_about(snapshot: Snapshot, settings: Settings, name: str) -> Row:
    """As `event`, but the name may also be a request's id, a business subject or a workspace.

    Raises Absent, or Ambiguous where there are several, the newest of which are named.
    """
    if inbox.named(snapshot, name, 1):
        return event(snapshot, name)
    found = deliveries.events_of_request(snapshot, name, NAMES_MAX)
    what = f"request {name} brought more than one event"
    if not found:
        found = of_subject(snapshot, settings, name)
        what = f"{name} is the subject of more than one event"
    if not found:
        found = inbox.of_workspace(snapshot, name)
        listing = f"receiver events list --workspace {shlex.quote(name)}"
        what = f"workspace {name} has more than one event: `{listing}`"
    rows = list(inbox.rows(snapshot, found[-NAMES_MAX:]))
    if len(rows) > 1:
        names = [_described(snapshot, row) for row in rows]
        raise Ambiguous(f"{what}; show one of these", names)
    if not rows:
        _check_refused(snapshot, name)
    return rows[0] if rows else event(snapshot, name)


def _check_refused(snapshot: Snapshot, name: str) -> None:
    """Raises Absent where the request of that id brought nothing, as it was refused."""
    kept = rejections.by_request(snapshot, name)
    if kept is not None:
        raise Absent(
            f"there is no event {name}, but that is a request which was refused "
            f"({kept.request.reason}): `receiver rejections explain {kept.number}` says why"
        )


def about(
    snapshot: Snapshot, settings: Settings, subject: str | None, workspace: str | None
) -> list[int]:
    """Row numbers of the events about a subject, a workspace or both, oldest first."""
    found = None if subject is None else of_subject(snapshot, settings, subject)
    if workspace is None:
        return found or []
    theirs = inbox.of_workspace(snapshot, workspace)
    return theirs if found is None else sorted(set(theirs) & set(found))


def of_subject(snapshot: Snapshot, settings: Settings, subject: str) -> list[int]:
    """Row numbers of the events that did something for a subject, or ask for it, oldest first.

    Of those that ask, the newest that are unfinished are known, by the rules as they are now.
    """
    found = set(operations.events_of_subject(snapshot, subject))
    for row in inbox.unfinished(snapshot, ASKING_MAX):
        if row.id not in found and _asks_for(snapshot, settings, row, subject):
            found.add(row.id)
    return sorted(found)


def _asks_for(snapshot: Snapshot, settings: Settings, row: Row, subject: str) -> bool:
    # Reading a body takes a hundred times as long as finding out that a word is not in it.
    body = inbox.payload(snapshot, row.id) or b""
    if _PLAIN.fullmatch(subject) and subject.encode() not in body:
        return False
    try:
        asking = process.stored_event(snapshot, settings, row)
    except process.NotReplayable:
        return False
    if asking.defect is not None:
        return False
    matching = settings.rules_for(asking.source, asking.type)
    return any(key.subject == subject for key in rules.keys_of(matching, asking))


def _described(snapshot: Snapshot, row: Row) -> str:
    return f"{handle(snapshot, row)} (row {row.id}, {row.type}, {row.state})"


def message(snapshot: Snapshot, name: str) -> Message:
    """The message with that number or operation key. Raises Absent."""
    found = outbox.by_operation_key(snapshot, name)
    if found is None and name.isascii() and name.isdecimal() and len(name) < 19:
        found = outbox.by_id(snapshot, int(name))
    if found is None:
        raise Absent(f"there is no message {name}: `receiver outbox list` shows what there is")
    return found


def rejection(snapshot: Snapshot, name: str) -> Kept:
    """The kept rejection with that request id or number. Raises Absent."""
    found = rejections.by_request(snapshot, name)
    if found is None and name.isascii() and name.isdecimal() and len(name) < 19:
        found = rejections.by_number(snapshot, int(name))
    if found is None:
        raise Absent(
            f"there is no rejection {name}: only the newest are kept, and "
            "`receiver rejections list` shows them"
        )
    return found


def resource(snapshot: Snapshot, name: str) -> Name:
    """The resource of that id, or kind/id, or source/account/kind/id; known, or to be fetched.

    Raises Absent or Ambiguous.
    """
    found = resources.named(snapshot, name, NAMES_MAX)
    if not found:
        raise Absent(f"there is no resource {name}: `receiver resources list` shows what there is")
    if len(found) > 1:
        names = ["/".join(one) for one in found]
        raise Ambiguous(f"{name} is more than one resource: use one of these names", names)
    return found[0]


def identity(settings: Settings, source: str) -> str:
    """The identity of a source; any other name stands for itself."""
    known = settings.sources.get(source)
    return source if known is None else known.contract.identity


def sender(settings: Settings, source: str, account: str | None) -> tuple[str, str]:
    """(identity, account) of a source or an identity; without an account, the pinned one.

    Raises Absent if the config has no such source, and Ambiguous if it pins several accounts.
    """
    contracts = [
        one.contract
        for name, one in settings.sources.items()
        if source == name or (source not in settings.sources and source == one.contract.identity)
    ]
    if not contracts:
        hint = nearest_or_all(source, dict.fromkeys((*settings.sources, *settings.identities)))
        raise Absent(f"there is no source {source} in {settings.path}{hint}")
    if account is not None:
        return contracts[0].identity, account
    pinned = sorted({contract.account or "" for contract in contracts})
    if len(pinned) > 1:
        accounts = ", ".join(repr(one) for one in pinned)
        raise Ambiguous(f"{source} has several accounts: say which with --account ({accounts})")
    return contracts[0].identity, pinned[0]


def past_sender(settings: Settings, source: str, account: str | None) -> tuple[str, str]:
    """As `sender`, but a source that the config lost stands for itself. Raises Ambiguous."""
    try:
        return sender(settings, source, account)
    except Absent:
        return source, account or ""


def grant_rule(settings: Settings, source: str, operation: str) -> Grant | None:
    """The grant that webhooks of this identity make by that operation; None: handlers.py does.

    Raises Absent: an operation that no webhook brings would not keep one from granting again.
    """
    granting = {
        rule.operation: rule.effect
        for rule in settings.rules
        if isinstance(rule.effect, Grant | Call)
        and any(identity(settings, name) == source for name in rule.sources)
    }
    if operation not in granting:
        hint = nearest_or_all(operation, granting)
        raise Absent(
            f"no rule of {source} grants {operation}{hint}: "
            "what no webhook brings is a `receiver ledger adjust`"
        )
    effect = granting[operation]
    return effect if isinstance(effect, Grant) else None


def check_unit(snapshot: Snapshot, settings: Settings, unit: str) -> None:
    """Raises Absent for a unit that no rule grants and no balance is in."""
    granted = [rule.effect.unit for rule in settings.rules if isinstance(rule.effect, Grant)]
    known = dict.fromkeys((*granted, *ledger.units(snapshot)))
    if unit not in known:
        hint = nearest_or_all(unit, known)
        raise Absent(f"no rule and no balance has the unit {unit}{hint}: --yes takes it as new")


def has_anything(snapshot: Snapshot, workspace: str) -> bool:
    """Whether a workspace has a link, an amount, or an event that did something for it."""
    return bool(
        links.listed(snapshot, workspace=workspace, limit=1)
        or ledger.totals(snapshot, workspace=workspace, limit=1)
        or inbox.of_workspace(snapshot, workspace)
    )


def entry(snapshot: Snapshot, settings: Settings, name: str) -> Key:
    """The ledger entry `source/account/subject/operation`, or without the account.

    A subject may have slashes of its own. Raises Absent or Ambiguous.
    """
    first, *middle, last = name.split("/") if name.count("/") > 1 else ("", "", "")
    source = identity(settings, first)
    keys = [Key(source, "", "/".join(middle), last)]
    if len(middle) > 1:
        keys.append(Key(source, middle[0], "/".join(middle[1:]), last))
    found = [key for key in dict.fromkeys(keys) if ledger.find(snapshot, key) is not None]
    if not found:
        raise Absent(
            f"there is no ledger entry {name}: write source/account/subject/operation, "
            "as `receiver ledger list` shows them"
        )
    if len(found) > 1:
        raise Ambiguous(
            f"{name} is more than one entry: use --source, --account, --subject and --operation",
            [f"account {key.account!r}, subject {key.subject!r}" for key in found],
        )
    return found[0]
