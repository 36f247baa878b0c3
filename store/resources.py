"""Resources: what is known of the current state of the sender's objects."""

from typing import NamedTuple

import msgspec

from store.database import Snapshot, Tx


class Name(NamedTuple):
    """A resource's key. `source` is the identity; `account` may be ''."""

    source: str
    account: str
    kind: str
    resource_id: str

    def __str__(self) -> str:
        return "/".join(filter(None, self))


class Seen(NamedTuple):
    """What an event or a fetch says of a resource; `fields` as JSON text.

    `version` is the sender's own order, `event_time` the time of the event, each where it is used.
    """

    state: str
    fields: str
    version: int | None = None
    event_time: int | None = None
    terminal: bool = False
    deleted: bool = False


class Resource(msgspec.Struct, frozen=True):
    """What is known of one resource; times in UTC milliseconds.

    `fetched_through`: it was fetched when the event of that row, and all before, had come.
    """

    id: int
    source: str
    account: str
    kind: str
    resource_id: str
    state: str
    fields: str
    version: int | None
    event_time: int | None
    terminal: bool
    deleted: bool
    contested: bool
    came_from: str
    event: int | None
    fetched_through: int | None
    updated_ms: int
    checked_ms: int

    @property
    def name(self) -> Name:
        return Name(self.source, self.account, self.kind, self.resource_id)

    @property
    def seen(self) -> Seen:
        """What it was made of."""
        return Seen(
            self.state, self.fields, self.version, self.event_time, self.terminal, self.deleted
        )


_COLUMNS = """
    id, source, account, kind, resource_id, state, fields, version, event_time, terminal, deleted,
    contested, came_from, event, fetched_through, updated_ms, checked_ms
"""


def put(
    tx: Tx,
    name: Name,
    seen: Seen,
    *,
    came_from: str,
    event: int | None,
    fetched_through: int | None = None,
) -> int:
    """Make this the resource's state, whatever it was; its row number.

    The file makes due what was parked on it.
    """
    tx.db.execute(
        """
        insert into receiver_resources (
          source, account, kind, resource_id, state, fields, version, event_time, terminal,
          deleted, came_from, event, fetched_through, updated_ms, checked_ms)
        values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
        on conflict (source, account, kind, resource_id) do update set
          state = excluded.state, fields = excluded.fields, version = excluded.version,
          event_time = excluded.event_time, terminal = excluded.terminal,
          deleted = excluded.deleted, came_from = excluded.came_from, event = excluded.event,
          fetched_through = coalesce(excluded.fetched_through, fetched_through),
          updated_ms = excluded.updated_ms, checked_ms = excluded.checked_ms
        """,
        (*name, *seen, came_from, event, fetched_through, tx.now_ms, tx.now_ms),
    )
    found = find(tx, name)
    assert found is not None, "it was written a moment ago"
    return found.id


def confirm(tx: Tx, resource: int, fetched_through: int | None = None) -> None:
    """It was looked at, and stays as it is."""
    tx.db.execute(
        """
        update receiver_resources
        set checked_ms = ?, fetched_through = coalesce(?, fetched_through)
        where id = ?
        """,
        (tx.now_ms, fetched_through, resource),
    )


def forget_fields(tx: Tx, event: int) -> int:
    """Empty what is kept of the resources that an event brought last; how many."""
    tx.db.execute(
        "update receiver_resources set fields = '{}' where event = ? and fields <> '{}'", (event,)
    )
    return tx.db.changes()


def ever_fetched(snapshot: Snapshot, source: str, account: str) -> bool:
    """Whether anything that is there was ever read from this account."""
    found = snapshot.db.execute(
        """
        select 1 from receiver_resources
        where source = ? and account = ? and fetched_through is not null and deleted = 0 limit 1
        """,
        (source, account),
    ).get
    return found is not None


def find(snapshot: Snapshot, name: Name) -> Resource | None:
    """What is known of this resource, or None."""
    values = snapshot.db.execute(
        f"""
        select {_COLUMNS} from receiver_resources
        where source = ? and account = ? and kind = ? and resource_id = ?
        """,  # noqa: S608  constant columns
        name,
    ).fetchone()
    return None if values is None else _resource(values)


def by_id(snapshot: Snapshot, resource: int) -> Resource | None:
    """The resource with this row number."""
    values = snapshot.db.execute(
        f"select {_COLUMNS} from receiver_resources where id = ?",  # noqa: S608  as above
        (resource,),
    ).fetchone()
    return None if values is None else _resource(values)


def named(snapshot: Snapshot, name: str, limit: int) -> list[Name]:
    """What an operator may mean: an id, kind/id or source/account/kind/id; known, or owed."""
    return [
        Name(*values)
        for values in snapshot.db.execute(
            """
            with every (source, account, kind, resource_id) as (
              select source, account, kind, resource_id from receiver_resources
              union select source, account, kind, resource_id from receiver_fetches)
            select source, account, kind, resource_id from every
            where :name in (
              resource_id, kind || '/' || resource_id,
              source || '/' || account || '/' || kind || '/' || resource_id)
            order by 1, 2, 3, 4 limit :limit
            """,
            {"name": name, "limit": limit},
        )
    ]


def listed(
    snapshot: Snapshot,
    *,
    source: str | None = None,
    kind: str | None = None,
    state: str | None = None,
    contested: bool = False,
    after: int = 0,
    limit: int = 50,
) -> list[Resource]:
    """Resources in the order in which they became known, from the one behind row `after` on."""
    return [
        _resource(values)
        for values in snapshot.db.execute(
            f"""
            select {_COLUMNS} from receiver_resources
            where id > :after
              and (:source is null or source = :source)
              and (:kind is null or kind = :kind)
              and (:state is null or state = :state)
              and (:contested = 0 or contested = 1)
            order by id limit :limit
            """,  # noqa: S608  constant columns
            {
                "after": after,
                "source": source,
                "kind": kind,
                "state": state,
                "contested": int(contested),
                "limit": limit,
            },
        )
    ]


def _resource(values: tuple[object, ...]) -> Resource:
    columns = list(values)
    columns[9:12] = map(bool, columns[9:12])
    return Resource(*columns)  # type: ignore[arg-type]  # in the order of the fields
