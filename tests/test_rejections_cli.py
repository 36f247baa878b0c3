"""`receiver rejections`: what was refused is listed, explained, and taken where that is right."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from receiver import presets
from receiver.signing import sign
from receiver.tally import with_body
from receiver.verify import Delivery, Rejected, verify
from store import audit, rejections, secrets
from store.database import Tx
from store.rejections import Request
from tests.command import Command
from tests.conftest import CONFIG, NOW_MS, SECRETS, World, stripe_body
from tests.service import (
    STRIPE_CONFIG,
    Service,
    Start,
    by_stripe,
    checkout,
    invoice,
    services,
    until,
)

LATE_S = 4000


@pytest.fixture
def command(world: World, monkeypatch: pytest.MonkeyPatch) -> Command:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    return Command(world, monkeypatch)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with services(tmp_path) as starting:
        yield starting


def refuse(
    world: World,
    body: bytes,
    *,
    source: str = "stripe",
    late_s: int = LATE_S,
    received: bytes | None = None,
    keep: bool = True,
    request_id: str = "r-1",
) -> int:
    """A delivery that the server refused and kept; its number."""
    contract = world.processor.settings.sources[source].contract
    signed_ms = world.clock() - late_s * 1000
    headers = sign(contract.preset, contract.secrets[0].value, body, now_ms=signed_ms)
    pairs = tuple((name.lower().encode(), value.encode()) for name, value in headers)
    url = f"https://hooks.example.com/webhooks/{source}"
    delivery = Delivery("POST", url, pairs, received or body, world.clock())
    with pytest.raises(Rejected) as refused:
        verify(contract, delivery)
    why = refused.value
    names = json.dumps([name.decode() for name, _ in pairs])
    request = Request(
        source=source,
        reason=why.reason,
        request_id=request_id,
        received_ms=world.clock(),
        method="POST",
        address="192.0.2.7",
        header_names=names,
        body_bytes=len(delivery.body),
        detail=why.detail,
    )
    if keep or why.reason == "expired":
        request = replace(with_body(request, delivery), skew_s=why.skew_s)

    def write(tx: Tx) -> None:
        at_ms = world.clock()
        rejections.add(tx, source, why.reason, 1, at_ms, at_ms, request_id, why.detail)
        rejections.keep(tx, request)

    world.store.write(write)
    (newest,) = world.query("select max(id) from receiver_rejected")
    return int(newest[0])


def paid(event_id: str, invoice_id: str = "in_1") -> bytes:
    fields = {"customer": "cus_1", "status": "paid", "amount_paid": 500}
    return stripe_body(event_id, "invoice.paid", id=invoice_id, **fields)


def causes(object_: dict[str, Any]) -> list[str]:
    return [finding["cause"] for finding in object_["explanation"]]


def explain(command: Command, name: str | int) -> dict[str, Any]:
    (found,) = command.objects("rejections", "explain", name)
    return found


# Listing and explaining


def test_what_was_refused_is_listed_with_what_it_takes_to_explain_it(
    world: World, command: Command
) -> None:
    refuse(world, paid("evt_1"), late_s=0, received=b"{}", request_id="r-7")
    world.clock.now_ms += 60_000
    refuse(world, paid("evt_2"))

    newest, oldest = command.objects("rejections", "list")

    assert (newest["rejection"], newest["reason"]) == (2, "expired")
    assert oldest == {
        "rejection": 1,
        "source": "stripe",
        "reason": "bad-signature",
        "count": 1,
        "first_at": "2027-01-15T08:00:00.000Z",
        "at": "2027-01-15T08:00:00.000Z",
        "request_id": "r-7",
        "detail": oldest["detail"],
        "accepted_at": None,
    }
    assert command.objects("rejections", "list", "--reason", "expired") == [newest]
    assert command.objects("rejections", "list", "--since", "30s") == [newest]
    assert command.objects("rejections", "list", "--source", "github") == []
    assert command.objects("rejections", "list", "--limit", 1) == [newest]
    assert "receiver rejections explain 2" in command("rejections", "list").out


def test_a_body_that_was_changed_is_explained_and_never_accepted(
    world: World, command: Command
) -> None:
    body = paid("evt_1")
    number = refuse(world, body, late_s=0, received=body + b"\n", request_id="r-7")

    shown = command("rejections", "explain", "r-7")
    taken = command("rejections", "accept", number, "--reason", "it is only a newline")

    assert causes(explain(command, number)) == ["body-changed"]
    assert "without the newline at its end" in shown.out
    assert taken.code == 1
    assert "never accepted" in taken.err
    assert world.query("select count(*) from receiver_events") == [(0,)]
    assert "evt_1" not in shown.out + shown.err


def test_without_a_body_it_says_how_to_have_the_next_one_kept(
    world: World, command: Command
) -> None:
    number = refuse(world, paid("evt_1"), late_s=0, received=b"{}", keep=False)

    shown = command("rejections", "explain", number)

    assert causes(explain(command, number)) == ["not-kept"]
    assert "keep_rejected = true in [sources.stripe]" in shown.out
    assert "receiver verify stripe --request FILE" in shown.out


def test_a_request_that_was_refused_is_no_event_and_leads_to_why(
    world: World, command: Command
) -> None:
    number = refuse(world, paid("evt_1"), late_s=0, received=b"{}", request_id="r-7")

    ran = command("events", "show", "r-7")

    assert ran.code == 3
    assert f"refused (bad-signature): `receiver rejections explain {number}`" in ran.err


def test_what_is_explained_without_a_body_asks_for_none(world: World, command: Command) -> None:
    number = refuse(world, paid("evt_1"), late_s=0, received=b"{}", keep=False)
    world.query("update receiver_rejected set header_names = '[\"host\"]'")

    shown = command("rejections", "explain", number)

    assert causes(explain(command, number)) == ["missing-header"]
    assert "next:" not in shown.out + shown.err


def test_the_url_is_suspected_only_where_it_is_signed(world: World, command: Command) -> None:
    kept = refuse(world, paid("evt_1"), late_s=0, received=b'{"other": 1}', keep=True)
    bare = refuse(world, paid("evt_2"), late_s=0, received=b"{}", keep=False)

    for number, parts in ((kept, "of body or secret would"), (bare, "the secret or the body is")):
        assert parts in command("rejections", "explain", number).out
    signed = [name for name in ("stripe", "twilio") if presets.get(name).signs_url]
    assert signed == ["twilio"]


def test_what_was_wrong_is_said_once(world: World, command: Command) -> None:
    kept = refuse(world, paid("evt_1"), late_s=0, received=b"{}", keep=True)
    bare = refuse(world, paid("evt_2"), late_s=0, received=b"{}", keep=False)

    for number in (kept, bare):
        assert command("rejections", "explain", number).out.count("no signature in") == 1


def test_a_stale_one_says_which_clock_is_off(world: World, command: Command) -> None:
    number = refuse(world, paid("evt_1"))
    assert causes(explain(command, number)) == ["late", "some-clock", "clock-now"]

    world.stripe("evt_2", "a.b")

    assert causes(explain(command, number)) == ["late", "this-delivery", "clock-now"]
    shown = command("rejections", "explain", number).out
    assert f"{LATE_S} s late" in shown
    assert f"receiver rejections accept {number}" in shown


@pytest.mark.parametrize(
    ("reason", "detail", "words"),
    [
        ("certificate", "the certificate at https://a/b is not known yet", "comes again"),
        ("unknown", "/webhooks/strip", "did you mean stripe"),
        ("too-large", "more than 9 bytes", "server.body_bytes_max"),
        ("address", "192.0.2.7 is not in sources.stripe.allow_ips", "server.trusted_proxies"),
        ("encoding", "gzip: set sources.stripe.gzip = true to accept it", "gzip = true"),
        ("unavailable", "disk full", "it was answered 503"),
    ],
)
def test_every_other_refusal_says_what_to_do(
    world: World, command: Command, reason: str, detail: str, words: str
) -> None:
    request = Request(
        "stripe" * (reason != "unknown"), reason, "r-9", NOW_MS, "POST", "::1", "[]", None, detail
    )
    world.store.write(lambda tx: rejections.keep(tx, request))

    assert words in command("rejections", "explain", "r-9").out


def test_what_is_not_kept_is_not_found(command: Command) -> None:
    ran = command("rejections", "explain", "r-404")

    assert (ran.code, "only the newest are kept" in ran.err) == (3, True)
    assert command("rejections", "accept", "9", "--reason", "x").code == 3


# Accepting


def test_an_accepted_one_goes_the_way_of_any_delivery(world: World, command: Command) -> None:
    world.link()
    number = refuse(world, paid("evt_1"))

    ran = command("rejections", "accept", number, "--reason", "our clock was wrong")

    assert (ran.code, "accepted as event 1: done" in ran.out) == (0, True)
    assert world.balance() == 100
    event = world.event("evt_1")
    assert (event.received_ms, event.request_id) == (NOW_MS, "r-1")
    (act,) = world.store.write(lambda tx: audit.of_target(tx, "event 1"))
    assert (act.action, act.reason) == ("rejections accept", "our clock was wrong")
    assert "by hand" in command("events", "show", "evt_1").out
    (line,) = command.objects("rejections", "list")
    assert line["accepted_at"] is not None
    assert explain(command, number)["event"] == 1


def test_one_that_is_accepted_twice_has_one_effect(world: World, command: Command) -> None:
    world.link()
    number = refuse(world, paid("evt_1"))
    assert command("rejections", "accept", number, "--reason", "late").code == 0

    again = command("rejections", "accept", number, "--reason", "late")

    assert (again.code, "accepted already, as event 1" in again.err) == (1, True)
    assert world.balance() == 100
    assert world.event("evt_1").duplicates == 0


def test_one_that_came_again_in_time_is_a_duplicate(world: World, command: Command) -> None:
    world.link()
    number = refuse(world, paid("evt_1"))
    assert world.deliver("stripe", paid("evt_1")) == "done"

    ran = command("rejections", "accept", number, "--reason", "late")

    assert "accepted as event 1: duplicate" in ran.out
    assert world.balance() == 100


def test_what_an_accepted_one_lacks_is_said(world: World, command: Command) -> None:
    number = refuse(world, paid("evt_1"))

    ran = command("rejections", "accept", number, "--reason", "late")

    assert (ran.code, "parked" in ran.out) == (1, True)
    assert world.state("evt_1") == "parked"


def test_one_whose_secret_is_gone_is_not_accepted(
    world: World, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = refuse(world, paid("evt_1"))
    monkeypatch.setenv("STRIPE", "whsec_of_tomorrow")

    ran = command("rejections", "accept", number, "--reason", "late")

    assert (ran.code, "none of the secrets of stripe any more" in ran.err) == (1, True)


def test_one_whose_body_was_let_go_is_not_accepted(world: World, command: Command) -> None:
    number = refuse(world, paid("evt_1"))
    world.query("update receiver_rejected set url = null, headers = null, body = null")

    ran = command("rejections", "accept", number, "--reason", "late")

    assert (ran.code, "pruned or redacted since" in ran.err) == (1, True)
    (finding,) = explain(command, number)["explanation"]
    assert "the signature was right" in finding["words"]


def test_an_accepted_one_whose_handler_ends_the_transaction_is_kept(
    world: World, command: Command
) -> None:
    run = "tx.sql('insert into poison values (1)')"
    number = refuse(world, stripe_body("evt_1", "handler.called", id="o", run=run))

    ran = command("rejections", "accept", number, "--reason", "late")

    assert (ran.code, "accepted as event 1: pending" in ran.out) == (0, True)
    assert world.query("select count(*) from receiver_events") == [(1,)]
    assert explain(command, number)["event"] == 1


def test_it_is_accepted_beside_a_running_server_and_without_one(start: Start) -> None:
    service = start(STRIPE_CONFIG)
    service.deliver(checkout("evt_c"))
    numbers = [stale(service, f"evt_{n}", f"in_{n}") for n in (1, 2)]

    beside = service.command("rejections", "accept", str(numbers[0]), "--reason", "clock")
    assert service.stop() == 0
    without = service.command("rejections", "accept", str(numbers[1]), "--reason", "clock")

    assert (beside.returncode, without.returncode) == (0, 0), beside.stderr + without.stderr
    assert service.value("select balance from receiver_balances") == 200
    service.assert_books_balance()


def stale(service: Service, event_id: str, invoice_id: str) -> int:
    """A genuine delivery of an hour ago, refused and in the file; its number."""
    body = invoice(event_id, invoice_id)
    at_s = NOW_MS // 1000
    answer = service.post("stripe", body, by_stripe(body, at_s=at_s))
    assert answer.status == 401
    request_id = answer.headers["x-request-id"]
    found = functools.partial(
        service.rows, "select id from receiver_rejected where request_id = ?", request_id
    )
    until(lambda: bool(found()))
    return int(found()[0][0])


@pytest.mark.parametrize("reason", ["", "  ", "\t\n"])
def test_a_reason_that_says_nothing_is_none(command: Command, reason: str) -> None:
    for act in (["rejections", "accept", "1"], ["events", "resolve", "evt_1"]):
        ran = command(*act, "--reason", reason)

        assert (ran.code, "says nothing" in ran.err) == (2, True)


# verify


def test_verify_explains_what_it_refuses(world: World, command: Command, tmp_path: Path) -> None:
    body = paid("evt_1")
    contract = world.processor.settings.sources["stripe"].contract
    headers = dict(sign(contract.preset, contract.secrets[0].value, body, now_ms=NOW_MS))
    file = tmp_path / "request.json"
    file.write_text(json.dumps({"headers": headers, "body": body.decode() + "\n"}))

    ran = command("verify", "stripe", "--request", str(file), "--json")
    told = command("verify", "stripe", "--request", str(file)).out

    assert ran.code == 1
    (judged,) = ran.objects
    assert (judged["verdict"], causes(judged)) == ("bad-signature", ["body-changed"])
    assert "without the newline" in told
    good = {"headers": headers, "body": body.decode()}
    file.write_text(json.dumps(good))
    (judged,) = command.objects("verify", "stripe", "--request", str(file))
    assert judged["verdict"] == "valid"
    assert "explanation" not in judged


# Rotation


def test_an_old_secret_is_said_to_be_ready_to_retire(
    world: World, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEW", "whsec_of_tomorrow")
    both = CONFIG.replace('secrets = ["env:STRIPE"]', 'secrets = ["env:NEW", "env:STRIPE"]', 1)
    (world.folder / "receiver.toml").write_text(both)
    day_ms = 86_400_000
    world.clock.now_ms += 4 * day_ms
    world.store.write(lambda tx: secrets.used(tx, "stripe", "env:STRIPE", NOW_MS + day_ms, 7))
    assert "not used yet" in command("sources", "show", "stripe").out

    world.store.write(lambda tx: secrets.used(tx, "stripe", "env:NEW", world.clock(), 1))
    shown = command("sources", "show", "stripe").out
    ((new, old),) = [one["secrets"] for one in command.objects("sources", "show", "stripe")]

    assert "env:STRIPE, last used 3 days ago, 7 times: retire it" in shown
    assert shown.count("retire it") == 1
    assert (new["deliveries"], old["deliveries"]) == (1, 7)
    assert old["last_used_at"] == "2027-01-16T08:00:00.000Z"


def test_an_event_tells_which_secret_it_matched_by_its_reference(start: Start) -> None:
    both = STRIPE_CONFIG.replace('["env:STRIPE"]', '["env:STRIPE_TWO", "env:STRIPE"]')
    service = start(both)
    for number, secret in enumerate(("STRIPE", "STRIPE_TWO")):
        body = checkout(f"evt_{number}")
        assert service.post("stripe", body, by_stripe(body, secret=secret)).status == 200

    shown = [service.command("events", "show", f"evt_{number}").stdout for number in (0, 1)]
    until(lambda: service.value("select count(*) from receiver_secrets") == 2)

    assert "signed with env:STRIPE," in shown[0]
    assert "signed with env:STRIPE_TWO," in shown[1]
    assert "whsec_" not in "".join(shown)
