"""`receiver events`, `replay`, `parked` and `conflicts`, as an operator uses them."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from store import attempts, inbox, outbox
from tests.command import Command
from tests.conftest import CONFIG, NOW_MS, World, stripe_body


@pytest.fixture
def command(world: World, monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(world, monkeypatch)


#: The object of `World.invoice("evt_1", "in_1")`.
PAID = {"id": "in_1", "customer": "cus_1", "status": "paid", "amount_paid": 500}


def words_of(shown: dict[str, object]) -> list[tuple[str, str]]:
    story = shown["story"]
    assert isinstance(story, list)
    return [(moment["what"], moment["words"]) for moment in story]


def test_a_live_event_on_a_test_source_is_told_what_to_set(world: World, command: Command) -> None:
    world.invoice("evt_1", "in_1", envelope={"livemode": True})

    (shown,) = command.objects("events", "show", "evt_1")

    assert shown["reason"] == "a live event on a test source"
    assert shown["next"] == [
        "it is live, and sources.stripe has livemode = false: have the sender post live events to "
        "a source with livemode = true; or, if this is that one, set it there, then "
        "`receiver replay evt_1`",
        "if it needs nothing more: `receiver events resolve evt_1 --reason TEXT`",
    ]


def test_a_body_that_is_not_json_can_only_be_resolved(world: World, command: Command) -> None:
    world.deliver("stripe", b"no JSON")

    (shown,) = command.objects("events", "show", "1")

    assert shown["reason"].startswith("body is not JSON")
    (step,) = shown["next"]
    assert step.startswith("no rule can read it: `receiver events resolve sha256:")


# Listing


def test_events_are_listed_newest_first_with_the_fields_of_the_contract(
    world: World, command: Command
) -> None:
    world.invoice("evt_1", "in_1", source="connect")
    world.clock.now_ms += 250
    world.stripe("evt_2", "feedback.created", id="f", text="hi", rating=5)

    newest, oldest = command.objects("events", "list")

    assert newest["id"] == "evt_2"
    assert oldest == {
        "row": 1,
        "source": "stripe",
        "endpoint": "connect",
        "origin": "delivery",
        "account": "",
        "id": "evt_1",
        "type": "invoice.paid",
        "state": "parked",
        "reason": "customer cus_1 is not linked to a workspace yet",
        "duplicates": 0,
        "same_body_as": None,
        "attempts": 0,
        "received_at": "2027-01-15T08:00:00.000Z",
        "settled_at": None,
        "next_attempt_at": None,
        "last_error": None,
    }
    assert newest["settled_at"] == "2027-01-15T08:00:00.250Z"


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        (["--state", "parked"], ["evt_1"]),
        (["--source", "connect"], ["evt_3"]),
        (["--type", "feedback.created"], ["evt_3", "evt_2"]),
        (["--since", "1h"], ["evt_3"]),
        (["--since", "2027-01-15T10:00:00Z"], ["evt_3"]),
        (["--limit", "2"], ["evt_3", "evt_2"]),
        (["--state", "dead"], []),
    ],
)
def test_events_are_filtered(
    world: World, command: Command, filters: list[str], found: list[str]
) -> None:
    world.invoice("evt_1", "in_1")
    world.stripe("evt_2", "feedback.created", id="f", text="hi", rating=5)
    world.clock.now_ms += 2 * 3_600_000
    world.stripe("evt_3", "feedback.created", source="connect", id="f", text="hi", rating=5)

    assert [one["id"] for one in command.objects("events", "list", *filters)] == found


@pytest.mark.parametrize(
    "act",
    [
        ["events", "list"],
        ["events", "list", "--workspace", "acme"],
        ["parked", "list"],
        ["rejections", "list"],
        ["replay", "--yes"],
    ],
)
def test_a_source_by_a_slip_is_told_and_is_no_empty_list(
    world: World, command: Command, act: list[str]
) -> None:
    ran = command(*act, "--source", "strip")

    assert ran.code == 3
    assert "there is no source strip in " in ran.err
    assert "(did you mean stripe?)" in ran.err
    assert command(*act, "--source", "stripe").code == 0


def test_a_source_that_the_config_lost_is_still_a_name(world: World, command: Command) -> None:
    world.invoice("evt_1", "in_1", source="connect")
    world.configure(CONFIG.replace("sources.connect", "sources.other").replace('"connect", ', ""))

    listed = command("events", "list", "--source", "connect")
    none = command("events", "list", "--source", "connect", "--state", "dead")

    assert "evt_1" in listed.out
    assert (none.code, none.err) == (0, "nothing is listed\n")


def test_a_reason_with_escape_codes_can_not_steer_the_terminal(
    world: World, command: Command
) -> None:
    world.invoice("evt_1", "in_1", status="\x1b[2J\x9b")

    out = command("events", "list").out + command("events", "show", "evt_1", "--payload").out

    assert "expected 'paid'" in out
    assert out.replace("\n", "").isprintable()


@pytest.mark.parametrize("text", ["", "2x", "yesterday", "h", "-2h", "2027-13-01", "9" * 30 + "d"])
def test_what_is_no_time_is_a_usage_error(command: Command, text: str) -> None:
    ran = command("events", "list", "--since", text)

    assert ran.code == 2
    assert "write 2h, 3d, 2026-11-30" in ran.err


def test_every_state_of_an_event_can_be_chosen(command: Command) -> None:
    for state in inbox.STATES:
        assert command("events", "list", "--state", state).code == 0


# Naming


def test_an_event_is_named_by_id_path_or_row_number(world: World, command: Command) -> None:
    world.invoice("evt_1", "in_1", envelope={"account": "acct_1"})

    for name in ("evt_1", "stripe/evt_1", "stripe/acct_1/evt_1", "1"):
        assert command.objects("events", "show", name)[0]["id"] == "evt_1"


def test_a_name_of_two_events_is_refused_with_names_that_work(
    world: World, command: Command
) -> None:
    world.invoice("evt_1", "in_1")
    world.invoice("evt_1", "in_1", envelope={"account": "acct_1"})

    ran = command("events", "show", "evt_1")
    names = [line.split()[1] for line in ran.err.splitlines()[1:]]
    accounts = [command.objects("events", "show", name)[0]["account"] for name in names]

    assert ran.code == 2
    assert (names, accounts) == (["stripe//evt_1", "stripe/acct_1/evt_1"], ["", "acct_1"])


def test_hints_name_an_event_so_that_the_shell_and_the_command_find_it(
    world: World, command: Command
) -> None:
    world.invoice("evt $(x)", "in_1")
    world.invoice("evt_1", "in_1")
    world.invoice("evt_1", "in_1", envelope={"account": "acct_1"})

    odd, *_ = command.objects("events", "show", "1")[0]["next"][1:]
    twin, *_ = command.objects("events", "show", "stripe//evt_1")[0]["next"][1:]

    assert "attribute 'evt $(x)' --workspace" in odd
    assert "attribute stripe//evt_1 --workspace" in twin


@pytest.mark.parametrize(
    "arguments",
    [
        ["events", "show", "evt_9"],
        ["events", "resolve", "evt_9", "--reason", "x"],
        ["replay", "evt_9"],
        ["parked", "attribute", "evt_9", "--workspace", "acme"],
        ["conflicts", "show", "9"],
        ["conflicts", "resolve", "9"],
    ],
)
def test_what_is_not_there_ends_with_3(command: Command, arguments: list[str]) -> None:
    ran = command(*arguments)

    assert (ran.code, ran.out, ran.err.count("\n")) == (3, "", 1)
    assert "9" in ran.err


# The story


def test_the_story_of_a_grant_has_its_receipt_operation_and_entry_in_order_of_time(
    world: World, command: Command
) -> None:
    world.invoice("evt_1", "in_1")
    world.invoice("evt_1", "in_1")
    world.clock.now_ms += 1000
    world.link()

    [shown] = command.objects("events", "show", "evt_1")

    assert words_of(shown) == [
        ("received", "by source stripe, signed with env:STRIPE, request r-1: parked"),
        ("redelivered", "signed with env:STRIPE, request r-2: parked"),
        ("parked", "waited for the link of customer cus_1"),
        ("released", "it was parked until then; the link of customer cus_1 came"),
        ("link", "customer cus_1 is linked to workspace acme"),
        ("operation", "grant for workspace acme by stripe/in_1/initial-credit-grant"),
        ("ledger", "+100 credits for workspace acme"),
        ("done", "nothing is left to do"),
    ]
    assert (shown["duplicates"], shown["waits_for"], shown["next"]) == (1, None, [])
    assert "redelivered  once" in command("events", "show", "evt_1").out


def test_the_story_of_a_second_event_for_an_invoice_says_who_had_granted(
    world: World, command: Command
) -> None:
    world.link()
    world.invoice("evt_1", "in_1")
    world.clock.now_ms += 1000
    world.invoice("evt_2", "in_1")

    [shown] = command.objects("events", "show", "evt_2")

    operation = (
        "operation",
        "grant for workspace acme by stripe/in_1/initial-credit-grant: done once, by event evt_1",
    )
    assert operation in words_of(shown)


def test_the_story_tells_attempts_with_their_errors(world: World, command: Command) -> None:
    world.stripe("evt_1", "handler.called", id="h", run="1 / 0")
    command("replay", "evt_1", "--reason", "again")

    [shown] = command.objects("events", "show", "evt_1")

    told = [words for what, words in words_of(shown) if what == "attempt"]
    assert told == [
        "number 1 failed: welcome at handlers.py:13: ZeroDivisionError: division by zero",
        "number 2 failed: welcome at handlers.py:13: ZeroDivisionError: division by zero",
    ]
    assert any(what == "by hand" and words.endswith(": again") for what, words in words_of(shown))
    assert shown["next"] == ["when the cause is gone: `receiver replay evt_1`"]


def test_the_story_tells_records_links_and_what_was_taken_back(
    world: World, command: Command
) -> None:
    world.stripe("evt_1", "feedback.created", id="f", text="hi", rating=5)
    world.stripe(
        "evt_2", "checkout.session.completed", customer="cus_1", client_reference_id="acme"
    )
    world.invoice("evt_3", "in_1")
    world.stripe("evt_4", "credit_note.created", id="cn_1", invoice="in_1", credits=30)

    record, link, grant = (
        words_of(command.objects("events", "show", name)[0]) for name in ("evt_1", "evt_2", "evt_3")
    )

    assert ("record", 'feedback: {"text":"hi","rating":5}') in record
    assert ("link", "customer cus_1 is linked to workspace acme") in link
    taken = "-30 credits for workspace acme, taken back by stripe/cn_1/refund-credit-grant"
    assert ("ledger", taken) in grant


def test_the_story_tells_no_link_that_the_event_does_not_ask_for(
    world: World, command: Command
) -> None:
    world.link("None", "beta")
    world.link()
    world.invoice("evt_1", "in_1")

    [shown] = command.objects("events", "show", "evt_1")

    assert not [words for what, words in words_of(shown) if what == "link"]


def test_the_story_says_what_a_parked_event_waits_for_and_what_brings_it(
    world: World, command: Command
) -> None:
    world.invoice("evt_1", "in_1", envelope={"account": "acct_1"})
    world.invoice("evt_2", "in_2", customer=None)
    world.stripe("evt_3", "credit_note.created", id="cn_1", invoice="in_9", credits=30)

    link, person, entry = (command.objects("events", "show", f"evt_{n}")[0] for n in (1, 2, 3))

    assert link["waits_for"] == {
        "for": "link",
        "source": "stripe",
        "account": "acct_1",
        "customer": "cus_1",
    }
    assert "`receiver links add stripe cus_1 WORKSPACE --account acct_1`" in link["next"]
    assert person["waits_for"]["for"] == "attribution"
    assert "`receiver parked attribute evt_2 --workspace WORKSPACE`" in person["next"][0]
    assert entry["waits_for"]["subject"] == "in_9"
    assert "stripe/in_9/initial-credit-grant" in entry["next"][0]


def test_the_story_tells_that_an_event_was_parked_and_which_act_released_it(
    world: World, command: Command
) -> None:
    world.invoice("evt_1", "in_1")
    world.invoice("evt_2", "in_2", customer="cus_2")
    world.clock.now_ms += 1000
    (parked,) = command.objects("events", "show", "evt_1")
    command("links", "add", "stripe", "cus_1", "acme", "--reason", "asked them")

    told = command("events", "show", "evt_1").out
    (released,) = command.objects("events", "show", "evt_1")
    (other,) = command.objects("events", "show", "evt_2")

    assert [(one["what"], one["at"]) for one in parked["story"]] == [
        ("received", "2027-01-15T08:00:00.000Z"),
        ("parked", "2027-01-15T08:00:00.000Z"),
    ]
    whats = [one["what"] for one in released["story"]]
    assert whats == ["received", "parked", "released", "link", "operation", "ledger", "done"]
    assert re.search("it was parked until then; links add by .*, link stripe/cus_1: asked", told)
    assert [one["what"] for one in other["story"]] == ["received", "parked"]


def test_the_story_tells_of_a_link_that_came_after_the_event(
    world: World, command: Command
) -> None:
    world.invoice("evt_1", "in_1")
    world.clock.now_ms += 1000
    fields = {"customer": "cus_1", "client_reference_id": "acme"}
    world.stripe("evt_2", "checkout.session.completed", **fields)

    (told,) = command.objects("events", "show", "evt_1")

    at = {one["what"]: one["at"] for one in told["story"]}
    assert at["parked"] == "2027-01-15T08:00:00.000Z"
    assert at["released"] == at["link"] == "2027-01-15T08:00:01.000Z"
    assert told["state"] == "done"


def test_the_story_tells_each_delivery_with_its_request_secret_answer_and_latency(
    world: World, command: Command
) -> None:
    world.invoice("evt_1", "in_1")
    world.link()
    world.invoice("evt_1", "in_1", source="connect")
    late = world.sign("stripe", stripe_body("evt_1", "invoice.paid", **PAID))
    world.clock.now_ms += 250
    world.store.write(lambda tx: world.processor.receive(tx, late, "r-9"))

    (told,) = command.objects("events", "show", "evt_1")

    deliveries = [one for one in told["story"] if one["what"] in ("received", "redelivered")]
    assert [(one["request_id"], one["answer"], one["latency_ms"]) for one in deliveries] == [
        ("r-1", "parked", 0),
        ("r-2", "duplicate", 0),
        ("r-9", "duplicate", 250),
    ]
    assert "request r-9: duplicate, written after 250 ms" in command("events", "show", "1").out


def test_only_the_newest_redeliveries_are_kept_and_the_others_are_counted(
    world: World, command: Command
) -> None:
    for _ in range(31):
        world.clock.now_ms += 1
        world.invoice("evt_1", "in_1")

    (told,) = command.objects("events", "show", "evt_1")

    again = [one for one in told["story"] if one["what"] == "redelivered"]
    assert again[0]["words"] == "10 redeliveries before this one are only counted"
    assert [one["request_id"] for one in again[1:]] == [f"r-{n}" for n in range(12, 32)]
    assert world.query("select count(*) from receiver_deliveries") == [(20,)]


@pytest.mark.parametrize(
    ("type", "fields", "answer"),
    [
        ("feedback.created", {"text": "hi", "rating": 5}, "done"),
        ("invoice.paid", {"customer": "cus_1", "status": "paid", "amount_paid": 5}, "parked"),
        ("invoice.paid", {"status": "open", "amount_paid": 5}, "quarantined"),
        ("other", {}, "ignored"),
        ("handler.called", {"run": "1 / 0"}, "pending"),
        ("handler.called", {"run": "tx.sql('insert into poison values (1)')"}, "pending"),
    ],
)
def test_what_the_first_delivery_was_answered_is_known_whatever_comes_later(
    world: World, command: Command, type: str, fields: dict[str, Any], answer: str
) -> None:
    world.stripe("evt_1", type, id="x", **fields)
    command("replay", "evt_1")
    world.link()

    (told,) = command.objects("events", "show", "evt_1")

    assert told["story"][0]["answer"] == answer


def test_what_an_event_has_waited_for_is_kept_the_newest_ten_times(world: World) -> None:
    world.invoice("evt_1", "in_1")
    for _ in range(12):
        world.clock.now_ms += 1
        world.query("update receiver_events set state = 'pending'")
        world.invoice("evt_1", "in_1")

    assert world.query("select count(*), max(since_ms) from receiver_waits") == [
        (10, world.clock() - 1)
    ]


@pytest.mark.parametrize("name", ["in_1", "cn_1"])
def test_an_event_is_found_by_what_it_is_about(world: World, command: Command, name: str) -> None:
    if name == "cn_1":
        # It waits: nothing was done for its subject yet.
        world.stripe("evt_1", "credit_note.created", id="cn_1", invoice="in_1", credits=30)
    else:
        world.link()
        world.invoice("evt_1", "in_1")

    (found,) = command.objects("events", "show", name)

    assert found["id"] == "evt_1"


def test_an_event_is_found_by_each_request_that_brought_it(world: World, command: Command) -> None:
    requests = []
    for number in range(40):
        # Some stand behind later ones, by as long as a delivery may wait.
        waited_ms = 5_000 * (number % 3)
        requests.append(f"{world.clock() - waited_ms:x}-f0fdde6c-{number:x}")
        body = stripe_body(f"evt_{number}", "other")
        (one,) = world.sign("stripe", body)
        one = msgspec.structs.replace(one, received_ms=world.clock() - waited_ms)
        world.store.write(
            functools.partial(world.processor.receive, events=(one,), request_id=requests[-1])
        )
        world.clock.now_ms += 1_000
    world.stripe("evt_7", "other")
    world.stripe("evt_7", "other", more=1)

    for number, request in enumerate(requests):
        assert command.objects("events", "show", request)[0]["id"] == f"evt_{number}"
    for request in ("r-1", "r-2"):
        assert command.objects("events", "show", request)[0]["id"] == "evt_7"
    assert command("events", "show", f"{world.clock():x}-f0fdde6c-1").code == 3


def test_several_events_of_a_workspace_or_a_subject_are_named(
    world: World, command: Command
) -> None:
    world.link()
    world.invoice("evt_1", "in_1")
    alone = command("events", "show", "acme")
    world.invoice("evt_2", "in_2", status="open")
    world.invoice("evt_3", "in_2", status="void")
    world.invoice("evt_4", "in_4")

    workspace, subject = command("events", "show", "acme"), command("events", "show", "in_2")

    assert (alone.code, alone.out.splitlines()[0]) == (0, "event  stripe/evt_1")
    assert (workspace.code, subject.code) == (2, 2)
    assert [line.split()[1] for line in workspace.err.splitlines()[1:]] == [
        "evt_1",
        "evt_4",
    ]
    assert "`receiver events list --workspace acme`; show one of these" in workspace.err
    assert "in_2 is the subject of more than one event; show one of these" in subject.err
    assert "receiver: evt_2 (row 2, invoice.paid, quarantined)" in subject.err


def test_events_are_listed_by_subject_and_by_workspace_beside_other_filters(
    world: World, command: Command
) -> None:
    world.link()
    world.invoice("evt_1", "in_1")
    world.stripe("evt_2", "customer.subscription.updated", id="s", customer="cus_1", plan="pro")
    world.invoice("evt_3", "in_1", status="open")
    world.invoice("evt_4", "in_4", customer=None)
    command("parked", "attribute", "evt_4", "--workspace", "beta")

    def listed(*filters: str) -> list[str]:
        return [one["id"] for one in command.objects("events", "list", *filters)]

    assert listed("--workspace", "acme") == ["evt_2", "evt_1"]
    assert listed("--workspace", "acme", "--type", "invoice.paid") == ["evt_1"]
    assert listed("--workspace", "beta") == ["evt_4"]
    assert listed("--subject", "in_1") == ["evt_3", "evt_1"]
    assert listed("--subject", "in_1", "--state", "done") == ["evt_1"]
    assert listed("--subject", "in_1", "--workspace", "beta") == []


def test_the_story_tells_the_same_body_under_another_id(world: World, command: Command) -> None:
    body = b'{"ref": "refs/heads/main"}'
    world.deliver("github", body, event_id="id-1", type="push")
    world.deliver("github", body, event_id="id-2", type="push")

    for name, other in (("id-1", "id-2"), ("id-2", "id-1")):
        told = words_of(command.objects("events", "show", name)[0])
        words = f"the same body came as github/{other}; who sent the id can't be proved"
        assert ("same body", words) in told


def test_the_list_flags_the_same_body_under_another_id(world: World, command: Command) -> None:
    for event_id in ("id-1", "id-2"):
        world.deliver("github", b'{"ref": "refs/heads/main"}', event_id=event_id, type="push")

    newest, oldest = command.objects("events", "list")

    assert (oldest["same_body_as"], newest["same_body_as"]) == (None, oldest["row"])
    assert command("events", "list").out.count(f"same body as event {oldest['row']}") == 1


def test_the_payload_is_printed_only_when_asked_for(world: World, command: Command) -> None:
    world.stripe("evt_1", "other", note="a secret of the customer")

    without, asked = (
        command("events", "show", "evt_1"),
        command("events", "show", "evt_1", "--payload"),
    )

    assert "a secret of the customer" not in without.out + command("events", "list").out
    assert '      "note": "a secret of the customer"\n' in asked.out


# Closing and running again


@pytest.mark.parametrize("state", ["parked", "quarantined", "pending", "dead"])
def test_an_unfinished_event_is_resolved_as_ignored_with_its_reason(
    world: World, command: Command, state: str
) -> None:
    world.invoice("evt_1", "in_1")
    settled = NOW_MS if state == "dead" else None
    world.query("update receiver_events set state = ?, settled_ms = ?", state, settled)

    ran = command("events", "resolve", "evt_1", "--reason", "a test of ours")

    known = world.event("evt_1")
    assert (ran.code, known.state, known.reason) == (0, "ignored", "a test of ours")
    assert world.query("select count(*) from receiver_parked") == [(0,)]


def test_a_finished_event_is_not_resolved(world: World, command: Command) -> None:
    world.stripe("evt_1", "feedback.created", id="f", text="hi", rating=5)

    ran = command("events", "resolve", "evt_1", "--reason", "x")

    assert (ran.code, world.state("evt_1")) == (1, "done")
    assert "done already" in ran.err


def test_a_replay_after_the_rule_was_corrected_applies_the_event(
    world: World, command: Command
) -> None:
    world.link()
    world.invoice("evt_1", "in_1", status="settled")
    world.configure(
        CONFIG.replace('"data.object.status" = "paid"', '"data.object.status" = "settled"')
    )

    ran = command("replay", "evt_1", "--reason", "status is called otherwise")

    assert (ran.code, ran.out) == (0, "evt_1  done\n")
    assert world.balance() == 100


def test_a_replay_needs_no_secrets_and_judges_as_the_server_does(
    world: World, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Bound to a mode, the secret quarantines what it signs of the other one.
    world.configure(
        CONFIG.replace(
            'secrets = ["env:STRIPE"]\nlivemode = false',
            'secrets = [{ secret = "env:STRIPE", livemode = true }]\nlivemode = false',
            1,
        )
    )
    world.link()
    world.invoice("evt_1", "in_1")
    monkeypatch.delenv("STRIPE", raising=False)

    ran = command("replay", "evt_1")

    assert (ran.code, world.state("evt_1")) == (1, "quarantined")
    assert "secret env:STRIPE is for live events" in ran.out


def test_a_replay_by_filters_asks_first_and_runs_the_oldest_first(
    world: World, command: Command
) -> None:
    world.invoice("evt_1", "in_1", status="open")
    world.invoice("evt_2", "in_2", status="open")
    world.invoice("evt_3", "in_3")
    world.link()

    refused = command("replay", "--state", "quarantined")
    declined = command("replay", "--state", "quarantined", typed="n\n")
    ran = command("replay", "--state", "quarantined", "--type", "invoice.paid", typed="y\n")

    assert (refused.code, declined.code, ran.code) == (2, 1, 1)
    assert "--yes" in refused.err
    assert "nothing was done, as you said no" in declined.err
    assert [line.split()[0] for line in ran.out.splitlines()[:2]] == ["evt_1", "evt_2"]
    assert "2 events were run again: 2 quarantined" in ran.out
    assert world.query("select count(*) from receiver_audit") == [(2,)]


def test_a_replay_says_of_each_event_why_it_was_not_run(world: World, command: Command) -> None:
    world.invoice("evt_1", "in_1")
    world.stripe("evt_2", "feedback.created", id="f", text="hi", rating=5)
    world.query("delete from receiver_payloads where event = 1")

    ran = command("replay", "evt_1", "evt_2", "--yes")

    assert ran.code == 1
    assert (
        "evt_1  not run: its body was not kept, so it can't be run again\nevt_2  done: all"
        in ran.out
    )
    assert world.state("evt_1") == "parked"


def test_a_replay_of_many_events_runs_each_once(world: World, command: Command) -> None:
    for number in range(250):
        world.invoice(f"evt_{number}", f"in_{number}", status="open")
    world.link()
    world.configure(
        CONFIG.replace('"data.object.status" = "paid"', '"data.object.status" = "open"')
    )

    ran = command("replay", "--since", "1h", "--yes")

    assert (ran.code, world.balance()) == (0, 25_000)
    assert "250 events were run again: 250 done" in ran.out


def test_a_replay_of_nothing_in_particular_is_a_usage_error(command: Command) -> None:
    assert command("replay").code == 2
    assert command("replay", "evt_1", "--state", "parked").code == 2


def test_a_replayed_grant_releases_the_reversal_that_waited_for_it(
    world: World, command: Command
) -> None:
    world.invoice("evt_1", "in_1", status="open")
    world.stripe("evt_2", "credit_note.created", id="cn_1", invoice="in_1", credits=30)
    world.link()
    world.configure(
        CONFIG.replace('"data.object.status" = "paid"', '"data.object.status" = "open"')
    )

    command("replay", "evt_1")

    assert (world.state("evt_2"), world.balance()) == ("done", 70)


# Parked


def test_parked_events_are_listed_with_what_they_wait_for(world: World, command: Command) -> None:
    world.invoice("evt_1", "in_1")
    world.invoice("evt_2", "in_2", source="connect", customer=None)

    one, two = command.objects("parked", "list")

    assert (one["id"], one["waits_for"]["customer"]) == ("evt_1", "cus_1")
    assert one["parked_at"] == "2027-01-15T08:00:00.000Z"
    assert (two["id"], two["waits_for"]["for"]) == ("evt_2", "attribution")
    assert len(command.objects("parked", "list", "--source", "connect")) == 1
    assert "the link of customer cus_1" in command("parked", "list").out


def test_an_event_without_a_customer_is_attributed_by_hand_and_applied(
    world: World, command: Command
) -> None:
    world.invoice("evt_1", "in_1", customer=None)

    ran = command("parked", "attribute", "evt_1", "--workspace", "acme", "--reason", "they wrote")

    assert (ran.code, world.state("evt_1"), world.balance()) == (0, "done", 100)
    assert "evt_1 is attributed to acme and done" in ran.out
    assert world.query("select count(*) from receiver_links") == [(0,)]


def test_an_attributed_event_that_still_fails_ends_with_1(world: World, command: Command) -> None:
    world.invoice("evt_1", "in_1", status="open")

    ran = command("parked", "attribute", "evt_1", "--workspace", "acme")

    assert (ran.code, world.state("evt_1")) == (1, "quarantined")
    assert "expected 'paid'" in ran.out


def test_a_finished_event_is_not_attributed(world: World, command: Command) -> None:
    world.link()
    world.invoice("evt_1", "in_1")

    ran = command("parked", "attribute", "evt_1", "--workspace", "beta")

    assert (ran.code, world.balance(), world.balance("beta")) == (1, 100, 0)


# Conflicts


def test_a_conflict_is_shown_as_a_diff_that_names_the_volatile_fields(
    world: World, command: Command
) -> None:
    world.invoice("evt_1", "in_1")
    world.invoice("evt_1", "in_1", amount_paid=7, envelope={"pending_webhooks": 3})
    world.invoice("evt_1", "in_1", amount_paid=7)

    [listed] = command.objects("conflicts", "list")
    ran = command("conflicts", "show", 1)
    [shown] = command.objects("conflicts", "show", 1)

    assert (listed["id"], listed["deliveries"], listed["resolved_at"]) == ("evt_1", 2, None)
    assert '-      "amount_paid": 500,\n+      "amount_paid": 7,\n' in ran.out
    assert "not compared  pending_webhooks" in ran.out
    assert "2 times" in ran.out
    assert shown["volatile"] == ["pending_webhooks"]
    assert '+      "amount_paid": 7,' in shown["diff"]


def test_a_resolved_conflict_is_listed_only_when_asked_for(world: World, command: Command) -> None:
    world.invoice("evt_1", "in_1")
    world.invoice("evt_1", "in_1", amount_paid=7)

    first, second = command("conflicts", "resolve", 1), command("conflicts", "resolve", 1)

    assert (first.code, second.code) == (0, 1)
    assert command.objects("conflicts", "list") == []
    assert len(command.objects("conflicts", "list", "--all")) == 1


def test_a_conflict_with_a_body_that_is_not_json_is_shown_as_text(
    world: World, command: Command
) -> None:
    world.deliver("github", b"{not json", event_id="id-1", type="push")
    world.deliver("github", b"{other \x1b[2J \xff", event_id="id-1", type="push")

    ran = command("conflicts", "show", 1)

    assert "-{not json\n+{other \\x1b[2J \\xff\n" in ran.out


# Following


@contextmanager
def tail(world: World, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    words = [sys.executable, "cli.py", "events", "tail", "--json", *arguments]
    with subprocess.Popen(
        [*words, "-c", str(world.folder / "receiver.toml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=os.path.dirname(os.path.dirname(__file__)),
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_tail_prints_the_newest_events_and_then_each_new_one(world: World) -> None:
    world.invoice("evt_1", "in_1")
    world.invoice("evt_2", "in_2")

    with tail(world, "-n", "1") as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        world.invoice("evt_3", "in_3")
        world.invoice("evt_4", "in_4")
        later = [json.loads(process.stdout.readline()) for _ in range(2)]
        world.invoice("evt_5", "in_5")
        later.append(json.loads(process.stdout.readline()))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)

    assert [one["id"] for one in (first, *later)] == ["evt_2", "evt_3", "evt_4", "evt_5"]
    assert (process.returncode, errors) == (0, "")


def test_tail_ends_when_nobody_reads_it_any_more(world: World) -> None:
    world.invoice("evt_1", "in_1")

    with tail(world) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        code, errors = process.wait(timeout=30), process.stderr.read()

    assert (code, errors) == (0, "")


# What the worker does


QUEUED = """
[sources.slow]
scheme = "stripe"
secrets = ["env:STRIPE"]
mode = "queued"

[[rules]]
operation = "ask"
source = "slow"
on = ["ask"]
subject = "data.object.id"
prepare = "ask"
call = "use"
"""

ASKED = """
import pathlib


def ask(event):
    with open(pathlib.Path(__file__).with_name("asked"), "a") as file:
        file.write(event.id + " ")
    return eval(event.body["data"]["object"]["answer"])


def use(event, tx):
    tx.grant("credits", event.prepared, workspace="acme")


def welcome(event, tx):
    raise ValueError("boom")
"""

SENDING = """
[[rules]]
operation = "announce"
source = "stripe"
on = ["invoice.announced"]
subject = "data.object.id"
send = [{ to = "app" }, { to = "app", name = "again" }]

[destinations.app]
kind = "http"
url = "http://127.0.0.1:1/"
"""


def with_worker(world: World, handlers: str = ASKED) -> None:
    """A worker is to run; none does, so what it has to do is left as it stands."""
    (world.folder / "handlers.py").write_text(handlers)
    text = CONFIG.replace('run = "off"', 'run = "inside"\nattempts_max = 1')
    world.configure(text + QUEUED + SENDING)


def fix(world: World) -> None:
    (world.folder / "handlers.py").write_text(ASKED.replace('raise ValueError("boom")', "pass"))


def asked(world: World) -> list[str]:
    path = world.folder / "asked"
    return path.read_text().split() if path.exists() else []


def test_dead_events_are_listed_with_their_error_and_replayed_once_fixed(
    world: World, command: Command
) -> None:
    with_worker(world)
    world.stripe("evt_1", "handler.called", id="h")
    assert world.state("evt_1") == "dead"

    [listed] = command.objects("events", "list", "--state", "dead")
    out = command("events", "list", "--state", "dead").out
    [shown] = command.objects("events", "show", "evt_1")
    still = command("replay", "evt_1")
    fix(world)
    ran = command("replay", "--state", "dead", "--reason", "fixed")

    assert (listed["id"], listed["attempts"]) == ("evt_1", 1)
    assert "ValueError: boom" in out
    assert shown["next"][0] == "when the cause is gone: `receiver replay evt_1`"
    assert (still.code, still.out.splitlines()[0]) == (
        1,
        "evt_1  dead: welcome at handlers.py:16: ValueError: boom",
    )
    assert (ran.code, ran.out) == (0, "evt_1  done\n")
    tried = [words for what, words in words_of(command.objects("events", "show", "evt_1")[0])]
    assert [words for words in tried if "boom" in words] == [
        "number 1 failed: welcome at handlers.py:16: ValueError: boom",
        "number 2 failed: welcome at handlers.py:16: ValueError: boom",
    ]


def test_a_pending_event_is_replayed_before_its_next_attempt(
    world: World, command: Command
) -> None:
    with_worker(world)
    world.configure((world.folder / "receiver.toml").read_text().replace("max = 1\n", "max = 9\n"))
    world.processor.random = lambda: 0.9
    world.stripe("evt_1", "handler.called", id="h")
    [shown] = command.objects("events", "show", "evt_1")
    fix(world)

    ran = command("replay", "evt_1")

    assert shown["next"] == ["to try it now: `receiver replay evt_1`"]
    assert (ran.code, world.event("evt_1").next_attempt_ms) == (0, None)


def test_a_replay_of_a_queued_event_runs_its_prepare_function_first(
    world: World, command: Command
) -> None:
    with_worker(world)
    assert world.stripe("evt_1", "ask", source="slow", id="a", answer="40 + 2") == "pending"

    ran = command("replay", "--state", "pending")

    assert (ran.code, world.balance(), asked(world)) == (0, 42, ["evt_1"])


@pytest.mark.parametrize("answer", ["1 / 0", "exit(3)"])
def test_a_prepare_function_that_fails_is_told_and_changes_nothing(
    world: World, command: Command, answer: str
) -> None:
    with_worker(world)
    world.stripe("evt_1", "ask", source="slow", id="a", answer=answer)
    before = world.event("evt_1", source="slow")

    ran = command("replay", "evt_1")

    assert ran.code == 1
    assert "evt_1  not run: a prepare function failed at " in ran.out
    assert world.event("evt_1", source="slow") == before


def test_a_replay_leaves_what_a_worker_has_and_does_not_prepare_it(
    world: World, command: Command
) -> None:
    with_worker(world)
    world.stripe("evt_1", "ask", source="slow", id="a", answer="1")
    until_ms = world.clock() + 5000
    world.store.write(lambda tx: inbox.lease(tx, "w", until_ms, 86_400_000))

    ran = command("replay", "evt_1")
    [shown] = command.objects("events", "show", "evt_1")

    assert "a worker is trying evt_1 now: try again in 6 s" in ran.out
    assert asked(world) == []
    assert "a worker has it until its lease ends" in shown["next"][0]
    assert "leased until" in command("events", "show", "evt_1").out


def test_a_replay_closes_the_attempt_of_a_worker_that_ended(world: World, command: Command) -> None:
    with_worker(world)
    world.stripe("evt_1", "ask", source="slow", id="a", answer="1")
    until_ms = world.clock() + 5000
    world.store.write(lambda tx: inbox.lease(tx, "w", until_ms, 86_400_000))
    world.store.write(lambda tx: attempts.start(tx, 1, event=1))
    world.clock.now_ms += 6000

    ran = command("replay", "evt_1")
    [shown] = command.objects("events", "show", "evt_1")

    assert ran.code == 0
    assert ("attempt", "number 1 unknown after 6 s: its lease ran out") in words_of(shown)


def test_the_story_tells_the_messages_that_an_event_owes_and_their_sends(
    world: World, command: Command
) -> None:
    with_worker(world)
    world.stripe("evt_1", "invoice.announced", id="in_1")
    for number, outcome in ((1, "sent"), (2, "dead")):
        world.store.write(functools.partial(attempts.start, attempt=1, message=number))
        world.clock.now_ms += 1500
        world.store.write(
            functools.partial(
                attempts.finish, attempt=1, outcome=outcome, error=None, message=number
            )
        )
        why = "404 Not Found" if outcome == "dead" else None
        world.store.write(
            functools.partial(outbox.settle, message=number, state=outcome, error=why)
        )

    [shown] = command.objects("events", "show", "evt_1")

    told = words_of(shown)
    assert ("message", "message 1 to app is sent") in told
    assert ("message", "message 2 to app (again) is dead: 404 Not Found") in told
    assert ("send", "message 1 to app: number 1 sent after 1.5 s") in told
    assert shown["next"] == ["`receiver outbox show 2` says what to do with that message"]
    [sent] = [one for one in shown["story"] if one["what"] == "message" and one["id"] == 1]
    assert sent["operation_key"].startswith("op_")
