"""With any number of events every listing and look-up reads a range of an index."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import apsw
import pytest

from receiver.commands import shared
from store import audit, inbox, ledger, links, outbox, parked, records
from store.database import Store, snapshot
from store.operations import Key
from tests import bulk
from tests.command import Command
from tests.conftest import World

SIZE = bulk.Size(3_000, accounts=7, customers=60, workspaces=25, types=9)

#: Tables of which all is read on purpose: they have a row for each name in the config, or less.
SMALL = {
    "receiver_armed",
    "receiver_captured",
    "receiver_names",
    "receiver_rejections",
    "receiver_schema",
    "receiver_secrets",
    "receiver_health",
}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bulk")
    bulk.fill(folder, SIZE).close()
    return folder


class Statements:
    """Every statement that connections run from now on, each once, with its bindings counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: dict[str, None] = {}
        monkeypatch.setattr(apsw, "connection_hooks", [*apsw.connection_hooks, self._hook])

    def _hook(self, db: apsw.Connection) -> None:
        db.trace_v2(apsw.SQLITE_TRACE_STMT, self._note, id=self)

    def _note(self, traced: dict[str, str]) -> None:
        statement = traced["sql"]
        if not traced["trigger"] and statement.lstrip().lower().startswith(("select", "with")):
            self.seen[statement] = None


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> Statements:
    return Statements(monkeypatch)


@pytest.mark.parametrize("words", bulk.commands(Path(), SIZE), ids=" ".join)
def test_every_listing_and_look_up_reads_by_an_index(
    filled: Path, statements: Statements, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(shared, "now_ms", lambda: bulk.NOW_MS)

    ran = Command.on(filled)(*words)

    assert ran.code in (0, 2, 3), ran.err
    assert statements.seen
    with snapshot(filled / "receiver.db") as seen:
        for statement in statements.seen:
            assert whole_scans(seen.db, statement) == [], statement


def test_what_takes_back_an_entry_is_found_by_an_index(
    filled: Path, statements: Statements
) -> None:
    """The trigger that bounds reversals asks in the same words."""
    entry = ledger.Entry(Key("stripe", "", "in_1", "grant"), "w1", "credits", 5, 1)
    with snapshot(filled / "receiver.db") as seen:
        assert ledger.reversals(seen, entry.key) == []
        assert ledger.left(seen, entry) == 5
        asked = [one for one in statements.seen if "target_operation = " in one]

        assert len(asked) == 2
        for statement in asked:
            assert whole_scans(seen.db, statement) == [], statement


def test_reading_all_of_a_table_is_noticed(filled: Path) -> None:
    with snapshot(filled / "receiver.db") as seen:
        for statement in (
            "select * from receiver_events",
            "select count(*) from receiver_events e where reason = 'x'",
            "select id from receiver_events order by received_ms limit 1",
            "select max(created_ms) from receiver_ledger",
            "select 1 from receiver_ledger where source = ? and account = ? and amount = ?",
            "select distinct event from receiver_operations where event > 7",
        ):
            assert bool(whole_scans(seen.db, statement)) == ("event > 7" not in statement)


def whole_scans(db: apsw.Connection, statement: str) -> list[str]:
    """The steps of a query's plan that read all of a table, or of an index of it."""
    found = []
    for step in plan_of(db, statement):
        read = re.match(r"(SCAN|SEARCH) (\w+)(.*\()?", step)
        table = _table_of(read[2], statement) if read else ""
        # A search that is bound by nothing is for a least or a greatest value, maybe of all.
        whole = read is not None and (read[1] == "SCAN" or read[3] is None)
        # Nor is one that is bound by whose it is alone: most files have one source.
        whole = whole or step.endswith("(source=? AND account=?)")
        if whole and table.startswith("receiver_") and table not in SMALL:
            found.append(step)
    return found


def plan_of(db: apsw.Connection, statement: str) -> list[str]:
    for parameters in range(40):
        with contextlib.suppress(apsw.BindingsError):
            rows = db.execute(f"explain query plan {statement}", (None,) * parameters)
            return [str(step) for *_, step in rows]
    raise AssertionError("more parameters than any statement has")


def _table_of(name: str, statement: str) -> str:
    """The table that a plan calls by its alias."""
    alias = re.search(rf"\b(receiver_\w+) {name}\b", statement)
    return alias[1] if alias else name


# What is found is what reading all of it finds


@pytest.fixture
def full(filled: Path) -> Iterator[Store]:
    opened = Store.open(filled / "receiver.db", lambda: bulk.NOW_MS)
    yield opened
    opened.close()


@pytest.mark.parametrize("state", [None, "done", "ignored", "parked"])
@pytest.mark.parametrize("endpoint", [None, "connect", "nobody"])
@pytest.mark.parametrize("type", [None, "invoice.paid", "type.3"])
@pytest.mark.parametrize("since_ms", [None, bulk.NOW_MS - 2_000_000])
def test_filtered_events_are_those_that_fit_the_newest_first(
    full: Store,
    state: str | None,
    endpoint: str | None,
    type: str | None,
    since_ms: int | None,
) -> None:
    fits = [
        id
        for (id,) in full.db.execute(
            """
            select id from receiver_events
            where (?1 is null or state = ?1) and (?2 is null or endpoint = ?2)
              and (?3 is null or type = ?3) and (?4 is null or received_ms >= ?4)
            order by id
            """,
            (state, endpoint, type, since_ms),
        )
    ]
    with snapshot(Path(full.path)) as seen:
        listed = inbox.listed(
            seen, state=state, endpoint=endpoint, type=type, since_ms=since_ms, limit=20
        )
        numbers = inbox.numbers(seen, state=state, endpoint=endpoint, type=type, since_ms=since_ms)

    assert [row.id for row in listed] == fits[::-1][:20]
    assert numbers == fits


def test_since_finds_events_that_stand_a_little_out_of_order(world: World) -> None:
    for number, ahead_ms in enumerate([0, 50_000, 10_000, 70_000, 55_000, 100_000, 90_000]):
        world.clock.now_ms = bulk.NOW_MS + ahead_ms
        world.stripe(f"evt_{number}", "other")

    for since_ms in range(bulk.NOW_MS - 5_000, bulk.NOW_MS + 110_000, 5_000):
        with snapshot(world.folder / "receiver.db") as seen:
            found = inbox.numbers(seen, since_ms=since_ms)
        fits = "select id from receiver_events where received_ms >= ? order by id"
        assert found == [row for (row,) in world.query(fits, since_ms)]


def cases(*given: tuple[dict[str, Any], str]) -> Sequence[tuple[dict[str, Any], str]]:
    """Filters of a listing, each with the condition that means the same."""
    return given


def test_other_listings_are_those_that_fit_the_newest_first(full: Store) -> None:
    def times(statement: str, *parameters: object) -> list[int]:
        return [at for (at,) in full.db.execute(statement, parameters)]

    with snapshot(Path(full.path)) as seen:
        for filters, where in cases(
            ({}, "true"),
            ({"workspace": "w3"}, "workspace = 'w3'"),
            ({"operation": "initial-credit-grant"}, "operation = 'initial-credit-grant'"),
            ({"operation": "none"}, "false"),
            ({"since_ms": bulk.NOW_MS - 900_000}, f"created_ms >= {bulk.NOW_MS - 900_000}"),
        ):
            found = [one.created_ms for one in ledger.listed(seen, limit=30, **filters)]
            statement = f"select created_ms from receiver_ledger where {where} order by 1 desc"
            assert found == times(statement)[:30]
        for filters, where in cases(
            ({}, "true"),
            ({"kind": "kind-4"}, "kind = 'kind-4'"),
            ({"workspace": "w3"}, "workspace = 'w3'"),
            ({"workspace": "w3", "kind": "kind-4"}, "workspace = 'w3' and kind = 'kind-4'"),
        ):
            found = [one.created_ms for one in records.listed(seen, limit=30, **filters)]
            statement = f"select created_ms from receiver_records where {where} order by 1 desc"
            assert found == times(statement)[:30]
        for filters, where in cases(
            ({}, "true"),
            ({"state": "sent"}, "state = 'sent'"),
            ({"destination": "to-1"}, "destination = 'to-1'"),
            ({"destination": "to-1", "state": "pending"}, "destination='to-1' and state='pending'"),
        ):
            found = [one.id for one in outbox.listed(seen, limit=30, **filters)]
            statement = f"select id from receiver_outbox where {where} order by 1"
            assert found == times(statement)[::-1][:30]
            assert outbox.numbers(seen, **filters) == times(statement)
        for filters, where in cases(
            ({}, "true"),
            ({"customer": "cus_7"}, "customer = 'cus_7'"),
            ({"workspace": "w7"}, "workspace = 'w7'"),
            ({"source": "stripe"}, "true"),
            ({"source": "github", "workspace": "w7"}, "false"),
        ):
            found = [one.created_ms for one in links.listed(seen, limit=30, **filters)]
            statement = f"select created_ms from receiver_links where {where} order by 1 desc"
            assert found == times(statement)[:30]
        assert len(parked.listed(seen, endpoint="stripe", limit=100)) == len(
            inbox.numbers(seen, state="parked", endpoint="stripe")
        )
        assert len(audit.listed(seen, limit=100)) == 30


def test_a_balance_whose_row_is_gone_is_listed_with_its_entries(world: World) -> None:
    world.link()
    world.invoice("evt_1", "in_1")
    world.query("delete from receiver_balances")

    found = world.store.look(lambda seen, _: ledger.totals(seen))

    assert found == [ledger.Balance("acme", "credits", 0, 100)]
