"""Receiver with one line of its promise broken at a time: what the proof must notice."""

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import apsw
import pytest

from receiver import dispatch, effects, operate, process
from receiver.worker import Worker
from store import copies, database, forgotten, inbox, ledger, outbox, schema
from store.database import Store, Tx
from store.writer import Writer

#: Seconds between an answer and the commit that should have come before it.
TOO_LATE_S = 0.001


def _synchronous(mode: str) -> Callable[[pytest.MonkeyPatch], None]:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        prepare = database._prepare

        def prepare_otherwise(db: apsw.Connection) -> None:
            prepare(db)
            db.execute(f"pragma synchronous = {mode}")

        patch.setattr(database, "_prepare", prepare_otherwise)

    return mutate


def _answer_before_commit(patch: pytest.MonkeyPatch) -> None:
    commit, begin, close = Store.commit, Store.begin, Store.close
    timers: list[asyncio.TimerHandle] = []

    def owed(store: Store) -> None:
        if store.db.in_transaction:
            commit(store)

    def commit_later(writer: Writer, act: Callable[[], Any], then: Callable[[Any], None]) -> None:
        if act != writer._store.commit:
            hand_over(writer, act, then)
            return
        # One that is late itself would commit this in time.
        while timers:
            timers.pop().cancel()
        timers.append(writer._loop.call_later(TOO_LATE_S, owed, writer._store))
        then(True)

    def begin_after(store: Store) -> Tx | None:
        owed(store)
        return begin(store)

    def close_after(store: Store) -> None:
        owed(store)
        close(store)

    hand_over = Writer._hand_over
    patch.setattr(Writer, "_hand_over", commit_later)
    patch.setattr(Store, "begin", begin_after)
    patch.setattr(Store, "close", close_after)


def _two_commits(patch: pytest.MonkeyPatch) -> None:
    insert = process._insert

    def insert_and_commit(tx: Tx, *arguments: Any) -> int | None:
        row = insert(tx, *arguments)
        tx.db.execute("commit")
        tx.db.execute("begin immediate")
        return row

    patch.setattr(process, "_insert", insert_and_commit)


def _copy_without_sync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(copies, "sync", lambda path: None)


# What the model must notice


def _instead(module: object, name: str, other: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(module, name, other)


def _other_schema(part: str, other: str) -> Callable[[pytest.MonkeyPatch], None]:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        assert part in schema.STEPS[0]
        patch.setattr(schema, "STEPS", (schema.STEPS[0].replace(part, other),))

    return mutate


def _keep_what_failed(patch: pytest.MonkeyPatch) -> None:
    def leave(savepoint: Any, kind: object, error: object, trace: object) -> None:
        savepoint.db.execute("release attempt")

    patch.setattr(database._Savepoint, "__exit__", leave)


def _lease_for_ever(patch: pytest.MonkeyPatch) -> None:
    def make_due(tx: Tx, row: int, *, by_worker: bool) -> None:
        tx.db.execute(
            """
            update receiver_events
            set state = 'pending', settled_ms = null, next_attempt_ms = ?, by_worker = ?
            where id = ?
            """,
            (tx.now_ms, by_worker, row),
        )

    patch.setattr(inbox, "make_due", make_due)


#: What is broken, by the name of how.
MUTANTS: Mapping[str, Callable[[pytest.MonkeyPatch], None]] = MappingProxyType(
    {
        "synchronous=normal": _synchronous("normal"),
        "synchronous=off": _synchronous("off"),
        "answer before commit": _answer_before_commit,
        "two commits for one event": _two_commits,
        "copies that are not synced": _copy_without_sync,
    }
)

#: The same for the model.
MODEL_MUTANTS: Mapping[str, Callable[[pytest.MonkeyPatch], None]] = MappingProxyType(
    {
        "a claim that is not asked": _instead(effects, "begin", lambda *of: True),
        "part of an event is kept": _keep_what_failed,
        "other content is a duplicate": _instead(process, "_same_content", lambda *of: True),
        "a link releases nothing": _other_schema("kind = 'link' and", "kind = 'none' and"),
        "an entry releases nothing": _other_schema("kind = 'entry' and", "kind = 'none' and"),
        "the app overdraws": _other_schema("new.source = 'app' and", "new.source = 'none' and"),
        "more is taken back than is left": _instead(ledger, "left", lambda seen, one: one.amount),
        "a late worker settles a message": _instead(outbox, "holds", lambda *of: True),
        "a lease outlives its event's being due": _lease_for_ever,
        "an unknown outcome is sent again": _instead(dispatch, "_may_repeat", lambda *of: True),
        "a wrong clock's due time is believed": _instead(Worker, "ahead_ms", lambda one: 10**15),
        "what is pruned is not known again": _instead(forgotten, "_note", lambda *of: None),
        "an act by hand is not written down": _instead(operate, "write_down", lambda *a, **b: None),
        "a redelivery is not counted": _instead(inbox, "count_duplicate", lambda tx, row: None),
    }
)
