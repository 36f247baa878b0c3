"""The demo tells the truth, and leaves nothing behind however it ends."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import cli
from receiver import demo
from receiver.commands.shared import now_ms
from receiver.commands.trying import program
from store import inbox, ledger
from store.database import snapshot

ROOT = Path(__file__).parents[1]
SECONDS_MAX = 30


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the demo makes its temporary folder."""
    made = tmp_path / "temporary"
    made.mkdir()
    monkeypatch.setenv("TMPDIR", str(made))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return made


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A working directory whose own cli.py must not be taken for ours."""
    made = tmp_path / "elsewhere"
    made.mkdir()
    (made / "cli.py").write_text("raise SystemExit('the wrong cli.py')")
    return made


def start(elsewhere: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "cli", "demo", *options],
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(elsewhere: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "cli", *command],
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )


def processes_in(folder: Path) -> list[str]:
    """The command lines of running processes that name the folder."""
    return [line for line in command_lines() if str(folder) in line]


def command_lines() -> Iterator[str]:
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield each.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            # It has ended meanwhile.
            continue


def table(lines: list[str]) -> list[list[str]]:
    """The cells of each check: number or '', step, expected, happened, verdict."""
    rows = [re.split(r"\s{2,}", line[2:].strip()) for line in lines if is_check(line)]
    numbers = [line[0].strip() for line in lines if is_check(line)]
    return [[number, *cells] for number, cells in zip(numbers, rows, strict=True)]


def is_check(line: str) -> bool:
    return line.endswith(("  ok", "  DIFFERENT"))


def test_the_whole_story_comes_out_as_expected(folder: Path, elsewhere: Path) -> None:
    started = time.monotonic()

    with start(elsewhere) as child:
        out, err = child.communicate(timeout=SECONDS_MAX)

    rows = table(out.splitlines())
    assert (child.returncode, err) == (0, "")
    assert time.monotonic() - started < SECONDS_MAX
    assert [row[0] for row in rows if row[0]] == list("12345678")
    assert all(len(row) == 5 and row[2] == row[3] for row in rows)
    assert re.search(rf"\b{len(rows)} checks, all as expected", out)
    assert "receiver init" in out
    # What is parked went with the folder.
    assert "links add" not in out
    assert processes_in(folder) == []
    assert list(folder.iterdir()) == []


def test_it_fits_on_one_screen_of_80_columns(folder: Path) -> None:
    lines: list[str] = []

    assert demo.run(lines.append, now_ms, keep=False) == 0

    assert max(len(line) for line in lines) <= 80
    assert len(lines) <= 32
    assert all(line.isascii() and line.isprintable() for line in lines)


def test_what_is_said_to_do_next_can_be_done(folder: Path) -> None:
    lines: list[str] = []

    assert demo.run(lines.append, now_ms, keep=True, program="/venv/bin/receiver") == 0
    (fix,) = [line.partition(": ")[2] for line in lines if "To apply what is parked" in line]
    words = shlex.split(fix.replace("WORKSPACE", "acme"))
    done = CliRunner().invoke(cli.main, words[1:])

    assert words[0] == "/venv/bin/receiver"
    assert "  /venv/bin/receiver init " in "\n".join(lines)
    assert "1 parked event was released: 1 done" in done.stdout, done.stderr


def test_the_command_is_named_as_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bin/my receiver", "demo"])
    monkeypatch.setenv("PATH", "/nowhere")

    assert program() == f"'{Path.cwd()}/bin/my receiver'"


def test_a_rule_that_grants_99_is_found(folder: Path) -> None:
    lines: list[str] = []
    rules = demo.RULES.replace("amount = 100", "amount = 99")

    code = demo.run(lines.append, now_ms, keep=False, rules=rules)

    differing = {row[1]: row[3] for row in table(lines) if row[4] == "DIFFERENT"}
    assert code == 1
    assert differing == {
        "then the link": "200 done, balance 99",
        "kill -9 before commit": "99 made, no answer",
        "do the books balance?": "balance 297, ledger 297",
    }
    assert any("3 DIFFERENT" in line for line in lines)


def test_rules_that_grant_once_for_each_event_are_found(folder: Path) -> None:
    lines: list[str] = []
    rules = demo.RULES.replace('subject = "data.object.id"\ncustomer', "customer")

    code = demo.run(lines.append, now_ms, keep=False, rules=rules)

    assert rules != demo.RULES
    assert code == 1
    assert "second event for it" in {row[1] for row in table(lines) if row[4] == "DIFFERENT"}


def test_a_server_that_is_not_killed_is_found(folder: Path) -> None:
    lines: list[str] = []
    rules = demo.RULES.replace('on = ["invoice.paid"]', 'on = ["nothing"]')

    code = demo.run(lines.append, now_ms, keep=False, rules=rules)

    differing = {row[1]: row[3] for row in table(lines) if row[4] == "DIFFERENT"}
    assert rules != demo.RULES
    assert code == 1
    assert differing["kill -9 before commit"] == "nothing made, 200 done"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_when_it_is_interrupted(
    folder: Path, elsewhere: Path, number: signal.Signals
) -> None:
    with start(elsewhere) as child:
        assert child.stdout is not None
        while not is_check(child.stdout.readline().rstrip("\n")):
            assert child.poll() is None
        running = processes_in(folder)
        child.send_signal(number)
        out, err = child.communicate(timeout=SECONDS_MAX)

    assert running != []
    assert child.returncode == 130
    assert "Traceback" not in err
    assert "receiver init" not in out
    assert processes_in(folder) == []
    assert list(folder.iterdir()) == []


def test_nothing_is_left_when_the_server_can_not_start(folder: Path) -> None:
    rules = demo.RULES.replace('call = "power_failure"', 'call = "missing"')

    with pytest.raises(demo.PlaygroundError, match=r"ended while starting: .*no function missing"):
        demo.run(lambda line: None, now_ms, keep=False, rules=rules)

    assert processes_in(folder) == []
    assert list(folder.iterdir()) == []


def test_keep_leaves_a_folder_where_the_command_shown_applies_what_is_parked(
    folder: Path, elsewhere: Path
) -> None:
    lines: list[str] = []
    demo.run(lines.append, now_ms, keep=True)
    (kept,) = folder.iterdir()
    (fix,) = [line.partition(": receiver ")[2] for line in lines if line.startswith("To apply")]

    fixed = run(elsewhere, *fix.split(), "--config", str(kept / "receiver.toml"))

    with snapshot(kept / "receiver.db") as seen:
        assert ledger.balance(seen, "WORKSPACE", "credits") == 100
        assert inbox.listed(seen, state="parked") == []
    assert fixed.returncode == 0
    assert (kept / "server.log").read_text()
    assert any(f"-c {kept}/receiver.toml" in line for line in lines)
    assert processes_in(folder) == []
