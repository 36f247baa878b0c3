"""JMESPath expressions that are more than a plain path: parsed, checked, and evaluated."""

import warnings
from collections.abc import Sequence
from typing import cast

import jmespath
from jmespath.exceptions import JMESPathTypeError, ParseError
from jmespath.functions import Functions
from jmespath.parser import ParsedResult

from receiver.select import Finder, Node, Parsed, Scope, Unjudgeable, cut_short, nearest, nodes


def parse(expression: str) -> Parsed:
    """Raises ValueError in words."""
    shown = repr(cut_short(expression))
    try:
        # The library warns about texts in backticks that are not JSON, and takes them.
        with warnings.catch_warnings(action="ignore"):
            parsed = jmespath.compile(expression)
    except ParseError as error:
        column = (error.lex_position or 0) + 1
        raise ValueError(f"{shown} is not a JMESPath (see column {column})") from error
    except (ValueError, RecursionError) as error:
        wrong = "nested too deeply" if isinstance(error, RecursionError) else "empty"
        raise ValueError(f"{shown} is not a JMESPath ({wrong})") from error
    tree = cast(Node, parsed.parsed)
    _check_functions(tree)
    return Parsed(tree, _search(expression, parsed))


def _check_functions(tree: Node) -> None:
    references = sum(node["type"] == "expref" for node in nodes(tree))
    for node in nodes(tree):
        if node["type"] == "function_expression":
            references -= _check_call(node["value"], node["children"])
    if references:
        raise ValueError("has an & that is not an argument of a function that takes one")


def _check_call(name: str, arguments: Sequence[Node]) -> int:
    """How many of the arguments are & references; raises ValueError for a call that can't work."""
    known = Functions.FUNCTION_TABLE.get(name)
    if known is None:
        raise ValueError(f"calls {name}(), which JMESPath lacks{nearest(name, _FUNCTIONS)}")
    signature = known["signature"]
    variadic = bool(signature[-1].get("variadic"))
    if len(arguments) < len(signature) or (len(arguments) > len(signature) and not variadic):
        raise ValueError(f"calls {name}() with {len(arguments)} arguments, not {len(signature)}")
    wanted = ["expref" in parameter["types"] for parameter in signature]
    return sum(
        want and argument["type"] == "expref"
        for want, argument in zip(wanted, arguments, strict=False)
    )


def _search(expression: str, parsed: ParsedResult) -> Finder:
    def find(scope: Scope) -> object:
        try:
            return cast(object, parsed.search(scope.merged()))
        # Functions of the library leak these for odd numbers and deep documents.
        except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
            raise Unjudgeable(expression, _runtime_words(error)) from error

    return find


def _runtime_words(error: Exception) -> str:
    if isinstance(error, JMESPathTypeError):
        # Its own text would repeat the value.
        return f"{error.function_name}() can't take a value of type {error.actual_type}"
    return "can't be evaluated on this event"


_FUNCTIONS = tuple(Functions.FUNCTION_TABLE)
