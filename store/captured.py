"""Secrets that a sender handed over, and the sources that await one."""

import msgspec

from store.database import Snapshot, Tx


class Armed(msgspec.Struct, frozen=True):
    """The operator awaits a secret, from one time until another."""

    source: str
    armed_ms: int
    until_ms: int
    actor: str

    def is_open(self, now_ms: int) -> bool:
        """Not before it began either: the clock was set back then, and it may never end."""
        return self.armed_ms <= now_ms < self.until_ms


class Captured(msgspec.Struct, frozen=True):
    """A secret, and who handed it over when."""

    id: int
    source: str
    secret: bytes
    captured_ms: int
    address: str
    request_id: str

    def __repr__(self) -> str:
        return f"Captured({self.id}, {self.source!r})"


def arm(tx: Tx, source: str, until_ms: int, actor: str) -> None:
    """Await a secret for a source, in place of what was awaited before."""
    tx.db.execute(
        """
        insert into receiver_armed (source, armed_ms, until_ms, actor) values (?, ?, ?, ?)
        on conflict (source) do update set
          armed_ms = excluded.armed_ms, until_ms = excluded.until_ms, actor = excluded.actor
        """,
        (source, tx.now_ms, until_ms, actor),
    )


def disarm(tx: Tx, source: str) -> bool:
    """Await nothing any more; False where nothing was awaited."""
    tx.db.execute("delete from receiver_armed where source = ?", (source,))
    return tx.db.changes() == 1


def keep(tx: Tx, source: str, secret: bytes, address: str, request_id: str) -> int | None:
    """Keep the secret that was awaited, which ends the waiting; its number.

    None where none is awaited now, whoever ended it.
    """
    awaited = armed(tx).get(source)
    if awaited is None or not awaited.is_open(tx.now_ms):
        return None
    disarm(tx, source)
    tx.db.execute(
        """
        insert into receiver_captured (source, secret, captured_ms, address, request_id)
        values (?, ?, ?, ?, ?)
        """,
        (source, secret, tx.now_ms, address, request_id),
    )
    return tx.db.last_insert_rowid()


def forget(tx: Tx, number: int) -> None:
    """Accept nothing more that is signed with this secret, and keep no copy of it."""
    tx.db.execute(
        "update receiver_captured set secret = null, forgotten_ms = ? where id = ?",
        (tx.now_ms, number),
    )
    assert tx.db.changes() == 1, "only a secret that was kept can be forgotten"


def armed(snapshot: Snapshot) -> dict[str, Armed]:
    """What is awaited, by source; what has ended since included."""
    rows = snapshot.db.execute("select source, armed_ms, until_ms, actor from receiver_armed")
    return {values[0]: Armed(*values) for values in rows}


def listed(snapshot: Snapshot) -> dict[str, list[Captured]]:
    """The secrets that are kept, by source, the oldest first."""
    found: dict[str, list[Captured]] = {}
    for values in snapshot.db.execute(
        """
        select id, source, secret, captured_ms, address, request_id
        from receiver_captured where secret is not null order by id
        """
    ):
        found.setdefault(values[1], []).append(Captured(*values))
    return found
