"""The ledger keeps its rules itself, whoever writes to it."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from store import inbox, ledger, links, operations, parked
from store.database import Store, Tx
from store.errors import Refused
from store.operations import Claim, Key
from store.parked import Fact

GRANT = Key("stripe", "", "in_1", "initial-credit-grant")

# What an app would run: the library that Python itself brings, in a process of its own.
APP = """
import json, sqlite3, sys
db = sqlite3.connect(sys.argv[1], timeout=5)
try:
    rows = db.execute(sys.argv[2]).fetchall()
    db.commit()
    print(json.dumps({"rows": rows, "sqlite": sqlite3.sqlite_version}))
except sqlite3.Error as error:
    print(json.dumps({"error": str(error), "sqlite": sqlite3.sqlite_version}))
"""

INSERT = """
into receiver_ledger (source, account, subject, operation, workspace, unit, amount, created_ms)
values
"""


def app(store: Store, statement: str) -> dict[str, object]:
    output = subprocess.run(
        [sys.executable, "-c", APP, store.path, statement],
        capture_output=True,
        check=True,
        text=True,
        timeout=30,
    ).stdout
    answer = json.loads(output)
    assert isinstance(answer, dict)
    return answer


def grant(tx: Tx, key: Key = GRANT, amount: int = 100) -> None:
    ledger.enter(tx, key, "acme", "credits", amount)


def test_an_entry_adds_to_its_workspaces_balance(store: Store) -> None:
    store.write(grant)

    assert store.write(lambda tx: ledger.balance(tx, "acme", "credits")) == 100
    assert store.write(ledger.disagreements) == []


def test_an_entry_claims_its_business_key(store: Store) -> None:
    store.write(grant)

    known = store.write(lambda tx: operations.find(tx, GRANT))

    assert known == Claim("grant", "acme", "credits", 100)


def test_an_entry_that_disagrees_with_its_claim_is_refused(store: Store) -> None:
    store.write(lambda tx: operations.claim(tx, GRANT, Claim("grant", "acme", "credits", 50), None))

    with pytest.raises(Refused, match="claimed for something else"):
        store.write(grant)

    assert store.write(lambda tx: ledger.find(tx, GRANT)) is None


@pytest.mark.parametrize(
    "statement",
    [
        f"insert {INSERT} ('stripe', '', 'in_1', 'initial-credit-grant', 'acme', 'credits', 9, 1)",
        f"insert or replace {INSERT}"
        " ('stripe', '', 'in_1', 'initial-credit-grant', 'acme', 'credits', 9, 1)",
        f"insert or ignore {INSERT}"
        " ('stripe', '', 'in_1', 'initial-credit-grant', 'acme', 'credits', 9, 1)",
        f"insert {INSERT} ('stripe', '', 'in_1', 'initial-credit-grant', 'acme', 'credits', 9, 1)"
        " on conflict do update set amount = 9",
        "update receiver_ledger set amount = 9",
        "update or replace receiver_ledger set amount = 9",
        "delete from receiver_ledger",
        "delete from receiver_ledger where subject = 'in_1'",
    ],
)
def test_another_process_can_not_change_replace_or_delete_an_entry(
    store: Store, statement: str
) -> None:
    store.write(grant)

    answer = app(store, statement)

    assert "receiver: " in str(answer["error"])
    assert store.write(lambda tx: ledger.listed(tx)[0].amount) == 100
    assert store.write(lambda tx: ledger.balance(tx, "acme", "credits")) == 100


def test_the_app_spends_with_one_insert_that_its_request_id_makes_unique(store: Store) -> None:
    store.write(grant)
    spend = f"insert {INSERT} ('app', '', 'request-1', 'spend', 'acme', 'credits', -30, 1)"

    first, second = app(store, spend), app(store, spend)

    assert first["rows"] == []
    assert "in the ledger already" in str(second["error"])
    assert store.write(lambda tx: ledger.balance(tx, "acme", "credits")) == 70


def test_the_app_can_not_overdraw(store: Store) -> None:
    store.write(grant)

    answer = app(store, f"insert {INSERT} ('app', '', 'r', 'spend', 'acme', 'credits', -101, 1)")

    assert "balance does not cover" in str(answer["error"])
    assert store.write(lambda tx: ledger.balance(tx, "acme", "credits")) == 100


def test_a_reversal_after_the_credits_were_spent_goes_below_zero(store: Store) -> None:
    store.write(grant)
    app(store, f"insert {INSERT} ('app', '', 'r', 'spend', 'acme', 'credits', -80, 1)")

    refund = Key("stripe", "", "cn_1", "refund")
    store.write(lambda tx: ledger.enter(tx, refund, "acme", "credits", -100, GRANT))

    assert store.write(lambda tx: ledger.balance(tx, "acme", "credits")) == -80


def test_reversals_never_exceed_their_entry_in_sum(store: Store) -> None:
    store.write(grant)
    first, second = Key("stripe", "", "cn_1", "refund"), Key("stripe", "", "cn_2", "refund")
    store.write(lambda tx: ledger.enter(tx, first, "acme", "credits", -60, GRANT))

    with pytest.raises(Refused, match="no more"):
        store.write(lambda tx: ledger.enter(tx, second, "acme", "credits", -41, GRANT))

    assert store.write(lambda tx: ledger.balance(tx, "acme", "credits")) == 40


@pytest.mark.parametrize(
    ("workspace", "unit"), [("other", "credits"), ("acme", "seats"), ("acme", "credits ")]
)
def test_a_reversal_is_of_its_entrys_workspace_and_unit(
    store: Store, workspace: str, unit: str
) -> None:
    store.write(grant)
    refund = Key("stripe", "", "cn_1", "refund")

    with pytest.raises(Refused):
        store.write(lambda tx: ledger.enter(tx, refund, workspace, unit, -1, GRANT))


@pytest.mark.parametrize(
    "values",
    [
        "(null, '', 's', 'o', 'w', 'u', 1, 1)",
        "('x', null, 's', 'o', 'w', 'u', 1, 1)",
        "('', '', 's', 'o', 'w', 'u', 1, 1)",
        "('x', '', '', 'o', 'w', 'u', 1, 1)",
        "('x', '', 's', '', 'w', 'u', 1, 1)",
        "('x', '', 's', 'o', '', 'u', 1, 1)",
        "('x', '', 's', 'o', 'w', '', 1, 1)",
        "('x', '', 's', 'o', 'w', 'u', 0, 1)",
        "('x', '', 's', 'o', 'w', 'u', 1.5, 1)",
        "('x', '', 's', 'o', 'w', 'u', 9223372036854775807, 1)",
    ],
)
def test_an_entry_has_all_its_parts(store: Store, values: str) -> None:
    answer = app(store, f"insert {INSERT} {values}")

    assert "error" in answer
    assert store.write(ledger.listed) == []


def test_an_entry_by_the_app_makes_due_what_was_parked_on_it(store: Store) -> None:
    row = store.write(park_on_grant)

    app(store, f"insert {INSERT} ('stripe', '', 'in_1', 'initial-credit-grant', 'w', 'u', 1, 5)")

    released = store.write(lambda tx: inbox.by_row(tx, row))
    assert released is not None
    assert (released.state, released.next_attempt_ms) == ("pending", 0)
    assert store.write(lambda tx: parked.of_event(tx, row)) is None


def park_on_grant(tx: Tx) -> int:
    row = inbox.insert(
        tx,
        source="stripe",
        account="",
        event_id="evt_1",
        endpoint="stripe",
        type="credit_note.created",
        received_ms=tx.now_ms,
        secret="env:S",
        content_type="json",
        body=b"{}",
        body_sha256=bytes(32),
        id_signed=True,
        claimed_account=None,
        request_id="r-1",
    )
    assert row is not None
    inbox.settle(tx, row, "parked", "waits")
    parked.wait(tx, row, Fact("entry", "stripe", "", GRANT.subject, GRANT.operation))
    return row


@pytest.mark.parametrize(
    "statement",
    [
        "update receiver_operations set amount = 1",
        "update or replace receiver_operations set subject = 'in_2'",
        "delete from receiver_operations",
        "delete from receiver_events",
    ],
)
def test_another_process_can_not_make_a_claim_or_an_event_forgotten(
    store: Store, statement: str
) -> None:
    store.write(grant)
    store.write(park_on_grant)

    answer = app(store, statement)

    assert "receiver: " in str(answer["error"])


@pytest.mark.parametrize("verb", ["insert", "insert or replace", "insert or ignore", "replace"])
def test_a_claim_that_is_there_stays_as_it_is(store: Store, verb: str) -> None:
    store.write(grant)

    app(
        store,
        f"{verb} into receiver_operations (source, account, subject, operation, kind, created_ms)"
        " values ('stripe', '', 'in_1', 'initial-credit-grant', 'call', 1)",
    )

    known = store.write(lambda tx: operations.find(tx, GRANT))
    assert known == Claim("grant", "acme", "credits", 100)


def test_a_link_that_the_app_moves_releases_what_waited_for_it(store: Store) -> None:
    row = store.write(park_on_grant)
    store.write(lambda tx: parked.wait(tx, row, Fact("link", "stripe", "", "cus_2")))
    store.write(lambda tx: links.add(tx, "stripe", "", "cus_1", "acme"))

    app(store, "update receiver_links set customer = 'cus_2'")

    released = store.write(lambda tx: inbox.by_row(tx, row))
    assert released is not None
    assert released.state == "pending"


def test_a_link_of_one_account_is_not_anothers(store: Store) -> None:
    store.write(lambda tx: links.add(tx, "stripe", "", "cus_1", "acme"))

    assert store.write(lambda tx: links.workspace(tx, "stripe", "acct_2", "cus_1")) is None


@pytest.mark.skipif(
    shutil.which("sqlite3") is None and "CI" not in os.environ, reason="sqlite3 is not installed"
)
def test_the_sqlite_command_line_of_debian_can_not_replace_an_entry(store: Store) -> None:
    store.write(grant)

    answer = subprocess.run(
        ["sqlite3", store.path],
        input=f"replace {INSERT} ('stripe', '', 'in_1', 'initial-credit-grant', 'w', 'u', 9, 1);\n"
        "select amount from receiver_ledger;",
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert "in the ledger already" in answer.stderr
    assert answer.stdout.strip() == "100"
