"""`receiver resources`, as an operator uses it, and what other commands say of resources."""

import pytest

from receiver import fetching
from receiver.destinations import Later, Never
from store import audit
from tests.command import Command
from tests.conftest import World
from tests.test_fetching import CONFIG, configured, fetch, known, lease, settle, tell
from tests.test_projection import SOURCE, VERSIONED
from tests.test_projection import configured as projecting
from tests.test_projection import tell as say


@pytest.fixture
def hinted(world: World) -> World:
    return configured(world, CONFIG.replace("URL", "http://127.0.0.1:1"))


@pytest.fixture
def command(hinted: World, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("API", "unused")
    return Command(hinted, monkeypatch)


def fail(world: World, reply: Later | Never) -> None:
    leased = lease(world)
    world.store.write(
        lambda tx: fetching.settle(tx, processor=world.processor, leased=leased, reply=reply)
    )


def test_resources_are_listed_with_the_fields_of_the_contract(
    hinted: World, command: Command
) -> None:
    tell(hinted, "created")
    settle(hinted, lease(hinted), status="canceled", plan="pro")

    (one,) = command.objects("resources", "list")

    assert one == {
        "source": "stripe",
        "account": "",
        "kind": "subscription",
        "resource_id": "sub_1",
        "state": "canceled",
        "fields": {"plan": "pro"},
        "version": None,
        "terminal": True,
        "deleted": False,
        "contested": False,
        "came_from": "fetch",
        "event": 1,
        "updated_at": "2027-01-15T08:00:00.000Z",
        "checked_at": "2027-01-15T08:00:00.000Z",
    }
    (row,) = hinted.query(
        "select source, account, kind, resource_id, state, fields, version, terminal, deleted,"
        " contested, came_from, event, updated_ms, checked_ms from receiver_resources"
    )
    assert row[:6] == ("stripe", "", "subscription", "sub_1", "canceled", '{"plan":"pro"}')


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        (["--kind", "subscription"], ["sub_1", "sub_2"]),
        (["--kind", "customer"], []),
        (["--state", "canceled"], ["sub_1"]),
        (["--source", "stripe", "--limit", "1"], ["sub_1"]),
        (["--source", "other"], []),
        (["--contested"], []),
    ],
)
def test_resources_are_filtered(
    hinted: World, command: Command, filters: list[str], found: list[str]
) -> None:
    for resource_id, status in (("sub_1", "canceled"), ("sub_2", "active")):
        tell(hinted, "created", resource_id)
        settle(hinted, lease(hinted), status=status)

    listed = command.objects("resources", "list", *filters)

    assert [one["resource_id"] for one in listed] == found


def test_what_is_owed_is_listed_with_its_error_until_it_is_fetched(
    hinted: World, command: Command
) -> None:
    tell(hinted, "created")
    fail(hinted, Later("the key is refused (correct api.key)"))

    (one,) = command.objects("resources", "list", "--pending")
    assert one["state"] == "pending"
    assert one["attempts"] == 1
    assert one["last_error"] == "the key is refused (correct api.key)"
    assert "the key is refused" in command("resources", "show", "sub_1").out

    hinted.clock.now_ms += 60_000
    settle(hinted, lease(hinted))
    assert command.objects("resources", "list", "--pending") == []


def test_a_dead_fetch_is_tried_again_by_hand_and_that_is_written_down(
    hinted: World, command: Command
) -> None:
    tell(hinted, "created")
    fail(hinted, Never("400 Bad Request"))
    assert fetch(hinted).state == "dead"
    assert command.objects("resources", "list", "--pending")[0]["state"] == "dead"

    result = command("resources", "fetch", "subscription/sub_1", "--reason", "corrected")

    assert result.code == 0, result.err
    assert fetch(hinted).state == "pending"
    acts = hinted.store.write(lambda tx: audit.of_target(tx, "resource stripe//subscription/sub_1"))
    assert [(one.action, one.reason) for one in acts] == [("resources fetch", "corrected")]
    settle(hinted, lease(hinted))
    assert fetch(hinted).state == "done"


def test_the_operator_may_take_what_the_sender_says_of_what_had_ended(
    hinted: World, command: Command
) -> None:
    tell(hinted, "created")
    settle(hinted, lease(hinted), status="canceled")

    command("resources", "fetch", "sub_1")
    settle(hinted, lease(hinted), status="active")
    found = known(hinted)
    assert found is not None
    assert (found.state, found.contested) == ("canceled", True)

    command("resources", "fetch", "sub_1", "--accept")
    settle(hinted, lease(hinted), status="active")
    found = known(hinted)
    assert found is not None
    assert (found.state, found.contested) == ("active", False)


def test_a_resource_that_is_not_there_is_not_found(command: Command) -> None:
    result = command("resources", "show", "sub_9")

    assert result.code == 3
    assert "there is no resource sub_9: `receiver resources list`" in result.err


def test_a_name_of_several_resources_asks_which(hinted: World, command: Command) -> None:
    tell(hinted, "created")
    tell(hinted, "2-created", account="acct_2")

    result = command("resources", "show", "sub_1")

    assert result.code == 2
    assert "stripe/acct_2/subscription/sub_1" in result.err
    assert command("resources", "show", "stripe//subscription/sub_1").code == 0


def test_what_can_not_be_fetched_is_declined(hinted: World, command: Command) -> None:
    tell(hinted, "created")
    text = hinted.folder.joinpath("receiver.toml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("api =")]
    created = 'project.created = "created"'
    hinted.folder.joinpath("receiver.toml").write_text(
        "\n".join(lines).replace("project.state", f"{created}\nproject.state")
    )

    result = command("resources", "fetch", "sub_1")

    assert result.code == 1
    assert "sources.stripe has no api" in result.err


def test_an_events_story_tells_of_its_resource(hinted: World, command: Command) -> None:
    tell(hinted, "created")
    (owed,) = command.objects("events", "show", "evt_created_sub_1")
    settle(hinted, lease(hinted))
    (known,) = command.objects("events", "show", "evt_created_sub_1")

    assert ("fetch", "subscription sub_1 is to be fetched, pending") in told(owed)
    assert ("resource", "subscription sub_1 is active since then, fetched") in told(known)


def told(story: dict[str, object]) -> list[tuple[str, str]]:
    moments = story["story"]
    assert isinstance(moments, list)
    return [(one["what"], one["words"]) for one in moments]


def test_a_parked_event_says_which_resource_it_waits_for(hinted: World, command: Command) -> None:
    tell(hinted, "paused")

    (parked,) = command.objects("parked", "list")
    assert parked["waits_for"] == {
        "for": "resource",
        "source": "stripe",
        "account": "",
        "kind": "subscription",
        "resource_id": "sub_1",
    }
    (story,) = command.objects("events", "show", "evt_paused_sub_1")
    assert any("receiver resources show subscription/sub_1" in one for one in story["next"])

    settle(hinted, lease(hinted))
    hinted.drain()
    (story,) = command.objects("events", "show", "evt_paused_sub_1")
    assert ("released", "it was parked until then; the state of subscription sub_1 came") in told(
        story
    )


def test_a_tie_is_shown_as_a_conflict_and_resolved(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    projecting(world, SOURCE + VERSIONED)
    command = Command(world, monkeypatch)
    say(world, "1-updated", "active", revision=2)
    say(world, "2-updated", "past_due", revision=2)

    (conflict,) = command.objects("conflicts", "list")
    assert conflict["id"] == "evt_2-updated_sub_1"
    assert conflict["resource"] == 1
    (shown,) = command.objects("conflicts", "show", "1")
    assert '-  "state": "active"' in shown["diff"]
    assert '+  "state": "past_due"' in shown["diff"]
    assert command.objects("resources", "list", "--contested")
    assert "receiver conflicts show 1" in command("resources", "show", "sub_1").out

    assert command("conflicts", "resolve", "1").code == 0
    assert command.objects("resources", "list", "--contested") == []
    assert command.objects("resources", "list")[0]["state"] == "active"
