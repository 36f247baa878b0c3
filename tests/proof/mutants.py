"""Receiver with one line of its promise broken at a time: what the power cuts must notice."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import apsw
import pytest

from receiver import process
from store import copies, database
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

    def owed(store: Store) -> None:
        if store.db.in_transaction:
            commit(store)

    def commit_later(writer: Writer, act: Callable[[], Any], then: Callable[[Any], None]) -> None:
        if act != writer._store.commit:
            hand_over(writer, act, then)
            return
        writer._loop.call_later(TOO_LATE_S, owed, writer._store)
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
