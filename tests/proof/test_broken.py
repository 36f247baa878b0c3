"""Some of the calls at which storage can fail; `make proof` makes all of them fail."""

import contextlib
import random

import apsw
import pytest

from store.database import Store
from tests.proof.broken import fail_at
from tests.proof.power import expected_end

#: Between two calls that fail.
EVERY = 300


def test_storage_that_fails_for_a_while_loses_and_doubles_nothing() -> None:
    first = random.randrange(EVERY)
    print(f"first {first}")

    failed = fail_at(expected_end(), every=EVERY, first=first)

    assert failed.faults == []
    assert failed.runs >= 10


def test_a_commit_whose_failure_is_not_heeded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = expected_end()

    def commit_blindly(store: Store) -> bool:
        with contextlib.suppress(apsw.Error):
            store.db.execute("commit")
        if store.db.in_transaction:
            store.db.execute("rollback")
        return True

    monkeypatch.setattr(Store, "commit", commit_blindly)

    assert fail_at(wanted, every=150, first=5).faults != []
