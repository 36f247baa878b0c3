"""The command line: set-up, check, send, verify, sources; errors and exit codes everywhere."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import click
import pytest
from click.testing import CliRunner, Result

import cli
from receiver import presets, sending, starter
from receiver.commands import shared
from receiver.config import ConfigError, load
from receiver.handlers import Handlers
from receiver.signing import sign
from store import outbox, rejections
from store.database import Store
from store.errors import Refused, StoreError, Unavailable
from store.operations import Key
from tests.conftest import CONFIG, HANDLERS, NOW_MS, SECRETS, Clock, World, stripe_body
from tests.far_side import unused_port

ROOT = Path(__file__).parents[1]
PATIENCE_S = 30

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in a folder of its own, with the tests' secrets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RECEIVER_CONFIG", raising=False)
    runner = CliRunner(env=SECRETS | {"NO_COLOR": "1"})

    def invoke(*words: str, stdin: str | bytes | None = None) -> Result:
        return runner.invoke(cli.main, words, input=stdin)

    return invoke


def configure(folder: Path, text: str = CONFIG) -> None:
    folder.joinpath("receiver.toml").write_text(text)
    folder.joinpath("handlers.py").write_text(HANDLERS)


def receiver(*words: str, cwd: Path, **options: Any) -> "subprocess.Popen[str]":
    """The command in a process of its own."""
    environment = os.environ | SECRETS | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    environment.pop("RECEIVER_CONFIG", None)
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, str(ROOT / "cli.py"), *words]
    return subprocess.Popen(command, cwd=cwd, env=environment, text=True, **(pipes | options))


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def only(result: Result) -> str:
    """The one line of an error."""
    (line,) = result.stderr.splitlines()
    assert line.startswith("receiver: ")
    assert result.stdout == ""
    return line.removeprefix("receiver: ")


# Every command


@pytest.mark.parametrize("group", cli.MODULES)
def test_no_help_is_cut(run: Run, group: str) -> None:
    assert not re.search(r"\.\.\.$", run(group, "--help").stdout.partition("\n\n")[2], re.M)


@pytest.mark.parametrize("words", [("-c", "x.toml", "events", "list"), ("events", "-c", "x.toml")])
def test_an_option_before_the_command_is_told_where_it_stands(run: Run, words: list[str]) -> None:
    assert "'-c': options stand after the whole command (see `" in only(run(*words))


def test_a_reader_that_stops_early_is_no_error(world: World) -> None:
    for n in range(400):
        world.invoice(f"evt_{n}", f"in_{n}", padding="x" * 400)

    with receiver("events", "list", "--limit", "400", "--json", cwd=world.folder) as listing:
        assert listing.stdout is not None
        assert listing.stderr is not None
        listing.stdout.readline()
        listing.stdout.close()
        code, errors = listing.wait(timeout=PATIENCE_S), listing.stderr.read()

    assert (code, errors) == (141, "")


def test_help_puts_every_command_in_a_section(run: Run) -> None:
    shown = run("--help").stdout

    for name in cli.MODULES:
        assert re.search(rf"^  {name} ", shown, re.MULTILINE), name


# Errors


def test_an_unknown_command_is_wrong_usage_in_one_line(run: Run) -> None:
    result = run("nonsense")

    assert result.exit_code == 2
    assert "nonsense" in only(result)
    assert "--help" in only(result)


def test_a_missing_argument_is_wrong_usage_in_one_line(run: Run) -> None:
    result = run("send", "stripe")

    assert result.exit_code == 2
    assert "TYPE" in only(result)


def test_without_a_config_the_places_are_named(run: Run) -> None:
    result = run("sources", "list")

    assert result.exit_code == 2
    assert "receiver.toml" in only(result)
    assert "receiver init" in only(result)


def test_each_problem_of_the_config_is_a_line(run: Run, tmp_path: Path) -> None:
    configure(tmp_path, 'nonsense = 1\n[sources.stripe]\nscheme = "nobody"\n')

    result = run("sources", "list")

    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == ["nonsense", "sources.stripe.scheme"]


def test_the_config_is_found_by_the_environment(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(tmp_path)
    tmp_path.joinpath("receiver.toml").rename(tmp_path / "other.toml")
    monkeypatch.setenv("RECEIVER_CONFIG", str(tmp_path / "other.toml"))

    assert run("sources", "list").exit_code == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError(["a: wrong", "b: wrong"]), 2),
        (StoreError("the file: is newer"), 1),
        (Unavailable("locked"), 1),
        (Refused("it would overdraw"), 1),
        (FileNotFoundError(2, "No such file", "x"), 1),
        (click.UsageError("no"), 2),
        (shared.Failure("so"), 1),
        (shared.NotFound("none"), 3),
        (ZeroDivisionError("what nobody foresaw"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_error_is_a_line_and_a_code(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    assert cli.exit_code_of(fail) == code

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (2 if isinstance(error, ConfigError) else 1)
    assert all(line.startswith("receiver: ") for line in lines)


def test_what_a_config_says_cannot_steer_the_terminal(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(tmp_path, '"\\u001b[2J" = 1\n')

    result = run("sources", "list")

    assert "\x1b" not in result.stderr


def test_a_closed_pipe_ends_it_quietly(tmp_path: Path) -> None:
    configure(tmp_path)
    read, write = os.pipe()
    os.close(read)

    process = receiver("sources", "list", cwd=tmp_path, stdout=write)
    os.close(write)

    assert ended(process)[2] == ""


def test_standard_streams_that_were_closed_before_it_began_lead_nowhere(tmp_path: Path) -> None:
    program = """
import cli, os, sys
cli.open_missing()
places = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
sys.stderr.write("a line of the log")
open("seen", "w").write(" ".join(places))
"""
    closed = ["/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program]

    subprocess.run(closed, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, check=True)

    assert tmp_path.joinpath("seen").read_text() == " ".join([os.devnull] * 3)


def test_an_interrupt_ends_it_with_130(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        configure(tmp_path)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        process = receiver("send", "stripe", "invoice.paid", "--url", url, cwd=tmp_path)
        silent.settimeout(PATIENCE_S)
        connection, _ = silent.accept()

        process.send_signal(signal.SIGINT)

        code, out, err = ended(process)
        connection.close()
    assert (code, out, err.strip()) == (130, "", "")


@pytest.mark.parametrize("words", [[], ["sources"]], ids=["receiver", "a group"])
def test_no_command_at_all_shows_what_there_is(run: Run, words: list[str]) -> None:
    result = run(*words)

    assert result.exit_code == 2
    assert result.stderr.startswith("Usage:")


# init


def test_init_writes_what_check_finds_fine(run: Run, tmp_path: Path) -> None:
    result = run("init")

    assert result.exit_code == 0
    assert "receiver serve" in result.stdout.splitlines()[-1]
    checked = run("check", "--json")
    assert checked.exit_code == 0
    assert json.loads(checked.stdout) == {"ok": True, "problems": [], "warnings": []}


def test_init_makes_a_new_secret_that_only_the_owner_reads(run: Run, tmp_path: Path) -> None:
    run("init", "one")
    run("init", "two")

    secrets = [(tmp_path / name / ".env").read_text() for name in ("one", "two")]

    assert all(re.search(r"^STRIPE_WEBHOOK_SECRET=whsec_\S{40,}$", text, re.M) for text in secrets)
    assert secrets[0] != secrets[1]
    assert stat.S_IMODE((tmp_path / "one" / ".env").stat().st_mode) == 0o600
    assert (tmp_path / "one" / ".gitignore").read_text() == ".env\n*.db*\n"


@pytest.mark.parametrize("name", ["receiver.toml", "handlers.py", ".env"])
def test_init_overwrites_nothing(run: Run, tmp_path: Path, name: str) -> None:
    tmp_path.joinpath(name).write_text("mine")

    result = run("init")

    assert result.exit_code == 1
    assert name in only(result)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert tmp_path.joinpath(name).read_text() == "mine"


def test_init_keeps_the_gitignore_that_is_there(run: Run, tmp_path: Path) -> None:
    tmp_path.joinpath(".gitignore").write_text("mine")

    result = run("init")

    assert result.exit_code == 0
    assert "kept .gitignore" in result.stderr
    assert tmp_path.joinpath(".gitignore").read_text() == "mine"


def test_init_does_not_write_through_a_dangling_link(run: Run, tmp_path: Path) -> None:
    tmp_path.joinpath(".env").symlink_to(tmp_path / "elsewhere")

    assert run("init").exit_code == 1
    assert not tmp_path.joinpath("elsewhere").exists()


def test_init_for_live_events_leaves_the_secret_to_be_filled_in(run: Run, tmp_path: Path) -> None:
    result = run("init", "--live")

    assert "signing secret" in result.stdout
    assert tmp_path.joinpath(".env").read_text().endswith("\nSTRIPE_WEBHOOK_SECRET=\n")
    assert load(tmp_path / "receiver.toml", secrets=False).sources["stripe"].contract.livemode
    checked = run("check")
    assert checked.exit_code == 2
    assert "sources.stripe.secrets[0]" in checked.stdout


def test_the_examples_in_the_new_config_are_valid_once_uncommented(
    run: Run, tmp_path: Path
) -> None:
    run("init")
    path = tmp_path / "receiver.toml"
    before, rest = path.read_text().split("# Feedback, as an example")
    feedback, destinations = rest.split("# Destinations:")
    # Prose is not indented by an assignment, a table's head or a bracket; examples are.
    example = re.compile(r"^# ((?:\[|[a-z_.]+ = |  \S|'''|\]).*)$", re.MULTILINE)
    text = example.sub(r"\1", before + "# " + destinations)
    text = text.replace("grant = {", "# grant = {")
    secrets = {
        "STRIPE_API_KEY": "sk_test_1",
        "GITHUB_WEBHOOK_SECRET": "a",
        "SHOPIFY_CLIENT_SECRET": "b",
        "SMTP_URL": "smtp://user:password@mail.example.com:587",
        "SLACK_WEBHOOK_URL": "https://hooks.slack.com/services/T0/B0/x",
        "DISCORD_WEBHOOK_URL": "https://discord.com/api/webhooks/1/x",
        "APP_WEBHOOK_SECRET": "whsec_" + "QUJD" * 8,
    }

    path.write_text(text)
    settings = load(path, environment=secrets)

    assert set(settings.sources) == {"stripe", "github", "shopify"}
    assert len(settings.rules) == 9
    names = ["confirmation", "slack", "discord", "ntfy", "app", "deploy"]
    assert list(settings.destinations) == names
    assert {send.to for rule in settings.rules for send in rule.send} <= set(names)
    missing = "/usr/local/bin/deploy is no program that this user can run"
    assert settings.warnings == (f"destinations.deploy.argv[0]: {missing}",)
    assert settings.handlers is not None
    assert Handlers.load(settings.handlers).problem("welcome_bonus", ("event", "tx")) is None
    assert "<from 3>" in feedback


@pytest.mark.parametrize(
    ("session", "outcome"),
    [
        ({"mode": "subscription", "payment_status": "paid"}, "done"),
        ({"mode": "subscription", "payment_status": "unpaid"}, "parked"),
        ({"mode": "payment", "payment_status": "paid"}, "quarantined"),
    ],
    ids=["paid", "unpaid", "not a subscription"],
)
def test_the_example_handler_works(world: World, session: dict[str, str], outcome: str) -> None:
    rule = (
        '[[rules]]\noperation = "bonus"\nsource = "stripe"\non = ["checkout.session.completed"]\n'
        'subject = "data.object.id"\ncustomer = "data.object.customer"\ncall = "welcome_bonus"\n'
    )
    world.folder.joinpath("handlers.py").write_text(starter.HANDLERS)
    world.configure(CONFIG.replace('call = "welcome"\n', 'call = "welcome_bonus"\n') + rule)

    fields = {"id": "cs_1", "customer": "cus_1", "client_reference_id": "acme"} | session
    word = world.stripe("evt_1", "checkout.session.completed", **fields)

    assert word == outcome
    assert world.balance() == (starter_bonus() if outcome == "done" else 0)


def starter_bonus() -> int:
    found = re.search(r"^BONUS = (\d+)$", starter.HANDLERS, re.MULTILINE)
    assert found is not None
    return int(found[1])


# serve and send: the first five minutes


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Path]:
    """A folder as `init` wrote it, with a server running on free ports."""
    runner = CliRunner()
    assert runner.invoke(cli.main, ["init", str(tmp_path)]).exit_code == 0
    path = tmp_path / "receiver.toml"
    text = path.read_text()
    for port in ("8080", "8081"):
        text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{unused_port()}")
    path.write_text(text)
    with tmp_path.joinpath("log").open("w") as log:
        server = receiver("serve", cwd=tmp_path, stderr=log)
    assert server.stdout is not None
    try:
        first = server.stdout.readline()
        assert "receiver send stripe checkout.session.completed" in first, log_of(tmp_path)
        yield tmp_path
    finally:
        server.terminate()
        server.communicate(timeout=PATIENCE_S)
    assert server.returncode == 0


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def balance_of(run: Run) -> int:
    balance: int = json.loads(run("balance", "--json").stdout)["balance"]
    return balance


def log_of(folder: Path) -> str:
    return folder.joinpath("log").read_text()


def test_the_first_five_commands_work_one_after_the_other(serving: Path, run: Run) -> None:
    parked = run("send", "stripe", "invoice.paid", "--set", "data.object.id=in_early")
    linked = run("send", "stripe", "checkout.session.completed")
    granted = run("send", "stripe", "invoice.paid")
    balance = run("balance")

    assert [result.exit_code for result in (parked, linked, granted, balance)] == [0, 0, 0, 0]
    assert "parked" in parked.stdout
    assert "`receiver send stripe checkout.session.completed`" in parked.stdout.splitlines()[-1]
    assert "`receiver send stripe invoice.paid`" in linked.stdout.splitlines()[-1]
    assert "`receiver balance`" in granted.stdout.splitlines()[-1]
    assert re.search(r"acme +credits +[12]00\n", balance.stdout)
    assert "next: " in balance.stdout
    # The one that was parked is applied right after the link came.
    wait_until(lambda: balance_of(run) == 200)


def test_what_is_advised_for_a_parked_refund_brings_it_about(serving: Path, run: Run) -> None:
    run("send", "stripe", "checkout.session.completed")
    parked = run("send", "stripe", "credit_note.created")
    found = re.search(r"`receiver (send [^`]+)`", parked.stdout)
    assert found is not None, parked.stdout

    advised = run(*shlex.split(found[1]))

    assert "done" in advised.stdout
    wait_until(lambda: balance_of(run) == 0)


def test_a_customer_that_was_named_is_named_in_the_advice(serving: Path, run: Run) -> None:
    parked = run("send", "stripe", "invoice.paid", "--customer", "cus_other")

    assert "checkout.session.completed --customer cus_other`" in parked.stdout


def test_what_to_try_next_names_the_same_config(
    serving: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shlex.quote(str(serving / "receiver.toml"))
    monkeypatch.chdir("/")

    sent = run("send", "stripe", "checkout.session.completed", "-c", path)

    assert f"`receiver send stripe invoice.paid -c {path}`" in sent.stdout


def test_send_tells_what_was_answered_as_json(serving: Path, run: Run) -> None:
    first = json.loads(run("send", "stripe", "invoice.paid", "--json").stdout)
    same = json.loads(run("send", "stripe", "x.y", "--id", "evt_1", "--json").stdout)

    assert first["answer"] == "parked"
    assert first["status"] == 200
    wait_until(lambda: first["request_id"] in log_of(serving))
    assert same["event_id"] == "evt_1"


def test_an_empty_answer_is_told_as_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(Path())
    monkeypatch.setattr(sending, "post", lambda *_: sending.Answer(200, "", "r-1"))

    assert "answer      nothing (empty body)\n" in run("send", "stripe", "a.b", "--yes").stdout


def test_sends_have_fresh_ids(serving: Path, run: Run) -> None:
    sent = [json.loads(run("send", "stripe", "a.b", "--json").stdout) for _ in range(2)]

    assert [one["answer"] for one in sent] == ["ignored", "ignored"]
    assert sent[0]["event_id"] != sent[1]["event_id"]


def test_a_file_is_sent_in_place_of_the_sample(serving: Path, run: Run) -> None:
    serving.joinpath("body.json").write_bytes(
        stripe_body("evt_old", "invoice.paid", id="in_1", customer="cus_1", amount_paid="many")
    )

    fresh = json.loads(
        run("send", "stripe", "invoice.paid", "--file", "body.json", "--json").stdout
    )
    exact = json.loads(
        run("send", "stripe", "invoice.paid", "--file", "body.json", "--exact", "--json").stdout
    )
    shown = run("events", "list", "--json").stdout

    assert fresh["answer"] == exact["answer"] == "quarantined"
    assert exact["event_id"] == "evt_old"
    ids = {json.loads(line)["id"] for line in shown.splitlines()}
    assert ids == {fresh["event_id"], "evt_old"}


def test_a_file_without_an_id_is_named_as_it_is_stored(serving: Path, run: Run) -> None:
    serving.joinpath("body.json").write_bytes(b'{"type": "invoice.paid"}')

    sent = run("send", "stripe", "x", "--file", "body.json", "--exact")
    found = re.search(r"`receiver (events show [^`]+)`", sent.stdout)

    assert found is not None, sent.stdout
    assert "sha256:" in found[1]
    assert run(*shlex.split(found[1])).exit_code == 0


def test_an_event_of_the_same_id_is_sent_as_it_was(serving: Path, run: Run) -> None:
    command = ("send", "stripe", "invoice.paid", "--json", "--id")
    first, again, other = (json.loads(run(*command, name).stdout) for name in ("e1", "e1", "e2"))
    # The one that is parked is done with the link, and then known.
    run("send", "stripe", "checkout.session.completed")
    wait_until(lambda: run("events", "list", "--json").stdout.count('"state":"done"') == 3)
    third = json.loads(run(*command, "e1").stdout)

    assert [one["answer"] for one in (first, again, other)] == ["parked"] * 3
    assert third["answer"] == "duplicate"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["x.y"], "no rule for x.y; compare"),
        (
            ["invoice.paid", "--set", "data.object.amount_paid=0"],
            "initial-credit-grant: data.object.amount_paid is 0, expected gt 0; compare",
        ),
    ],
)
def test_why_nothing_applied_is_told_and_stored(
    serving: Path, run: Run, words: list[str], why: str
) -> None:
    sent = run("send", "stripe", *words)
    (stored,) = map(json.loads, run("events", "list", "--json").stdout.splitlines())

    assert why in sent.stdout
    assert stored["reason"] == why.partition(";")[0].replace("initial", "no rule applied: initial")


def test_another_secret_than_the_servers_is_found_out(serving: Path, run: Run) -> None:
    serving.joinpath(".env").write_text("STRIPE_WEBHOOK_SECRET=whsec_another\n")

    result = run("send", "stripe", "invoice.paid")

    assert result.exit_code == 1
    assert "rejected" in result.stdout
    assert "restart it" in result.stdout.splitlines()[-1]


def test_send_without_a_server_says_how_to_start_one(run: Run, tmp_path: Path) -> None:
    configure(
        tmp_path, f'[server]\nlisten = "127.0.0.1:{unused_port()}"\n{CONFIG_WITHOUT_HANDLERS}'
    )

    result = run("send", "test", "invoice.paid")

    assert result.exit_code == 1
    assert "`receiver serve`" in only(result)


CONFIG_WITHOUT_HANDLERS = """
[sources.stripe]
scheme = "stripe"
secrets = ["env:STRIPE"]
livemode = true

[sources.test]
scheme = "stripe"
secrets = ["env:STRIPE"]
livemode = false

[sources.open]
scheme = "stripe"
secrets = []
livemode = false
"""


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["stripe", "invoice.paid"], "is live"),
        (["open", "invoice.paid"], "secrets is empty"),
        (["test", "invoice.paid", "--set", "data.object"], "PATH=VALUE"),
        (["test", "invoice.paid", "--set", "data..id=1"], "is not a path"),
        (["test", "invoice.paid", "--set", "type.name=1"], "not an object"),
        (["test", "invoice.paid", "--exact"], "--file"),
        (["test", "a.b", "--exact", "--id", "e", "--file", "-"], "--id can't change it"),
        (["test", "a.b", "--exact", "--set", "a=1", "--file", "-"], "--set can't change it"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_send_refuses_what_it_should_not_do(
    run: Run, tmp_path: Path, words: list[str], why: str
) -> None:
    configure(tmp_path, CONFIG_WITHOUT_HANDLERS)

    result = run("send", *words, "--url", "http://127.0.0.1:9/")

    assert result.exit_code == 2
    assert why in only(result)


def test_send_goes_to_a_live_source_when_told_twice(run: Run, tmp_path: Path) -> None:
    configure(tmp_path, CONFIG_WITHOUT_HANDLERS)
    url = f"http://127.0.0.1:{unused_port()}/"

    result = run("send", "stripe", "invoice.paid", "--yes", "--url", url)

    assert "nothing listens" in only(result)


@pytest.mark.parametrize("command", [["sources", "show"], ["verify"], ["send"]])
def test_an_unknown_source_is_not_found(run: Run, tmp_path: Path, command: list[str]) -> None:
    configure(tmp_path)

    result = run(*command, "strype", *(["x"] if command == ["send"] else []))

    assert result.exit_code == 3
    assert "did you mean stripe?" in only(result)


# check


def checked(run: Run) -> tuple[int, dict[str, Any]]:
    result = run("check", "--json")
    found: dict[str, Any] = json.loads(result.stdout)
    return result.exit_code, found


def test_check_tells_every_problem_at_once(run: Run, tmp_path: Path) -> None:
    configure(tmp_path, CONFIG.replace("env:GITHUB", "env:NOWHERE").replace("welcome", "absent"))
    tmp_path.joinpath("receiver.db").write_text("not a database, but long enough to look like one")

    code, found = checked(run)

    assert code == 2
    for words in ("sources.github.secrets[0]", "absent", "receiver.db"):
        assert any(words in problem for problem in found["problems"]), words
    assert not found["ok"]


def test_check_with_warnings_alone_is_fine(run: Run, tmp_path: Path) -> None:
    configure(tmp_path, '[sources.stripe]\nscheme = "stripe"\nsecrets = ["env:STRIPE"]\n')

    code, found = checked(run)

    assert code == 0
    assert found["ok"]
    assert "sources.stripe.livemode" in found["warnings"][0]


def test_check_finds_the_names_that_the_config_lost(run: Run, world: World) -> None:
    text = CONFIG.replace('"feedback-alert"', '"other-alert"')
    world.folder.joinpath("receiver.toml").write_text(text)

    code, found = checked(run)

    assert code == 0
    (warning,) = found["warnings"]
    assert "operation feedback-alert" in warning


def test_check_tells_of_messages_whose_destination_the_config_lost(run: Run, world: World) -> None:
    key = Key("stripe", "", "in_1", "initial-credit-grant")
    world.store.write(lambda tx: outbox.insert(tx, key, "nowhere", "", body="[]", event=None))

    code, found = checked(run)

    assert code == 0
    (warning,) = found["warnings"]
    assert "destination nowhere: the config no longer has it" in warning


def test_check_tells_once_that_the_handlers_are_missing(run: Run, tmp_path: Path) -> None:
    configure(tmp_path)
    tmp_path.joinpath("handlers.py").unlink()

    code, found = checked(run)

    assert code == 2
    (problem,) = found["problems"]
    assert "handlers.py: no such file" in problem


def test_check_finds_a_handler_that_cannot_be_imported(run: Run, tmp_path: Path) -> None:
    configure(tmp_path)
    tmp_path.joinpath("handlers.py").write_text("import nothing_of_that_name")

    code, found = checked(run)

    assert code == 2
    assert "nothing_of_that_name" in found["problems"][0]


def test_check_finds_a_file_of_a_later_version(run: Run, world: World) -> None:
    world.query("insert into receiver_schema (version, applied_ms) values (99, 0)")

    code, found = checked(run)

    assert code == 1
    assert "database" in found["problems"][0]


def test_check_finds_a_folder_that_the_database_cannot_be_made_in(run: Run, tmp_path: Path) -> None:
    configure(tmp_path, 'database = "nowhere/receiver.db"\n' + CONFIG)

    code, found = checked(run)

    assert code == 1
    assert "nowhere" in found["problems"][0]


def test_check_finds_damage_where_nothing_else_reads(run: Run, world: World) -> None:
    for i in range(50):
        world.invoice(f"evt_{i}", f"in_{i}", padding="x" * 500)
    world.store.close()
    path = world.folder / "receiver.db"
    content = bytearray(path.read_bytes())
    page = content.rindex(b"x" * 400) // 4096 * 4096
    content[page : page + 4096] = bytes(4096)
    path.write_bytes(content)

    code, found = checked(run)

    assert code == 1
    assert "malformed" in found["problems"][0]


def test_check_finds_a_state_that_no_rule_allows(run: Run, world: World) -> None:
    world.invoice("evt_1", "in_1")
    world.query("pragma ignore_check_constraints = on")
    world.query("update receiver_events set state = 'lost'")

    code, found = checked(run)

    assert code == 1
    assert "is damaged" in found["problems"][0]


def test_check_finds_books_that_do_not_balance(run: Run, world: World) -> None:
    world.link()
    world.invoice("evt_1", "in_1")
    world.query("update receiver_balances set balance = balance + 1")

    code, found = checked(run)

    assert code == 1
    assert "balance of acme is 101 credits, its entries add up to 100" in found["problems"][0]
    assert "then set the balance to 100 there" in found["problems"][0]
    assert "then set the balance to 100 there" in run("balance").stderr


def test_check_of_a_file_that_cannot_be_read_is_no_crash(run: Run, world: World) -> None:
    world.store.close()
    path = world.folder / "receiver.db"
    content = path.read_bytes()
    path.write_bytes(content[:100] + os.urandom(len(content) - 100))

    code, found = checked(run)

    assert code == 1
    assert "receiver.db" in found["problems"][0]


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("updat workspaces set plan = 'x'", 'near "updat": syntax error'),
        ("update workspace set plan = {id}", "no such table: workspace"),
        ("update workspaces set plna = {id}", "no such column: plna"),
        ("delete from receiver_ledger", "not allowed here"),
    ],
)
def test_check_finds_a_statement_that_would_fail(
    run: Run, world: World, statement: str, words: str
) -> None:
    whole = "update workspaces set plan = {data.object.plan} where id = {_workspace}"
    text = CONFIG.replace(whole, statement)
    world.folder.joinpath("receiver.toml").write_text(text)

    code, found = checked(run)

    assert code == 1
    (problem,) = found["problems"]
    assert re.match(rf"rules\[\d\]\.sql\[0\]: {re.escape(words)}", problem)


def test_check_says_that_statements_were_not_checked_without_a_file(
    run: Run, tmp_path: Path
) -> None:
    configure(tmp_path)

    result = run("check")

    assert result.exit_code == 0
    assert "statements were not checked" in result.stdout


def test_check_takes_the_file_of_an_app_before_the_first_start(run: Run, tmp_path: Path) -> None:
    configure(tmp_path)
    app = apsw.Connection(str(tmp_path / "receiver.db"))
    app.execute("create table workspaces (id, plan); create table plan_histroy (workspace, plan)")
    app.close()

    before = run("check")
    ours = 'sql = [\n  "select balance from receiver_balances",'
    configure(tmp_path, CONFIG.replace("plan_history", "plan_histroy").replace("sql = [", ours))
    after = run("check")

    assert before.exit_code == 1
    assert "sql[1]: no such table: plan_history" in before.stdout
    assert after.exit_code == 0
    assert "no Receiver tables yet; `receiver serve` makes them" in after.stdout


def test_check_says_to_people_what_is_fine(run: Run, world: World) -> None:
    result = run("check")

    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert [line.split()[:2] for line in lines] == [
        ["fine", "config:"],
        ["fine", "worker:"],
        ["fine", "handlers:"],
        ["fine", "database:"],
    ]


# sources


def test_sources_are_listed_without_secrets_and_without_a_database(tmp_path: Path) -> None:
    configure(tmp_path)

    result = CliRunner(env=dict.fromkeys(SECRETS)).invoke(
        cli.main, ["sources", "list", "--json", "-c", str(tmp_path / "receiver.toml")]
    )

    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [one["source"] for one in found] == ["stripe", "connect", "live", "github", "shopify"]
    assert found[0]["secrets"][0]["secret"] == "env:STRIPE"
    assert found[0]["last_event_at"] is None
    assert not tmp_path.joinpath("receiver.db").exists()


def test_sources_tell_what_came_last(run: Run, world: World) -> None:
    world.invoice("evt_1", "in_1")
    world.store.write(
        lambda tx: rejections.add(
            tx, "stripe", "bad-signature", 7, NOW_MS, NOW_MS + 1500, "r-9", "no \x1b[2J match"
        )
    )
    world.store.write(
        lambda tx: rejections.add(tx, "stripe", "expired", 1, NOW_MS, NOW_MS, "r-8", "too late")
    )

    (stripe, *_) = [
        json.loads(line) for line in run("sources", "list", "--json").stdout.splitlines()
    ]
    shown = run("sources", "show", "stripe").stdout

    assert stripe["last_event_at"] == "2027-01-15T08:00:00.000Z"
    assert stripe["last_rejection"] == {
        "at": "2027-01-15T08:00:01.500Z",
        "reason": "bad-signature",
        "detail": "no \x1b[2J match",
        "count": 7,
        "request_id": "r-9",
    }
    assert [one["reason"] for one in stripe["rejections"]] == ["bad-signature", "expired"]
    assert re.search(r"bad-signature 7 times, last .*: no \\x1b\[2J match\n", shown)
    assert re.search(r"expired once, last .*: too late\n", shown)
    assert re.search(r"stripe .* 8 times, last .*: bad-signature\n", run("sources", "list").stdout)


def test_the_limit_of_a_listing_holds_and_is_told(run: Run, tmp_path: Path) -> None:
    configure(tmp_path)

    result = run("sources", "list", "--limit", "2")

    assert len(result.stdout.splitlines()) == 3
    assert "--limit" in result.stderr


def test_a_source_is_shown_whole_and_its_secret_never(run: Run, tmp_path: Path) -> None:
    configure(tmp_path, 'public_url = "https://hooks.example.com"\n' + CONFIG)

    shown = run("sources", "show", "stripe").stdout
    found = json.loads(run("sources", "show", "stripe", "--json").stdout)

    for words in (
        "https://hooks.example.com/webhooks/stripe",
        "sha256 over {ts}.{body}, hex in header:Stripe-Signature",
        "300 s",
        "env:STRIPE",
        "sync, test",
        "initial-credit-grant: grant on invoice.paid, invoice.payment_succeeded",
    ):
        assert words in shown
    assert SECRETS["STRIPE"] not in shown
    assert SECRETS["STRIPE"] not in json.dumps(found)
    assert found["url"] == "https://hooks.example.com/webhooks/stripe"
    assert found["rules"][0]["operation"] == "initial-credit-grant"


def test_a_secret_in_the_url_is_shown_only_to_those_who_ask(run: Run, tmp_path: Path) -> None:
    secret = "0123456789abcdef0123"
    tmp_path.joinpath(".env").write_text(f"PING={secret}\n")
    text = '[sources.shop]\nscheme = "gumroad"\nsecrets = ["env:PING"]\n'
    top = 'env_file = ".env"\npublic_url = "https://hooks.example.com"\n'
    configure(tmp_path, top + text)

    for words in (["list"], ["list", "--json"], ["show", "shop"], ["show", "shop", "--json"]):
        shown = run("sources", *words)
        assert shown.exit_code == 0
        assert "https://hooks.example.com/webhooks/shop/<secret>" in shown.stdout
        assert secret not in shown.output
    url = f"https://hooks.example.com/webhooks/shop/{secret}"
    assert url in run("sources", "show", "shop", "--reveal").stdout
    assert json.loads(run("sources", "show", "shop", "--reveal", "--json").stdout)["url"] == url
    code, found = checked(run)
    assert code == 0
    assert any("Gumroad signs nothing" in warning for warning in found["warnings"])
    assert secret not in json.dumps(found)


def test_check_says_by_what_events_without_an_id_are_told_apart(run: Run, tmp_path: Path) -> None:
    configure(tmp_path, '[sources.shop]\nscheme = "lemon-squeezy"\nsecrets = ["env:STRIPE"]\n')

    (line,) = (one for one in run("check").stdout.splitlines() if "no event id" in one)

    assert "sources.shop: no event id is sent: one is known by {json:/meta/event_name}:" in line
    assert "else the digest of its body; two with the same body are one" in line
    assert "told apart" in run("sources", "show", "shop").stdout


def test_the_presets_are_listed_and_each_is_shown(run: Run) -> None:
    listed = run("sources", "presets").stdout.splitlines()
    as_json = run("sources", "presets", "--json").stdout.splitlines()
    shown = run("sources", "presets", "paddle").stdout

    assert [line.split()[0] for line in listed[1:]] == list(presets.names())
    assert [json.loads(line)["scheme"] for line in as_json] == list(presets.names())
    for words in ("Paddle Billing", "begins with pdl_ntfset_", "notification_id", "up to 60 times"):
        assert words in shown
    unknown = run("sources", "presets", "padle")
    assert unknown.exit_code == 3
    assert "did you mean paddle?" in only(unknown)


def test_a_source_without_a_public_url_says_what_to_set(run: Run, tmp_path: Path) -> None:
    configure(tmp_path)

    assert "set public_url" in run("sources", "show", "github").stdout
    assert json.loads(run("sources", "show", "github", "--json").stdout)["url"] is None


# verify


@pytest.mark.parametrize(
    "words", [["events", "show", "\udcff"], ["check", "-c", "a\udcfe"], ["\udcff"]]
)
def test_an_argument_that_is_not_utf8_is_a_usage_error(run: Run, words: list[str]) -> None:
    result = run(*words)

    assert result.exit_code == 2
    assert f"argument {len(words)} is not UTF-8 text" in result.stderr
    assert "Traceback" not in result.output


def signed_request(event_id: str = "evt_1") -> dict[str, Any]:
    body = stripe_body(event_id, "invoice.paid", id="in_1")
    headers = sign(presets.get("stripe"), SECRETS["STRIPE"].encode(), body, now_ms=NOW_MS)
    return {"method": "POST", "headers": dict(headers), "body": body.decode()}


@pytest.mark.parametrize(
    ("at", "verdict"),
    [
        ("1800000000", "valid"),
        ("1800000299.5", "valid"),
        ("2027-01-15T08:00:00Z", "valid"),
        ("2027-01-15T09:00:00.250+01:00", "valid"),
        ("2027-01-15T08:05:01Z", "expired"),
        ("2027-01-15T07:54:59Z", "expired"),
    ],
)
def test_verify_judges_at_the_time_it_is_told(
    run: Run, tmp_path: Path, at: str, verdict: str
) -> None:
    configure(tmp_path)

    result = run("verify", "stripe", "--at", at, "--json", stdin=json.dumps(signed_request()))

    found = json.loads(result.stdout)
    assert found["verdict"] == verdict
    assert result.exit_code == (0 if verdict == "valid" else 1)


def test_verify_without_a_time_judges_now(run: Run, tmp_path: Path) -> None:
    configure(tmp_path)

    result = run("verify", "stripe", stdin=json.dumps(signed_request()))

    assert "expired" in result.stdout


def test_verify_works_without_secrets(run: Run, tmp_path: Path) -> None:
    configure(tmp_path, CONFIG_WITHOUT_HANDLERS)

    result = run("verify", "open", "--json", stdin=json.dumps(signed_request()))

    found = json.loads(result.stdout)
    assert (found["verdict"], found["event_id"]) == ("unverified", "evt_1")
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("request_text", "why"),
    [
        ("nonsense", "is not JSON"),
        ("[1]", "is not an object"),
        ('{"boddy": ""}', "boddy"),
        ('{"headers": []}', "headers"),
        ('{"headers": {"a": 1}}', "headers.a"),
        ('{"body": 1}', "body"),
        ('{"body": "", "body_base64": ""}', "both"),
        ('{"body_base64": "!"}', "base64"),
        ('{"body_base64": 1}', "base64"),
        ('{"method": ""}', "method"),
        ("[" * 10_000, "is not JSON"),
    ],
    ids=lambda value: value[:20],
)
def test_a_malformed_request_is_wrong_usage_in_words(
    run: Run, tmp_path: Path, request_text: str, why: str
) -> None:
    configure(tmp_path)

    result = run("verify", "stripe", stdin=request_text)

    assert result.exit_code == 2
    assert why in only(result)


@pytest.mark.parametrize("command", ["verify", "send"])
def test_secrets_of_other_sources_may_be_missing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    configure(tmp_path, CONFIG.replace("env:GITHUB", "env:NOWHERE"))
    words = ["--at", str(NOW_MS // 1000)]
    if command == "send":
        words = ["invoice.paid", "--url", f"http://127.0.0.1:{unused_port()}/"]

    good = run(command, "stripe", *words, stdin=json.dumps(signed_request()))
    bad = run(command, "github", *words, stdin="{}")

    assert good.exit_code == (0 if command == "verify" else 1)
    assert "nothing listens" in good.stderr or "valid" in good.stdout
    assert bad.exit_code == 2
    assert "sources.github.secrets[0]" in only(bad)


def test_a_time_that_is_none_is_wrong_usage(run: Run, tmp_path: Path) -> None:
    configure(tmp_path)

    result = run("verify", "stripe", "--at", "yesterday")

    assert result.exit_code == 2
    assert "yesterday" in only(result)


# version


def test_version_names_ourselves_sqlite_and_python(run: Run) -> None:
    found = json.loads(run("version", "--json").stdout)

    assert set(found) == {"receiver", "sqlite", "python"}
    assert found["receiver"] in run("--version").stdout
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert re.fullmatch(r"3\.\d+\.\d+", found["sqlite"])


# Who opens the file


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_becomes_the_owner_of_the_file_before_it_is_opened() -> None:
    nobody = 65534
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        configure(folder)
        Store.create(folder / "receiver.db", Clock()).close()
        for path in (folder, *folder.iterdir()):
            os.chown(path, nobody, nobody)
        program = (
            "import os; from pathlib import Path\n"
            "from receiver.commands import shared\n"
            "settings = shared.load_settings(Path('receiver.toml'))\n"
            "with shared.acting(settings) as (store, who):\n"
            "    store.write(lambda tx: None)\n"
            "    files = [path for path in Path().iterdir() if '.db' in path.name]\n"
            "    print(who, os.getuid(), os.getgid(), os.getgroups(),\n"
            "        len(files), {path.stat().st_uid for path in files})\n"
        )

        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "SUDO_USER": "ada"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    expected = f"ada as root {nobody} {nobody} [{nobody}] 4 {{{nobody}}}\n"
    assert (done.stdout, done.stderr) == (expected, "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_what_a_one_file_program_unpacked_for_root_is_left_to_the_owner_it_becomes() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        unpacked = folder / "unpacked"
        (unpacked / "data").mkdir(parents=True)
        (unpacked / "data" / "sender.toml").write_text("read me")
        for path in (unpacked, unpacked / "data", unpacked / "data" / "sender.toml"):
            path.chmod(0o700)
        os.chmod(folder, 0o755)
        (folder / "receiver.db").touch()
        os.chown(folder / "receiver.db", 65534, 65534)
        program = (
            "import sys; from pathlib import Path\n"
            "from receiver.caller import become_owner\n"
            f"sys._MEIPASS = {str(unpacked)!r}\n"
            f"become_owner(Path({str(folder / 'receiver.db')!r}))\n"
            "print(Path(sys._MEIPASS, 'data', 'sender.toml').read_text())\n"
        )

        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    assert (done.stdout, done.stderr) == ("read me\n", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_what_the_owner_may_not_read_of_the_program_is_imported_before() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, installed = Path(name), Path(name, "installed")
        for package in ("receiver", "store"):
            shutil.copytree(ROOT / package, installed / package)
        installed.chmod(0o700)
        os.chmod(folder, 0o755)
        (folder / "receiver.db").touch()
        os.chown(folder / "receiver.db", 65534, 65534)
        program = (
            "import os; from pathlib import Path\n"
            "from receiver.caller import become_owner\n"
            f"become_owner(Path({str(folder / 'receiver.db')!r}))\n"
            "from receiver import readers, send_email, send_http\n"
            "print(os.getuid(), os.access(readers.__file__, os.R_OK))\n"
        )

        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    assert (done.stdout, done.stderr) == ("65534 False\n", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_check_as_root_judges_as_the_owner_who_will_serve() -> None:
    nobody = 65534
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        configure(folder, CONFIG.replace("env:GITHUB", "file:secret"))
        Store.create(folder / "receiver.db", Clock()).close()
        for path in (folder, *folder.iterdir()):
            os.chown(path, nobody, nobody)
        (folder / "secret").write_text("for root alone")
        (folder / "secret").chmod(0o600)

        code, out, _ = ended(receiver("check", cwd=folder))
        served, said, wrong = ended(receiver("serve", cwd=folder))

    assert (code, served) == (2, 2)
    assert "judged as nobody, whom" in out
    assert "sources.github.secrets[0]" in out
    assert "may not be read by this user" in out
    assert said.startswith("going on as nobody, whom ")
    assert "may not be read by this user" in wrong
