"""The doctor finds each cause that is made for it, says what to do, and ticks only what it saw."""

import http.server
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from receiver import doctor, machine
from receiver.doctor import Machine
from receiver.machine import Site, Syncs, Unit
from store import secrets
from store.rejections import skews
from tests.command import Command, Ran
from tests.conftest import CONFIG, SECRETS, World

UNIT = Unit(True, "always", "journal", 0.4)
WELL = Machine(Syncs(0.5, 1.0), {}, UNIT, True)


@pytest.fixture
def receiver(world: World, monkeypatch: pytest.MonkeyPatch) -> Command:
    """On a set-up that is well but for the app's tables, which every World has."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    finds(monkeypatch, WELL)
    monkeypatch.setattr("receiver.facts.is_served", lambda path: True)
    monkeypatch.setattr("receiver.facts.workers", lambda path: ())
    monkeypatch.setattr("receiver.machine.file_system", lambda path: "ext4")
    # Of the other config, whose names would be lost.
    world.store.write(lambda tx: tx.db.execute("delete from receiver_names"))
    world.configure(CONFIG.split("[sources.connect]")[0] + RULE)
    world.link()
    world.invoice("evt_1", "in_1")
    command = Command(world, monkeypatch)
    command("backup")
    return command


RULE = """
[[rules]]
operation = "initial-credit-grant"
source = "stripe"
on = ["invoice.paid"]
subject = "data.object.id"
customer = "data.object.customer"
grant = { unit = "credits", amount = 100 }
"""


def finds(monkeypatch: pytest.MonkeyPatch, found: Machine) -> None:
    monkeypatch.setattr(doctor, "ask", lambda settings, offline: found)


def told(ran: Ran, level: str) -> str:
    lines = ran.out.splitlines()
    return "\n".join(line for line in lines if line.startswith(level))


def test_a_set_up_that_is_well_has_no_problem(receiver: Command) -> None:
    ran = receiver("doctor")

    assert (ran.code, told(ran, "problem"), ran.err) == (0, "", ""), ran.out


def test_the_checklist_is_earned(world: World, receiver: Command) -> None:
    world.configure(Path(receiver.config).read_text().replace('run = "off"', 'run = "inside"'))
    (found,) = receiver.objects("doctor")
    assert [tick["item"] for tick in found["checklist"] if not tick["done"]] == []
    world.store.write(lambda tx: tx.db.execute("drop trigger receiver_ledger_guard"))
    Path(receiver.config).write_text(
        Path(receiver.config)
        .read_text()
        .replace("livemode = false", "livemode = false\ntolerance_s = 3600")
    )

    ran = receiver("doctor")

    assert ran.code == 1
    for item in ("tolerance", "unique key", "one transaction"):
        assert f"[ ] {item}" in ran.out


TIMED = """
[sources.billing]
secrets = ["env:GITHUB"]
scheme = { sig = "header:S", algo = "sha256", enc = "hex", signed = "{ts}.{body}", ts = "header:T" }
"""


@pytest.mark.parametrize(
    ("config", "box", "tolerance"),
    [
        (TIMED, "[x] tolerance", "300 s, in both directions"),
        (
            TIMED.replace('"header:T"', '"header:T", tolerance_s = false'),
            "[ ] tolerance: any age is taken by billing, though a time is signed: set tolerance_s",
            "none: a time is signed, and any is taken",
        ),
        (
            TIMED.replace('{ts}.{body}", ts = "header:T"', '{body}"'),
            "[x] tolerance: no time is signed by billing",
            None,
        ),
        # Its sender documents no age; the source may have one all the same.
        (
            '[sources.billing]\nscheme = "zendesk"\nsecrets = ["env:GITHUB"]\ntolerance_s = 60\n',
            "[x] tolerance",
            "60 s, in both directions",
        ),
    ],
)
def test_how_old_a_delivery_may_be_is_told(
    world: World, receiver: Command, config: str, box: str, tolerance: str | None
) -> None:
    configured(config)(world, world.folder)

    assert box in receiver("doctor").out.replace("  ", ": "), receiver("doctor").out
    rows = dict(
        line.split("  ", 1)
        for line in receiver("sources", "show", "billing").out.splitlines()
        if "  " in line
    )
    assert rows.get("tolerance", "").strip() == (tolerance or "")


def test_a_file_that_others_may_read_still_has_one_transaction(
    world: World, receiver: Command
) -> None:
    (world.folder / "receiver.db").chmod(0o644)

    ran = receiver("doctor")

    assert "open to everybody" in told(ran, "problem")
    assert "[x] one transaction" in ran.out


Cause = Callable[[World, Path], object]


def sql(statement: str) -> Cause:
    return lambda world, folder: world.store.write(lambda tx: tx.db.execute(statement))


def configured(text: str) -> Cause:
    def append(world: World, folder: Path) -> None:
        with (folder / "receiver.toml").open("a") as file:
            file.write(text)

    return append


def damage_backup(world: World, folder: Path) -> None:
    (path,) = (folder / "backups").glob("*.db")
    os.truncate(path, 5000)


def age_backup(world: World, folder: Path) -> None:
    (path,) = (folder / "backups").glob("*.db")
    old_s = world.clock() / 1000 - 3 * 86_400
    os.utime(path, (old_s, old_s))


def remove_backup(world: World, folder: Path) -> None:
    for path in (folder / "backups").iterdir():
        path.unlink()


def open_secret(world: World, folder: Path) -> None:
    (folder / "secret").write_text("whsec_of_the_file")
    (folder / "secret").chmod(0o644)
    text = (folder / "receiver.toml").read_text()
    (folder / "receiver.toml").write_text(text.replace("env:STRIPE", "file:secret"))


def rotate(world: World, folder: Path) -> None:
    text = (folder / "receiver.toml").read_text()
    two = text.replace('["env:STRIPE"]', '["env:STRIPE", "env:GITHUB"]')
    (folder / "receiver.toml").write_text(two)
    at = world.clock()
    world.store.write(lambda tx: secrets.used(tx, "stripe", "env:STRIPE", at, 1))


def rotate_half(world: World, folder: Path) -> None:
    rotate(world, folder)
    at = world.clock()
    world.store.write(lambda tx: secrets.used(tx, "stripe", "env:GITHUB", at, 1))


def rotate_whole(world: World, folder: Path) -> None:
    rotate(world, folder)
    at = world.clock() + 2 * 86_400_000
    world.store.write(lambda tx: secrets.used(tx, "stripe", "env:GITHUB", at, 1))


def expired(skew_s: int) -> Cause:
    def run(world: World, folder: Path) -> None:
        statement = """
            insert into receiver_rejected (source, reason, request_id, received_ms, method,
              address, header_names, detail, skew_s, url, headers, body)
            values ('stripe', 'expired', 'r', ?, 'POST', '', '[]', '', ?, '', '[]', x'')
        """
        world.store.write(lambda tx: tx.db.execute(statement, (world.clock(), skew_s)))
        assert world.store.write(lambda tx: skews(tx, 0))

    return run


@pytest.mark.parametrize(
    ("cause", "level", "words"),
    [
        (sql("update receiver_balances set balance = 7"), "problem", "add up to 100"),
        (sql("drop trigger receiver_ledger_no_update"), "problem", "receiver_ledger_no_update is"),
        (
            sql("create trigger mine after insert on receiver_events begin select 1; end"),
            "warning",
            "trigger mine",
        ),
        (sql("create table b (a references workspaces (plan))"), "warning", "foreign key"),
        (lambda world, folder: (folder / "receiver.db").chmod(0o644), "problem", "chmod o="),
        (lambda world, folder: (folder / "receiver.toml").chmod(0o666), "problem", "chmod o-w"),
        (open_secret, "problem", "chmod 600"),
        (damage_backup, "problem", "run `receiver backup` now"),
        (age_backup, "warning", "that is long ago"),
        (remove_backup, "warning", "there is none"),
        (rotate_whole, "warning", "env:STRIPE proved nothing"),
        (rotate_half, "warning", "finish the rotation"),
        (expired(-900), "problem", "this machine's clock is behind"),
        (expired(900), "warning", "came up to 900 s old"),
        (
            configured('[sources.quiet]\nscheme = "github"\nsecrets = ["env:GITHUB"]\n'),
            "warning",
            "sources.quiet: nothing ever came",
        ),
        (
            sql("insert into receiver_names values ('operation', 'old-name', 1)"),
            "warning",
            "old-name",
        ),
        (sql("update receiver_events set same_body_as = 1"), "warning", "under an id that nobody"),
    ],
)
def test_each_cause_is_found_with_what_to_do(
    world: World, receiver: Command, cause: Cause, level: str, words: str
) -> None:
    cause(world, world.folder)

    ran = receiver("doctor")

    assert words in told(ran, level), ran.out
    assert ran.code == (level == "problem")


@pytest.mark.parametrize(
    ("run", "served", "workers", "words"),
    [
        (
            "off",
            False,
            (),
            "server: none runs on the database, so nothing is received: `receiver s",
        ),
        ("separate", True, (), 'worker: none runs, but worker.run is "separate": `receiver work`'),
        ("inside", True, (), "worker: the server runs without a worker, which is not what"),
        ("separate", True, ("inside", "separate"), "worker: the server works itself, which is not"),
        ("off", True, ("inside",), "worker: the server works itself, which is not what worker.run"),
        ("off", True, ("separate",), 'worker: one runs apart, but worker.run is "off": stop it'),
    ],
)
def test_processes_that_are_not_as_the_config_says_are_told(
    receiver: Command,
    monkeypatch: pytest.MonkeyPatch,
    run: str,
    served: bool,
    workers: tuple[str, ...],
    words: str,
) -> None:
    path = Path(receiver.config)
    path.write_text(path.read_text().replace('run = "off"', f'run = "{run}"'))
    wanted = () if run == "off" else (run,)
    monkeypatch.setattr("receiver.facts.workers", lambda path: wanted)
    assert words not in receiver("doctor").out

    monkeypatch.setattr("receiver.facts.is_served", lambda path: served)
    monkeypatch.setattr("receiver.facts.workers", lambda path: workers)

    assert words in told(receiver("doctor"), "warning")


def test_a_secret_that_is_still_to_come_into_use_is_not_to_be_taken_out(
    world: World, receiver: Command
) -> None:
    rotate(world, world.folder)

    assert "take" not in told(receiver("doctor"), "warning")


@pytest.mark.parametrize(
    ("found", "level", "words"),
    [
        (Machine(Syncs(80, 200), {}, UNIT, True), "warning", "slow"),
        (Machine(Syncs(0.001, 0.01), {}, UNIT, True), "warning", "unsafe"),
        (Machine(Syncs(1, 1), {}, None, True), "warning", "no receiver.service"),
        (
            Machine(Syncs(1, 1), {}, Unit(False, "no", "journal", 9.6), True),
            "problem",
            "Restart=no",
        ),
        (Machine(Syncs(1, 1), {}, UNIT, False), "problem", "timedatectl set-ntp"),
        (Machine(Syncs(1, 1), {"u": Site(problem="refused")}, UNIT, True), "warning", "refused"),
        (Machine(Syncs(1, 1), {"u": Site(tls_problem="expired")}, UNIT, True), "problem", "TLS"),
        (
            Machine(Syncs(1, 1), {"u": Site(301, "https://w.example")}, UNIT, True),
            "problem",
            "redirects to https://w.example",
        ),
        (Machine(Syncs(1, 1), {"u": Site(200)}, UNIT, True), "problem", "not by Receiver"),
        (
            Machine(
                Syncs(1, 1), {"u": Site(405, None, True, 1_800_000_000 + 5 * 86_400)}, UNIT, True
            ),
            "warning",
            "5 days",
        ),
        (Machine(Syncs(1, 1), {"u": Site(405, None, True)}, UNIT, True), "fine", "reaches a"),
    ],
)
def test_what_the_machine_says_is_told(
    receiver: Command, monkeypatch: pytest.MonkeyPatch, found: Machine, level: str, words: str
) -> None:
    finds(monkeypatch, found)

    assert words in told(receiver("doctor"), level)


@pytest.mark.parametrize(
    ("kind", "level"),
    [("nfs4", "problem"), ("fuse.sshfs", "problem"), ("tmpfs", "problem"), ("overlay", "warning")],
)
def test_a_file_system_that_can_not_hold_it_is_told(
    receiver: Command, monkeypatch: pytest.MonkeyPatch, kind: str, level: str
) -> None:
    monkeypatch.setattr("receiver.machine.file_system", lambda path: kind)

    assert "database: " in told(receiver("doctor"), level)


def test_a_config_with_problems_is_told_as_check_tells_it(receiver: Command) -> None:
    Path(receiver.config).write_text("nonsense = 1")

    ran = receiver("doctor")

    assert ran.code == 2
    assert "nonsense" in ran.out
    assert "[x]" not in ran.out


def test_nothing_secret_is_shown(world: World, receiver: Command) -> None:
    open_secret(world, world.folder)

    ran = receiver("doctor")

    assert not any(value in ran.out for value in (*SECRETS.values(), "whsec_of_the_file"))


# What is asked of the machine


class Answering(http.server.BaseHTTPRequestHandler):
    """A proxy that answers as its server says."""

    answer: tuple[int, dict[str, str]] = (405, {"X-Request-Id": "r-1"})

    def do_GET(self) -> None:
        status, headers = self.answer
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[str]:
    server = http.server.HTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_url_that_reaches_a_receiver_is_known_by_its_answer(
    site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.ask_site(site, "stripe") == Site(405, None, True)
    monkeypatch.setattr(Answering, "answer", (301, {"Location": "https://www.example.com/"}))
    assert machine.ask_site(site, "stripe") == Site(301, "https://www.example.com/", False)
    https = machine.ask_site(site.replace("http:", "https:"), "stripe")
    assert https.tls_problem is not None
    assert machine.ask_site("http://127.0.0.1:1", "stripe").problem is not None
    assert machine.ask_site("https://no.such.host.invalid", "stripe").problem is not None


def test_the_disk_is_timed_and_left_as_it_was(tmp_path: Path) -> None:
    syncs = machine.sync_times(tmp_path)

    assert 0 < syncs.median_ms <= syncs.longest_ms
    assert list(tmp_path.iterdir()) == []


def test_the_kind_of_a_file_system_is_that_of_the_nearest_mount() -> None:
    assert machine.file_system(Path("/proc/self/status")) == "proc"
    assert machine.file_system(Path("/")) != ""


def test_a_machine_without_systemd_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")

    assert machine.unit() is None
    assert machine.clock_is_set() is None


def test_the_unit_is_read_from_what_systemctl_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(
        tmp_path / "systemctl",
        "LoadState=loaded\nActiveState=active\nUser=app\nRestart=always\nStandardError=inherit\n",
    )
    script(tmp_path / "systemd-analyze", "Overall exposure level for receiver.service: 1.1 OK\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    assert machine.unit() == Unit(True, "always", "inherit", 1.1)


def script(path: Path, printed: str) -> None:
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{printed}END\n")
    path.chmod(0o755)
