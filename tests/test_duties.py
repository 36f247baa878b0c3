"""What the commands say of the worker and the destinations, without what is secret."""

import json

import pytest

from receiver import duties
from receiver.config import load
from tests.command import Command
from tests.conftest import CONFIG, SECRETS, World

DESTINATIONS = """
[[rules]]
operation = "tell"
source = "github"
on = ["release"]
send = [{ to = "slack" }, { to = "mail", name = "late" }]

[[rules]]
operation = "deploy"
source = "shopify"
on = ["deploy"]
send = [{ to = "program" }]

[destinations.slack]
kind = "http"
url = "env:SLACK"

[destinations.mail]
kind = "email"
smtp = "env:SMTP"
from = "me@example.com"
to = "{release.author.email}"
subject = "A release"
text = "It is out."

[destinations.program]
kind = "command"
argv = ["/bin/true", "{id}"]
"""

URLS = {
    "SLACK": "https://hooks.slack.example/services/T0/secret-path",
    "SMTP": "smtp://someone:secret-password@mail.example.com:587",
}


@pytest.fixture
def command(world: World, monkeypatch: pytest.MonkeyPatch) -> Command:
    for name, value in (SECRETS | URLS).items():
        monkeypatch.setenv(name, value)
    text = CONFIG.replace('run = "off"', 'run = "separate"').replace(
        "[sources.shopify]", '[sources.shopify]\nmode = "queued"'
    )
    (world.folder / "receiver.toml").write_text(text + DESTINATIONS)
    return Command(world, monkeypatch)


def test_a_destination_is_told_by_its_kind_and_host_and_no_secret(
    command: Command, world: World
) -> None:
    settings = load(world.folder / "receiver.toml")

    assert list(duties.listed(settings)) == [
        "queued source shopify",
        "destination slack: http to https://hooks.slack.example",
        "destination mail: email to release.author.email through smtp://mail.example.com:587",
        "destination program: command /bin/true",
    ]


def test_an_address_that_is_not_looked_up_is_called_a_secret(command: Command) -> None:
    shown = command("sources", "show", "github")

    assert "slack: http to an address kept as a secret" in shown.out
    assert "program" not in shown.out


def test_check_tells_the_worker_and_each_destination(command: Command) -> None:
    ran = command("check")

    assert ran.code == 0
    assert "fine     worker: apart, as `receiver work`" in ran.out
    assert "fine     destination slack: http to https://hooks.slack.example" in ran.out
    assert "secret-" not in ran.out


def test_a_rule_with_messages_alone_is_said_to_send(command: Command) -> None:
    shown = command("sources", "show", "github")
    [found] = command.objects("sources", "show", "github")

    assert "tell: send on release; messages to slack, mail (late)" in shown.out
    assert "worker       apart, as `receiver work`" in shown.out
    [push, tell] = found["rules"]
    assert (push["effect"], push["send"]) == ("record", [])
    assert (tell["effect"], tell["send"][1]) == ("send", {"to": "mail", "name": "late"})
    assert found["worker"] == "separate"
    assert "secret-" not in json.dumps(found)
