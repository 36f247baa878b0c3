"""Current state: what a rule projects of a resource, and which of two claims about it stands."""

import json
from datetime import UTC, datetime
from typing import Literal, NamedTuple

import msgspec

from receiver import api
from receiver.select import Condition, Path, Scope, Template, Unjudgeable, key_text
from receiver.tables import Table
from store.resources import Resource, Seen

#: The fields of one resource as JSON, in bytes.
FIELDS_BYTES_MAX = 65_536

STATES_MAX = 100

#: What SQLite keeps as an integer.
INTEGER_MAX = 2**63 - 1

#: The state of what is deleted.
DELETED = "deleted"

_KEYS = (
    *("kind", "id", "object", "state", "fields", "version"),
    *("created", "rank", "terminal", "deleted", "fetch"),
)

#: How it is decided what stands: by the sender's own order, by asking it, or by a ranking.
By = Literal["version", "fetch", "rank"]


class Project(msgspec.Struct, frozen=True):
    """What a rule keeps of a resource.

    `id`, `object`, `created` and `deleted` are looked up in the event; `version`, `state` and
    `fields` in the object that stands there, or in what was fetched.
    """

    kind: str
    id: Path
    object: Path | None = None
    state: Path | None = None
    fields: Template | None = None
    version: Path | None = None
    created: Path | None = None
    rank: tuple[str, ...] = ()
    terminal: tuple[str, ...] = ()
    deleted: Condition | None = None
    fetch: str | None = None

    def path_by(self, sender: api.SenderApi | None) -> str | None:
        """Where such a resource is in the sender's API; None: it can't be fetched."""
        if sender is None:
            return None
        return self.fetch or sender.resources.get(self.kind)

    def by(self, sender: api.SenderApi | None) -> By:
        """How it is decided what stands, for a source with or without an API."""
        if self.version is not None:
            return "version"
        return "rank" if self.path_by(sender) is None else "fetch"


class Needed(msgspec.Struct, frozen=True):
    """The resource that a rule knows as `_resource`."""

    kind: str
    id: Path


# From the config


def read(rule: Table) -> Project | None:
    """The effect `project` of a rule."""
    table = rule.table("project", _KEYS)
    if table is None:
        return None
    table.require("kind", "name what it is, as in subscription")
    table.require("id", "name the path of its id, as in data.object.id")
    kind, resource_id = table.name("kind"), table.path("id")
    fetch = table.text("fetch")
    problem = None if fetch is None else api.path_problem(fetch)
    if problem is not None:
        table.problem("fetch", problem)
    project = Project(
        kind=kind or "",
        id=resource_id or Path.compile("id"),
        object=table.path("object"),
        state=table.path("state"),
        fields=_fields(table),
        version=table.path("version"),
        created=table.path("created"),
        rank=_states(table, "rank"),
        terminal=_states(table, "terminal"),
        deleted=table.condition("deleted"),
        fetch=fetch,
    )
    _check(table, project)
    return None if kind is None or resource_id is None else project


def read_needed(rule: Table) -> Needed | None:
    """The `resource` of a rule."""
    table = rule.table("resource", ("kind", "id"))
    if table is None:
        return None
    table.require("kind", "name the kind of resource that a rule projects")
    table.require("id", "name the path of its id, as in data.object.subscription")
    kind, resource_id = table.name("kind"), table.path("id")
    return None if kind is None or resource_id is None else Needed(kind, resource_id)


def _fields(table: Table) -> Template | None:
    if "fields" in table and not isinstance(table.values["fields"], dict):
        table.problem("fields", 'expected a table; write { plan = "{items.data[0].price.id}" }')
        return None
    return table.template("fields")


def _states(table: Table, key: str) -> tuple[str, ...]:
    states = table.texts(key)
    if len(states) > STATES_MAX or len(set(states)) < len(states):
        table.problem(key, f"expected at most {STATES_MAX} states, each of them once")
    return states


def _check(table: Table, project: Project) -> None:
    """What no single key can tell."""
    if project.state is None and project.fields is None:
        table.problem("state", "is missing; name the path of the state, or fields to keep")
    if project.state is None and (project.rank or project.terminal):
        table.problem("state", "is missing; rank and terminal are about states")
    if project.version is not None and (project.created is not None or project.rank):
        table.problem("version", "is an order by itself; leave out created and rank")
    if project.created is not None and not (project.terminal or project.deleted):
        table.problem(
            "created",
            "can't tell two events of one second apart by itself; list the states that are "
            'final, as in terminal = ["canceled"]',
        )
    if project.rank and project.created is None:
        table.problem("created", "is missing; rank only decides between events of one time")
    inner = [("version", project.version), ("state", project.state)]
    inner += [("fields", path) for path in (project.fields.paths if project.fields else ())]
    for key, path in inner:
        if path is not None and any(map(path.uses_own, ("_event", "_workspace", "_resource"))):
            table.problem(key, "is looked up in the resource, where none of our names are known")


# What an event, or a fetch, says


def id_of(path: Path, scope: Scope) -> str:
    """The id of a resource in an event. Raises Unjudgeable."""
    text = key_text(path.value(scope), path.text)
    if not text.strip("."):
        raise Unjudgeable(path.text, "has dots alone")
    return text


def seen_in_event(project: Project, scope: Scope) -> Seen | None:
    """What an event says of its resource; None if it does not carry it. Raises Unjudgeable."""
    document = scope.document if project.object is None else project.object.value(scope)
    deleted = project.deleted is not None and project.deleted.holds(scope)
    if document is None and not deleted:
        return None
    seen = seen_in(project, document, deleted=deleted)
    time = None if project.created is None else _time(project.created, scope)
    return seen._replace(event_time=time)


def seen_in(project: Project, document: object, *, deleted: bool = False) -> Seen:
    """What an object of the sender says. Raises Unjudgeable."""
    scope = Scope(document, {})
    state = DELETED if deleted else _state(project.state, scope)
    return Seen(
        state=state,
        fields=_rendered(project.fields, scope),
        version=None if project.version is None else _integer(project.version, scope),
        terminal=deleted or state in project.terminal,
        deleted=deleted,
    )


def _state(path: Path | None, scope: Scope) -> str:
    return "" if path is None else key_text(path.value(scope), path.text)


def _rendered(fields: Template | None, scope: Scope) -> str:
    found = {} if fields is None else fields.render(scope)
    try:
        # One form for one content, whatever the order of the keys.
        text = json.dumps(found, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        size = len(text.encode())
    except (ValueError, TypeError, RecursionError) as error:
        raise Unjudgeable("fields", "can't be written as JSON") from error
    if size > FIELDS_BYTES_MAX:
        raise Unjudgeable("fields", f"are longer than {FIELDS_BYTES_MAX} bytes")
    return text


def _integer(path: Path, scope: Scope) -> int:
    found = path.value(scope)
    if isinstance(found, str) and found.isascii() and found.isdecimal() and len(found) < 20:
        found = int(found)
    if isinstance(found, bool) or not isinstance(found, int) or abs(found) > INTEGER_MAX:
        raise Unjudgeable(path.text, "is no whole number, so it can't order anything")
    return found


def _time(path: Path, scope: Scope) -> int:
    """A time to compare with others of the same sender: as a number is sent, or microseconds."""
    found = path.value(scope)
    if isinstance(found, str) and not found.isdecimal():
        try:
            when = datetime.fromisoformat(found)
        except ValueError as error:
            raise Unjudgeable(path.text, "is no time (a number, or RFC 3339)") from error
        when = when if when.tzinfo else when.replace(tzinfo=UTC)
        return int(when.timestamp() * 1_000_000)
    return _integer(path, scope)


# Which of two claims stands


class Standing(NamedTuple):
    """Whether what is seen takes the place of what is known, and whether the other contests it."""

    takes: bool
    contested: bool = False


def judge(known: Resource | None, seen: Seen, project: Project, by: By) -> Standing:
    """Which of two claims about a resource stands: the same one, whichever came first.

    The exception is an authoritative version that comes with two contents: the first stands,
    contested. A final state gives way to a deletion or another final one, and to nothing else.
    """
    if known is None:
        return Standing(takes=True)
    old, same = known.seen, _content(seen) == _content(known.seen)
    if by == "fetch":
        # What was asked for just now is newer than whatever is known.
        ends = _finality(seen) >= _finality(old)
        return Standing(takes=ends and not same, contested=not ends)
    order, known_order = _order(seen, project, by), _order(old, project, by)
    if _finality(seen) != _finality(old):
        return _judge_end(seen, old, order[0] - known_order[0], by)
    if order != known_order:
        return Standing(takes=order > known_order)
    return Standing(takes=by == "rank" and _content(seen) > _content(old), contested=not same)


def _judge_end(seen: Seen, old: Seen, newer_by: int, by: By) -> Standing:
    """One of two claims is final, and stands. News of life that is later contests it."""
    ends = _finality(seen) > _finality(old)
    later = -newer_by if ends else newer_by
    # Within one second both may be so; one version can't be two things.
    return Standing(takes=ends, contested=later > 0 or (later == 0 and by == "version"))


def _finality(seen: Seen) -> int:
    return 2 if seen.deleted else int(seen.terminal)


def _order(seen: Seen, project: Project, by: By) -> tuple[int, int]:
    if by == "version":
        return (_or_least(seen.version), 0)
    rank = project.rank.index(seen.state) if seen.state in project.rank else -1
    return (_or_least(seen.event_time), rank)


def _or_least(number: int | None) -> int:
    return -INTEGER_MAX - 1 if number is None else number


def _content(seen: Seen) -> tuple[str, str]:
    return (seen.state, seen.fields)


def content_of(seen: Seen) -> bytes:
    """What is kept of a claim that did not stand, as JSON."""
    return msgspec.json.encode(
        {
            "state": seen.state,
            "fields": msgspec.Raw(seen.fields.encode()),
            "version": seen.version,
            "event_time": seen.event_time,
            "deleted": seen.deleted,
        }
    )
