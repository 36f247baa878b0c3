"""Reads, compares and renders what the configuration selects from an event's JSON body."""

import json
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import ge, gt, le, lt
from re import _constants, _parser  # type: ignore[attr-defined]  # undocumented, but stable
from typing import Any

import msgspec

KEY_CHARS_MAX = 500
EXPRESSION_CHARS_MAX = 500
PATTERN_CHARS_MAX = 500
MATCH_CHARS_MAX = 256
#: Steps of one search, as `_cost` counts them: about a fifth of a second.
STEPS_MAX = 2_097_152
TEMPLATE_DEPTH_MAX = 32
SHOWN_CHARS_MAX = 60

# These names are ours at the top of a document, whether or not they have a value yet.
RESERVED = frozenset({"_event", "_workspace", "_resource", "_grant", "_message", "_alert"})
# What `_event` and `_resource` say, and which of our names a rule may take.
EVENT_FIELDS = ("source", "account", "id", "type", "received_ms")
RESOURCE_FIELDS = (
    *("kind", "id", "state", "fields", "version"),
    *("terminal", "deleted", "contested"),
)
_OWN_FIELDS = {"_event": EVENT_FIELDS, "_resource": RESOURCE_FIELDS}
_OFFERED = ("_event", "_workspace", "_resource")

#: Why a text can not be rendered whose event has no such value.
MISSING = "is missing"

OPERATORS = ("eq", "ne", "gt", "ge", "lt", "le", "in", "exists", "matches")

#: A part of an expression as the library for JMESPath has it: `type`, `value`, `children`.
Node = dict[str, Any]
Finder = Callable[["Scope"], object]
Judge = Callable[[object], bool]
Renderer = Callable[["Scope"], object]


class Unjudgeable(Exception):
    """The event can't be judged as it stands; names the path and says why."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
        self.why = why


class Scope:
    """What paths are looked up in: the body, and our own names, which replace the sender's.

    The keys of `own` are among RESERVED; one that is absent is null, whatever the sender wrote.
    """

    __slots__ = ("document", "own")

    def __init__(self, document: object, own: dict[str, object]) -> None:
        self.document = document
        self.own = own

    def merged(self) -> object:
        """The document with our names in it; a body that is no object stays as it is."""
        if not isinstance(self.document, dict):
            return self.document
        theirs = {name: value for name, value in self.document.items() if name not in RESERVED}
        return theirs | self.own


class Path(msgspec.Struct, frozen=True, eq=False):
    """One JMESPath expression, or several of which the first that is not null counts.

    `value(scope)` looks it up; it raises Unjudgeable where a function is given what it can't take.
    `shows_root`: the whole document may be read at once, our names included, as by `@` or `*`.
    """

    text: str
    value: Finder
    shows_root: bool
    _names: frozenset[str]

    @classmethod
    def compile(cls, expression: str | list[str]) -> "Path":
        """Raises ValueError in words."""
        expressions = expression if isinstance(expression, list) else [expression]
        if not expressions:
            raise ValueError("needs at least one path")
        parsed = [_parse(one) for one in expressions]
        trees = [one.tree for one in parsed]
        for tree in trees:
            _check_own_names(tree)
        kinds = {node["type"] for tree in trees for node in nodes(tree)}
        finders = [_finder(one) for one in parsed]
        return cls(
            text=" or ".join(expressions),
            value=finders[0] if len(finders) == 1 else _first(finders),
            shows_root=not kinds.isdisjoint(("current", "value_projection")),
            _names=frozenset().union(*map(_names_at_root, trees)),
        )

    def uses_own(self, name: str) -> bool:
        """Whether one of RESERVED is looked up by its name."""
        return name in self._names


class Comparison(msgspec.Struct, frozen=True, eq=False):
    """One path of a condition, and what its value must be."""

    path: Path
    judge: Judge
    expected: str


class Condition(msgspec.Struct, frozen=True, eq=False):
    """Comparisons that must all hold, in any order."""

    comparisons: tuple[Comparison, ...]

    @classmethod
    def compile(cls, table: Mapping[str, object]) -> "Condition":
        """From `path = literal | list | operators`; raises ValueError in words."""
        if not table:
            raise ValueError("needs at least one `path = value`")
        comparisons = []
        for expression, want in table.items():
            path = Path.compile(expression)
            for operator, literal in _operators(want):
                judge, expected = _judge(operator, literal)
                comparisons.append(Comparison(path=path, judge=judge, expected=expected))
        return cls(comparisons=tuple(comparisons))

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(comparison.path for comparison in self.comparisons)

    def holds(self, scope: Scope) -> bool:
        """Raises Unjudgeable where a comparison has nothing it can compare and no other is false.

        A false one decides, wherever it stands: the order of a TOML table means nothing.
        """
        return self._first_false(scope) is None

    def unmet(self, scope: Scope) -> str | None:
        """The first comparison that does not hold, in words; None if all do; raises as `holds`."""
        comparison = self._first_false(scope)
        if comparison is None:
            return None
        value = _shown(comparison.path.value(scope))
        return f"{comparison.path.text} is {value}, expected {comparison.expected}"

    def _first_false(self, scope: Scope) -> Comparison | None:
        unjudged: Unjudgeable | None = None
        for comparison in self.comparisons:
            try:
                if not comparison.judge(comparison.path.value(scope)):
                    return comparison
            except _WrongType as error:
                unjudged = unjudged or Unjudgeable(comparison.path.text, str(error))
            except Unjudgeable as error:
                unjudged = unjudged or error
        if unjudged is not None:
            raise unjudged
        return None


class Template(msgspec.Struct, frozen=True, eq=False):
    """A JSON value whose texts may hold `{path}`; `{{` and `}}` stand for the braces."""

    paths: tuple[Path, ...]
    _render: Renderer

    @classmethod
    def compile(cls, value: object) -> "Template":
        """Raises ValueError in words."""
        paths: list[Path] = []
        render = _renderer(value, paths, TEMPLATE_DEPTH_MAX)
        return cls(paths=tuple(paths), _render=render)

    def render(self, scope: Scope) -> object:
        """A text that is one placeholder keeps the JSON type, null included.

        Raises Unjudgeable for a null within a longer text.
        """
        return self._render(scope)


class Statement(msgspec.Struct, frozen=True, eq=False):
    """One SQL statement whose `{path}` placeholders are bound parameters."""

    sql: str
    paths: tuple[Path, ...]

    @classmethod
    def compile(cls, text: str) -> "Statement":
        """Raises ValueError in words."""
        if "\0" in text or not text.strip():
            raise ValueError("is not a statement (write one SQL statement)")
        pieces = _pieces(text)
        marked = "".join("\0" if isinstance(piece, Path) else piece for piece in pieces)
        _check_sql(marked)
        paths = tuple(piece for piece in pieces if isinstance(piece, Path))
        return cls(sql=marked.replace("\0", "?"), paths=paths)

    def bind(self, scope: Scope) -> tuple[str | int | float | None, ...]:
        """The parameters of `sql`: booleans as 0 and 1, lists and objects as JSON text.

        Raises Unjudgeable for what SQLite can't hold.
        """
        return tuple(_bound(path.value(scope), path.text) for path in self.paths)


def key_text(value: object, what: str) -> str:
    """A subject or customer as text; raises Unjudgeable unless a non-empty text or an integer.

    `what` names the path. At most KEY_CHARS_MAX characters, none of them a control character.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        # Python refuses to write out integers of thousands of digits.
        value = str(value) if abs(value) < 10**KEY_CHARS_MAX else "9" * (KEY_CHARS_MAX + 1)
    if not isinstance(value, str):
        raise Unjudgeable(what, f"is {_kind(value)}, expected a text or an integer")
    if not value.strip():
        raise Unjudgeable(what, "is empty")
    if len(value) > KEY_CHARS_MAX:
        raise Unjudgeable(what, f"is longer than {KEY_CHARS_MAX} characters")
    if _UNPRINTABLE.search(value):
        raise Unjudgeable(what, "holds a control character")
    return value


# Paths


class Parsed(msgspec.Struct, frozen=True, eq=False):
    """An expression; `search` is None where its steps say all."""

    tree: Node
    search: Finder | None = None


def _parse(expression: str) -> Parsed:
    if len(expression) > EXPRESSION_CHARS_MAX:
        raise ValueError(f"is longer than {EXPRESSION_CHARS_MAX} characters (use a shorter path)")
    if _PLAIN.fullmatch(expression):
        return Parsed(_plain_tree(expression))
    # Most paths are plain, and the library is slow to import and to parse.
    from receiver import expressions

    return expressions.parse(expression)


def _plain_tree(expression: str) -> Node:
    found = _PLAIN_STEP.findall(expression)
    children: list[Node] = [
        {"type": "field", "value": name, "children": []}
        if name
        else {"type": "index", "value": int(index), "children": []}
        for name, index in found
    ]
    return {"type": "subexpression", "children": children}


def nodes(tree: Node) -> Iterator[Node]:
    yield tree
    for child in tree["children"]:
        # The children of a slice are numbers.
        if isinstance(child, dict):
            yield from nodes(child)


def _finder(parsed: Parsed) -> Finder:
    steps = _steps(parsed.tree)
    if not steps:
        assert parsed.search is not None, "a path that is plain has steps"
        return parsed.search
    own = steps[0] in RESERVED
    if all(isinstance(step, str) for step in steps):
        return _by_names(steps, own)
    return _by_steps(steps, own)


def _first(finders: Sequence[Finder]) -> Finder:
    def find(scope: Scope) -> object:
        for finder in finders:
            found = finder(scope)
            if found is not None:
                return found
        return None

    return find


def _steps(tree: Node) -> tuple[str | int, ...] | None:
    """Names and indexes of a path that has nothing else; None for every other expression."""
    kind = tree["type"]
    if kind in ("field", "index"):
        return (tree["value"],)
    if kind == "identity":
        return ()
    if kind not in ("subexpression", "index_expression"):
        return None
    steps: tuple[str | int, ...] = ()
    for child in tree["children"]:
        inner = _steps(child)
        if inner is None:
            return None
        steps += inner
    return steps


def _by_names(names: Sequence[str | int], own: bool) -> Finder:
    def find(scope: Scope) -> object:
        value: Any = scope.own if own else scope.document
        try:
            for name in names:
                value = value.get(name)
        # Of what JSON decodes to, only objects have `get`.
        except AttributeError:
            return None
        return value

    return find


def _by_steps(steps: Sequence[str | int], own: bool) -> Finder:
    def find(scope: Scope) -> object:
        value: object = scope.own if own else scope.document
        for step in steps:
            if isinstance(step, str):
                value = value.get(step) if isinstance(value, dict) else None
            elif isinstance(value, list) and -len(value) <= step < len(value):
                value = value[step]
            else:
                return None
        return value

    return find


def _names_at_root(tree: Node) -> set[str]:
    steps = _steps(tree)
    if steps:
        return {step for step in steps[:1] if isinstance(step, str)}
    # Which fields of a longer expression are looked up at the top is not worth working out.
    return {node["value"] for node in nodes(tree) if node["type"] == "field"}


def _check_own_names(tree: Node) -> None:
    """Raises ValueError for a name at the top that only looks like one of ours."""
    for name, *following in _looked_up_at_root(tree):
        if name.startswith("_") and name not in RESERVED:
            raise ValueError(
                f"{cut_short(name)} is none of our names{nearest_or_all(name, _OFFERED)}; "
                f"a field of the body that is called so is written @.{cut_short(name)}"
            )
        known = _OWN_FIELDS.get(name)
        if known is not None and following and following[0] not in known:
            hint = nearest_or_all(following[0], known)
            raise ValueError(f"{name} has no {cut_short(following[0])}{hint}")


def _looked_up_at_root(tree: Node) -> Iterator[tuple[str, ...]]:
    """The names that are looked up in the document itself, each with the step that follows."""
    steps = _steps(tree)
    kind = tree["type"]
    if steps:
        if isinstance(steps[0], str):
            yield tuple(map(str, steps[:2]))
    elif kind in _FROM_FIRST:
        # All but the first look into what the first has found.
        yield from _looked_up_at_root(tree["children"][0])
    elif kind != "expref":
        for child in tree["children"]:
            yield from _looked_up_at_root(child)


# Comparisons


class _WrongType(Exception):
    """A comparison has a value that it can't judge."""


def _operators(want: object) -> list[tuple[str, object]]:
    if isinstance(want, list):
        return [("in", want)]
    if not isinstance(want, dict):
        return [("eq", want)]
    if not want:
        raise ValueError(f"needs an operator ({' '.join(OPERATORS)})")
    for operator in want:
        if operator not in OPERATORS:
            raise ValueError(_operator_words(operator))
    return list(want.items())


def _operator_words(operator: str) -> str:
    meant = _OPERATORS_ELSEWHERE.get(operator.lower())
    hint = f" (did you mean {meant}?)" if meant else nearest(operator, OPERATORS)
    if not hint:
        hint = ' (a path with dots is one key in quotes: "data.object.status")'
    return f"{cut_short(operator)!r} is not an operator; they are {' '.join(OPERATORS)}{hint}"


def _judge(operator: str, literal: object) -> tuple[Judge, str]:
    """The comparison, and what it expects in words; raises ValueError."""
    if operator == "in":
        return _one_of(literal)
    if operator == "exists":
        return _exists(literal)
    if operator == "matches":
        return _matches(literal)
    if operator in ("eq", "ne"):
        equal = _equals(literal, operator)
        if operator == "eq":
            return equal, _shown(literal)
        return lambda value: not equal(value), f"anything but {_shown(literal)}"
    return _ordering(operator, literal)


def _equals(literal: object, operator: str) -> Judge:
    if isinstance(literal, bool):
        return lambda value: value is literal
    if isinstance(literal, str):
        return lambda value: value == literal
    if _is_finite(literal):
        return lambda value: value == literal and not isinstance(value, bool)
    raise ValueError(f"{operator} compares with a text, a number, true or false{_DATES}")


def _one_of(literal: object) -> tuple[Judge, str]:
    if not isinstance(literal, list) or not literal:
        raise ValueError("in needs a list of at least one text, number, true or false")
    judges = [_equals(one, "in") for one in literal]
    words = cut_short(f"one of {', '.join(map(_shown, literal))}")
    if all(isinstance(one, str) for one in literal):
        texts = frozenset(literal)
        return lambda value: isinstance(value, str) and value in texts, words
    return lambda value: any(judge(value) for judge in judges), words


def _exists(literal: object) -> tuple[Judge, str]:
    if not isinstance(literal, bool):
        raise ValueError("exists needs true or false")
    return lambda value: (value is not None) is literal, "a value" if literal else "none"


def _ordering(operator: str, literal: object) -> tuple[Judge, str]:
    compare = _COMPARISONS[operator]
    text = isinstance(literal, str)
    if not text and not _is_number(literal):
        raise ValueError(f"{operator} compares with a number or a text{_DATES}")
    needed = "a text" if text else "a number"

    def judge(value: object) -> bool:
        if isinstance(value, str) if text else _is_number(value):
            return compare(value, literal)
        also = "" if value is None else f": it needs {needed}"
        raise _WrongType(f"is {_kind(value)}, so {operator} can't be judged{also}")

    return judge, f"{operator} {_shown(literal)}"


def _matches(literal: object) -> tuple[Judge, str]:
    if not isinstance(literal, str):
        raise ValueError("matches needs a regular expression as text")
    pattern = _pattern(literal)

    def judge(value: object) -> bool:
        if not isinstance(value, str):
            raise _WrongType(f"is {_kind(value)}, so matches can't be judged")
        # A part of the text could give either answer.
        if len(value) > MATCH_CHARS_MAX:
            raise _WrongType(f"is longer than the {MATCH_CHARS_MAX} characters matches looks at")
        return pattern.search(value) is not None

    return judge, f"a match of {cut_short(literal)!r}"


def _pattern(text: str) -> re.Pattern[str]:
    if len(text) > PATTERN_CHARS_MAX:
        raise ValueError(f"the expression of matches is longer than {PATTERN_CHARS_MAX} characters")
    try:
        # Python warns about what a later version may read otherwise.
        with warnings.catch_warnings(action="ignore"):
            pattern = re.compile(text)
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        raise ValueError(f"matches has a bad regular expression: {error}") from error
    # The parser's own reading: one of ours could differ from it, and then be wrong.
    parsed = _parser.parse(text)
    anchored = not pattern.flags & re.MULTILINE and next(iter(parsed), None) in _BEGINNINGS
    _cost(parsed, 1 if anchored else _FREE)
    return pattern


def _cost(parsed: Any, ways: int) -> tuple[int, int]:
    """In how many ways the items can match, and the steps to try them all, from `ways` on.

    Raises ValueError if a text of MATCH_CHARS_MAX could take too many: a search holds up all
    other work, and texts are chosen by strangers.
    """
    steps = 0
    for operator, argument in parsed:
        more, each = _item_cost(operator, argument)
        steps += ways * each
        ways *= more
        if max(ways, steps) > STEPS_MAX:
            raise ValueError(_TOO_SLOW)
    return ways, steps


def _item_cost(operator: Any, argument: Any) -> tuple[int, int]:
    if operator in _PLAIN_ITEMS:
        return 1, 1
    if operator in _REPEATS:
        return _repeat_cost(*argument)
    if operator is _constants.SUBPATTERN:
        return _cost(argument[3], 1)
    if operator is _constants.BRANCH:
        branches = [_cost(branch, 1) for branch in argument[1]]
        return sum(ways for ways, _ in branches), sum(steps for _, steps in branches)
    raise ValueError("matches takes no look-around, back-reference, condition or atomic group")


def _repeat_cost(least: int, most: int, body: Any) -> tuple[int, int]:
    ways, steps = _cost(body, 1)
    if body.getwidth()[0] == 0 or (ways > 1 and most > _FEW):
        raise ValueError(_TOO_SLOW)
    if ways > 1:
        return (most - least + 1) * ways**most, steps * ways**most
    # A single character repeats within one step.
    alone = len(body) == 1 and body[0][0] in _PLAIN_ITEMS
    return min(most - least + 1, _FREE), steps if alone else steps * min(most, _FREE)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _is_finite(value: object) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


# Templates and statements


def _pieces(text: str) -> list[str | Path]:
    """Literal texts and the paths between them."""
    pieces: list[str | Path] = []
    literal = ""
    at = 0
    while at < len(text):
        if text.startswith(("{{", "}}"), at):
            literal, at = literal + text[at], at + 2
        elif text[at] == "}":
            raise ValueError("has a } without its { (write }} for a brace)")
        elif text[at] == "{":
            end = _placeholder_end(text, at + 1)
            pieces += [literal, Path.compile(text[at + 1 : end].strip())]
            literal, at = "", end + 1
        else:
            brace = _BRACE.search(text, at)
            end = brace.start() if brace else len(text)
            literal, at = literal + text[at:end], end
    return [piece for piece in [*pieces, literal] if piece != ""]


def _placeholder_end(text: str, start: int) -> int:
    depth = 0
    for token in re.compile(_IN_PLACEHOLDER).finditer(text, start):
        if token[0] == "{":
            depth += 1
        elif token[0] == "}":
            if depth == 0:
                return token.start()
            depth -= 1
    raise ValueError("has a { without its } (write {{ for a brace)")


def _renderer(value: object, paths: list[Path], depth: int) -> Renderer:
    if depth == 0:
        raise ValueError(f"is nested deeper than {TEMPLATE_DEPTH_MAX} levels")
    if isinstance(value, str):
        return _text_renderer(_pieces(value), paths)
    if isinstance(value, dict):
        fields = [(name, _renderer(one, paths, depth - 1)) for name, one in value.items()]
        return lambda scope: {name: render(scope) for name, render in fields}
    if isinstance(value, list):
        items = [_renderer(one, paths, depth - 1) for one in value]
        return lambda scope: [render(scope) for render in items]
    if value is None or _is_finite(value):
        return lambda scope: value
    raise ValueError(f"holds something that JSON has no word for{_DATES}")


def _text_renderer(pieces: list[str | Path], paths: list[Path]) -> Renderer:
    paths.extend(piece for piece in pieces if isinstance(piece, Path))
    if len(pieces) == 1 and isinstance(pieces[0], Path):
        return pieces[0].value

    def render(scope: Scope) -> str:
        return "".join(
            _as_text(piece.value(scope), piece.text) if isinstance(piece, Path) else piece
            for piece in pieces
        )

    return render


def _as_text(value: object, what: str) -> str:
    if value is None:
        raise Unjudgeable(what, MISSING)
    return value if isinstance(value, str) else _json(value, what)


def _json(value: object, what: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise Unjudgeable(what, "is nested too deeply or too large to write as JSON") from error


def _check_sql(marked: str) -> None:
    """Raises ValueError unless every \\0 in the text can be a bound parameter."""
    ended = False
    for token in re.finditer(_SQL_PIECE, marked):
        kind = token.lastgroup
        if kind in ("quoted", "comment") and "\0" in token[0]:
            raise ValueError(
                "has a {...} within quotes or a comment, where it can't be a parameter "
                "(take the quotes away, or write {{ and }} for braces)"
            )
        if kind in ("blank", "comment"):
            continue
        if ended:
            raise ValueError("holds several statements (write each as a text of its own)")
        if kind == "parameter":
            raise ValueError(f"has a parameter of its own, {token[0]} (write {{path}} instead)")
        if kind == "unclosed":
            raise ValueError(f"has a {token[0]} that is not closed")
        ended = kind == "end"


def _bound(value: object, what: str) -> str | int | float | None:
    if value is None or isinstance(value, float):
        return value
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise Unjudgeable(what, "is an integer of more than 64 bits")
        return int(value)
    text = value if isinstance(value, str) else _json(value, what)
    if not text.isascii() and re.search(_SURROGATE, text):
        raise Unjudgeable(what, "holds half a surrogate pair, which is no text")
    return text


# Words


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean X?)`, or nothing where no known word is near."""
    # Slow to import, and only for what is wrong.
    from difflib import get_close_matches

    found = get_close_matches(word[:_WORD_CHARS_MAX], known, n=1)
    return f" (did you mean {found[0]}?)" if found else ""


def nearest_or_all(word: str, known: Collection[str]) -> str:
    """As `nearest`; where none is near, all of them: ` (there are: X, Y)`."""
    return nearest(word, known) or f" (there are: {', '.join(known) or 'none'})"


def _shown(value: object) -> str:
    if isinstance(value, str):
        return repr(cut_short(value))
    if isinstance(value, bool):
        return "true" if value else "false"
    if _is_number(value) and not (isinstance(value, int) and value.bit_length() > _SHOWN_BITS):
        return str(value)
    return _kind(value)


def _kind(value: object) -> str:
    if value is None:
        return "missing"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a text"
    return "a list" if isinstance(value, list) else "an object"


def cut_short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS_MAX else text[: SHOWN_CHARS_MAX - 3] + "..."


# What an open-ended repeat counts as: places in a text of MATCH_CHARS_MAX, fewer since two of
# them share it. An unanchored search has one more.
_FREE = 64
# Repeats of what can match in several ways.
_FEW = 20
_TOO_SLOW = (
    "matches would take too long on some texts (write at most two of * and +, or three after a "
    "leading ^; none of them around another one, around | or around what can be empty)"
)
_PLAIN_ITEMS = frozenset(
    {
        _constants.LITERAL,
        _constants.NOT_LITERAL,
        _constants.ANY,
        _constants.IN,
        _constants.AT,
    }
)
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
_BEGINNINGS = (
    (_constants.AT, _constants.AT_BEGINNING),
    (_constants.AT, _constants.AT_BEGINNING_STRING),
)
_SHOWN_BITS = 128
_WORD_CHARS_MAX = 100
# Expressions whose first part alone is looked up where they stand.
_FROM_FIRST = frozenset(
    {
        *("subexpression", "index_expression", "pipe", "flatten"),
        *("projection", "filter_projection", "value_projection"),
    }
)
_DATES = " (write a date as text, in quotes)"
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "gt": gt,
    "ge": ge,
    "lt": lt,
    "le": le,
}
_OPERATORS_ELSEWHERE = {
    "gte": "ge",
    "=>": "ge",
    ">=": "ge",
    "lte": "le",
    "=<": "le",
    "<=": "le",
    ">": "gt",
    "<": "lt",
    "=": "eq",
    "==": "eq",
    "equals": "eq",
    "!=": "ne",
    "<>": "ne",
    "not": "ne",
    "neq": "ne",
    "regex": "matches",
    "re": "matches",
    "~": "matches",
    "present": "exists",
    "one_of": "in",
    "any": "in",
}
# Names and indexes alone: what most paths are.
_PLAIN = re.compile(
    r"[A-Za-z_][A-Za-z0-9_]*(?:\[\d{1,6}\])*(?:\.[A-Za-z_][A-Za-z0-9_]*(?:\[\d{1,6}\])*)*", re.ASCII
)
_PLAIN_STEP = re.compile(r"([A-Za-z_]\w*)|\[(\d+)\]", re.ASCII)
_UNPRINTABLE = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029\\ud800-\\udfff]")
# Few configs and events need these: compiled by their first use, like others that are texts.
_SURROGATE = "[\\ud800-\\udfff]"
_BRACE = re.compile(r"[{}]")
_IN_PLACEHOLDER = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|`(?:\\.|[^`\\])*`|[{}]"""
_SQL_PIECE = (
    r"""(?s)(?P<blank>\s+)"""
    r"""|(?P<quoted>'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\])"""
    r"""|(?P<comment>--[^\n]*|/\*.*?\*/)"""
    r"""|(?P<unclosed>['"`\[]|/\*)"""
    r"""|(?P<word>[^\W\d][\w$]*)"""
    r"""|(?P<parameter>\?\d*|[:@$\#]\w+)"""
    r"""|(?P<end>;)|."""
)
