"""Reads a table of senders/NAME.toml that says what a sender's API is like."""

from collections.abc import Callable, Mapping

from receiver.select import Condition, Path, Scope, Template, Unjudgeable

#: Takes a key, and what is wrong with it.
Fail = Callable[[str, str], None]


class Described:
    """One table; what is wrong with it is told, and then left out."""

    def __init__(self, table: object, where: str, known: tuple[str, ...], fail: Fail) -> None:
        self.values: Mapping[str, object] = table if isinstance(table, dict) else {}
        self.where = where
        self._fail = fail
        if not isinstance(table, dict):
            fail(where, "must be a table")
        for key in self.values:
            if key not in known:
                self.fail(key, f"is unknown (known here: {', '.join(known)})")

    def fail(self, key: str, what: str) -> None:
        self._fail(f"{self.where}.{key}", what)

    def text(self, key: str) -> str | None:
        found = self.values.get(key)
        if found is None or (isinstance(found, str) and found.isprintable() and found.strip()):
            return found
        self.fail(key, "must be one line of text")
        return None

    def texts(self, key: str) -> tuple[str, ...]:
        found = self.values.get(key, [])
        if isinstance(found, list) and all(isinstance(one, str) and one for one in found):
            return tuple(found)
        self.fail(key, "must be a list of texts")
        return ()

    def number(self, key: str, default: int, most: int) -> int:
        found = self.values.get(key, default)
        if isinstance(found, int) and not isinstance(found, bool) and 0 <= found <= most:
            return found
        self.fail(key, f"must be a whole number up to {most}")
        return default

    def mapping(self, key: str) -> dict[str, str]:
        """A table of texts."""
        found = self.values.get(key, {})
        if isinstance(found, dict) and all(isinstance(one, str) for one in found.values()):
            return dict(found)
        self.fail(key, "must be a table of texts")
        return {}

    def path(self, key: str) -> Path | None:
        """A path, or a list of them of which the first that is not null counts."""
        found = self.values.get(key)
        if found is None:
            return None
        try:
            texts = found if isinstance(found, list) else [found]
            if not all(isinstance(one, str) for one in texts):
                raise ValueError("must be a path, or a list of paths")
            return Path.compile([str(one) for one in texts])
        except ValueError as error:
            self.fail(key, str(error))
            return None

    def condition(self, key: str) -> Condition | None:
        found = self.values.get(key)
        if found is None:
            return None
        try:
            return Condition.compile(found if isinstance(found, dict) else {})
        except ValueError as error:
            self.fail(key, str(error))
            return None

    def template(self, key: str) -> Template | None:
        found = self.values.get(key)
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
