"""Output: tables that fit, times with their age, nothing that could steer the terminal."""

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from receiver import console
from tests.conftest import NOW_MS

ROOT = Path(__file__).parents[1]
PATIENCE_S = 30


@pytest.fixture
def _kathmandu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A local time that is not UTC, nor whole hours from it."""
    monkeypatch.setenv("TZ", "NPT-5:45")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def on_terminal(program: str, columns: int = 40, **environment: str) -> str:
    """What a program writes to a terminal of that width."""
    ours, theirs = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-c", f"from receiver import console\n{program}"],
        stdout=theirs,
        cwd=ROOT,
        env=clean | {"COLUMNS": str(columns)} | environment,
    )
    os.close(theirs)
    written = b""
    try:
        while read := os.read(ours, 4096):
            written += read
    except OSError:
        # The other end is closed.
        pass
    finally:
        os.close(ours)
    assert process.wait(timeout=PATIENCE_S) == 0
    return written.decode().replace("\r\n", "\n")


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


# Tables


def test_prose_at_the_end_is_cut_to_the_terminal() -> None:
    table = "console.print_table(['id', 'why'], [['evt_1', 'x' * 200], ['evt_2', 'short']], 'cut')"

    lines = without_colours(on_terminal(table)).splitlines()

    assert [len(line) for line in lines] == [10, 40, 12]
    assert lines[1].endswith("x…")


def test_prose_that_is_wrapped_goes_on_where_it_began() -> None:
    words = "a word that is " * 4 + "evt_" + "1" * 40
    table = f"console.print_table(['id', 'why'], [['evt_1', '{words}']], 'wrap')"

    lines = without_colours(on_terminal(table)).splitlines()

    assert [line[:7] for line in lines[1:]] == ["evt_1  ", *[" " * 7] * (len(lines) - 2)]
    assert " ".join(line[7:] for line in lines[1:]) == words
    assert max(len(line) for line in lines[:-1]) <= 40


@pytest.mark.parametrize("columns", [60, 40, 20])
def test_what_does_not_fit_goes_to_a_further_line_and_no_name_is_cut(columns: int) -> None:
    name, kind = "evt_1NirD82eZvKYlo2CdGJ4yBMi", "checkout.session.completed"
    table = f"console.print_table(['row', 'id', 'type'], [[1, '{name}', '{kind}'], [2, 'a', 'b']])"

    lines = without_colours(on_terminal(table, columns)).splitlines()

    assert lines[0].startswith("row")
    assert [line for line in lines if name in line]
    assert [line for line in lines if line.startswith("    ") and kind in line]
    assert lines[-1].strip() == "b"


def test_a_moment_is_its_age_where_the_line_is_short() -> None:
    table = (
        "at = console.when(1_800_000_000_000, 1_800_000_060_000)\n"
        "console.print_table(['when', 'what'], [[at, 'done'], [None, 'x']])"
    )

    assert without_colours(on_terminal(table, 30)).splitlines()[1:] == [
        "1 min ago  done",
        "-          x",
    ]
    assert ", 1 min ago  done" in without_colours(on_terminal(table, 80))


def test_wide_characters_count_twice() -> None:
    table = "console.print_table(['id', 'why'], [['ok', '語' * 30]], 'cut')"

    line = without_colours(on_terminal(table)).splitlines()[1]

    assert line.count("語") * 2 + len("…") + 2 + len("ok") <= 40
    assert line.count("語") > 15


def test_a_table_that_is_piped_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_table(["id", "why"], [["evt_1", "x" * 500]])

    assert "x" * 500 in capsys.readouterr().out


def test_nothing_stands_as_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_table(["a", "b"], [[None, 0]])

    assert capsys.readouterr().out == "a  b\n-  0\n"


def test_a_table_without_rows_has_its_headings(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_table(["a", "b"], [])

    assert capsys.readouterr().out == "a  b\n"


# Colours


def test_colours_are_for_terminals(capsys: pytest.CaptureFixture[str]) -> None:
    program = "console.print_table(['state'], [[console.state('done')]])"

    console.print_table(["state"], [[console.state("done")]])

    assert "\x1b[32mdone" in on_terminal(program)
    assert capsys.readouterr().out == "state\ndone\n"


def test_no_color_is_honoured() -> None:
    assert "\x1b" not in on_terminal("console.say('fine', 'green')", NO_COLOR="1")
    assert "\x1b" in on_terminal("console.say('fine', 'green')", NO_COLOR="")


# Text of strangers


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 語", "plain é 語"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202egnp", "\\u202egnp"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
    ],
    ids=ascii,
)
def test_what_does_not_print_is_escaped(text: str, shown: str) -> None:
    assert console.escape(text) == shown


def test_stored_text_reaches_no_line_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b[2J\nroot"

    console.say(hostile)
    console.warn(hostile)
    console.hint(hostile)
    console.print_table(["a"], [[hostile]])
    console.print_fields([("a", hostile), ("b", None)])
    console.print_json({"a": hostile, "b": "\u202e\x9b"})

    written = capsys.readouterr()
    assert "\x1b" not in written.out + written.err
    assert len(written.out.splitlines()) == 6
    assert written.out.isascii()
    assert json.loads(written.out.splitlines()[-1]) == {"a": hostile, "b": "\u202e\x9b"}


# Times


@pytest.mark.usefixtures("_kathmandu")
@pytest.mark.parametrize(
    ("passed_ms", "shown"),
    [
        (0, "2027-01-15 13:45:00, 0 s ago"),
        (59_999, "2027-01-15 13:44:00, 59 s ago"),
        (240_000, "2027-01-15 13:41:00, 4 min ago"),
        (7_200_000, "2027-01-15 11:45:00, 2 h ago"),
        (47 * 3_600_000, "2027-01-13 14:45:00, 47 h ago"),
        (48 * 3_600_000, "2027-01-13 13:45:00, 2 days ago"),
        (-90_000, "2027-01-15 13:46:30, in 1 min"),
    ],
)
def test_a_moment_is_local_and_has_its_age(passed_ms: int, shown: str) -> None:
    assert console.moment(NOW_MS - passed_ms, NOW_MS) == shown


@pytest.mark.parametrize("at_ms", [10**17, -(10**17), 253_402_300_799_999, -62_135_596_800_000])
def test_a_moment_that_no_calendar_has_is_still_shown(at_ms: int) -> None:
    assert console.moment(at_ms, NOW_MS)


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (1_023, "1023 B"),
        (1_024, "1.0 KiB"),
        (5_000_000, "4.8 MiB"),
        (82_500_000_000, "76.8 GiB"),
    ],
)
def test_sizes_are_told_in_one_unit(count: int, shown: str) -> None:
    assert console.size(count) == shown


def test_json_times_are_rfc_3339_with_milliseconds() -> None:
    assert console.rfc3339(NOW_MS + 7) == "2027-01-15T08:00:00.007Z"
    assert console.rfc3339(None) is None


@pytest.mark.usefixtures("_kathmandu")
@pytest.mark.parametrize(
    ("text", "at_ms"),
    [
        ("1800000000", NOW_MS),
        ("1800000000.25", NOW_MS + 250),
        ("2027-01-15T08:00:00Z", NOW_MS),
        ("2027-01-15T08:00:00.5+00:00", NOW_MS + 500),
        ("2027-01-15 03:00:00-05:00", NOW_MS),
        ("2027-01-15T13:45:00", NOW_MS),
        ("2027-01-15T09:00:00+01:30", NOW_MS - 1_800_000),
        ("90s", NOW_MS - 90_000),
        ("30m", NOW_MS - 1_800_000),
        ("5min", NOW_MS - 300_000),
        ("2h", NOW_MS - 7_200_000),
        ("7d", NOW_MS - 604_800_000),
        ("1w", NOW_MS - 604_800_000),
        ("2027-01-15", NOW_MS - 49_500_000),
    ],
)
def test_times_are_read_in_every_form_that_is_promised(text: str, at_ms: int) -> None:
    assert console.parse_time(text, NOW_MS) == at_ms


@pytest.mark.parametrize("text", ["", "yesterday", "2027-13-01T00:00:00Z", "-5", "1e9", "5y", "٣m"])
def test_what_is_no_time_is_refused_in_words(text: str) -> None:
    with pytest.raises(ValueError, match=r"write 2h, 3d, .* 2026-11-30T14:03:11Z"):
        console.parse_time(text, NOW_MS)
