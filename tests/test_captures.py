"""Handshakes, captured secrets, wished answers and batches, on a running server."""

import hmac
import json
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from receiver.config import load
from receiver.process import Processor
from store import captured
from store.database import Store
from tests import vectors
from tests.command import Command
from tests.conftest import Clock, World
from tests.service import SECRETS, Service, Start, delivery, services, until, word
from tests.test_app import Edge, loop, request
from tests.test_http import Loop, Reply
from tests.vectors import Vector

__all__ = ["loop"]

SECRET = "b537207f20cbfa02357cf448134da559"
SCHEME = """
sig = "header:X-Signature"
algo = "sha256"
enc = "hex"
signed = "{body}"
event_id = "json:/id"
event_type = "json:/type"
"""
CAPTURE = """
when = { "header:X-Hook-Secret" = "*" }
headers = { X-Hook-Secret = "{header:X-Hook-Secret}" }
capture_secret = "header:X-Hook-Secret"
"""
CONFIG = f"""
handlers = "handlers.py"

[sources.hook]
[sources.hook.scheme]
{SCHEME}
[[sources.hook.scheme.handshakes]]
{CAPTURE}

[sources.asked]
secrets = ["env:GITHUB", {{ secret = "env:SHOPIFY", name = "verify_token" }}]
[sources.asked.scheme]
{SCHEME}
[[sources.asked.scheme.handshakes]]
when = {{ method = "GET", "query:token" = {{ secret = "verify_token" }} }}
content_type = "text/plain"
body = "{{query:challenge}}"
[[sources.asked.scheme.handshakes]]
when = {{ method = "HEAD" }}
[[sources.asked.scheme.handshakes]]
when = {{ "json:/type" = 0 }}
after_verify = true
status = 204
content_type = "application/json"

[sources.quiet]
secrets = ["env:GITHUB"]
allow_ips = ["127.0.0.1"]
[sources.quiet.scheme]
{SCHEME}
batch = "json:/events/*"
statuses.accepted = {{ status = 200, body = "" }}
statuses.ignored = 202
statuses.rejected = {{ status = 401, body = "" }}

[sources.closed]
secrets = ["env:GITHUB"]
allow_ips = ["192.0.2.1"]
[sources.closed.scheme]
{SCHEME}
statuses.forbidden = 401

[[rules]]
operation = "count"
source = ["hook", "asked", "quiet"]
on = ["counted"]
subject = "id"
record = {{ kind = "count", data = "{{id}}" }}

[[rules]]
operation = "fall"
source = "quiet"
on = ["fall"]
subject = "id"
call = "fall"
"""
HOOK = f"""
[sources.hook]
[sources.hook.scheme]
{SCHEME}
[[sources.hook.scheme.handshakes]]
{CAPTURE}

[sources.stripe]
scheme = "stripe"
secrets = ["env:STRIPE"]
"""
HANDLERS = """
import os, signal

def fall(event, tx):
    if not os.path.exists("stand"):
        os.kill(os.getpid(), signal.SIGKILL)
    tx.record("fall", event.id, operation="fallen")
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with services(tmp_path) as starting:
        yield starting


@pytest.fixture
def service(start: Start) -> Service:
    return start(CONFIG, HANDLERS)


def hand_over(service: Service, secret: str = SECRET) -> Reply:
    return service.post("hook", b"{}", [("X-Hook-Secret", secret)])


def post(service: Service, source: str, document: object, key: str | None = None) -> Reply:
    body = json.dumps(document).encode()
    secret = (SECRETS["GITHUB"] if key is None else key).encode()
    mac = hmac.new(secret, body, "sha256").hexdigest()
    return service.post(source, body, [("X-Signature", mac)])


def ask(service: Service, source: str, query: str, method: str = "GET") -> Reply:
    with service.wire() as wire:
        return wire.ask(request(method, f"/webhooks/{source}?{query}", b"", []))


def counted(id_: str) -> dict[str, str]:
    return {"id": id_, "type": "counted"}


def armed(service: Service) -> Reply:
    """Arm the source, and hand the secret over as soon as the server knows of it."""
    assert service.command("sources", "arm", "hook").returncode == 0
    answers: list[Reply] = []

    def taken() -> bool:
        answers.append(hand_over(service))
        return answers[-1].status == 200

    until(taken)
    return answers[-1]


def rows(service: Service) -> dict[str, int]:
    tables = ("events", "captured", "payloads", "conflicts")
    return {t: service.value(f"select count(*) from receiver_{t}") for t in tables}


# Captured secrets


def test_a_secret_is_taken_once_while_armed_and_verifies_from_then_on(service: Service) -> None:
    assert hand_over(service).status == 401

    answer = armed(service)

    assert (answer.status, answer.headers["x-hook-secret"], answer.body) == (200, SECRET, b"")
    assert hand_over(service, "of an attacker").status == 401
    assert word(post(service, "hook", counted("a"), SECRET)) == "done"
    assert post(service, "hook", counted("b"), "of an attacker").status == 401
    # The same again, as after a lost answer: nothing new is taken.
    assert hand_over(service).status == 200
    assert rows(service)["captured"] == 1
    assert service.value("select secret from receiver_events") == "captured:1"


def test_a_captured_secret_outlives_a_kill_a_restart_and_a_reload(service: Service) -> None:
    armed(service)
    service.kill()
    service.start()

    assert word(post(service, "hook", counted("a"), SECRET)) == "done"
    assert service.stop() == 0
    service.start()
    assert word(post(service, "hook", counted("b"), SECRET)) == "done"
    service.reload()
    until(lambda: "done, 4 sources" in service.log)
    assert word(post(service, "hook", counted("c"), SECRET)) == "done"


def test_a_forgotten_secret_is_refused_by_the_running_server(service: Service) -> None:
    armed(service)
    assert word(post(service, "hook", counted("a"), SECRET)) == "done"

    assert service.command("sources", "forget", "hook", "1").returncode == 0

    until(lambda: post(service, "hook", counted("b"), SECRET).status == 401)
    assert service.value("select secret from receiver_captured") is None


def test_a_second_webhook_adds_its_secret_to_the_first(service: Service) -> None:
    armed(service)
    service.command("sources", "arm", "hook")
    until(lambda: hand_over(service, "of another").status == 200)

    assert word(post(service, "hook", counted("a"), SECRET)) == "done"
    assert word(post(service, "hook", counted("b"), "of another")) == "done"


def test_what_is_taken_back_is_not_taken_any_more(service: Service) -> None:
    service.command("sources", "arm", "hook")
    assert service.command("sources", "arm", "hook", "--off").returncode == 0

    # Whatever the server still believes, the file decides.
    assert hand_over(service).status == 401
    assert rows(service)["captured"] == 0


def test_nothing_that_is_sent_to_an_unarmed_source_leaves_a_row(service: Service) -> None:
    before = rows(service)
    with service.wire() as wire:
        answers = {
            wire.ask(delivery("hook", b"{}", [("X-Hook-Secret", f"{SECRET}{n}")])).status
            for n in range(500)
        }

    assert answers == {401}
    assert rows(service) == before
    counts = "select coalesce(sum(count), 0) from receiver_rejections where source = 'hook'"
    until(lambda: service.value(counts) == 500)
    assert service.value("select count(*) from receiver_rejections") < 10
    assert service.log.count("\n") < 50


def test_a_captured_secret_is_in_no_log_and_in_no_output_but_the_one_asked_for(
    service: Service,
) -> None:
    armed(service)
    hand_over(service, "of-an-attacker")

    told = service.command("sources", "show", "hook")
    listed = service.command("sources", "captured", "hook")
    shown = service.command("sources", "captured", "hook", "--show")
    until(lambda: "refused source=hook" in service.log)
    for text in (told.stdout, listed.stdout, service.log):
        assert SECRET not in text
        assert "of-an-attacker" not in text
    assert SECRET in shown.stdout
    assert "handed over by 127.0.0.1" in told.stdout
    assert "captured source=hook secret=captured:1 address=127.0.0.1" in service.log


# Handshakes


def test_a_get_is_answered_and_leaves_no_row(service: Service) -> None:
    token = SECRETS["SHOPIFY"].replace(" ", "+")
    before = rows(service)

    answers = [ask(service, "asked", f"challenge={n}&token={token}") for n in range(100)]

    assert [answer.body for answer in answers] == [str(n).encode() for n in range(100)]
    assert {answer.status for answer in answers} == {200}
    assert answers[0].headers["content-type"] == "text/plain"
    assert answers[0].headers["x-content-type-options"] == "nosniff"
    assert rows(service) == before
    until(lambda: "handshake source=asked" in service.log)
    assert service.log.count("handshake source=asked") < 50


def test_a_get_with_another_token_is_refused_and_a_get_elsewhere_is_no_method(
    service: Service,
) -> None:
    assert ask(service, "asked", "challenge=1&token=x").status == 401
    assert ask(service, "asked", "challenge=1").status == 401
    for source in ("quiet", "hook", "nobody"):
        assert ask(service, source, "challenge=1&token=x").status == 405
    assert ask(service, "asked", "challenge=1&token=x", "PUT").status == 405


def test_a_head_is_answered_where_the_sender_looks_with_one(service: Service) -> None:
    with service.wire() as wire:
        wire.send(request("HEAD", "/webhooks/asked", b"", []))
        assert wire.answer("HEAD").status == 200
        wire.send(request("HEAD", "/webhooks/hook", b"", []))
        assert wire.answer("HEAD").status == 405


def test_a_huge_challenge_is_not_sent_back(service: Service) -> None:
    token = SECRETS["SHOPIFY"].replace(" ", "+")

    answer = ask(service, "asked", f"challenge={'x' * 10_000}&token={token}")

    assert (answer.status, answer.body) == (401, b"rejected\n")


def test_a_204_has_neither_a_body_nor_a_length(service: Service) -> None:
    answer = post(service, "asked", {"type": 0})

    assert (answer.status, answer.body) == (204, b"")
    assert answer.headers["content-type"] == "application/json"
    assert "content-length" not in answer.headers
    assert "transfer-encoding" not in answer.headers
    assert post(service, "asked", counted("a")).status == 200


# Wished answers


def test_a_sender_gets_the_answers_that_it_wants(service: Service) -> None:
    taken = post(service, "quiet", {"events": [counted("a")]})
    again = post(service, "quiet", {"events": [counted("a")]})
    refused = post(service, "quiet", {"events": []}, "another")
    unwanted = post(service, "quiet", {"events": [{"id": "z", "type": "other"}]})

    assert [(one.status, one.body) for one in (taken, again)] == [(200, b""), (200, b"")]
    assert (refused.status, refused.body) == (401, b"")
    assert (unwanted.status, unwanted.body) == (202, b"ignored\n")
    assert post(service, "closed", counted("a")).status == 401


# Batches


def test_an_empty_batch_is_answered_without_a_row(service: Service) -> None:
    before = rows(service)

    assert post(service, "quiet", {"events": []}).status == 202
    assert rows(service) == before


def test_a_batch_that_was_cut_off_in_the_middle_is_as_if_it_never_came(service: Service) -> None:
    batch = {"events": [counted("a"), {"id": "f", "type": "fall"}, counted("b")]}
    with service.wire() as wire:
        body = json.dumps(batch).encode()
        mac = hmac.new(SECRETS["GITHUB"].encode(), body, "sha256").hexdigest()
        wire.send(delivery("quiet", body, [("X-Signature", mac)]))
        assert service.ended() == -signal.SIGKILL
    (service.folder / "stand").touch()
    service.start()
    assert rows(service)["events"] == 0

    assert post(service, "quiet", batch).status == 200

    found = service.rows("select event_id, state from receiver_events order by event_id")
    assert found == [("a", "done"), ("b", "done"), ("f", "done")]
    assert service.value("select count(*) from receiver_records") == 3


# Every handshake of the vectors, at its time


class At(Edge):
    """The app for the sender of a vector, at the vector's time."""

    def __init__(self, loop: Loop, folder: Path, vector: Vector) -> None:
        self.vector = vector
        super().__init__(loop, folder, Clock(vector["now"] * 1000))

    def load(self, text: str) -> Processor:
        config, _ = vectors.config(self.vector)
        path = self.folder / "receiver.toml"
        path.write_text(config.replace("env_file", "#"))
        known = {one.reference[4:]: one.value.decode() for one in vectors.secrets(self.vector)}
        return Processor.load(load(path, environment=known))

    def ask(self) -> Reply:
        headers = list(self.vector["headers"].items())
        path = "/webhooks/x" + self.vector["url"].removeprefix(
            f"https://hooks.example.com/in/{self.vector['provider']}"
        )
        with self.wire() as wire:
            return wire.ask(
                request(self.vector["method"], path, vectors.body(self.vector), headers)
            )


@pytest.mark.parametrize(
    "name",
    [
        *("slack-url-verification", "discord-interaction-ping", "discord-webhook-event-ping"),
        *("notion-verification-token", "meta-get-challenge", "dropbox-get-challenge"),
        *("twitch-challenge", "woocommerce-ping", "xero-intent-to-receive-ok"),
        "xero-intent-to-receive-bad",
    ],
)
def test_a_server_gives_each_sender_exactly_the_answer_that_it_wants(
    loop: Loop, tmp_path: Path, name: str
) -> None:
    vector = vectors.named(name)
    wanted = vector["response"]
    with closing(At(loop, tmp_path, vector)) as edge:
        if name == "notion-verification-token":
            assert edge.ask().status == 401
            until_ms = edge.clock.now_ms + 1
            edge.loop.run(_armed(edge, until_ms))

        answer = edge.ask()

        assert answer.status == wanted["status"]
        assert answer.body.decode() == wanted.get("body", "")
        if "content_type" in wanted:
            assert answer.headers["content-type"] == wanted["content_type"]
        for header, value in wanted.get("headers", {}).items():
            assert answer.headers[header.lower()] == value
        assert edge.count() == 0


async def _armed(edge: At, until_ms: int) -> None:
    """The app sees what is in the file, as a server's does about once a second."""
    await edge.writer.submit(lambda tx: captured.arm(tx, "x", until_ms, "me"))
    await edge.writer.submit(lambda tx: edge.app.captures.look(tx, edge.processor.settings))


# In the file


def test_a_secret_is_kept_only_between_arming_and_its_end(store: Store, clock: Clock) -> None:
    def keep() -> int | None:
        return store.write(lambda tx: captured.keep(tx, "hook", b"s", "here", "r-1"))

    assert keep() is None
    store.write(lambda tx: captured.arm(tx, "hook", clock.now_ms + 1_000, "me"))
    clock.now_ms += 1_000
    assert keep() is None
    clock.now_ms -= 1
    assert keep() == 1
    assert keep() is None
    store.write(lambda tx: captured.arm(tx, "hook", clock.now_ms + 1_000, "me"))
    # The clock was set back: who knows when that would end.
    clock.now_ms -= 10
    assert keep() is None


def test_a_forgotten_secrets_number_is_never_another_secrets(store: Store, clock: Clock) -> None:
    def keep() -> int | None:
        store.write(lambda tx: captured.arm(tx, "hook", clock.now_ms + 1_000, "me"))
        return store.write(lambda tx: captured.keep(tx, "hook", b"s", "here", "r-1"))

    first = keep()
    assert first is not None
    store.write(lambda tx: captured.forget(tx, first))

    assert keep() == first + 1
    assert [one.id for one in store.write(captured.listed)["hook"]] == [first + 1]


# By hand


@pytest.fixture
def command(world: World, monkeypatch: pytest.MonkeyPatch) -> Command:
    world.configure(HOOK)
    return Command(world, monkeypatch)


def keep(world: World, secret: bytes = b"s3") -> None:
    assert world.store.write(lambda tx: captured.keep(tx, "hook", secret, "192.0.2.7", "r-9"))


def test_arming_is_told_and_written_down(world: World, command: Command) -> None:
    ran = command("sources", "arm", "hook", "--minutes", "5", "--reason", "new webhook")

    assert ran.code == 0
    assert "armed for 5 minutes" in ran.out
    assert "the first handshake is taken" in command("sources", "show", "hook").out
    (told,) = command.objects("sources", "show", "hook")
    assert told["armed_until"] == "2027-01-15T08:05:00.000Z"
    assert world.query("select action, target, reason, detail from receiver_audit") == [
        ("sources arm", "source hook", "new webhook", '{"minutes": 5}')
    ]
    assert command("sources", "arm", "hook", "--off").code == 0
    assert command("sources", "arm", "hook", "--off").code == 1


def test_what_was_captured_is_listed_shown_and_forgotten(world: World, command: Command) -> None:
    command("sources", "arm", "hook")
    keep(world)

    (one,) = command.objects("sources", "captured", "hook")
    assert (one["number"], one["secret"], one["address"]) == (1, "captured:1", "192.0.2.7")
    assert "value" not in one
    assert "s3" in command("sources", "captured", "hook", "--show").out.split()
    assert command("sources", "forget", "hook", "1", "--reason", "not ours").code == 0
    assert command.objects("sources", "captured", "hook") == []
    assert command("sources", "forget", "hook", "1").code == 3
    (detail,) = world.query("select detail from receiver_audit where action = 'sources forget'")
    assert json.loads(detail[0])["address"] == "192.0.2.7"


def test_a_source_has_a_limited_number_of_captured_secrets(world: World, command: Command) -> None:
    for n in range(20):
        assert command("sources", "arm", "hook").code == 0
        keep(world, b"%d" % n)

    ran = command("sources", "arm", "hook")

    assert ran.code == 1
    assert "forget one" in ran.err


def test_only_a_source_whose_sender_hands_over_a_secret_is_armed(command: Command) -> None:
    ran = command("sources", "arm", "stripe")

    assert ran.code == 2
    assert "stripe hands over no secret" in ran.err
    assert command("sources", "arm", "nobody").code == 3


def test_check_says_that_a_named_secret_is_missing(
    world: World, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB", SECRETS["GITHUB"])
    monkeypatch.setenv("STRIPE", SECRETS["STRIPE"])
    meta = '[sources.meta]\nscheme = "meta"\nsecrets = ["env:GITHUB"%s]\n'
    world.configure(meta % "")
    (told,) = command.objects("sources", "show", "meta")

    assert "has none named verify_token" in command("check").out
    assert told["handshakes"] == ["GET with query:hub.mode, query:hub.verify_token: 200"]
    assert "json:/entry/*/changes/*" in told["batch"]
    world.configure(meta % ', { secret = "env:STRIPE", name = "verify_token" }')
    assert "has none named" not in command("check").out


def test_check_says_that_a_secret_is_still_to_come(world: World, command: Command) -> None:
    words = "`receiver sources arm hook`, then make it"

    assert words in command("check").out
    command("sources", "arm", "hook")
    keep(world)
    assert words not in command("check").out


def test_verify_knows_captured_secrets_and_judges_as_if_armed(
    world: World, command: Command
) -> None:
    body = '{"id": "a", "type": "counted"}'
    mac = hmac.new(b"s3", body.encode(), "sha256").hexdigest()
    event = json.dumps({"headers": {"X-Signature": mac}, "body": body})
    handshake = json.dumps({"headers": {"X-Hook-Secret": "abc"}})

    def judged(text: str) -> dict[str, object]:
        ran = command("verify", "hook", "--json", typed=text)
        found: dict[str, object] = json.loads(ran.out)
        return found

    assert judged(event)["verdict"] == "unverified"
    assert judged(handshake) == {
        "verdict": "handshake",
        "event_id": None,
        "event_type": None,
        "account": None,
        "reason": "it brings a secret, kept while the source is armed",
        "status": 200,
        "response": "",
        "headers": {"X-Content-Type-Options": "nosniff", "X-Hook-Secret": "abc"},
    }
    command("sources", "arm", "hook")
    keep(world)
    assert judged(event)["verdict"] == "valid"
    assert "response" not in judged(event)
