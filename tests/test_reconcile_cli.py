"""`receiver reconcile`, as an operator or a timer runs it."""

import json
import shlex
from collections.abc import Iterator

import pytest

from receiver import pages
from tests.command import Command
from tests.conftest import SECRETS, World, stripe_body
from tests.sender_api import KEY, error
from tests.sender_lists import SenderLists, sender_lists
from tests.test_books import CONFIG as BOOKS
from tests.test_books import CREDIT_NOTES, INVOICES, bill, tell
from tests.test_fetching import configured
from tests.test_reconcile import CONFIG, EVENTS, HOOK, OTHERS, paid, push, sent


@pytest.fixture
def far() -> Iterator[SenderLists]:
    with sender_lists() as lists:
        for path in (EVENTS, INVOICES, CREDIT_NOTES):
            lists.add(path)
        yield lists


@pytest.fixture
def command(world: World, far: SenderLists, monkeypatch: pytest.MonkeyPatch) -> Command:
    for name, value in (SECRETS | {"API": KEY}).items():
        monkeypatch.setenv(name, value)
    configured(world, CONFIG.replace("URL", far.url))
    world.link()
    return Command(world, monkeypatch)


def test_a_difference_is_exit_1_until_it_is_mended(
    world: World, far: SenderLists, command: Command
) -> None:
    far.add(EVENTS, paid(1), paid(2))
    world.deliver("stripe", json.dumps(paid(1)).encode())

    found = command("reconcile", "stripe")
    assert found.code == 1
    assert "missing  invoice.paid evt_2" in found.out
    assert "2 events at stripe: 0 that no rule wants, 1 missing, 0 here and unfinished" in found.out
    assert "younger than 5 min is left out" in found.out
    assert "receiver reconcile stripe --apply" in found.out
    mended = command("reconcile", "stripe", "--apply", "--reason", "an outage")

    assert mended.code == 0, mended.err
    assert "nothing differs any more" in mended.out
    assert command("reconcile", "stripe").code == 0
    assert world.balance() == 200
    (act,) = command.objects("audit")
    assert (act["action"], act["reason"]) == ("reconcile", "an outage")
    (event, *_) = command.objects("events", "list")
    assert (event["id"], event["origin"]) == ("evt_2", "reconcile")
    assert "from the sender's API by reconcile" in command("events", "show", "evt_2").out


def test_the_command_that_mends_it_has_the_flags_that_found_it(
    far: SenderLists, command: Command
) -> None:
    far.add(EVENTS, paid(1), account="acct_2")
    given = "reconcile stripe --since 1d --all --events-only --account '' --account acct_2"

    found = command(*shlex.split(given))

    assert f"`receiver {given} --apply" in found.out


def test_the_events_of_an_outage_are_told_as_json(far: SenderLists, command: Command) -> None:
    far.add(EVENTS, paid(1))

    ran = command("reconcile", "stripe", "--json", "--since", "1d", "--events-only")

    difference, summary = ran.objects
    assert ran.code == 1
    assert difference == {
        "what": "missing",
        "account": "",
        "type": "invoice.paid",
        "id": "evt_1",
        "at": "2027-01-15T07:00:00.000Z",
        "detail": "",
        "workspace": "",
    }
    assert (summary["what"], summary["missing"], summary["gap"]) == ("summary", 1, 1)


def test_what_stays_undone_is_named_with_its_reason(far: SenderLists, command: Command) -> None:
    event = json.loads(stripe_body("evt_1", "invoice.paid", id="in_1", customer="cus_9"))
    far.add(EVENTS, event | {"created": event["created"] - 3_600})

    ran = command("reconcile", "stripe", "--apply")

    assert ran.code == 1
    assert "1 still differ" in ran.out
    assert "parked  evt_1: customer cus_9 is not linked to a workspace yet" in ran.out


def test_a_key_that_is_refused_is_one_line(far: SenderLists, command: Command) -> None:
    far.instead = lambda path: error(401)

    ran = command("reconcile", "stripe")

    assert ran.code == 1
    assert "the key is refused (correct api.key); what was found and done until then" in ran.err
    assert KEY not in ran.err


def test_whoever_waits_is_told_why(
    far: SenderLists, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "PAUSE_FIRST_S", 0.01)
    answers = [error(500)]
    far.instead = lambda path: answers.pop() if answers else None

    ran = command("reconcile", "stripe")

    assert ran.code == 0
    assert "answered 500 Internal Server Error; asking again in 0 s\n" in ran.err


def test_github_says_what_it_was_asked_for(
    world: World, far: SenderLists, command: Command
) -> None:
    configured(world, OTHERS.replace("URL", far.url))
    push(world, 1)
    far.add(HOOK, sent(1), sent(2))

    ran = command("reconcile", "github", "--apply")

    assert ran.code == 1
    assert "1 were asked for again" in ran.out


@pytest.mark.parametrize(
    ("change", "arguments", "words"),
    [
        (("api = {", "# api = {"), ["stripe"], "sources.stripe.api is missing"),
        (("", ""), ["strpe"], "there is no source strpe"),
        (("", ""), ["stripe", "--since", "soon"], "'soon' is no time"),
        (("", ""), ["stripe", "--until", "1d"], "--until is about --books"),
        (("", ""), ["stripe", "--books", "--since", "1d", "--until", "2d"], "period is empty"),
        (('scheme = "stripe"', 'scheme = "shopify"'), ["stripe"], "lists its events is not known"),
        (('scheme = "stripe"', 'scheme = "github"'), ["stripe"], "api.events is missing: write"),
        (('scheme = "stripe"', 'scheme = "github"'), ["stripe", "--books"], "is not known"),
    ],
)
def test_what_can_not_be_compared_is_said(
    world: World,
    far: SenderLists,
    command: Command,
    change: tuple[str, str],
    arguments: list[str],
    words: str,
) -> None:
    text = CONFIG.replace("URL", far.url).replace(*change)
    (world.folder / "receiver.toml").write_text(text)

    ran = command("reconcile", *arguments)

    assert ran.code in (2, 3)
    assert words in ran.err
    assert far.paths == []


def test_books_are_one_line_with_every_difference(
    world: World, far: SenderLists, command: Command
) -> None:
    configured(world, BOOKS.replace("URL", far.url))
    world.link("cus_2", "bolt")
    for number in range(12):
        tell(world, bill(far, number, "cus_1" if number % 3 else "cus_2"))

    agreed = command("reconcile", "stripe", "--books")
    assert agreed.code == 0, agreed.err
    line = "12 paid invoices, 12 grants, 0 missing, 0 extra, 0 of another amount"
    assert f"initial-credit-grant: {line}" in agreed.out
    assert "  bolt: 4 paid invoices, 4 grants, 0 missing" in agreed.out
    bill(far, 12)
    found = command("reconcile", "stripe", "--books", "--since", "30d")
    assert found.code == 1
    assert "missing  initial-credit-grant in_12" in found.out
    assert "13 paid invoices, 12 grants, 1 missing, 0 extra" in found.out
    assert "(workspace acme): 100 credits" in found.out
    assert "`receiver reconcile stripe --since 30d --books --apply" in found.out

    applied = command("reconcile", "stripe", "--books", "--apply", "--json")
    assert applied.code == 0
    totals = [one for one in applied.objects if one["what"] == "summary"]
    assert [(one["workspace"], one["objects"], one["mended"]) for one in totals] == [
        (None, 13, 1),
        ("acme", 9, 1),
        ("bolt", 4, 0),
        (None, 0, 0),
    ]
    assert command("reconcile", "stripe", "--books").code == 0


def test_a_sender_without_a_list_is_said_to_have_none(world: World, command: Command) -> None:
    slack = '[sources.slack]\nscheme = "slack"\nsecrets = ["env:STRIPE"]\n'
    (world.folder / "receiver.toml").write_text(slack)

    ran = command("reconcile", "slack")

    assert ran.code == 2
    assert "how this sender lists its events is not known; what it offers: " in ran.err
