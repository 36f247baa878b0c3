"""What the log says, where it goes, and what it never holds."""

import errno
import io
import json
import logging
import os
import queue
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from receiver import logs
from receiver.logs import FIELD_CHARS_MAX, LINE_CHARS_MAX, Lines, field, is_journal, log
from tests.conftest import Logged


@pytest.fixture
def stream(every_line: TextIO) -> Iterator[io.StringIO]:
    opened = io.StringIO()
    before = logging.getLogger().handlers[:]
    logs.configure(opened, {})
    yield opened
    logs.lines.open(every_line, journal=False)
    logging.getLogger().handlers[:] = before


@pytest.fixture
def journal(every_line: TextIO) -> Iterator[io.StringIO]:
    opened = io.StringIO()
    logs.lines.open(opened, journal=True)
    yield opened
    logs.lines.open(every_line, journal=False)


def flushed(stream: io.StringIO) -> list[str]:
    logs.lines.flush()
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("evt_1", "evt_1"),
        ("", '""'),
        ("a b", '"a b"'),
        ('"', r'"\""'),
        ("a\nb\x1b[0m", r'"a\nb\u001b[0m"'),
        ("\u202e", r'"\u202e"'),
        ("x" * 300, "x" * 200 + "..."),
        (1.2, "1.2"),
        (("a:1", "b:2"), "a:1,b:2"),
    ],
)
def test_a_value_in_the_log_is_one_bounded_word(value: object, shown: str) -> None:
    assert field(value) == shown


def test_lines_for_the_journal_are_json_behind_their_priority(journal: io.StringIO) -> None:
    log.info("delivery", source="stripe", keys=["grant:in_1"], ms=1.5)
    log.warning("refused", count=3)
    log.error("failed")
    log.critical("stopped")

    lines = flushed(journal)
    assert [line[:3] for line in lines] == ["<6>", "<4>", "<3>", "<2>"]
    first = json.loads(lines[0][3:])
    assert first.pop("at").endswith("Z")
    assert first == {
        "level": "info",
        "event": "delivery",
        "source": "stripe",
        "keys": ["grant:in_1"],
        "ms": 1.5,
    }


@pytest.mark.parametrize("text", ["a\nb", "\x1b[2J", "\x9b31m", "\x7f", "\u202e", "\u2028", "<3>a"])
def test_nothing_in_a_value_can_forge_a_line_or_steer_a_terminal(
    journal: io.StringIO, text: str
) -> None:
    log.info("delivery", id=text)

    (line,) = flushed(journal)
    assert line.startswith("<6>{")
    assert all(" " <= character <= "~" for character in line)
    assert json.loads(line[3:])["id"] == text


@pytest.mark.parametrize("text", ["evt_1", "a\nb", "\x9b31m\x7f", "\u2028", "x" * 100_000])
@pytest.mark.parametrize("as_json", [True, False])
def test_the_short_way_of_a_delivery_says_the_same_as_the_long_one(
    journal: io.StringIO, text: str, as_json: bool
) -> None:
    logs.lines.journal = as_json
    one = logs.Delivered("now", "stripe", "acct_1", text, text, "event-7", ("a:1",), "done", "r", 1)
    fields = {name: getattr(one, name) for name in one.__struct_fields__}
    del fields["at"], fields["events"]

    logs.delivered(one)
    log.info("delivery", **fields)

    short, long = (line[3:] if as_json else line for line in flushed(journal))
    assert all(" " <= character <= "~" for character in short)
    if as_json:
        assert json.loads(short) | {"at": ""} == json.loads(long) | {"at": ""}
    else:
        assert short.split(" ", 1)[1] == long.split(" ", 1)[1]


def test_a_line_and_its_values_are_bounded(journal: io.StringIO) -> None:
    log.info("delivery", id="x" * 1_000_000)
    log.info("delivery", **{f"k{number}": "y" * 199 for number in range(50)})

    first, second = flushed(journal)
    assert json.loads(first[3:])["id"] == "x" * FIELD_CHARS_MAX + "..."
    assert json.loads(second[3:])["cut"] is True
    assert len(second) <= LINE_CHARS_MAX + 3


def test_lines_for_a_terminal_are_words(logged: Logged) -> None:
    log.info("listening %s", "http://127.0.0.1:1")
    log.warning("a\x1b[2Jb", key="a b")

    one, two = logged.text.splitlines()
    assert one.endswith("Z INFO listening http://127.0.0.1:1")
    assert two.endswith(' WARNING a\\x1b[2Jb key="a b"')


def test_a_stream_is_the_journal_only_while_it_is_the_one_the_manager_named() -> None:
    reading, writing = os.pipe()
    status = os.fstat(writing)
    named = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}

    with open(reading) as other, open(writing, "w") as stream, open(os.devnull) as elsewhere:
        assert is_journal(stream, named)
        assert not is_journal(elsewhere, named)
        assert not is_journal(stream, {})
        assert not is_journal(io.StringIO(), named)
        assert other.readable()


def test_a_stream_that_fails_stops_nothing() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "no space is left")

    lines = Lines()
    lines.open(Full(), journal=False)
    lines.error("not written")
    lines.close()


def test_a_log_that_nobody_reads_stops_nothing_and_goes_on_when_it_is_read() -> None:
    lines = Lines()
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as read, open(writer, "w") as written:
        lines.open(written, journal=False)
        told = [f"{number:<500}\n" for number in range(3 * logs.LINES_UNREAD_MAX)]

        for line in told:
            lines.error(line)

        seen = b""
        while not seen.endswith(b"\n") or b"are lost" not in seen:
            seen += read.read(65_536)
            lines.flush()
        lines.close()

    *kept, lost = seen.decode().splitlines(keepends=True)
    assert kept == told[: len(kept)]
    assert len(kept) > logs.LINES_UNREAD_MAX
    assert lost.endswith(f" count={len(told) - len(kept)}\n")


def test_what_others_log_is_a_line_without_the_exceptions_text(stream: io.StringIO) -> None:
    try:
        raise ValueError("4242 SECRET")
    except ValueError:
        logging.getLogger("founder").exception("sync failed for %s", "a\nb")
    logging.getLogger("founder").debug("not this")

    (line,) = flushed(stream)
    assert " ERROR sync failed for a\\nb logger=founder error=ValueError at=test_logs.py:" in line
    assert "SECRET" not in line


def test_warnings_and_errors_reach_the_standard_library_once_and_with_their_fields(
    stream: io.StringIO, caplog: pytest.LogCaptureFixture
) -> None:
    log.info("delivery", id="1")
    log.warning("refused 100%", source="stripe", count=2)

    assert len(flushed(stream)) == 2
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "refused 100% source=stripe count=2"
    # The same for the same thing: what a tracker groups by.
    assert record.msg == "refused 100%% source=%(source)s count=%(count)s"
    assert record.__dict__["receiver"] == {"event": "refused 100%", "source": "stripe", "count": 2}


def test_a_hook_that_raises_stops_nothing(stream: io.StringIO) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("the tracker is down")

    logs.LOGGER.handlers[:] = [Broken()]
    try:
        log.error("failed", id="1")
    finally:
        logs.LOGGER.handlers.clear()

    assert flushed(stream)[0].endswith(" ERROR failed id=1")


def test_the_hook_for_an_error_tracker_in_the_readme_works(stream: io.StringIO) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
        if "Tracker" in block
    ]
    told: queue.Queue[tuple[str, dict[str, object]]] = queue.Queue()
    names: dict[str, object] = {}
    logs.LOGGER.handlers.clear()
    try:
        exec(code, names)
        names["report"] = lambda text, fields: told.put((text, fields))
        exec(code.partition("logger = ")[2].join(("logger = ", "")), names)
        log.info("delivery", id="1")
        log.error("failed", id="evt_1", error="ValueError")

        text, fields = told.get(timeout=20)
    finally:
        logs.LOGGER.handlers.clear()
    assert text == "failed id=evt_1 error=ValueError"
    assert fields == {"event": "failed", "id": "evt_1", "error": "ValueError"}
    assert told.empty()
