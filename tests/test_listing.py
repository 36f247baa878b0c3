"""A table that describes a list: what is asked for, what is read, and what is wrong with it."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from receiver.described import Described
from receiver.listing import Listing, Unreadable, parse, parse_books, path_problem
from receiver.presets import PresetError, get, names, table
from receiver.presets import parse as parse_preset

LEAST: dict[str, Any] = {"path": "/v1/events", "id": "id", "time": "created"}


def described(**more: Any) -> Listing:
    api = Described({"events": LEAST | more}, "api")
    found = parse(api, "events")
    assert api.problems == []
    assert found is not None
    return found


def problems_of(**more: Any) -> list[str]:
    api = Described({"events": LEAST | more}, "api")
    parse(api, "events")
    return api.problems


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"id": None}, "api.events.id: is missing"),
        ({"path": "v1/events"}, "api.events.path: is not the path of a list"),
        ({"path": "//elsewhere/x"}, "write one slash"),
        ({"path": "/v1/events?limit=1"}, "api.events.path: is not the path"),
        ({"cursor": "after"}, "api.events.cursor: needs cursor_from"),
        ({"cursor": "after", "cursor_from": "id"}, "must be item:PATH, answer:PATH or link"),
        ({"cursor": "after", "cursor_from": "item:]"}, "api.events.cursor_from"),
        ({"times": "min"}, "must be one of s, ms, iso"),
        ({"again": "attempts"}, "api.events.again: has no {id}"),
        ({"days": -1}, "api.events.days: must be a whole number"),
        ({"query": {"limit": 100}}, "api.events.query: must be a table of texts"),
        ({"pages": 1}, "api.events.pages: is not a known key"),
    ],
)
def test_what_is_wrong_with_a_list_is_told_with_its_key(more: dict[str, Any], words: str) -> None:
    assert any(words in one for one in problems_of(**more))


@pytest.mark.parametrize(
    "books",
    [
        {},
        {"event": {"id": "{id}"}, "objects": {"invoice": LEAST}},
        {"event": "{id", "objects": {}},
        {
            "event": {"id": "{id}"},
            "objects": {"invoice": LEAST | {"words": "invoice", "on": ["a"], "one": "/v1/i"}},
        },
    ],
)
def test_what_is_wrong_with_books_is_told(books: dict[str, Any]) -> None:
    api = Described({"books": books}, "api")

    parse_books(api, "books")

    assert api.problems != []


def test_the_sender_is_refused_with_every_problem_of_its_list() -> None:
    stripe: dict[str, Any] = dict(table("stripe"))
    stripe["api"]["events"] |= {"path": "x", "time": 7}

    with pytest.raises(PresetError) as error:
        parse_preset(stripe)

    assert "api.events.path" in str(error.value)
    assert "api.events.time" in str(error.value)


def test_every_shipped_list_is_sound() -> None:
    tables: dict[str, Any] = {name: table(name) for name in names()}
    listed = [name for name in tables if "events" in tables[name].get("api", {})]

    assert listed == ["github", "paddle", "stripe"]
    for name in listed:
        get(name)


def test_a_page_is_asked_for_with_what_the_list_understands() -> None:
    listing = described(
        query={"limit": "100"},
        cursor="after",
        cursor_from="item:id",
        since="from",
        until="to",
        times="iso",
        types="type[]",
        types_max=2,
    )

    ask = listing.target("/v1/events", "a&b", since_ms=0, until_ms=86_400_000, types=("x", "y"))
    assert ask == (
        "/v1/events?limit=100&from=1970-01-01T00%3A00%3A00%2B00%3A00"
        "&to=1970-01-02T00%3A00%3A00%2B00%3A00&type%5B%5D=x&type%5B%5D=y&after=a%26b"
    )
    # More types than it takes: all are listed.
    assert "type" not in listing.target("/v1/events", None, types=("x", "y", "z"))
    assert described().target("/v1/events", "c", since_ms=1) == "/v1/events"


@pytest.mark.parametrize(
    ("how", "document", "headers", "following"),
    [
        ({"cursor_from": "item:id"}, [{"id": "a"}, {"id": "b"}], {}, "b"),
        ({"cursor_from": "item:id"}, [], {}, None),
        ({"cursor_from": "item:id", "more": "x"}, [{"id": "a"}], {}, None),
        (
            {"cursor_from": "item:id", "items": "d", "more": "m"},
            {"d": [{"id": 7}], "m": True},
            {},
            "7",
        ),
        ({"cursor_from": "answer:next", "items": "d"}, {"d": [1], "next": "n1"}, {}, "n1"),
        ({"cursor_from": "answer:next", "items": "d"}, {"d": [1], "next": None}, {}, None),
        ({"cursor_from": "link"}, [1], {}, None),
        ({"cursor_from": "link"}, [1], {"link": '<https://x/y?c=9>; rel="next"'}, "9"),
        (
            {"cursor_from": "link"},
            [1],
            {"link": '<https://x/y?c=1>; rel="prev", <https://x/y?p=2&c=v1_3>; rel="next"'},
            "v1_3",
        ),
        ({"cursor_from": "link"}, [1], {"link": '<https://x/y?c=1>; rel="prev"'}, None),
        ({"cursor_from": "link"}, [1], {"link": "<<<>;;;rel=next"}, None),
    ],
)
def test_the_next_page_is_told_by_the_last_item_the_answer_or_the_link(
    how: dict[str, str], document: Any, headers: dict[str, str], following: str | None
) -> None:
    page = described(cursor="c", **how).page(document, headers)

    assert page.next == following


@pytest.mark.parametrize(
    ("more", "document"),
    [
        ({}, {"data": []}),
        ({"items": "data"}, {"data": {}}),
        ({}, [{}] * 1_001),
        ({"cursor": "c", "cursor_from": "item:id"}, [{"id": ["a"]}]),
        ({"cursor": "c", "cursor_from": "item:id"}, [{"id": "a" * 1_001}]),
    ],
)
def test_what_is_no_page_is_refused(more: dict[str, Any], document: Any) -> None:
    with pytest.raises(Unreadable):
        described(**more).page(document, {})


@pytest.mark.parametrize(
    ("times", "created", "at_ms"),
    [
        ("s", 1_800_000_000, 1_800_000_000_000),
        ("ms", 1_800_000_000_000, 1_800_000_000_000),
        ("s", 1.5, 1_500),
        ("iso", "2027-01-15T08:00:00Z", 1_800_000_000_000),
        ("iso", "2027-01-15T09:00:00.25+01:00", 1_800_000_000_250),
        ("iso", "2027-01-15T08:00:00", 1_800_000_000_000),
    ],
)
def test_a_time_is_read_as_it_is_written(times: str, created: Any, at_ms: int) -> None:
    assert described(times=times).time_ms({"created": created}) == at_ms


@pytest.mark.parametrize("created", [None, True, -1, 1e300, "soon", "", [], {"a": 1}])
def test_what_is_no_time_is_refused(created: Any) -> None:
    with pytest.raises(Unreadable):
        described().time_ms({"created": created})


@pytest.mark.parametrize("delivery", ["../../user", "1/2", "a?b", ""])
def test_the_id_of_a_delivery_can_not_name_another_place(delivery: str) -> None:
    with pytest.raises(Unreadable):
        described(again="/{id}/attempts").again_path("/hooks", {"id": delivery})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["id", "created", "type", "data", "more", "d"]), inner)
    ),
    max_leaves=20,
)


@given(JSON, st.text(max_size=60))
def test_whatever_a_sender_answers_is_read_or_refused(document: Any, link: str) -> None:
    for source in ("item:id", "answer:data.id", "link"):
        listing = described(
            cursor="c", cursor_from=source, items="data", type="type", account="d", times="s"
        )
        with contextlib.suppress(Unreadable):
            page = listing.page(document, {"link": link})
            for item in page.items:
                listing.item_id(item)
                listing.item_type(item)
                listing.item_account(item)
                listing.time_ms(item)


def test_the_path_of_a_list_is_a_path() -> None:
    assert path_problem("/repos/me/my-app/hooks/7/deliveries") is None
    for path in ("https://elsewhere/x", "/a b", "/a#b", "/{owner}", "", "/" + "a" * 500):
        assert path_problem(path) is not None
