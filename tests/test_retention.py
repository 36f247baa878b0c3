"""Bodies that go, by age or because they are a person's; and all that stays."""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import apsw
import pytest

from receiver.config import Settings
from receiver.retention import DAY_MS, mentions, prune
from store import inbox, rejections
from store.database import Store
from store.forgotten import Held
from store.rejections import Request
from tests.command import Command
from tests.conftest import CONFIG, World, stripe_body

CANARY = "Ada Lovelace of St James's Square"


@pytest.fixture
def receiver(world: World, monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(world, monkeypatch)


def payload(world: World, event_id: str) -> bytes | None:
    row = world.event(event_id).id
    return world.store.write(lambda tx: inbox.payload(tx, row))


def pass_days(world: World, days: int) -> None:
    world.clock.now_ms += days * DAY_MS


# By age


def test_payloads_go_by_the_age_that_their_source_says_and_keys_stay(
    world: World, receiver: Command
) -> None:
    text = CONFIG.replace("[sources.github]", "[sources.github]\nretention.payload_days = 5")
    world.configure(text)
    world.link()
    assert world.invoice("evt_1", "in_1") == "done"
    world.deliver("github", b'{"ref": "main"}', event_id="g1", type="push")
    before = kept_for_ever(world)
    pass_days(world, 6)

    (told,) = receiver.objects("prune")

    assert told["sources"] == {"github": {"events": 1, "bytes": 15}}
    assert payload(world, "evt_1") is not None
    pass_days(world, 90)
    assert receiver.objects("prune")[0]["sources"]["stripe"]["events"] == 1
    assert world.query("select count(*) from receiver_payloads") == [(0,)]
    assert kept_for_ever(world) == before
    assert world.balance() == 100


def kept_for_ever(world: World) -> list[list[tuple[object, ...]]]:
    tables = ("events", "operations", "ledger", "balances", "links", "records")
    return [world.query(f"select * from receiver_{name} order by 1, 2, 3") for name in tables]


def test_a_dry_run_of_prune_changes_nothing(world: World, receiver: Command) -> None:
    world.link()
    world.invoice("evt_1", "in_1")
    pass_days(world, 91)
    before = world.query("select * from receiver_payloads")

    (told,) = receiver.objects("prune", "--dry-run")

    assert (told["dry_run"], told["events"]) == (True, 1)
    assert world.query("select * from receiver_payloads") == before
    assert world.query("select count(*) from receiver_audit") == [(0,)]


def test_what_is_unfinished_keeps_its_payload_for_ever(world: World, receiver: Command) -> None:
    assert world.invoice("evt_parked", "in_1", customer="cus_unknown") == "parked"
    assert world.stripe("evt_quarantined", "invoice.paid", amount_paid=1) == "quarantined"
    world.link()
    world.invoice("evt_conflict", "in_2")
    assert world.invoice("evt_conflict", "in_2", amount_paid=9) == "conflict"
    world.invoice("evt_owes", "in_3")
    row = world.event("evt_owes").id
    world.store.write(
        lambda tx: tx.db.execute(
            """
            insert into receiver_outbox (operation_key, source, account, subject, operation,
              destination, name, state, attempts, body, event, created_ms)
            values ('op', 'stripe', '', 'in_3', 'x', 'team', '', 'review', 1, '{"a":1}', ?, 1)
            """,
            (row,),
        )
    )
    pass_days(world, 10_000)

    (told,) = receiver.objects("prune")

    assert told["events"] == 0
    for name in ("evt_parked", "evt_quarantined", "evt_conflict", "evt_owes"):
        assert payload(world, name) is not None
    world.link("cus_unknown", "late")
    assert world.state("evt_parked") == "done"


def test_a_redelivery_after_pruning_is_recognised_by_its_canonical_content(
    world: World, receiver: Command
) -> None:
    world.link()
    assert world.invoice("evt_1", "in_1") == "done"
    pass_days(world, 91)
    receiver.objects("prune")

    assert world.invoice("evt_1", "in_1") == "duplicate"
    # Another body, but only in a field that may differ.
    volatile = world.invoice("evt_1", "in_1", envelope={"pending_webhooks": 7})
    assert volatile == "duplicate"
    assert world.invoice("evt_1", "in_1", amount_paid=501) == "conflict"
    assert world.balance() == 100


def test_where_the_mask_has_changed_a_known_key_is_a_duplicate(
    world: World, receiver: Command
) -> None:
    world.link()
    world.invoice("evt_1", "in_1")
    pass_days(world, 91)
    receiver.objects("prune")
    world.configure(
        CONFIG.replace(
            "[sources.stripe]", '[sources.stripe]\nvolatile = ["data.object.amount_paid"]'
        )
    )

    assert world.invoice("evt_1", "in_1", amount_paid=501) == "duplicate"


def test_what_was_no_json_is_known_by_its_raw_bytes_after_pruning(
    world: World, receiver: Command
) -> None:
    # A body that is no JSON is quarantined under its own digest, so here the hash is null by hand.
    world.link()
    world.invoice("evt_1", "in_1")
    pass_days(world, 91)
    receiver.objects("prune")
    world.store.write(
        lambda tx: tx.db.execute("update receiver_forgotten set content_sha256 = null")
    )

    assert world.invoice("evt_1", "in_1") == "duplicate"
    assert world.invoice("evt_1", "in_1", amount_paid=2) == "conflict"


def test_many_events_are_pruned_in_small_transactions(
    world: World, receiver: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(250):
        world.deliver("github", b'{"ref": "%d"}' % number, event_id=f"g{number}", type="push")
    pass_days(world, 91)
    sizes: list[int] = []

    def counting(store: Store, settings: Settings, batch: Sequence[Held]) -> int:
        sizes.append(len(batch))
        return prune(store, settings, batch)

    monkeypatch.setattr("receiver.retention.prune", counting)

    (told,) = receiver.objects("prune")

    assert told["events"] == 250
    assert sizes == [100, 100, 50]
    assert world.query("select count(*) from receiver_payloads") == [(0,)]
    assert world.query("select count(*) from receiver_forgotten") == [(250,)]
    assert len(world.query("select 1 from receiver_audit where action = 'prune'")) == 1


def test_ignored_events_lose_their_payload_at_once_where_none_is_kept(
    world: World, receiver: Command
) -> None:
    assert world.stripe("evt_1", "nobody.wants") == "ignored"
    world.configure(
        CONFIG.replace("[sources.stripe]", "[sources.stripe]\nretention.ignored = false")
    )

    assert receiver.objects("prune")[0]["events"] == 1
    assert payload(world, "evt_1") is None


def test_a_pruned_event_says_so_and_is_not_run_again(world: World, receiver: Command) -> None:
    world.link()
    world.invoice("evt_1", "in_1")
    pass_days(world, 91)
    receiver.objects("prune")

    assert "pruned" in receiver("events", "show", "evt_1").out
    replayed = receiver("replay", "evt_1")
    assert replayed.code == 1
    assert "evt_1  not run: its body was pruned, so it can't be run again" in replayed.out
    # It is done: there is nothing that it needs.
    assert "next:" not in replayed.out


def test_a_redacted_event_is_not_run_again_and_says_why(world: World, receiver: Command) -> None:
    world.link()
    world.invoice("evt_1", "in_1")
    receiver("redact", "evt_1", "--yes", "--reason", "asked")

    assert "not run: its body was redacted, so it" in receiver("replay", "evt_1").out


# A person's


def test_a_redacted_person_is_nowhere_in_the_file_and_the_books_stay(
    world: World, receiver: Command
) -> None:
    world.link()
    world.invoice("evt_1", "in_1", name=CANARY)
    world.invoice("evt_1", "in_1", name=CANARY, amount_paid=7)
    world.stripe("evt_2", "feedback.created", id="f1", text=CANARY, rating=1, customer="cus_1")
    world.invoice("evt_3", "in_3", customer="cus_2", name="somebody else")
    keys = world.query("select * from receiver_operations order by 1, 2, 3, 4")
    assert CANARY.encode() in whole_file(world)

    ran = receiver("redact", "--customer", "cus_1", "--yes", "--reason", "asked to be forgotten")

    assert ran.code == 0, ran.err
    assert "2 of 2 events" in ran.out
    assert CANARY.encode() not in whole_file(world)
    assert payload(world, "evt_3") is not None
    assert world.query("select * from receiver_operations order by 1, 2, 3, 4") == keys
    assert world.query("select data from receiver_records") == [("{}",)]
    assert world.balance() == 100
    acts = world.query("select action, target, reason from receiver_audit order by id")
    assert acts == [
        ("redact", f"event {world.event(name).id}", "asked to be forgotten")
        for name in ("evt_1", "evt_2")
    ]


def test_what_was_moved_within_the_file_before_is_overwritten_too(
    world: World, receiver: Command
) -> None:
    """A page that is split leaves copies behind, which no later deletion reaches."""
    for number in range(60):
        world.stripe(f"evt_{number}", "feedback.new", id=f"f{number}", text=CANARY, rating=1)
    events = [f"evt_{number}" for number in range(60)]

    ran = receiver("redact", *events, "--yes", "--reason", "asked to be forgotten")

    assert ran.code == 0, ran.err
    assert CANARY.encode() not in whole_file(world)


def whole_file(world: World) -> bytes:
    path = Path(world.store.path)
    world.store.close()
    content = path.read_bytes()
    wal = Path(f"{path}-wal")
    content += wal.read_bytes() if wal.exists() else b""
    world.store = type(world.store).open(path, world.clock)
    return content


def test_a_redelivery_of_redacted_content_is_a_duplicate(world: World, receiver: Command) -> None:
    world.link()
    world.invoice("evt_1", "in_1", name=CANARY)
    receiver("redact", "evt_1", "--yes", "--reason", "x")

    assert world.invoice("evt_1", "in_1", name=CANARY) == "duplicate"
    again = world.invoice("evt_1", "in_1", name=CANARY, envelope={"pending_webhooks": 2})
    assert again == "duplicate"
    assert payload(world, "evt_1") is None
    assert world.query("select why from receiver_forgotten") == [("redacted",)]


def test_an_unfinished_event_is_not_redacted(world: World, receiver: Command) -> None:
    world.invoice("evt_1", "in_1", customer="cus_9")

    ran = receiver("redact", "evt_1", "--yes", "--reason", "x")

    assert ran.code == 1
    assert "receiver events resolve" in ran.err
    assert payload(world, "evt_1") is not None


def test_a_person_is_found_in_records_whose_events_were_pruned(
    world: World, receiver: Command
) -> None:
    world.stripe("evt_1", "feedback.created", id="f1", text="ada@example.com", rating=1)
    world.stripe("evt_2", "feedback.created", id="f2", text="bob@example.com", rating=1)
    pass_days(world, 100)
    assert receiver("prune").code == 0

    ran = receiver("redact", "--customer", "ada@example.com", "--yes", "--reason", "x")

    assert "1 of 1 event" in ran.out
    assert world.query("select subject from receiver_records where data = '{}'") == [("evt_1",)]


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_person_of_whom_only_a_refused_request_tells_is_redacted_too(
    world: World, receiver: Command, pack: Callable[[bytes], bytes]
) -> None:
    request = Request(
        source="stripe",
        reason="expired",
        request_id="r-1",
        received_ms=world.clock(),
        method="POST",
        address="192.0.2.7",
        header_names="[]",
        body_bytes=2,
        detail="late",
        skew_s=400,
        url="https://h.test/",
        headers="[]",
        body=pack(b'{"customer": {"id": "cus_1"}}'),
    )
    world.store.write(lambda tx: rejections.keep(tx, request))
    asked = ("redact", "--customer", "cus_1", "--reason", "asked to be forgotten")

    assert "rejection 1" in receiver(*asked, "--dry-run").out
    ran = receiver(*asked, "--yes")

    assert ran.code == 0, ran.err
    assert "1 refused request emptied" in ran.out
    assert " of " not in ran.out
    assert world.query("select body, headers from receiver_rejected") == [(None, None)]
    assert world.query("select action, target from receiver_audit") == [("redact", "rejection 1")]


def test_a_full_disk_after_a_redaction_is_told_in_words(
    world: World, receiver: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.link()
    world.invoice("evt_1", "in_1")

    class Full:
        def execute(self, statement: str) -> None:
            raise apsw.FullError("database or disk is full")

        def set_busy_timeout(self, milliseconds: int) -> None:
            pass

    real = Store.empty_wal
    full = SimpleNamespace(db=Full())
    monkeypatch.setattr(Store, "empty_wal", lambda _: real(full))  # type: ignore[arg-type]

    ran = receiver("redact", "evt_1", "--yes", "--reason", "x")

    assert ran.code == 0
    assert "disk is full, so its -wal may still hold what was deleted" in ran.err
    assert payload(world, "evt_1") is None


def test_a_dry_run_of_redact_lists_and_changes_nothing(world: World, receiver: Command) -> None:
    world.link()
    world.invoice("evt_1", "in_1")

    ran = receiver("redact", "--customer", "cus_1", "--dry-run")
    unsaid = receiver("redact", "--customer", "cus_1", "--yes")

    headings, event, count, following = ran.out.splitlines()
    assert headings.split() == ["row", "event", "type", "state"]
    assert event.split() == ["1", "stripe/evt_1", "invoice.paid", "done"]
    assert count == "1 event would be emptied for ever"
    assert following.startswith("next: `receiver redact --customer cus_1 --reason TEXT")
    assert (unsaid.code, "say why with --reason" in unsaid.err) == (2, True)
    assert payload(world, "evt_1") is not None


@pytest.mark.parametrize(
    ("body", "kind", "found"),
    [
        (b'{"a": [{"customer": "cus_1"}]}', "json", True),
        (b'{"a": "cus_1 and more"}', "json", False),
        (b'{"a": "cus_12"}', "json", False),
        (b'{"a": "\\u0063us_1"}', "json", True),
        (b"customer=cus%5F1&x=1", "form", True),
        (b'payload={"customer": "cus_1"}', "form", True),
        (b"not json, but cus_1", "json", True),
        (b"{}", "json", False),
    ],
)
def test_a_person_is_found_as_a_whole_value_anywhere(body: bytes, kind: str, found: bool) -> None:
    assert mentions(body, kind, "cus_1") is found


def test_a_number_is_somebodys_id_only_if_it_is_long() -> None:
    assert mentions(b'{"customer": {"id": 207119551}}', "json", "207119551")
    assert not mentions(b'{"amount": 100}', "json", "100")
    assert not mentions(b'{"paid": true}', "json", "True")


# Writing out


def test_an_export_has_each_row_once_over_many_pages(
    world: World, receiver: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("receiver.export.PAGE_ROWS", 3)
    monkeypatch.setattr("receiver.export.PAGE_BYTES", 300)
    world.link()
    for number in range(10):
        world.invoice(f"evt_{number}", f"in_{number}")
    world.stripe("evt_f", "feedback.created", id="f1", text="fine", rating=5)

    found = receiver("export", "--payload").objects

    kinds = [one["kind"] for one in found]
    assert {kind: kinds.count(kind) for kind in kinds} == {"event": 11, "entry": 10, "record": 1}
    assert [one["id"] for one in found if one["kind"] == "event"][:2] == ["evt_0", "evt_1"]
    assert len({one["subject"] for one in found if one["kind"] == "entry"}) == 10


def test_an_export_has_payloads_only_when_asked(world: World, receiver: Command) -> None:
    body = stripe_body("evt_1", "nobody.wants", name=CANARY)
    world.deliver("stripe", body)

    assert CANARY not in receiver("export", "events").out
    (one,) = receiver("export", "events", "--payload").objects
    assert json.loads(one["payload"]) == json.loads(body)
    assert receiver("export", "events", "--since", "2030-01-01").objects == []
