"""What the configuration selects, compares and renders, of well-formed and of hostile events."""

import time
from collections.abc import Callable, Mapping

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as trials
from hypothesis import strategies as st

from receiver.select import (
    EXPRESSION_CHARS_MAX,
    KEY_CHARS_MAX,
    MATCH_CHARS_MAX,
    PATTERN_CHARS_MAX,
    TEMPLATE_DEPTH_MAX,
    Condition,
    Path,
    Scope,
    Statement,
    Template,
    Unjudgeable,
    key_text,
)

# The first text of a fresh checkout builds tables of Unicode, and machines differ in speed.
STEADY = trials(deadline=None, suppress_health_check=[HealthCheck.too_slow])

EVENT = {"source": "stripe", "account": "", "id": "evt_1", "type": "invoice.paid"}
BODY: dict[str, object] = {
    "id": "evt_theirs",
    "_event": {"id": "forged"},
    "_workspace": "forged",
    "_grant": {"amount": 1_000_000},
    "data": {
        "object": {
            "id": "in_1",
            "status": "open",
            "amount": 5,
            "ratio": 1.0,
            "paid": True,
            "none": None,
            "empty": "",
            "tags": ["a", "b"],
            "lines": [{"price": {"id": "p1"}}, {"price": {"id": "p2"}}],
        }
    },
}

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["1e400", "NaN", "\ud800", "\0", "2020-01-01"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "_event", "x-y"]), inner, max_size=3)
    ),
    max_leaves=12,
)


def scope(document: object = BODY, **own: object) -> Scope:
    return Scope(document, {"_event": EVENT, **own})


def value(expression: str | list[str], document: object = BODY) -> object:
    return Path.compile(expression).value(scope(document))


def holds(table: Mapping[str, object], document: object) -> bool:
    return Condition.compile(table).holds(scope(document))


def rendered(template: object, document: object = BODY, **own: object) -> object:
    return Template.compile(template).render(scope(document, **own))


def raised(kind: type[Exception], run: Callable[[], object]) -> Exception | None:
    """The error of that kind, or None if there was none; any other is the test's failure."""
    try:
        run()
    except kind as error:
        return error
    return None


# Paths


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("data.object.id", "in_1"),
        ("data.object.lines[0].price.id", "p1"),
        ("data.object.lines[-1].price.id", "p2"),
        ("data.object.lines[2].price.id", None),
        ("data.object.lines[-3].price.id", None),
        ("data.object.lines.price", None),
        ("data.object.id.more", None),
        ("data.object.id[0]", None),
        ("data.object[0]", None),
        ("data.object.none", None),
        ("nothing.at.all", None),
        ('data."object".id', "in_1"),
        ("data.object.lines[?price.id=='p2'].price.id | [0]", "p2"),
        ("length(data.object.tags)", 2),
        ("data.object.none || data.object.id", "in_1"),
    ],
)
def test_a_path_is_looked_up(expression: str, expected: object) -> None:
    assert value(expression) == expected


@STEADY
@given(
    st.lists(
        st.sampled_from(["a", "id", "_event", "[0]", "[-1]", '"x-y"']), min_size=1, max_size=4
    ),
    json_values,
)
def test_direct_look_ups_agree_with_jmespath(steps: list[str], document: object) -> None:
    assume(steps[0] != "_event" or steps[1:2] in ([], ["id"]))
    expression = "".join(step if step[0] == "[" else f".{step}" for step in steps).lstrip(".")
    direct = Path.compile(expression)
    # A pipe keeps it from being compiled to a direct look-up.
    general = Path.compile(f"{expression} | @")
    place = Scope(document, {"_event": {"id": [1]}} if isinstance(document, dict) else {})

    assert repr(direct.value(place)) == repr(general.value(place))


def test_the_first_path_that_is_not_null_counts() -> None:
    assert value(["data.object.none", "nothing", "data.object.empty", "id"]) == ""
    assert value(["nothing", "data.object.none"]) is None


@pytest.mark.parametrize("document", [None, 1, "text", True, [], [{"a": 1}], {}])
def test_a_body_that_is_no_object_has_nothing_at_a_name(document: object) -> None:
    assert value("data.object.id", document) is None
    assert value("data.object.id || `null`", document) is None
    assert value("_event.id", document) == "evt_1"


def test_a_body_that_is_a_list_can_be_indexed() -> None:
    assert value("[0].a", [{"a": 1}]) == 1
    assert value("[?a==`1`] | [0].a", [{"a": 1}]) == 1


@pytest.mark.parametrize("expression", ["_event.id", "_event.id || `null`", "@._event.id"])
def test_event_is_never_what_the_sender_put_there(expression: str) -> None:
    assert value(expression) == "evt_1"


@pytest.mark.parametrize("name", ["_workspace", "_grant.amount", "_message"])
def test_our_names_are_null_while_unknown_whatever_the_sender_wrote(name: str) -> None:
    assert value(name) is None
    assert value(f"{name} || `null`") is None
    assert "forged" not in repr(value("values(@)"))


def test_our_names_are_found_once_they_are_known() -> None:
    place = scope()
    place.own["_workspace"] = "w1"

    assert Path.compile("_workspace").value(place) == "w1"
    assert Path.compile("_workspace || 'none'").value(place) == "w1"
    assert BODY["_workspace"] == "forged"


def test_a_path_knows_which_of_our_names_it_uses() -> None:
    assert Path.compile("_event.id").uses_own("_event")
    assert Path.compile(["a", "_event.id"]).uses_own("_event")
    assert Path.compile("join('/', [a, _event.id])").uses_own("_event")
    assert not Path.compile("data._event.id").uses_own("_event")
    assert not Path.compile("data.id").uses_own("_event")


def test_a_path_knows_when_it_may_read_the_whole_document() -> None:
    assert Path.compile("to_string(@)").shows_root
    assert Path.compile("*").shows_root
    assert not Path.compile("data.object.id").shows_root
    assert not Path.compile("join('/', [a, b])").shows_root


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("", r"'' is not a JMESPath \(empty\)"),
        ("a[", r"'a\[' is not a JMESPath \(see column 3\)"),
        ("a b", r"is not a JMESPath \(see column 3\)"),
        ("a.#", r"is not a JMESPath \(see column 3\)"),
        ("lenght(a)", r"calls lenght\(\), which JMESPath lacks \(did you mean length\?\)"),
        ("length(a, b)", r"calls length\(\) with 2 arguments, not 1"),
        ("not_null()", r"calls not_null\(\) with 0 arguments"),
        ("&a", "has an & that is not an argument"),
        ("not_null(&a)", "has an & that is not an argument"),
        ("_workspce", r"_workspce is none of our names \(did you mean _workspace\?\)"),
        ("_id", r"there are: _event, _workspace, _resource\); .* is written @\._id"),
        ("_evnt.id || a", r"did you mean _event\?"),
        ("[a, _evnt]", "_evnt is none of our names"),
        ("join('', {a: _x}.a)", "_x is none of our names"),
        ("_x[*].a", "_x is none of our names"),
        ("_event.typ", r"_event has no typ \(did you mean type\?\)"),
        ("to_string(_event.received)", r"_event has no received \(did you mean received_ms\?\)"),
        ("_event[0]", "_event has no 0"),
        ("(" * 400 + "a" + ")" * 400, "longer than"),
        ("!" * 499 + "a", "nested too deeply"),
        ("a" * (EXPRESSION_CHARS_MAX + 1), f"longer than {EXPRESSION_CHARS_MAX} characters"),
    ],
)
def test_a_bad_path_is_refused_in_words(expression: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Path.compile(expression)


@pytest.mark.parametrize(
    "expression",
    ["@._id", "data._id", "data[?_id]", "map(&_id, data)", "data | _id", "data.[_id]", "_event"],
)
def test_a_field_that_begins_like_our_names_is_taken_where_it_is_no_such(expression: str) -> None:
    assert Path.compile(expression).text == expression


def test_no_path_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="needs at least one path"):
        Path.compile([])


def test_a_function_on_the_wrong_type_is_unjudgeable_without_its_value() -> None:
    with pytest.raises(Unjudgeable) as caught:
        value("abs(data.object.status)")

    assert str(caught.value) == ("abs(data.object.status): abs() can't take a value of type string")


@pytest.mark.parametrize(
    ("expression", "document"),
    [
        ("ceil(a)", {"a": float("inf")}),
        ("floor(a)", {"a": float("nan")}),
        ("a[::0]", {"a": [1]}),
        pytest.param("to_string(a)", {"a": 10**5000}, id="huge"),
        ("sort_by(a, &b)", {"a": [{"b": 1}, {"b": "x"}]}),
    ],
)
def test_what_the_library_leaks_is_unjudgeable(expression: str, document: object) -> None:
    with pytest.raises(Unjudgeable, match="can't"):
        value(expression, document)


EXPRESSIONS = [
    *("a", "a.b", "a[0]", "*", "@", "[]", "a[*].b", "a[?b > `1`]", "a[1:]", "!a", "a || b"),
    *("abs(a)", "avg(a)", "ceil(a)", "floor(a)", "sum(a)", "max(a)", "min(a)", "sort(a)"),
    *("contains(a, b)", "ends_with(a, b)", "starts_with(a, b)", "join(a, b)", "keys(a)"),
    *("length(a)", "merge(a, b)", "reverse(a)", "to_array(a)", "to_number(a)", "to_string(@)"),
    *("type(a)", "values(a)", "map(&a, b)", "sort_by(a, &b)", "max_by(a, &b)", "min_by(@, &a)"),
    *("a < b", "a == b", "{x: a, y: b}", "[a, b]", "a | b", "not_null(a, b)"),
]


@STEADY
@given(st.sampled_from(EXPRESSIONS), json_values)
def test_no_event_makes_a_path_raise_anything_else(expression: str, document: object) -> None:
    error = raised(Unjudgeable, lambda: Path.compile(expression).value(scope(document)))

    assert error is None or str(error).startswith(f"{expression}: ")


@STEADY
@given(st.text(alphabet="ab.[]*?@&|!<>=(){}'\"`,:0-9 \\", max_size=20))
def test_any_text_as_a_path_compiles_or_is_refused_in_words(expression: str) -> None:
    error = raised(ValueError, lambda: Path.compile(expression))

    assert error is None or str(error)


# Conditions


@pytest.mark.parametrize(
    ("want", "found", "expected"),
    [
        ("paid", "paid", True),
        ("paid", "Paid", False),
        ("paid", None, False),
        (1, 1, True),
        (1, 1.0, True),
        (1.0, 1, True),
        (1, "1", False),
        ("1", 1, False),
        (1, True, False),
        (0, False, False),
        (True, True, True),
        (True, 1, False),
        (True, "true", False),
        (False, None, False),
        (False, 0, False),
        ("a", ["a"], False),
        ("a", {"a": 1}, False),
        (["usd", "eur"], "eur", True),
        (["usd", "eur"], "gbp", False),
        (["usd", "eur"], None, False),
        (["usd", "eur"], ["usd"], False),
        ([1, "a", True], 1.0, True),
        ([1, "a", True], True, True),
        ([1, "a"], True, False),
        ({"eq": 1}, 1, True),
        ({"ne": 1}, 1, False),
        ({"ne": 1}, True, True),
        ({"ne": 1}, None, True),
        ({"in": ["a"]}, "a", True),
        ({"gt": 0}, 1, True),
        ({"gt": 0}, 0, False),
        ({"ge": 0}, 0, True),
        ({"lt": 0}, -0.5, True),
        ({"lt": 0}, 0, False),
        ({"le": 0}, 0, True),
        ({"gt": "2024-01-01"}, "2024-02-01", True),
        ({"lt": "b"}, "c", False),
        ({"gt": 0, "lt": 10}, 5, True),
        ({"gt": 0, "lt": 10}, 10, False),
        ({"exists": True}, 0, True),
        ({"exists": True}, False, True),
        ({"exists": True}, "", True),
        ({"exists": True}, None, False),
        ({"exists": False}, None, True),
        ({"exists": False}, 1, False),
        ({"matches": "^a.c$"}, "abc", True),
        ({"matches": "b"}, "abc", True),
        ({"matches": "^b"}, "abc", False),
    ],
)
def test_a_comparison(want: object, found: object, expected: bool) -> None:
    assert holds({"a": want}, {"a": found}) is expected


@pytest.mark.parametrize("operator", ["gt", "ge", "lt", "le"])
@pytest.mark.parametrize(
    ("literal", "found", "words"),
    [
        (0, None, "a: is missing, so {} can't be judged"),
        (0, True, "a: is a boolean, so {} can't be judged: it needs a number"),
        (0, "1", "a: is a text, so {} can't be judged: it needs a number"),
        (0, [1], "a: is a list, so {} can't be judged: it needs a number"),
        (0, {}, "a: is an object, so {} can't be judged: it needs a number"),
        (0, float("nan"), "a: is a number, so {} can't be judged: it needs a number"),
        ("x", 1, "a: is a number, so {} can't be judged: it needs a text"),
        ("x", None, "a: is missing, so {} can't be judged"),
        ("x", False, "a: is a boolean, so {} can't be judged: it needs a text"),
    ],
)
def test_an_ordering_of_another_type_is_unjudgeable(
    operator: str, literal: object, found: object, words: str
) -> None:
    with pytest.raises(Unjudgeable) as caught:
        holds({"a": {operator: literal}}, {"a": found})

    assert str(caught.value) == words.format(operator)
    assert caught.value.path == "a"


@pytest.mark.parametrize("found", [None, 1, True, ["abc"], {}])
def test_matches_on_what_is_no_text_is_unjudgeable(found: object) -> None:
    with pytest.raises(Unjudgeable, match="so matches can't be judged"):
        holds({"a": {"matches": "b"}}, {"a": found})


def test_matches_looks_at_a_bounded_text_and_never_at_a_part() -> None:
    assert holds({"a": {"matches": "b$"}}, {"a": "a" * (MATCH_CHARS_MAX - 1) + "b"})

    with pytest.raises(Unjudgeable, match=f"longer than the {MATCH_CHARS_MAX} characters"):
        holds({"a": {"matches": "b$"}}, {"a": "a" * MATCH_CHARS_MAX + "b"})


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "([a-z]+)*$",
        "(a{2,})+$",
        "(a++)+$",
        "(a+){10}$",
        "^([a-z0-9]+[._-]?){1,10}@example[.]com$",
        "(a|aa)+$",
        "(?:a|b+)+c",
        "a*a*a*a*a*b",
        "(.*)(.*)(.*)(.*)(.*)x$",
        "[a-z]*[a-z]*[a-z]*b",
        "(?m)^[a-z]*[a-z]*[a-z]*b",
        "[a-z]*[a-z]*(?:[a-z][a-z]){60}!",
        "(?:a?){40}a{40}b",
        "a?" * 40 + "b",
        "(?:(?:(?:){99}){99}){99}",
        "(((((a|b){20}){20}){20}){20}){20}",
        "(?x) ( a+ # one\n )+ $",
    ],
)
def test_an_expression_that_could_take_long_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="would take too long on some texts"):
        Condition.compile({"a": {"matches": pattern}})


@pytest.mark.parametrize(
    "pattern", [r"(a+)\1b", r"(?P<x>a)(?P=x)", "(?=a+)b", "(?<!a)b", "(?>a+)b", "(a)?(?(1)b|c)"]
)
def test_an_expression_that_looks_around_or_back_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="takes no look-around"):
        Condition.compile({"a": {"matches": pattern}})


@pytest.mark.parametrize(
    "pattern",
    [
        r"^[a-z]+@[a-z]+\.[a-z]+\.com$",
        "[a-z]*[a-z]*bcde",
        "(ab)+",
        r"(\+)+",
        "([+*])+",
        "(a?b)c+",
        "(?i)^(?:paid|open)$",
        "^(?:a|aa){12}!",
        "(?:a|aa){10}[ab]{60}!",
        r"^(?P<kind>evt|in)_[0-9A-Za-z]{8,32}\b",
        "",
    ],
)
@pytest.mark.parametrize("text", ["a" * MATCH_CHARS_MAX, "ab" * (MATCH_CHARS_MAX // 2)])
def test_other_expressions_are_taken_and_quick(pattern: str, text: str) -> None:
    condition = Condition.compile({"a": {"matches": pattern}})
    started = time.process_time()

    condition.holds(scope({"a": text}))

    assert time.process_time() - started < 1


def test_all_comparisons_must_hold() -> None:
    both = {"a": 1, "b": {"gt": 0}}

    assert holds(both, {"a": 1, "b": 1})
    assert not holds(both, {"a": 2, "b": 1})
    assert not holds(both, {"a": 1, "b": 0})


@pytest.mark.parametrize(
    "table", [{"a": 1, "b": {"gt": 0}}, {"b": {"gt": 0}, "a": 1}], ids=["first", "last"]
)
def test_a_false_comparison_decides_wherever_it_stands(table: Mapping[str, object]) -> None:
    assert not holds(table, {"a": 2})
    with pytest.raises(Unjudgeable, match=r"^b: is missing"):
        holds(table, {"a": 1})


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"data.object.status": "paid"}, "data.object.status is 'open', expected 'paid'"),
        ({"data.object.none": "paid"}, "data.object.none is missing, expected 'paid'"),
        ({"data.object.amount": {"gt": 9}}, "data.object.amount is 5, expected gt 9"),
        ({"data.object.paid": False}, "data.object.paid is true, expected false"),
        ({"data.object.tags": "a"}, "data.object.tags is a list, expected 'a'"),
        ({"data.object": "a"}, "data.object is an object, expected 'a'"),
        ({"id": ["x", "y"]}, "id is 'evt_theirs', expected one of 'x', 'y'"),
        ({"id": {"ne": "evt_theirs"}}, "id is 'evt_theirs', expected anything but 'evt_theirs'"),
        ({"id": {"matches": "^x"}}, "id is 'evt_theirs', expected a match of '^x'"),
        ({"nothing": {"exists": True}}, "nothing is missing, expected a value"),
        ({"id": {"exists": False}}, "id is 'evt_theirs', expected none"),
        ({"id": "evt_theirs", "data.object.amount": 6}, "data.object.amount is 5, expected 6"),
    ],
)
def test_unmet_names_the_path_and_what_was_expected(
    table: Mapping[str, object], words: str
) -> None:
    assert Condition.compile(table).unmet(scope()) == words


def test_unmet_is_none_when_all_hold_and_raises_when_it_can_not_be_judged() -> None:
    assert Condition.compile({"id": "evt_theirs"}).unmet(scope()) is None
    with pytest.raises(Unjudgeable):
        Condition.compile({"nothing": {"gt": 1}}).unmet(scope())


@pytest.mark.parametrize("found", ["x" * 10_000, pytest.param(10**5000, id="huge"), ["x" * 10_000]])
def test_unmet_cuts_long_values(found: object) -> None:
    words = Condition.compile({"a": ["y" * 60] * 9}).unmet(scope({"a": found}))

    assert words is not None
    assert len(words) < 200


@pytest.mark.parametrize(
    ("want", "words"),
    [
        ({"gte": 1}, r"'gte' is not an operator; .* \(did you mean ge\?\)"),
        ({"=>": 1}, r"they are eq ne gt ge lt le in exists matches \(did you mean ge\?\)"),
        ({"match": "x"}, r"did you mean matches\?"),
        ({"exist": True}, r"did you mean exists\?"),
        ({"object": {"status": "paid"}}, "a path with dots is one key in quotes"),
        ({}, "needs an operator"),
        ([], "needs a list of at least one"),
        ({"in": "usd"}, "in needs a list"),
        ({"in": [["usd"]]}, "in compares with a text, a number, true or false"),
        ({"eq": ["usd"]}, "eq compares with a text, a number, true or false"),
        ({"eq": float("nan")}, "eq compares with a text"),
        ({"gt": True}, "gt compares with a number or a text"),
        ({"gt": [1]}, "gt compares with a number or a text"),
        ({"exists": "yes"}, "exists needs true or false"),
        ({"matches": 1}, "matches needs a regular expression"),
        ({"matches": "("}, "bad regular expression: missing"),
        ({"matches": "a" * (PATTERN_CHARS_MAX + 1)}, "longer than"),
        ({"matches": "a{99999999999999}"}, "bad regular expression"),
    ],
)
def test_a_bad_comparison_is_refused_in_words(want: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Condition.compile({"a": want})


def test_an_empty_condition_and_a_bad_path_are_refused() -> None:
    with pytest.raises(ValueError, match="needs at least one"):
        Condition.compile({})
    with pytest.raises(ValueError, match="is not a JMESPath"):
        Condition.compile({"a[": 1})


@STEADY
@given(
    st.sampled_from(["eq", "ne", "gt", "ge", "lt", "le", "in", "exists", "matches", "gte"]),
    json_values,
    json_values,
)
def test_any_comparison_is_refused_judged_or_unjudgeable(
    operator: str, literal: object, document: object
) -> None:
    table = {"a": {operator: literal}}
    if raised(ValueError, lambda: Condition.compile(table)):
        return
    condition, place = Condition.compile(table), scope(document)

    error = raised(Unjudgeable, lambda: condition.holds(place))

    if error is None:
        assert (condition.unmet(place) is None) is condition.holds(place)
    else:
        assert str(error).startswith("a: ")


# Templates


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("plain", "plain"),
        ("", ""),
        ("{data.object.id}", "in_1"),
        ("{ data.object.id }", "in_1"),
        ("{data.object.amount}", 5),
        ("{data.object.paid}", True),
        ("{data.object.none}", None),
        ("{nothing}", None),
        ("{data.object.tags}", ["a", "b"]),
        ("Invoice {data.object.id}: {data.object.amount}", "Invoice in_1: 5"),
        ("{data.object.paid} {data.object.ratio}", "true 1.0"),
        ("tags {data.object.tags}", 'tags ["a", "b"]'),
        ("{{data.object.id}}", "{data.object.id}"),
        ("{{{data.object.id}}}", "{in_1}"),
        ("}}{{", "}{"),
        ("{ {n: data.object.amount} }", {"n": 5}),
        ("{data.object.{n: amount}}", {"n": 5}),
        ("{data.object.lines[?price.id=='}'] | [0]}", None),
        ("{join('{', data.object.tags)}", "a{b"),
        ({"a": "{data.object.id}", "b": ["{id}", 1]}, {"a": "in_1", "b": ["evt_theirs", 1]}),
        ({"{id}": 1}, {"{id}": 1}),
        ([], []),
        (1.5, 1.5),
        (False, False),
        (None, None),
    ],
)
def test_a_template_is_rendered(template: object, expected: object) -> None:
    found = rendered(template)

    assert found == expected
    assert type(found) is type(expected)


def test_a_template_sees_our_names() -> None:
    assert rendered("{_grant.amount} {_event.id}", _grant={"amount": 100}) == "100 evt_1"


def test_a_null_within_a_longer_text_is_unjudgeable() -> None:
    with pytest.raises(Unjudgeable) as caught:
        rendered({"a": ["Dear {data.object.none}"]})

    assert str(caught.value) == "data.object.none: is missing"


def test_a_value_that_can_not_be_written_within_a_text_is_unjudgeable() -> None:
    deep: object = "end"
    for _ in range(100_000):
        deep = [deep]

    with pytest.raises(Unjudgeable, match="nested too deeply"):
        rendered("x {a}", {"a": deep})
    with pytest.raises(Unjudgeable, match="too large"):
        rendered("x {a}", {"a": 10**5000})


def test_a_template_lists_its_paths() -> None:
    template = Template.compile({"a": "{b} {c}", "d": ["{_workspace}", "e"]})

    assert [path.text for path in template.paths] == ["b", "c", "_workspace"]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("a {b", "has a { without its }"),
        ("a } b", "has a } without its {"),
        ("{}", "is not a JMESPath"),
        ("{a b}", "is not a JMESPath"),
        ({"a": ["{b"]}, "has a { without its }"),
        (float("inf"), "JSON has no word for"),
        (object(), "JSON has no word for"),
    ],
)
def test_a_bad_template_is_refused_in_words(template: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Template.compile(template)


def test_a_template_nested_too_deeply_is_refused() -> None:
    nested: object = "x"
    for _ in range(TEMPLATE_DEPTH_MAX - 1):
        nested = {"a": nested}
    Template.compile(nested)

    with pytest.raises(ValueError, match=f"deeper than {TEMPLATE_DEPTH_MAX} levels"):
        Template.compile([nested])


@STEADY
@given(st.text(alphabet="{}ab'\"`\\. ", max_size=20))
def test_any_text_as_a_template_compiles_or_is_refused(text: str) -> None:
    if not raised(ValueError, lambda: Template.compile(text)):
        raised(Unjudgeable, lambda: rendered(text, {"a": {"b": 1}}))


@STEADY
@given(st.text(max_size=50))
def test_doubled_braces_render_any_text_as_itself(text: str) -> None:
    assert rendered(text.replace("{", "{{").replace("}", "}}")) == text


# Statements


def test_placeholders_of_a_statement_are_bound_never_text() -> None:
    statement = Statement.compile(
        "update workspaces set plan = {data.object.lines[0].price.id} where id = {_workspace}"
    )

    assert statement.sql == "update workspaces set plan = ? where id = ?"
    assert statement.bind(scope(_workspace="'; drop table x; --")) == ("p1", "'; drop table x; --")
    assert [path.text for path in statement.paths][1] == "_workspace"


@pytest.mark.parametrize(
    ("found", "bound"),
    [
        ("text", "text"),
        (1, 1),
        (1.5, 1.5),
        (True, 1),
        (False, 0),
        (None, None),
        (["a", 1], '["a", 1]'),
        ({"ä": None}, '{"ä": null}'),
        (2**63 - 1, 2**63 - 1),
        (-(2**63), -(2**63)),
    ],
)
def test_a_value_is_bound_as_sqlite_holds_it(found: object, bound: object) -> None:
    (value,) = Statement.compile("select {a}").bind(scope({"a": found}))

    assert value == bound
    assert type(value) is type(bound)


@pytest.mark.parametrize("found", [2**63, -(2**63) - 1, "\ud800", ["\udfff"]])
def test_a_value_that_sqlite_can_not_hold_is_unjudgeable(found: object) -> None:
    with pytest.raises(Unjudgeable, match=r"^a: "):
        Statement.compile("select {a}").bind(scope({"a": found}))


@pytest.mark.parametrize(
    "text",
    [
        "select 1",
        "select {a};",
        "select {a} ; -- the end",
        "select '{{a}} ? :b ;' || {a}",
        "update t set a = {a} where j ->> '$.x' = {b} /* why? */",
        'update "t?" set [a:b] = {a}, `c;d` = {b}, e$f = 1',
        "select 'it''s', {a}",
    ],
)
def test_a_statement_compiles(text: str) -> None:
    assert "\0" not in Statement.compile(text).sql


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a statement"),
        ("  \n", "is not a statement"),
        ("select '{a}'", "within quotes"),
        ("select '' || '{a}'", "within quotes"),
        ('select "{a}"', "within quotes"),
        ("select 1 -- {a}", "within quotes or a comment"),
        ("select 1 /* {a} */", "within quotes or a comment"),
        ("select ?", "has a parameter of its own, \\?"),
        ("select ?1", "has a parameter of its own, \\?1"),
        ("select :name", "has a parameter of its own, :name"),
        ("select @name", "has a parameter of its own, @name"),
        ("select $name", "has a parameter of its own, \\$name"),
        ("select {a}; select {b}", "holds several statements"),
        ("select 'a", "has a ' that is not closed"),
        ("select /* a", "that is not closed"),
        ("select {a", "has a { without its }"),
        ("select {a b}", "is not a JMESPath"),
        ("select \0", "is not a statement"),
    ],
)
def test_a_bad_statement_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Statement.compile(text)


# Keys


@pytest.mark.parametrize(
    ("found", "text"),
    [("in_1", "in_1"), (7, "7"), (0, "0"), (-1, "-1"), ("Zoë 1", "Zoë 1"), ("x" * 500, "x" * 500)],
)
def test_a_text_or_an_integer_is_a_key(found: object, text: str) -> None:
    assert key_text(found, "data.id") == text


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "data.id: is missing, expected a text or an integer"),
        (True, "data.id: is a boolean, expected a text or an integer"),
        (1.0, "data.id: is a number, expected a text or an integer"),
        ([], "data.id: is a list, expected a text or an integer"),
        ({}, "data.id: is an object, expected a text or an integer"),
        pytest.param(10**5000, "data.id: is longer than 500 characters", id="huge"),
        ("", "data.id: is empty"),
        (" \t", "data.id: is empty"),
        ("a\nb", "data.id: holds a control character"),
        ("a\0", "data.id: holds a control character"),
        ("a\x85", "data.id: holds a control character"),
        ("a\u2028", "data.id: holds a control character"),
        ("\ud800", "data.id: holds a control character"),
        ("x" * (KEY_CHARS_MAX + 1), "data.id: is longer than 500 characters"),
    ],
)
def test_anything_else_is_no_key(found: object, words: str) -> None:
    with pytest.raises(Unjudgeable) as caught:
        key_text(found, "data.id")

    assert str(caught.value) == words
