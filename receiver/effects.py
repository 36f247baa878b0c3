"""The business changes themselves: claim the key, and only if that is new, make the change."""

import hashlib

from receiver import projection
from receiver.projection import By, Project
from receiver.said import Park, Quarantine
from receiver.select import Unjudgeable, key_text
from store import conflicts, ledger, links, operations, records, resources
from store.database import Snapshot, Tx
from store.operations import Claim, Key
from store.resources import Name, Seen
from store.schema import AMOUNT_MAX


def grant(tx: Tx, key: Key, workspace: str, unit: str, amount: int, event: int | None) -> bool:
    """Grant once; False if that was done before. Raises Quarantine if it was done otherwise."""
    if not 0 < amount <= AMOUNT_MAX:
        raise Quarantine(f"a grant of {amount} {unit}: expected 1 to {AMOUNT_MAX}")
    what = Claim("grant", workspace, unit, amount)
    if not _claim(tx, key, what, event):
        return False
    ledger.enter(tx, key, workspace, unit, amount)
    return True


def reverse(tx: Tx, key: Key, target: Key, amount: int | None, event: int | None) -> bool:
    """Take back an entry's amount, by default all that is left; False if that was done before.

    Raises Park while the entry is not there, and Quarantine where nothing, or less than
    asked, is left, or the key was used for another target.
    """
    entry = ledger.find(tx, target)
    known = operations.find(tx, key)
    if known is not None:
        _check_reversal(key, known, target, entry)
        return False
    if entry is None:
        raise Park(
            f"{target} is not in the ledger yet",
            subject=target.subject,
            operation=target.operation,
        )
    left = ledger.left(tx, entry)
    taken = left if amount is None else amount
    if left <= 0 or not 0 < taken <= left:
        raise Quarantine(f"{target}: {left} {entry.unit} left to reverse, asked for {taken}")
    what = Claim("reverse", entry.workspace, entry.unit, -taken, target.subject, target.operation)
    claimed = operations.claim(tx, key, what, event)
    assert claimed, "the key was free a moment ago, in this transaction"
    ledger.enter(tx, key, entry.workspace, entry.unit, -taken, target)
    return True


def record(
    tx: Tx, key: Key, kind: str, workspace: str | None, data: str, event: int | None
) -> bool:
    """Write a record (`data` is JSON text) once; False if that was done before."""
    if not _claim(tx, key, Claim("record", workspace), event):
        return False
    records.insert(tx, key, kind, workspace, data)
    return True


def link(tx: Tx, source: str, account: str, customer: str, workspace: str) -> bool:
    """Link a customer; False if it is linked so already. Raises Quarantine if to another."""
    if links.add(tx, source, account, customer, workspace):
        return True
    linked = links.workspace(tx, source, account, customer)
    if linked != workspace:
        raise Quarantine(
            f"customer {customer} is linked to workspace {linked}, this says {workspace}: "
            "only the operator re-points a link (`receiver links add --repoint`)"
        )
    return False


def project(
    tx: Tx,
    name: Name,
    seen: Seen,
    what: Project,
    by: By,
    *,
    event: int | None,
    fetched_through: int | None = None,
    mend: bool = False,
) -> bool:
    """Bring what is known of a resource up to what an event or a fetch says; True if it changed.

    State, not an operation: it may be told again, and the order in which it is told does not
    matter. With `mend` the operator takes what was fetched, whatever was known.
    """
    known = resources.find(tx, name)
    verdict = projection.judge(None if mend else known, seen, what, by)
    fetched = fetched_through is not None
    if verdict.takes:
        came_from = "fetch" if fetched else "event"
        row = resources.put(
            tx, name, seen, came_from=came_from, event=event, fetched_through=fetched_through
        )
        conflicts.supersede(tx, row)
    else:
        assert known is not None, "what is not known yet is taken"
        row = known.id
        if fetched and not verdict.contested:
            conflicts.supersede(tx, row)
        if fetched:
            resources.confirm(tx, row, fetched_through)
    if verdict.contested and known is not None:
        loser, told_by = (known.seen, known.event) if verdict.takes else (seen, event)
        _contest(tx, row, loser, told_by or event)
    return verdict.takes


def _contest(tx: Tx, resource: int, loser: Seen, event: int | None) -> None:
    if event is None:
        # A fetch that nobody's event asked for: it can be asked for again.
        return
    body = projection.content_of(loser)
    conflicts.add(
        tx,
        event,
        content_sha256=hashlib.sha256(body).digest(),
        body=body,
        content_type="json",
        received_ms=tx.now_ms,
        request_id="",
        resource=resource,
    )


def begin(tx: Tx, key: Key, kind: str, workspace: str | None, event: int | None) -> bool:
    """Claim the key for a change of the founder's own; False if it was made before."""
    return _claim(tx, key, Claim(kind, workspace), event)


def workspace_of(snapshot: Snapshot, source: str, account: str, customer: str) -> str:
    """The workspace linked to a customer; raises Park while there is none."""
    found = links.workspace(snapshot, source, account, customer)
    if found is None:
        raise Park(f"customer {customer} is not linked to a workspace yet", customer=customer)
    return found


def check_name(what: str, text: str) -> str:
    """A name that a handler or an operator gives: what an event may give, but no number.

    Raises ValueError.
    """
    if not isinstance(text, str):
        raise ValueError(f"{what}: expected a text")
    try:
        return key_text(text, what)
    except Unjudgeable as error:
        raise ValueError(str(error)) from error


def _claim(tx: Tx, key: Key, what: Claim, event: int | None) -> bool:
    if operations.claim(tx, key, what, event):
        return True
    known = operations.find(tx, key)
    assert known is not None, "a claim that failed met another"
    if known.kind == "call" and what.kind == "grant":
        # The handler's own grant, under the key that its rule claimed for the call.
        return _free_in_ledger(tx, key, what)
    _check_agreement(key, known, what)
    return False


def _free_in_ledger(tx: Tx, key: Key, what: Claim) -> bool:
    entry = ledger.find(tx, key)
    if entry is None:
        return True
    _check_agreement(key, Claim("grant", entry.workspace, entry.unit, entry.amount), what)
    return False


def _check_agreement(key: Key, known: Claim, what: Claim) -> None:
    # A handler's effect can't be known before it runs: a grant under its key counts as done.
    if what.kind == "call" and known.kind == "grant":
        return
    if known != what:
        raise Quarantine(f"{key} was done as {_said(known)}; this event would do {_said(what)}")


def _check_reversal(key: Key, known: Claim, target: Key, entry: ledger.Entry | None) -> None:
    same_target = (known.target_subject, known.target_operation) == (
        target.subject,
        target.operation,
    )
    same_workspace = entry is None or entry.workspace == known.workspace
    if known.kind != "reverse" or not same_target or not same_workspace:
        raise Quarantine(f"{key} was done as {_said(known)}; this event would reverse {target}")


def _said(claim: Claim) -> str:
    amount = "" if claim.amount is None else f" of {claim.amount} {claim.unit}"
    whom = "" if claim.workspace is None else f" for workspace {claim.workspace}"
    target = "" if claim.target_subject is None else f" taking back {claim.target_subject}"
    return f"{claim.kind}{amount}{whom}{target}"
