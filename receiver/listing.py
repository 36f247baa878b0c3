"""What a sender lists, as data: how to ask for a page, and where an item says what it is."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal
from urllib.parse import parse_qs, urlencode, urlsplit

import msgspec

from receiver import described
from receiver.described import Described
from receiver.select import Condition, Path, Template, Unjudgeable, key_text

# The table `api.events` of senders/NAME.toml, and each one of `api.books.objects`. The list must
# have the newest first.
#   path         of the list; without it each source names its own, as api.events
#   query        what is asked with each page, its size for one
#   items        path of the items in an answer; without it the answer is the list
#   cursor       the parameter that asks for the next page, with what is at
#   cursor_from  item:PATH in the last item, answer:PATH, or link (RFC 8288, rel="next")
#   more         path in the answer of whether there is another page
#   since, until parameters for the oldest and newest time asked for; times: s, ms or iso
#   types        the parameter for each type that is wanted, at most types_max of them
#   id, type, time, account   paths in an item
#   days         how long the sender keeps what it lists
#   again        path behind the list's, with {id}, that has an event delivered again; its
#                again_id is the path of that id. Without it an item is the event itself.
_KEYS = (
    *("path", "query", "items", "cursor", "cursor_from", "more", "since", "until", "times"),
    *("types", "types_max", "id", "type", "time", "account", "days", "again", "again_id"),
)

# The table `api.books`:
#   event        what an event about {object} would say: its {id}, {type}, {created} in seconds
#   objects      a list for each KIND, as above, and for each
#     words      what one is called, as in "paid invoice"
#     on         the types of events about it; a rule for one of them is about these objects
#     counted    when an object counts, also one that is read by itself at one
#     paid       path of the time that counts; an object is made up to early_days before it
#     one        path of one object, with {id}
_BOOKS_KEYS = ("event", "objects")
_OBJECT_KEYS = (*_KEYS, "words", "on", "counted", "paid", "early_days", "one")

DAYS_MAX = 3_650
TYPES_MAX = 100
#: Characters of a path, of what stands for a page, and of a header that links to it.
PATH_CHARS_MAX = 500
CURSOR_CHARS_MAX = 1_000
LINK_CHARS_MAX = 4_000
#: Items of one page that are looked at.
ITEMS_MAX = 1_000
DAY_MS = 86_400_000

_TIMES = ("s", "ms", "iso")
_NEXT = r'(?i)<([^<>]*)>\s*;[^,]*\brel="?next"?'


class Unreadable(Exception):
    """An answer is no page of such a list; the message says where that shows."""


class Cursor(msgspec.Struct, frozen=True):
    """How the next page is asked for."""

    parameter: str
    kind: Literal["item", "answer", "link"]
    at: Path | None = None


class Listing(msgspec.Struct, frozen=True):
    """One list; the fields are those of the table."""

    id: Path
    time: Path
    path: str | None = None
    query: Mapping[str, str] = {}
    items: Path | None = None
    cursor: Cursor | None = None
    more: Path | None = None
    since: str | None = None
    until: str | None = None
    times: str = "s"
    types: str | None = None
    types_max: int = TYPES_MAX
    type: Path | None = None
    account: Path | None = None
    days: int = 0
    again: str | None = None
    again_id: Path | None = None

    def target(
        self,
        path: str,
        cursor: str | None,
        *,
        since_ms: int | None = None,
        until_ms: int | None = None,
        types: tuple[str, ...] = (),
    ) -> str:
        """Path and query of one page."""
        asked = list(self.query.items())
        for name, at_ms in ((self.since, since_ms), (self.until, until_ms)):
            if name is not None and at_ms is not None:
                asked.append((name, self._time_text(at_ms)))
        if self.types is not None and 0 < len(types) <= self.types_max:
            asked += [(self.types, one) for one in types]
        if cursor is not None and self.cursor is not None:
            asked.append((self.cursor.parameter, cursor))
        return f"{path}?{urlencode(asked)}" if asked else path

    def page(self, document: object, headers: Mapping[str, str]) -> "Page":
        """What an answer has. Raises Unreadable."""
        found = document if self.items is None else described.value(self.items, document)
        if not isinstance(found, list):
            where = "the answer" if self.items is None else self.items.text
            raise Unreadable(f"{where} is no list")
        if len(found) > ITEMS_MAX:
            raise Unreadable(f"a page has more than {ITEMS_MAX} items")
        return Page(found, self._next(document, headers, found))

    def time_ms(self, item: object) -> int:
        """When an item came to be, in UTC milliseconds. Raises Unreadable."""
        return when_ms(self.time, item, self.times)

    def item_id(self, item: object) -> str:
        """Raises Unreadable."""
        return _text(self.id, item)

    def item_type(self, item: object) -> str:
        """Raises Unreadable."""
        return "" if self.type is None else _text(self.type, item)

    def item_account(self, item: object) -> str:
        """'' where it says none. Raises Unreadable."""
        found = described.value(self.account, item)
        return "" if self.account is None or found in (None, "") else _text(self.account, item)

    def again_path(self, path: str, item: object) -> str:
        """Where to ask for an item to be delivered again. Raises Unreadable."""
        assert self.again is not None, "only where the sender delivers again"
        again_id = _text(self.again_id or self.id, item)
        if not re.fullmatch(r"[A-Za-z0-9_-]+", again_id):
            raise Unreadable("the id of a delivery has more than letters and digits")
        return path + self.again.replace("{id}", again_id)

    def _time_text(self, at_ms: int) -> str:
        if self.times == "iso":
            return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="seconds")
        return str(at_ms if self.times == "ms" else at_ms // 1000)

    def _next(
        self, document: object, headers: Mapping[str, str], items: list[object]
    ) -> str | None:
        """What asks for the next page, or None behind the last one."""
        if self.cursor is None or not items:
            return None
        if self.more is not None and described.value(self.more, document) is not True:
            return None
        # Of an address only the one parameter counts: nothing that was sent chooses where to ask.
        match self.cursor.kind:
            case "link":
                found: object = _linked(headers.get("link", ""), self.cursor.parameter)
            case "item":
                found = described.value(self.cursor.at, items[-1])
            case "answer":
                found = described.value(self.cursor.at, document)
        if found is None or found == "":
            return None
        if not isinstance(found, str | int) or len(str(found)) > CURSOR_CHARS_MAX:
            raise Unreadable("what stands for the next page is no short text")
        return str(found)


class Page(msgspec.Struct, frozen=True):
    """One page, and what asks for the next one."""

    items: list[object]
    next: str | None


class Objects(msgspec.Struct, frozen=True):
    """One kind of what the books are about; the fields are those of the table."""

    listing: Listing
    words: str
    on: tuple[str, ...]
    one: str
    counted: Condition | None = None
    paid: Path | None = None
    early_days: int = 0

    def paid_ms(self, item: object) -> int:
        """The time that counts. Raises Unreadable."""
        return when_ms(self.paid or self.listing.time, item, self.listing.times)

    def counts(self, item: object) -> bool:
        return self.counted is None or described.holds(self.counted, item)


class Books(msgspec.Struct, frozen=True):
    """What is paid for at the sender, and how its events would tell of that."""

    event: Template
    objects: Mapping[str, Objects]


def when_ms(path: Path, item: object, times: str) -> int:
    """A time in an item, in UTC milliseconds. Raises Unreadable."""
    found = described.value(path, item)
    if isinstance(found, str):
        try:
            when = datetime.fromisoformat(found)
            return int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1000)
        except (ValueError, OverflowError):
            found = None
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < 1e14:
        raise Unreadable(f"{path.text} of an item is no time")
    return int(found if times == "ms" else found * 1000)


def _text(path: Path, item: object) -> str:
    try:
        return key_text(described.value(path, item), path.text)
    except Unjudgeable as error:
        raise Unreadable(f"of an item {error}") from error


def _linked(header: str, parameter: str) -> str | None:
    found = re.search(_NEXT, header[:LINK_CHARS_MAX])
    if found is None:
        return None
    return next(iter(parse_qs(urlsplit(found[1]).query).get(parameter, ())), None)


# From the data


def parse(api: Described, key: str) -> Listing | None:
    """Check and compile the list at a key; None where there is none."""
    if key not in api.table:
        return None
    reader = api.inner(key, api.table[key])
    reader.unknown(_KEYS)
    return _listing(reader)


def path_problem(path: str) -> str | None:
    """Why a list can't be there."""
    if len(path) > PATH_CHARS_MAX or not re.fullmatch(r"/[A-Za-z0-9_.~%/-]+", path):
        return "is not the path of a list; write /v1/things"
    return "is not the path of a list; write one slash" if path.startswith("//") else None


def parse_books(api: Described, key: str) -> Books | None:
    """The same of what is paid for."""
    if key not in api.table:
        return None
    reader = api.inner(key, api.table[key])
    reader.unknown(_BOOKS_KEYS)
    event, kinds = reader.template("event"), reader.table.get("objects", {})
    if event is None or not isinstance(kinds, dict):
        reader.fail("event", "is missing, or objects is no table")
        return None
    found = {kind: _objects(reader.inner(f"objects.{kind}", one)) for kind, one in kinds.items()}
    return Books(event, {kind: one for kind, one in found.items() if one is not None})


def _objects(reader: Described) -> Objects | None:
    reader.unknown(_OBJECT_KEYS)
    listing, on = _listing(reader), reader.texts("on")
    words, one = reader.line("words"), reader.line("one")
    if words is None or one is None or not on:
        reader.fail("words", "is missing, or on, or one")
        return None
    if listing is None or listing.path is None or one.count("{id}") != 1:
        reader.fail("one", "has no {id}, or path is missing")
        return None
    return Objects(
        listing=listing,
        words=words,
        on=on,
        one=one,
        counted=reader.condition("counted"),
        paid=reader.path("paid"),
        early_days=reader.number("early_days", 0, DAYS_MAX),
    )


def _listing(reader: Described) -> Listing | None:
    path, id_, time = reader.line("path"), reader.path("id"), reader.path("time")
    problem = None if path is None else path_problem(path)
    if problem is not None:
        reader.fail("path", problem)
    if id_ is None or time is None:
        reader.fail("id", "is missing, or time")
        return None
    times, again = reader.line("times") or "s", reader.line("again")
    if times not in _TIMES:
        reader.fail("times", f"must be one of {', '.join(_TIMES)}")
    if again is not None and (not again.startswith("/") or again.count("{id}") != 1):
        reader.fail("again", "has no {id}; write /{id}/attempts")
    return Listing(
        id=id_,
        time=time,
        path=path,
        query=reader.mapping("query"),
        items=reader.path("items"),
        cursor=_cursor(reader),
        more=reader.path("more"),
        since=reader.line("since"),
        until=reader.line("until"),
        times=times,
        types=reader.line("types"),
        types_max=reader.number("types_max", TYPES_MAX, TYPES_MAX),
        type=reader.path("type"),
        account=reader.path("account"),
        days=reader.number("days", 0, DAYS_MAX),
        again=again,
        again_id=reader.path("again_id"),
    )


def _cursor(reader: Described) -> Cursor | None:
    parameter, source = reader.line("cursor"), reader.line("cursor_from")
    if parameter is None or source is None:
        if (parameter is None) is not (source is None):
            reader.fail("cursor", "needs cursor_from, and the other way round")
        return None
    if source == "link":
        return Cursor(parameter, "link")
    kind, _, at = source.partition(":")
    if kind not in ("item", "answer"):
        reader.fail("cursor_from", "must be item:PATH, answer:PATH or link")
        return None
    try:
        return Cursor(parameter, "item" if kind == "item" else "answer", Path.compile(at))
    except ValueError as error:
        reader.fail("cursor_from", str(error))
        return None
