"""`receiver outbox`, as an operator uses it, on messages that a worker tried to send."""

import json
from typing import Any

import pytest

from receiver.destinations import Later, Never, Result, Sent, Unknown
from store import attempts, outbox
from store.outbox import Message
from tests.command import Command
from tests.conftest import CONFIG, World
from tests.test_worker import SENDING, leased, message, settle

STEP_MS = 60_000


@pytest.fixture
def owing(world: World) -> World:
    """An event that owes two messages to one destination."""
    text = CONFIG.replace('run = "off"', 'run = "inside"')
    world.configure(text + SENDING.replace("URL", "http://127.0.0.1:1/hook"))
    world.stripe("evt_1", "invoice.announced", id="in_1")
    return world


@pytest.fixture
def command(owing: World, monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(owing, monkeypatch)


def attempt(world: World, result: Result) -> Message:
    """One attempt at the message that is due, 1.5 s long, that ends so."""
    lease = leased(world)
    world.clock.now_ms += 1_500
    assert settle(world, lease, result)
    return message(world, lease.message.id)


def told(shown: dict[str, Any]) -> list[tuple[str, str]]:
    return [(moment["what"], moment["words"]) for moment in shown["story"]]


# Looking


def test_messages_are_listed_newest_first_with_the_fields_of_the_contract(
    owing: World, command: Command
) -> None:
    attempt(owing, Never("404 Not Found"))

    newest, oldest = command.objects("outbox", "list")

    assert oldest == {
        "id": 1,
        "operation_key": message(owing).operation_key,
        "source": "stripe",
        "account": "",
        "subject": "in_1",
        "operation": "announce",
        "destination": "app",
        "name": "",
        "state": "dead",
        "attempts": 1,
        "last_error": "404 Not Found",
        "created_at": "2027-01-15T08:00:00.000Z",
        "settled_at": "2027-01-15T08:00:01.500Z",
        "next_attempt_at": None,
        "event": 1,
    }
    assert (newest["id"], newest["name"], newest["state"]) == (2, "again", "pending")
    assert newest["next_attempt_at"] == "2027-01-15T08:00:00.000Z"


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        (["--state", "sent"], [1]),
        (["--state", "pending", "--destination", "app"], [2]),
        (["--destination", "app", "--limit", "1"], [2]),
        (["--destination", "app", "--state", "dead"], []),
    ],
)
def test_messages_are_filtered(
    owing: World, command: Command, filters: list[str], found: list[int]
) -> None:
    attempt(owing, Sent("200"))

    assert [one["id"] for one in command.objects("outbox", "list", *filters)] == found


@pytest.mark.parametrize("act", [["list"], ["retry", "--state", "dead", "--reason", "x"]])
def test_a_destination_by_a_slip_is_told_and_a_lost_one_is_listed(
    owing: World, command: Command, act: list[str]
) -> None:
    slip = command("outbox", *act, "--destination", "ap")
    reconfigure(owing, "app", "other")
    lost = command("outbox", "list", "--state", "dead", "--destination", "app")

    assert slip.code == 3
    assert "there is no destination ap in " in slip.err
    assert "(did you mean app?)" in slip.err
    assert (lost.code, lost.err) == (0, "nothing is listed\n")


def test_every_state_of_a_message_can_be_chosen(command: Command) -> None:
    for state in outbox.STATES:
        assert command("outbox", "list", "--state", state).code == 0


def test_a_list_for_people_says_to_whom_and_for_what(owing: World, command: Command) -> None:
    attempt(owing, Never("404 \x1b[2J"))

    out = command("outbox", "list").out

    assert "app (again)" in out
    assert "stripe/in_1/announce" in out
    assert "404 \\x1b[2J" in out


def test_a_message_is_named_by_its_number_or_its_operation_key(
    owing: World, command: Command
) -> None:
    key = message(owing, 2).operation_key

    for name in ("2", key):
        assert command.objects("outbox", "show", name)[0]["id"] == 2
    for name in ("3", key[:-1], "op_", "evt_1", "9" * 30):
        ran = command("outbox", "show", name)
        assert ran.code == 3
        assert "`receiver outbox list`" in ran.err


def test_the_story_tells_who_owes_it_and_each_attempt(owing: World, command: Command) -> None:
    owing.processor.random = lambda: 0
    attempt(owing, Later("503 Service Unavailable"))
    attempt(owing, Later("busy"))
    owing.clock.now_ms += STEP_MS
    attempt(owing, Sent("200 OK"))

    [shown] = command.objects("outbox", "show", 1)

    assert told(shown) == [
        ("owed", "by event evt_1, once for stripe/in_1/announce"),
        ("attempt", "number 1 failed after 1.5 s: 503 Service Unavailable"),
        ("attempt", "number 2 sent after 1.5 s: 200 OK"),
        ("sent", "nothing is left to do"),
    ]
    assert shown["story"][1]["duration_ms"] == 1500
    assert shown["next"] == []
    assert "`receiver events show evt_1 -c" in command("outbox", "show", 1).out


def test_the_body_is_printed_only_when_asked_for(owing: World, command: Command) -> None:
    without, asked = command("outbox", "show", 1), command("outbox", "show", 1, "--body")
    [shown] = command.objects("outbox", "show", 1, "--body")

    assert '"invoice"' not in without.out
    assert '    "invoice": "in_1",\n' in asked.out
    assert shown["body"]["json"]["invoice"] == "in_1"
    assert "body" not in command.objects("outbox", "show", 1)[0]


@pytest.mark.parametrize(
    ("result", "policy", "steps"),
    [
        (
            Never("404"),
            "retry",
            ["`receiver outbox retry 1`", "`receiver outbox cancel 1`"],
        ),
        (
            Unknown("reset"),
            "review",
            ["`receiver outbox resolve 1 --sent`", "`receiver outbox resolve 1 --again`"],
        ),
        (Later("busy"), "retry", ["`receiver outbox retry 1` tries it now"]),
    ],
    ids=["dead", "review", "pending"],
)
def test_what_to_do_next_is_said_in_commands(
    owing: World, command: Command, result: Result, policy: str, steps: list[str]
) -> None:
    reconfigure(owing, "timeout_s = 5", f'timeout_s = 5\nambiguous = "{policy}"')
    owing.processor.random = lambda: 0.9
    attempt(owing, result)

    [shown] = command.objects("outbox", "show", 1)

    assert len(shown["next"]) == len(steps)
    for step, words in zip(shown["next"], steps, strict=True):
        assert words in step


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('run = "inside"', 'run = "off"', "worker.run is off"),
        ('run = "inside"', 'run = "separate"', "see that `receiver work` is running"),
        ('run = "inside"', 'run = "inside"', "see that `receiver serve` is running"),
        ("app", "other", "no destination app now"),
    ],
    ids=["off", "separate", "inside", "without its destination"],
)
def test_what_keeps_a_due_message_waiting_is_said(
    owing: World, command: Command, old: str, new: str, words: str
) -> None:
    reconfigure(owing, old, new)

    [shown] = command.objects("outbox", "show", 1)

    assert words in shown["next"][0]


def test_a_message_under_a_lease_says_so(owing: World, command: Command) -> None:
    leased(owing)

    [shown] = command.objects("outbox", "show", 1)

    assert shown["leased_until"] == "2027-01-15T08:00:35.000Z"
    assert ("attempt", "number 1 is running") in told(shown)
    assert shown["next"] == ["a worker is trying it now"]
    assert "leased until" in command("outbox", "show", 1).out


def reconfigure(world: World, old: str, new: str) -> None:
    text = (world.folder / "receiver.toml").read_text()
    assert old in text
    world.configure(text.replace(old, new))


# Acting


def put(world: World, state: str) -> None:
    """Bring the first message into a state by what leads there."""
    reconfigure(world, "timeout_s = 5", 'timeout_s = 5\nambiguous = "review"')
    world.processor.random = lambda: 0.9
    match state:
        case "sent":
            attempt(world, Sent("200"))
        case "dead":
            attempt(world, Never("404"))
        case "review":
            attempt(world, Unknown("reset"))
        case "pending":
            attempt(world, Later("busy"))
        case "cancelled":
            world.store.write(lambda tx: outbox.settle(tx, 1, "cancelled", None))
    assert message(world).state == state


def acts(world: World) -> list[tuple[str, str, str, dict[str, str]]]:
    rows = world.query("select action, target, reason, detail from receiver_audit order by id")
    return [(action, target, reason, json.loads(detail)) for action, target, reason, detail in rows]


@pytest.mark.parametrize("state", ["dead", "review", "cancelled", "pending"])
def test_a_retry_makes_a_message_due_now(owing: World, command: Command, state: str) -> None:
    put(owing, state)

    ran = command("outbox", "retry", 1, "--reason", "it is back")

    after = message(owing)
    assert (ran.code, after.state, after.settled_ms) == (0, "pending", None)
    assert after.next_attempt_ms == owing.clock()
    assert f"1  to app: was {state}, is due now" in ran.out
    assert ("may have it already" in ran.out) == (state == "review")
    assert "the server sends what is due" in ran.out
    assert acts(owing) == [("outbox retry", "message 1", "it is back", {"was": state})]
    lease = leased(owing)
    while lease.message.id != 1:
        lease = leased(owing)
    assert settle(owing, lease, Sent("200"))


def test_a_message_that_was_sent_is_not_sent_again(owing: World, command: Command) -> None:
    put(owing, "sent")

    retried, cancelled = command("outbox", "retry", 1), command("outbox", "cancel", 1)
    resolved = command("outbox", "resolve", 1, "--again")

    assert (retried.code, cancelled.code, resolved.code) == (1, 1, 1)
    assert "message 1 is sent" in retried.out
    assert message(owing).state == "sent"
    assert acts(owing) == []


ACTS = {
    "retry": ["outbox", "retry", "1"],
    "cancel": ["outbox", "cancel", "1"],
}


@pytest.mark.parametrize("act", ACTS)
def test_a_message_under_a_lease_is_left_to_its_worker(
    owing: World, command: Command, act: str
) -> None:
    lease = leased(owing)

    ran = command(*ACTS[act])

    assert ran.code == 1
    assert "a worker is trying message 1 now: try again in 36 s" in ran.out + ran.err
    assert acts(owing) == []
    assert settle(owing, lease, Sent("200"))


@pytest.mark.parametrize(("act", "state"), [("retry", "pending"), ("cancel", "cancelled")])
def test_after_a_crash_the_operator_may_act_and_the_attempt_is_closed(
    owing: World, command: Command, act: str, state: str
) -> None:
    stale = leased(owing)
    owing.clock.now_ms += STEP_MS

    ran = command(*ACTS[act])

    assert (ran.code, message(owing).state) == (0, state)
    [tried] = owing.store.write(lambda tx: attempts.of_message(tx, 1))
    assert tried.outcome == "unknown"
    assert not settle(owing, stale, Sent("200"))
    assert ("may have it all the same" in ran.err) == (act == "cancel")


def test_those_of_a_destination_are_retried_after_a_question(
    owing: World, command: Command
) -> None:
    for _ in range(2):
        attempt(owing, Never("404"))
    owing.stripe("evt_2", "invoice.announced", id="in_2")
    words = ("outbox", "retry", "--state", "dead", "--destination", "app")

    declined, other = command(*words), command("outbox", "retry", "--destination", "other")
    ran = command(*words, typed="y\n")

    assert (declined.code, other.code, ran.code) == (2, 3, 0)
    assert "there is no destination other in" in other.err
    assert [one[1] for one in acts(owing)] == ["message 1", "message 2"]
    assert owing.query("select distinct state from receiver_outbox") == [("pending",)]
    # Without a state, what is neither dead nor named is left alone.
    assert "no message fits" in command("outbox", "retry", "--destination", "app", "--yes").err


def test_a_thousand_dead_messages_are_retried_each_once(owing: World, command: Command) -> None:
    for number in range(1000):
        owing.stripe(f"evt_x{number}", "invoice.announced", id=f"x{number}")
    owing.query("update receiver_outbox set state = 'dead', settled_ms = 1, next_attempt_ms = null")

    ran = command("outbox", "retry", "--destination", "app", "--yes")

    assert ran.code == 0
    assert owing.query("select state, count(*) from receiver_outbox") == [("pending", 2002)]
    assert owing.query("select count(distinct target) from receiver_audit") == [(2002,)]


@pytest.mark.parametrize(
    "words",
    [
        ["outbox", "retry"],
        ["outbox", "retry", "1", "--state", "dead"],
        ["outbox", "resolve", "1"],
        ["outbox", "resolve", "1", "--sent", "--again"],
    ],
    ids=" ".join,
)
def test_what_is_to_be_done_must_be_said_once(command: Command, words: list[str]) -> None:
    assert command(*words).code == 2


@pytest.mark.parametrize("act", ["retry", "resolve", "cancel"])
def test_an_act_on_a_message_that_is_not_there_is_not_found(command: Command, act: str) -> None:
    option = ["--sent"] if act == "resolve" else []

    assert command("outbox", act, "99", *option).code == 3


@pytest.mark.parametrize(("option", "state"), [("--sent", "sent"), ("--again", "pending")])
def test_a_message_in_review_is_resolved_by_what_the_other_side_has(
    owing: World, command: Command, option: str, state: str
) -> None:
    put(owing, "review")

    ran = command("outbox", "resolve", 1, option, "--reason", "I looked")

    after = message(owing)
    assert (ran.code, after.state) == (0, state)
    due_ms = owing.clock() if state == "pending" else None
    assert after.next_attempt_ms == due_ms
    detail = {"was": "review", "became": state}
    assert acts(owing) == [("outbox resolve", "message 1", "I looked", detail)]


@pytest.mark.parametrize("state", ["pending", "dead", "cancelled"])
def test_only_a_message_in_review_is_resolved(owing: World, command: Command, state: str) -> None:
    put(owing, state)

    ran = command("outbox", "resolve", 1, "--sent")

    assert (ran.code, message(owing).state) == (1, state)
    assert f"message 1 is {state}" in ran.err


@pytest.mark.parametrize("state", ["pending", "review", "dead"])
def test_a_cancelled_message_is_not_sent_and_not_owed_again(
    owing: World, command: Command, state: str
) -> None:
    put(owing, state)

    ran = command("outbox", "cancel", 1, "--reason", "not needed")
    owing.stripe("evt_2", "invoice.announced", id="in_1")

    assert (ran.code, message(owing).state) == (0, "cancelled")
    assert message(owing).next_attempt_ms is None
    assert acts(owing) == [("outbox cancel", "message 1", "not needed", {"was": state})]
    assert leased(owing).message.id == 2
    assert command("outbox", "cancel", 1).code == 1


def test_an_act_by_hand_is_part_of_the_story(owing: World, command: Command) -> None:
    command("outbox", "cancel", 1, "--reason", "not needed")

    [shown] = command.objects("outbox", "show", 1)

    told_of = [words for what, words in told(shown) if what == "by hand"]
    assert len(told_of) == 1
    assert told_of[0].startswith("outbox cancel by ")
    assert told_of[0].endswith(": not needed")
    assert "`receiver outbox retry 1`" in shown["next"][0]


def test_what_did_not_render_is_rendered_by_the_config_as_it_is_now(
    owing: World, command: Command
) -> None:
    reconfigure(owing, 'invoice = "{data.object.id}"', 'invoice = "no. {data.object.number}"')
    owing.stripe("evt_2", "invoice.announced", id="in_2")
    assert (message(owing, 3).state, message(owing, 3).is_written) == ("dead", False)

    [told_first] = command.objects("outbox", "show", 3)
    still = command("outbox", "retry", 3)
    before = message(owing, 3)
    reconfigure(owing, "data.object.number", "data.object.id")
    ran = command("outbox", "retry", 3)

    assert told_first["next"] == [
        "if event evt_2 rightly has no such value: `receiver outbox cancel 3`",
        "if destinations.app is to take another one: correct that, then `receiver outbox retry 3`",
    ]
    assert (still.code, before.state) == (1, "dead")
    assert "does not render: data.object.number: is missing" in still.out
    assert (ran.code, message(owing, 3).state) == (0, "pending")
    [shown] = command.objects("outbox", "show", 3, "--body")
    key = message(owing, 3).operation_key
    assert shown["body"]["json"] == {"invoice": "no. in_2", "key": key}


def test_what_did_not_render_for_want_of_an_address_names_its_path_and_the_event(
    owing: World, command: Command
) -> None:
    owing.configure(
        CONFIG
        + """
        [[rules]]
        operation = "thank"
        source = "stripe"
        on = ["invoice.thanked"]
        record = { kind = "thanks", data = "x" }
        send = [{ to = "mail" }]

        [destinations.mail]
        kind = "email"
        smtp = "smtp://127.0.0.1:1"
        from = "a@example.com"
        to = "{data.object.customer_email}"
        subject = "thanks"
        text = "thanks"
        """
    )
    owing.stripe("evt_2", "invoice.thanked", id="in_2", customer_email=None)

    [shown] = command.objects("outbox", "show", 3)

    why = "does not render: destinations.mail.to: {data.object.customer_email} is missing"
    assert shown["last_error"] == why
    assert (
        shown["next"][0] == "if event evt_2 rightly has no such value: `receiver outbox cancel 3`"
    )


def test_a_message_is_rendered_again_with_its_grant_and_workspace(
    owing: World, command: Command
) -> None:
    grant = 'grant = { unit = "credits", amount = 100 }\n'
    reconfigure(owing, grant, grant + 'send = [{ to = "app" }]\n')
    reconfigure(owing, '"{data.object.id}", key', '"{_grant.amount} {_workspace} {nothing}", key')
    owing.link()
    owing.invoice("evt_2", "in_2")
    reconfigure(owing, " {nothing}", "")

    command("outbox", "retry", 3)

    [shown] = command.objects("outbox", "show", 3, "--body")
    assert shown["body"]["json"]["invoice"] == "100 acme"


def test_what_a_handler_said_is_not_made_up(owing: World, command: Command) -> None:
    code = "tx.send('app', data={'number': 7})"
    reconfigure(owing, '"{data.object.id}", key', '"{_message.data.nothing} x", key')
    owing.stripe("evt_2", "handler.called", id="x", run=code)
    reconfigure(owing, '"{_message.data.nothing} x", key', '"{_message.data.number}", key')

    ran = command("outbox", "retry", 3)

    assert (ran.code, message(owing, 3).state) == (1, "dead")
    assert "no rule of welcome sends it" in ran.out


def test_a_written_message_is_not_altered_by_a_retry(owing: World, command: Command) -> None:
    put(owing, "dead")
    before = message(owing).body
    reconfigure(owing, '"{data.object.id}", key', '"other", key')

    command("outbox", "retry", 1)

    assert message(owing).body == before


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('run = "inside"', 'run = "off"', "worker.run is off"),
        ("app", "other", "no destination app"),
    ],
)
def test_a_retry_says_what_keeps_the_message_waiting(
    owing: World, command: Command, old: str, new: str, words: str
) -> None:
    reconfigure(owing, old, new)

    assert words in command("outbox", "retry", 1).err
