"""What happened how often, in slots of ten minutes: for rates, and for the last of a kind."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from store.database import Snapshot, Tx

#: How long a slot is, and how long slots are kept, in milliseconds.
SLOT_MS = 600_000
KEPT_MS = 172_800_000

Kind = Literal["delivery", "attempt", "send"]


class What(NamedTuple):
    """What is counted: deliveries by source, sends by destination, attempts by nothing more."""

    kind: Kind
    name: str
    outcome: str


class Total(NamedTuple):
    """How often, since the file was made, and when last (UTC milliseconds)."""

    times: int
    last_ms: int


def add(tx: Tx, counts: Mapping[What, int], last_ms: int) -> None:
    """Count these, in the slot of `last_ms` and for ever."""
    slot_ms = slot_of(last_ms)
    tx.db.executemany(
        """
        insert into receiver_tallies (kind, name, outcome, slot_ms, count, last_ms)
        values (?, ?, ?, ?, ?, ?)
        on conflict (kind, slot_ms, name, outcome) do update set
          count = count + excluded.count, last_ms = max(last_ms, excluded.last_ms)
        """,
        [
            (what.kind, what.name, what.outcome, slot, count, last_ms)
            for what, count in counts.items()
            for slot in (0, slot_ms)
        ],
    )


def prune(tx: Tx) -> None:
    """Forget slots that nobody asks for any more."""
    tx.db.execute(
        """
        delete from receiver_tallies
        where kind in ('delivery', 'attempt', 'send')
          and slot_ms > 0 and slot_ms < ?
        """,
        (tx.now_ms - KEPT_MS,),
    )


def since(snapshot: Snapshot, kind: Kind, from_ms: int) -> dict[tuple[str, str], int]:
    """How often by name and outcome, from the slot of that time on."""
    return {
        (name, outcome): count
        for name, outcome, count in snapshot.db.execute(
            """
            select name, outcome, sum(count) from receiver_tallies
            where kind = ? and slot_ms >= ? group by name, outcome order by name, outcome
            """,
            (kind, max(SLOT_MS, slot_of(from_ms))),
        )
    }


def totals(snapshot: Snapshot, kind: Kind) -> dict[tuple[str, str], Total]:
    """How often by name and outcome since the file was made, and when last."""
    return {
        (name, outcome): Total(count, last_ms)
        for name, outcome, count, last_ms in snapshot.db.execute(
            """
            select name, outcome, count, last_ms from receiver_tallies
            where kind = ? and slot_ms = 0 order by name, outcome
            """,
            (kind,),
        )
    }


def slot_of(at_ms: int) -> int:
    """The slot that a time is in, never the one that counts for ever."""
    return max(SLOT_MS, at_ms - at_ms % SLOT_MS)
