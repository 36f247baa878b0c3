"""What a rule projects is described in the config, and two claims are judged by it alone."""

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from receiver import retention
from receiver.config import ConfigError, Settings, load
from receiver.operate import By
from receiver.process import Processor
from store import conflicts, resources
from store.resources import Name, Resource
from tests.conftest import SECRETS, World, stripe_body

SUBSCRIPTION = Name("stripe", "", "subscription", "sub_1")

SOURCE = """
[worker]
run = "off"

[sources.stripe]
scheme = "stripe"
secrets = ["env:STRIPE"]
livemode = false
"""

RULE = """
[[rules]]
operation = "subscription-state"
source = "stripe"
on = ["customer.subscription.*"]
project.kind = "subscription"
project.id = "data.object.id"
project.object = "data.object"
project.state = "status"
project.fields = { plan = "{plan}" }
project.terminal = ["canceled", "incomplete_expired"]
"""
VERSIONED = RULE + 'project.version = "revision"\n'
RANKED = (
    RULE
    + """
project.created = "created"
project.rank = ["incomplete", "trialing", "active", "past_due"]
project.deleted = { "_event.type" = "customer.subscription.removed" }
"""
)
API = SOURCE.replace('"off"', '"inside"') + 'api = { key = "env:API" }\n'


def settings_of(folder: Path, text: str) -> Settings:
    path = folder / "receiver.toml"
    path.write_text(text)
    return load(path, environment=SECRETS | {"API": "sk_test_1", "LIVE": "rk_live_1"})


def refused(folder: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        settings_of(folder, text)
    return raised.value.problems


# The config


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            SOURCE + RULE,
            "rules[0].project: events come in any order, so it needs version, the path of a "
            "number that only grows; or api in [sources.stripe]; or created and terminal",
        ),
        (
            API + RULE.replace('"subscription"', '"something"'),
            "rules[0].project: events come in any order, so it needs version, the path of a "
            "number that only grows; or a path to it in fetch; or created and terminal",
        ),
        (SOURCE + 'api = { key = "env:API" }\n' + RULE, 'worker.run is "off"; turn it on'),
        (
            SOURCE + RULE.replace("project.terminal", "#") + 'project.created = "created"\n',
            "rules[0].project.created: can't tell two events of one second apart by itself",
        ),
        (VERSIONED.join([SOURCE, 'project.created = "created"']), "version: is an order by itself"),
        (SOURCE + VERSIONED + 'project.rank = ["a"]', "rank only decides between events of one"),
        (SOURCE + RANKED.replace('["inc', '["active", "inc'), "rank: expected at most 100 states"),
        (SOURCE + VERSIONED.replace('project.id = "data.object.id"', ""), "project.id: is missing"),
        (SOURCE + VERSIONED.replace("project.kind", "project.knd"), "project.kind: is missing"),
        (SOURCE + VERSIONED.replace('"status"', '"_event.type"'), "none of our names are known"),
        (SOURCE + VERSIONED.replace("project.state", "#"), "rank and terminal are about states"),
        (SOURCE + VERSIONED + 'project.fetch = "v1/{id}"', "project.fetch: is not the path of a"),
        (SOURCE + VERSIONED + 'project.fetch = "/v1/{id}/{b}"', "project.fetch: has no {id}, or"),
        (SOURCE + VERSIONED + 'project.fetch = "//evil/{id}"', "project.fetch: is not the path"),
        (SOURCE + VERSIONED * 2, "rules[1].project.kind: subscription of stripe is projected by"),
        (
            SOURCE + VERSIONED + '[[rules]]\noperation = "a"\nsource = "stripe"\non = ["*"]\n'
            'when = { "_resource.state" = "active" }\nsql = ["select 1"]',
            'rules[1].when: is about a resource; say which with resource = { kind = "..."',
        ),
        (
            SOURCE + VERSIONED + '[[rules]]\noperation = "a"\nsource = "stripe"\non = ["*"]\n'
            'resource = { kind = "subscriptoin", id = "data.object.id" }\nsql = ["select 1"]',
            "rules[1].resource.kind: no rule of stripe projects subscriptoin (did you mean",
        ),
        (
            SOURCE + VERSIONED + '[[rules]]\noperation = "a"\nsource = "stripe"\non = ["*"]\n'
            'resource = { kind = "subscription", id = "data.object.id" }\n'
            'when = { "_resource.sate" = "active" }\nsql = ["select 1"]',
            "_resource has no sate (did you mean state?)",
        ),
        (
            SOURCE.replace("stripe", "github")
            + VERSIONED.replace("stripe", "github").replace('"data.object.id"', '"_event.id"'),
            "rules[0].project.id: takes what github sends in headers that it does not sign",
        ),
        (SOURCE + 'api = { key = "env:LIVE" }', "api.key: is a key for live data, but the source"),
        (
            SOURCE.replace("stripe", "shopify") + 'api = { key = "env:API" }',
            "sources.shopify.api.base_url: is missing; write the address of the sender's API",
        ),
    ],
)
def test_a_projection_that_can_not_work_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    problems = refused(tmp_path, text)

    assert any(problem in one for one in problems), problems


@pytest.mark.parametrize("text", [SOURCE + VERSIONED, SOURCE + RANKED, API + RULE, API + RANKED])
def test_a_version_an_api_or_a_ranking_is_enough(tmp_path: Path, text: str) -> None:
    assert settings_of(tmp_path, text).rules


def test_the_rules_of_the_readme_are_taken(tmp_path: Path) -> None:
    section = Path(__file__).parents[1].joinpath("README.md").read_text().split("## Order")[1]
    block = section.split("```toml\n")[1].split("```")[0]
    text = block.replace("[sources.stripe]\n", API.replace('api = { key = "env:API" }\n', ""))

    settings = settings_of(tmp_path, text.replace("STRIPE_API_KEY", "API"))

    assert [rule.operation for rule in settings.rules] == ["subscription-state", "end-access"]
    assert settings.warnings == ()


def test_an_api_key_is_not_shown(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, API + RULE)

    assert "sk_test_1" not in repr(settings)
    assert "sk_test_1" not in " ".join(settings.warnings)


# Events in every order


@pytest.fixture
def versioned(world: World) -> World:
    return configured(world, SOURCE + VERSIONED)


@pytest.fixture
def ranked(world: World) -> World:
    return configured(world, SOURCE + RANKED)


def configured(world: World, text: str) -> World:
    path = world.folder / "receiver.toml"
    path.write_text(text)
    world.processor = Processor.load(load(path, environment=SECRETS))
    world.store.write(world.processor.start)
    return world


def tell(
    world: World, event: str, status: str, *, resource_id: str = "sub_1", at: int = 0, **of: object
) -> str:
    """An event of a subscription; `event` ends with what happened to it."""
    body = stripe_body(
        f"evt_{event}_{resource_id}",
        f"customer.subscription.{event.rpartition('-')[2]}",
        envelope={"created": 1_700_000_000 + at},
        id=resource_id,
        status=status,
        **({"plan": "basic"} | of),
    )
    return world.deliver("stripe", body)


def known(world: World, resource_id: str = "sub_1") -> Resource:
    name = SUBSCRIPTION._replace(resource_id=resource_id)
    found = world.store.write(lambda tx: resources.find(tx, name))
    assert found is not None
    return found


def open_conflicts(world: World) -> Sequence[conflicts.Conflict]:
    return world.store.write(conflicts.listed)


def projected(one: Resource) -> tuple[object, ...]:
    """All of a projection but when, and under which row, it came about."""
    return (one.state, one.fields, one.version, one.terminal, one.deleted, one.contested)


#: A life: what happened, what it was then, when in seconds, and the sender's version.
LIFE = (
    ("created", "incomplete", 0, {"plan": "basic", "revision": 1}),
    ("1-updated", "active", 5, {"plan": "basic", "revision": 2}),
    ("2-updated", "active", 5, {"plan": "pro", "revision": 3}),
    ("deleted", "canceled", 9, {"plan": "pro", "revision": 4}),
    ("late-updated", "active", 7, {"plan": "max", "revision": 3}),
)


@pytest.mark.parametrize("rule", ["versioned", "ranked"])
def test_every_order_of_a_life_ends_in_the_same_state(
    rule: str, request: pytest.FixtureRequest
) -> None:
    world: World = request.getfixturevalue(rule)
    ends = set()
    for number, order in enumerate(itertools.permutations(LIFE)):
        resource_id = f"sub_{number}"
        for event, status, at, of in order:
            tell(world, event, status, resource_id=resource_id, at=at, **of)
            # The first comes again after each, and by hand.
            again = world.event(f"evt_{order[0][0]}_{resource_id}")
            world.store.write(partial(world.processor.replay, row=again.id))
        ends.add(projected(known(world, resource_id)))

    assert len(ends) == 1
    (end,) = ends
    assert end[0] == "canceled"
    assert end[3] is True


@pytest.mark.parametrize("rule", ["versioned", "ranked"])
def test_every_order_without_an_end_is_the_same_too(
    rule: str, request: pytest.FixtureRequest
) -> None:
    world: World = request.getfixturevalue(rule)
    life = [one for one in LIFE if one[0] not in ("deleted", "late-updated")]
    ends = set()
    for number, order in enumerate(itertools.permutations(life)):
        for event, status, at, of in order:
            tell(world, event, status, resource_id=f"sub_{number}", at=at, **of)
        ends.add(projected(known(world, f"sub_{number}")))

    assert len(ends) == 1
    # By a ranking two updates of one second can't be told apart, and that is said.
    assert known(world, "sub_0").contested is (rule == "ranked")


def test_an_older_version_changes_nothing(versioned: World) -> None:
    tell(versioned, "2-updated", "active", revision=2)
    before = known(versioned)

    assert tell(versioned, "1-updated", "trialing", revision=1) == "done"
    assert known(versioned) == before


def test_one_version_with_two_contents_is_a_conflict_and_the_first_stands(
    versioned: World,
) -> None:
    tell(versioned, "1-updated", "active", revision=2)

    assert tell(versioned, "2-updated", "past_due", revision=2) == "done"
    assert known(versioned).state == "active"
    assert known(versioned).contested
    (conflict,) = open_conflicts(versioned)
    assert b'"past_due"' in (conflict.body or b"")
    assert conflict.resource == known(versioned).id
    assert conflict.event == versioned.event("evt_2-updated_sub_1").id


def test_a_newer_version_settles_a_conflict(versioned: World) -> None:
    tell(versioned, "1-updated", "active", revision=2)
    tell(versioned, "2-updated", "past_due", revision=2)

    tell(versioned, "3-updated", "unpaid", revision=3)

    assert known(versioned).state == "unpaid"
    assert not known(versioned).contested
    assert open_conflicts(versioned) == []


def test_a_tie_that_is_resolved_by_hand_stays_so_when_its_event_comes_again(ranked: World) -> None:
    tell(ranked, "1-updated", "active", plan="basic")
    tell(ranked, "2-updated", "active", plan="pro")
    (tie,) = open_conflicts(ranked)
    ranked.store.write(lambda tx: conflicts.resolve(tx, tie.id))

    for event in ("evt_1-updated_sub_1", "evt_2-updated_sub_1"):
        row = ranked.event(event).id
        ranked.store.write(partial(ranked.processor.replay, row=row))

    assert not known(ranked).contested
    assert open_conflicts(ranked) == []


def test_the_ranking_decides_within_a_second(ranked: World) -> None:
    tell(ranked, "1-updated", "past_due", at=3)

    tell(ranked, "2-updated", "trialing", at=3)

    assert known(ranked).state == "past_due"
    assert not known(ranked).contested


@pytest.mark.parametrize("late_first", [True, False])
def test_what_had_ended_stays_so_and_later_news_of_life_are_shown(
    ranked: World, late_first: bool
) -> None:
    told = [("deleted", "canceled", 3), ("1-updated", "active", 8)]
    for event, status, at in reversed(told) if late_first else told:
        tell(ranked, event, status, at=at)

    assert known(ranked).state == "canceled"
    assert known(ranked).contested
    assert len(open_conflicts(ranked)) == 1


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_deletion_is_kept_as_a_deletion(ranked: World, order: tuple[int, ...]) -> None:
    told = [("created", "active", 0), ("removed", "active", 5), ("1-updated", "canceled", 5)]
    for i in order:
        event, status, at = told[i]
        tell(ranked, event, status, at=at)

    assert known(ranked).deleted
    assert known(ranked).state == "deleted"
    assert known(ranked).terminal


def test_a_resource_can_not_be_removed_from_the_file(ranked: World) -> None:
    tell(ranked, "created", "active")

    with pytest.raises(Exception, match="resources are kept"):
        ranked.query("delete from receiver_resources")


def test_a_person_who_is_redacted_is_in_no_resource_either(versioned: World) -> None:
    tell(versioned, "created", "active", plan="of ada@example.com", revision=1)
    row = versioned.event("evt_created_sub_1").id

    versioned.store.write(lambda tx: retention.redact(tx, row, (None, ()), By("ada", "asked")))

    assert (known(versioned).state, known(versioned).fields) == ("active", "{}")


def test_accounts_do_not_share_a_resource(versioned: World) -> None:
    tell(versioned, "created", "active", revision=5)
    body = stripe_body(
        "evt_other",
        "customer.subscription.updated",
        envelope={"account": "acct_2"},
        id="sub_1",
        status="past_due",
        plan="pro",
        revision=1,
    )

    versioned.deliver("stripe", body)

    assert known(versioned).state == "active"
    assert len(versioned.query("select * from receiver_resources")) == 2


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        ({"revision": None}, "revision: is no whole number, so it can't order anything"),
        ({"revision": 1.5}, "revision: is no whole number"),
        ({"revision": 2**70}, "revision: is no whole number"),
        ({"revision": True}, "revision: is no whole number"),
        ({"revision": 1, "status": None}, "status: is missing"),
        ({"revision": 1, "status": {}}, "status: is an object"),
        ({"revision": 1, "id": ".."}, "data.object.id: has dots alone"),
        ({"revision": 1, "plan": "x" * 70_000}, "fields: are longer than 65536 bytes"),
    ],
)
def test_what_can_not_be_ordered_or_kept_is_quarantined(
    versioned: World, of: dict[str, Any], reason: str
) -> None:
    fields = {"id": "sub_1", "status": "active", "plan": "basic"} | of

    assert versioned.stripe("evt_1", "customer.subscription.updated", **fields) == "quarantined"
    assert reason in str(versioned.event("evt_1").reason)


def test_an_event_without_its_object_is_quarantined_where_nothing_can_be_fetched(
    versioned: World,
) -> None:
    body = stripe_body("evt_1", "customer.subscription.updated").replace(
        b'"data": {"object": {}}', b'"related": {"id": "sub_1"}'
    )
    text = (SOURCE + VERSIONED).replace('"data.object.id"', '["data.object.id", "related.id"]')
    configured(versioned, text)

    assert versioned.deliver("stripe", body) == "quarantined"
    assert "set api in [sources.stripe], then replay" in str(versioned.event("evt_1").reason)


# Rules that depend on it

DEPENDING = """
[[rules]]
operation = "note-end"
source = "stripe"
on = ["customer.subscription.*", "invoice.*"]
resource.kind = "subscription"
resource.id = ["data.object.subscription.id", "data.object.subscription", "data.object.id"]
when = { "_resource.state" = "canceled", "data.object.quiet" = { exists = false } }
subject = "_resource.id"
record = { kind = "end", data = { plan = "{_resource.fields.plan}" } }
"""


@pytest.fixture
def depending(world: World) -> World:
    return configured(world, SOURCE + VERSIONED + DEPENDING)


def notes(world: World) -> list[str]:
    return [data for (data,) in world.query("select data from receiver_records")]


def test_a_rule_sees_the_state_that_its_own_event_brings(depending: World) -> None:
    tell(depending, "deleted", "canceled", plan="pro", revision=2)

    assert notes(depending) == ['{"plan":"pro"}']


def test_a_rule_sees_what_stands_not_what_its_event_says(depending: World) -> None:
    tell(depending, "1-updated", "active", plan="pro", revision=3)

    tell(depending, "2-updated", "canceled", plan="old", revision=4)
    tell(depending, "3-updated", "active", plan="older", revision=2)

    assert notes(depending) == ['{"plan":"old"}']


def test_a_rule_waits_for_a_resource_that_is_not_known_yet(depending: World) -> None:
    word = depending.stripe("evt_i", "invoice.paid", id="in_1", subscription="sub_1")
    assert word == "parked"

    tell(depending, "deleted", "canceled", plan="pro", revision=1)

    assert depending.state("evt_i") == "done"
    assert len(notes(depending)) == 1


def test_a_rule_does_not_wait_where_the_rest_of_its_when_is_not_met(depending: World) -> None:
    word = depending.stripe("evt_i", "invoice.paid", id="in_1", subscription="sub_1", quiet=True)

    assert word == "ignored"
    assert "data.object.quiet" in str(depending.event("evt_i").reason)


def test_an_event_that_names_no_resource_has_none(world: World) -> None:
    text = DEPENDING.replace(', "data.object.id"', "")
    depending = configured(world, SOURCE + VERSIONED + text)

    word = depending.stripe("evt_i", "invoice.paid", id="in_1", subscription=None)

    assert word == "ignored"
    assert "_resource.state is missing" in str(depending.event("evt_i").reason)


def test_a_resource_may_be_expanded_in_the_event(depending: World) -> None:
    tell(depending, "deleted", "canceled", plan="pro", revision=1)

    depending.stripe("evt_i", "invoice.paid", id="in_1", subscription={"id": "sub_1", "a": 1})

    assert depending.state("evt_i") == "done"


def test_what_the_sender_calls_resource_is_not_ours(depending: World) -> None:
    body = stripe_body(
        "evt_i",
        "invoice.paid",
        envelope={"_resource": {"state": "canceled", "id": "x", "fields": {}}},
        id="in_1",
        subscription="sub_1",
    )

    assert depending.deliver("stripe", body) == "parked"


def test_one_failing_rule_undoes_the_projection_of_its_event(world: World) -> None:
    granting = (
        '[[rules]]\noperation = "a"\nsource = "stripe"\non = ["customer.subscription.*"]\n'
        'customer = "data.object.customer"\ngrant = { unit = "credits", amount = 1 }\n'
    )
    configured(world, SOURCE + VERSIONED + granting)

    assert tell(world, "created", "active", revision=1, customer="cus_1") == "parked"
    assert world.query("select * from receiver_resources") == []

    world.link("cus_1")
    assert known(world).state == "active"
    assert world.balance() == 1
