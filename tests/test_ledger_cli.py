"""`receiver links`, `ledger`, `balance` and `records`, as an operator uses them."""

import re

import pytest

from tests.command import Command
from tests.conftest import CONFIG, NOW_MS, World

GRANT = ("ledger", "grant", "--source", "stripe", "--operation", "initial-credit-grant")
ACME = ("--workspace", "acme")
ADJUST = ("ledger", "adjust", *ACME, "--unit", "credits", "--reason", "goodwill")


@pytest.fixture
def command(world: World, monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(world, monkeypatch)


# Links


def test_adding_a_link_applies_what_was_parked_on_it_and_says_so(
    world: World, command: Command
) -> None:
    world.invoice("evt_1", "in_1")
    world.invoice("evt_2", "in_2")
    world.invoice("evt_3", "in_3", customer="cus_2")

    ran = command("links", "add", "stripe", "cus_1", "acme", "--reason", "they told us")

    assert ran.code == 0
    assert "customer cus_1 of stripe is linked to workspace acme\n" in ran.out
    assert "2 parked events were released: 2 done\n" in ran.out
    assert (world.balance(), world.state("evt_3")) == (200, "parked")


def test_events_that_end_otherwise_than_done_after_a_link_are_counted_and_pointed_to(
    world: World, command: Command
) -> None:
    world.invoice("evt_1", "in_1")
    world.stripe("evt_2", "customer.subscription.updated", id="s", customer="cus_1", plan="pro")
    world.query(
        "insert into receiver_operations values ("
        "'stripe', '', 'in_1', 'initial-credit-grant', 'record',"
        " null, null, null, null, null, null, 1)"
    )

    ran = command("links", "add", "stripe", "cus_1", "acme")

    assert "2 parked events were released: 1 done, 1 quarantined" in ran.out
    assert "`receiver events list --state quarantined" in ran.out


def test_a_link_is_of_one_account(world: World, command: Command) -> None:
    world.invoice("evt_1", "in_1", envelope={"account": "acct_1"})

    command("links", "add", "stripe", "cus_1", "acme")
    before = world.state("evt_1", account="acct_1")
    command("links", "add", "stripe", "cus_1", "beta", "--account", "acct_1")

    assert (before, world.state("evt_1", account="acct_1")) == ("parked", "done")
    assert (world.balance(), world.balance("beta")) == (0, 100)


@pytest.mark.parametrize("account", ["a\n", "acct_1 ", " acct_1", "a\u200b"])
def test_an_account_that_no_event_can_have_is_refused(command: Command, account: str) -> None:
    grant = ("--subject", "in_1", "--operation", "initial-credit-grant")
    of = ("--workspace", "acme", "--amount", 100)

    granted = command("ledger", "grant", "--source", "stripe", "--account", account, *grant, *of)
    linked = command("links", "add", "stripe", "cus_1", "acme", "--account", account)

    assert (granted.code, linked.code) == (2, 2)
    assert "white space around it or a control character" in linked.err
    assert command.objects("ledger", "list") == []
    assert command.objects("links", "list") == []


def test_a_link_of_a_pinned_source_is_of_its_account(world: World, command: Command) -> None:
    ran = command("links", "add", "shopify", "cus_1", "acme")

    [link] = command.objects("links", "list")
    assert link == {
        "source": "shopify",
        "account": "one.myshopify.com",
        "customer": "cus_1",
        "workspace": "acme",
        "created_at": "2027-01-15T08:00:00.000Z",
    }
    assert "customer cus_1 of account one.myshopify.com of shopify" in ran.out
    assert command("links", "remove", "shopify", "cus_1").code == 0


def test_an_identity_with_several_pinned_accounts_wants_the_account(
    world: World, command: Command
) -> None:
    other = 'account = "two.myshopify.com"\nidentity = "shopify"\nsecrets = ["env:SHOPIFY"]'
    world.configure(
        CONFIG.replace("[sources.shopify]", '[sources.shop]\nidentity = "shopify"')
        .replace("[[rules]]", f'[sources.second]\nscheme = "shopify"\n{other}\n\n[[rules]]', 1)
        .replace('source = "shopify"', 'source = ["shop", "second"]')
    )

    ran = command("links", "add", "shopify", "cus_1", "acme")

    assert ran.code == 2
    assert "--account ('one.myshopify.com', 'two.myshopify.com')" in ran.err
    assert command("links", "add", "second", "cus_1", "acme").code == 0


def test_a_link_to_another_workspace_is_refused_unless_it_is_to_be_repointed(
    world: World, command: Command
) -> None:
    world.link()
    world.invoice("evt_1", "in_1")

    same = command("links", "add", "stripe", "cus_1", "acme")
    refused = command("links", "add", "stripe", "cus_1", "beta")
    workspaces = [one["workspace"] for one in command.objects("links", "list")]
    repointed = command("links", "add", "stripe", "cus_1", "beta", "--repoint")
    world.invoice("evt_2", "in_2")

    assert (same.code, refused.code, repointed.code) == (0, 1, 0)
    assert "already linked to workspace acme" in same.out
    assert "linked to workspace acme: --repoint" in refused.err
    assert workspaces == ["acme"]
    assert (world.balance(), world.balance("beta")) == (100, 100)


def test_a_removed_link_parks_what_comes_later(world: World, command: Command) -> None:
    world.link()

    first = command("links", "remove", "stripe", "cus_1")
    again = command("links", "remove", "stripe", "cus_1")

    assert (first.code, again.code) == (0, 3)
    assert "no longer linked to workspace acme" in first.out
    assert world.invoice("evt_1", "in_1") == "parked"


def test_links_are_filtered(world: World, command: Command) -> None:
    world.link("cus_1", "acme")
    world.link("cus_2", "beta")

    def customers(*filters: str) -> set[str]:
        return {one["customer"] for one in command.objects("links", "list", *filters)}

    assert customers("--source", "connect") == {"cus_1", "cus_2"}
    assert customers("--customer", "cus_2") == customers("--workspace", "beta") == {"cus_2"}
    assert customers("--source", "github") == set()
    assert len(customers("--limit", "1")) == 1


@pytest.mark.parametrize(
    "act",
    [
        "links add stripe cus_2 WHOSE",
        "ledger grant --source stripe --subject in_9 --operation initial-credit-grant "
        "--amount 100 --workspace WHOSE",
        "ledger adjust --unit credits --amount 5 --reason x --key k9 --workspace WHOSE",
    ],
)
def test_a_workspace_that_had_nothing_is_pointed_out_once(
    world: World, command: Command, act: str
) -> None:
    world.link()

    known = command(*act.replace("WHOSE", "acme").replace("9", "8").split())
    slip = command(*act.replace("WHOSE", "acmme").replace("cus_2", "cus_3").split())
    again = command(*act.replace("WHOSE", "acmme").replace("cus_2", "cus_3").split())

    assert [ran.code for ran in (known, slip, again)] == [0, 0, 0]
    assert slip.err == "workspace acmme had nothing before: is it spelt as your app has it?\n"
    assert (known.err, again.err) == ("", "")


def test_a_misspelt_source_is_not_found(command: Command) -> None:
    ran = command("links", "add", "strpe", "cus_1", "acme")

    assert ran.code == 3
    assert "there is no source strpe" in ran.err
    assert "did you mean stripe?" in ran.err


# Granting by hand


def test_a_grant_by_hand_takes_the_unit_of_the_rule_and_the_key_of_the_webhook(
    world: World, command: Command
) -> None:
    world.link()

    ran = command(*GRANT, "--subject", "in_1", *ACME, "--amount", 100, "--reason", "lost")
    [entry] = command.objects("ledger", "list")

    assert ran.code == 0
    assert entry == {
        "source": "stripe",
        "account": "",
        "subject": "in_1",
        "operation": "initial-credit-grant",
        "workspace": "acme",
        "unit": "credits",
        "amount": 100,
        "target_subject": None,
        "target_operation": None,
        "created_at": "2027-01-15T08:00:00.000Z",
    }
    assert (world.invoice("evt_1", "in_1"), world.balance()) == ("done", 100)
    assert "by the app or by hand" in command("events", "show", "evt_1").out


def test_a_grant_by_hand_is_made_once_and_never_otherwise(world: World, command: Command) -> None:
    arguments = (*GRANT, "--subject", "in_1", *ACME, "--amount", "100")

    codes = [command(*arguments).code for _ in range(2)]
    other = command(*GRANT, "--subject", "in_1", "--workspace", "beta", "--amount", "100")

    assert (codes, other.code, world.balance()) == ([0, 0], 1, 100)
    assert "was done as grant of 100 credits for workspace acme" in other.err


def test_a_grant_by_hand_that_the_rule_would_not_make_is_pointed_out(command: Command) -> None:
    ran = command(*GRANT, "--subject", "in_1", *ACME, "--amount", 90)

    assert ran.code == 0
    assert "the rule grants 100 credits" in ran.err


def test_a_grant_by_hand_under_an_operation_that_no_webhook_has_is_refused(
    world: World, command: Command
) -> None:
    operations = ("initial-credit-grnt", "refund-credit-grant", "count-push")

    for operation in operations:
        ran = command(*GRANT[:-1], operation, "--subject", "in_1", *ACME, "--amount", 100)
        assert ran.code == 3
        assert "ledger adjust" in ran.err
    assert world.query("select count(*) from receiver_ledger") == [(0,)]


def test_a_grant_by_hand_releases_the_reversal_that_waited_for_it(
    world: World, command: Command
) -> None:
    world.stripe("evt_1", "credit_note.created", id="cn_1", invoice="in_1", credits=30)

    ran = command(*GRANT, "--subject", "in_1", *ACME, "--amount", 100)

    assert "1 parked event was released: 1 done" in ran.out
    assert world.balance() == 70


def test_what_a_handler_grants_wants_its_unit(world: World, command: Command) -> None:
    arguments = (*GRANT[:-1], "welcome", "--subject", "h1", *ACME, "--amount", "5")

    without, with_unit = command(*arguments), command(*arguments, "--unit", "credits")

    assert (without.code, with_unit.code, world.balance()) == (2, 0, 5)


# Adjusting and taking back


def test_an_adjustment_has_a_key_of_its_own_each_time(world: World, command: Command) -> None:
    command(*ADJUST, "--amount", 5)
    command(*ADJUST, "--amount", 5)

    entries = command.objects("ledger", "list", "--operation", "adjustment")

    assert world.balance() == 10
    assert {one["source"] for one in entries} == {"operator"}
    assert all(re.fullmatch("[0-9a-f]{16}", one["subject"]) for one in entries)


def test_an_adjustment_with_a_key_is_made_once(world: World, command: Command) -> None:
    first = command(*ADJUST, "--amount", "-5", "--key", "ticket-7", "--yes")
    again = command(*ADJUST, "--amount", "-5", "--key", "ticket-7", "--yes")
    other = command(*ADJUST, "--amount", "5", "--key", "ticket-7")

    assert (first.code, again.code, other.code, world.balance()) == (0, 0, 1, -5)
    assert "had been adjusted" in again.out
    assert "another --key" in other.err


def test_an_adjustment_below_zero_is_asked_about(world: World, command: Command) -> None:
    refused = command(*ADJUST, "--amount", -5, "--key", "k")
    declined = command(*ADJUST, "--amount", -5, "--key", "k", typed="n\n")
    before = world.balance()
    agreed = command(*ADJUST, "--amount", -5, "--key", "k", typed="y\n")
    again = command(*ADJUST, "--amount", -5, "--key", "k")
    forced = command(*ADJUST, "--amount", -1, "--yes")

    assert [one.code for one in (refused, declined, agreed, again, forced)] == [2, 1, 0, 0, 0]
    assert "this takes the balance of workspace acme from 0 to -5 credits" in refused.err
    assert "--yes" in refused.err
    assert (before, world.balance()) == (0, -6)


def test_an_adjustment_that_gives_to_an_overdrawn_balance_is_not_asked_about(
    world: World, command: Command
) -> None:
    command(*ADJUST, "--amount", -5, "--yes")

    assert command(*ADJUST, "--amount", 2).code == 0
    assert world.balance() == -3


def test_an_adjustment_in_a_unit_that_nothing_has_is_refused(
    world: World, command: Command
) -> None:
    words = ("ledger", "adjust", *ACME, "--amount", 3, "--reason", "x", "--unit")
    refused = command(*words, "credit")
    taken = command(*words, "seats", "--yes")
    known = command(*words, "seats")

    assert (refused.code, taken.code, known.code) == (3, 0, 0)
    assert "has the unit credit (did you mean credits?): --yes takes it as new" in refused.err


def test_an_adjustment_wants_a_reason(world: World, command: Command) -> None:
    ran = command(*ADJUST[:-2], "--amount", 5)

    assert (ran.code, world.balance()) == (2, 0)


@pytest.mark.parametrize(
    "named",
    [
        ("stripe/in/1/initial-credit-grant",),
        ("connect/in/1/initial-credit-grant",),
        ("--source", "connect", "--subject", "in/1", "--operation", "initial-credit-grant"),
    ],
)
def test_an_entry_is_taken_back_by_its_key_or_its_parts(
    world: World, command: Command, named: tuple[str, ...]
) -> None:
    world.link()
    world.invoice("evt_1", "in/1")

    part = command("ledger", "revert", *named, "--amount", 30, "--reason", "x")
    rest = command("ledger", "revert", *named, "--reason", "x")
    none = command("ledger", "revert", *named, "--reason", "x")

    assert (part.code, rest.code, none.code, world.balance()) == (0, 0, 1, 0)
    assert "30 credits were taken back from workspace acme" in part.out
    assert "70 credits" in rest.out
    assert "0 credits are left" in none.err


def test_an_entry_of_an_account_is_not_taken_for_one_without(
    world: World, command: Command
) -> None:
    world.link(account="acct_1")
    world.invoice("evt_1", "in_1", envelope={"account": "acct_1"})

    wrong = command("ledger", "revert", "stripe/in_1/initial-credit-grant", "--reason", "x")
    right = command("ledger", "revert", "stripe/acct_1/in_1/initial-credit-grant", "--reason", "x")

    assert (wrong.code, right.code, world.balance()) == (3, 0, 0)


def test_what_a_source_did_that_the_config_lost_can_be_undone(
    world: World, command: Command
) -> None:
    world.link()
    world.invoice("evt_1", "in_1")
    world.configure('[sources.other]\nscheme = "stripe"\nsecrets = ["env:STRIPE"]\n')

    by_key = command(
        "ledger", "revert", "stripe/in_1/initial-credit-grant", "--amount", 1, "--reason", "x"
    )
    parts = ("--source", "stripe", "--subject", "in_1", "--operation", "initial-credit-grant")
    by_parts = command("ledger", "revert", *parts, "--reason", "x")
    unlinked = command("links", "remove", "stripe", "cus_1")

    assert (by_key.code, by_parts.code, unlinked.code, world.balance()) == (0, 0, 0, 0)


def test_a_deduction_is_not_taken_back_but_adjusted(world: World, command: Command) -> None:
    command(*ADJUST, "--amount", "-5", "--key", "k", "--yes")

    ran = command("ledger", "revert", "operator/k/adjustment", "--reason", "x")

    assert (ran.code, world.balance()) == (1, -5)
    assert "`receiver ledger adjust` gives it again" in ran.err


def test_an_entry_to_take_back_is_named_in_one_way(command: Command) -> None:
    both = command(
        "ledger",
        "revert",
        "a/b/c",
        "--source",
        "a",
        "--subject",
        "b",
        "--operation",
        "c",
        "--reason",
        "x",
    )

    assert command("ledger", "revert", "--reason", "x").code == both.code == 2


# Looking


def test_the_ledger_is_filtered(world: World, command: Command) -> None:
    world.link()
    world.invoice("evt_1", "in_1")
    world.clock.now_ms += 7_200_000
    world.invoice("evt_2", "in_2")
    command(*ADJUST, "--amount", 5, "--key", "k")

    def subjects(*filters: str) -> set[str]:
        return {one["subject"] for one in command.objects("ledger", "list", *filters)}

    assert subjects() == {"in_1", "in_2", "k"}
    assert subjects("--workspace", "beta") == set()
    assert subjects("--subject", "in_1") == {"in_1"}
    assert subjects("--operation", "adjustment") == {"k"}
    assert subjects("--since", "1h") == {"in_2", "k"}


def test_balances_are_shown_by_workspace_and_unit(world: World, command: Command) -> None:
    world.link()
    world.invoice("evt_1", "in_1")
    seats = ("ledger", "adjust", "--unit", "seats", "--yes", "--reason", "x")
    command(*seats, *ACME, "--amount", 3)
    command(*seats, "--workspace", "beta", "--amount", 2)

    assert command.objects("balance") == [
        {"workspace": "acme", "unit": "credits", "balance": 100},
        {"workspace": "acme", "unit": "seats", "balance": 3},
        {"workspace": "beta", "unit": "seats", "balance": 2},
    ]
    assert [one["balance"] for one in command.objects("balance", "acme")] == [100, 3]
    assert [one["balance"] for one in command.objects("balance", "--unit", "seats")] == [3, 2]


def test_a_workspace_without_entries_is_not_found(world: World, command: Command) -> None:
    assert command("balance").code == 0
    assert command("balance", "acme").code == 3


@pytest.mark.parametrize(
    "tamper",
    [
        "update receiver_balances set balance = 1000 where workspace = 'acme'",
        "delete from receiver_balances where workspace = 'acme'",
        "insert into receiver_balances values ('beta', 'credits', 5)",
    ],
)
def test_a_balance_that_differs_from_its_entries_ends_with_1(
    world: World, command: Command, tamper: str
) -> None:
    world.link()
    world.invoice("evt_1", "in_1")
    world.query(tamper)

    ran = command("balance")

    assert ran.code == 1
    assert "something else than Receiver wrote to receiver_balances" in ran.err


def test_records_are_listed_with_their_data_and_filtered(world: World, command: Command) -> None:
    world.stripe("evt_1", "feedback.created", id="f", text="hi", rating=5)
    world.clock.now_ms += 7_200_000
    world.deliver("github", b'{"ref": "main"}', event_id="id-1", type="push")

    push, feedback = command.objects("records")

    assert (push["kind"], push["data"]) == ("push", "main")
    assert feedback == {
        "source": "stripe",
        "account": "",
        "subject": "evt_1",
        "operation": "feedback-alert",
        "kind": "feedback",
        "workspace": None,
        "data": {"text": "hi", "rating": 5},
        "created_at": "2027-01-15T08:00:00.000Z",
    }
    assert command.objects("records", "--kind", "push") == [push]
    assert command.objects("records", "--subject", "evt_1") == [feedback]
    assert command.objects("records", "--since", "1h") == [push]
    assert command.objects("records", "--workspace", "acme") == []


def test_a_listing_that_ends_at_its_limit_says_so(world: World, command: Command) -> None:
    for number in range(3):
        command(*ADJUST, "--amount", 1, "--key", f"k-{number}")

    assert "the first 2 are shown" in command("ledger", "list", "--limit", 2).err
    assert command("ledger", "list", "--limit", 4).err == ""
    assert world.clock() == NOW_MS
