"""The newest rows of several ranges of one index, without reading the ranges."""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def newest(
    ranges: Iterable[Iterator[T]], limit: int, newness: Callable[[T], tuple[int, ...]]
) -> list[T]:
    """The first `limit` of all, where each range comes newest first."""
    merged = heapq.merge(*ranges, key=newness, reverse=True)
    return list(itertools.islice(merged, limit))


def leaps(following: Callable[[str], str | None], first: str = "") -> Iterator[str]:
    """The different values of an index's column, each found from the one before it.

    `following` gives the least value above another; `first` is below all of them.
    """
    value = following(first)
    while value is not None:
        yield value
        value = following(value)
