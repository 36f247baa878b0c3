"""What is owed is rendered from the event, and what can't be sent is refused at once."""

import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from receiver.destinations import (
    ARGUMENT_BYTES_MAX,
    BODY_BYTES_MAX,
    HEADER_BYTES_MAX,
    RESERVED_HEADERS,
    WHY_CHARS_MAX,
    Command,
    Destination,
    Email,
    Http,
    Sent,
    one_line,
    render,
)
from receiver.mail import SUBJECT_CHARS_MAX
from receiver.select import Scope, Template, Unjudgeable
from tests.far_side import owed

ABOUT: dict[str, object] = {
    "operation_key": "op_1",
    "operation": "initial-credit-grant",
    "subject": "in_1",
    "source": "stripe",
    "account": "",
    "workspace": "w1",
    "destination": "team",
    "name": "",
}
EVENT: dict[str, Any] = {
    "id": "evt_1",
    "n": 7,
    "yes": True,
    "list": [1, "a"],
    "none": None,
    "text": "grüße",
    "mail": "ann@example.com",
}


def template(value: object) -> Template:
    return Template.compile(value)


def http(**changes: Any) -> Http:
    return Http(**{"name": "team", "url": "http://127.0.0.1/"} | changes)


def email(to: str = "{mail}", subject: str = "Hello", text: str = "Text", **changes: Any) -> Email:
    values: dict[str, Any] = {
        "name": "confirmation",
        "smtp": "smtp://127.0.0.1",
        "from_": "billing@example.com",
        "to": template(to),
        "subject": template(subject),
        "text": template(text),
    }
    return Email(**values | changes)


def command(*argv: object) -> Command:
    return Command("deploy", argv=tuple(map(template, argv)))


def rendered(destination: Destination, **changes: Any) -> dict[str, Any]:
    own: dict[str, object] = {"_message": ABOUT | {"data": None}, "_grant": {"amount": 100}}
    body = render(destination, Scope(EVENT | changes, own), ABOUT)
    # What is kept is this text.
    kept = msgspec.json.decode(msgspec.json.encode(body))
    assert isinstance(kept, dict)
    return kept


def refused(destination: Destination, **changes: Any) -> str:
    with pytest.raises(Unjudgeable) as refusal:
        rendered(destination, **changes)
    return str(refusal.value)


# HTTP


def test_the_event_and_its_operation_are_the_default() -> None:
    assert rendered(http()) == {"json": {"event": EVENT, "operation": ABOUT}, "headers": {}}


def test_what_a_handler_gives_along_is_in_the_default() -> None:
    scope = Scope(EVENT, {"_message": ABOUT | {"data": {"plan": "pro"}}})

    body = render(http(), scope, ABOUT)

    assert body["json"] == {"event": EVENT, "operation": ABOUT, "data": {"plan": "pro"}}


def test_a_template_makes_the_body_and_the_headers() -> None:
    json = {"text": "{text}: {_grant.amount} for {_message.operation}", "n": "{n}"}

    body = rendered(
        http(json=template(json), headers={"Title": template("{text}"), "X-N": template("{n}")})
    )

    assert body == {
        "json": {"text": "grüße: 100 for initial-credit-grant", "n": 7},
        "headers": {"Title": "grüße", "X-N": "7"},
    }


def test_a_body_may_be_any_json() -> None:
    assert rendered(http(json=template("{none}")))["json"] is None
    assert rendered(http(json=template(["{n}"])))["json"] == [7]


@pytest.mark.parametrize("odd", ["\r\nX: y", "a\nb", "\0", "\x85", "\u2028", "\udcff"])
def test_a_header_can_not_be_split(odd: str) -> None:
    words = refused(http(json=template({}), headers={"Title": template("{text}")}), text=odd)

    assert words == (
        "destinations.team.headers.Title: holds a line break or another control character"
    )


@pytest.mark.parametrize("name", [*sorted(RESERVED_HEADERS), "Host", "a b", "a:b", "", "ü"])
def test_a_header_that_is_ours_or_none_is_refused(name: str) -> None:
    words = refused(http(headers={name: template("x")}))

    assert words == f"destinations.team.headers.{name}: is no header that can be chosen"


def test_a_header_without_a_value_is_refused() -> None:
    assert refused(http(headers={"A": template("{none}")})) == (
        "destinations.team.headers.A: {none} is missing"
    )


def test_a_header_has_a_limit() -> None:
    to = http(json=template({}), headers={"A": template("{text}")})

    assert rendered(to, text="a" * HEADER_BYTES_MAX)["headers"]
    assert "is longer than 4096 bytes" in refused(to, text="ü" * HEADER_BYTES_MAX)


@pytest.mark.parametrize("destination", [http(), command("x"), email(text="{text}")])
def test_a_message_has_a_limit(destination: Destination) -> None:
    assert rendered(destination, text="a" * (BODY_BYTES_MAX - 1_000))
    assert refused(destination, text="a" * BODY_BYTES_MAX) == (
        f"destinations.{destination.name}: is a message of more than 262144 bytes"
    )


@pytest.mark.parametrize("odd", ["half a pair \ud800", 10**5_000], ids=["half", "long"])
@pytest.mark.parametrize("destination", [http(), command("x"), email(text="{text}")])
def test_what_json_can_not_carry_is_refused(destination: Destination, odd: object) -> None:
    words = refused(destination, text=odd)

    assert words.startswith(f"destinations.{destination.name}")
    assert "can't" in words


def test_a_missing_value_within_a_text_is_refused() -> None:
    assert refused(http(json=template({"a": "Hello {missing}"}))) == "missing: is missing"


# Mail


@pytest.mark.parametrize(
    "to",
    [
        "ann@example.com",
        " ann@example.com ",
        "Ann <ann@example.com>",
        '"Smith, Ann" <ann+tag@mail.example.com>',
        "<ann@example.com>",
        "Ann Ü <o'neill.x@example.com>",
        "root@localhost",
        "ann@müller.example",
        "a" * 64 + "@example.com",
    ],
)
def test_an_address_is_taken(to: str) -> None:
    assert rendered(email(), mail=to) == {"to": to, "subject": "Hello", "text": "Text"}


@pytest.mark.parametrize(
    "to",
    [
        "",
        "   ",
        "ann",
        "@example.com",
        "ann@",
        "ann@example..com",
        "ann@-example.com",
        "ann@exa mple.com",
        "ann@[127.0.0.1]",
        "a b@example.com",
        ".ann@example.com",
        "ann.@example.com",
        "ännchen@example.com",
        "ann@example.com, evil@example.com",
        "ann@example.com evil@example.com",
        "ann@example.com;evil@example.com",
        "ann@evil.example@example.com",
        "Ann <ann@example.com>, Evil <evil@example.com>",
        "Ann <ann@example.com> <evil@example.com>",
        "Friends: ann@example.com;",
        "ann@example.com (comment)",
        "ann@example.com> SIZE=1",
        "a" * 65 + "@example.com",
        "ann@" + "a" * 64 + ".com",
        "ann@" + ".".join(["a" * 60] * 5),
        "ann@" + "ü" * 70,
        "A" * 201 + " <ann@example.com>",
    ],
)
def test_what_is_no_single_address_is_refused(to: str) -> None:
    assert refused(email(), mail=to).startswith("destinations.confirmation.to: ")


@pytest.mark.parametrize("odd", ["\r\nBcc: evil@example.com", "\n", "\r", "\0", "\x85", "\u2028"])
@pytest.mark.parametrize("part", ["to", "subject"])
def test_no_header_of_a_mail_can_be_split(part: str, odd: str) -> None:
    for text in (f"ann@example.com{odd}", f"{odd}ann@example.com", f"Ann {odd}<ann@example.com>"):
        assert refused(email(**{part: "{text}"}), text=text) == (
            f"destinations.confirmation.{part}: holds a line break or another control character"
        )


def test_a_sender_that_is_none_is_refused() -> None:
    assert refused(email(from_="billing")).startswith("destinations.confirmation.from: ")


@pytest.mark.parametrize("part", ["to", "subject", "text"])
def test_a_mail_lacks_nothing(part: str) -> None:
    assert (
        refused(email(**{part: "{none}"}))
        == f"destinations.confirmation.{part}: {{none}} is missing"
    )


def test_other_values_become_text_in_a_mail() -> None:
    body = rendered(email(subject="{n}", text="{list}"))

    assert (body["subject"], body["text"]) == ("7", '[1,"a"]')


def test_a_subject_has_a_limit() -> None:
    to = email(subject="{text}")

    assert rendered(to, text="ü" * SUBJECT_CHARS_MAX)
    assert "subject: is longer than 500 characters" in refused(to, text="a" * 501)


# Commands


def test_a_command_gets_each_template_as_one_argument() -> None:
    body = rendered(command("/bin/deploy", "{id} two; `words`", "{n}", "{yes}", "{list}", "a\nb"))

    assert body == {
        "argv": ["/bin/deploy", "evt_1 two; `words`", "7", "true", '[1,"a"]', "a\nb"],
        "input": {"event": EVENT, "operation": ABOUT},
    }


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "{text} is missing"),
        ("a\0b", "holds a NUL, which no argument can"),
        ("a" * (ARGUMENT_BYTES_MAX + 1), "is longer than 100000 bytes"),
    ],
)
def test_what_is_no_argument_is_refused(value: object, words: str) -> None:
    assert refused(command("x", "{text}"), text=value) == f"destinations.deploy.argv[1]: {words}"


# Words


@given(st.text(max_size=2_000), st.integers(10, WHY_CHARS_MAX))
def test_any_text_becomes_one_bounded_line(text: str, chars_max: int) -> None:
    line = one_line(text, chars_max)

    assert len(line) <= chars_max
    assert line.isprintable()
    assert line == line.strip()


def test_no_secret_is_in_what_is_printed_of_a_destination() -> None:
    shown = repr(
        [
            http(url="http://u:hunter2@x/", secret=b"hunter2"),
            email(smtp="smtp://u:hunter2@x"),
            command("hunter2"),
        ]
    )

    assert shown == "[Http('team'), Email('confirmation'), Command('deploy')]"


def test_the_configuration_is_read_without_the_network_libraries() -> None:
    text = "import sys, receiver.destinations; print(*sys.modules)"

    loaded = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True
    )

    assert not {"urllib3", "smtplib", "subprocess"} & set(loaded.stdout.split())


def test_an_attempt_is_a_value() -> None:
    assert owed({}) == owed({})
    assert Sent("a") == Sent("a")
