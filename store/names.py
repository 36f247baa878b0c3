"""Names that are part of keys: renaming one would do everything again."""

from collections.abc import Iterable

from store.database import Snapshot, Tx


def remember(tx: Tx, kind: str, names: Iterable[str]) -> None:
    """The config uses these names now; `kind` is `identity` or `operation`."""
    for name in names:
        tx.db.execute(
            """
            insert into receiver_names (kind, name, since_ms) values (?, ?, ?)
            on conflict (kind, name) do nothing
            """,
            (kind, name, tx.now_ms),
        )


def lost(snapshot: Snapshot, kind: str, names: Iterable[str]) -> list[str]:
    """Names that the file knows and the config no longer has."""
    known = {
        name
        for (name,) in snapshot.db.execute(
            "select name from receiver_names where kind = ?", (kind,)
        )
    }
    return sorted(known - set(names))


#: The (source, account) pairs that a table's keys begin with, each found from the one before it:
#: few, where the keys are many.
SENDERS = """
recursive identities(source) as (
  select min(source) from {0} where source > ''
  union all
  select (select min(source) from {0} where source > identities.source)
  from identities where source is not null),
senders(source, account) as (
  select source, (select min(account) from {0} where source = identities.source)
  from identities where source is not null
  union all
  select source, (
    select min(account) from {0} where source = senders.source and account > senders.account)
  from senders where account is not null)
"""
