"""Reads a table of a sender's data, with every problem; and looks where it says."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

from receiver.extract import Locator, parse_locator
from receiver.select import Condition, Path, Scope, Template, Unjudgeable, nearest_or_all

T = TypeVar("T")


class Described:
    """One table; what is wrong with it is a line of `problems`, and then left out."""

    def __init__(self, table: object, where: str = "", problems: list[str] | None = None) -> None:
        self.where = where
        self.problems = [] if problems is None else problems
        self.table: Mapping[str, object] = table if isinstance(table, Mapping) else {}
        self.failed = not isinstance(table, Mapping)
        if self.failed:
            self.problems.append(f"{where or 'scheme'}: must be a table")

    def inner(self, key: str, table: object) -> "Described":
        return Described(table, self._at(key), self.problems)

    def fail(self, key: str, what: str) -> None:
        self.failed = True
        self.problems.append(f"{self._at(key)}: {what}")

    def _at(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def unknown(self, known: Sequence[str]) -> None:
        for key in self.table:
            if key not in known:
                self.fail(key, f"is not a known key{nearest_or_all(key, known)}")

    def attempt(self, key: str, parse: Callable[[str], T], text: str) -> T | None:
        try:
            return parse(text)
        except ValueError as error:
            self.fail(key, str(error))
            return None

    def text(self, key: str) -> str | None:
        value = self.table.get(key)
        if value is None or (isinstance(value, str) and value):
            return value
        self.fail(key, "must be a text, not empty")
        return None

    def line(self, key: str) -> str | None:
        text = self.text(key)
        if text is None or (text.isprintable() and text.strip()):
            return text
        self.fail(key, "must be one line of text")
        return None

    def octets(self, key: str) -> bytes | None:
        text = self.text(key)
        return None if text is None else text.encode()

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.table.get(key, [])
        values = [value] if isinstance(value, str) else value
        if isinstance(values, list) and all(isinstance(v, str) and v for v in values):
            return tuple(values)
        self.fail(key, "must be a text or a list of texts, none of them empty")
        return ()

    def mapping(self, key: str) -> dict[str, str]:
        """A table of texts."""
        found = self.table.get(key, {})
        if isinstance(found, dict) and all(isinstance(one, str) for one in found.values()):
            return dict(found)
        self.fail(key, "must be a table of texts")
        return {}

    def choice(self, key: str, choices: Sequence[str]) -> str | None:
        text = self.text(key)
        if text is None or text in choices:
            return text
        self.fail(key, f"{text!r} must be one of {', '.join(choices)}")
        return None

    def truth(self, key: str) -> bool:
        value = self.table.get(key, False)
        if not isinstance(value, bool):
            self.fail(key, "must be true or false")
        return value is True

    def value(self, key: str) -> str | bool:
        value = self.table.get(key)
        if isinstance(value, str | bool) and value != "":
            return value
        self.fail(key, "must be true, false or a text")
        return ""

    def number(self, key: str, default: int, most: int) -> int:
        found = self.table.get(key, default)
        if type(found) is int and 0 <= found <= most:
            return found
        self.fail(key, f"must be a whole number up to {most}")
        return default

    def seconds(self, key: str) -> float | None:
        value = self.table.get(key)
        if value is None:
            return None
        if type(value) in (int, float) and 0 < cast(float, value) < math.inf:
            return cast(float, value)
        self.fail(key, "must be a number of seconds above 0")
        return None

    def locator(self, key: str) -> Locator | None:
        text = self.text(key)
        return None if text is None else self.attempt(key, parse_locator, text)

    def locators(self, key: str) -> tuple[Locator, ...]:
        found = (self.attempt(key, parse_locator, text) for text in self.texts(key))
        return tuple(locator for locator in found if locator is not None)

    def path(self, key: str) -> Path | None:
        """A path, or a list of them of which the first that is not null counts."""
        texts = self.texts(key)
        try:
            return Path.compile(list(texts)) if texts else None
        except ValueError as error:
            self.fail(key, str(error))
            return None

    def condition(self, key: str) -> Condition | None:
        found = self.table.get(key)
        if found is None:
            return None
        try:
            return Condition.compile(found if isinstance(found, dict) else {})
        except ValueError as error:
            self.fail(key, str(error))
            return None

    def template(self, key: str) -> Template | None:
        found = self.table.get(key)
        if found is None:
            return None
        try:
            return Template.compile(found)
        except ValueError as error:
            self.fail(key, str(error))
            return None


def holds(condition: Condition | None, document: object) -> bool:
    """Whether a condition is there, and is met; what can't be judged is not met."""
    try:
        return condition is not None and condition.holds(Scope(document, {}))
    except Unjudgeable:
        return False


def value(path: Path | None, document: object) -> object:
    """What stands at a path; None also where there is no path, or nothing that it can take."""
    try:
        return None if path is None else path.value(Scope(document, {}))
    except Unjudgeable:
        return None
