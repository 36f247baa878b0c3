"""Acts by hand: who did what, when and why, only ever added to."""

import json
from typing import Any

import msgspec

from store.database import Snapshot, Tx


class Act(msgspec.Struct, frozen=True):
    """One act; `detail` is JSON text."""

    id: int
    at_ms: int
    actor: str
    action: str
    target: str
    reason: str
    detail: str

    @property
    def details(self) -> dict[str, Any]:
        """What `detail` says; of one that some other program wrote, the text of it."""
        try:
            found = json.loads(self.detail)
        except (ValueError, RecursionError):
            found = None
        return found if isinstance(found, dict) else {"text": self.detail}


def add(tx: Tx, actor: str, action: str, target: str, reason: str, detail: str) -> None:
    """Write down an act, in the transaction that carries it out."""
    tx.db.execute(
        """
        insert into receiver_audit (at_ms, actor, action, target, reason, detail)
        values (?, ?, ?, ?, ?, ?)
        """,
        (tx.now_ms, actor, action, target, reason, detail),
    )


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


def listed(
    snapshot: Snapshot,
    *,
    actor: str | None = None,
    action: str | None = None,
    since_ms: int | None = None,
    limit: int = 50,
) -> list[Act]:
    """Acts by what is given, newest first."""
    return [
        Act(*values)
        for values in snapshot.db.execute(
            """
            select id, at_ms, actor, action, target, reason, detail
            from receiver_audit
            where id > 0 and (:actor is null or actor = :actor)
              and (:action is null or action = :action or action like :within escape '!')
              and (:since is null or at_ms >= :since)
            order by id desc limit :limit
            """,
            {
                "actor": actor,
                "action": action,
                "within": None if action is None else f"{_plain(action)} %",
                "since": since_ms,
                "limit": limit,
            },
        )
    ]


def _plain(text: str) -> str:
    """The text for `like`, in which nothing stands for anything else."""
    return text.replace("!", "!!").replace("%", "!%").replace("_", "!_")


def after(snapshot: Snapshot, act: int, *, since_ms: int | None, limit: int) -> list[Act]:
    """Acts with numbers above `act`, oldest first."""
    return [
        Act(*values)
        for values in snapshot.db.execute(
            """
            select id, at_ms, actor, action, target, reason, detail from receiver_audit
            where id > ? and at_ms >= ? order by id limit ?
            """,
            (act, since_ms or 0, limit),
        )
    ]
