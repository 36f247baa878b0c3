"""Lists at a sender on this machine, as Stripe, GitHub and Paddle document them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from tests.conftest import NOW_MS
from tests.sender_api import KEY, Reply, SenderApi, error, sender_api

NOW_S = NOW_MS // 1000


class SenderLists(SenderApi):
    """A SenderApi that has lists too. What is in them is kept by account, newest first."""

    def __init__(self) -> None:
        super().__init__()
        self.lists: dict[tuple[str, str], list[dict[str, Any]]] = {}
        #: Deliveries that were asked for again.
        self.again: list[str] = []

    def add(self, path: str, *items: dict[str, Any], account: str = "") -> None:
        """These are newer than what is there."""
        known = self.lists.setdefault((path, account), [])
        known[:0] = reversed(items)

    def _found(self, path: str, headers: dict[str, str]) -> Reply:
        parts = urlsplit(path)
        query = parse_qs(parts.query, keep_blank_values=True)
        where = (parts.path, headers.get("stripe-account", ""))
        if headers.get("authorization") != f"Bearer {KEY}":
            return super()._found(path, headers)
        if headers["method"] == "POST":
            self.again.append(parts.path)
            return (202, {}, b"{}")
        if where not in self.lists:
            return super()._found(parts.path, headers)
        items = self.lists[where]
        match parts.path.split("/")[1]:
            case "v1":
                return _stripe(items, query)
            case "repos":
                return _github(parts.path, items, query)
        return _paddle(items, query)


def _stripe(items: list[dict[str, Any]], query: dict[str, list[str]]) -> Reply:
    (limit,) = map(int, query.get("limit", ["10"]))
    types = query.get("types[]", [])
    if not 1 <= limit <= 100 or len(types) > 20:
        return error(400, type="invalid_request_error", param="limit or types")
    least, most = (
        int(query.get(f"created[{one}]", [d])[0]) for one, d in (("gte", "0"), ("lte", "9" * 11))
    )
    fits = [
        one
        for one in items
        if least <= one["created"] <= most
        and (not types or one["type"] in types)
        and one.get("status") == query.get("status", [one.get("status")])[0]
    ]
    if "starting_after" in query:
        (after,) = query["starting_after"]
        ids = [one["id"] for one in fits]
        if after not in ids:
            return error(400, code="resource_missing", param="starting_after")
        fits = fits[ids.index(after) + 1 :]
    page = {"object": "list", "data": fits[:limit], "has_more": len(fits) > limit}
    return (200, {}, json.dumps(page).encode())


def _github(path: str, items: list[dict[str, Any]], query: dict[str, list[str]]) -> Reply:
    (size,) = map(int, query.get("per_page", ["30"]))
    start = int(query.get("cursor", ["v1_0"])[0].removeprefix("v1_"))
    headers = {}
    if len(items) > start + size:
        asked = urlencode({"per_page": size, "cursor": f"v1_{start + size}"})
        # Another host: nothing that is sent may choose where to ask.
        headers["Link"] = f'<https://elsewhere.invalid{path}?{asked}>; rel="next"'
    return (200, headers, json.dumps(items[start : start + size]).encode())


def _paddle(items: list[dict[str, Any]], query: dict[str, list[str]]) -> Reply:
    if query.get("order_by") != ["id[DESC]"]:
        items = items[::-1]
    size = min(200, int(query.get("per_page", ["50"])[0]))
    ids = [one["event_id"] for one in items]
    start = ids.index(query["after"][0]) + 1 if "after" in query else 0
    page = {
        "data": items[start : start + size],
        "meta": {
            "pagination": {
                "per_page": size,
                "has_more": len(items) > start + size,
                "next": "https://elsewhere.invalid/events",
            }
        },
    }
    return (200, {}, json.dumps(page).encode())


@contextmanager
def sender_lists() -> Iterator[SenderLists]:
    lists = SenderLists()
    with sender_api(lists):
        yield lists
