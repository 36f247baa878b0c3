"""When each secret last proved a delivery; known by its reference, so that it can be retired."""

import msgspec

from store.database import Snapshot, Tx


class SecretUse(msgspec.Struct, frozen=True):
    """How many stored deliveries of a source a secret proved, and when the last one came."""

    source: str
    reference: str
    last_ms: int
    count: int


def used(tx: Tx, source: str, reference: str, last_ms: int, count: int) -> None:
    """Add to what is known of a secret; the rows are bounded by what configs ever named."""
    tx.db.execute(
        """
        insert into receiver_secrets (source, reference, last_ms, count)
        values (?, ?, ?, ?)
        on conflict (source, reference) do update set
          last_ms = max(last_ms, excluded.last_ms), count = count + excluded.count
        """,
        (source, reference, last_ms, count),
    )


def last_used(snapshot: Snapshot) -> list[SecretUse]:
    """Every secret that proved a delivery, in order of source and reference."""
    return [
        SecretUse(*values)
        for values in snapshot.db.execute(
            """
            select source, reference, last_ms, count
            from receiver_secrets order by source, reference
            """
        )
    ]
