"""Many events in one delivery: each its own, all in one transaction, one answer."""

import hmac
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from receiver import batch, presets
from receiver.app import DONE
from receiver.batch import ELEMENTS_MAX, Batch, Element, NotSplit, split
from receiver.presets import PresetError, parse
from receiver.verify import Contract, Delivery, Event, Rejected, Secret, reread, verdict, verify
from store import inbox
from tests.conftest import NOW_MS, World
from tests.test_verify import FUZZ

KEY = b"of the hook"
SIGNED: dict[str, Any] = {
    "sig": "header:X-Signature",
    "algo": "sha256",
    "enc": "hex",
    "signed": "{body}",
    "event_id": "json:/id",
    "event_type": "json:/type",
    "account": "json:/account",
}
TOP = SIGNED | {"batch": "json:/*"}
INNER = SIGNED | {"batch": "json:/events/*"}
META = SIGNED | {
    "batch": ["json:/entry/*/changes/*", "json:/entry/*/messaging/*"],
    "batch_account": "json:/entry/*/id",
}
EACH = SIGNED | {
    "sig": "json:/mac",
    "signed": "{json:/id}:{json:/amount}",
    "batch": "json:/items/*/Item",
    "batch_signed": "each",
}

CONFIG = """
handlers = "handlers.py"

[worker]
run = "off"

[sources.many]
secrets = ["env:GITHUB"]
[sources.many.scheme]
sig = "header:X-Signature"
algo = "sha256"
enc = "hex"
signed = "{body}"
event_id = "json:/id"
event_type = "json:/type"
batch = "json:/events/*"
volatile = ["attempt"]

[[rules]]
operation = "count"
source = "many"
on = ["counted"]
subject = "id"
record = { kind = "count", data = "{n}" }

[[rules]]
operation = "welcome"
source = "many"
on = ["handled"]
subject = "id"
call = "handled"
"""
HANDLERS = """
def handled(event, tx):
    exec(event.body["run"], {"event": event, "tx": tx})
"""


def contract_of(table: dict[str, Any], **changes: Any) -> Contract:
    return Contract("many", "many", parse(table), (Secret("env:IT", KEY),), **changes)


def signed(body: bytes) -> Delivery:
    headers = ((b"x-signature", hmac.new(KEY, body, "sha256").hexdigest().encode()),)
    return Delivery("POST", "https://hooks.example.com/webhooks/many", headers, body, NOW_MS)


def events_of(table: dict[str, Any], body: bytes, **changes: Any) -> tuple[Event, ...]:
    judged = verify(contract_of(table, **changes), signed(body))
    assert isinstance(judged, tuple)
    return judged


# Splitting


def test_each_element_is_an_event_with_its_own_bytes() -> None:
    body = (
        b'{"events": [{"id":"a","type":"t","n":1.0000000000000000000001e+02}\n,\t{"id" : 2}]}\r\n'
    )

    events = events_of(INNER, body)

    assert [event.body for event in events] == [
        b'{"id":"a","type":"t","n":1.0000000000000000000001e+02}',
        b'{"id" : 2}',
    ]
    assert [(event.event_id, event.type) for event in events] == [("a", "t"), ("2", "")]
    assert [event.defect for event in events] == [None, "type missing at json:/type"]
    assert all(event.id_signed for event in events)


def test_a_batch_that_is_a_list_keeps_its_order() -> None:
    body = json.dumps([{"id": f"e{n}", "type": "t"} for n in range(250)]).encode()

    assert [event.event_id for event in events_of(TOP, body)] == [f"e{n}" for n in range(250)]


def test_a_byte_order_mark_is_no_part_of_an_element() -> None:
    (event,) = events_of(TOP, b'\xef\xbb\xbf[{"id":"a","type":"t"}]')

    assert event.body == b'{"id":"a","type":"t"}'


def test_lists_in_lists_are_split_and_the_account_is_taken_from_outside() -> None:
    body = b"""{"object": "page", "entry": [
      {"id": "7", "changes": [{"id": "a", "type": "t"}, {"id": "b", "type": "t", "account": "9"}]},
      {"id": 8, "messaging": [{"id": "c", "type": "t"}]}, {"id": "x"}, 5]}"""

    events = events_of(META, body)

    assert [(e.event_id, e.account) for e in events] == [("a", "7"), ("b", "9"), ("c", "8")]


def test_an_account_outside_that_is_none_is_a_defect() -> None:
    (event,) = events_of(META, b'{"entry": [{"id": {}, "changes": [{"id": "a", "type": "t"}]}]}')

    assert event.defect == "account of the batch is an object, not a text or a whole number"


def test_a_pinned_account_holds_for_each_element() -> None:
    body = b'[{"id":"a","type":"t","account":"1"},{"id":"b","type":"t","account":"2"}]'

    events = events_of(TOP, body, account="1")

    assert [event.defect for event in events] == [
        None,
        "account 1 is pinned, delivery says 2",
    ]


@pytest.mark.parametrize("body", [b"[]", b'{"events": []}', b'{"events": [], "entropy": "x"}'])
def test_an_empty_batch_has_no_events(body: bytes) -> None:
    table = TOP if body == b"[]" else INNER

    assert events_of(table, body) == ()
    judged = verdict(contract_of(table), signed(body))
    assert (judged.verdict, judged.event_id) == ("valid", None)


@pytest.mark.parametrize(
    ("body", "defect"),
    [
        (b"{}", "no list at json:/events/*"),
        (b'{"events": {"id": "a"}}', "no list at json:/events/*"),
        (b'{"events": null}', "no list at json:/events/*"),
        (b"[1]", "no list at json:/events/*"),
        (b"null", "no list at json:/events/*"),
        (b"", "body is not JSON: it is empty"),
        (b'{"events": [{"id": "a"}', "body is not JSON"),
        (b'{"events": ' + b"[" * 100_000, "body is not JSON"),
    ],
)
def test_what_is_no_batch_is_one_event_with_a_defect(body: bytes, defect: str) -> None:
    (event,) = events_of(INNER, body)

    assert event.body == body
    assert defect in (event.defect or "")
    assert event.event_id.startswith("sha256:")


def test_an_element_that_is_no_object_is_an_event_with_a_defect() -> None:
    events = events_of(TOP, b'[1, null, [], "x", {"id":"a","type":"t"}]')

    assert [event.defect is None for event in events] == [False, False, False, False, True]
    assert len({event.event_id for event in events}) == 5


def test_a_batch_with_too_many_elements_is_kept_as_one_event_and_costs_little() -> None:
    body = b"[" + b",".join([b'{"id":1}'] * 100_000) + b"]"

    started = time.process_time()
    (event,) = events_of(TOP, body)

    assert time.process_time() - started < 2
    assert event.defect == f"a batch of more than {ELEMENTS_MAX} elements is not taken apart"
    assert event.body == body


def test_the_longest_batch_is_taken_apart() -> None:
    body = b"[" + b",".join(b'{"id":%d,"type":"t"}' % n for n in range(ELEMENTS_MAX)) + b"]"

    assert len(events_of(TOP, body)) == ELEMENTS_MAX


def test_elements_of_two_lists_count_together() -> None:
    half = ",".join(["{}"] * (ELEMENTS_MAX // 2 + 1))
    body = f'{{"entry":[{{"changes":[{half}],"messaging":[{half}]}}]}}'.encode()

    with pytest.raises(NotSplit):
        split(Batch((("entry", "*", "changes", "*"), ("entry", "*", "messaging", "*"))), body)


def test_a_wide_account_is_read_once_for_all_its_elements() -> None:
    changes = ",".join(f'{{"id":"{n}","type":"t","x":"{"y" * 200}"}}' for n in range(2_000))
    body = f'{{"entry":[{{"id":"7","changes":[{changes}]}}]}}'.encode()

    started = time.process_time()
    elements = split(parse(META).batch or Batch(()), body)

    assert time.process_time() - started < 1
    assert {element.account for element in elements} == {"7"}


def test_a_name_in_a_path_may_hold_a_slash() -> None:
    table = SIGNED | {"batch": "json:/a~1b/*"}

    (event,) = events_of(table, b'{"a/b": [{"id":"a","type":"t"}]}')

    assert event.event_id == "a"


def test_a_stored_element_is_read_again_as_it_was() -> None:
    for event in events_of(META, b'{"entry": [{"id": "7", "changes": [{"id":"a","type":"t"}]}]}'):
        again = reread(
            contract_of(META),
            body=event.body,
            content_type=event.content_type,
            event_id=event.key_id,
            type=event.type,
            account=event.account,
            received_ms=event.received_ms,
            secret=event.secret,
            id_signed=event.id_signed,
            claimed_account=event.claimed_account,
        )

        assert again == event


def test_a_verdict_tells_of_each_element() -> None:
    body = b'[{"id":"a","type":"t"},{"id":"b","type":"u"}]'

    judged = verdict(contract_of(TOP), signed(body))

    assert (judged.verdict, judged.event_id) == ("valid", "a")
    assert [(one.event_id, one.event_type) for one in judged.events or ()] == [
        ("a", "t"),
        ("b", "u"),
    ]
    unproved = Contract("many", "many", parse(TOP), ())
    assert verdict(unproved, signed(body)).verdict == "unverified"


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"batch": "json:/events"}, "batch: 'json:/events' must be json:/path with *"),
        ({"batch": "header:X"}, "batch: 'header:X' must be json:/path with *"),
        ({"batch": "json:"}, "batch: 'json:' must be"),
        ({"batch_account": "json:/*/id"}, "batch_account: needs batch"),
        ({"batch_signed": "each"}, "batch_signed: needs batch"),
        ({"batch": "json:/*", "batch_signed": "all"}, "'all' must be one of whole, each"),
        ({"batch": "json:/*", "event_id": "header:X-Id"}, "event_id: must be json:/path with"),
        ({"batch": "json:/a/*", "batch_account": "json:/b/*/c"}, "has a * that is not one of"),
        (
            {"batch": "json:/a/*", "batch_account": "json:/a/*/c", "signed": "{json:/x}"},
            "batch_account: needs a signature over {body}",
        ),
        ({"batch": [f"json:/{n}/*" for n in range(5)]}, "batch: has more than 4 places"),
    ],
)
def test_a_batch_that_can_not_work_is_told(table: dict[str, Any], problem: str) -> None:
    with pytest.raises(PresetError) as caught:
        parse(SIGNED | table)

    assert problem in str(caught.value)


@FUZZ
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(["entry", "changes", "id", "type"]), inner)
        ),
        max_leaves=25,
    )
)
def test_whatever_is_signed_is_split_into_events(document: object) -> None:
    events = events_of(META, json.dumps(document).encode())

    for event in events:
        assert event.document == json.loads(event.body)


# The senders that send batches; each body as the sender documents it

BATCHES: dict[str, tuple[object, list[tuple[str, str, str]]]] = {
    "sendgrid": (
        [
            {"sg_event_id": "s1", "event": "delivered", "timestamp": 1},
            {"sg_event_id": "s2", "event": "open", "timestamp": 2},
        ],
        [("s1", "delivered", ""), ("s2", "open", "")],
    ),
    "gocardless": (
        {
            "events": [
                {"id": "EV1", "resource_type": "payments", "action": "paid_out"},
                {
                    "id": "EV2",
                    "resource_type": "mandates",
                    "action": "created",
                    "links": {"organisation": "OR1"},
                },
            ],
            "meta": {"webhook_id": "WB1"},
        },
        [("EV1", "payments.paid_out", ""), ("EV2", "mandates.created", "OR1")],
    ),
    "hubspot": (
        [
            {
                "eventId": 1,
                "subscriptionType": "contact.creation",
                "portalId": 62515,
                "objectId": 123,
                "occurredAt": 5,
                "attemptNumber": 0,
            }
        ],
        [("contact.creation:1:123:5", "contact.creation", "62515")],
    ),
    "meta": (
        {
            "object": "whatsapp_business_account",
            "entry": [
                {
                    "id": "88",
                    "changes": [
                        {"field": "messages", "value": {"messages": [{"id": "wamid.1"}]}},
                        {
                            "field": "messages",
                            "value": {"statuses": [{"id": "wamid.1", "status": "read"}]},
                        },
                    ],
                },
                {"id": "99", "messaging": [{"timestamp": 1, "message": {"mid": "m_1"}}]},
            ],
        },
        [
            ("wamid.1", "messages", "88"),
            ("wamid.1:read", "messages", "88"),
            ("m_1", "message", "99"),
        ],
    ),
    "xero": (
        {
            "events": [
                {
                    "tenantId": "t1",
                    "eventCategory": "INVOICE",
                    "eventType": "UPDATE",
                    "resourceId": "r1",
                    "eventDateUtc": "2017-06-21T01:15:39.902",
                }
            ],
            "firstEventSequence": 1,
            "lastEventSequence": 1,
            "entropy": "S0m3r4nd0mt3xt",
        },
        [("t1:INVOICE:UPDATE:r1:2017-06-21T01:15:39.902", "INVOICE.UPDATE", "t1")],
    ),
}


def read(name: str, document: object) -> list[tuple[str, str, str]]:
    preset = replace(presets.get(name), schemes=parse(SIGNED).schemes)
    judged = verify(
        Contract(name, name, preset, (Secret("env:IT", KEY),)),
        signed(json.dumps(document).encode()),
    )
    assert isinstance(judged, tuple)
    assert [event.defect for event in judged] == [None] * len(judged)
    return [(event.event_id, event.type, event.account) for event in judged]


@pytest.mark.parametrize("name", BATCHES)
def test_each_sender_of_batches_is_split_into_its_events(name: str) -> None:
    document, wanted = BATCHES[name]

    assert read(name, document) == wanted


def test_two_equal_events_of_asana_at_different_times_are_two() -> None:
    event = {"action": "changed", "resource": {"gid": "1", "resource_type": "task"}}
    first, second = event | {"created_at": "10:00"}, event | {"created_at": "10:01"}

    found = read("asana", {"events": [first, second, first]})

    assert len({event_id for event_id, _, _ in found}) == 2
    assert {type for _, type, _ in found} == {"task.changed"}


# Elements that are signed each by itself


def item(id_: str, amount: int, key: bytes = KEY, says: int | None = None) -> dict[str, object]:
    mac = hmac.new(key, f"{id_}:{amount}".encode(), "sha256").hexdigest()
    return {"Item": {"id": id_, "type": "t", "amount": says or amount, "mac": mac}}


def each(*items: object) -> Delivery:
    body = json.dumps({"items": items}).encode()
    return Delivery("POST", "https://hooks.example.com/webhooks/many", (), body, NOW_MS)


def test_each_element_is_proved_by_its_own_signature() -> None:
    judged = verify(contract_of(EACH), each(item("a", 1), item("b", 2)))

    assert isinstance(judged, tuple)
    assert [(event.event_id, event.id_signed) for event in judged] == [("a", True), ("b", True)]


@pytest.mark.parametrize(
    "items",
    [
        (item("a", 1), item("b", 2, b"another key")),
        (item("a", 1), item("b", 2, says=3)),
        (item("a", 1), {"Item": {"id": "b", "type": "t", "amount": 2}}),
        (item("a", 1), {"Item": 5}),
        (),
        ({"Other": 1},),
    ],
)
def test_a_batch_with_one_element_that_is_not_proved_is_refused(items: tuple[object, ...]) -> None:
    with pytest.raises(Rejected) as caught:
        verify(contract_of(EACH), each(*items))

    assert caught.value.reason == "bad-signature"


# In the file


@pytest.fixture
def many(world: World) -> World:
    (world.folder / "handlers.py").write_text(HANDLERS)
    world.configure(CONFIG)
    return world


def post(world: World, *elements: dict[str, object], **more: object) -> str:
    return world.deliver("many", json.dumps({"events": elements} | more).encode())


def counted(id_: str, n: int = 1, **more: object) -> dict[str, object]:
    return {"id": id_, "type": "counted", "n": n} | more


def handled(id_: str, run: str) -> dict[str, object]:
    return {"id": id_, "type": "handled", "run": run}


def states(world: World) -> dict[str, str]:
    found = world.query("select event_id, state from receiver_events order by id")
    return {event_id: state for event_id, state in found}


def records(world: World) -> list[str]:
    found = world.query("select subject from receiver_records order by subject")
    return [subject for (subject,) in found]


def test_a_batch_is_applied_whole_and_answered_with_the_worst(many: World) -> None:
    word = post(many, counted("a"), {"id": "b", "type": "other"}, {"id": "c"}, counted("d"))

    assert word == "quarantined"
    assert states(many) == {"a": "done", "b": "ignored", "c": "quarantined", "d": "done"}
    assert records(many) == ["a", "d"]
    assert post(many, counted("a"), {"id": "b", "type": "other"}) == "duplicate"


def test_what_has_to_be_sent_again_is_the_worst_of_all(many: World) -> None:
    word = post(many, {"id": "q"}, handled("h", "1 / 0"), counted("a"))

    assert word == "pending!"
    assert states(many) == {"q": "quarantined", "h": "pending", "a": "done"}


def test_what_a_worker_has_leased_does_not_hide_what_has_to_be_sent_again(many: World) -> None:
    post(many, handled("leased", "1 / 0"))
    row = many.event("leased", source="many").id
    until_ms = many.clock.now_ms + 60_000
    many.store.write(lambda tx: inbox.make_due(tx, row, by_worker=True))
    many.store.write(lambda tx: inbox.lease(tx, "a worker", until_ms, 3_600_000))

    assert post(many, handled("leased", "1 / 0"), handled("h", "1 / 0")) == "pending!"


def test_every_word_that_an_event_can_end_with_has_an_answer(many: World) -> None:
    many.configure(CONFIG.replace('run = "off"', "attempts_max = 12\nage_max_s = 60"))
    post(many, handled("h", "1 / 0"))

    words = set()
    for _ in range(200):
        many.clock.now_ms += 60_000
        words.add(post(many, handled("h", "1 / 0"), handled("h", "1 / 0")))

    # The redelivery that uses the last attempt up is answered, too.
    assert words == {"pending", "dead", "duplicate"}
    assert words <= DONE.keys()


def test_the_same_element_in_another_batch_is_a_duplicate(many: World) -> None:
    assert post(many, counted("a"), counted("b"), sequence=1) == "done"

    assert post(many, counted("b"), counted("c"), sequence=2) == "done"
    assert post(many, counted("b"), sequence=3) == "duplicate"
    assert records(many) == ["a", "b", "c"]
    assert many.event("b", source="many").duplicates == 2


def test_an_element_twice_in_one_batch_is_one_event(many: World) -> None:
    word = post(many, counted("a"), counted("a"), counted("a", attempt=2))

    assert word == "done"
    assert many.event("a", source="many").duplicates == 2
    assert records(many) == ["a"]


def test_one_id_with_two_contents_in_one_batch_is_a_conflict(many: World) -> None:
    assert post(many, counted("a", 1), counted("a", 2)) == "conflict"
    assert many.query("select count(*) from receiver_conflicts") == [(1,)]
    assert many.query("select data from receiver_records") == [("1",)]


def test_an_element_that_fails_undoes_nothing_of_the_others(many: World) -> None:
    word = post(many, counted("a"), handled("h", "raise ValueError"), counted("b"))

    assert word == "pending!"
    assert records(many) == ["a", "b"]
    assert post(many, counted("a"), handled("h", "raise ValueError"), counted("b")) == "pending!"
    assert many.event("h", source="many").attempts == 2


def test_an_element_that_ends_the_transaction_costs_the_others_nothing(many: World) -> None:
    poison = "tx.sql('insert into poison values (1)')"

    word = post(many, counted("a"), handled("h", poison), counted("b"))

    # What can't be told apart in one transaction is applied by one of its own, right after.
    assert word == "pending"
    assert states(many) == {"a": "done", "h": "pending", "b": "done"}
    assert records(many) == ["a", "b"]
    assert many.event("h", source="many").attempts == 1
    assert post(many, counted("b"), counted("c"), handled("h", poison)) == "pending"
    assert states(many) == {"a": "done", "h": "pending", "b": "done", "c": "done"}


def test_an_element_is_replayed_alone(many: World) -> None:
    post(many, counted("a"), handled("h", "1 / 0"))
    row = many.event("h", source="many").id
    (many.folder / "handlers.py").write_text("def handled(event, tx):\n    pass\n")
    many.configure(CONFIG)

    outcome = many.store.write(lambda tx: many.processor.replay(tx, row))

    assert outcome.word == "done"
    assert states(many) == {"a": "done", "h": "done"}


def test_the_bytes_of_an_element_are_what_is_stored(many: World) -> None:
    many.deliver("many", b'{"events": [{"id": "a", "type": "counted", "n": 1.10}]}')

    assert many.query("select body from receiver_payloads") == [
        (b'{"id": "a", "type": "counted", "n": 1.10}',)
    ]


def test_splitting_gives_the_elements_of_every_list() -> None:
    assert batch.split(Batch((("a", "*"), ("b", "*"))), b'{"a":[1],"b":[2]}') == [
        Element(b"1"),
        Element(b"2"),
    ]
