"""Acts by hand: who did what, when and why, only ever added to."""

from dataclasses import dataclass

from store.database import Snapshot, Tx


@dataclass(frozen=True, slots=True)
class Act:
    """One act; `detail` is JSON text."""

    id: int
    at_ms: int
    actor: str
    action: str
    target: str
    reason: str
    detail: str


def add(tx: Tx, actor: str, action: str, target: str, reason: str, detail: str) -> None:
    """Write down an act, in the transaction that carries it out."""
    tx.db.execute(
        """
        insert into receiver_audit (at_ms, actor, action, target, reason, detail)
        values (?, ?, ?, ?, ?, ?)
        """,
        (tx.now_ms, actor, action, target, reason, detail),
    )


def that_released(snapshot: Snapshot, event: int) -> list[Act]:
    """The acts that released a parked event, as their details list it; oldest first."""
    return [
        Act(*values)
        for values in snapshot.db.execute(
            """
            select id, at_ms, actor, action, target, reason, detail from receiver_audit
            where exists (select 1 from json_each(detail, '$.released') where value = ?)
            order by id
            """,
            (event,),
        )
    ]


def of_target(snapshot: Snapshot, target: str) -> list[Act]:
    """The acts upon one target, oldest first."""
    return [
        Act(*values)
        for values in snapshot.db.execute(
            """
            select id, at_ms, actor, action, target, reason, detail
            from receiver_audit where target = ? order by id
            """,
            (target,),
        )
    ]
