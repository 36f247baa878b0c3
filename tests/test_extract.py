import json
import time
from collections.abc import Callable
from hashlib import sha256
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from receiver.extract import (
    BARE_PERCENTS_MAX,
    TEXT_CHARS_MAX,
    Document,
    Reading,
    canonical,
    decode,
    find,
    form_values,
    id_text,
    parse_locator,
    parse_mask,
    unquoted,
)

FUZZ = settings(derandomize=True, deadline=None, max_examples=200, database=None)


@pytest.mark.parametrize(
    "text",
    [
        *("", "id", "json:id", "header:", "header:X Y", "form:", "form:a#b", "body:/id"),
        *("header:*a", "{json:/a", "{json:/a}}", "{a}:{json:/b}", "key:a", "{}"),
    ],
)
def test_what_is_no_locator_is_refused_with_words(text: str) -> None:
    with pytest.raises(ValueError, match=r"locator|pointer|brace"):
        parse_locator(text)


def test_a_pointer_escapes_slashes_and_tildes_and_counts_from_zero() -> None:
    reading = Reading((), b'{"a/b":{"~":[5,"x"]}}')

    assert find(reading, [parse_locator("json:/a~1b/~0/1")], "id").text == "x"
    assert find(reading, [parse_locator("json:/a~1b/~0/2")], "id").text == ""
    assert find(reading, [parse_locator("json:/a~1b/~0/-1")], "id").text == ""


def test_the_first_place_that_is_not_empty_wins() -> None:
    headers = ((b"x-id", b""), (b"x-id", b"from-header"))
    reading = Reading(headers, b'{"a":"","b":null,"c":0}')
    places = [parse_locator(f"json:/{name}") for name in "abz"]

    assert find(reading, [*places, parse_locator("header:X-Id")], "id").text == "from-header"
    assert find(reading, [*places, parse_locator("json:/c")], "id").text == "0"


def test_a_header_locator_may_leave_its_ending_open() -> None:
    reading = Reading(((b"x-sig-1", b"a"), (b"other", b"b"), (b"x-sig-2", b"c")), b"")

    assert reading.raw(parse_locator("header:X-Sig-*")) == [b"a", b"c"]


def test_a_key_is_the_first_name_that_counts() -> None:
    reading = Reading((), b'{"update_id":1,"message":{},"edited":{}}')

    assert find(reading, [parse_locator("key:!update_id")], "type").text == "message"
    assert find(reading, [parse_locator("key:!update_id,message")], "type").text == "edited"
    assert find(reading, [parse_locator("key:/message!x")], "type").text == ""
    assert find(reading, [parse_locator("key:/update_id!x")], "type").text == ""


def test_a_joined_value_is_there_only_where_each_of_its_parts_is() -> None:
    reading = Reading(((b"x-shop", b"s1"),), b'{"event":"paid","id":7,"none":null,"object":{}}')
    whole, lacking, wrong = (
        parse_locator(text)
        for text in (
            "{header:X-Shop}/{json:/event}:{json:/id}",
            "{json:/event}:{json:/none}",
            "{json:/event}:{json:/object}",
        )
    )

    assert find(reading, [whole], "id").text == "s1/paid:7"
    assert find(reading, [lacking, wrong, whole], "id").text == "s1/paid:7"


def test_a_body_is_known_by_its_digest() -> None:
    digest = "sha256:" + sha256(b"{}").hexdigest()

    assert find(Reading((), b"{}"), [parse_locator("body")], "id").text == digest


@pytest.mark.parametrize(
    ("url", "step"),
    [
        ("https://h/webhooks/gumroad/t0k", b"t0k"),
        ("https://h/webhooks/gumroad/t0k/?a=/b", b"t0k"),
        ("https://h/", b"h"),
        ("", b""),
    ],
)
def test_a_path_is_the_last_step_of_the_url(url: str, step: bytes) -> None:
    found = Reading((), b"", url=url).raw(parse_locator("path"))

    assert found == ([step] if step else [])


@given(st.lists(st.sampled_from([*b"%%%=_+&\r\n\0 4aFgZ\xff"]), max_size=40).map(bytes))
def test_a_form_is_decoded_as_the_standard_library_does_it(raw: bytes) -> None:
    assert unquoted(raw) == unquote_to_bytes(raw.replace(b"+", b" "))


@pytest.mark.parametrize("piece", [b"%41", b"%", b"%zz", b"+", b"&", b"a=%41&", b"=%3D"])
def test_a_large_body_is_searched_for_a_field_quickly_whatever_it_holds(piece: bytes) -> None:
    body = b"signature=" + piece * (1_048_576 // len(piece))

    def seconds(work: Callable[[], object]) -> float:
        started = time.process_time()
        work()
        return time.process_time() - started

    wanted = parse_locator("form:signature")
    took = min(seconds(lambda: Reading((), body).raw(wanted)) for _ in range(3))
    # The standard library's decoder takes twice as long as that, and up to ten times.
    assert took < 80 * min(seconds(lambda: sha256(body).digest()) for _ in range(3))


def test_what_has_too_many_percents_that_begin_no_byte_is_left_as_it_is() -> None:
    bare = b"%" * BARE_PERCENTS_MAX

    assert form_values(b"a=%41" + bare, b"a") == [b"A" + bare]
    assert form_values(b"a=%41%" + bare, b"a") == [b"%41%" + bare]


def test_a_text_within_json_is_no_field_of_a_form() -> None:
    reading = Reading((), b' \n{"text":"&id=1&data={}"}')

    assert reading.raw(parse_locator("form:id")) == []
    assert reading.value(parse_locator("form:data#/x")) is None


def test_form_fields_are_found_plain_and_as_json() -> None:
    body = b"a=1+2%2B&data=%7B%22id%22%3A7%7D&a=second&empty="
    reading = Reading((), body)

    assert find(reading, [parse_locator("form:a")], "id").text == "1 2+"
    assert find(reading, [parse_locator("form:data#/id")], "id").text == "7"
    assert find(reading, [parse_locator("form:empty")], "id").text == ""
    assert find(reading, [parse_locator("form:none#/id")], "id").text == ""


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (True, "is a boolean"),
        (1.5, "is a fraction"),
        ({}, "is an object"),
        ([1], "is a list"),
        (b"\xff", "is not UTF-8 text"),
        ("a\x00b", "has a control character"),
        ("a\x85b", "has a control character"),
        ("é\n", "has a control character"),
        ("x" * (TEXT_CHARS_MAX + 1), "has 501 characters"),
        (10**600, "has 601 characters"),
    ],
)
def test_what_can_be_no_id_is_said(value: object, problem: str) -> None:
    text, why = id_text(value)

    assert text == ""
    assert why is not None
    assert why.startswith(problem)


@pytest.mark.parametrize(
    ("value", "text"),
    [("a", "a"), (b"\xc3\xa9", "é"), (-5, "-5"), (0, "0"), ("a b", "a b"), ("x" * 500, "x" * 500)],
)
def test_texts_and_whole_numbers_are_ids(value: object, text: str) -> None:
    assert id_text(value) == (text, None)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe{}",
        b"NaN",
        b'{"a":Infinity}',
        b'"\\ud800"',
        b'{"a":"\\udc00"}',
        b'"\xed\xa0\x80"',
        b"[" * 100_000,
        b"1e400",
        b"1" * 5000,
        b"{} x",
        b'{"a":1,}',
        b"{}".decode().encode("utf-16"),
    ],
)
def test_a_body_that_is_not_json_says_so(body: bytes) -> None:
    document = decode(body)

    assert document.value is None
    assert document.problem is not None
    assert document.problem.startswith("body is not JSON: ")
    assert canonical(body, "json", ["a"]) is None


def test_a_byte_order_mark_is_skipped_for_decoding() -> None:
    assert decode(b'\xef\xbb\xbf{"a":1}') == Document({"a": 1})


def test_of_duplicate_keys_the_last_counts() -> None:
    assert decode(b'{"a":1,"a":2}').value == {"a": 2}


def test_a_payload_field_is_unwrapped_whatever_the_content_type_says() -> None:
    form = b"payload=%7B%22a%22%3A%22b+%2B%22%7D&x=1"

    assert decode(form, b"payload") == Document({"a": "b +"}, None, "form")
    assert decode(b'{"payload=":1}', b"payload") == Document({"payload=": 1})
    assert decode(b"payload=%7B", b"payload").problem is not None


def test_a_plain_form_is_an_object_of_texts_where_the_sender_posts_forms() -> None:
    assert decode(b"a=1&b=%C3%A9", forms=True) == Document({"a": "1", "b": "é"}, None, "form")
    assert decode(b"a=%FF", forms=True).problem == "body is not a form: it is not UTF-8"
    assert decode(b"a=1").problem is not None


def test_canonical_json_ignores_order_spacing_and_spelling() -> None:
    one = canonical(b'{"b": 1.50, "a": "\\u00e9"}\n', "json", [])
    two = canonical('\ufeff{"a":"é","b":15e-1}'.encode(), "json", [])

    assert one == two
    assert one is not None
    assert len(one) == 32


def test_canonical_json_tells_long_numbers_apart() -> None:
    one, two = b'{"a":36893488147419103233}', b'{"a":36893488147419103234}'

    assert canonical(one, "json", []) != canonical(two, "json", [])


@pytest.mark.parametrize(
    ("volatile", "one", "two"),
    [
        ("n", b'{"n":1,"a":2}', b'{"a":2}'),
        ("data.n", b'{"data":{"n":1}}', b'{"data":{"n":2}}'),
        ("items[*].n", b'{"items":[{"n":1},{"n":2}]}', b'{"items":[{"n":3},{"n":4}]}'),
        ("items[1].n", b'{"items":[{"n":1},{"n":2}]}', b'{"items":[{"n":1},{"n":4}]}'),
        ("items[*]", b'{"items":[1,2]}', b'{"items":[3,4]}'),
    ],
)
def test_volatile_fields_are_masked(volatile: str, one: bytes, two: bytes) -> None:
    assert canonical(one, "json", [volatile]) == canonical(two, "json", [volatile])
    assert canonical(one, "json", []) != canonical(two, "json", [])


def test_masks_leave_everything_else_to_differ() -> None:
    masks = ["n", "a.b", "items[0].n", "not..a[path", ""]
    one, two = b'{"n":1,"x":{"n":1},"items":[{"n":1}]}', b'{"n":1,"x":{"n":2},"items":[{"n":1}]}'

    assert canonical(one, "json", masks) != canonical(two, "json", masks)


def test_a_form_is_compared_by_what_its_fields_hold() -> None:
    one = b"payload=%7B%22a%22%3A1%2C%22n%22%3A1%7D"
    two = b"payload=%7B%22n%22%3A2%2C+%22a%22%3A1%7D"

    assert canonical(one, "form", ["n"]) == canonical(two, "form", ["n"])
    assert canonical(one, "form", []) != canonical(two, "form", [])


@pytest.mark.parametrize("path", ["", "a..b", "a[", "a[x]", "[0]", "a[*]b"])
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="is not a dotted path"):
        parse_mask(path)


@FUZZ
@given(st.binary(max_size=200), st.sampled_from(["json", "form"]), st.lists(st.text(max_size=8)))
def test_canonical_never_raises(body: bytes, content_type: str, volatile: list[str]) -> None:
    digest = canonical(body, content_type, volatile)

    assert digest is None or len(digest) == 32


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
    ),
    max_leaves=8,
)


@FUZZ
@given(JSON, st.lists(st.sampled_from(["a", "a.b", "a[*]", "a[*].b", "b[0].c", "a.b.c"])))
def test_canonical_masks_any_json_and_is_stable(value: object, volatile: list[str]) -> None:
    plain, pretty = json.dumps(value).encode(), json.dumps(value, indent=2).encode()

    assert canonical(plain, "json", volatile) == canonical(pretty, "json", volatile)
    assert canonical(plain, "json", volatile) is not None
