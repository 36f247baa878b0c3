"""Whether the file can be written, found out by writing it."""

from store.database import Tx


def touch(tx: Tx) -> None:
    """Write the one health row; durable when the transaction is."""
    tx.db.execute(
        """
        insert into receiver_health (id, checked_ms) values (1, ?)
        on conflict (id) do update set checked_ms = excluded.checked_ms
        """,
        (tx.now_ms,),
    )
