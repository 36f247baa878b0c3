"""A founder's SQL stays inside its own savepoint, whatever it tries."""

import functools
import time
from pathlib import Path

import pytest

from store import founder
from store.database import Job, Store, Tx, snapshot
from store.errors import Failed

FORBIDDEN = [
    "commit",
    "rollback",
    "end",
    "begin",
    "savepoint x",
    "release job",
    "rollback to job",
    "insert into notes (text) values ('x'); commit",
    "pragma synchronous = off",
    "pragma user_version = 7",
    "select * from pragma_table_info('notes')",
    "attach '/tmp/other.db' as other",
    "detach main",
    "vacuum",
    "create table t (a)",
    "create temp table t (a)",
    "drop table notes",
    "alter table notes add column b",
    "create trigger t after insert on notes begin select 1; end",
    "insert into receiver_links values ('a', '', 'c', 'w', 1)",
    "update RECEIVER_EVENTS set state = 'done'",
    "delete from receiver_balances",
    "select load_extension('x')",
    "insert into sqlite_schema values ('a', 'b', 'c', 1, 'd')",
    "this is no sql",
    "insert into notes (text) values (?)",
]

# What SQLite asks the fence about only while it runs.
WHEN_RUN = ["vacuum", "select * from pragma_table_info('notes')"]


@pytest.fixture
def app_store(store: Store) -> Store:
    def tables(tx: Tx) -> None:
        tx.db.execute(
            """
            create table notes (id integer primary key, text text not null);
            create table poison (id integer primary key);
            create trigger kill before insert on poison
              begin select raise(rollback, 'everything goes'); end;
            """
        )

    store.write(tables)
    return store


def notes(store: Store) -> list[str]:
    return store.write(lambda tx: [text for (text,) in tx.db.execute("select text from notes")])


def execute(tx: Tx, statement: str, *parameters: founder.Value) -> list[tuple[founder.Value, ...]]:
    return founder.execute(tx, statement, parameters, founder.deadline())


def write_note(tx: Tx, text: str) -> None:
    execute(tx, "insert into notes (text) values (?)", text)


def keep_rows(tx: Tx, why: str) -> list[tuple[founder.Value, ...]]:
    write_note(tx, "kept")
    return []


@pytest.mark.parametrize("statement", FORBIDDEN)
def test_what_is_not_allowed_fails_and_leaves_nothing(app_store: Store, statement: str) -> None:
    def handler(tx: Tx) -> None:
        write_note(tx, "before")
        execute(tx, statement)

    bad, good = Job(handler), Job(lambda tx: write_note(tx, "neighbour"))
    app_store.write_all([bad, good])

    assert isinstance(bad.error, Failed)
    assert good.error is None
    assert notes(app_store) == ["neighbour"]


@pytest.mark.parametrize("statement", sorted({*FORBIDDEN} - {*WHEN_RUN}))
def test_what_would_fail_is_told_without_running_it(app_store: Store, statement: str) -> None:
    with snapshot(Path(app_store.path)) as seen:
        assert founder.problem(seen, statement, 0) is not None


def test_a_statement_that_can_be_run_is_prepared_and_not_run(app_store: Store) -> None:
    good = "insert into notes (id, text) values (?, ?) on conflict do nothing returning id"

    with snapshot(Path(app_store.path)) as seen:
        assert founder.problem(seen, good, 2) is None
        assert founder.problem(seen, good, 1) is not None
        assert founder.problem(seen, "select txt from notes", 0) == "no such column: txt"

    assert notes(app_store) == []


def test_a_refusal_is_not_cached_away(app_store: Store) -> None:
    """A statement that the store itself may run must not pass for a founder's."""
    statement = "insert into receiver_links values ('a', '', 'c', 'w', 1)"
    app_store.write(lambda tx: tx.db.execute(statement))

    with pytest.raises(Failed, match="not allowed"):
        app_store.write(lambda tx: execute(tx, statement))


def test_reading_our_tables_is_allowed(app_store: Store) -> None:
    rows = app_store.write(lambda tx: execute(tx, "select count(*) from receiver_events"))

    assert rows == [(0,)]


def test_a_statement_that_never_ends_is_stopped(
    app_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(founder, "SQL_S_MAX", 0.2)
    endless = "with recursive n(i) as (select 1 union all select i + 1 from n) select max(i) from n"
    started = time.monotonic()

    with pytest.raises(Failed, match="longer than"):
        app_store.write(lambda tx: execute(tx, endless))

    assert time.monotonic() - started < 5


def test_an_endless_write_leaves_none_of_its_rows_and_its_neighbours_theirs(
    app_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(founder, "SQL_S_MAX", 0.1)
    endless = (
        "with recursive n(i) as (select 1 union all select i + 1 from n)"
        " insert into notes (text) select 'x' from n"
    )
    bad = Job(
        lambda tx: execute(tx, endless),
        keep=keep_rows,
    )
    neighbours = [Job(functools.partial(write_note, text=f"n{n}")) for n in range(3)]

    app_store.write_all([neighbours[0], bad, *neighbours[1:]])

    assert [job.error for job in neighbours] == [None, None, None]
    assert sorted(notes(app_store)) == ["kept", "n0", "n1", "n2"]


def test_too_many_rows_fail_instead_of_filling_memory(app_store: Store) -> None:
    many = (
        "with recursive n(i) as (select 1 union all select i + 1 from n limit 20000)"
        " select i from n"
    )

    with pytest.raises(Failed, match="add a limit"):
        app_store.write(lambda tx: execute(tx, many))


@pytest.mark.parametrize(
    "killer", ["insert into poison values (1)", "insert or rollback into notes (id) values (1)"]
)
def test_a_job_that_ends_the_transaction_is_kept_and_its_neighbours_commit(
    app_store: Store, killer: str
) -> None:
    runs = {"before": 0, "after": 0, "bad": 0}

    def neighbour(tx: Tx, name: str) -> None:
        runs[name] += 1
        write_note(tx, name)

    def bad(tx: Tx) -> None:
        runs["bad"] += 1
        write_note(tx, "bad")
        execute(tx, killer)

    jobs = [
        Job(lambda tx: neighbour(tx, "before")),
        Job(bad, keep=lambda tx, why: write_note(tx, f"kept: {why}")),
        Job(lambda tx: neighbour(tx, "after")),
    ]

    app_store.write_all(jobs)

    assert [job.error for job in jobs] == [None, None, None]
    kept = [text for text in notes(app_store) if text.startswith("kept: ")]
    assert len(kept) == 1
    assert sorted(set(notes(app_store)) - set(kept)) == ["after", "before"]
    assert runs == {"before": 2, "after": 1, "bad": 2}


def test_a_job_that_swallows_the_error_of_a_lost_transaction_is_found_out(
    app_store: Store,
) -> None:
    def sly(tx: Tx) -> None:
        try:
            execute(tx, "insert into poison values (1)")
        except Failed:
            return

    job = Job(sly, keep=lambda tx, why: write_note(tx, "kept"))
    app_store.write_all([job])

    assert notes(app_store) == ["kept"]


def test_a_constraint_that_is_checked_at_commit_costs_only_its_own_job(app_store: Store) -> None:
    def tables(tx: Tx) -> None:
        tx.db.execute(
            """
            create table child (
              parent integer references notes (id) deferrable initially deferred);
            """
        )

    app_store.write(tables)
    orphan = Job(
        lambda tx: execute(tx, "insert into child values (99)"),
        keep=keep_rows,
    )
    good = Job(lambda tx: write_note(tx, "good"))

    app_store.write_all([orphan, good])

    assert good.error is None
    assert sorted(notes(app_store)) == ["good", "kept"]
