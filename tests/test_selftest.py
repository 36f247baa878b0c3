"""The self-test kills a real server, tells what is left, and leaves nothing behind."""

import re
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

import cli
from receiver import machine, selftest
from receiver.commands.shared import now_ms
from receiver.demo import RULES
from receiver.playground import Answer

DATABASE = "receiver.db"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kills, the second by the server itself."""
    monkeypatch.setattr(selftest, "KILLS", 2)
    monkeypatch.setattr(selftest, "OWN_EVERY", 2)
    monkeypatch.setattr(machine, "file_system", lambda path: "ext4")


def run(folder: Path) -> tuple[int, list[str]]:
    lines: list[str] = []
    return selftest.run(lines.append, now_ms, folder / DATABASE, seed=1), lines


def bad(lines: list[str]) -> list[str]:
    return [re.split(r"  +", line)[0] for line in lines if line.endswith("BAD")]


def test_what_was_answered_is_found_after_kills_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine's temporary folder is not where the database is.
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")

    code, lines = run(tmp_path)

    assert (code, bad(lines)) == (0, []), lines
    told = "\n".join(lines)
    assert "1 at random moments, 1 between an effect and its commit" in told
    assert re.search(r"answered 2xx +[1-9]\d* events?, 0 lost", told)
    assert re.search(r"made durable +[\d.]+ ms in the middle", told)
    assert lines[-1] == selftest.LIES
    assert list(tmp_path.iterdir()) == []


def test_an_event_that_was_answered_and_is_gone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = selftest.Sender.finish

    def finish_with_one_more(sender: selftest.Sender, seconds: float) -> None:
        finish(sender, seconds)
        sender.acknowledged.add("evt_lost")

    monkeypatch.setattr(selftest.Sender, "finish", finish_with_one_more)

    code, lines = run(tmp_path)

    assert (code, bad(lines)) == (1, ["answered 2xx", "granted"])


def test_an_event_that_is_done_a_second_time_is_told() -> None:
    sender = selftest.Sender(None, 1)  # type: ignore[arg-type]  # nothing is sent

    for _ in range(2):
        sender._note(1_001, Answer(200, "done"))

    assert sender.surprises == ["evt_1001: was done, then lost and done again"]


def test_amounts_that_are_not_granted_once_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = RULES.replace("amount = 100 }", "amount = 101 }")
    monkeypatch.setattr(selftest, "RULES", wrong)

    code, lines = run(tmp_path)

    assert (code, bad(lines)) == (1, ["granted"])


@pytest.mark.parametrize("kind", ["tmpfs", "nfs4"])
def test_a_file_system_that_keeps_nothing_fails_the_test(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "file_system", lambda path: kind)

    assert not selftest._file_system(tmp_path).well


def test_a_folder_that_can_not_be_written_is_one_line(tmp_path: Path) -> None:
    config = tmp_path / "receiver.toml"
    config.write_text('database = "missing/receiver.db"\n[sources]\n')

    result = CliRunner().invoke(cli.main, ["selftest", "--config", str(config)])

    assert result.exit_code != 0
    assert "missing" in result.output
    assert "Traceback" not in result.output
