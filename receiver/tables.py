"""Reads one table of the configuration after the other, and collects what is wrong with them."""

import ipaddress
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

from receiver import select
from receiver.select import Condition, Template, nearest

NAME_CHARS_MAX = 100
#: Characters of one problem, and of a word in it that is shown whole: a path may be that long.
LINE_CHARS_MAX = 1_000
WORD_CHARS_MAX = 300

# What a name may be, as a problem says it.
NAME_WORDS = (
    f"expected a name of at most {NAME_CHARS_MAX} characters: "
    "a-z, 0-9, then also . _ and - (it is part of keys and addresses)"
)

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Choice = TypeVar("Choice", bound=str)


class Report:
    """What was found in one file; each line begins with its key path."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.warnings: list[str] = []

    def problem(self, where: str, words: str) -> None:
        self.problems.append(_line(f"{where}: {words}"))

    def warning(self, where: str, words: str) -> None:
        self.warnings.append(_line(f"{where}: {words}"))


class Table:
    """One table of the file; what is unknown or of the wrong kind is reported and left out."""

    def __init__(
        self, report: Report, where: str, values: Mapping[str, object], known: Collection[str] = ()
    ) -> None:
        self.report = report
        self.where = where
        self.values = values
        if known:
            self.allow(known)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def allow(self, known: Collection[str]) -> None:
        """Report every key but these."""
        for key in self.values:
            if key not in known:
                hint = nearest(key, known) or f" (known here: {', '.join(known)})"
                self.problem(key, f"unknown key{hint}")

    def at(self, key: str) -> str:
        """The key's path from the top of the file."""
        key = key if _BARE_KEY.fullmatch(key) else json.dumps(cut(key), ensure_ascii=False)
        return f"{self.where}.{key}" if self.where else key

    def problem(self, key: str, words: str) -> None:
        self.report.problem(self.at(key), words)

    def warning(self, key: str, words: str) -> None:
        self.report.warning(self.at(key), words)

    def require(self, key: str, words: str) -> None:
        if key not in self.values:
            self.problem(key, f"is missing; {words}")

    def _typed(self, key: str, wanted: type, words: str) -> object | None:
        value = self.values.get(key)
        if value is None or type(value) is wanted:
            return value
        self.problem(key, f"expected {words}, got {kind_of(value)}")
        return None

    def text(self, key: str) -> str | None:
        """A text with something in it, and no control characters."""
        value = cast(str | None, self._typed(key, str, "a string"))
        if value is None or (value.strip() and value.isprintable()):
            return value
        self.problem(key, "is empty or has a control character; write one line of text")
        return None

    def name(self, key: str) -> str | None:
        value = cast(str | None, self._typed(key, str, "a string"))
        if value is None or is_name(value):
            return value
        self.problem(key, NAME_WORDS)
        return None

    def lines(self, key: str) -> str | None:
        """A text with something in it, of as many lines as it likes."""
        value = cast(str | None, self._typed(key, str, "a string"))
        if value is None or value.strip():
            return value
        self.problem(key, "is empty; write a text")
        return None

    def choice(self, key: str, options: Sequence[Choice]) -> Choice | None:
        text = self.text(key)
        if text is None or text in options:
            return next((option for option in options if option == text), None)
        *others, last = (f'"{option}"' for option in options)
        self.problem(key, f"expected {', '.join(others)} or {last}, got {cut(text)!r}")
        return None

    def boolean(self, key: str) -> bool | None:
        return cast(bool | None, self._typed(key, bool, "true or false"))

    def integer(self, key: str, least: int, most: int) -> int | None:
        value = cast(int | None, self._typed(key, int, "an integer"))
        if value is None or least <= value <= most:
            return value
        self.problem(key, f"expected {least} to {most}")
        return None

    def seconds(self, key: str, most: int) -> float | None:
        """More than none of them, and at most `most`."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.problem(key, f"expected a number of seconds, got {kind_of(value)}")
            return None
        if not 0 < value <= most:
            self.problem(key, f"expected more than 0 and at most {most} seconds")
            return None
        return value

    def items(self, key: str) -> list[object]:
        return cast(list[object], self._typed(key, list, "a list") or [])

    def texts(self, key: str) -> tuple[str, ...]:
        items = self.items(key)
        found = tuple(item for item in items if isinstance(item, str) and item)
        if len(found) < len(items):
            self.problem(key, "expected a list of strings, none of them empty")
        return found

    def table(self, key: str, known: Collection[str] = ()) -> "Table | None":
        value = cast(dict[str, object] | None, self._typed(key, dict, "a table"))
        return None if value is None else Table(self.report, self.at(key), value, known)

    def file(self, key: str, directory: Path) -> Path | None:
        text = self.text(key)
        return None if text is None else directory / text

    def path(self, key: str) -> select.Path | None:
        """A JMESPath, or a list of them."""
        value = self.values.get(key)
        several = isinstance(value, list) and all(isinstance(one, str) for one in value)
        if value is None or not (several or isinstance(value, str)):
            self._typed(key, str, "a path or a list of paths")
            return None
        try:
            return select.Path.compile(cast(str | list[str], value))
        except ValueError as error:
            self.problem(key, f"{error}; write a path such as data.object.id")
            return None

    def condition(self, key: str) -> Condition | None:
        table = self.table(key)
        if table is None:
            return None
        before = len(self.report.problems)
        if not table.values:
            self.problem(key, 'is empty; write { "data.object.status" = "paid" }, or leave it out')
        for path, want in table.values.items():
            # An operator at a time, so that each bad one is named.
            several = want.items() if isinstance(want, dict) and want else ()
            parts: list[object] = [{name: literal} for name, literal in several]
            for part in parts or [want]:
                try:
                    Condition.compile({path: part})
                except ValueError as error:
                    table.problem(path, str(error))
        if len(self.report.problems) > before:
            return None
        return Condition.compile(table.values)

    def template(self, key: str) -> Template | None:
        """A template of whatever is there."""
        if key not in self.values:
            return None
        try:
            return Template.compile(self.values[key])
        except ValueError as error:
            self.problem(key, f"{error}; correct the template")
            return None

    def networks(self, key: str) -> tuple[Network, ...]:
        found = (self._network(key, text) for text in self.texts(key))
        return tuple(network for network in found if network is not None)

    def _network(self, key: str, text: str) -> Network | None:
        try:
            around = ipaddress.ip_network(text, strict=False)
        except ValueError:
            self.problem(key, f"{cut(text)!r} is no address or network; write 10.0.0.0/8")
            return None
        try:
            return _unmapped(ipaddress.ip_network(text))
        except ValueError:
            self.problem(key, f"{text!r} is an address within a network; write {around}")
            return None


def _unmapped(network: Network) -> Network:
    """IPv4 within IPv6 as IPv4, which is how the peers' addresses are compared."""
    mapped = network.version == 6 and network.network_address.ipv4_mapped
    if not mapped or network.prefixlen < _MAPPED_PREFIX:
        return network
    return ipaddress.IPv4Network((mapped, network.prefixlen - _MAPPED_PREFIX))


def kind_of(value: object) -> str:
    for wanted, words in _KINDS:
        if isinstance(value, wanted):
            return words
    return "a date or time"


def cut(text: str) -> str:
    return text if len(text) <= NAME_CHARS_MAX else text[:NAME_CHARS_MAX] + "..."


def _line(text: str) -> str:
    """One that can be read, whatever stands in the file: where and what to do stay."""
    text = _LONG_WORD.sub(lambda found: cut(found[0]), text)
    if len(text) > LINE_CHARS_MAX:
        half = LINE_CHARS_MAX // 2 - 3
        text = f"{text[:half]} ... {text[-half:]}"
    return text


def is_name(text: str) -> bool:
    return len(text) <= NAME_CHARS_MAX and _NAME.fullmatch(text) is not None


_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "true or false"),
    (str, "a string"),
    (int, "an integer"),
    (float, "a float"),
    (list, "a list"),
    (dict, "a table"),
)
_LONG_WORD = re.compile(rf"\S{{{WORD_CHARS_MAX + 1},}}")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*", re.ASCII)
# Bits of an IPv6 address before the IPv4 one in it.
_MAPPED_PREFIX = 96
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
